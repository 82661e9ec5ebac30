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

from radix.check import check_tree
from radix.eviction import LRU, EvictionPolicy
from radix.hashing import HASH_NBYTES, BlockHash, common_tokens
from radix.node import Inserted, Match, Node, Pin
from radix.owners import Owners


@dataclass(slots=True)
class Group:
    """Chains whose slots have one size: they compete for the same room."""

    policy: EvictionPolicy
    num_blocks: int = 0  # detached ones included
    num_evictable: int = 0  # in attached nodes without pins: all of them can go, leaves first


class PrefixTree:
    """Chains of blocks under the roots of any number of specs.

    `symbols_of(slot)` gives the block symbols of the block stored in a slot. It is asked where a run is split and where
    a match ends inside one; for all else, the symbols of a run's first block suffice.
    """

    def __init__(self, symbols_of: Callable[[int], bytes], make_policy: Callable[[], EvictionPolicy] = LRU) -> None:
        self._symbols_of = symbols_of
        self._make_policy = make_policy
        self._roots: dict[BlockHash, Node] = {}
        self._groups: dict[int, Group] = {}
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
        return self._owners.num_nodes - len(self._roots)

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
        self._groups.setdefault(group, Group(self._make_policy()))
        node = Node(bytearray(), array("I"), b"", None, group)
        self._owners.enrol(node)
        self._roots[root] = node

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
        node = self._roots.get(root)
        if node is None:
            return None
        depth = num_blocks = 0
        while depth == len(node.slots):
            start = num_blocks * HASH_NBYTES
            child = node.children.get(hashes[start : start + HASH_NBYTES])
            if child is None:
                break
            node, depth = child, child.num_common_blocks(hashes, num_blocks)
            num_blocks += depth
        symbols = symbols_at(num_blocks) if symbols_at is not None else b""
        partial, partial_depth, partial_tokens = self._most_tokens(node, depth, symbols)
        return Match(node, depth, num_blocks, partial, partial_depth, partial_tokens, self._shape)

    def _most_tokens(self, node: Node, depth: int, symbols: bytes) -> tuple[Node | None, int, int]:
        """Query. The block after block `depth` of a run that shares most leading tokens with `symbols`."""
        best: tuple[Node | None, int, int] = (None, 0, 0)
        if not symbols:
            return best
        if depth < len(node.slots):
            num_tokens = common_tokens(symbols, self._symbols_of(node.slots[depth]))
            return (node, depth, num_tokens) if num_tokens else best
        for child in node.neighbours(symbols):
            num_tokens = common_tokens(symbols, child.symbols) if child is not None else 0
            if num_tokens > best[2]:
                best = (child, 0, num_tokens)
        return best

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
        self._touch(end)
        for node in end.path():
            if not node.pins:
                self._groups[node.group].num_evictable -= len(node.slots)
                self._owners.set_pinned(node, True)
            node.pins += 1
        self._review(end)
        return Pin(end, match.num_blocks, match.partial_tokens)

    def unpin(self, pin: Pin) -> list[int]:
        """Changes state. Slots that became free: those of detached nodes that no lease holds any more."""
        freed = []
        for node in pin.node.path():
            assert node.pins > 0
            node.pins -= 1
            if not node.pins:
                freed += self._release(node)
        return freed

    def _release(self, node: Node) -> list[int]:
        """Changes state. The last pin of `node` has ended."""
        self._owners.set_pinned(node, False)
        if node.detached:
            self._detached.remove(node)
            return self._forget(node)
        self._groups[node.group].num_evictable += len(node.slots)
        self._review(node)
        return []

    def path_slots(self, pin: Pin) -> "array[int]":
        """Query. Slots of the pinned blocks from block 0 on, the partial one's last."""
        slots = array("I")
        for node in pin.node.path():
            slots.extend(node.slots)
        del slots[pin.num_slots :]  # the run may have grown since, or go on behind the partial block
        return slots

    def locate(self, pin: Pin, index: int) -> tuple[Node, int]:
        """Query. Where the pinned path's block `index` is: a node, and the block's place in its run."""
        assert 0 <= index < pin.num_slots
        for node in pin.node.path():
            if index < len(node.slots):
                return node, index
            index -= len(node.slots)
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
        new = array("I", slots[first - start :])
        if not new:
            return Inserted(0, list(slots), [])
        symbols = symbols_of_new(first)
        if short and len(new) == 1 and self._is_begun(match, symbols):
            return Inserted(0, list(slots), [])
        parent = self._end_at(match.node, match.depth)
        freed = self._supersede(parent, symbols)
        num_whole = len(new) - short
        cut = (first + num_whole) * HASH_NBYTES
        end = parent
        if num_whole:
            end = self._append(parent, hashes[first * HASH_NBYTES : cut], new[:num_whole], symbols)
        if short:
            end = self._add_child(end, hashes[cut:], new[num_whole:], symbols_of_new(first + num_whole), short=True)
        self._touch(end)
        return Inserted(len(new), list(slots[: first - start]), freed)

    def _is_begun(self, match: Match, symbols: bytes) -> bool:
        """Query. Whether a block at the end of `match` begins with all of `symbols`."""
        if match.depth < len(match.node.slots):
            return self._symbols_of(match.node.slots[match.depth]).startswith(symbols)
        _, above = match.node.neighbours(symbols)
        return above is not None and above.symbols.startswith(symbols)

    def _supersede(self, parent: Node, symbols: bytes) -> list[int]:
        """Changes state. Drop the short child of `parent` with which `symbols` begins. Slots free now.

        There is at most one, and nothing sorts between the two: it would begin with that short block as well.
        """
        below, _ = parent.neighbours(symbols)
        if below is not None and below.short and symbols.startswith(below.symbols):
            return self._drop(below)
        return []

    def _append(self, parent: Node, hashes: bytes, slots: "array[int]", symbols: bytes) -> Node:
        """Changes state. Put whole blocks behind `parent`, into its run if nothing else follows. Where they are."""
        # A pinned run must not get longer: its leases would hold what they did not ask for.
        if parent.parent is None or parent.children or parent.pins:
            return self._add_child(parent, hashes, slots, symbols)
        parent.hashes += hashes
        parent.slots.extend(slots)
        self._owners.take(parent, slots)
        self._count(parent, len(slots))
        return parent

    def _add_child(self, parent: Node, hashes: bytes, slots: "array[int]", symbols: bytes, short: bool = False) -> Node:
        child = Node(bytearray(hashes), slots, symbols, parent, parent.group, short)
        parent.link(child)
        self._owners.enrol(child)
        self._count(child, len(slots))
        self._review(parent)
        return child

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
            inside = np.frombuffer(node.slots, np.uintc) // slots_per_extent == extent
            if inside.any():  # else a cut before this one has split the run
                assert not node.pins, "only a drainable extent can be drained"
                freed += self.remove(node, int(inside.argmax()))
        return freed

    def _drop(self, top: Node) -> list[int]:
        """Changes state. `top` and all below it leave the tree. Slots free now."""
        assert top.parent is not None
        top.parent.unlink(top)
        freed, below = [], [top]
        while below:
            node = below.pop()
            below += node.order
            node.children, node.order = {}, []
            if node.pins:
                node.detached = True
                self._detached.add(node)
            else:
                freed += self._forget(node)
        self._shape += 1
        self._review(top.parent)
        return freed

    def _forget(self, node: Node) -> list[int]:
        """Changes state. No lease holds `node`, and no match sees it: it is gone."""
        self._count(node, -len(node.slots))
        node.detached = True
        self._review(node)
        self._owners.retire(node)
        return node.slots.tolist()

    # --- evict

    def evict(self, group: int, count: int) -> list[int]:
        """Changes state. Up to `count` slots, from the tails of the victims the policy names."""
        freed: list[int] = []
        while len(freed) < count and (node := self._victim(group)) is not None:
            freed += self._cut_tail(node, max(0, len(node.slots) - (count - len(freed))))
        return freed

    def coldest(self, group: int) -> int | None:
        """Query. Last use of the next victim; None: there is none."""
        node = self._victim(group)
        return None if node is None else node.last_used

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
        tail = node.slots[keep:]
        del node.slots[keep:]
        del node.hashes[keep * HASH_NBYTES :]
        self._owners.give_back(tail)
        self._count(node, -len(tail))
        self._shape += 1
        return tail.tolist()

    # --- what several verbs share

    def _end_at(self, node: Node, depth: int) -> Node:
        """Changes state. The node that ends with block `depth` of this run, after a split if it goes on."""
        return node if depth == len(node.slots) else self._split(node, depth)

    def _split(self, node: Node, at: int) -> Node:
        upper = node.split(at, self._symbols_of(node.slots[at]))
        self._owners.give_back(upper.slots)
        self._owners.enrol(upper)
        self._shape += 1
        return upper

    def _touch(self, end: Node) -> None:
        """Changes state. The path to `end` was used now."""
        self._tick += 1
        for node in end.path():
            self._owners.touch(node, self._tick)
        self._review(end)

    def _count(self, node: Node, num_blocks: int) -> None:
        """Changes state. `node` gained or lost that many blocks."""
        group = self._groups[node.group]
        group.num_blocks += num_blocks
        if not (node.pins or node.detached):
            group.num_evictable += num_blocks

    def _review(self, node: Node) -> None:
        """Changes state. Tell the policy whether `node` is a victim, after anything that may have changed it."""
        policy = self._groups[node.group].policy
        if node.is_victim:
            policy.offer(node)
        else:
            policy.withdraw(node)

    def check(self, pins: Iterable[Pin] | None = None) -> None:
        """Query. Assert every invariant; with all pins that have not ended, also that no other pin is counted."""
        check_tree(self, pins)
