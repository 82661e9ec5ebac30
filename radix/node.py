"""The pieces of a prefix tree, and the values it answers with."""

import operator
from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from radix.hashing import HASH_NBYTES

_symbols = operator.attrgetter("symbols")


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks that are always reached together. A root's run is empty and is never evicted.

    A block costs 16 bytes of hash and 4 of slot here, never an object of its own.
    """

    hashes: bytearray  # HASH_NBYTES per block
    slots: "array[int]"  # u32 per block
    symbols: bytes  # of the run's first block; those of the others stay in their slots' headers
    parent: "Node | None"
    group: int  # slot size in bytes; victims compete within a group
    short: bool = False  # one block with fewer tokens than block_tokens: it never has children
    children: "dict[bytes, Node]" = field(default_factory=dict)  # keyed by the child's first hash
    order: "list[Node]" = field(default_factory=list)  # the children sorted by symbols
    pins: int = 0  # leases that end at or below this node, on detached nodes too
    last_used: int = 0  # the tree's logical tick; never older than a child's
    id: int = -1  # index into the tree's arrays; -1 while in none
    detached: bool = False  # left the tree: no match sees it. While pinned it still holds its slots, and its parent

    @property
    def first_hash(self) -> bytes:
        """Query. Key of this node in its parent."""
        return bytes(self.hashes[:HASH_NBYTES])

    @property
    def is_victim(self) -> bool:
        """Query. Whether the run may lose its tail: an unpinned leaf that is no root."""
        return not (self.children or self.pins or self.detached or self.parent is None)

    def path(self) -> "list[Node]":
        """Query. The nodes from the root down to this one."""
        nodes = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def link(self, child: "Node") -> None:
        """Changes state."""
        assert child.first_hash not in self.children
        self.children[child.first_hash] = child
        insort(self.order, child, key=_symbols)

    def unlink(self, child: "Node") -> None:
        """Changes state. KeyError on a node that is no child."""
        del self.children[child.first_hash]
        del self.order[self._place_of(child)]

    def replace_child(self, child: "Node", other: "Node") -> None:
        """Changes state. `other` begins with the same block as `child` and takes its place."""
        self.children[other.first_hash] = other
        self.order[self._place_of(child)] = other

    def _place_of(self, child: "Node") -> int:
        index = bisect_left(self.order, child.symbols, key=_symbols)
        while self.order[index] is not child:
            index += 1
        return index

    def neighbours(self, symbols: bytes) -> "tuple[Node | None, Node | None]":
        """Query. The last child whose symbols are below `symbols`, and the first whose are not.

        No other child shares more leading bytes with `symbols` than the better of these two.
        """
        index = bisect_left(self.order, symbols, key=_symbols)
        below = self.order[index - 1] if index else None
        return below, self.order[index] if index < len(self.order) else None

    def split(self, at: int, symbols_below: bytes) -> "Node":
        """Changes state. Cut before block `at`; return the new upper node, self keeps the lower part.

        Leases that end here so stay where they end. `symbols_below` are those of block `at`.
        """
        assert self.parent is not None
        assert 0 < at < len(self.slots)
        upper = Node(
            self.hashes[: at * HASH_NBYTES], self.slots[:at], self.symbols, self.parent, self.group,
            pins=self.pins, last_used=self.last_used,
        )  # fmt: skip
        self.parent.replace_child(self, upper)
        del self.hashes[: at * HASH_NBYTES]
        del self.slots[:at]
        self.symbols, self.parent = symbols_below, upper
        upper.link(self)
        return upper

    def num_common_blocks(self, hashes: bytes, position: int) -> int:
        """Query. Number of leading blocks of the run that `hashes` holds from block `position` on."""
        start = position * HASH_NBYTES
        if hashes.startswith(self.hashes, start):
            return len(self.slots)
        num_words = min(len(self.hashes), len(hashes) - start) // 8
        differs = np.frombuffer(self.hashes, np.uint64, num_words) != np.frombuffer(hashes, np.uint64, num_words, start)
        num_equal = int(differs.argmax()) if differs.any() else num_words
        return num_equal * 8 // HASH_NBYTES

    def check(self) -> None:
        """Query. Assert what must hold of this node and its children."""
        assert len(self.hashes) == HASH_NBYTES * len(self.slots)
        assert bool(self.slots) == (self.parent is not None)
        assert not self.short or (len(self.slots) == 1 and not self.children)
        assert len(self.order) == len(self.children)
        for child in self.order:
            assert self.children[child.first_hash] is child
            assert child.parent is self
            assert (child.group, child.detached) == (self.group, False)
            assert child.last_used <= self.last_used
        for below, above in pairwise(self.order):
            assert below.symbols <= above.symbols
            assert not (below.short and above.symbols.startswith(below.symbols))


class Match(NamedTuple):
    """How far a tree knows a chain. It stands until blocks of the tree move or leave."""

    node: Node  # where the whole blocks end: after block `depth` of this run
    depth: int
    num_blocks: int  # whole blocks, from block 0 of the chain
    partial: Node | None  # its block `partial_depth` shares the first tokens of the chain's next block
    partial_depth: int
    partial_tokens: int  # how many; 0 where there is no partial
    shape: int  # number of the tree's shape it was made in

    def shortened(self, num_blocks_max: int) -> "Match":
        """Query. The same match with at most that many blocks, the partial one counted."""
        if self.num_blocks + (self.partial is not None) <= num_blocks_max:
            return self
        num_blocks = min(self.num_blocks, num_blocks_max)
        node, depth = self.node, self.depth - (self.num_blocks - num_blocks)
        while depth <= 0 and node.parent is not None:
            node = node.parent
            depth += len(node.slots)
        return Match(node, depth, num_blocks, None, 0, 0, self.shape)


class Pin(NamedTuple):
    """Blocks that may not be forgotten until `unpin`: the first `num_blocks` on the path to `node`, and the partial."""

    node: Node
    num_blocks: int  # whole blocks
    partial_tokens: int  # leading tokens of the block after them that count; 0: that block is not pinned

    @property
    def num_slots(self) -> int:
        """Query."""
        return self.num_blocks + (self.partial_tokens > 0)


class Inserted(NamedTuple):
    """What became of the slots that were handed to `insert`."""

    inserted: int  # number of blocks the tree holds now, in the last ones of the slots handed in
    unused: list[int]  # slots whose block the tree holds in another slot, or would not take
    freed: list[int]  # slots of short blocks that gave way to longer ones
