"""A tier beneath the store: room made by eviction and by draining, and a table that says what is where."""

import time
from array import array

import numpy as np
import pytest

from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.core.tier import FREE, RESERVED, SEALED, Tier, new_tables
from radix import BlockHash, block_symbols, hash_prefix, token_bytes
from radix.hashing import HashKind

EXTENT_NBYTES = 64 << 10
SMALL, LARGE = 8192, 16384  # 8 and 4 slots per extent
ROOTS = {SMALL: BlockHash(b"small".ljust(16)), LARGE: BlockHash(b"large".ljust(16))}


class Blocks:
    """A tier of one-token blocks, with headers kept in a dict."""

    def __init__(self, num_extents: int) -> None:
        self.symbols: dict[int, bytes] = {}
        self.tables = new_tables(num_extents)
        self.tier = Tier(EXTENT_NBYTES, self.tables.extents, self.tables.slots["state"], self.symbols.__getitem__)
        for slot_nbytes, root in ROOTS.items():
            self.tier.add_spec(root, slot_nbytes)
        for extent in range(num_extents):
            self.tier.add_extent(extent)

    def put(self, ids: list[int], slot_nbytes: int = SMALL) -> int:
        """Number of blocks taken, of a chain that is not cached yet; -1 when there is no room."""
        slots = self.tier.reserve(slot_nbytes, len(ids))
        if slots is None:
            return -1
        self.symbols |= {slot: block_symbols(token_bytes([i]), ()) for slot, i in zip(slots, ids, strict=True)}
        inserted = self.tier.insert(ROOTS[slot_nbytes], self.hashes(ids, slot_nbytes), 0, slots, short=False)
        self.tier.give_back(inserted.unused)
        self.tier.check()
        return inserted.inserted

    @staticmethod
    def hashes(ids: list[int], slot_nbytes: int = SMALL) -> bytes:
        return hash_prefix(ROOTS[slot_nbytes], token_bytes(ids), 1, HashKind.XXH3)

    def found(self, ids: list[int], slot_nbytes: int = SMALL) -> int:
        return self.tier.match(ROOTS[slot_nbytes], self.hashes(ids, slot_nbytes)).num_blocks

    def states(self) -> list[int]:
        return [int((self.tables.slots["state"] == state).sum()) for state in (RESERVED, SEALED)]


def test_table_follows_a_slot_through_its_life() -> None:
    blocks = Blocks(1)
    slots = blocks.tier.reserve(SMALL, 2)
    assert slots is not None
    rows = blocks.tables.slots[list(slots)]
    assert rows["state"].tolist() == [RESERVED, RESERVED]
    blocks.tier.give_back(slots)
    assert blocks.states() == [0, 0]
    assert blocks.put([1, 2]) == 2
    assert blocks.states() == [0, 2]
    blocks.tier.clear(ROOTS[SMALL])
    assert not (blocks.tables.slots["state"] != FREE).any()


def test_block_written_twice_leaves_its_slot_reserved_until_given_back() -> None:
    blocks = Blocks(1)
    blocks.put([1])
    granted = blocks.tier.reserve(SMALL, 1)
    assert granted is not None
    inserted = blocks.tier.insert(ROOTS[SMALL], blocks.hashes([1]), 0, granted, short=False)
    assert (inserted.inserted, inserted.unused) == (0, list(granted))
    assert blocks.states() == [1, 1]
    assert blocks.tier.counts(SMALL) == (6, 1, 1)
    blocks.tier.give_back(inserted.unused)
    assert blocks.states() == [0, 1]


def test_reserve_without_room_changes_nothing_of_its_class() -> None:
    blocks = Blocks(1)
    blocks.put([1, 2, 3])
    pin = blocks.tier.pin(blocks.tier.match(ROOTS[SMALL], blocks.hashes([1, 2])))
    blocks.put([9, 9])
    assert blocks.tier.available(SMALL) == 6
    assert blocks.tier.reserve(SMALL, 7) is None
    assert (blocks.found([1, 2, 3]), blocks.found([9, 9]), blocks.tier.num_evicted) == (3, 2, 0)
    assert blocks.tier.reserve(SMALL, 6) is not None
    assert (blocks.found([1, 2, 3]), blocks.tier.num_evicted) == (2, 3)
    blocks.tier.unpin(pin)
    blocks.tier.check()


def test_colder_class_gives_up_an_extent_before_our_own_victims_go() -> None:
    blocks = Blocks(2)
    for at in range(4):
        assert blocks.put([at], LARGE) == 1  # extent 0: cold
    for at in range(8):
        assert blocks.put([at]) == 1
    assert blocks.put([99]) == 1
    assert sum(blocks.found([at], LARGE) for at in range(4)) == 0
    assert sum(blocks.found([at]) for at in range(8)) == 8


def test_hotter_class_keeps_its_extents_while_we_have_victims() -> None:
    blocks = Blocks(2)
    for at in range(8):
        assert blocks.put([at]) == 1
    for at in range(4):
        assert blocks.put([at], LARGE) == 1
    assert blocks.put([99]) == 1
    assert sum(blocks.found([at], LARGE) for at in range(4)) == 4
    assert [blocks.found([at]) for at in range(8)] == [0, *[1] * 7]


def test_class_without_victims_drains_the_coldest_extent_it_may() -> None:
    blocks = Blocks(3)
    for at in range(24):
        assert blocks.put([at]) == 1
    pins = [blocks.tier.pin(blocks.tier.match(ROOTS[SMALL], blocks.hashes([at]))) for at in (0, 23)]
    assert blocks.put([1], LARGE) == 1
    assert [blocks.tier.pool.class_of(extent) for extent in range(3)] == [SMALL, LARGE, SMALL]
    assert blocks.put([1, 2, 3, 4, 5], LARGE) == -1
    for pin in pins:
        blocks.tier.unpin(pin)
    assert blocks.put([1, 2, 3, 4, 5], LARGE) == 4  # block 1 was there
    assert [blocks.tier.pool.class_of(extent) for extent in range(3)].count(LARGE) == 2


def test_counts_add_up_in_every_state() -> None:
    blocks = Blocks(2)
    granted = blocks.tier.reserve(SMALL, 3)
    assert granted is not None
    blocks.put([1, 2])
    assert blocks.tier.counts(SMALL) == (3, 2, 3)
    assert blocks.tier.counts(LARGE) == (0, 0, 0)
    assert blocks.tier.slot_nbytes_of(granted[0]) == SMALL
    blocks.tier.give_back(granted)
    assert blocks.tier.counts(SMALL) == (6, 2, 0)


def test_check_sees_a_table_that_differs() -> None:
    blocks = Blocks(1)
    blocks.put([1])
    (slot,) = np.flatnonzero(blocks.tables.slots["state"])
    blocks.tables.slots["state"][slot] = RESERVED
    with pytest.raises(AssertionError):
        blocks.tier.check()


def test_distinct_blocks_counts_shared_ones_once() -> None:
    blocks = Blocks(2)
    blocks.put([1, 2, 3])
    blocks.put([5])
    chains = ([1, 2, 3], [1, 2], [5], [1, 2, 3])
    pins = [blocks.tier.pin(blocks.tier.match(ROOTS[SMALL], blocks.hashes(ids))) for ids in chains]
    assert blocks.tier.distinct_blocks(pins) == 4
    assert blocks.tier.distinct_blocks(pins[1:2]) == 2
    assert blocks.tier.distinct_blocks([]) == 0


def test_nothing_is_taken_for_an_empty_list() -> None:
    blocks = Blocks(1)
    blocks.tier.give_back(array("I"))
    assert blocks.tier.reserve(SMALL, 9) is None
    assert blocks.tier.pool.num_unassigned == 1


def test_comparing_extents_costs_what_is_in_them() -> None:
    """PRF: 2,000 extents of 64 MiB with 16 slots each, where numbers are given for 8,192."""
    num_extents, slot_nbytes = 2000, 4 << 20
    tables = new_tables(num_extents)
    tier = Tier(64 << 20, tables.extents, tables.slots["state"], lambda _: b"")
    for size, root in ((slot_nbytes, ROOTS[SMALL]), (2 * slot_nbytes, ROOTS[LARGE])):
        tier.add_spec(root, size)
    for extent in range(num_extents):
        tier.add_extent(extent)
        granted = tier.reserve(slot_nbytes, 16)
        assert granted is not None
        hashes = Blocks.hashes(list(range(16 * extent, 16 * extent + 16)))
        assert tier.insert(ROOTS[SMALL], hashes, 0, granted, short=False).inserted == 16
    took_ms = []
    for number in range(5):
        began = time.perf_counter()
        granted = tier.reserve(2 * slot_nbytes, 8)
        took_ms.append(1000 * (time.perf_counter() - began))
        assert granted is not None
        assert {slot // SLOTS_PER_EXTENT_MAX for slot in granted} == {number}, "the coldest extent makes room"
    assert min(took_ms) < 20
    tier.check()
