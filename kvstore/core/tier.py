"""A tier: which blocks it holds, where, and which of them may go. It decides and remembers; it touches no bytes."""

from __future__ import annotations  # array[int] is not subscriptable at run time before 3.12

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.core.slots import SLOTS_PER_EXTENT_MAX, SlotPool
from radix import BlockHash, Inserted, LoadedBlocks, Match, Node, Pin, PrefixTree

# ARRIVING: in the tree, its bytes are on the way. FAILED: left the tree, or never arrived; a pin still holds it.
FREE, RESERVED, SEALED, ARRIVING, FAILED = range(5)
EVICTIONS_PER_TURN_MAX = 512  # of what need not be free at once: 20 us each where every block is a run of its own
SLOT_ROW = np.dtype([("state", "<u4"), ("owner", "<u4"), ("generation", "<u8")])
JOINT = 1 << 31  # added to the owner, a session's number, of slots that several ranks may write to
States = npt.NDArray[np.unsignedinteger[Any]]


class Tables(NamedTuple):
    """A slab's flat tables. They lie in shared memory, so that a new daemon finds what an old one held."""

    extents: npt.NDArray[np.uint64]  # slot_nbytes each extent serves, 0 for none
    slots: npt.NDArray[np.void]  # SLOT_ROW per slot number


def new_tables(num_extents: int) -> Tables:
    """Query. Tables of an empty slab, in private memory."""
    return Tables(np.zeros(num_extents, np.uint64), np.zeros(num_extents * SLOTS_PER_EXTENT_MAX, SLOT_ROW))


class Tier:
    """Blocks of one medium: a prefix tree over them, and a pool of slots.

    Every slot of a class is in exactly one of four places: free (in the pool), reserved (handed out by `reserve`, not
    yet inserted or given back), cached (in the tree), parked. `free + cached + reserved + parked = total`, per class.

    Parked slots hold nothing any more but must not be reused yet: while the tier is `parking`, whatever becomes free
    is parked until `unpark`, and nothing is evicted to make room on demand.

    Kept slots hold what somebody may still look at though the tree does not: whoever frees them, they stay reserved
    until `let_go` was called as often as `keep`.
    """

    def __init__(
        self, extent_nbytes: int, extents: npt.NDArray[np.uint64], states: States, symbols_of: Callable[[int], bytes]
    ) -> None:
        """`extents`, `states` (one per slot number): zeroed or of `adopt`, written here only.

        `symbols_of`: block symbols of a slot's block.
        """
        self.pool = SlotPool(extent_nbytes, extents)
        self.tree = PrefixTree(symbols_of)
        self.num_evicted = 0
        self.parking = False
        self._symbols_of = symbols_of
        self._state = states
        self._parked = array("I")
        self._num_parked: Counter[int] = Counter()  # per class, those that `take_parked` handed out included
        self._kept: Counter[int] = Counter()
        self._evicted_since_look: dict[int, int] = {}  # slot_nbytes -> blocks evicted since extents were compared

    def add_spec(self, root: BlockHash, slot_nbytes: int) -> None:
        """Changes state. Idempotent."""
        self.pool.add_class(slot_nbytes)
        self.tree.add_root(root, slot_nbytes)

    def can_add_spec(self, root: BlockHash, slot_nbytes: int) -> bool:
        """Query. False: blocks of it were adopted in another class."""
        known = self.tree.roots.get(root)
        return known is None or known.group == slot_nbytes

    def add_extent(self, extent: int) -> None:
        """Changes state. The extent's memory is there: its slots may be handed out."""
        self.pool.add_extent(extent)

    def match(self, root: BlockHash, hashes: bytes, symbols_at: Callable[[int], bytes] | None = None) -> Match:
        """Query. Longest cached chain, token-granular in the block where the query leaves it."""
        match = self.tree.match(root, hashes, symbols_at)
        assert match is not None, "the spec was added at attach"
        return match

    def pin(self, match: Match, max_blocks: int | None = None) -> Pin:
        """Changes state. Forbid eviction of the matched blocks until `unpin`."""
        return self.tree.pin(match, max_blocks)

    def unpin(self, pin: Pin) -> None:
        """Changes state."""
        self._free(self.tree.unpin(pin))

    def touch(self, match: Match) -> None:
        """Changes state. What was found was used now, though not from this tier."""
        self.tree.touch(match)

    def reserve(self, slot_nbytes: int, count: int) -> array[int] | None:
        """Changes state. `count` slots, evicting unpinned blocks if needed. None: no room."""
        if not self._make_room(slot_nbytes, count):
            return None
        slots = self.pool.take(slot_nbytes, count)
        assert slots is not None
        self._state[_indices(slots)] = RESERVED
        return slots

    def available(self, slot_nbytes: int) -> int:
        """Query. Blocks of this class that `reserve` could give now without draining other classes."""
        return self.pool.num_free(slot_nbytes) + (0 if self.parking else self.tree.num_evictable(slot_nbytes))

    def insert(
        self,
        root: BlockHash,
        hashes: bytes,
        start: int,
        slots: Sequence[int],
        *,
        short: bool,
        state: int = SEALED,
    ) -> Inserted:
        """Changes state. Reserved slots become blocks [start:] of a chain: SEALED, or ARRIVING until `settle`.

        `unused` ones stay reserved: give them back.
        """
        inserted = self.tree.insert(
            root, hashes, start, slots, lambda block: self._symbols_of(slots[block - start]), short
        )
        unused = set(inserted.unused)
        self._state[_indices(array("I", (slot for slot in slots if slot not in unused)))] = state
        self._free(inserted.freed)
        self._fail_detached()
        return inserted

    def settle(self, slots: array[int], state: int) -> None:
        """Changes state. The bytes of ARRIVING blocks are there (SEALED), or will never be (FAILED).

        Those that left the tree meanwhile are FAILED already.
        """
        rows = _indices(slots)
        self._state[rows[self._state[rows] == ARRIVING]] = state

    def states_of(self, slots: array[int]) -> States:
        """Query."""
        return self._state[_indices(slots)]

    def num_sealed(self, slots: array[int]) -> int:
        """Query. How many of these blocks, from the first on, have their bytes."""
        there = self._state[_indices(slots)] == SEALED
        return len(slots) if there.all() else int(there.argmin())

    def state_of(self, slot: int) -> int:
        """Query."""
        return int(self._state[slot])

    def give_back(self, slots: Iterable[int]) -> None:
        """Changes state. Reserved slots that will not be filled, or whose block was there already."""
        self._free(slots)

    def remove(self, pin: Pin, index: int) -> None:
        """Changes state. Forget block number `index` of a pinned path and everything below it."""
        node, at = self.tree.locate(pin, index)
        self._free(self.tree.remove(node, at))
        self._fail_detached()

    def clear(self, root: BlockHash) -> None:
        """Changes state. Forget every block of a spec; pinned ones leave when they are unpinned."""
        self._free(self.tree.clear(root))
        self._fail_detached()

    def distinct_blocks(self, pins: Iterable[Pin]) -> int:
        """Query. Blocks that at least one of these pins holds."""
        return sum(node.num_blocks for node in _held_by(pins))

    def held_blocks(self, match: Match, pins: Iterable[Pin]) -> int:
        """Query. Leading blocks of a match that one of these pins holds already."""
        held = _held_by(pins)
        return min(match.num_blocks, sum(node.num_blocks for node in match.node.path() if node in held))

    def of_one_class(self, slots: bytes) -> tuple[int | None, array[int]]:
        """Query. Those of `slots` (u32le, any numbers) that are not free, of the class of the first of them."""
        numbers = np.frombuffer(slots, "<u4")
        numbers = numbers[numbers < len(self._state)]
        numbers = numbers[self._state[numbers] != FREE]
        if not len(numbers):
            return None, array("I")
        slot_nbytes = self.slot_nbytes_of(int(numbers[0]))
        extents = numbers // SLOTS_PER_EXTENT_MAX
        same = [extent for extent in np.unique(extents).tolist() if self.pool.class_of(extent) == slot_nbytes]
        return slot_nbytes, array("I", numbers[np.isin(extents, same)].tobytes())

    def slot_nbytes_of(self, slot: int) -> int:
        """Query. The class of a slot that is not free."""
        slot_nbytes = self.pool.class_of(slot // SLOTS_PER_EXTENT_MAX)
        assert slot_nbytes is not None
        return slot_nbytes

    def counts(self, slot_nbytes: int) -> tuple[int, int, int]:
        """Query. (free, cached, reserved) slots of a class; unassigned extents not included, parked as reserved."""
        cached = self.tree.num_blocks(slot_nbytes)
        taken = self.pool.num_taken(slot_nbytes)
        return self.pool.num_slots(slot_nbytes) - taken, cached, taken - cached

    def num_parked(self, slot_nbytes: int) -> int:
        """Query. How many of the reserved slots of `counts` are parked."""
        return self._num_parked[slot_nbytes]

    def take_parked(self, count: int | None = None) -> array[int]:
        """Changes state. So many slots, or all, to be freed by `unpark`; only the caller knows of them from now on."""
        parked, self._parked = self._parked[:count], self._parked[count:] if count is not None else array("I")
        return parked

    @property
    def has_parked(self) -> bool:
        """Query. Whether `take_parked` has something to give."""
        return bool(self._parked)

    def unpark(self, slots: array[int]) -> None:
        """Changes state. Parked slots may be reused."""
        for slot in slots:
            self._num_parked[self.slot_nbytes_of(slot)] -= 1
        self._release(slots)

    def park_again(self, slots: array[int]) -> None:
        """Changes state. What `take_parked` gave cannot be freed yet."""
        self._parked.extend(slots)

    def reserve_parked(self, slot: int) -> None:
        """Changes state. A slot that `take_parked` gave is not to be freed with the others."""
        self._num_parked[self.slot_nbytes_of(slot)] -= 1

    def is_kept(self, slot: int) -> bool:
        """Query."""
        return slot in self._kept

    def keep(self, slot: int) -> None:
        """Changes state. One more holds this slot, which is reserved, or whose block left the tree under a pin."""
        self._kept[slot] += 1

    def disown(self, slots: Iterable[int]) -> None:
        """Changes state. Reserved slots that have become blocks: from now on pins hold them, and nothing else."""
        for slot in slots:
            self._kept.pop(slot, None)

    def let_go(self, slots: Iterable[int]) -> None:
        """Changes state. Of slots that are kept, one holds them no more; others are given back."""
        free = array("I")
        for slot in slots:
            if self._kept[slot] > 1:
                self._kept[slot] -= 1
                continue
            del self._kept[slot]
            if self.state_of(slot) != FAILED:  # else a pin holds it, and the tree frees it after that
                free.append(slot)
        self._free(free)

    def make_room_later(self, slot_nbytes: int, count: int) -> bool:
        """Changes state. Of a parking tier: see to it that `count` slots are free once what is parked is unparked.

        False: that cannot be.
        """
        missing = count - self.pool.num_free(slot_nbytes) - self._num_parked[slot_nbytes]
        if missing <= 0:
            return True
        enough = missing <= self.tree.num_evictable(slot_nbytes)
        if not enough and self._num_parked.total():
            return True  # an extent drained before may be on its way: no further one before that is seen
        if self._should_look(slot_nbytes, enough) and self._drain_colder(slot_nbytes, enough):
            return True
        evicted = self._evict(slot_nbytes, min(missing, EVICTIONS_PER_TURN_MAX))
        return bool(evicted) or self._num_parked.total() > 0

    def adopt(self, slot_nbytes: int, blocks: LoadedBlocks, reserved: array[int]) -> int:
        """Changes state. Take over blocks, and reserved slots, that a medium holds from an earlier life.

        Their extents belong to nobody yet. What has no place in a chain is given up. How many blocks have.
        """
        self.pool.add_class(slot_nbytes)
        slots = array("I", np.concatenate((blocks.slots, _indices(reserved))).astype(np.uint32).tobytes())
        self.pool.adopt(slot_nbytes, _indices(slots))
        self._state[_indices(reserved)] = RESERVED
        self._state[blocks.slots] = SEALED
        lost = array("I", self.tree.load(slot_nbytes, blocks))
        self._free(lost)
        return len(blocks.slots) - len(lost)

    def lose_extents(self, extents: Iterable[int]) -> None:
        """Changes state. Their medium is gone. Chains run across extents, so every block is forgotten."""
        for root in list(self.tree.roots):
            self.clear(root)
        for extent in extents:
            self.pool.withdraw(extent)

    def check(self) -> None:
        """Query. Assert the invariants of the parts and that the slot table says the same."""
        self.tree.check()
        self.pool.check()
        for slot_nbytes in self.pool.classes:
            assert min(self.counts(slot_nbytes)) >= 0
            assert 0 <= self._num_parked[slot_nbytes] <= self.counts(slot_nbytes)[2]
        in_tree = int(np.isin(self._state, (SEALED, ARRIVING, FAILED)).sum())
        assert in_tree == sum(self.tree.num_blocks(size) for size in self.pool.classes)
        assert set(np.flatnonzero(self._state == FAILED).tolist()) == set(self.tree.detached_slots())
        not_free = int((self._state != FREE).sum())
        assert not_free == sum(self.pool.num_taken(size) for size in self.pool.classes)

    def _fail_detached(self) -> None:
        """What left the tree under a pin is no block any more, also for whoever goes on with these tables."""
        detached = self.tree.detached_slots()
        if detached:
            self._state[_indices(detached)] = FAILED

    def _free(self, slots: Iterable[int]) -> None:
        slots = array("I", slots)
        if self._kept:
            self._state[_indices(array("I", (slot for slot in slots if slot in self._kept)))] = RESERVED
            slots = array("I", (slot for slot in slots if slot not in self._kept))
        if not slots:
            return
        if not self.parking:
            self._release(slots)
            return
        self._state[_indices(slots)] = RESERVED
        self._parked.extend(slots)
        for slot in slots:
            self._num_parked[self.slot_nbytes_of(slot)] += 1

    def _release(self, slots: array[int]) -> None:
        self._state[_indices(slots)] = FREE
        self.pool.give_back(slots)

    def _evict(self, slot_nbytes: int, count: int) -> int:
        evicted = self.tree.evict(slot_nbytes, count)
        self.num_evicted += len(evicted)
        self._evicted_since_look[slot_nbytes] = self._evicted_since_look.get(slot_nbytes, 0) + len(evicted)
        self._free(evicted)
        return len(evicted)

    def _make_room(self, slot_nbytes: int, count: int) -> bool:
        """Evict until `count` slots of the class are free.

        False, with nothing evicted of this class, if that cannot be.
        """
        while (missing := count - self.pool.num_free(slot_nbytes)) > 0:
            enough = missing <= self.tree.num_evictable(slot_nbytes)
            if self.parking:
                return False
            if self._should_look(slot_nbytes, enough) and self._drain_colder(slot_nbytes, enough):
                continue
            if not enough:
                return False
            self._evict(slot_nbytes, missing)
        return True

    def _should_look(self, slot_nbytes: int, enough: bool) -> bool:
        """Whether to compare extents now: once per extent's worth of evictions, since it costs a scan, or in need."""
        if len(self.pool.classes) == 1:
            return False
        since = self._evicted_since_look.get(slot_nbytes)
        return not enough or since is None or since >= self.pool.slots_per_extent(slot_nbytes)

    def _drain_colder(self, slot_nbytes: int, enough: bool) -> bool:
        """Drain the coldest extent of another class, if it is worth less than our next victim or victims are too few.

        An extent's worth is the mean of its blocks' last use: one hot block must not keep 64 MiB of cold ones.
        """
        self._evicted_since_look[slot_nbytes] = 0
        coldest = self.tree.coldest(slot_nbytes) if enough else None
        width = max(self.pool.slots_per_extent(size) for size in self.pool.classes)
        for heat, extent, drainable in self.tree.extents_by_heat(SLOTS_PER_EXTENT_MAX, width):
            if coldest is not None and heat >= coldest:
                return False
            if drainable and self._may_drain(extent, slot_nbytes):
                drained = self.tree.drain(extent, SLOTS_PER_EXTENT_MAX)
                self._evicted_since_look.pop(slot_nbytes, None)  # the next coldest may be colder too
                self.num_evicted += len(drained)
                self._free(drained)
                return True
        return False

    def _may_drain(self, extent: int, slot_nbytes: int) -> bool:
        """Another class's extent in which no slot is reserved: draining it frees it whole."""
        if self.pool.class_of(extent) == slot_nbytes:
            return False
        rows = slice(extent * SLOTS_PER_EXTENT_MAX, (extent + 1) * SLOTS_PER_EXTENT_MAX)
        return not bool((self._state[rows] == RESERVED).any())


def _held_by(pins: Iterable[Pin]) -> set[Node]:
    held: set[Node] = set()
    for pin in pins:
        node: Node | None = pin.node
        while node is not None and node not in held:
            held.add(node)
            node = node.parent
    return held


def _indices(slots: array[int]) -> npt.NDArray[np.uint32]:
    return np.frombuffer(slots, dtype=np.uint32) if slots else np.empty(0, np.uint32)
