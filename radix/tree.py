"""The prefix tree of one tier: which blocks of which chains it holds, in which slots, and which it may forget.

Plain data with one owner: no locks, and no clock but a logical tick. A node is a run of blocks that are always reached
together; a run is cut where chains part and where a lease ends, so what a lease holds is a set of whole nodes.

    root of a spec ── [b0 b1 b2] ─┬─ [b3 b4 b5 b6]
                                  └─ [c3] ── [short c4]

Prefix closure: a block is in the tree only while its parent is. Victims are leaves, cut from the tail; `remove` takes
the subtree along. What leaves while pinned is **detached**: no match sees it, its slots come back at its last unpin.

Symbols (radix.hashing) find the block that shares most tokens where a chain leaves the tree inside a block. No short
block is a symbol prefix of a sibling: it would answer nothing that the longer one does not.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radix.check import check_tree
from radix.eviction import LRU, EvictionPolicy
from radix.hashing import HASH_NBYTES, BlockHash, common_tokens
from radix.index import Index
from radix.load import LoadedBlocks, grow
from radix.node import SLOT_NBYTES, Inserted, Match, Node, Pin, SymbolsOf, gives_way, kind
from radix.owners import Leaves, Owners


@dataclass(slots=True)
class Group:
    """Chains whose slots have one size: they compete for the same room."""

    policy: EvictionPolicy
    num_blocks: int = 0  # detached ones included
    num_evictable: int = 0  # in attached nodes without pins: all of them can go, leaves first


class PrefixTree:
    """Chains of blocks under the roots of any number of specs.

    `symbols_of(slot)` gives the block symbols of the block stored in a slot. It is asked where a match ends inside a
    run, and where a child's place among its siblings is looked up. A header may be damaged: other symbols than before
    can cost a match inside a block, nothing else.
    """

    def __init__(self, symbols_of: SymbolsOf, make_policy: Callable[[Leaves], EvictionPolicy] = LRU) -> None:
        self._symbols_of = symbols_of
        self._make_policy = make_policy
        self._roots: dict[BlockHash, Node] = {}
        self._groups: dict[int, Group] = {}
        self._index = Index()
        self._owners = Owners()
        self._detached: set[Node] = set()
        self._tick = 0
        self._shape = 0  # changes whenever blocks move between nodes or leave: matches made before are stale

    # --- roots and counts

    @property
    def roots(self) -> Mapping[BlockHash, Node]:
        """Query. The root node of each spec; its `group` is the spec's slot size."""
        return self._roots

    @property
    def num_nodes(self) -> int:
        """Query. Nodes with blocks, detached ones included."""
        return self._owners.num_nodes

    def num_blocks(self, group: int) -> int:
        """Query. Blocks that occupy a slot, the detached ones that leases still hold included."""
        return self._groups[group].num_blocks if group in self._groups else 0

    def num_evictable(self, group: int) -> int:
        """Query. Blocks that `evict` could give up now."""
        return self._groups[group].num_evictable if group in self._groups else 0

    def add_root(self, root: BlockHash, group: int) -> None:
        """Changes state. Chains may begin at `root` from now on; no effect if they may already."""
        if root in self._roots:
            assert self._roots[root].group == group
            return
        if group not in self._groups:
            self._groups[group] = Group(self._make_policy(Leaves(self._owners, group)))
        self._roots[root] = Node(b"", b"", None, kind(group))

    def clear(self, root: BlockHash) -> list[int]:
        """Changes state. Forget all blocks under `root`. Slots free now; pinned ones follow at their last unpin."""
        freed = []
        for child in self._roots[root].order[::-1]:  # from the end: nothing moves up
            freed += self._drop(child)
        return freed

    # --- match

    def match(self, root: BlockHash, hashes: bytes, symbols_at: Callable[[int], bytes] | None = None) -> Match | None:
        """Query. The longest known beginning of a chain; None: unknown root.

        `symbols_at(i)` gives the symbols of the chain's block i, nothing if there is none. It is asked once, for the
        block after the whole ones; that block needs no hash.
        """
        top = self._roots.get(root)
        if top is None:
            return None
        node, depth, num_blocks = self._index.walk(top, hashes)
        symbols = symbols_at(num_blocks) if symbols_at is not None else b""
        partial, partial_depth, partial_tokens = self._most_tokens(node, depth, symbols)
        return Match(node, depth, num_blocks, partial, partial_depth, partial_tokens, self._shape)

    def _most_tokens(self, node: Node, depth: int, symbols: bytes) -> tuple[Node | None, int, int]:
        """Query. The block after block `depth` of a run that shares most leading tokens with `symbols`."""
        best: tuple[Node | None, int, int] = (None, 0, 0)
        if not symbols:
            return best
        if depth < node.num_blocks:
            num_tokens = common_tokens(symbols, self._symbols_of(node.slot_at(depth)))
            return (node, depth, num_tokens) if num_tokens else best
        for child in node.neighbours(symbols, self._symbols_of):
            num_tokens = common_tokens(symbols, self._symbols_of(child.first_slot)) if child is not None else 0
            if num_tokens > best[2]:
                best = (child, 0, num_tokens)
        return best

    def touch(self, match: Match) -> None:
        """Changes state. What `match` found was used now, with the partial block, and the whole run that it leaves."""
        assert match.shape == self._shape, "the tree changed since this match"
        self._use(match.partial or match.node)

    # --- pins

    def pin(self, match: Match, max_blocks: int | None = None) -> Pin:
        """Changes state. Forbid to forget what `match` found, at most `max_blocks` blocks, the partial one counted.

        The match must be of the tree as it is now. Runs are cut where the pin ends, so that it holds and marks as used
        what was found and nothing else.
        """
        assert match.shape == self._shape, "the tree changed since this match"
        if max_blocks is not None:
            match = match.shortened(max_blocks)
        end = self._end_at(match.node, match.depth)
        if match.partial is not None:
            end = self._end_at(match.partial, 1)  # after the cut above, it is the first of its run
        return Pin(self._pin(end), match.num_blocks, match.partial_tokens)

    def pin_slot(self, slot: int) -> Pin | None:
        """Changes state. Forbid to forget the block in `slot` and those before it. None: no match would find it."""
        node = self._owners.node_at(slot)
        if node is None or node.detached:
            return None
        end = self._pin(self._end_at(node, node.index_of(slot) + 1))
        return Pin(end, sum(above.num_blocks for above in end.path()), 0)

    def _pin(self, end: Node) -> Node:
        """Changes state. The path to `end` is used now, and by one lease more."""
        path = end.path()
        self._owners.set_pinned(self._touch(path), True)
        group = self._groups[end.group]
        for node in path:
            if not node.pins:
                group.num_evictable -= len(node.slots) // SLOT_NBYTES
            node.pins += 1
        return end

    def unpin(self, pin: Pin) -> list[int]:
        """Changes state. Slots that became free: those of detached nodes that no lease holds any more."""
        released = []
        for node in pin.node.path():
            assert node.pins > 0
            node.pins -= 1
            if not node.pins:
                released.append(node)
        self._owners.set_pinned(self._owners.rows_of([node for node in released if node.parent is not None]), False)
        group, freed = self._groups[pin.node.group], []
        for node in released:
            if node.kind.detached:
                freed += self._forget(node)
            else:
                group.num_evictable += len(node.slots) // SLOT_NBYTES
                self._offer(node)
        return freed

    def path_slots(self, pin: Pin) -> "array[int]":
        """Query. Slots of the pinned blocks from block 0 on, the partial one's last."""
        slots = array("I")
        for node in pin.node.path():
            slots.frombytes(node.slots)
        del slots[pin.num_slots :]  # the run may have grown since, or go on behind the partial block
        return slots

    def detached_slots(self) -> "array[int]":
        """Query. Slots of the blocks that left the tree and that leases still hold."""
        slots = array("I")
        for node in self._detached:
            slots.frombytes(node.slots)
        return slots

    def path_hashes(self, pin: Pin) -> bytes:
        """Query. Hashes of the pinned blocks from block 0 on, the partial one's last."""
        hashes = b"".join([node.hashes for node in pin.node.path()])
        return hashes[: pin.num_slots * HASH_NBYTES]

    def locate(self, pin: Pin, index: int) -> tuple[Node, int]:
        """Query. Where the pinned path's block `index` is: a node, and the block's place in its run."""
        assert 0 <= index < pin.num_slots
        for node in pin.node.path():
            if index < node.num_blocks:
                return node, index
            index -= node.num_blocks
        raise AssertionError("a pinned path is shorter than its pin")

    # --- insert

    def insert(
        self,
        root: BlockHash,
        hashes: bytes,
        start: int,
        slots: Sequence[int],
        symbols_of_new: Callable[[int], bytes],
        short: bool,
    ) -> Inserted:
        """Changes state. Take blocks [start:] of the chain `hashes`, stored in `slots`; the last one is `short` or not.

        Blocks that are known by now keep their slot. Nothing is taken where the parent of block `start` is absent, nor
        a short block whose tokens begin a longer one's. `symbols_of_new(i)`: symbols of the chain's block i.
        """
        assert len(hashes) == (start + len(slots)) * HASH_NBYTES
        match = self.match(root, hashes)
        if match is None or match.num_blocks < start or match.node.short:
            return Inserted(0, list(slots), [])
        first = match.num_blocks
        new = array("I", slots[first - start :]).tobytes()
        if not new:
            return Inserted(0, list(slots), [])
        symbols = symbols_of_new(first)
        num_new = len(slots) - (first - start)
        if short and num_new == 1 and self._is_begun(match, symbols):
            return Inserted(0, list(slots), [])
        end = self._end_at(match.node, match.depth)
        freed = self._supersede(end, symbols)
        num_whole = num_new - short
        cut = (first + num_whole) * HASH_NBYTES
        if num_whole:
            end = self._append(end, hashes[first * HASH_NBYTES : cut], new[: num_whole * SLOT_NBYTES])
        if short:
            end = self._add_child(end, hashes[cut:], new[num_whole * SLOT_NBYTES :], short=True)
        self._use(end)
        return Inserted(num_new, list(slots[: first - start]), freed)

    def _is_begun(self, match: Match, symbols: bytes) -> bool:
        """Query. Whether a block at the end of `match` begins with all of `symbols`."""
        if match.depth < match.node.num_blocks:
            return gives_way(symbols, self._symbols_of(match.node.slot_at(match.depth)))
        _, above = match.node.neighbours(symbols, self._symbols_of)
        return above is not None and gives_way(symbols, self._symbols_of(above.first_slot))

    def _supersede(self, parent: Node, symbols: bytes) -> list[int]:
        """Changes state. Drop the short child of `parent` with which `symbols` begins. Slots free now.

        There is at most one, and nothing sorts between the two: it would begin with that short block as well.
        """
        below, _ = parent.neighbours(symbols, self._symbols_of)
        if below is not None and below.short and gives_way(self._symbols_of(below.first_slot), symbols):
            return self._drop(below)
        return []

    def _append(self, parent: Node, hashes: bytes, slots: bytes) -> Node:
        """Changes state. Put whole blocks behind `parent`, into its run if nothing else follows. Where they are."""
        # A pinned run must not get longer: its leases would hold what they did not ask for.
        if parent.parent is None or parent.order or parent.pins:
            return self._add_child(parent, hashes, slots)
        self._owners.take(parent, slots)
        parent.hashes += hashes
        parent.slots += slots
        self._count(parent, len(slots) // SLOT_NBYTES)
        return parent

    def _add_child(self, parent: Node, hashes: bytes, slots: bytes, short: bool = False) -> Node:
        child = Node(hashes, slots, parent, kind(parent.group, short=short))
        self._owners.enrol(child, last_used=self._tick)
        self._index.add(child)
        parent.link(child, self._symbols_of)
        self._count(child, child.num_blocks)
        return child

    # --- load

    def load(self, group: int, blocks: LoadedBlocks) -> NDArray[np.uint32]:
        """Changes state. Take many blocks at once, of a group that has none yet. The slots that have no place.

        A block has no place if its chain to a root is broken, its parent is short, an earlier row has its hash, another
        row has its slot, or it is short and begins a sibling. Rows of a slot that another group's block holds are left
        out, and not among the answers: that slot has a place.

        Roots are the parents of blocks number 0. Long, but it lets other threads run: no call in it takes long alone.
        """
        assert not self.num_blocks(group), "only an empty group can be loaded"
        taken = self._owners.are_held(blocks.slots)
        foreign = {root for root, node in self._roots.items() if node.group != group}
        forest = grow(blocks, ~taken, foreign, self._symbols_of)
        for root in forest.roots:
            self.add_root(BlockHash(root), group)
        nodes = forest.plant([self._roots[BlockHash(root)] for root in forest.roots], group)
        self._owners.enrol_all(nodes, forest.slots, forest.starts, forest.last_used)
        for node in nodes:
            self._index.add(node)
        self._tick = max(self._tick, forest.last_used.max(initial=0).item())
        self._shape += 1
        if nodes:
            self._count(nodes[0], len(forest.slots))
        for slot, last_used in forest.leaves():
            self._groups[group].policy.offer(slot, last_used)
        self._victim(group)  # what the policy prepares for its first answer is better done here
        return forest.lost

    # --- remove

    def remove(self, node: Node, index: int) -> list[int]:
        """Changes state. Block `index` of a run leaves the tree at once, with all that follows it. Slots free now."""
        if node.detached:
            return []
        if index > 0:
            self._split(node, index)
        return self._drop(node)

    def drain(self, extent: int, slots_per_extent: int) -> list[int]:
        """Changes state. Forget every block in a drainable extent, with all that follows them. Slots free now."""
        freed = []
        for node in self._owners.nodes_in(extent, slots_per_extent):
            assert not node.pins, "only a drainable extent can be drained"
            inside = np.frombuffer(node.slots, "<u4") // slots_per_extent == extent
            freed += self.remove(node, int(inside.argmax()))
        return freed

    def _drop(self, top: Node) -> list[int]:
        """Changes state. `top` and all below it leave the tree. Slots free now."""
        assert top.parent is not None
        top.parent.unlink(top, self._symbols_of)
        freed, below = [], [top]
        while below:
            node = below.pop()
            below += node.order
            self._detach(node)
            if node.pins:
                self._detached.add(node)
            else:
                freed += self._forget(node)
        self._shape += 1
        self._offer(top.parent)
        return freed

    def _detach(self, node: Node) -> None:
        """Changes state. No match sees `node` any more."""
        self._index.discard(node)
        if not node.pins:
            self._groups[node.group].num_evictable -= node.num_blocks
        node.detach()

    def _forget(self, node: Node) -> list[int]:
        """Changes state. No lease holds `node`, and no match sees it: it is gone."""
        self._detached.discard(node)
        self._groups[node.group].num_blocks -= node.num_blocks
        self._owners.retire(node)
        return array("I", node.slots).tolist()

    # --- evict

    def evict(self, group: int, count: int) -> list[int]:
        """Changes state. Up to `count` slots, from the tails of the victims the policy names."""
        freed: list[int] = []
        while len(freed) < count and (node := self._victim(group)) is not None:
            freed += self._cut_tail(node, max(0, node.num_blocks - (count - len(freed))))
        return freed

    def coldest(self, group: int) -> int | None:
        """Query. Last use of the next victim; None: there is none."""
        node = self._victim(group)
        return None if node is None else self._owners.last_used(node.first_slot)

    def extents_by_heat(self, slots_per_extent: int, width: int) -> list[tuple[float, int, bool]]:
        """Query. (mean last use of its blocks, extent, drainable) of each extent that has blocks, coldest first.

        Drainable: no lease holds a block in it, so none that follows one. Slot s lies in extent s // slots_per_extent,
        among its first `width` numbers.
        """
        return self._owners.extents_by_heat(slots_per_extent, width)

    def _victim(self, group: int) -> Node | None:
        return self._groups[group].policy.victim() if group in self._groups else None

    def _cut_tail(self, node: Node, keep: int) -> list[int]:
        """Changes state. A victim keeps its first `keep` blocks. Slots free now."""
        assert node.is_victim
        if not keep:
            return self._drop(node)
        tail = node.slots[keep * SLOT_NBYTES :]
        node.slots = node.slots[: keep * SLOT_NBYTES]
        node.hashes = node.hashes[: keep * HASH_NBYTES]
        self._owners.give_back(tail)
        self._count(node, -(len(tail) // SLOT_NBYTES))
        self._shape += 1
        return array("I", tail).tolist()

    # --- what several verbs share

    def _end_at(self, node: Node, depth: int) -> Node:
        """Changes state. The node that ends with block `depth` of this run, after a split if it goes on."""
        return node if depth == node.num_blocks else self._split(node, depth)

    def _split(self, node: Node, at: int) -> Node:
        self._index.discard(node)
        upper = node.split(at, self._symbols_of)
        self._index.add(upper)
        self._index.add(node)
        self._owners.split(upper, node)
        self._offer(node)  # under its new name
        self._shape += 1
        return upper

    def _touch(self, path: list[Node]) -> list[int]:
        """Changes state. The nodes from a root to the last one were used now. Their rows, of all but the root."""
        self._tick += 1
        rows = self._owners.rows_of(path[1:])
        self._owners.touch(rows, self._tick)
        return rows

    def _use(self, end: Node) -> None:
        """Changes state. The path to `end` was used now, and nothing holds it for that."""
        self._touch(end.path())
        self._offer(end)

    def _count(self, node: Node, num_blocks: int) -> None:
        """Changes state. The group of `node`, which no lease holds, gained or lost that many blocks."""
        group = self._groups[node.group]
        group.num_blocks += num_blocks
        group.num_evictable += num_blocks

    def _offer(self, node: Node) -> None:
        """Changes state. Tell the policy if `node` is a victim, after anything that may have made it one or another."""
        if node.is_victim:
            slot = node.first_slot
            self._groups[node.group].policy.offer(slot, self._owners.last_used(slot))

    def check(self, pins: Iterable[Pin] | None = None) -> None:
        """Query. Assert every invariant; with all pins that have not ended, also that no other pin is counted."""
        check_tree(self, pins)
