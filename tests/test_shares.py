"""Shared leases in the core: they end for their owner as any other does, and for everybody when nobody reads any more.
What the kernel knows of readers is in test_liveness.py.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvstore.core.layout import Header
from kvstore.core.leases import Session
from kvstore.core.shares import LOOK_MS, Shares
from kvstore.core.store import QUARANTINE_MS, Acquisition, Store
from kvstore.core.tier import FAILED, FREE, SEALED
from kvstore.core.watch import NOTHING, Progress
from kvstore.errors import KVStoreError, SessionLost
from kvstore.spec import KVSpec
from tests import test_lower
from tests.models import SimSlab, Text, store_on, write_header

EXTENT_NBYTES = 64 << 10  # 8 slots
SPEC = KVSpec(model="small", dtype="float16", num_layers=1, head_dim=2, block_tokens=4)
assert SPEC.slot_nbytes == 8192
GENERATION = 1000

Ids = tuple[int, ...]


class FakeReaders:
    """Knows who reads under which number. Nobody may begin to under one that was not admitted, or was dismissed."""

    def __init__(self) -> None:
        self.admitted: set[int] = set()
        self.reading: Counter[int] = Counter()
        self.num_asked = 0

    def admit(self, share: int) -> None:
        assert share not in self.admitted
        self.admitted.add(share)

    def dismiss(self, share: int) -> bool:
        self.num_asked += 1
        assert share in self.admitted
        if self.reading[share]:
            return False
        self.admitted.discard(share)
        return True

    def begin(self, share: int) -> bool:
        """Changes state. Whether a reader may."""
        self.reading[share] += share in self.admitted
        return share in self.admitted


class Node:
    """A store on 16 slots, and verbs that take token ids."""

    def __init__(self, *, session_share: float = 1.0, readers: FakeReaders | None = None) -> None:
        self.slab = SimSlab(2, EXTENT_NBYTES)
        self.readers = readers or FakeReaders()
        self.store = store_on(self.slab, generation=GENERATION, session_share=session_share, readers=self.readers)
        self.entry = self.store.attach(SPEC)
        self.owner = self.open()
        self.last_id = 0

    def open(self) -> int:
        session = self.store.open_session()
        assert session is not None
        return session.id

    def put(self, ids: Ids) -> int:
        """Changes state. By a session of its own: the number of blocks sealed."""
        text, session = Text(self.entry, ids, ()), self.open()
        grant = self.store.reserve(session, self.entry.spec_id, 1, text.hashes, 0, text.tail)
        slots = memoryview(grant.slots).cast("I").tolist()
        for block, slot in enumerate(slots, grant.start // 4):
            header = Header(text.identity(block), text.payload(block).size, grant.generation, ())
            write_header(self.slab, self.slab.offset(slot), header)
        sealed = self.store.commit(session, 1, b"\1" * len(slots))
        self.store.close_session(session, self.store.now_ms)
        return sealed

    def acquire(self, ids: Ids, *, shared: bool = True, session: int = 0, lease: int = 0) -> tuple[int, Acquisition]:
        self.last_id += 1
        lease, query = lease or self.last_id, Text(self.entry, ids, ()).query
        return lease, self.store.acquire(session or self.owner, self.entry.spec_id, lease, query, shared=shared)

    def find(self, ids: Ids) -> int:
        return self.store.find(self.entry.spec_id, Text(self.entry, ids, ()).query)

    def held(self, session: int = 0) -> int:
        return self.store.session(session or self.owner).held_nbytes // SPEC.slot_nbytes

    def look(self) -> None:
        """Changes state. Time for the store to see who reads on."""
        self.store.on_time(self.store.now_ms + LOOK_MS)

    @property
    def evictable(self) -> int:
        return self.store.memory.tree.num_evictable(SPEC.slot_nbytes)


def ids(first: int, num_blocks: int) -> Ids:
    return tuple(range(1000 * first, 1000 * first + 4 * num_blocks))


@pytest.fixture
def node() -> Node:
    made = Node()
    made.put(ids(1, 3))
    return made


def test_only_who_asks_for_it_has_a_number_that_others_read_under(node: Node) -> None:
    assert node.acquire(ids(1, 3), shared=False)[1].share == 0
    assert node.acquire(ids(2, 3))[1] == Acquisition(0, b"", 0, 0), "a miss is not shared"
    assert node.readers.admitted == set()
    _, got = node.acquire(ids(1, 3))
    assert got.share == GENERATION + 1, "above all that an earlier daemon gave"
    assert node.readers.admitted == {got.share}
    assert node.store.stats.shares_refused == 0
    node.store.check()


def test_shares_have_a_bound(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC, PRF: what is too much is a lease like any, without a number."""
    monkeypatch.setattr("kvstore.core.shares.SHARES_MAX", 2)
    leases = [node.acquire(ids(1, 3)) for _ in range(3)]
    assert [got.share for _, got in leases] == [GENERATION + 1, GENERATION + 2, 0]
    assert (leases[2][1].num_tokens, node.store.stats.shares_refused) == (12, 1)
    node.readers.begin(GENERATION + 1)
    node.store.release(node.owner, [lease for lease, _ in leases])
    assert [node.acquire(ids(1, 3))[1].share for _ in range(2)] == [GENERATION + 3, 0], "one is read on"
    node.store.check()


def test_asking_again_has_the_same_number(node: Node) -> None:
    lease, got = node.acquire(ids(1, 3))
    assert node.acquire(ids(1, 3), lease=lease)[1] == got
    assert node.acquire(ids(1, 3), lease=lease, shared=False)[1] == got
    assert node.acquire(ids(1, 3))[1].share == got.share + 1


def test_a_lease_that_was_not_shared_stays_so(node: Node) -> None:
    lease, _ = node.acquire(ids(1, 3), shared=False)
    assert node.acquire(ids(1, 3), lease=lease)[1].share == 0
    assert not node.readers.admitted


def test_a_store_without_readers_shares_nothing() -> None:
    slab = SimSlab(2, EXTENT_NBYTES)
    node = Node()
    node.slab = slab
    node.store = Store(extent_nbytes=EXTENT_NBYTES, tables=slab.tables, symbols_of=slab.symbols_of)
    node.store.add_extent(0)
    node.entry, node.owner = node.store.attach(SPEC), node.open()
    node.put(ids(1, 3))
    lease, got = node.acquire(ids(1, 3))
    assert (got.num_tokens, got.share) == (12, 0)
    node.store.check()
    node.store.release(node.owner, [lease])
    assert node.evictable == 3


def test_where_nobody_reads_it_ends_at_once(node: Node) -> None:
    lease, got = node.acquire(ids(1, 3))
    node.store.release(node.owner, [lease])
    assert (node.evictable, node.held()) == (3, 0)
    assert node.store.next_deadline_ms() is None
    assert not node.readers.begin(got.share)
    node.store.check()


def test_blocks_stay_for_as_long_as_somebody_reads(node: Node) -> None:
    """COR: the owner is done, and room is wanted."""
    lease, got = node.acquire(ids(1, 3))
    assert node.readers.begin(got.share)
    node.store.release(node.owner, [lease])
    node.store.check()
    for first in range(2, 20):
        node.put(ids(first, 2))
    assert node.find(ids(1, 3)) == 12
    node.look()
    assert node.find(ids(1, 3)) == 12
    node.readers.reading.clear()
    node.look()
    node.store.check()
    assert node.store.next_deadline_ms() is None
    for first in range(20, 40):
        node.put(ids(first, 2))
    assert node.find(ids(1, 3)) == 0


def test_one_may_begin_to_read_while_another_reads_on(node: Node) -> None:
    """The owner's end does not shut the door: only that nobody reads does."""
    lease, got = node.acquire(ids(1, 3))
    node.readers.begin(got.share)
    node.store.release(node.owner, [lease])
    assert node.readers.begin(got.share)
    node.readers.reading[got.share] -= 1
    node.look()
    assert node.evictable == 0
    node.readers.reading[got.share] -= 1
    node.look()
    assert node.evictable == 3
    assert not node.readers.begin(got.share)


def test_the_store_looks_now_and_then(node: Node) -> None:
    """PRF: not at every turn of the loop, and not at all while nobody reads on."""
    leases = [node.acquire(ids(1, 3)) for _ in range(2)]
    assert node.store.next_deadline_ms() is None
    for lease, got in leases:
        node.readers.begin(got.share)
        node.store.release(node.owner, [lease])
    assert node.store.next_deadline_ms() == LOOK_MS
    asked = node.readers.num_asked
    node.store.on_time(LOOK_MS - 0.001)
    assert node.readers.num_asked == asked
    node.store.on_time(LOOK_MS)
    assert node.readers.num_asked == asked + 2
    assert node.store.next_deadline_ms() == 2 * LOOK_MS


def test_what_is_read_on_counts_against_the_owners_share() -> None:
    """DSK: sharing is no way to hold all there is."""
    node = Node(session_share=0.5)  # 8 of 16 slots
    for first in (1, 2):
        node.put(ids(first, 6))
    lease, got = node.acquire(ids(1, 6))
    node.readers.begin(got.share)
    node.store.release(node.owner, [lease])
    assert node.held() == 6
    assert node.acquire(ids(2, 6))[1].num_tokens == 8
    assert node.acquire(ids(2, 6), session=node.open())[1].num_tokens == 24, "others are not concerned"
    node.readers.reading.clear()
    node.look()
    assert node.held() == 2
    assert node.acquire(ids(2, 6))[1].num_tokens == 24
    node.store.check()


def test_the_same_blocks_read_on_twice_count_once() -> None:
    """The exact count, which is asked for where the cheap one says it is too much."""
    node = Node(session_share=0.5)
    node.put(ids(1, 6))
    node.put(ids(2, 2))
    for _ in range(2):
        lease, got = node.acquire(ids(1, 6))
        node.readers.begin(got.share)
        node.store.release(node.owner, [lease])
    assert node.held() == 12
    assert node.acquire(ids(2, 2))[1].num_tokens == 8
    node.store.check()


@pytest.mark.parametrize("died", [False, True])
@pytest.mark.parametrize("quarantine", [False, True])
def test_who_reads_on_reads_on_after_its_owners_death(node: Node, died: bool, quarantine: bool) -> None:
    """COR, LEK: a scheduler that is gone; ranks that have yet to copy."""
    _, got = node.acquire(ids(1, 3))
    _, unread = node.acquire(ids(1, 3))
    node.readers.begin(got.share)
    node.store.close_session(node.owner, 0.0, died=died, quarantine=quarantine)
    node.store.check()
    assert node.readers.admitted == {got.share}, "under the other number nobody reads, and nobody may"
    assert unread.share not in node.readers.admitted
    node.store.on_time(QUARANTINE_MS)
    assert node.evictable == 0
    node.readers.reading.clear()
    node.look()
    assert node.evictable == 3
    node.store.memory.tree.check(pins=[])


def test_a_session_closes_while_its_lease_is_read_on(node: Node) -> None:
    """LEK: released first; the count of a session that is no more concerns nobody."""
    lease, got = node.acquire(ids(1, 3))
    node.readers.begin(got.share)
    node.store.release(node.owner, [lease])
    node.store.close_session(node.owner, 0.0)
    node.store.check()
    node.owner = node.open()
    assert node.held() == 0
    node.readers.reading.clear()
    node.look()
    assert (node.held(), node.evictable) == (0, 3)
    node.store.memory.tree.check(pins=[])


def test_a_number_is_given_once(node: Node) -> None:
    """IDN: a ticket that is late must name nothing, or what it named."""
    seen = []
    for at in range(6):
        lease, got = node.acquire(ids(1, 3), session=node.open() if at % 2 else 0)
        seen.append(got.share)
        if at == 2:
            node.store.release(node.owner, [lease])
        if at == 4:
            node.store.close_session(node.owner, 0.0)
            node.owner = node.open()
    assert seen == sorted(set(seen))


def test_a_lease_id_used_again_is_another_share(node: Node) -> None:
    """IDN."""
    lease, first = node.acquire(ids(1, 3))
    node.readers.begin(first.share)
    node.store.release(node.owner, [lease])
    _, second = node.acquire(ids(1, 3), lease=lease)
    assert second.share == first.share + 1
    node.store.check()
    node.store.release(node.owner, [lease])
    node.store.check()
    assert node.readers.admitted == {first.share}


def test_blocks_that_are_forgotten_stay_with_who_reads_on(node: Node) -> None:
    """COR."""
    lease, got = node.acquire(ids(1, 3))
    node.readers.begin(got.share)
    node.store.release(node.owner, [lease])
    node.store.clear(node.entry.spec_id)
    assert len(node.slab.slots_in(FAILED)) == 3
    node.store.check()
    node.readers.reading.clear()
    node.look()
    assert not node.slab.tables.slots["state"].any()


# --- asking by number


def test_a_reader_discards_by_number(node: Node) -> None:
    """COR: in a session of its own, which has no such lease."""
    reader = node.open()
    lease, got = node.acquire(ids(1, 3))
    node.store.discard(reader, 0, 1, "payload", got.share)
    assert node.find(ids(1, 3)) == 4
    node.readers.begin(got.share)
    node.store.release(node.owner, [lease])
    node.store.discard(reader, lease, 0, "header", got.share)
    assert node.find(ids(1, 3)) == 0
    assert node.store.stats.discards == {"payload": 1, "header": 1}
    node.store.check()


@pytest.mark.parametrize("share", [1, GENERATION, GENERATION + 1, GENERATION + 2, (1 << 63) - 1])
def test_a_number_of_nobody_discards_nothing(node: Node, share: int) -> None:
    """SEC: also one that was somebody's, though the lease beside it is alive."""
    gone, got = node.acquire(ids(1, 3))
    assert got.share == GENERATION + 1
    node.store.release(node.owner, [gone])
    lease, _ = node.acquire(ids(1, 3), shared=False)
    node.store.discard(node.owner, lease, 0, "header", share)
    assert node.find(ids(1, 3)) == 12
    node.store.wait(1, node.owner, lease, 3, 1e9, share)
    assert node.store.take_progress() == [(1, NOTHING)]
    with pytest.raises(SessionLost):
        node.store.discard(7, lease, 0, "header", share)
    with pytest.raises(SessionLost):
        node.store.wait(1, 7, lease, 3, 1e9, share)


def test_who_reads_waits_by_number(node: Node) -> None:
    reader = node.open()
    lease, got = node.acquire(ids(1, 3))
    for is_over in (False, True):
        if is_over:
            node.readers.begin(got.share)
            node.store.release(node.owner, [lease])
        node.store.wait(7, reader, 0, 3, 1e9, got.share)
        assert node.store.take_progress() == [(7, Progress(3, True))]
    node.readers.reading.clear()
    node.look()
    node.store.wait(8, reader, 0, 3, 1e9, got.share)
    assert node.store.take_progress() == [(8, NOTHING)]


def loading(readers: FakeReaders) -> tuple[test_lower.Node, Session, Acquisition]:
    """Changes state. A shared lease, number 900, of three blocks that are only in the tier below; and a reader."""
    node = test_lower.Node()
    node.store.shares = Shares(node.store.stats, readers, GENERATION)
    text, reader = node.text(test_lower.ids(1, 3)), node.store.open_session()
    assert reader is not None
    node.put(test_lower.ids(1, 3))
    node.run()
    node.store.memory.clear(text.entry.root)
    return node, reader, node.store.acquire(node.session, text.entry.spec_id, 900, text.query, shared=True)


def test_who_reads_waits_for_blocks_that_are_on_their_way() -> None:
    """PRF: the owner's lease is loading; who reads is told of each block as it comes."""
    node, reader, got = loading(FakeReaders())
    assert (got.num_tokens, got.ready) == (12, 0)
    for token, blocks in enumerate((1, 3), 7):
        node.store.wait(token, reader.id, 0, blocks, 1e9, got.share)
    node.ask()
    assert node.store.take_progress() == []
    node.load_one()
    assert node.store.take_progress() == [(7, Progress(1, False))]
    node.load_one()
    node.load_one()
    assert node.store.take_progress() == [(8, Progress(3, True))]


def test_who_reads_on_waits_on_though_the_owner_is_done() -> None:
    """COR: else ranks that asked before and after the owner's end would be told of different lengths."""
    readers = FakeReaders()
    node, reader, got = loading(readers)
    readers.begin(got.share)
    node.ask()
    node.load_one()
    node.store.wait(7, reader.id, 0, 3, 1e9, got.share)
    node.store.release(node.session, [900])
    assert node.store.take_progress() == []
    node.load_one()
    node.load_one()
    assert node.store.take_progress() == [(7, Progress(3, True))]
    readers.reading.clear()
    node.store.on_time(node.store.now_ms + LOOK_MS)
    node.store.wait(8, reader.id, 0, 3, 1e9, got.share)
    assert node.store.take_progress() == [(8, NOTHING)]
    node.store.check()


# --- whatever happens


@pytest.mark.parametrize("seed", range(7))
def test_nothing_that_anybody_reads_is_given_out(seed: int) -> None:
    """COR, LEK, SEC: any order of what owners, readers and others do; at the end all comes back."""
    rng, node = random.Random(seed), Node(session_share=0.75)
    store, sessions, now_ms = node.store, [node.owner, node.open()], 0.0
    read: dict[int, bytes] = {}  # slots under each number that was ever given
    for at in range(250):
        session, lease = rng.choice(sessions), rng.randint(1, 6)
        share = rng.choice([*read, 5]) if read else 5
        match rng.randrange(10):
            case 0 | 1:
                node.put(ids(rng.randrange(6), rng.randint(1, 4)))
            case 2 | 3 | 4:
                asked, shared = ids(rng.randrange(6), rng.randint(1, 4)), rng.random() < 0.8
                try:
                    _, got = node.acquire(asked, session=session, lease=lease, shared=shared)
                except KVStoreError:
                    continue
                if got.share:
                    assert read.setdefault(got.share, got.slots) == got.slots
            case 5:
                store.release(session, [lease])
            case 6:
                node.readers.begin(share)
            case 7 | 8:
                node.readers.reading[share] = max(0, node.readers.reading[share] - 1)
            case _:
                now_ms += rng.choice((1.0, LOOK_MS, 5 * LOOK_MS))
                store.on_time(now_ms)
                if rng.random() < 0.3:
                    store.discard(session, lease, rng.randrange(3), "header", rng.choice((0, share)))
                if rng.random() < 0.1:
                    sessions.remove(session)
                    store.close_session(session, now_ms, died=True)
                    sessions.append(node.open())
        if at % 5 == 0:
            store.check()
        for each, num_readers in node.readers.reading.items():
            if num_readers:
                states = {store.memory.state_of(slot) for slot in memoryview(read[each]).cast("I")}
                assert states <= {SEALED, FAILED}, "somebody reads what is free"
    node.readers.reading.clear()
    for session in sessions:
        store.close_session(session, now_ms)
    store.on_time(now_ms + LOOK_MS)
    store.check()
    store.memory.tree.check(pins=[])
    assert not node.readers.admitted
    store.clear(node.entry.spec_id)
    assert not (node.slab.tables.slots["state"] != FREE).any()
