"""Free and taken slots: each rule by an example, then all of them against sets."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core.slots import (
    EXTENT_NBYTES_MAX,
    EXTENT_NBYTES_MIN,
    EXTENTS_PER_SLAB_MIN,
    SLOT_NBYTES_MIN,
    SLOTS_PER_EXTENT_MAX,
    SlotPool,
    extent_nbytes_for,
    slot_offset,
)

EXTENT_NBYTES = 64 << 10
SMALL, LARGE = 8192, 24576  # 8 and 2 slots per extent
MIB = 1 << 20


def make_pool(num_extents: int, ready: int | None = None) -> SlotPool:
    pool = SlotPool(EXTENT_NBYTES, np.zeros(num_extents, np.uint64))
    for slot_nbytes in (SMALL, LARGE):
        pool.add_class(slot_nbytes)
    for extent in range(num_extents if ready is None else ready):
        pool.add_extent(extent)
    return pool


def taken(pool: SlotPool, slot_nbytes: int, count: int) -> list[int]:
    slots = pool.take(slot_nbytes, count)
    assert slots is not None
    return slots.tolist()


def test_take_is_all_or_nothing() -> None:
    pool = make_pool(2)
    assert pool.take(SMALL, 17) is None
    assert pool.num_unassigned == 2
    assert len(taken(pool, SMALL, 16)) == 16
    assert pool.take(SMALL, 1) is None
    assert taken(pool, SMALL, 0) == []


def test_empty_extent_serves_any_class_again() -> None:
    pool = make_pool(1)
    slots = taken(pool, SMALL, 3)
    assert pool.take(LARGE, 1) is None
    pool.give_back(slots)
    assert (pool.num_unassigned, pool.class_of(0)) == (1, None)
    assert taken(pool, LARGE, 2) == [0, 1]
    assert pool.class_of(0) == LARGE


def test_slot_given_back_twice_is_our_bug() -> None:
    """LEK: loud at once, never handled."""
    pool = make_pool(1)
    first, second = taken(pool, SMALL, 2)
    pool.give_back([first])
    with pytest.raises(AssertionError):
        pool.give_back([first])
    pool.give_back([second])
    with pytest.raises(AssertionError):
        pool.give_back([second])  # the extent itself is free by now


def test_extent_enters_once() -> None:
    pool = make_pool(2, ready=1)
    with pytest.raises(AssertionError):
        pool.add_extent(0)
    taken(pool, SMALL, 1)
    with pytest.raises(AssertionError):
        pool.add_extent(0)


def test_slots_fill_an_extent_before_the_next() -> None:
    pool = make_pool(3)
    slots = taken(pool, SMALL, 9)
    assert slots == [*range(8), SLOTS_PER_EXTENT_MAX]
    pool.give_back(slots[2:4])
    assert {slot // SLOTS_PER_EXTENT_MAX for slot in taken(pool, SMALL, 9)} == {0, 1}
    assert pool.num_unassigned == 1


def test_class_that_does_not_fit_is_refused() -> None:
    pool = make_pool(1)
    for slot_nbytes in (SLOT_NBYTES_MIN - 1, EXTENT_NBYTES + 1):
        with pytest.raises(AssertionError):
            pool.add_class(slot_nbytes)
    pool.add_class(EXTENT_NBYTES)
    assert taken(pool, EXTENT_NBYTES, 1) == [0]


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (1, EXTENT_NBYTES_MIN),
        (4 * MIB, 4 * MIB),
        (16 * MIB, 4 * MIB),
        (33 * MIB, 8 * MIB),
        (255 * MIB, 32 * MIB),
        (256 * MIB, 64 * MIB),
        (1 << 40, EXTENT_NBYTES_MAX),
    ],
)
def test_small_slabs_have_small_extents(capacity: int, expected: int) -> None:
    assert extent_nbytes_for(capacity) == expected
    assert capacity < EXTENTS_PER_SLAB_MIN * EXTENT_NBYTES_MIN or capacity // expected >= EXTENTS_PER_SLAB_MIN


def test_slots_of_an_extent_do_not_overlap() -> None:
    for slot_nbytes in (SMALL, LARGE):
        count = EXTENT_NBYTES // slot_nbytes
        slots = [extent * SLOTS_PER_EXTENT_MAX + index for extent in range(3) for index in range(count)]
        offsets = [slot_offset(slot, slot_nbytes, EXTENT_NBYTES) for slot in slots]
        ends = [offset + slot_nbytes for offset in offsets]
        assert all(end <= following for end, following in zip(ends, offsets[1:], strict=False))
        assert all(end <= (at // count + 1) * EXTENT_NBYTES for at, end in enumerate(ends))
    assert EXTENT_NBYTES_MAX // SLOT_NBYTES_MIN == SLOTS_PER_EXTENT_MAX


class SlotPoolMachine(RuleBasedStateMachine):
    """Model: the set of slots held, per class. An extent is a class's while it holds one of its slots."""

    def __init__(self) -> None:
        super().__init__()
        self.class_of = np.zeros(4, np.uint64)
        self.pool = SlotPool(EXTENT_NBYTES, self.class_of)
        self.sizes = {SMALL: 8, LARGE: 2}
        for slot_nbytes in self.sizes:
            self.pool.add_class(slot_nbytes)
        self.held: dict[int, set[int]] = defaultdict(set)
        self.num_ready = 0

    def extents_of(self, slot_nbytes: int) -> set[int]:
        return {slot // SLOTS_PER_EXTENT_MAX for slot in self.held[slot_nbytes]}

    def num_free(self, slot_nbytes: int) -> int:
        unassigned = self.num_ready - sum(len(self.extents_of(each)) for each in self.sizes)
        extents = len(self.extents_of(slot_nbytes)) + unassigned
        return extents * self.sizes[slot_nbytes] - len(self.held[slot_nbytes])

    @rule()
    def extent_is_ready(self) -> None:
        if self.num_ready < len(self.class_of):
            self.pool.add_extent(self.num_ready)
            self.num_ready += 1

    @rule(slot_nbytes=st.sampled_from([SMALL, LARGE]), count=st.integers(0, 20))
    def take(self, slot_nbytes: int, count: int) -> None:
        free = self.num_free(slot_nbytes)
        slots = self.pool.take(slot_nbytes, count)
        assert (slots is None) == (count > free)
        got = set(slots or ())
        assert len(got) == (0 if slots is None else count)
        assert got.isdisjoint(self.held[slot_nbytes])
        assert all(slot % SLOTS_PER_EXTENT_MAX < self.sizes[slot_nbytes] for slot in got)
        self.held[slot_nbytes] |= got

    @rule(data=st.data(), slot_nbytes=st.sampled_from([SMALL, LARGE]))
    def give_back(self, data: st.DataObject, slot_nbytes: int) -> None:
        if self.held[slot_nbytes]:
            some = data.draw(st.lists(st.sampled_from(sorted(self.held[slot_nbytes])), unique=True))
            self.pool.give_back(some)
            self.held[slot_nbytes] -= set(some)

    @invariant()
    def pool_says_what_the_model_says(self) -> None:
        self.pool.check()
        assert self.extents_of(SMALL).isdisjoint(self.extents_of(LARGE))
        for slot_nbytes in self.sizes:
            assert set(np.flatnonzero(self.class_of == slot_nbytes).tolist()) == self.extents_of(slot_nbytes)
            assert self.pool.num_free(slot_nbytes) == self.num_free(slot_nbytes)
            assert self.pool.num_taken(slot_nbytes) == len(self.held[slot_nbytes])
            assert self.pool.num_slots(slot_nbytes) == len(self.extents_of(slot_nbytes)) * self.sizes[slot_nbytes]


SlotPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_slot_pool_against_sets = SlotPoolMachine.TestCase
