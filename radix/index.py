"""Where the nodes of a tree are found: by the first hash of their run."""

from radix.hashing import HASH_NBYTES
from radix.node import SLOT_NBYTES, Node

_NUM_PARTS = 64


class Index:
    """First hash of a run -> node, over all attached nodes of a tree.

    In parts, by a byte of the hash: growing one dict of millions would stop everything else for a tenth of a second.
    """

    def __init__(self) -> None:
        # Several nodes under one key: blocks of one hash in different chains, which only forged hashes bring about.
        self._parts: list[dict[bytes, Node | tuple[Node, ...]]] = [{} for _ in range(_NUM_PARTS)]

    def walk(self, node: Node, hashes: bytes) -> tuple[Node, int, int]:
        """Query. How far the chain `hashes` is known below a root: (node, blocks of its run, blocks in all)."""
        parts = self._parts
        depth = num_blocks = 0
        while depth * SLOT_NBYTES == len(node.slots):
            start = num_blocks * HASH_NBYTES
            key = hashes[start : start + HASH_NBYTES]
            child = parts[key[0] % _NUM_PARTS].get(key) if key else None
            if isinstance(child, tuple):
                child = next((each for each in child if each.parent is node), None)
            if child is None or child.parent is not node:
                break
            node, depth = child, child.num_common_blocks(hashes, num_blocks)
            num_blocks += depth
        return node, depth, num_blocks

    def add(self, node: Node) -> None:
        """Changes state."""
        key = node.first_hash
        part = self._parts[key[0] % _NUM_PARTS]
        others = _as_tuple(part.get(key))
        part[key] = (*others, node) if others else node

    def discard(self, node: Node) -> None:
        """Changes state. Before the run's first block changes."""
        key = node.first_hash
        part = self._parts[key[0] % _NUM_PARTS]
        others = tuple(each for each in _as_tuple(part.pop(key)) if each is not node)
        if others:
            part[key] = others

    def check(self, nodes: set[Node]) -> None:
        """Query. Assert that exactly `nodes` are found."""
        found = [each for part in self._parts for value in part.values() for each in _as_tuple(value)]
        assert len(found) == len(nodes)
        assert set(found) == nodes
        assert all(node in _as_tuple(self._parts[node.first_hash[0] % _NUM_PARTS][node.first_hash]) for node in nodes)


def _as_tuple(value: Node | tuple[Node, ...] | None) -> tuple[Node, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)
