"""The pieces of a prefix tree, and the values it answers with."""

import functools
import struct
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radix.hashing import HASH_NBYTES

SLOT_NBYTES = 4
NO_CHILDREN: "tuple[Node, ...]" = ()
unpack_slot = struct.Struct("<I").unpack_from

SymbolsOf = Callable[[int], bytes]
"""Block symbols of the block stored in a slot. A damaged header may give others than before, or none."""


class Kind(NamedTuple):
    """What few nodes differ in: `kind` makes one object of each, so that a node has one field for them all."""

    group: int  # slot size in bytes; victims compete within a group
    short: bool  # one block with fewer tokens than block_tokens: it never has children
    detached: bool  # left the tree: no match sees it. While pinned it still holds its slots, and its parent


@functools.cache
def kind(group: int, *, short: bool = False, detached: bool = False) -> Kind:
    """Query. The kind with these values, always the same object."""
    return Kind(group, short, detached)


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks that are always reached together. A root's run is empty and is never evicted.

    There may be millions: a block costs 16 bytes of hash and 4 of slot here, never an object of its own. What can be
    looked up elsewhere is not repeated: symbols are in the slots' headers, the last use in the tree's arrays (Owners).
    """

    hashes: bytes  # HASH_NBYTES per block; of a run of one block, the very object that is its key in the index
    slots: bytes  # SLOT_NBYTES per block, u32 little endian
    parent: "Node | None"
    kind: Kind
    order: "list[Node] | tuple[Node, ...]" = NO_CHILDREN  # the children sorted by symbols: a list as soon as there are
    pins: int = 0  # leases that end at or below this node, on detached nodes too

    @property
    def group(self) -> int:
        """Query. Slot size in bytes."""
        return self.kind.group

    @property
    def short(self) -> bool:
        """Query. Whether it is one block with fewer tokens than block_tokens."""
        return self.kind.short

    @property
    def detached(self) -> bool:
        """Query. Whether it left the tree."""
        return self.kind.detached

    @property
    def num_blocks(self) -> int:
        """Query."""
        return len(self.slots) // SLOT_NBYTES

    @property
    def first_hash(self) -> bytes:
        """Query. Key of this node in the tree's index."""
        return self.hashes[:HASH_NBYTES]  # of a run of one block, not a copy

    @property
    def first_slot(self) -> int:
        """Query. What names this node in the tree's arrays. A root has none."""
        slot: int = unpack_slot(self.slots)[0]
        return slot

    @property
    def is_victim(self) -> bool:
        """Query. Whether the run may lose its tail: an unpinned leaf that is no root."""
        return not (self.order or self.pins or self.kind.detached or self.parent is None)

    def slot_at(self, index: int) -> int:
        """Query. Slot of block `index` of the run."""
        slot: int = unpack_slot(self.slots, index * SLOT_NBYTES)[0]
        return slot

    def index_of(self, slot: int) -> int:
        """Query. Which block of the run is stored in `slot`, which is one of its slots."""
        return int((np.frombuffer(self.slots, "<u4") == slot).argmax())

    def path(self) -> "list[Node]":
        """Query. The nodes from the root down to this one."""
        nodes = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def detach(self) -> None:
        """Changes state. It left the tree, and so did what is below it."""
        self.order, self.kind = NO_CHILDREN, kind(self.group, short=self.short, detached=True)

    def link(self, child: "Node", symbols_of: SymbolsOf) -> None:
        """Changes state. `child` takes its place among the children, which are kept sorted by symbols."""
        if isinstance(self.order, list):
            insort(self.order, child, key=_by_symbols(symbols_of))
        else:
            self.order = [child]

    def unlink(self, child: "Node", symbols_of: SymbolsOf) -> None:
        """Changes state. ValueError on a node that is no child."""
        assert isinstance(self.order, list)
        del self.order[self._place_of(child, symbols_of)]
        if not self.order:
            self.order = NO_CHILDREN

    def _place_of(self, child: "Node", symbols_of: SymbolsOf) -> int:
        assert isinstance(self.order, list)
        if self.order[-1] is child:  # a whole subtree is dropped from the end
            return len(self.order) - 1
        index = bisect_left(self.order, symbols_of(child.first_slot), key=_by_symbols(symbols_of))
        if index < len(self.order) and self.order[index] is child:
            return index
        return self.order.index(child)  # by identity: a header was damaged since the child was linked

    def neighbours(self, symbols: bytes, symbols_of: SymbolsOf) -> "tuple[Node | None, Node | None]":
        """Query. The last child whose symbols are below `symbols`, and the first whose are not.

        No other child shares more leading bytes with `symbols` than the better of these two.
        """
        index = bisect_left(self.order, symbols, key=_by_symbols(symbols_of))
        below = self.order[index - 1] if index else None
        return below, self.order[index] if index < len(self.order) else None

    def split(self, at: int, symbols_of: SymbolsOf) -> "Node":
        """Changes state. Cut before block `at`; return the new upper node, self keeps the lower part.

        Leases that end here so stay where they end.
        """
        assert self.parent is not None
        assert 0 < at < self.num_blocks
        upper = Node(
            self.hashes[: at * HASH_NBYTES], self.slots[: at * SLOT_NBYTES], self.parent, self.kind, [self], self.pins
        )  # fmt: skip
        assert isinstance(self.parent.order, list)
        self.parent.order[self.parent._place_of(self, symbols_of)] = upper
        self.hashes, self.slots = self.hashes[at * HASH_NBYTES :], self.slots[at * SLOT_NBYTES :]
        self.parent = upper
        return upper

    def num_common_blocks(self, hashes: bytes, position: int) -> int:
        """Query. Number of leading blocks of the run that `hashes` holds from block `position` on."""
        start = position * HASH_NBYTES
        if hashes.startswith(self.hashes, start):
            return len(self.slots) // SLOT_NBYTES
        num_words = min(len(self.hashes), len(hashes) - start) // 8
        differs = np.frombuffer(self.hashes, np.uint64, num_words) != np.frombuffer(hashes, np.uint64, num_words, start)
        num_equal = int(differs.argmax()) if differs.any() else num_words
        return num_equal * 8 // HASH_NBYTES

    def check(self) -> None:
        """Query. Assert what must hold of this node and its children."""
        assert len(self.hashes) == HASH_NBYTES * self.num_blocks
        assert len(self.slots) == SLOT_NBYTES * self.num_blocks
        assert bool(self.slots) == (self.parent is not None)
        assert not self.short or (self.num_blocks == 1 and not self.order)
        assert bool(self.order) == isinstance(self.order, list)
        for child in self.order:
            assert child.parent is self
            assert (child.group, child.detached) == (self.group, False)


def _by_symbols(symbols_of: SymbolsOf) -> Callable[[Node], bytes]:
    """Sort key of siblings. Called for each step of a search, so it saves the call of `first_slot`."""
    return lambda node: symbols_of(unpack_slot(node.slots)[0])


def gives_way(short_symbols: bytes, symbols: bytes) -> bool:
    """Query. Whether a short block with `short_symbols` answers nothing that a sibling with `symbols` does not.

    No symbols, of a damaged header, give way to nothing.
    """
    return bool(short_symbols) and symbols.startswith(short_symbols)


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
            depth += node.num_blocks
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
