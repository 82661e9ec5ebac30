"""Which slots of a slab are free. The slab is cut into extents; an extent serves one slot size until it is empty again.

A slot number is `extent * SLOTS_PER_EXTENT_MAX + index`, dense enough for flat tables; its byte offset is
`extent * extent_nbytes + index * slot_nbytes`.
"""

from __future__ import annotations  # array[int] is not subscriptable at run time before 3.12

from array import array
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import HEADER_NBYTES, PAGE_NBYTES

EXTENT_NBYTES_MAX = 64 << 20
EXTENT_NBYTES_MIN = 4 << 20
EXTENTS_PER_SLAB_MIN = 4
SLOT_NBYTES_MIN = HEADER_NBYTES + PAGE_NBYTES
SLOTS_PER_EXTENT_MAX = EXTENT_NBYTES_MAX // SLOT_NBYTES_MIN


def extent_nbytes_for(capacity_nbytes: int) -> int:
    """Query. 64 MiB, less in a small slab, so that several slot sizes find room in it."""
    share = capacity_nbytes // EXTENTS_PER_SLAB_MIN
    return min(EXTENT_NBYTES_MAX, max(EXTENT_NBYTES_MIN, 1 << max(share.bit_length() - 1, 0)))


def slot_offset(slot: int, slot_nbytes: int, extent_nbytes: int) -> int:
    """Query. Where a slot of a class begins in the slab's data."""
    extent, index = divmod(slot, SLOTS_PER_EXTENT_MAX)
    return extent * extent_nbytes + index * slot_nbytes


class _Extent:
    """One extent while it belongs to a class: the indices of its free slots."""

    __slots__ = ("free", "taken")

    def __init__(self, num_slots: int) -> None:
        self.free = array("H", range(num_slots - 1, -1, -1))  # taken from the end: lowest index first
        self.taken = bytearray(num_slots)


class SlotPool:
    """Free and taken slots of every class, and the extents that belong to none."""

    def __init__(self, extent_nbytes: int, class_of: npt.NDArray[np.uint64]) -> None:
        """`class_of`: slot_nbytes each extent serves, 0 for none; written here only."""
        self.extent_nbytes = extent_nbytes
        self.capacity_nbytes = extent_nbytes * len(class_of)
        self._class_of = class_of
        self._unassigned: deque[int] = deque()  # oldest first: clients have mapped those already
        self._extents: dict[int, _Extent] = {}
        self._with_room: dict[int, dict[int, None]] = {}  # slot_nbytes -> its extents with a free slot, oldest first
        self._num_free: dict[int, int] = {}
        self._num_taken: dict[int, int] = {}
        self._withdrawn: set[int] = set()

    def add_extent(self, extent: int) -> None:
        """Changes state. An extent whose memory is there now; nothing where its medium has failed meanwhile."""
        if extent in self._withdrawn:
            return
        assert not self._class_of[extent] and extent not in self._unassigned
        self._unassigned.append(extent)

    def adopt(self, slot_nbytes: int, slots: npt.NDArray[np.uint32]) -> None:
        """Changes state. These slots are taken already; their extents, which were not added, belong to this class."""
        slots = np.sort(slots)
        numbers, first = np.unique(slots // SLOTS_PER_EXTENT_MAX, return_index=True)
        for number, members in zip(numbers.tolist(), np.split(slots, first[1:]), strict=True):
            assert number not in self._extents and number not in self._unassigned
            self._assign(number, slot_nbytes)
            extent = self._extents[number]
            taken = np.frombuffer(extent.taken, np.uint8)
            taken[members % SLOTS_PER_EXTENT_MAX] = 1
            extent.free = array("H", np.flatnonzero(taken == 0)[::-1].astype(np.uint16).tobytes())
            self._num_free[slot_nbytes] -= len(members)
            self._num_taken[slot_nbytes] += len(members)
            if not extent.free:
                del self._with_room[slot_nbytes][number]

    def add_class(self, slot_nbytes: int) -> None:
        """Changes state. Idempotent. A slot must fit an extent: the caller has checked."""
        assert SLOT_NBYTES_MIN <= slot_nbytes <= self.extent_nbytes
        self._with_room.setdefault(slot_nbytes, {})
        self._num_free.setdefault(slot_nbytes, 0)
        self._num_taken.setdefault(slot_nbytes, 0)

    def slots_per_extent(self, slot_nbytes: int) -> int:
        """Query."""
        return self.extent_nbytes // slot_nbytes

    @property
    def classes(self) -> list[int]:
        """Query. Slot sizes known, in bytes."""
        return list(self._num_free)

    @property
    def num_unassigned(self) -> int:
        """Query. Extents that any class may take."""
        return len(self._unassigned)

    def num_free(self, slot_nbytes: int) -> int:
        """Query. Slots `take` can give now, unassigned extents included."""
        return self._num_free[slot_nbytes] + len(self._unassigned) * self.slots_per_extent(slot_nbytes)

    def num_taken(self, slot_nbytes: int) -> int:
        """Query."""
        return self._num_taken[slot_nbytes]

    def num_slots(self, slot_nbytes: int) -> int:
        """Query. Slots in the extents that belong to the class now."""
        return self._num_free[slot_nbytes] + self._num_taken[slot_nbytes]

    def class_of(self, extent: int) -> int | None:
        """Query. The slot size an extent serves; None while it serves none."""
        return int(self._class_of[extent]) or None

    def take(self, slot_nbytes: int, count: int) -> array[int] | None:
        """Changes state. `count` slots, or None and no change when fewer are free."""
        if count > self.num_free(slot_nbytes):
            return None
        slots = array("I")
        room = self._with_room[slot_nbytes]
        while len(slots) < count:
            if not room:
                self._assign(self._unassigned.popleft(), slot_nbytes)
            extent = next(iter(room))
            slots.extend(self._take_from(extent, count - len(slots)))
            if not self._extents[extent].free:
                del room[extent]
        self._num_free[slot_nbytes] -= count
        self._num_taken[slot_nbytes] += count
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """Changes state. AssertionError on a slot that is not taken: that is a bug, never handled."""
        for slot in slots:
            number, index = divmod(slot, SLOTS_PER_EXTENT_MAX)
            assert number in self._extents, f"slot {slot} is of a free extent"
            extent, slot_nbytes = self._extents[number], int(self._class_of[number])
            assert extent.taken[index], f"slot {slot} is given back twice"
            extent.taken[index] = 0
            if number in self._withdrawn:
                self._num_taken[slot_nbytes] -= 1
                continue
            extent.free.append(index)
            self._with_room[slot_nbytes][number] = None
            self._num_free[slot_nbytes] += 1
            self._num_taken[slot_nbytes] -= 1
            if len(extent.free) == len(extent.taken):
                self._release(number, slot_nbytes)

    def withdraw(self, extent: int) -> None:
        """Changes state. Its medium is gone: no slot of it is handed out any more. Taken ones may still come back."""
        if extent in self._withdrawn:
            return
        self._withdrawn.add(extent)
        if extent in self._unassigned:
            self._unassigned.remove(extent)
        elif extent in self._extents:
            slot_nbytes = int(self._class_of[extent])
            self._num_free[slot_nbytes] -= len(self._extents[extent].free)
            self._extents[extent].free = array("H")
            self._with_room[slot_nbytes].pop(extent, None)

    def check(self) -> None:
        """Query. Assert that counters and free lists say the same."""
        for slot_nbytes in self._num_free:
            members = [extent for extent in self._extents if self._class_of[extent] == slot_nbytes]
            free = sum(len(self._extents[e].free) for e in members)
            taken = sum(sum(self._extents[e].taken) for e in members)
            assert (free, taken) == (self._num_free[slot_nbytes], self._num_taken[slot_nbytes])
            assert set(self._with_room[slot_nbytes]) == {e for e in members if self._extents[e].free}
            assert all(len(set(self._extents[e].free)) == len(self._extents[e].free) for e in members)
        assert not self._class_of[list(self._unassigned)].any()
        assert set(np.flatnonzero(self._class_of)) == set(self._extents)

    def _take_from(self, number: int, count: int) -> list[int]:
        extent = self._extents[number]
        indices = extent.free[: -count - 1 : -1]
        del extent.free[-len(indices) :]
        for index in indices:
            extent.taken[index] = 1
        base = number * SLOTS_PER_EXTENT_MAX
        return [base + index for index in indices]

    def _assign(self, number: int, slot_nbytes: int) -> None:
        extent = _Extent(self.slots_per_extent(slot_nbytes))
        self._class_of[number] = slot_nbytes
        self._extents[number] = extent
        self._with_room[slot_nbytes][number] = None
        self._num_free[slot_nbytes] += len(extent.free)

    def _release(self, number: int, slot_nbytes: int) -> None:
        """An empty extent serves any class again."""
        self._num_free[slot_nbytes] -= len(self._extents[number].free)
        del self._with_room[slot_nbytes][number], self._extents[number]
        self._class_of[number] = 0
        self._unassigned.append(number)
