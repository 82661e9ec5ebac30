"""Two tiers, one fact at a time: what is written down, brought up, forgotten and found again."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import xxhash

from kvstore.core.layout import HEADER_NBYTES, Header, Rect
from kvstore.core.lower import LowerSettings, LowerTier
from kvstore.core.moves import LoadBlocks, SumBlocks, WriteGroup
from kvstore.core.store import Acquisition
from kvstore.core.tier import ARRIVING, FAILED, SEALED
from kvstore.core.watch import Progress
from kvstore.ranks import whole_of
from kvstore.spec import KVSpec
from tests.models import SimDisk, SimSlab, Text, store_on, write_header

EXTENT_NBYTES = 64 << 10
SPEC = KVSpec(model="small", dtype="float16", num_layers=1, head_dim=2, block_tokens=4)
LARGE = KVSpec(model="large", dtype="float16", num_layers=1, head_dim=600, block_tokens=4)
assert SPEC.slot_nbytes == 8192  # 8 to an extent
Ids = tuple[int, ...]


def ids(first: int, num_blocks: int) -> Ids:
    return tuple(range(1000 * first, 1000 * first + 4 * num_blocks))


class Node:
    """A store of two tiers; `run` carries out what it asks for."""

    def __init__(
        self,
        memory_extents: int = 2,
        disk_extents: int = 8,
        settings: LowerSettings | None = None,
        disk: SimDisk | None = None,
    ) -> None:
        self.slab = SimSlab(memory_extents, EXTENT_NBYTES)
        self.store = store_on(self.slab, session_share=1.0)
        self.disk = disk or SimDisk(self.slab, disk_extents, EXTENT_NBYTES)
        self.disk.slab = self.slab
        lower = LowerTier(EXTENT_NBYTES, self.disk.num_extents, self.disk.symbols, settings or LowerSettings())
        self.num_found = lower.adopt(self.disk.table(), self.disk.classes)
        for extent in range(self.disk.num_extents):
            if lower.tier.pool.class_of(extent) is None:
                lower.tier.add_extent(extent)
        self.store.add_lower(lower)
        session = self.store.open_session()
        assert session is not None
        self.session = session.id
        self.last_id = 0
        self.loads: list[tuple[LoadBlocks, int]] = []  # asked for, not done yet
        self.groups: list[WriteGroup] = []

    @property
    def lower(self) -> LowerTier:
        assert self.store.lower is not None
        return self.store.lower

    def text(self, tokens: Ids, spec: KVSpec = SPEC) -> Text:
        return Text(self.store.attach(spec), tokens, ())

    def put(self, tokens: Ids, spec: KVSpec = SPEC) -> int:
        text = self.text(tokens, spec)
        self.last_id += 1
        number = self.last_id
        grant = self.store.reserve(self.session, text.entry.spec_id, number, text.hashes, 0, text.tail)
        slots = array("I", grant.slots)
        for at, slot in enumerate(slots, grant.start // spec.block_tokens):
            payload = text.payload(at).reshape(-1)

            rect = Rect(whole_of(spec), xxhash.xxh3_64_intdigest(payload.data))
            offset = self.slab.offset(slot)
            self.slab.write(offset + HEADER_NBYTES, payload)
            write_header(self.slab, offset, Header(text.identity(at), payload.size, grant.generation, (rect,)))
        return self.store.commit(self.session, number, b"\1" * len(slots))

    def acquire(self, tokens: Ids, spec: KVSpec = SPEC) -> tuple[int, Acquisition]:
        text = self.text(tokens, spec)
        self.last_id += 1
        return self.last_id, self.store.acquire(self.session, text.entry.spec_id, self.last_id, text.query)

    def ask(self) -> None:
        """Changes state. Take what the store wants moved; nothing moves yet."""
        for transfer in self.store.take_transfers():
            assert not isinstance(transfer, SumBlocks)
            if isinstance(transfer, LoadBlocks):
                self.loads += [(transfer, index) for index in range(len(transfer.blocks))]
            else:
                self.groups.append(transfer)
        self.store.check()

    def load_one(self) -> None:
        transfer, index = self.loads.pop(0)
        outcome = self.disk.load(transfer.blocks[index])
        self.lower.loaded(transfer.id, index, outcome, self.store.now_ms)
        self.store.check()

    def write_one(self) -> None:
        group = self.groups.pop(0)
        failed, ok = self.disk.commit(group)
        self.lower.writes.almost_written()
        self.lower.writes.committed(group.id, failed, ok, self.store.now_ms)
        self.store.check()

    def run(self, ms: float = 1000.0) -> None:
        """Changes state. Until nothing is left to do, and `ms` have passed."""
        for _ in range(100):
            self.store.on_time(self.store.now_ms + ms / 10)
            self.ask()
            while self.loads or self.groups:
                if self.loads:
                    self.load_one()
                else:
                    self.write_one()
            if self.lower.writes.is_idle and (self.disk.is_dead or not self.lower.tier.has_parked):
                return
        raise AssertionError("it does not come to rest")

    def read(self, tokens: Ids, spec: KVSpec = SPEC) -> int:
        """Changes state. Tokens of a hit whose bytes are right, after all loads."""
        text = self.text(tokens, spec)
        number, got = self.acquire(tokens, spec)
        self.run()
        self.store.wait(1, self.session, number, 1 << 30, self.store.now_ms)
        ((_, progress),) = self.store.take_progress() or ((1, Progress(0, True)),)
        slots = array("I", got.slots)[: progress.ready]
        for block, slot in enumerate(slots):
            header = self.slab.header(slot)
            assert header is not None
            payload = self.slab.payload(self.slab.offset(slot), header.payload_nbytes)
            rows, stored = len(text.payload(block)), len(header.identity.tokens) // 4
            num_tokens = min(got.num_tokens - 4 * block, 4)
            shown = payload.reshape(rows, stored, -1)[:, :num_tokens]
            assert np.array_equal(shown, text.payload(block)[:, :num_tokens]), "wrong bytes"
        self.store.release(self.session, [number])
        return min(got.num_tokens, 4 * len(slots))

    def counts(self) -> tuple[int, int]:
        """Blocks in memory, blocks below."""
        return self.store.memory.counts(8192)[1], self.lower.tier.counts(8192)[1]


@pytest.fixture
def node() -> Node:
    return Node()


def test_write_through_puts_each_commit_below(node: Node) -> None:
    node.put(ids(1, 3))
    node.run()
    assert node.counts() == (3, 3)
    assert node.store.stats.blocks_written == 3
    assert sorted(row[0].number for row in node.disk.rows.values()) == [0, 1, 2]


def test_what_memory_evicted_comes_back_from_below(node: Node) -> None:
    """DSK, a block demoted is not forgotten: 16 slots of memory, 40 blocks."""
    for first in range(10):
        node.put(ids(first, 4))
        node.run()
    assert node.counts() == (16, 40)
    assert [node.read(ids(first, 4)) for first in range(10)] == [16] * 10
    assert node.store.stats.blocks_loaded >= 24


def test_a_short_tail_and_a_partial_block_come_back(node: Node) -> None:
    node.put((*ids(1, 2), 7, 8))
    node.run()
    for first in range(2, 6):
        node.put(ids(first, 4))
        node.run()
    assert node.store.memory.match(node.text(ids(1, 2)).entry.root, node.text(ids(1, 2)).hashes).num_blocks == 0
    assert node.read((*ids(1, 2), 7, 8)) == 10
    for first in range(2, 6):
        node.read(ids(first, 4))
    assert node.read((*ids(1, 2)[:6], 99)) == 6


def test_two_that_want_the_same_wait_for_one_load(node: Node) -> None:
    node.put(ids(1, 3))
    node.run()
    for first in range(2, 6):
        node.put(ids(first, 4))
        node.run()
    (one, got), (two, also) = node.acquire(ids(1, 3)), node.acquire(ids(1, 3))
    assert got == also == Acquisition(12, got.slots, 0)
    node.ask()
    assert len(node.loads) == 3
    node.store.wait(1, node.session, one, 2, node.store.now_ms + 100)
    node.store.wait(2, node.session, two, 3, node.store.now_ms + 100)
    assert node.store.take_progress() == []
    node.load_one()
    assert node.store.take_progress() == []
    node.load_one()
    assert node.store.take_progress() == [(1, Progress(2, False))]
    node.load_one()
    assert node.store.take_progress() == [(2, Progress(3, True))]


@pytest.mark.parametrize("way", ["flip", "io", "gone"])
def test_what_comes_back_wrong_is_a_miss_and_leaves_both_tiers(node: Node, way: str) -> None:
    """COR, LMCache 0.5.6: a bit flip on disk is never served; the chain before it is."""
    node.put(ids(1, 4))
    node.run()
    for first in range(2, 6):
        node.put(ids(first, 4))
        node.run()
    slot = next(slot for slot, (block, _, _) in node.disk.rows.items() if block.number == 2 and _is_of(node, block, 1))
    data = bytearray(node.disk.slots[slot])
    data[HEADER_NBYTES + 5] ^= 1
    if way == "flip":
        node.disk.slots[slot] = bytes(data)
    elif way == "gone":
        del node.disk.slots[slot]
    else:
        node.disk.fails.add(slot)
    assert node.read(ids(1, 4)) == 8
    node.run()
    assert node.store.find(0, node.text(ids(1, 4)).query) == 8
    assert node.store.stats.load_failures == {"io" if way == "io" else "corrupt": 1}
    node.disk.fails.clear()
    node.put(ids(1, 4))  # healed
    node.run()
    assert node.read(ids(1, 4)) == 16


def _is_of(node: Node, block: object, first: int) -> bool:
    text = node.text(ids(first, 4))
    return getattr(block, "block_hash", b"") in {text.block_hash(at) for at in range(4)}


def test_lower_tier_is_never_above_its_capacity_and_rows_go_before_slots() -> None:
    """DSK, L#1454: 4 extents of 8 slots, 200 blocks; SimDisk refuses a slot whose row still stands."""
    node = Node(disk_extents=4)
    for first in range(50):
        node.put(ids(first, 4))
        node.run()
        assert len(node.disk.rows) <= 32
    assert node.lower.tier.num_evicted >= 160
    assert sum(node.read(ids(first, 4)) == 16 for first in range(50)) >= 7


def test_a_failed_group_forgets_nothing_in_memory_and_pauses(node: Node) -> None:
    """DSK: a full or dead disk is an expected result."""
    node.disk.is_dead = True
    node.put(ids(1, 3))
    node.run()
    assert node.counts() == (3, 0)
    assert node.store.stats.groups_failed == 1
    node.put(ids(2, 3))
    assert node.store.stats.writes_dropped["paused"] == 3
    node.disk.is_dead = False
    node.run(5000)
    node.read(ids(2, 3))  # used twice: written now
    node.run()
    assert node.counts() == (6, 3)


def test_a_block_that_cannot_be_written_takes_its_children_along(node: Node) -> None:
    node.disk.fails = {1}
    node.put(ids(1, 4))
    node.run()
    assert node.counts() == (4, 1)
    assert node.store.stats.writes_dropped == {"io": 3}


def test_a_block_damaged_in_memory_leaves_it_and_can_be_stored_anew(node: Node) -> None:
    """COR: found before it is written; what hangs below it goes too, what is above stays."""
    node.put(ids(1, 5))
    lease, got = node.acquire(ids(1, 5))
    node.store.on_time(node.store.now_ms + 200)
    node.ask()
    (group,) = node.groups
    bad = [block for block in group.blocks if block.number in (2, 3)]
    for block in bad[::-1]:
        node.lower.damaged(group.id, block.disk_slot)
        node.store.check()
    assert node.store.stats.discards == {"payload": 2}
    text = node.text(ids(1, 5))
    assert node.store.find(text.entry.spec_id, text.query) == 8, "at once, not when the group has ended"
    assert node.put(ids(1, 5)) == 3
    failed = frozenset(block.disk_slot for block in group.blocks[2:])
    node.groups.clear()
    node.disk.commit_rows(group, {block.disk_slot for block in group.blocks[:2]})
    node.lower.writes.almost_written()
    node.lower.writes.committed(group.id, failed, True, node.store.now_ms)
    node.store.check()
    assert node.store.stats.writes_dropped["payload"] == 3
    assert got.num_tokens == 20
    node.store.release(node.session, [lease])
    assert node.read(ids(1, 5)) == 20
    node.run()
    assert node.counts() == (5, 5), "written when it was used again"


@pytest.mark.parametrize(("reason", "left"), [("payload", 12), ("header", 4)])
def test_a_damaged_payload_costs_memory_only(node: Node, reason: str, left: int) -> None:
    """COR: its header is whole as where names collide, but the copy below is another, and was summed."""
    node.put(ids(1, 3))
    node.run()
    lease, _ = node.acquire(ids(1, 3))
    node.store.discard(node.session, lease, 1, reason)
    node.store.release(node.session, [lease])
    node.store.check()
    assert node.counts()[0] == 1
    assert node.read(ids(1, 3)) == left
    assert node.store.stats.discards == {reason: 1}


def test_a_header_damaged_in_memory_does_not_hide_the_copy_below(node: Node) -> None:
    """COR: nor for a prompt that shares a block's first tokens only, where headers are compared. Its reader gets the
    damaged block, says so, and has the good one the next time. (Found by the simulation.)"""
    node.put(ids(1, 1))
    node.run()
    (slot,) = node.slab.slots_in(SEALED)
    node.slab.bytes[node.slab.offset(slot) + 20] ^= 1
    prompt = (*ids(1, 1)[:3], 99)
    lease, got = node.acquire(prompt)
    assert (got.num_tokens, array("I", got.slots).tolist()) == (3, [slot])
    node.store.discard(node.session, lease, 0, "header")
    node.store.release(node.session, [lease])
    node.store.check()
    assert node.counts() == (0, 1)
    assert node.read(prompt) == 3


def test_restart_finds_what_was_committed_and_nothing_else(node: Node) -> None:
    """RST, L#562."""
    for first in range(6):
        node.put((*ids(first, 3), 5))
        node.run()
    node.put(ids(9, 4))
    node.store.on_time(node.store.now_ms + 1000)
    node.ask()  # a group under way when the daemon dies
    again = Node(disk=node.disk)
    assert again.num_found == 24 == again.lower.tier.counts(8192)[1]
    assert [again.read((*ids(first, 3), 5)) for first in range(6)] == [13] * 6
    assert again.read(ids(9, 4)) == 0


def test_rows_without_parents_are_given_up_and_their_rows_go(node: Node) -> None:
    node.put(ids(1, 4))
    node.run()
    slot = next(slot for slot, (block, _, _) in node.disk.rows.items() if block.number == 1)
    del node.disk.rows[slot]
    again = Node(disk=node.disk)
    assert again.num_found == 1
    again.run()
    assert [block.number for block, _, _ in again.disk.rows.values()] == [0]


def test_clear_forgets_in_every_tier_also_what_is_on_its_way(node: Node) -> None:
    node.put(ids(1, 3))
    node.run()
    node.put(ids(2, 3))
    node.store.on_time(node.store.now_ms + 1000)
    node.ask()
    node.store.clear(0)
    node.write_one()
    node.run()
    assert node.counts() == (0, 0)
    assert node.disk.rows == {}


def test_loads_that_are_cleared_meanwhile_end(node: Node) -> None:
    node.put(ids(1, 3))
    node.run()
    for first in range(2, 6):
        node.put(ids(first, 4))
        node.run()
    number, _ = node.acquire(ids(1, 3))
    node.ask()
    node.store.clear(0)
    node.store.wait(1, node.session, number, 3, node.store.now_ms + 1e6)
    assert node.store.take_progress() == [(1, Progress(0, True))]
    node.run()
    node.store.release(node.session, [number])
    node.run()
    assert node.counts() == (0, 0)


def test_write_back_holds_back_and_never_evicts_what_is_not_written() -> None:
    node = Node(memory_extents=4, settings=LowerSettings(is_write_back=True))
    node.put(ids(1, 4))
    node.store.on_time(node.store.now_ms + 10_000)
    node.ask()
    assert not node.groups
    for first in range(2, 12):
        node.put(ids(first, 4))
        for _ in range(3):
            node.store.on_time(node.store.now_ms + 200)
            node.ask()
            while node.groups:
                node.write_one()
    assert [node.store.find(0, node.text(ids(first, 4)).query) for first in range(1, 12)] == [16] * 11


def test_over_budget_only_what_is_used_twice_is_written() -> None:
    node = Node(settings=LowerSettings(write_budget_nbytes=3 * 8192))
    node.put(ids(1, 3))
    node.run()
    node.put(ids(2, 3))
    node.run()
    assert node.counts() == (6, 3)
    assert node.store.stats.writes_dropped == {"budget": 3}
    assert node.read(ids(2, 3)) == 12
    assert node.counts() == (6, 6)


def test_a_slow_tier_is_refused_and_probed_until_it_recovers() -> None:
    """PRF: load only if that is faster than prefill."""
    node = Node()
    node.put(ids(1, 4))
    node.run()
    for first in range(2, 6):
        node.put(ids(first, 4))
        node.run()
    for _ in range(20):
        node.store.report(0, 1000, 10.0, None)  # 10 us a token
    node.lower.gate.observe(8192, 1e5)
    number, got = node.acquire(ids(1, 4))
    assert got.num_tokens == 0
    assert node.store.stats.loads_refused == 1
    assert node.store.stats.loads_probed == 1
    node.ask()
    assert node.loads
    while node.loads:
        node.load_one()
    node.store.release(node.session, [number])
    assert node.read(ids(1, 4)) == 16


def test_a_load_that_falls_behind_is_cut_and_keeps_what_came() -> None:
    node = Node()
    node.put(ids(1, 4))
    node.run()
    for first in range(2, 6):
        node.put(ids(first, 4))
        node.run()
    for _ in range(20):
        node.store.report(0, 1000, 1000.0, None)  # 1 ms a token
    number, got = node.acquire(ids(1, 4))
    assert got == Acquisition(16, got.slots, 0)
    node.ask()
    node.load_one()
    node.store.wait(1, node.session, number, 4, node.store.now_ms + 1e6)
    due_ms = node.store.next_deadline_ms()
    assert due_ms is not None
    assert due_ms == pytest.approx(node.store.now_ms + 4 + 0.05 * 16)
    node.store.on_time(due_ms)
    assert node.store.take_progress() == [(1, Progress(1, True))]
    assert node.store.stats.loads_cut == 1
    node.run()


def test_a_block_too_large_for_the_lower_tiers_extents_stays_in_memory() -> None:
    node = Node(memory_extents=4)
    node.put(ids(1, 2), LARGE)
    node.run()
    assert node.lower.serves(node.store.specs[-1])


def test_states_tell_what_is_on_its_way(node: Node) -> None:
    node.put(ids(1, 2))
    node.store.on_time(node.store.now_ms + 1000)
    node.ask()
    (group,) = node.groups
    assert {node.lower.tier.state_of(block.disk_slot) for block in group.blocks} == {ARRIVING}
    node.write_one()
    assert {node.lower.tier.state_of(block.disk_slot) for block in group.blocks} == {SEALED}
    assert FAILED not in node.slab.tables.slots["state"]


def test_prefetch_brings_up_in_the_background(node: Node) -> None:
    node.put(ids(1, 4))
    node.run()
    for first in range(2, 6):
        node.put(ids(first, 4))
        node.run()
    node.store.prefetch(node.session, 0, node.text(ids(1, 4)).query)
    node.run()
    _, got = node.acquire(ids(1, 4))
    assert (got.num_tokens, got.ready) == (16, 4)


def test_a_lost_path_is_forgotten_and_used_no_more(node: Node) -> None:
    for first in range(8):
        node.put(ids(first, 4))
        node.run()
    node.lower.lose_extents([0, 2, 4, 6])
    node.run()
    assert node.counts()[1] == 0
    for first in range(20, 28):
        node.put(ids(first, 4))
        node.run()
    assert {slot // 8192 % 2 for slot in node.disk.rows} == {1}
