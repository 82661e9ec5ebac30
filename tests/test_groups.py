"""Rank groups in the core: what ranks fill together is there once all of it is, and is given up for all at once. One
fact at a time, then ranks, plain writers, readers and deaths at random against a model.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

import kvstore.core.groups
from kvstore.core.filling import Grant
from kvstore.core.groups import PARTS_MS
from kvstore.core.layout import HEADER_NBYTES, RECTS_MAX, Header, Rect, Shard
from kvstore.core.leases import Lease, Session
from kvstore.core.moves import SumBlocks
from kvstore.core.stats import Guard
from kvstore.core.store import QUARANTINE_MS, Acquisition
from kvstore.core.tier import FAILED, FREE, RESERVED, SEALED
from kvstore.errors import KVStoreError, SessionLost, SpecMismatch
from kvstore.spec import KVSpec
from tests.models import SimSlab, Text, store_on, write_header
from tests.test_takeover import Lives, packed

EXTENT_NBYTES = 64 << 10  # 8 slots
SPEC = KVSpec(model="ranks", dtype="float16", num_layers=2, num_kv_heads=2, head_dim=2, block_tokens=4)
OPAQUE = KVSpec(model="x", dtype="uint8", num_layers=2, block_tokens=4, layout="engine", token_nbytes=8)
assert SPEC.slot_nbytes == 8192

WHOLE = Shard((0, 2), (0, 2))
HEADS = (Shard((0, 2), (0, 1)), Shard((0, 2), (1, 2)))
LAYERS = (Shard((0, 1), (0, 2)), Shard((1, 2), (0, 2)))
BOTH = tuple(Shard((layer, layer + 1), (head, head + 1)) for layer in (0, 1) for head in (0, 1))

Ids = tuple[int, ...]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Rank:
    """A place in a group; with `member` 0 a writer of whole blocks."""

    session: int
    member: int
    shard: Shard
    group: str = "g"


class Node:
    """A store on a small slab, and verbs with which ranks write their part of what tokens stand for."""

    def __init__(self, num_extents: int = 2, *, session_share: float = 1.0, checksums: bool = True) -> None:
        self.slab = SimSlab(num_extents, EXTENT_NBYTES)
        self.store = store_on(self.slab, session_share=session_share, checksums=checksums)
        self.entry = self.store.attach(SPEC)
        self.numbers = count(1)
        self.reader = self.open()

    def open(self) -> int:
        session = self.store.open_session()
        assert session is not None
        return session.id

    def join(self, shard: Shard, group: str = "g", session: int = 0) -> Rank:
        session = session or self.open()
        return Rank(session, self.store.join_group(session, self.entry, group, shard), shard, group)

    def ranks(self, shards: tuple[Shard, ...] = HEADS, group: str = "g") -> list[Rank]:
        """Changes state. A session for each."""
        return [self.join(shard, group) for shard in shards]

    def writer(self) -> Rank:
        return Rank(self.open(), 0, WHOLE)

    def text(self, ids: Ids) -> Text:
        return Text(self.entry, ids, ())

    def reserve(self, rank: Rank, ids: Ids, *, start: int = 0, number: int = 0) -> tuple[int, Grant]:
        text, number = self.text(ids), number or next(self.numbers)
        grant = self.store.reserve(rank.session, self.entry.spec_id, number, text.hashes, start, text.tail, rank.member)
        return number, grant

    def part(self, slot: int, shard: Shard, num_tokens: int) -> Bytes:
        """Query. A rank's bytes of a slot: a view `[layers, K/V, heads, bytes]`."""
        payload = self.slab.payload(self.slab.offset(slot), SPEC.payload_nbytes(num_tokens))
        return part_of(payload, shard)

    def fill(self, rank: Rank, ids: Ids, grant: Grant, num_blocks: int = 1 << 20) -> list[int]:
        """Changes state. Headers, and the rank's part of the leading blocks; what each part sums to."""
        text, sums = self.text(ids), []
        for block, slot in enumerate(slots_of(grant)[:num_blocks], grant.start // SPEC.block_tokens):
            right = part_of(text.payload(block).reshape(-1), rank.shard)
            self.part(slot, rank.shard, text.num_tokens_of(block))[...] = right
            header = Header(text.identity(block), text.payload(block).size, grant.generation, ())
            write_header(self.slab, self.slab.offset(slot), header)
            sums.append(xxhash.xxh3_64_intdigest(right.tobytes()))
        return sums

    def commit(self, rank: Rank, number: int, sums: list[int], *, keep: bool = False) -> int:
        return self.store.commit(rank.session, number, b"\1" * len(sums), keep=keep, sums=sums)

    def put(self, rank: Rank, ids: Ids, *, keep: bool = False) -> tuple[int, int]:
        """Changes state. Reserve, fill and commit one part: its number, and the blocks sealed by that."""
        number, grant = self.reserve(rank, ids)
        return number, self.commit(rank, number, self.fill(rank, ids, grant), keep=keep)

    def acquire(self, ids: Ids) -> tuple[int, Acquisition]:
        number = next(self.numbers)
        return number, self.store.acquire(self.reader, self.entry.spec_id, number, self.text(ids).query)

    def require_right(self, ids: Ids, got: Acquisition) -> None:
        """Query. Each byte that a lease gives is that of its tokens."""
        text = self.text(ids)
        for block, slot in enumerate(slots_of(got)):
            header = self.slab.header(slot)
            assert header is not None
            stored, wanted = len(header.identity.tokens) // 4, min(4, got.num_tokens - 4 * block)
            payload = self.slab.payload(self.slab.offset(slot), SPEC.payload_nbytes(stored)).reshape(8, stored, 4)
            assert np.array_equal(payload[:, :wanted], text.payload(block)[:, :wanted]), "not this prompt's bytes"

    def read(self, ids: Ids) -> int:
        """Changes state. Tokens that a hit gives, each byte compared."""
        number, got = self.acquire(ids)
        self.require_right(ids, got)
        self.store.release(self.reader, [number])
        return got.num_tokens

    def find(self, ids: Ids) -> int:
        return self.store.find(self.entry.spec_id, self.text(ids).query)

    def make_sums(self) -> None:
        """Changes state. As the movers do. What ranks said they wrote is what lies there."""
        for transfer in self.store.take_transfers():
            assert isinstance(transfer, SumBlocks)
            for slot, sums in zip(transfer.slots, transfer.sums, strict=True):
                header = self.slab.header(slot)
                assert header is not None
                num_tokens = len(header.identity.tokens) // 4
                parts = [self.part(slot, shard, num_tokens).tobytes() for shard in transfer.shards]
                made = [xxhash.xxh3_64_intdigest(part) for part in parts]
                assert all(said in (None, true) for said, true in zip(sums, made, strict=True))
                rects = tuple(Rect(shard, each) for shard, each in zip(transfer.shards, made, strict=True))
                write_header(self.slab, self.slab.offset(slot), header._replace(rects=rects))
            self.store.complete(transfer)

    def reserved(self) -> int:
        return len(self.slab.slots_in(RESERVED))

    def session_of(self, rank: Rank) -> dict[int, Lease]:
        return self.store.session(rank.session).leases


def part_of(payload: Bytes, shard: Shard) -> Bytes:
    (first_layer, end_layer), (first_head, end_head) = shard
    return payload.reshape(2, 2, 2, -1)[first_layer:end_layer, :, first_head:end_head]


def slots_of(answer: Grant | Acquisition) -> list[int]:
    slots: list[int] = np.frombuffer(answer.slots, np.uint32).tolist()
    return slots


def ids(first: int, num_blocks: int, extra: int = 0) -> Ids:
    """Blocks of their own, and some tokens more: no two `first` share a token."""
    return tuple(range(1000 * first, 1000 * first + 4 * num_blocks + extra))


@pytest.fixture
def node() -> Node:
    return Node()


# --- places


def test_ranks_of_one_group_have_places_of_their_own(node: Node) -> None:
    ranks = node.ranks()
    assert len({rank.member for rank in ranks}) == 2
    assert all(rank.member > 0 for rank in ranks), "0 is no place"


def test_a_rank_that_comes_again_has_the_same_place(node: Node) -> None:
    rank = node.join(HEADS[0])
    assert node.join(HEADS[0], session=rank.session) == rank
    other = node.join(HEADS[0])
    assert other.member != rank.member, "another process may have the same part (MLA)"
    node.store.check()


@pytest.mark.parametrize(
    ("shard", "text"),
    [
        (WHOLE, r"rank group 'g': layers=\(0, 2\) heads=\(0, 2\) overlaps layers=\(0, 2\) heads=\(0, 1\)"),
        (LAYERS[0], r"layers=\(0, 1\) heads=\(0, 2\) overlaps layers=\(0, 2\) heads=\(0, 1\) of another rank"),
        (BOTH[0], r"layers=\(0, 1\) heads=\(0, 1\) overlaps layers=\(0, 2\) heads=\(0, 1\) of another rank"),
    ],
)
def test_a_part_that_overlaps_another_ranks_is_refused(node: Node, shard: Shard, text: str) -> None:
    node.join(HEADS[0])
    with pytest.raises(SpecMismatch, match=text):
        node.join(shard)
    node.join(shard, group="another group")
    node.store.check()


def test_another_spec_in_a_group_is_refused_by_its_first_field(node: Node) -> None:
    node.join(HEADS[0])
    other = KVSpec(
        model="ranks", revision="2", dtype="float16", num_layers=2, num_kv_heads=2, head_dim=4, block_tokens=4
    )
    with pytest.raises(SpecMismatch, match="rank group 'g': revision='2', but '' of the ranks there"):
        node.store.join_group(node.open(), node.store.attach(other), "g", HEADS[1])
    node.store.check()


@pytest.mark.parametrize(
    ("spec", "shard", "text"),
    [
        (SPEC, Shard((0, 3), (0, 2)), r"layers=\(0, 3\) is no range within \(0, 2\)"),
        (SPEC, Shard((0, 2), (2, 3)), r"heads=\(2, 3\) is no range within \(0, 2\)"),
        (SPEC, Shard((1, 1), (0, 2)), r"layers=\(1, 1\) is no range"),
        (SPEC, Shard((2, 1), (0, 2)), r"layers=\(2, 1\) is no range"),
        (OPAQUE, Shard((0, 1), (0, 1)), "layout='engine' is opaque"),
    ],
)
def test_a_part_that_the_spec_has_not_is_refused(node: Node, spec: KVSpec, shard: Shard, text: str) -> None:
    with pytest.raises(SpecMismatch, match=text):
        node.store.join_group(node.open(), node.store.attach(spec), "g", shard)
    node.join(HEADS[0])  # nothing is left of the other one
    node.store.check()


def test_ranks_have_a_bound(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC."""
    monkeypatch.setattr(kvstore.core.groups, "MEMBERS_MAX", 2)
    rank = node.ranks()[0]
    with pytest.raises(SpecMismatch, match="too many ranks"):
        node.join(HEADS[0])
    with pytest.raises(SpecMismatch, match="too many ranks"):
        node.join(WHOLE, group="h")
    node.store.close_session(rank.session, 0.0)
    node.join(HEADS[0])


def test_parts_of_a_block_have_a_bound(node: Node) -> None:
    """DSK: a header has room for so many sums."""
    spec = KVSpec(model="deep", dtype="uint8", num_layers=RECTS_MAX + 1, head_dim=1, block_tokens=4)
    entry = node.store.attach(spec)
    for layer in range(RECTS_MAX):
        node.store.join_group(node.reader, entry, "g", Shard((layer, layer + 1), (0, 1)))
    with pytest.raises(SpecMismatch, match=f"at most {RECTS_MAX} parts"):
        node.store.join_group(node.reader, entry, "g", Shard((RECTS_MAX, RECTS_MAX + 1), (0, 1)))


def test_a_place_is_of_its_session_and_spec_only(node: Node) -> None:
    """SEC: also after the session has ended; a number is given once."""
    rank, stranger = node.join(HEADS[0]), node.open()
    other = node.store.attach(OPAQUE)
    text = node.text(ids(1, 1))
    for session, spec_id, member in (
        (stranger, node.entry.spec_id, rank.member),
        (rank.session, other.spec_id, rank.member),
        (rank.session, node.entry.spec_id, rank.member + 1),
    ):
        with pytest.raises(SessionLost, match=f"rank {member} of session {session} is unknown here"):
            node.store.reserve(session, spec_id, 1, text.hashes, 0, b"", member)
    node.store.close_session(rank.session, 0.0)
    again = node.join(HEADS[0])
    assert again.member != rank.member
    with pytest.raises(SessionLost):
        node.store.reserve(again.session, node.entry.spec_id, 1, text.hashes, 0, b"", rank.member)
    assert node.reserved() == 0


# --- filled together


@pytest.mark.parametrize("shards", [(WHOLE,), HEADS, LAYERS, BOTH], ids=["alone", "heads", "layers", "both"])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_there_once_all_parts_are(node: Node, shards: tuple[Shard, ...], seed: int) -> None:
    """COR: whatever the order."""
    prompt, rng = ids(1, 3, 2), random.Random(seed)
    ranks = rng.sample(node.ranks(shards), len(shards))
    numbers = [node.reserve(rank, prompt) for rank in ranks]
    assert len({grant for _, grant in numbers}) == 1, "the same slots for all"
    order = rng.sample(list(zip(ranks, numbers, strict=True)), len(shards))
    for rank, (number, grant) in order[:-1]:
        assert node.commit(rank, number, node.fill(rank, prompt, grant)) == 0
        assert node.find(prompt) == 0
        node.store.check()
    rank, (number, grant) = order[-1]
    assert node.commit(rank, number, node.fill(rank, prompt, grant)) == 4
    assert node.read(prompt) == 14
    assert node.reserved() == 0
    node.store.check()


def test_ranks_may_come_one_after_the_other(node: Node) -> None:
    """COR: the second reserves when the first has long committed."""
    ranks = node.ranks()
    assert node.put(ranks[0], ids(1, 2))[1] == 0
    assert node.reserved() == 2
    assert node.put(ranks[1], ids(1, 2))[1] == 2
    assert node.read(ids(1, 2)) == 8
    assert node.store.next_deadline_ms() is None


def test_what_is_there_already_is_reserved_by_no_rank(node: Node) -> None:
    ranks = node.ranks()
    node.put(node.writer(), ids(1, 2))
    assert [node.reserve(rank, ids(1, 2))[1] for rank in ranks] == [Grant(8, b"", 0, 0)] * 2
    for rank in ranks:
        node.put(rank, ids(1, 3))
    assert node.read(ids(1, 3)) == 12
    assert node.store.stats.blocks_stored == 3


def test_a_part_that_another_rank_fills_is_there_already(node: Node) -> None:
    """PRF: of MLA and of replicated heads one rank writes; also once it has committed."""
    first, same, other = node.join(HEADS[0]), node.join(HEADS[0]), node.join(HEADS[1])
    number, grant = node.reserve(first, ids(1, 2, 1))
    already = Grant(12, b"", 0, 0)
    assert node.reserve(same, ids(1, 2, 1))[1] == already
    node.commit(first, number, node.fill(first, ids(1, 2, 1), grant))
    assert node.reserve(same, ids(1, 2, 1))[1] == already
    assert node.store.stats.parts_already == 2
    assert node.put(other, ids(1, 2, 1))[1] == 3
    assert node.read(ids(1, 2, 1)) == 9


def test_a_rank_without_the_first_tokens_joins_nothing(node: Node) -> None:
    ranks = node.ranks()
    node.reserve(ranks[0], ids(1, 3))
    assert node.reserve(ranks[1], ids(1, 3), start=4)[1] == Grant(0, b"", 0, 0)
    assert node.reserve(ranks[1], ids(1, 3), start=0)[1].slots
    node.store.check()


def test_reserve_is_idempotent_for_a_rank(node: Node) -> None:
    ranks = node.ranks()
    grants = [node.reserve(rank, ids(1, 2), number=7)[1] for rank in ranks * 3]
    assert len(set(grants)) == 1
    assert (node.store.stats.reservations, node.store.stats.parts_already) == (1, 0)
    node.store.check()


def test_a_second_number_of_the_same_rank_is_there_already(node: Node) -> None:
    rank = node.join(HEADS[0])
    node.reserve(rank, ids(1, 2))
    assert node.reserve(rank, ids(1, 2))[1] == Grant(8, b"", 0, 0)


def test_two_places_of_one_session_fill_together(node: Node) -> None:
    """A process with two devices."""
    session = node.open()
    ranks = [node.join(shard, session=session) for shard in HEADS]
    numbers = [node.reserve(rank, ids(1, 2)) for rank in ranks]
    node.store.check()
    sealed = [
        node.commit(rank, number, node.fill(rank, ids(1, 2), grant))
        for rank, (number, grant) in zip(ranks, numbers, strict=True)
    ]
    assert sealed == [0, 2]
    assert node.read(ids(1, 2)) == 8


def test_groups_do_not_fill_each_others_blocks(node: Node) -> None:
    """IDN: the second to be whole is told that the blocks are there."""
    one, two = node.ranks(group="one"), node.ranks(LAYERS, group="two")
    grants = [node.reserve(rank, ids(1, 2))[1] for rank in (*one, *two)]
    assert len({grant.slots for grant in grants}) == 2
    for group in (one, two):
        for rank in group:
            node.store.close_session(rank.session, 0.0)
    one, two = node.ranks(group="one"), node.ranks(LAYERS, group="two")
    assert [node.put(rank, ids(1, 2))[1] for rank in (one[0], two[0], one[1], two[1])] == [0, 0, 2, 0]
    assert node.read(ids(1, 2)) == 8
    assert node.reserved() == 0
    assert node.store.stats.blocks_already == 2


def test_a_plain_writer_that_is_faster_wins(node: Node) -> None:
    """COR: all ranks had their slots already."""
    ranks, prompt = node.ranks(), ids(1, 3)
    numbers = [node.reserve(rank, prompt) for rank in ranks]
    assert node.put(node.writer(), prompt[:8])[1] == 2
    sealed = [
        node.commit(rank, number, node.fill(rank, prompt, grant))
        for rank, (number, grant) in zip(ranks, numbers, strict=True)
    ]
    assert sealed == [0, 1]
    assert node.read(prompt) == 12
    assert (node.reserved(), node.store.stats.blocks_already) == (0, 2)
    node.store.check()


def test_the_rank_that_commits_fewer_blocks_says_how_many_there_are(node: Node) -> None:
    """COR: whether it comes first or last."""
    for first, (mine, others) in enumerate([(1, 3), (3, 1)], 1):
        ranks = node.ranks(group=f"group {first}")
        numbers = [node.reserve(rank, ids(first, 3)) for rank in ranks]
        sealed = []
        for rank, (number, grant), num_blocks in zip(ranks, numbers, (mine, others), strict=True):
            sealed.append(node.commit(rank, number, node.fill(rank, ids(first, 3), grant, num_blocks)))
        assert sealed == [0, 1]
        assert node.read(ids(first, 3)) == 4
        assert node.reserved() == 0
        node.store.check()


def test_a_rank_that_commits_nothing_seals_nothing(node: Node) -> None:
    for first, keep in enumerate((False, True), 1):
        ranks = node.ranks(group=f"group {first}")
        numbers = [node.reserve(rank, ids(first, 2)) for rank in ranks]
        assert node.commit(ranks[0], numbers[0][0], [], keep=keep) == 0
        assert node.commit(ranks[1], numbers[1][0], node.fill(ranks[1], ids(first, 2), numbers[1][1])) == 0
        node.store.check()
        node.store.release(ranks[0].session, [numbers[0][0]])
        assert (node.find(ids(first, 2)), node.reserved()) == (0, 0)


def test_a_chain_whose_parent_was_discarded_is_sealed_by_nobody(node: Node) -> None:
    """Prefix closure."""
    ranks = node.ranks()
    node.put(node.writer(), ids(1, 2))
    lease, _ = node.acquire(ids(1, 2))
    numbers = [node.reserve(rank, ids(1, 4)) for rank in ranks]
    node.store.discard(node.reader, lease, 1, "header")
    assert [node.store.sealable(rank.session, number, 2) for rank, (number, _) in zip(ranks, numbers, strict=True)] == [
        0,
        0,
    ]
    for rank, (number, grant) in zip(ranks, numbers, strict=True):
        assert node.commit(rank, number, node.fill(rank, ids(1, 4), grant)) == 0
    assert node.read(ids(1, 4)) == 4
    node.store.release(node.reader, [lease])
    assert node.reserved() == 0
    node.store.check()


def test_a_joint_reservation_holds_the_chain_it_goes_on_from(node: Node) -> None:
    ranks = node.ranks()
    node.put(node.writer(), ids(1, 10))
    numbers = [node.reserve(rank, ids(1, 12)) for rank in ranks]
    for number, (rank, (_, grant)) in enumerate(zip(ranks, numbers, strict=True)):
        node.commit(rank, numbers[number][0], node.fill(rank, ids(1, 12), grant))
        node.put(node.writer(), ids(2 + number, 4))
        node.store.check()
    assert node.find(ids(1, 12)) >= 40


# --- sums


def test_sums_of_the_ranks_go_into_the_headers(node: Node) -> None:
    """COR: in the order of the parts, whoever was first."""
    ranks = node.ranks(BOTH)
    for rank in reversed(ranks):
        node.put(rank, ids(1, 2))
    assert node.store.memory.tree.num_evictable(SPEC.slot_nbytes) == 0, "pinned until they are written"
    (transfer,) = node.store.take_transfers()
    assert isinstance(transfer, SumBlocks)
    assert transfer.shards == BOTH
    assert all(None not in sums for sums in transfer.sums)
    node.store.complete(transfer)
    assert node.store.memory.tree.num_evictable(SPEC.slot_nbytes) == 2


def test_without_checksums_no_sums_are_written() -> None:
    node = Node(checksums=False)
    for rank in node.ranks():
        node.put(rank, ids(1, 2))
    assert node.store.take_transfers() == []


@pytest.mark.parametrize(
    ("summed", "sums", "known"),
    [
        (b"\1\1", [5, 6], [5, 6]),
        (b"\1\1", [5], [5, None]),
        (b"\1\1", [], [None, None]),
        (b"\0\1", [5, 6], [None, 6]),
        (b"\1\0", [5], [5, None]),
        (b"\1\1", [5, 6, 7], [5, 6]),
    ],
)
def test_sums_that_a_rank_leaves_out_are_made(
    node: Node, summed: bytes, sums: list[int], known: list[int | None]
) -> None:
    """SEC, COR: fewer or more than there are blocks; a device filled them."""
    ranks = node.ranks()
    node.put(ranks[1], ids(1, 2))
    number, grant = node.reserve(ranks[0], ids(1, 2))
    node.fill(ranks[0], ids(1, 2), grant)
    assert node.store.commit(ranks[0].session, number, summed, sums=sums) == 2
    (transfer,) = node.store.take_transfers()
    assert isinstance(transfer, SumBlocks)
    assert [each[0] for each in transfer.sums] == known
    assert all(each[1] is not None for each in transfer.sums)
    node.store.complete(transfer)
    node.store.check()


# --- given up


@pytest.mark.parametrize("how", ["abort", "leave", "death", "quarantine", "an idle rank's death"])
@pytest.mark.parametrize("filled", [False, True])
def test_one_rank_gives_up_for_all(node: Node, how: str, filled: bool) -> None:
    """COR: whether the other ones have filled their parts or are at it."""
    ranks, prompt = node.ranks(), ids(1, 2)
    idle = node.join(HEADS[1])
    numbers = [node.reserve(rank, prompt) for rank in ranks]
    sums = node.fill(ranks[0], prompt, numbers[0][1])
    if filled:
        node.commit(ranks[0], numbers[0][0], sums)
    if how == "abort":
        node.store.abort(ranks[1].session, numbers[1][0])
        node.store.abort(ranks[1].session, numbers[1][0])
    else:
        gone = idle if how.startswith("an idle") else ranks[1]
        node.store.close_session(gone.session, 0.0, died=how != "leave", quarantine=how == "quarantine")
    node.store.check()
    assert node.find(prompt) == 0
    held = {(False, False): 2, (False, True): 2, (True, False): 0, (True, True): 2}
    assert node.reserved() == held[filled, how in ("quarantine", "an idle rank's death")]
    if not filled:
        assert node.commit(ranks[0], numbers[0][0], sums) == 0, "no part of it is taken any more"
    if how.startswith("an idle"):
        assert node.commit(ranks[1], numbers[1][0], []) == 0
    node.store.on_time(QUARANTINE_MS)
    assert (node.reserved(), node.find(prompt)) == (0, 0)
    node.store.check()
    stats = node.store.stats
    assert (stats.reservations, stats.reservations_aborted, stats.reservations_committed) == (1, 1, 0)


def test_a_commit_of_what_was_given_up_is_a_stale_one(node: Node) -> None:
    ranks = node.ranks()
    numbers = [node.reserve(rank, ids(1, 2)) for rank in ranks]
    node.store.abort(ranks[0].session, numbers[0][0])
    before = node.store.stats.guards[Guard.GENERATION]
    assert node.store.sealable(ranks[1].session, numbers[1][0], 2) == 0
    assert [node.commit(rank, number, [1, 1]) for rank, (number, _) in zip(ranks, numbers, strict=True)] == [0, 0]
    assert node.store.stats.guards[Guard.GENERATION] == before + 2
    assert node.reserved() == 0


def test_ranks_begin_anew_beside_one_that_has_yet_to_let_go(node: Node) -> None:
    """COR: it may still write where it was told to."""
    ranks = node.ranks()
    numbers = [node.reserve(rank, ids(1, 2)) for rank in ranks]
    node.store.abort(ranks[0].session, numbers[0][0])
    grant = node.reserve(ranks[0], ids(1, 2))[1]
    assert not set(slots_of(grant)) & set(slots_of(numbers[1][1]))
    assert node.reserve(ranks[1], ids(1, 2))[1] == grant
    node.store.check()
    node.store.abort(ranks[1].session, numbers[1][0])
    assert node.reserved() == 2, "the new one goes on"


def test_slots_come_back_when_the_last_rank_lets_go(node: Node) -> None:
    ranks = node.ranks(BOTH)
    numbers = [node.reserve(rank, ids(1, 2)) for rank in ranks]
    for at, (rank, (number, _)) in enumerate(zip(ranks, numbers, strict=True)):
        assert node.reserved() == 2
        if at % 2:
            node.commit(rank, number, [1, 1])
        else:
            node.store.abort(rank.session, number)
        node.store.check()
    assert node.reserved() == 0


def test_a_dead_ranks_quarantine_outlasts_the_other_ranks(node: Node) -> None:
    """COR: its device may still write."""
    ranks = node.ranks()
    numbers = [node.reserve(rank, ids(1, 2)) for rank in ranks]
    node.store.close_session(ranks[0].session, 5.0, died=True, quarantine=True)
    node.store.abort(ranks[1].session, numbers[1][0])
    assert node.store.next_deadline_ms() == 5.0 + QUARANTINE_MS
    node.store.on_time(4.0 + QUARANTINE_MS)
    assert node.reserved() == 2
    node.store.on_time(5.0 + QUARANTINE_MS)
    assert node.reserved() == 0


def test_a_dead_ranks_quarantine_frees_nothing_that_another_one_fills(node: Node) -> None:
    """COR."""
    ranks = node.ranks()
    numbers = [node.reserve(rank, ids(1, 2)) for rank in ranks]
    node.store.close_session(ranks[0].session, 0.0, died=True, quarantine=True)
    node.store.on_time(QUARANTINE_MS)
    assert node.reserved() == 2
    node.store.abort(ranks[1].session, numbers[1][0])
    assert node.reserved() == 0


@pytest.mark.parametrize("keep", [False, True])
def test_a_part_that_never_comes_is_waited_for_so_long(node: Node, keep: bool) -> None:
    """LEK: from when the last one who fills has filled."""
    rank = node.ranks()[0]
    node.store.on_time(100.0)
    number, grant = node.reserve(rank, ids(1, 2))
    node.store.on_time(100.0 + 5 * PARTS_MS)
    assert node.reserved() == 2, "who fills may take its time"
    assert node.store.next_deadline_ms() is None
    node.commit(rank, number, node.fill(rank, ids(1, 2), grant), keep=keep)
    assert node.store.next_deadline_ms() == 100.0 + 6 * PARTS_MS
    node.store.on_time(99.0 + 6 * PARTS_MS)
    assert node.reserved() == 2
    node.store.on_time(100.0 + 6 * PARTS_MS)
    node.store.check()
    assert node.store.stats.reservations_unfilled == 1
    assert node.reserved() == (2 if keep else 0), "who looks at it still does"
    node.store.release(rank.session, [number])
    assert node.reserved() == 0
    assert node.store.next_deadline_ms() is None


def test_waiting_for_parts_begins_anew_with_each_rank(node: Node) -> None:
    ranks = node.ranks(BOTH)
    node.put(ranks[0], ids(1, 2))
    node.store.on_time(PARTS_MS - 1)
    number, grant = node.reserve(ranks[1], ids(1, 2))
    node.store.on_time(3 * PARTS_MS)
    node.store.check()
    node.commit(ranks[1], number, node.fill(ranks[1], ids(1, 2), grant))
    assert node.store.next_deadline_ms() == 4 * PARTS_MS
    assert [node.put(rank, ids(1, 2))[1] for rank in ranks[2:]] == [0, 2]
    assert node.store.next_deadline_ms() is None
    assert node.read(ids(1, 2)) == 8


def test_the_end_of_a_group_frees_what_waits_for_its_ranks(node: Node) -> None:
    """LEK: the last one leaves, and a group of that name is another one."""
    rank = node.ranks()[0]
    node.put(rank, ids(1, 2))
    for session in [each.id for each in node.store.sessions]:
        node.store.close_session(session, 0.0)
    assert node.reserved() == 0
    node.reader = node.open()
    for whole in node.ranks(LAYERS):
        node.put(whole, ids(1, 2))
    assert node.read(ids(1, 2)) == 8
    node.store.check()


# --- room


def test_room_is_trimmed_the_same_for_all() -> None:
    node = Node(num_extents=1)
    node.put(node.writer(), ids(9, 3))
    lease, _ = node.acquire(ids(9, 3))
    ranks = node.ranks()
    numbers = [node.reserve(rank, ids(1, 7, 2)) for rank in ranks]
    assert [(len(slots_of(grant)), grant.available) for _, grant in numbers] == [(5, 5)] * 2
    assert numbers[0][1] == numbers[1][1]
    for rank, (number, grant) in zip(ranks, numbers, strict=True):
        node.commit(rank, number, node.fill(rank, ids(1, 7, 2), grant))
    assert node.read(ids(1, 7, 2)) == 20
    node.store.release(node.reader, [lease])
    node.store.check()


def test_a_trimmed_chain_is_joined_by_what_was_asked_for() -> None:
    """Not by what there was room for."""
    node = Node(num_extents=1)
    ranks = node.ranks()
    assert len(slots_of(node.reserve(ranks[0], ids(1, 9))[1])) == 8
    assert node.reserve(ranks[1], ids(1, 8))[1] == Grant(0, b"", 0, 0)
    assert len(slots_of(node.reserve(ranks[1], ids(1, 9))[1])) == 8
    node.store.check()


def test_no_room_at_all_is_refused_to_each_rank() -> None:
    node = Node(num_extents=1)
    node.put(node.writer(), ids(9, 8))
    node.acquire(ids(9, 8))
    assert [node.reserve(rank, ids(1, 2))[1] for rank in node.ranks()] == [Grant(0, b"", 0, 0)] * 2
    assert node.reserved() == 0
    node.store.check()


def test_what_a_group_has_open_is_bounded_by_a_sessions_share() -> None:
    """DSK: parts that are committed and never whole hold memory, though no session does."""
    node = Node(session_share=0.5)  # 8 of 16 slots
    ranks = node.ranks()
    for first in (1, 2):
        number, grant = node.reserve(ranks[0], ids(first, 3))
        node.commit(ranks[0], number, node.fill(ranks[0], ids(first, 3), grant))
    assert node.store.session(ranks[0].session).held_nbytes == 0
    assert len(slots_of(node.reserve(ranks[0], ids(3, 3))[1])) == 2
    assert node.reserve(ranks[0], ids(4, 3))[1] == Grant(0, b"", 0, 0)
    assert len(slots_of(node.reserve(node.writer(), ids(4, 3))[1])) == 3, "others are not concerned"
    assert node.put(ranks[1], ids(1, 3))[1] == 3
    assert len(slots_of(node.reserve(ranks[0], ids(4, 3))[1])) == 3
    node.store.check()


def test_each_rank_holds_what_it_fills(node: Node) -> None:
    ranks = node.ranks()
    numbers = [node.reserve(rank, ids(1, 3)) for rank in ranks]
    assert [node.store.session(rank.session).held_nbytes for rank in ranks] == [3 * SPEC.slot_nbytes] * 2
    for rank, (number, grant) in zip(ranks, numbers, strict=True):
        node.commit(rank, number, node.fill(rank, ids(1, 3), grant))
    assert [node.store.session(rank.session).held_nbytes for rank in ranks] == [0, 0]


def test_two_places_of_a_session_hold_their_slots_once() -> None:
    """The exact count, which is asked for where the cheap one says it is too much."""
    node = Node(session_share=0.5)
    session = node.open()
    for shard in HEADS:
        node.reserve(node.join(shard, session=session), ids(1, 4))
    assert node.store.session(session).held_nbytes == 8 * SPEC.slot_nbytes
    assert len(slots_of(node.reserve(Rank(session, 0, WHOLE), ids(2, 4))[1])) == 4


# --- views that are alive


def test_a_kept_part_becomes_a_lease_on_the_blocks(node: Node) -> None:
    """COR: kept before the blocks are sealed, and by the commit that seals them."""
    ranks = node.ranks()
    numbers = [node.reserve(rank, ids(1, 2)) for rank in ranks]
    for at, (rank, (number, grant)) in enumerate(zip(ranks, numbers, strict=True)):
        node.commit(rank, number, node.fill(rank, ids(1, 2), grant), keep=True)
        node.store.check()
        (lease,) = node.session_of(rank).values()
        assert (list(lease.private), lease.slots) == (([], grant.slots) if at else (slots_of(grant), b""))
    node.make_sums()
    assert [node.session_of(rank)[number].slots for rank, (number, _) in zip(ranks, numbers, strict=True)] == [
        numbers[0][1].slots
    ] * 2
    for rank, (number, _) in zip(ranks, numbers, strict=True):
        assert node.store.memory.tree.num_evictable(SPEC.slot_nbytes) == 0
        node.store.release(rank.session, [number])
        node.store.check()
    assert node.store.memory.tree.num_evictable(SPEC.slot_nbytes) == 2
    assert node.reserved() == 0


def test_a_kept_part_may_be_let_go_before_the_blocks_are_there(node: Node) -> None:
    ranks = node.ranks()
    number, _ = node.put(ranks[0], ids(1, 2), keep=True)
    node.store.release(ranks[0].session, [number])
    assert node.reserved() == 2, "the reservation holds them"
    assert node.put(ranks[1], ids(1, 2))[1] == 2
    assert not node.session_of(ranks[0])
    node.store.check()


def test_an_id_used_again_is_another_lease(node: Node) -> None:
    """SEC, LEK: the seal finds the lease that the part was kept under, and no later one."""
    node.put(node.writer(), ids(2, 1))
    ranks, text = node.ranks(), node.text(ids(2, 1))
    number, _ = node.put(ranks[0], ids(1, 2), keep=True)
    node.store.release(ranks[0].session, [number])
    got = node.store.acquire(ranks[0].session, node.entry.spec_id, number, text.query)
    node.put(ranks[1], ids(1, 2))
    assert node.session_of(ranks[0])[number].slots == got.slots
    node.store.release(ranks[0].session, [number])
    node.make_sums()
    node.store.memory.tree.check(pins=[])


def test_a_kept_part_of_what_was_given_up_stays_until_release(node: Node) -> None:
    """COR: kept before, and kept after."""
    for first, is_late in enumerate((False, True), 1):
        ranks = node.ranks(group=f"group {first}")
        numbers = [node.reserve(rank, ids(first, 2)) for rank in ranks]
        if not is_late:
            node.commit(ranks[0], numbers[0][0], [1, 1], keep=True)
        node.store.abort(ranks[1].session, numbers[1][0])
        if is_late:
            node.commit(ranks[0], numbers[0][0], [1, 1], keep=True)
        node.store.check()
        assert node.slab.slots_in(RESERVED) == slots_of(numbers[0][1])
        node.store.release(ranks[0].session, [numbers[0][0]])
        assert node.reserved() == 0


def test_kept_slots_that_lost_a_race_stay_private_until_the_last_release(node: Node) -> None:
    """COR."""
    ranks = node.ranks()
    numbers = [node.reserve(rank, ids(1, 2)) for rank in ranks]
    node.put(node.writer(), ids(1, 2))
    for rank, (number, grant) in zip(ranks, numbers, strict=True):
        assert node.commit(rank, number, node.fill(rank, ids(1, 2), grant), keep=True) == 0
    node.store.check()
    for rank, (number, grant) in zip(ranks, numbers, strict=True):
        assert node.slab.slots_in(RESERVED) == slots_of(grant)
        assert node.session_of(rank)[number].private == array("I", slots_of(grant))
        node.store.release(rank.session, [number])
        node.store.check()
    assert node.reserved() == 0


def test_kept_blocks_that_leave_the_tree_stay_until_the_last_release(node: Node) -> None:
    """COR."""
    ranks = node.ranks()
    numbers = [node.put(rank, ids(1, 2), keep=True)[0] for rank in ranks]
    node.make_sums()
    node.store.clear(node.entry.spec_id)
    assert len(node.slab.slots_in(FAILED)) == 2
    for rank, number in zip(ranks, numbers, strict=True):
        node.store.check()
        assert len(node.slab.slots_in(FAILED)) == 2
        node.store.release(rank.session, [number])
    assert not node.slab.slots_in(FAILED)


def test_a_keeper_that_dies_gives_up_for_all(node: Node) -> None:
    """COR: with it a part is gone that nobody can vouch for any more."""
    ranks = node.ranks()
    node.put(ranks[0], ids(1, 2), keep=True)
    number, grant = node.reserve(ranks[1], ids(1, 2))
    node.store.close_session(ranks[0].session, 0.0, died=True)
    node.store.check()
    assert node.commit(ranks[1], number, node.fill(ranks[1], ids(1, 2), grant)) == 0
    assert node.reserved() == 0


# --- a restart


def joint(lives: Lives, *, second: bool = True) -> tuple[list[Session], list[int], list[int]]:
    """Changes state. Ranks that fill two blocks together: their sessions, the numbers of their parts, the slots."""
    entry, sessions = lives.store.attach(SPEC), [lives.open(), lives.open()]
    text, grants = lives.text(ids(1, 2), SPEC), []
    for session, shard in zip(sessions[: 1 + second], HEADS, strict=False):
        member = lives.store.join_group(session.id, entry, "g", shard)
        grants.append(lives.store.reserve(session.id, entry.spec_id, 1, text.hashes, 0, b"", member))
    assert len(set(grants)) == 1
    return sessions, [1] * len(grants), slots_of(grants[0])


def test_what_ranks_fill_is_given_to_nobody_until_each_has_let_go() -> None:
    """COR, RST: over a restart they know nothing of their group; each holds its slots for itself."""
    lives = Lives()
    olds, _, slots = joint(lives)
    lives.restart({old.number for old in olds})
    newcomer, news = lives.open(), [lives.open() for _ in olds]
    for old, new in zip(olds, news, strict=True):
        lives.store.carry(new.id, [(1, packed(slots))])
        lives.store.account_for(old.number, 0.0)
        assert not lives.takes(newcomer, SPEC) & set(slots)
        lives.store.check()
    lives.store.on_time(QUARANTINE_MS)
    for new in news:
        assert not lives.takes(newcomer, SPEC) & set(slots)
        lives.store.release(new.id, [1])
        lives.store.check()
    assert lives.takes(newcomer, SPEC) >= set(slots)


def test_ranks_begin_anew_after_a_restart() -> None:
    """RST: beside what they still hold."""
    lives = Lives()
    olds, _, slots = joint(lives)
    lives.restart({old.number for old in olds})
    for old in olds:
        lives.store.carry(lives.open().id, [(1, packed(slots))])
        lives.store.account_for(old.number, 0.0)
    news, numbers, others = joint(lives)
    assert not set(slots) & set(others)
    text = lives.text(ids(1, 2), SPEC)
    lives.write_headers(ids(1, 2), Grant(0, packed(others), 1, 2), SPEC)
    sealed = [
        lives.store.commit(new.id, number, b"\1\1", sums=[1, 1]) for new, number in zip(news, numbers, strict=True)
    ]
    assert sealed == [0, 2]
    assert lives.store.find(text.entry.spec_id, text.query) == 8
    lives.store.check()


def test_a_part_that_waited_for_others_is_not_waited_for_after_a_restart() -> None:
    """LEK: nobody holds it any more; it is gone after the quarantine of whatever was reserved."""
    lives = Lives()
    olds, (number,), slots = joint(lives, second=False)
    lives.store.commit(olds[0].id, number, b"\1\1", sums=[1, 1])
    lives.restart({old.number for old in olds})
    for old in olds:
        lives.store.account_for(old.number, 0.0)
    assert [lives.state(slot) for slot in slots] == [RESERVED] * 2
    lives.store.on_time(QUARANTINE_MS)
    assert [lives.state(slot) for slot in slots] == [FREE] * 2
    lives.store.check()


@pytest.mark.parametrize("restarts", [False, True])
def test_late_writes_of_a_dead_rank_are_waited_for_though_another_one_lets_go(restarts: bool) -> None:
    """COR: one rank has said what it holds and is done with it, the other one is dead and its device is not.

    The restart comes before they reserve, with a stranger of whom no word is to be had; or after it.
    """
    lives = Lives()
    if restarts:
        (mine, dead), _, slots = joint(lives)
        lives.restart({mine.number, dead.number})
        new = lives.open()
        lives.store.carry(new.id, [(1, packed(slots))])
        lives.store.account_for(mine.number, 1.0)
        lives.store.account_for(dead.number, 1.0)
        lives.store.release(new.id, [1])
    else:
        stranger = lives.open()
        lives.restart({stranger.number})
        (mine, dead), (number, _), slots = joint(lives)
        lives.store.close_session(dead.id, 0.0, died=True, quarantine=True)
        lives.store.check()
        lives.store.abort(mine.id, number)
        lives.store.check()
        lives.store.account_for(stranger.number, 1.0)
    lives.store.check()
    lives.store.on_time(QUARANTINE_MS)
    assert [lives.state(slot) for slot in slots] == [RESERVED] * 2
    lives.store.on_time(QUARANTINE_MS + 1)
    assert [lives.state(slot) for slot in slots] == [FREE] * 2
    lives.store.check()


@pytest.mark.parametrize("claims_again", [False, True])
def test_a_carry_over_that_fails_half_way_costs_no_slot_of_ranks(claims_again: bool) -> None:
    """COR, LEK: the session ends, its process lives; it says the same once more, or dies before it can."""
    lives = Lives()
    (mine, dead), _, slots = joint(lives)
    lives.restart({mine.number, dead.number})
    new = lives.open()
    lives.store.carry(new.id, [(1, packed(slots))])
    lives.store.close_session(new.id, 0.0)
    lives.store.check()
    if claims_again:
        new = lives.open()
        lives.store.carry(new.id, [(1, packed(slots))])
    for rank in (mine, dead):
        lives.store.account_for(rank.number, 1.0)
        lives.store.check()
    lives.store.on_time(QUARANTINE_MS)
    assert [lives.state(slot) for slot in slots] == [RESERVED] * 2
    lives.store.on_time(QUARANTINE_MS + 1)
    assert [lives.state(slot) for slot in slots] == [RESERVED if claims_again else FREE] * 2
    if claims_again:
        lives.store.release(new.id, [1])
    assert [lives.state(slot) for slot in slots] == [FREE] * 2
    lives.store.check()


def test_both_ranks_may_die_while_strangers_are_awaited() -> None:
    """LEK, COR."""
    lives = Lives()
    stranger = lives.open()
    lives.restart({stranger.number})
    ranks, _, slots = joint(lives)
    for rank in ranks:
        lives.store.close_session(rank.id, 0.0, died=True, quarantine=True)
        lives.store.check()
    lives.store.account_for(stranger.number, 1.0)
    assert [lives.state(slot) for slot in slots] == [RESERVED] * 2
    lives.store.on_time(QUARANTINE_MS + 1)
    assert [lives.state(slot) for slot in slots] == [FREE] * 2
    lives.store.check()


def test_nobody_carries_over_what_ranks_of_this_life_fill() -> None:
    """SEC, COR: slots that a seal makes blocks would be freed with the carrier's lease."""
    lives = Lives()
    ranks, numbers, slots = joint(lives)
    stranger = lives.open()
    lives.store.carry(stranger.id, [(7, packed(slots))])
    lives.store.check()
    lives.write_headers(ids(1, 2), Grant(0, packed(slots), 1, 2), SPEC)
    for rank, number in zip(ranks, numbers, strict=True):
        lives.store.commit(rank.id, number, b"\1\1", sums=[1, 1])
    lives.store.close_session(stranger.id, 0.0, died=True)
    lives.store.on_time(QUARANTINE_MS)
    assert [lives.state(slot) for slot in slots] == [SEALED] * 2
    assert lives.find(ids(1, 2), SPEC) == 8
    lives.store.check()


# --- whatever clients do


@dataclass(eq=False)
class Joint:
    """What ranks fill together. `parts`: blocks that each has committed, None while it fills."""

    ids: Ids
    grant: Grant
    parts: dict[Shard, int | None] = field(default_factory=dict)
    due_ms: float | None = None
    is_over: bool = False


@dataclass(eq=False)
class Part:
    """A writer's hold on slots. `joint`: None of a writer of whole blocks."""

    rank: Rank
    ids: Ids
    grant: Grant
    joint: Joint | None


@dataclass(eq=False)
class Process:
    """A session: its places, what it fills, and what it has committed and still looks at, by number."""

    session: int
    ranks: list[Rank]
    parts: dict[int, Part] = field(default_factory=dict)
    views: dict[int, tuple[Part, list[bytes]]] = field(default_factory=dict)


GROUPS = {"heads": HEADS, "both": BOTH, "one": (WHOLE,)}


class Crowd:
    """Processes that do anything at any time on a small node. Whoever may write does, and not only what is right."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.node = Node(session_share=self.rng.choice((0.5, 1.0)))
        self.groups = self.rng.choice((["heads", "both"], ["heads", "one"], ["both"]))
        self.processes: list[Process] = []
        self.open: dict[tuple[str, bytes], Joint] = {}
        self.leases: dict[int, tuple[Ids, Acquisition]] = {}
        self.late: list[tuple[float, Part]] = []  # what devices of the dead may still write, and until when
        self.now_ms = 0.0
        self.num_joint = 0  # sealed

    def step(self) -> None:
        rng = self.rng
        acts = [self.reserve] * 8 + [self.commit] * 7 + [self.scribble] * 3 + [self.read] * 2 + [self.release] * 4
        acts += [self.come] * 2 + [self.wait, self.forget, self.node.make_sums]
        acts += [self.abort, self.go] if rng.random() < 0.25 else []
        rng.choice(acts)()

    def come(self) -> None:
        if len(self.processes) < 8:
            session, name = self.node.open(), self.rng.choice(self.groups)
            shards = self.rng.sample(GROUPS[name], self.rng.randint(1, len(GROUPS[name])))
            ranks = [self.node.join(shard, name, session) for shard in shards]
            self.processes.append(Process(session, [*ranks, Rank(session, 0, WHOLE, "")]))

    def ids(self) -> Ids:
        return ids(self.rng.randrange(6), self.rng.randint(1, 4), self.rng.choice((0, 0, 2)))

    def reserve(self) -> None:
        if not self.processes:
            return
        process = self.rng.choice(self.processes)
        rank, wanted = self.rng.choice(process.ranks), self.ids()
        begun = [joint.ids for (group, _), joint in self.open.items() if group == rank.group]
        missing = [joint.ids for (group, _), joint in self.open.items() if self.is_missing(rank, group, joint)]
        if begun and self.rng.random() < 0.8:
            wanted = self.rng.choice(missing or begun)
        key = (rank.group, self.node.text(wanted).hashes[-16:])
        joint = self.open.get(key)
        number, grant = self.node.reserve(rank, wanted)
        if joint is not None and rank.shard in joint.parts:
            assert grant == Grant(len(wanted) + -len(wanted) % 4, b"", 0, 0)
        elif joint is not None:
            assert grant == joint.grant
        if not grant.slots:
            return
        if joint is None:
            assert not self.held() & set(slots_of(grant)), "somebody may look at, or write to, what was given out"
            if rank.member:
                joint = self.open[key] = Joint(wanted, grant)
        if joint is not None:
            joint.parts[rank.shard], joint.due_ms = None, None
        process.parts[number] = Part(rank, wanted, grant, joint)

    def is_missing(self, rank: Rank, group: str, joint: Joint) -> bool:
        return rank.group == group and rank.shard not in joint.parts

    def commit(self) -> None:
        process, number, part = self.any_part()
        if process is None or part is None:
            return
        del process.parts[number]
        node, rank, joint, grant = self.node, part.rank, part.joint, part.grant
        most = len(slots_of(grant))
        num_blocks, keep = self.rng.choice((most, most, self.rng.randint(0, most))), self.rng.random() < 0.4
        sums = node.fill(rank, part.ids, grant, num_blocks)
        flags = bytes(self.rng.random() < 0.8 for _ in sums)
        sealable = node.store.sealable(rank.session, number, num_blocks)
        given = [sum_ if flag else 0 for sum_, flag in zip(sums, flags, strict=True)][: self.rng.choice((9, 9, 1))]
        sealed = node.store.commit(rank.session, number, flags, keep=keep, sums=given)
        if keep:
            process.views[number] = part, self.seen(part, num_blocks)
        if joint is not None:
            num_blocks = self.committed(joint, rank.shard, num_blocks)
        assert sealed <= num_blocks
        if sealable and num_blocks:
            there = min(len(part.ids), grant.start + 4 * num_blocks)
            assert node.find(part.ids) >= there, "all of it was filled, and it is not there"

    def committed(self, joint: Joint, shard: Shard, num_blocks: int) -> int:
        """Changes state. How many blocks that seals."""
        if joint.is_over:
            return 0
        joint.parts[shard] = num_blocks
        filled = [each for each in joint.parts.values() if each is not None]
        if sum(shard.area for shard, each in joint.parts.items() if each is not None) == WHOLE.area:
            self.end(joint)
            self.num_joint += len(joint.parts) > 1
            return min(filled)
        if len(filled) == len(joint.parts):
            joint.due_ms = self.now_ms + PARTS_MS
        return 0

    def end(self, joint: Joint) -> None:
        if not joint.is_over:
            joint.is_over = True
            del self.open[next(key for key, each in self.open.items() if each is joint)]

    def abort(self) -> None:
        process, number, part = self.any_part()
        if process is not None and part is not None:
            del process.parts[number]
            self.node.store.abort(process.session, number)
            if part.joint is not None:
                self.end(part.joint)

    def go(self) -> None:
        """A process leaves or dies; late writes of its device land within the quarantine."""
        if self.processes:
            process = self.processes.pop(self.rng.randrange(len(self.processes)))
            died, quarantine = self.rng.choice(((False, False), (True, False), (True, True)))
            self.node.store.close_session(process.session, self.now_ms, died=died, quarantine=quarantine)
            groups = {rank.group for rank in process.ranks}
            for joint in [joint for (group, _), joint in self.open.items() if group in groups]:
                self.end(joint)
            if quarantine:
                self.late += [(self.now_ms + QUARANTINE_MS, part) for part in process.parts.values()]

    def wait(self) -> None:
        self.now_ms += self.rng.choice((1.0, PARTS_MS / 3, PARTS_MS, QUARANTINE_MS))
        self.late = [(until_ms, part) for until_ms, part in self.late if until_ms > self.now_ms]
        self.node.store.on_time(self.now_ms)
        for joint in list(self.open.values()):
            if joint.due_ms is not None and joint.due_ms <= self.now_ms:
                self.end(joint)

    def scribble(self) -> None:
        """Whoever has not committed, dead or alive, may write anything to its part."""
        writers = [part for process in self.processes for part in process.parts.values()]
        writers += [part for _, part in self.late]
        for part in self.rng.sample(writers, min(2, len(writers))):
            for block in range(len(slots_of(part.grant))):
                self.bytes_of(part, block)[...] = self.rng.randrange(256)

    def read(self) -> None:
        wanted = self.ids()
        number, got = self.node.acquire(wanted)
        if got.slots:
            self.leases[number] = wanted, got

    def release(self) -> None:
        if self.leases and self.rng.random() < 0.6:
            number = self.rng.choice(list(self.leases))
            del self.leases[number]
            self.node.store.release(self.node.reader, [number])
        viewers = [process for process in self.processes if process.views]
        if viewers:
            process = self.rng.choice(viewers)
            number, _ = process.views.popitem()
            self.node.store.release(process.session, [number])

    def forget(self) -> None:
        if self.rng.random() < 0.2:
            self.node.store.clear(self.node.entry.spec_id)
        elif self.leases:
            number = self.rng.choice(list(self.leases))
            self.node.store.discard(self.node.reader, number, self.rng.randrange(3), "header")

    def any_part(self) -> tuple[Process | None, int, Part | None]:
        found = [(process, number) for process in self.processes for number in process.parts]
        if not found:
            return None, 0, None
        process, number = self.rng.choice(found)
        return process, number, process.parts[number]

    def bytes_of(self, part: Part, block: int) -> Bytes:
        num_tokens = self.node.text(part.ids).num_tokens_of(part.grant.start // 4 + block)
        return self.node.part(slots_of(part.grant)[block], part.rank.shard, num_tokens)

    def seen(self, part: Part, num_blocks: int) -> list[bytes]:
        return [self.bytes_of(part, block).tobytes() for block in range(num_blocks)]

    def held(self) -> set[int]:
        """Query. Slots that somebody looks at, or may write to."""
        parts = [part for process in self.processes for part in process.parts.values()]
        parts += [part for process in self.processes for part, _ in process.views.values()]
        parts += [part for _, part in self.late]
        held = {slot for part in parts for slot in slots_of(part.grant)}
        held.update(slot for joint in self.open.values() for slot in slots_of(joint.grant))
        return held.union(*(slots_of(got) for _, got in self.leases.values()))

    def check(self) -> None:
        """Query. Assert what the model says: all but the store's own check, which takes longer than the step."""
        node, store = self.node, self.node.store
        opened = store.filling.open_reservations()
        joint = {each.slots.tobytes() for each in opened if each.group is not None}
        assert joint == {each.grant.slots for each in self.open.values()}
        stats = store.stats
        assert stats.reservations == stats.reservations_committed + stats.reservations_aborted + len(opened)
        for wanted, got in self.leases.values():
            node.require_right(wanted, got)
        for process in self.processes:
            for part, seen in process.views.values():
                assert seen == self.seen(part, len(seen)), "a view shows other bytes"
        held = np.array(sorted(self.held()), np.int64)
        assert (node.slab.tables.slots["state"][held] != FREE).all()

    def end_all(self) -> None:
        store = self.node.store
        for process in self.processes:
            store.close_session(process.session, self.now_ms, died=True)
        store.release(self.node.reader, self.leases)
        store.on_time(self.now_ms + QUARANTINE_MS)
        self.node.make_sums()
        store.check()
        store.memory.tree.check(pins=[])
        states = self.node.slab.tables.slots["state"]
        assert set(np.unique(states).tolist()) <= {FREE, SEALED}, "something is reserved for nobody"
        store.clear(self.node.entry.spec_id)
        assert not states.any()
        assert store.next_deadline_ms() is None


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_do_anything_at_any_time_never_see_what_is_not_theirs(seed: int) -> None:
    """COR, LEK: a lease shows the bytes of its tokens, a view what its writer wrote, and at the end all comes back."""
    crowd = Crowd(seed)
    for at in range(250):
        crowd.step()
        crowd.check()
        if at % 5 == 0:
            crowd.node.store.check()
    crowd.end_all()


def test_the_crowd_does_all_that_it_is_to_do() -> None:
    """What the seeds above see is worth something only if all of it happens."""
    crowds = [Crowd(seed) for seed in range(8)]
    for crowd in crowds:
        for _ in range(250):
            crowd.step()
    assert sum(crowd.num_joint for crowd in crowds) > 5
    for name in ("parts_already", "blocks_already", "reservations_unfilled", "reservations_refused", "sessions_died"):
        assert sum(getattr(crowd.node.store.stats, name) for crowd in crowds) > 5, name
    assert sum(crowd.node.store.memory.num_evicted for crowd in crowds) > 50


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_all_come_have_all_of_it(seed: int) -> None:
    """The twin in which nothing goes wrong: forgetting everything is no way to pass."""
    rng, node = random.Random(seed), Node(num_extents=8)
    groups = [node.ranks(shards, name) for name, shards in GROUPS.items()]
    prompts = [ids(first, rng.randint(1, 4), rng.randrange(4)) for first in range(12)]
    acts = [(rank, prompt) for at, prompt in enumerate(prompts) for rank in groups[at % len(groups)]]
    parts: list[tuple[Rank, Ids, int, Grant]] = []
    while acts or parts:
        if acts and (not parts or rng.random() < 0.5):
            rank, prompt = acts.pop(rng.randrange(len(acts)))
            number, grant = node.reserve(rank, prompt)
            assert grant.slots
            parts.append((rank, prompt, number, grant))
        else:
            rank, prompt, number, grant = parts.pop(rng.randrange(len(parts)))
            node.commit(rank, number, node.fill(rank, prompt, grant))
        node.store.check()
    node.make_sums()
    assert [node.read(prompt) for prompt in prompts] == [len(prompt) for prompt in prompts]
    assert node.store.stats.reservations_aborted == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_command_of_a_rank_breaks_the_store(seed: int) -> None:
    """SEC: any numbers, places of others, hashes of nothing, sums of any number; at the end nothing is held."""
    rng, node = random.Random(seed), Node(session_share=0.5)
    store, spec_id, blocks = node.store, node.entry.spec_id, [rng.randbytes(16) for _ in range(4)]
    sessions = [node.open() for _ in range(3)]

    def some() -> bytes:
        return b"".join(rng.choices(blocks, k=rng.randint(0, 4)))

    def attempt() -> None:
        session, number, shard = rng.choice(sessions), rng.randint(1, 5), rng.choice((*HEADS, *BOTH))
        match rng.randrange(8):
            case 0:
                store.join_group(session, node.entry, rng.choice("gh"), shard)
            case 1 | 2 | 3:
                store.reserve(session, spec_id, number, some(), rng.choice((0, 4)), rng.choice((b"", some())), number)
            case 4 | 5:
                sums = [rng.randrange(1 << 64) for _ in range(rng.randrange(6))]
                store.commit(session, number, rng.randbytes(rng.randrange(6)), keep=rng.random() < 0.5, sums=sums)
            case 6:
                store.release(session, [number])
            case _:
                store.abort(session, number)

    for at in range(1000):
        try:
            attempt()
        except KVStoreError:
            continue
        for transfer in store.take_transfers():
            assert isinstance(transfer, SumBlocks)
            store.complete(transfer)
        if at % 10 == 0:
            store.check()
        if at % 300 == 0:
            store.close_session(sessions.pop(0), float(at), died=True, quarantine=rng.random() < 0.5)
            sessions.append(node.open())
    for session in sessions:
        store.close_session(session, 1e6)
    store.on_time(1e6 + QUARANTINE_MS)
    store.check()
    assert node.reserved() == 0
    store.memory.tree.check(pins=[])


def test_headers_and_payloads_of_the_model_are_the_products() -> None:
    """The model's own cut of a payload is that of KVSpec's array."""
    assert SPEC.array_shape(4) == (2, 2, 2, 4, 2)
    payload = np.arange(SPEC.payload_nbytes(4), dtype=np.uint8)
    whole = payload.view(np.float16).reshape(SPEC.array_shape(4))
    for shard in (*HEADS, *LAYERS, *BOTH, WHOLE):
        (first_layer, end_layer), (first_head, end_head) = shard
        cut = np.ascontiguousarray(whole[first_layer:end_layer, :, first_head:end_head])
        assert part_of(payload, shard).tobytes() == cut.tobytes()
    assert HEADER_NBYTES + SPEC.block_nbytes <= SPEC.slot_nbytes
