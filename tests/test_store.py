"""What the store promises, one fact at a time. tests/sim mixes them all."""

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

import kvstore.core.leases
from kvstore.core.layout import Header
from kvstore.core.moves import SumBlocks
from kvstore.core.store import QUARANTINE_MS, SESSIONS_MAX, Acquisition, Grant, Query, Store
from kvstore.core.tier import FAILED, FREE, RESERVED, SEALED
from kvstore.errors import KVStoreError, SessionLost, SpecMismatch
from kvstore.spec import KVSpec
from tests.models import SimSlab, Text, store_on, write_header

EXTENT_NBYTES = 64 << 10  # 8 slots of `SMALL`, 4 of `LARGE`
SMALL = KVSpec(model="small", dtype="float16", num_layers=1, head_dim=2, block_tokens=4)
LARGE = KVSpec(model="large", dtype="float16", num_layers=1, head_dim=600, block_tokens=4)
OTHER = KVSpec(model="other", dtype="float16", num_layers=1, head_dim=2, block_tokens=4)
assert (SMALL.slot_nbytes, LARGE.slot_nbytes) == (8192, 16384)

Ids = tuple[int, ...]


class Node:
    """A store on a slab of `num_extents`, with a session and verbs that take token ids."""

    def __init__(self, num_extents: int = 4, *, session_share: float = 1.0, checksums: bool = True) -> None:
        self.slab = SimSlab(num_extents, EXTENT_NBYTES)
        self.store = store_on(self.slab, session_share=session_share, checksums=checksums)
        self.session = self.open()
        self.last_id = 0

    def open(self) -> int:
        session = self.store.open_session()
        assert session is not None
        return session.id

    def text(self, ids: Ids, spec: KVSpec = SMALL, keys: tuple[tuple[int, bytes], ...] = ()) -> Text:
        return Text(self.store.attach(spec), ids, keys)

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def find(self, ids: Ids, spec: KVSpec = SMALL) -> int:
        text = self.text(ids, spec)
        return self.store.find(text.entry.spec_id, text.query)

    def acquire(self, ids: Ids, *, lease: int = 0, session: int = 0, spec: KVSpec = SMALL) -> Acquisition:
        text = self.text(ids, spec)
        return self.store.acquire(session or self.session, text.entry.spec_id, lease or self.next_id(), text.query)

    def reserve(self, text: Text, *, start: int = 0, number: int = 0, session: int = 0) -> tuple[int, Grant]:
        """With the headers of what was granted written, as a client does at once."""
        number, spec = number or self.next_id(), text.entry.spec_id
        grant = self.store.reserve(session or self.session, spec, number, text.hashes, start, text.tail)
        for at, slot in enumerate(slots_of(grant)):
            block = grant.start // text.spec.block_tokens + at
            header = Header(text.identity(block), text.payload(block).size, grant.generation, ())
            write_header(self.slab, self.slab.offset(slot), header)
        return number, grant

    def put(self, ids: Ids, *, spec: KVSpec = SMALL, session: int = 0, summed: bytes = b"", keep: bool = False) -> int:
        """Reserve and commit all that is missing; the number of blocks sealed. `summed`: by the writer, by default."""
        number, grant = self.reserve(self.text(ids, spec), session=session)
        flags = summed or b"\1" * len(slots_of(grant))
        return self.store.commit(session or self.session, number, flags, keep=keep)

    def counts(self, spec: KVSpec = SMALL) -> tuple[int, int, int]:
        return self.store.memory.counts(spec.slot_nbytes)

    def reserved(self) -> int:
        return len(self.slab.slots_in(RESERVED))


def slots_of(answer: Grant | Acquisition) -> list[int]:
    slots: list[int] = np.frombuffer(answer.slots, np.uint32).tolist()
    return slots


def ids(first: int, num_blocks: int) -> Ids:
    """Blocks of their own: no two `first` share a token."""
    return tuple(range(1000 * first, 1000 * first + 4 * num_blocks))


@pytest.fixture
def node() -> Node:
    return Node()


# --- reading


def test_acquire_holds_whole_blocks_and_the_first_tokens_of_the_next(node: Node) -> None:
    node.put((1, 2, 3, 4, 5, 6, 7, 8))
    got = node.acquire((1, 2, 3, 4, 5, 6, 9))
    assert (got.num_tokens, len(slots_of(got))) == (6, 2)
    assert node.acquire((9, 9)) == Acquisition(0, b"", 0)
    assert node.acquire(()) == Acquisition(0, b"", 0)


def test_acquire_is_idempotent_per_lease_id(node: Node) -> None:
    node.put(ids(1, 2))
    first = node.acquire(ids(1, 2), lease=7)
    node.put(ids(1, 3))
    assert node.acquire(ids(1, 3), lease=7) == first
    assert node.store.stats.lookups == 1
    node.store.release(node.session, [7])
    assert node.acquire(ids(1, 3), lease=7).num_tokens == 12


def test_lease_and_reservation_of_one_id_are_refused(node: Node) -> None:
    """A commit with `keep` turns one into the other: they must not meet."""
    node.put(ids(1, 1))
    node.acquire(ids(1, 1), lease=7)
    with pytest.raises(KVStoreError):
        node.reserve(node.text(ids(2, 1)), number=7)
    node.reserve(node.text(ids(3, 1)), number=8)
    with pytest.raises(KVStoreError):
        node.acquire(ids(1, 1), lease=8)
    node.store.check()


def test_release_of_unknown_ids_is_no_error(node: Node) -> None:
    node.put(ids(1, 1))
    node.acquire(ids(1, 1), lease=7)
    node.store.release(node.session, [99, 7, 7])
    node.store.release(node.session, [])
    assert not node.store.session(node.session).leases


def test_find_pins_nothing_and_counts_nothing(node: Node) -> None:
    node.put(ids(1, 2))
    before = dataclasses.replace(node.store.stats)
    assert node.find(ids(1, 2)) == 8
    assert node.store.stats == before
    node.store.memory.tree.check(pins=[])


def test_extra_key_ends_a_hit_where_it_begins(node: Node) -> None:
    """IDN: two images over the same placeholder tokens."""
    text = node.text(ids(1, 2), keys=((5, b"cat"),))
    number, _ = node.reserve(text)
    node.store.commit(node.session, number, b"\1\1")
    found = {}
    for keys in ((), ((5, b"cat"),), ((5, b"dog"),), ((0, b"cat"),)):
        asked = node.text(ids(1, 2), keys=keys)
        found[keys] = node.store.find(asked.entry.spec_id, asked.query)
    assert list(found.values()) == [5, 8, 5, 0]


def test_opaque_layout_hits_whole_grains_only() -> None:
    spec = KVSpec(
        model="x", dtype="uint8", num_layers=1, block_tokens=6, layout="engine", token_nbytes=8, grain_tokens=2
    )
    node = Node()
    node.put((1, 2, 3, 4, 5, 6), spec=spec)
    assert node.acquire((1, 2, 3, 9), spec=spec).num_tokens == 2
    assert node.acquire((1, 9), spec=spec) == Acquisition(0, b"", 0)
    node.store.memory.tree.check(
        [pin for lease in node.store.session(node.session).leases.values() for pin in lease.pins]
    )


def test_damaged_header_shares_no_token_and_can_be_discarded(node: Node) -> None:
    """COR: a bit flip in the middle of a run costs hits and nothing else."""
    node.put(ids(1, 3))
    got = node.acquire(ids(1, 3), lease=7)
    node.slab.bytes[node.slab.offset(slots_of(got)[1]) + 50] ^= 1
    assert node.find((*ids(1, 1), *ids(1, 2)[4:6], 0)) == 4
    node.store.discard(node.session, 7, 1, "header")
    assert node.find(ids(1, 3)) == 4
    node.store.check()


# --- writing


def test_reserve_answers_the_earlier_start_where_the_parent_is_absent(node: Node) -> None:
    text = node.text(ids(1, 4))
    assert node.reserve(text, start=8)[1] == Grant(0, b"", 0, 4)
    node.put(ids(1, 1))
    assert node.reserve(text, start=8)[1] == Grant(4, b"", 0, 3)
    assert node.reserve(text, start=4)[1].start == 4
    assert node.reserved() == 3


def test_reserve_of_what_is_cached_needs_nothing(node: Node) -> None:
    node.put((*ids(1, 1), 7))
    assert node.reserve(node.text((*ids(1, 1), 7)))[1] == Grant(8, b"", 0, 0)
    assert node.reserve(node.text(()))[1] == Grant(0, b"", 0, 0)
    assert node.reserved() == 0


def test_reserve_is_idempotent_per_reservation_id(node: Node) -> None:
    _, first = node.reserve(node.text(ids(1, 2)), number=7)
    assert node.reserve(node.text(ids(1, 2)), number=7)[1] == first
    assert node.reserved() == 2
    assert node.store.stats.reservations == 1


def test_reserve_is_all_or_nothing_and_says_what_could_be_had(node: Node) -> None:
    node.put(ids(1, 30))
    node.acquire(ids(1, 30))
    _, grant = node.reserve(node.text(ids(2, 3)))
    assert grant == Grant(0, b"", 0, 2)
    assert node.reserved() == 0
    assert len(slots_of(node.reserve(node.text(ids(2, 2)))[1])) == 2
    assert node.store.stats.reservations_refused == 1


def test_reserve_never_evicts_the_chain_it_continues(node: Node) -> None:
    node.put(ids(1, 20))
    _, grant = node.reserve(node.text(ids(1, 32)))
    assert (grant.start, len(slots_of(grant))) == (80, 12)
    _, refused = node.reserve(node.text(ids(2, 1)))
    assert (refused.slots, refused.available) == (b"", 0)
    assert node.find(ids(1, 32)) == 80


def test_every_grant_has_a_generation_of_its_own(node: Node) -> None:
    generations = [node.reserve(node.text(ids(at, 1)))[1].generation for at in range(4)]
    assert generations == sorted(set(generations))
    rows = node.slab.tables.slots[node.slab.slots_in(RESERVED)]
    assert sorted(rows["generation"].tolist()) == generations
    assert set(rows["owner"].tolist()) == {node.store.session(node.session).number}


def test_commit_after_abort_seals_nothing(node: Node) -> None:
    number, _ = node.reserve(node.text(ids(1, 2)))
    node.store.abort(node.session, number)
    node.store.abort(node.session, number)
    assert node.store.commit(node.session, number, b"\1\1") == 0
    assert node.find(ids(1, 2)) == 0
    assert node.counts() == (0, 0, 0)  # and the extent serves any class again


def test_second_commit_seals_nothing(node: Node) -> None:
    number, _ = node.reserve(node.text(ids(1, 2)))
    assert [node.store.commit(node.session, number, b"\1\1") for _ in range(2)] == [2, 0]


def test_commit_of_fewer_blocks_gives_the_rest_back(node: Node) -> None:
    number, _ = node.reserve(node.text((*ids(1, 3), 7)))
    assert node.store.commit(node.session, number, b"\1\1") == 2
    assert node.find((*ids(1, 3), 7)) == 8
    assert (node.counts()[1], node.reserved()) == (2, 0)


def test_commit_of_no_block_gives_all_back(node: Node) -> None:
    for keep in (False, True):
        number, _ = node.reserve(node.text(ids(1, 2)))
        assert node.store.commit(node.session, number, b"", keep=keep) == 0
        node.store.check()
        node.store.release(node.session, [number])
    assert node.reserved() == 0


def test_more_flags_than_blocks_are_ignored(node: Node) -> None:
    number, _ = node.reserve(node.text(ids(1, 1)))
    assert node.store.commit(node.session, number, bytes(9)) == 1
    node.store.check()


def test_keep_turns_a_reservation_into_a_lease(node: Node) -> None:
    number, grant = node.reserve(node.text(ids(1, 2)))
    assert node.store.commit(node.session, number, b"\1\1", keep=True) == 2
    lease = node.store.session(node.session).leases[number]
    assert lease.slots == grant.slots
    assert node.store.memory.tree.num_evictable(SMALL.slot_nbytes) == 0
    node.store.release(node.session, [number])
    assert node.store.memory.tree.num_evictable(SMALL.slot_nbytes) == 2


def test_kept_slots_that_lost_a_race_stay_private_until_release(node: Node) -> None:
    text, rival = node.text(ids(1, 2)), node.open()
    number, grant = node.reserve(text)
    other, _ = node.reserve(text, session=rival)
    assert node.store.commit(rival, other, b"\1\1") == 2
    assert node.store.commit(node.session, number, b"\1\1", keep=True) == 0
    assert node.slab.slots_in(RESERVED) == sorted(slots_of(grant))
    assert node.store.session(node.session).held_nbytes == 4 * SMALL.slot_nbytes
    node.store.check()
    node.store.release(node.session, [number])
    assert node.reserved() == 0


def test_second_writer_of_a_block_is_told_already(node: Node) -> None:
    numbers = [node.reserve(node.text(ids(1, count)))[0] for count in (2, 3)]
    assert node.store.commit(node.session, numbers[0], b"\1\1") == 2
    assert node.store.commit(node.session, numbers[1], b"\1\1\1") == 1
    stats = node.store.stats
    assert (stats.blocks_stored, stats.blocks_already) == (3, 2)
    assert (node.counts()[1], node.reserved()) == (3, 0)


def test_short_tail_gives_way_to_a_longer_sibling(node: Node) -> None:
    node.put((1, 2, 3, 4, 5))
    node.put((1, 2, 3, 4, 5, 6))
    assert node.counts()[1] == 2
    node.put((1, 2, 3, 4, 5, 6, 7, 8))
    assert node.counts()[1] == 2
    assert [node.find((1, 2, 3, 4, 5, 6, 7, 8)[:count]) for count in range(9)] == list(range(9))
    assert node.put((1, 2, 3, 4, 5)) == 0


def test_leased_tail_that_gave_way_stays_until_release(node: Node) -> None:
    node.put((1, 2, 3, 4, 5))
    got = node.acquire((1, 2, 3, 4, 5), lease=7)
    node.put((1, 2, 3, 4, 5, 6, 7, 8))
    assert slots_of(got)[1] in node.slab.slots_in(FAILED)
    assert node.counts()[1] == 3
    node.store.release(node.session, [7])
    assert node.counts()[1] == 2


def test_commit_whose_parent_was_discarded_seals_nothing(node: Node) -> None:
    """Prefix closure: no block without its parent."""
    node.put(ids(1, 2))
    node.acquire(ids(1, 2), lease=7)
    number, _ = node.reserve(node.text(ids(1, 4)))
    node.store.discard(node.session, 7, 1, "header")
    assert node.store.commit(node.session, number, b"\1\1") == 0
    assert node.find(ids(1, 4)) == 4
    node.store.release(node.session, [7])
    assert node.reserved() == 0
    node.store.check()


# --- room


def test_pinned_leaf_survives_full_tier(node: Node) -> None:
    node.put(ids(1, 2))
    node.acquire(ids(1, 2))
    for other in range(2, 40):
        node.put(ids(other, 2))
    assert node.find(ids(1, 2)) == 8
    assert node.find(ids(39, 2)) == 8
    assert node.find(ids(2, 2)) == 0
    assert node.counts() == (0, 32, 0)


def test_prefix_dies_from_its_end(node: Node) -> None:
    node.put(ids(1, 30))
    node.put(ids(2, 5))
    assert node.find(ids(1, 30)) == 4 * 27
    assert node.store.memory.num_evicted == 3


def test_session_share_shortens_hits() -> None:
    node = Node(session_share=0.25)  # 8 of 32 slots
    for other in (1, 2):
        node.put(ids(other, 6))
    node.put(ids(3, 1))
    assert node.acquire(ids(1, 6)).num_tokens == 24
    assert node.acquire(ids(2, 6)).num_tokens == 8
    assert node.acquire(ids(2, 6)).num_tokens == 8  # those two it holds already
    assert node.acquire(ids(3, 1)) == Acquisition(0, b"", 0)
    assert node.store.stats.hits_shortened == 3
    assert node.acquire(ids(2, 6), session=node.open()).num_tokens == 24


def test_session_share_makes_reservations_smaller() -> None:
    node = Node(session_share=0.25)
    assert node.reserve(node.text(ids(1, 9)))[1] == Grant(0, b"", 0, 8)
    number, grant = node.reserve(node.text(ids(1, 8)))
    assert len(slots_of(grant)) == 8
    assert node.reserve(node.text(ids(2, 1)))[1].available == 0
    node.store.abort(node.session, number)
    assert len(slots_of(node.reserve(node.text(ids(2, 1)))[1])) == 1


def test_prefix_shared_by_leases_of_a_session_counts_once() -> None:
    node = Node(session_share=0.25)
    node.put((*ids(1, 4), *ids(2, 1)))
    node.put((*ids(1, 4), *ids(3, 1)))
    node.put(ids(4, 2))
    assert node.acquire((*ids(1, 4), *ids(2, 1))).num_tokens == 20
    for _ in range(2):
        assert node.acquire((*ids(1, 4), *ids(3, 1))).num_tokens == 20
    assert node.acquire(ids(4, 2)).num_tokens == 8
    assert node.acquire((*ids(1, 4), *ids(2, 1))).num_tokens == 20  # it holds its whole share, these among it
    assert node.store.stats.hits_shortened == 0


def test_lease_holds_no_more_than_it_was_given() -> None:
    """LEK: a lease of one block, kept for long, must not pin all that is ever stored behind that block."""
    node = Node(session_share=0.25)
    node.put(ids(1, 1))
    node.acquire(ids(1, 1))
    for num_blocks in range(2, 33):
        assert node.put(ids(1, num_blocks)) == 1
    assert node.store.memory.tree.num_evictable(SMALL.slot_nbytes) == 31
    assert node.reserve(node.text(ids(2, 1)), session=node.open())[1].slots


def test_spec_too_large_for_an_extent_is_refused(node: Node) -> None:
    fits = KVSpec(model="x", dtype="uint8", num_layers=1, block_tokens=1, layout="x", token_nbytes=EXTENT_NBYTES - 4096)
    assert node.store.attach(fits).spec_id == 0
    too_large = KVSpec(
        model="x", dtype="uint8", num_layers=1, block_tokens=1, layout="x", token_nbytes=EXTENT_NBYTES - 4095
    )
    with pytest.raises(SpecMismatch, match=r"block_tokens=1.*memory\.capacity"):
        node.store.attach(too_large)
    assert len(node.store.specs) == 1


def test_attach_twice_is_one_spec_and_another_field_another(node: Node) -> None:
    assert node.store.attach(SMALL) == node.store.attach(SMALL)
    node.put(ids(1, 2))
    assert node.find(ids(1, 2), OTHER) == 0
    assert [entry.spec for entry in node.store.specs] == [SMALL, OTHER]


def test_salted_specs_hash_with_sha256(node: Node) -> None:
    """SEC: XXH3 can be forged."""
    salted = KVSpec(model="s", dtype="float16", num_layers=1, head_dim=2, block_tokens=4, tenant_salt="tenant")
    kinds = [node.store.attach(spec).hash_kind for spec in (SMALL, salted)]
    assert kinds == ["xxh3-128", "sha256-128"]


def test_two_slot_classes_share_the_slab_and_extents_move() -> None:
    """LEK, DSK: whoever is used gets the room, back and forth, and nothing is lost on the way."""
    node = Node(num_extents=4)
    for turn in range(3):
        for other in range(20):
            assert node.put(ids(100 * turn + other, 2)) == 2
        assert node.store.memory.pool.num_slots(SMALL.slot_nbytes) >= 24
        for other in range(20):
            assert node.put(ids(100 * turn + other, 2), spec=LARGE) == 2
        assert node.store.memory.pool.num_slots(LARGE.slot_nbytes) >= 12
        node.store.check()
        assert node.find(ids(100 * turn + 19, 2), LARGE) == 8
    sizes = [sum(node.counts(spec)) * spec.slot_nbytes for spec in (SMALL, LARGE)]
    assert sum(sizes) <= node.store.capacity_nbytes


def test_extent_with_a_lease_in_it_is_not_drained() -> None:
    node = Node(num_extents=1)
    node.put(ids(1, 8))
    node.acquire(ids(1, 1), lease=7)
    assert node.put(ids(1, 1), spec=LARGE) == 0
    node.store.release(node.session, [7])
    assert node.put(ids(1, 1), spec=LARGE) == 1
    assert node.find(ids(1, 8)) == 0


def test_extent_with_a_reservation_in_it_is_not_drained() -> None:
    node = Node(num_extents=1)
    node.put(ids(1, 4))
    number, _ = node.reserve(node.text(ids(2, 1)))
    assert node.put(ids(1, 1), spec=LARGE) == 0
    node.store.abort(node.session, number)
    assert node.put(ids(1, 1), spec=LARGE) == 1


def test_blocks_in_extents_that_are_not_ready_are_not_promised() -> None:
    node = Node(num_extents=2)
    late = Store(extent_nbytes=EXTENT_NBYTES, tables=SimSlab(2, EXTENT_NBYTES).tables, symbols_of=node.slab.symbols_of)
    entry, session = late.attach(SMALL), late.open_session()
    assert session is not None
    assert late.reserve(session.id, 0, 1, bytes(16), 0) == Grant(0, b"", 0, 0)
    late.add_extent(0)
    assert late.memory.available(entry.spec.slot_nbytes) == 8
    assert len(slots_of(late.reserve(session.id, 0, 1, bytes(16), 0))) == 1


# --- sessions


def test_close_frees_all_and_ids_are_never_used_twice(node: Node) -> None:
    """LEK."""
    node.put(ids(1, 2))
    node.acquire(ids(1, 2))
    node.reserve(node.text(ids(2, 2)))
    number, _ = node.reserve(node.text(ids(1, 3)))
    node.store.commit(node.session, number, b"\1", keep=True)
    node.store.close_session(node.session, 0.0)
    node.store.close_session(node.session, 0.0)
    assert node.reserved() == 0
    assert node.store.next_deadline_ms() is None
    node.store.memory.tree.check(pins=[])
    assert node.open() != node.session
    assert (node.store.stats.sessions_opened, node.store.stats.sessions_closed, node.store.stats.sessions_died) == (
        2,
        1,
        0,
    )


def test_quarantine_holds_for_exactly_its_time(node: Node) -> None:
    """COR: a device may still write for a process that is gone."""
    node.put(ids(1, 1))
    node.acquire(ids(1, 1))
    node.reserve(node.text(ids(2, 2)))
    node.store.close_session(node.session, 1000.0, died=True, quarantine=True)
    assert node.store.memory.tree.num_evictable(SMALL.slot_nbytes) == 1  # nobody writes to what is only read
    assert node.store.next_deadline_ms() == 1000.0 + QUARANTINE_MS
    node.store.on_time(1000.0 + QUARANTINE_MS - 0.001)
    assert node.reserved() == 2
    node.store.check()
    node.store.on_time(1000.0 + QUARANTINE_MS)
    assert node.reserved() == 0
    assert node.store.stats.sessions_died == 1


def test_quarantined_slots_are_given_to_nobody() -> None:
    node = Node(num_extents=1)
    node.reserve(node.text(ids(1, 7)))
    node.store.close_session(node.session, 0.0, died=True, quarantine=True)
    node.session = node.open()
    assert node.reserve(node.text(ids(2, 2)))[1].available == 1
    node.store.on_time(QUARANTINE_MS)
    assert len(slots_of(node.reserve(node.text(ids(2, 8)))[1])) == 8


def test_unknown_sessions_and_specs_are_lost(node: Node) -> None:
    node.store.attach(SMALL)
    gone = node.open()
    node.store.close_session(gone, 0.0)
    query = Query(b"", b"")
    calls: list[Callable[[int], object]] = [
        lambda session: node.store.session(session),
        lambda session: node.store.acquire(session, 0, 1, query),
        lambda session: node.store.release(session, [1]),
        lambda session: node.store.discard(session, 1, 0, "header"),
        lambda session: node.store.reserve(session, 0, 1, b"", 0),
        lambda session: node.store.commit(session, 1, b""),
        lambda session: node.store.abort(session, 1),
    ]
    for call in calls:
        for session in (0, gone, 1 << 60):
            with pytest.raises(SessionLost):
                call(session)
    for spec_id in (1, 65535):
        with pytest.raises(SessionLost):
            node.store.find(spec_id, query)
        with pytest.raises(SessionLost):
            node.store.acquire(node.session, spec_id, 1, query)
        with pytest.raises(SessionLost):
            node.store.reserve(node.session, spec_id, 1, b"", 0)
        with pytest.raises(SessionLost):
            node.store.clear(spec_id)


def test_sessions_have_a_bound_and_numbers_of_their_own(node: Node) -> None:
    opened = [node.store.open_session() for _ in range(SESSIONS_MAX - 1)]
    assert node.store.open_session() is None
    numbers = {session.number for session in opened if session is not None} | {node.session & 0xFFFF}
    assert numbers == set(range(SESSIONS_MAX))
    node.store.close_session(node.session, 0.0)
    again = node.store.open_session()
    assert again is not None
    assert again.number == node.session & 0xFFFF


def test_leases_and_reservations_of_a_session_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (("store", "LEASES_MAX"), ("filling", "RESERVATIONS_MAX")):
        assert getattr(kvstore.core.leases, name) > 1
        monkeypatch.setattr(f"kvstore.core.{module}.{name}", 2)
    node = Node()
    node.put(ids(1, 1))
    assert [node.acquire(ids(1, 1)).num_tokens for _ in range(3)] == [4, 4, 0]
    assert [len(slots_of(node.reserve(node.text(ids(at, 1)))[1])) for at in (2, 3, 4)] == [1, 1, 0]


# --- discard, clear


def test_discard_removes_the_subtree_and_leased_bytes_stay_till_release(node: Node) -> None:
    """COR."""
    node.put(ids(1, 3))
    node.put((*ids(1, 2), *ids(2, 2)))
    got, other = node.acquire(ids(1, 3), lease=7), node.open()
    kept = node.acquire((*ids(1, 2), *ids(2, 2)), session=other, lease=1)
    node.store.discard(node.session, 7, 1, "checksum")
    assert node.find(ids(1, 3)) == node.find((*ids(1, 2), *ids(2, 2))) == 4
    assert {*slots_of(got), *slots_of(kept)} == {*node.slab.slots_in(SEALED), *node.slab.slots_in(FAILED)}
    node.store.check()
    node.store.release(node.session, [7])
    assert set(slots_of(kept)) == {*node.slab.slots_in(SEALED), *node.slab.slots_in(FAILED)}
    node.store.release(other, [1])
    assert node.counts()[1] == 1
    assert node.put(ids(1, 3)) == 2  # healed


def test_discard_of_nothing_changes_nothing(node: Node) -> None:
    node.put(ids(1, 2))
    node.acquire(ids(1, 2), lease=7)
    for lease, block in ((7, 2), (7, 1 << 40), (8, 0)):
        node.store.discard(node.session, lease, block, "no reason of ours")
    assert node.find(ids(1, 2)) == 8
    assert node.store.stats.discards == {"other": 3}
    for _ in range(2):
        node.store.discard(node.session, 7, 0, "header")
    assert node.store.stats.discards == {"other": 3, "header": 2}
    assert node.find(ids(1, 2)) == 0


def test_clear_forgets_one_spec_and_spares_leases(node: Node) -> None:
    node.put(ids(1, 2))
    node.put(ids(1, 2), spec=OTHER)
    got = node.acquire(ids(1, 1), lease=7)
    node.store.clear(node.store.attach(SMALL).spec_id)
    assert (node.find(ids(1, 2)), node.find(ids(1, 2), OTHER)) == (0, 8)
    assert slots_of(got)[0] in node.slab.slots_in(FAILED)
    node.store.release(node.session, [7])
    assert node.counts()[1] == 2
    node.store.check()


# --- sums


def test_only_blocks_without_a_sum_are_summed(node: Node) -> None:
    number, grant = node.reserve(node.text(ids(1, 3)))
    node.store.commit(node.session, number, b"\1\0\1")
    (transfer,) = node.store.take_transfers()
    assert transfer.slots == (slots_of(grant)[1],)
    assert node.store.take_transfers() == []
    assert node.store.stats.blocks_summed == 0
    node.store.complete(transfer)
    assert node.store.stats.blocks_summed == 1
    assert node.put(ids(2, 2)) == 2
    assert node.store.take_transfers() == []


def test_block_is_pinned_while_it_is_summed(node: Node) -> None:
    node.put(ids(1, 2), summed=b"\1\0")
    (transfer,) = node.store.take_transfers()
    node.store.close_session(node.session, 0.0)
    node.session = node.open()
    for other in range(2, 40):
        node.put(ids(other, 2))
    assert node.find(ids(1, 2)) == 8
    node.store.clear(0)
    assert set(transfer.slots) <= set(node.slab.slots_in(FAILED))
    node.store.complete(transfer)
    assert node.slab.slots_in(SEALED) == []
    node.store.memory.tree.check(pins=[])


def test_block_that_lost_a_race_is_not_summed(node: Node) -> None:
    numbers = [node.reserve(node.text(ids(1, 1)))[0] for _ in range(2)]
    for number in numbers:
        node.store.commit(node.session, number, b"\0")
    transfers = [each for each in node.store.take_transfers() if isinstance(each, SumBlocks)]
    assert [len(transfer.slots) for transfer in transfers] == [1]


def test_without_checksums_nothing_is_summed() -> None:
    node = Node(checksums=False)
    node.put(ids(1, 2), summed=b"\0\0")
    assert node.store.take_transfers() == []
    node.store.memory.tree.check(pins=[])


# --- counters


def test_counters_tell_what_happened(node: Node) -> None:
    """OBS: a scripted day, each counter equal to the truth."""
    node.put(ids(1, 2))
    node.acquire((*ids(1, 2), 5), lease=7)
    node.acquire((8, 8))
    node.acquire(ids(1, 2)[:6])
    node.reserve(node.text(ids(2, 1)))
    aborted, _ = node.reserve(node.text(ids(3, 1)))
    node.store.abort(node.session, aborted)
    node.put(ids(1, 2))
    spec_id = node.text((1,)).entry.spec_id
    node.store.report(spec_id, 100, 20.0, None)
    node.store.report(spec_id, 10, None, 7.5)
    node.store.report(spec_id, None, None, 2.5)
    stats = node.store.stats
    assert (stats.lookups, stats.hits, stats.misses) == (3, 2, 1)
    assert (stats.tokens_asked, stats.tokens_hit, stats.blocks_hit) == (9 + 2 + 6, 8 + 6, 2 + 2)
    assert (stats.reservations, stats.reservations_committed, stats.reservations_aborted) == (3, 1, 1)
    assert (stats.blocks_stored, stats.bytes_stored) == (2, 2 * SMALL.block_nbytes)
    assert (stats.prefill_tokens, stats.prefill_ms, stats.ttft_reports, stats.ttft_ms) == (100, 20.0, 2, 10.0)
    open_now = len(node.store.session(node.session).reservations)
    assert stats.reservations == stats.reservations_committed + stats.reservations_aborted + open_now


# --- whatever a client sends


@pytest.mark.parametrize("seed", range(5))
def test_no_command_breaks_the_store(seed: int) -> None:
    """SEC, RST: well-typed commands with any contents end in an answer or a KVStoreError, and leave nothing held."""
    rng = random.Random(seed)
    node = Node(num_extents=2, session_share=0.5)
    sessions, specs = [node.session, node.open()], [node.store.attach(spec).spec_id for spec in (SMALL, LARGE)]
    blocks = [rng.randbytes(16) for _ in range(5)]

    def some(count: int) -> bytes:
        return b"".join(rng.choices(blocks, k=rng.randint(0, count)))

    def query() -> Query:
        tokens = rng.randbytes(4 * rng.randint(0, 20))
        return Query(some(6), tokens, [(rng.randint(0, 20), rng.randbytes(16)) for _ in range(rng.randint(0, 2))])

    def attempt() -> None:
        session, spec, number = rng.choice([*sessions, 5]), rng.choice([*specs, 9]), rng.randint(1, 6)
        match rng.randrange(7):
            case 0:
                node.store.acquire(session, spec, number, query())
            case 1:
                node.store.reserve(session, spec, number, some(6), rng.randint(0, 20), rng.choice([b"", some(1)]))
            case 2:
                node.store.commit(session, number, rng.randbytes(rng.randint(0, 6)), keep=rng.random() < 0.5)
            case 3:
                node.store.release(session, [number])
            case 4:
                node.store.discard(session, number, rng.randint(0, 6), "?")
            case 5:
                node.store.find(spec, query())
            case _:
                for transfer in node.store.take_transfers():
                    node.store.complete(transfer)

    for _ in range(3000):
        try:
            attempt()
        except KVStoreError:
            continue
    for transfer in node.store.take_transfers():
        node.store.complete(transfer)
    for session in sessions:
        node.store.close_session(session, 0.0)
    states = node.slab.tables.slots["state"]
    assert set(np.unique(states).tolist()) <= {FREE, SEALED}
    for spec in specs:
        node.store.clear(spec)
    assert not states.any()
