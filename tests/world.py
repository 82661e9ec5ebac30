"""A node in miniature, from one seed: clients, slab, movers and clock around the real Store.

    client ── verbs ──> Store ── transfers ──> movers      clients write and read slots of `SimSlab` themselves
       └── bytes ──> SimSlab <── sums ───────────┤         `late`: writes of dead clients that have yet to land
                        └─── loads, groups ── SimDisk      the tier below, which outlives the daemon

A step is one thing that happens to one of them. After every step `check` asserts what must always hold; `heal` ends
the faults and asserts that all is as new. KV is a pattern, so bytes under a wrong name show without a model. Meant to
grow: a network is a further thing that happens.

`python -m tests.world FIRST COUNT` runs that many seeds and prints what happened in them.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.clock import SimClock
from kvstore.core.layout import (
    HEADER_NBYTES,
    STATE_OFFSET,
    TOKENS_OFFSET,
    Header,
    Rect,
    header_state,
    parse_header,
)
from kvstore.core.leases import SpecEntry
from kvstore.core.lower import LowerSettings, LowerTier
from kvstore.core.moves import SumBlocks
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.core.store import QUARANTINE_MS, Store
from kvstore.core.takeover import Legacy
from kvstore.core.tier import ARRIVING, FAILED, FREE, RESERVED, SEALED
from kvstore.errors import SessionLost
from kvstore.spec import KVSpec
from radix import LoadedBlocks, block_symbols_of, common_tokens
from tests.models import SIM_ROW, Bytes, Keys, SimDisk, SimMoves, SimSlab, Text, write_header

SPECS = (
    KVSpec(model="gqa", dtype="float16", num_layers=2, num_kv_heads=2, head_dim=2, block_tokens=4),
    KVSpec(model="mla", dtype="bfloat16", num_layers=3, latent_dim=200, block_tokens=8),
    KVSpec(model="opaque", dtype="uint8", num_layers=1, block_tokens=6, layout="x", token_nbytes=1000, grain_tokens=2),
    KVSpec(model="gqa", dtype="float16", num_layers=2, num_kv_heads=2, head_dim=2, block_tokens=4, tenant_salt="other"),
)  # slots of 8, 16, 12 and again 8 KiB


class View(NamedTuple):
    """A block as a client sees it: the bytes at `offset` must be these for as long as it may look."""

    slot: int
    offset: int
    stored_tokens: int
    expected: Bytes  # [rows, tokens, width]; fewer tokens than stored where only the first ones are the prompt's


@dataclass
class Held:
    """A lease. `abandoned`: the client has let go, the daemon has yet to hear of it.

    `views`: of the leading blocks that it was told are there. `text`, `num_tokens`: what the others will show.
    """

    slots: list[int]
    views: list[View]
    text: Text | None = None
    num_tokens: int = 0
    private: list[int] = field(default_factory=list)
    abandoned: bool = False


NO_HEADER, HEADER, HALF, WHOLE = range(4)
EXTENT_NBYTES = 64 << 10


@dataclass
class Filling:
    """A reservation. `progress`: per block, how far its bytes have come."""

    text: Text
    first: int
    slots: list[int]
    offsets: list[int]
    generation: int
    progress: list[int]
    summed: list[bool]
    abandoned: bool = False


@dataclass
class Client:
    """A process. `leases` and `reservations`: what the daemon must hold for it, until it has heard of their end."""

    session: int
    number: int
    pid_visible: bool
    entries: list[SpecEntry]
    leases: dict[int, Held] = field(default_factory=dict)
    reservations: dict[int, Filling] = field(default_factory=dict)
    notices: deque[Callable[[], None]] = field(default_factory=deque)  # sent, not arrived
    last_id: int = 0
    state: str = "alive"  # or "stalled", "lost" (stalled, and its session is closed), "dead"

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def own_leases(self) -> list[int]:
        return [number for number, held in self.leases.items() if not held.abandoned]

    def own_reservations(self) -> list[int]:
        return [number for number, filling in self.reservations.items() if not filling.abandoned]


@dataclass
class LateWrite:
    """A device's write for a client that is no more. `before_ms`: from when on it cannot land any more."""

    session: int
    offset: int
    data: bytes
    before_ms: float = float("inf")


@dataclass
class Asked:
    """Somebody waits for blocks of a lease."""

    client: Client
    number: int
    until_ms: float


class World:
    """`faults` False: the twin, in which nothing goes wrong and every block stored is found again, in some tier."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.seed, self.faults, self.rng = seed, faults, Random(seed)
        self.num_extents = self.rng.randint(3, 5) if faults else 8
        self.extent_nbytes = EXTENT_NBYTES if faults else 1 << 20
        share = self.rng.choice((0.25, 0.25, 0.5, 1.0)) if faults else 1.0
        self.clock = SimClock(self.rng.uniform(0, 1e9))
        self.session_share, self.checksums = share, self.rng.random() < 0.9
        self.session_nbytes_max = int(self.num_extents * self.extent_nbytes * share)
        self.generation = self.rng.randrange(1 << 60)
        self.extents_ready = 0
        self.slab = SimSlab(self.num_extents, self.extent_nbytes)
        self.store = self._new_store()
        small = self.rng.choice((EXTENT_NBYTES, EXTENT_NBYTES, 12 << 10))  # 12 KiB: not for every spec
        disk_extents = self.rng.randint(2, 8) if faults else 16
        self.disk = SimDisk(self.slab, disk_extents, small if faults else self.extent_nbytes)
        self.disk_damaged: set[int] = set()  # slots, by a bit that flipped
        self.disk_lost: set[int] = set()  # extents
        self.moves: SimMoves | None = None  # None: the disk's index is being read
        self.asked: dict[int, Asked] = {}  # by token
        self.last_token = 0
        self.texts: list[Text] = []
        self.named: dict[bytes, Bytes] = {}  # block hash -> its payload
        self.stored: list[tuple[Text, int]] = []  # and how many tokens of it; the twin's model
        self.quarantine: list[tuple[float, list[int]]] = []
        self.late: list[LateWrite] = []
        self.sums: list[tuple[SumBlocks, list[int | None] | None]] = []  # None: not read yet
        self.damaged: set[int] = set()
        self.seen: Counter[str] = Counter()
        self.trail: deque[str] = deque(maxlen=12)
        self.num_steps = 0
        for _ in range(1 if faults else self.num_extents):
            self._next_extent()
        if not faults:
            self.index_is_read()
        self.clients = [self._new_client() for _ in range(self.rng.randint(2, 5))]

    # --- running

    def run(self, num_steps: int) -> None:
        """Changes state. That many steps, then `heal`. A failure says the seed and the step."""
        sound = False
        try:
            for _ in range(num_steps):
                self.step()
            self.trail.append("heal")
            self.heal()
            sound = True
        finally:
            if not sound:
                print(f"World({self.seed}, faults={self.faults}) failed at step {self.num_steps}: {list(self.trail)}")

    def step(self) -> None:
        """Changes state. One thing happens."""
        happenings = [*NORMAL, *(FAULTS if self.faults else TWIN)]
        (happen,) = self.rng.choices([each for each, _ in happenings], [weight for _, weight in happenings])
        self.num_steps += 1
        self.trail.append(happen.__name__)
        happen(self)
        self._hear()
        self.check()

    # --- what must hold after every step

    def check(self) -> None:
        """Query."""
        self.store.check()
        self._check_pins()
        self._check_room()
        self._check_holders()
        self._check_bytes()
        self._check_disk()

    def _check_pins(self) -> None:
        sessions = self.store.sessions
        leases = [pin for session in sessions for lease in session.leases.values() for pin in lease.pins]
        parents = [each.parent for session in sessions for each in session.reservations.values()]
        moving = self.store.lower.pins[0] if self.store.lower is not None else []  # those on the disk: in store.check
        self.store.memory.tree.check(leases + parents + list(self.store._summing.values()) + moving)

    def _check_room(self) -> None:
        """DSK, LEK: `free + cached + reserved = total`, told from the table alone."""
        pool, states = self.store.memory.pool, self.slab.tables.slots["state"]
        num_assigned = 0
        for slot_nbytes in pool.classes:
            extents = np.flatnonzero(self.slab.tables.extents == slot_nbytes)
            per_extent = self.extent_nbytes // slot_nbytes
            table = states.reshape(-1, SLOTS_PER_EXTENT_MAX)[extents]
            # ARRIVING: on its way up; FAILED: left the tree under a lease, or under the move that brings it
            states_of = ((FREE,), (SEALED, ARRIVING, FAILED), (RESERVED,))
            counts = [int(np.isin(table[:, :per_extent], states).sum()) for states in states_of]
            assert not table[:, per_extent:].any(), "a slot beyond the end of its extent"
            assert tuple(counts) == self.store.memory.counts(slot_nbytes)
            assert sum(counts) == pool.num_slots(slot_nbytes) == len(extents) * per_extent
            num_assigned += len(extents)
        assert num_assigned + pool.num_unassigned == self.extents_ready

    def _check_holders(self) -> None:
        """Every lease and reservation is some session's; every reserved slot is exactly one holder's."""
        clients = {client.session: client for client in self.clients if client.state != "lost"}
        assert {session.id for session in self.store.sessions} == set(clients)
        reserved = [slot for _, slots in self.quarantine for slot in slots]
        for session in self.store.sessions:
            client = clients[session.id]
            assert set(session.leases) == set(client.leases)
            assert set(session.reservations) == set(client.reservations)
            reserved += [slot for held in client.leases.values() for slot in held.private]
            for filling in client.reservations.values():
                rows = self.slab.tables.slots[filling.slots]
                assert (rows["owner"] == client.number).all()
                assert (rows["generation"] == filling.generation).all()
                reserved += filling.slots
        assert len(reserved) == len(set(reserved)), "a slot was given to two"
        assert sorted(reserved) == self.slab.slots_in(RESERVED)
        due = min((until for until, _ in self.quarantine), default=None)
        next_ms = self.store.next_deadline_ms()
        assert next_ms == due or (self.store.lower is not None and next_ms is not None)
        assert due is None or (next_ms is not None and next_ms <= due)

    def _check_bytes(self) -> None:
        """COR: what a name or a lease stands for is there, byte for byte."""
        for slot in self.slab.slots_in(SEALED):
            header = self.slab.header(slot)
            if header is None:
                assert slot in self.damaged, f"slot {slot} is sealed and has no header"
                continue
            expected = self.named[header.identity.block_hash].reshape(-1)
            payload = self.slab.payload(self.slab.offset(slot), header.payload_nbytes)
            assert np.array_equal(payload, expected), f"slot {slot} holds another block's bytes"
            assert all(rect.sum == xxhash.xxh3_64_intdigest(expected.data) for rect in header.rects)
        for client in self.clients:
            for held in client.leases.values() if client.state != "lost" else ():
                assert all(self._shows(view) for view in held.views), "a lease shows another block's bytes"

    def _check_disk(self) -> None:
        """RST: what the tier below offers is durable, block for block; DSK: and within its capacity."""
        lower = self.store.lower
        if lower is None:
            return
        sealed = set(np.flatnonzero(lower.tier._state == SEALED).tolist())
        assert sealed <= set(self.disk.rows), "offered before it is durable"
        assert {slot // SLOTS_PER_EXTENT_MAX for slot in sealed} <= set(range(self.disk.num_extents)) - self.disk_lost

    def _check_rows(self) -> None:
        """COR: each committed row stands for its block, byte for byte."""
        for slot, (block, _, symbols) in self.disk.rows.items():
            if slot in self.disk_damaged:
                continue
            data = self.disk.slots[slot]
            header = parse_header(data[:HEADER_NBYTES])
            assert header is not None, f"disk slot {slot} has a row and no header"
            identity, expected = header.identity, self.named[block.block_hash].tobytes()
            assert (identity.block_hash, identity.parent, identity.number) == (*block[3:5], block.number)
            assert block_symbols_of(identity.tokens, identity.keys_start, identity.keys_digest) == symbols
            assert data[HEADER_NBYTES : HEADER_NBYTES + header.payload_nbytes] == expected, f"disk slot {slot}: bytes"

    def _shows(self, view: View) -> bool:
        rows, num_tokens, width = view.expected.shape
        payload = self.slab.payload(view.offset, rows * view.stored_tokens * width)
        return np.array_equal(payload.reshape(rows, view.stored_tokens, width)[:, :num_tokens], view.expected)

    # --- clients

    def _new_client(self) -> Client:
        session = self.store.open_session()
        assert session is not None
        specs = self.rng.sample(SPECS, self.rng.randint(1, len(SPECS)))
        entries = [self.store.attach(spec) for spec in specs]
        return Client(session.id, session.number, self.rng.random() < 0.3, entries)

    def _some_client(self) -> Client | None:
        """An alive one, whose notices have arrived: the order of a connection is kept."""
        alive = [client for client in self.clients if client.state == "alive"]
        if not alive:
            return None
        client = self.rng.choice(alive)
        while client.notices:
            client.notices.popleft()()
        return client

    def _text(self, entry: SpecEntry) -> Text:
        """A new prompt, one seen before, or one that goes on from, or leaves, one seen before."""
        rng, seen = self.rng, [text for text in self.texts if text.entry is entry]
        ids: tuple[int, ...] = ()
        keys: Keys = ()
        if seen and rng.random() < 0.9:
            old = rng.choice(seen[-20:])
            ids, keys = old.token_ids[: rng.choice((old.num_tokens, rng.randint(0, old.num_tokens)))], old.keys
            ids = ids[:100]
        if not ids or rng.random() < 0.7:
            ids += tuple(rng.choices((1, 2, 3), k=rng.randint(1, 12)))
        if rng.random() < 0.15:
            keys = tuple(sorted({(rng.randrange(len(ids)), rng.choice((b"cat", b"dog"))) for _ in range(2)}))
        text = Text(entry, ids, keys)
        self.texts.append(text)
        self.named |= {text.block_hash(block): text.payload(block) for block in range(text.num_blocks)}
        return text

    def _distinct_nbytes(self, client: Client) -> int:
        slots = {slot for held in client.leases.values() for slot in held.slots + held.private}
        slots |= {slot for filling in client.reservations.values() for slot in filling.slots}
        return sum(self.slab.class_of(slot) for slot in slots)

    def _within_share(self, client: Client, held_before: int) -> None:
        """A session that was given more than it had holds no more than its share."""
        assert self._distinct_nbytes(client) <= max(held_before, self.session_nbytes_max)

    def _views(self, text: Text, num_tokens: int, slots: list[int]) -> Iterator[View | None]:
        """As a client verifies a hit; None for the first block that is not what its name says."""
        for block, slot in enumerate(slots):
            header, offset = self.slab.header(slot), self.slab.offset(slot)
            count = min(num_tokens - block * text.spec.block_tokens, text.spec.block_tokens)
            if header is None:
                yield None
                return
            identity = header.identity
            symbols = block_symbols_of(identity.tokens, identity.keys_start, identity.keys_digest)
            assert identity.parent == text.parent_hash(block)
            assert common_tokens(symbols, text.symbols(block)) >= count
            yield View(slot, offset, len(identity.tokens) // 4, text.payload(block)[:, :count])

    def predicted(self, text: Text) -> int:
        """Query. The twin's model of a hit: the longest common token prefix with anything stored."""
        longest = max((text.common(other, num_tokens) for other, num_tokens in self.stored), default=0)
        return longest - longest % text.spec.grain_tokens

    def _reply_is_lost(self) -> bool:
        return self.faults and self.rng.random() < 0.05

    # --- what can happen: normal life

    def acquire(self) -> None:
        client = self._some_client()
        if client is None:
            return
        text, number = self._text(self.rng.choice(client.entries)), client.next_id()
        found, held_before = self.store.find(text.entry.spec_id, text.query), self._distinct_nbytes(client)
        got = self.store.acquire(client.session, text.entry.spec_id, number, text.query)
        slots = np.frombuffer(got.slots, np.uint32).tolist()
        assert got.num_tokens <= found
        assert len(slots) == -(-got.num_tokens // text.spec.block_tokens)
        if not self.faults:
            assert got.num_tokens == found == self.predicted(text)
        self.seen["shortened" if got.num_tokens < found else "hits" if slots else "misses"] += 1
        self.seen["partial hits"] += got.num_tokens % text.spec.block_tokens > 0
        if not slots:
            return
        assert self.store.acquire(client.session, text.entry.spec_id, number, text.query) == got, "idempotent"
        assert got.ready <= len(slots)
        client.leases[number] = Held(slots, [], text, got.num_tokens)
        self._look(client.leases[number], got.ready)
        self._within_share(client, held_before)
        self.seen["waited"] += got.ready < len(slots)
        if self._reply_is_lost():
            self._release(client, number)

    def _look(self, held: Held, ready: int) -> None:
        """The client verifies the blocks that it was told are there."""
        assert held.text is not None
        views = list(self._views(held.text, held.num_tokens, held.slots[:ready]))
        assert None not in views, "damage is found in the step that does it"
        held.views += [view for view in views[len(held.views) :] if view is not None]

    def wait(self) -> None:
        """Somebody wants to know of blocks that are on their way; or of a lease that is no more."""
        client = self._some_client()
        if client is None:
            return
        numbers = [
            n for n in client.own_leases() if (held := client.leases[n]).text and len(held.views) < len(held.slots)
        ]
        number = self.rng.choice(numbers) if numbers else client.next_id()
        self.last_token += 1
        until_ms = self.store.now_ms + self.rng.choice((0.0, 10.0, 1e4))
        self.store.wait(self.last_token, client.session, number, self.rng.randint(0, 8), until_ms)
        self.asked[self.last_token] = Asked(client, number, until_ms)

    def _hear(self) -> None:
        """HNG: who waits is told as soon as there is something to tell, and at the time given at the latest."""
        for token, progress in self.store.take_progress():
            asked = self.asked.pop(token)
            held = asked.client.leases.get(asked.number)
            if held is None or held.abandoned or asked.client.state == "lost":
                continue
            self._look(held, progress.ready)
            self.seen["told"] += 1
            if progress.final and progress.ready < len(held.slots):
                self.seen["cut short"] += 1
                assert self.faults, "the twin loads all of it"
        assert all(asked.until_ms > self.store.now_ms for asked in self.asked.values())

    def prefetch(self) -> None:
        client = self._some_client()
        if client is not None:
            text = self._text(self.rng.choice(client.entries))
            self.store.prefetch(client.session, text.entry.spec_id, text.query)

    def report(self) -> None:
        """What a prefill costs decides whether loads are worth it, and when they are cut."""
        entry = self.rng.choice(self.store.specs)
        self.store.report(entry.spec_id, 1000, self.rng.choice((0.1, 1e3, 1e6)), None)

    def memory_is_needed(self) -> None:
        """Half of what may go goes: in the twin, where memory is large, for the disk to be read."""
        memory = self.store.memory
        for slot_nbytes in memory.pool.classes:
            wanted = memory.pool.num_free(slot_nbytes) + memory.tree.num_evictable(slot_nbytes) // 2
            slots = memory.reserve(slot_nbytes, wanted)
            if slots is not None:
                memory.give_back(slots)

    def release(self) -> None:
        client = self._some_client()
        if client is not None and client.own_leases():
            self._release(client, self.rng.choice(client.own_leases()))

    def _release(self, client: Client, number: int) -> None:
        client.leases[number].abandoned = True

        def arrives() -> None:
            self.store.release(client.session, [number, 1 << 40])
            del client.leases[number]

        client.notices.append(arrives)

    def reserve(self) -> None:
        client = self._some_client()
        if client is None:
            return
        text, number = self._text(self.rng.choice(client.entries)), client.next_id()
        start = self.rng.randint(0, text.num_tokens) if self.rng.random() < 0.3 else 0
        ask = (client.session, text.entry.spec_id, number, text.hashes, start, text.tail)
        held_before = self._distinct_nbytes(client)
        grant = self.store.reserve(*ask)
        if not grant.slots:
            self.seen["refused" if grant.start >= start and grant.available else "nothing to store"] += 1
            assert grant.start < start or grant.start >= text.num_tokens or self.faults, "the twin has room"
            return
        assert grant.start >= start
        assert self.store.reserve(*ask) == grant, "idempotent"
        slots = np.frombuffer(grant.slots, np.uint32).tolist()
        assert len(slots) == text.num_blocks - grant.start // text.spec.block_tokens == grant.available
        self.damaged.difference_update(slots)
        offsets = [self.slab.offset(slot) for slot in slots]
        first = grant.start // text.spec.block_tokens
        client.reservations[number] = Filling(
            text, first, slots, offsets, grant.generation, [NO_HEADER] * len(slots), [False] * len(slots)
        )
        self._within_share(client, held_before)
        self.seen["reserved"] += 1
        if self._reply_is_lost():
            self._abort(client, number)

    def write(self) -> None:
        """A few pieces of a reservation's blocks, in any order."""
        client = self._some_client()
        if client is None or not client.own_reservations():
            return
        filling = client.reservations[self.rng.choice(client.own_reservations())]
        for _ in range(self.rng.choice((1, 4, 10, 40))):
            at = self.rng.randrange(len(filling.slots)) if self.rng.random() < 0.3 else self._least_done(filling)
            if filling.progress[at] < WHOLE:
                self._write_piece(filling, at)

    def _least_done(self, filling: Filling) -> int:
        return min(range(len(filling.slots)), key=filling.progress.__getitem__)

    def _write_piece(self, filling: Filling, at: int) -> None:
        text, block, offset = filling.text, filling.first + at, filling.offsets[at]
        payload = text.payload(block).tobytes()
        if filling.progress[at] == NO_HEADER:
            write_header(self.slab, offset, Header(text.identity(block), len(payload), filling.generation, ()))
        elif filling.progress[at] == HEADER:
            self.slab.write(offset + HEADER_NBYTES, payload[: len(payload) // 2])
        else:
            self.slab.write(offset + HEADER_NBYTES, payload)
            filling.summed[at] = self.rng.random() < 0.5
            if filling.summed[at]:
                rect = Rect((0, text.spec.num_layers), (0, text.spec.num_kv_heads), xxhash.xxh3_64_intdigest(payload))
                self.slab.write(offset + STATE_OFFSET, header_state(filling.generation, (rect,)))
        filling.progress[at] += 1

    def commit(self) -> None:
        """Seal the leading blocks that are whole; as in the client, nothing whole means abort."""
        client = self._some_client()
        if client is None or not client.own_reservations():
            return
        number = self.rng.choice(client.own_reservations())
        filling = client.reservations[number]
        count = next((at for at, done in enumerate(filling.progress) if done < WHOLE), len(filling.slots))
        if not count:
            return
        if self._reply_is_lost() and self.rng.random() < 0.5:  # the request itself is lost
            self._abort(client, number)
            return
        keep = self.rng.random() < 0.3
        already = self.store.stats.blocks_already
        sealed = self.store.commit(client.session, number, bytes(filling.summed[:count]), keep=keep)
        del client.reservations[number]
        assert sealed + self.store.stats.blocks_already - already == count
        assert self.store.commit(client.session, number, bytes(filling.summed[:count])) == 0, "a stale id seals nothing"
        self.seen["committed"] += 1
        text = filling.text
        self.stored.append((text, min(text.num_tokens, (filling.first + count) * text.spec.block_tokens)))
        if keep:
            client.leases[number] = self._kept(filling, count)
            if self._reply_is_lost():
                self._release(client, number)

    def _kept(self, filling: Filling, count: int) -> Held:
        """The writer's arrays are alive: it sees what it wrote, whether or not its slots got the names."""
        states = self.slab.tables.slots["state"][filling.slots]
        private = [slot for slot, state in zip(filling.slots, states, strict=True) if state == RESERVED]
        payloads = [filling.text.payload(filling.first + at) for at in range(count)]
        places = zip(filling.slots, filling.offsets, payloads, strict=False)
        views = [View(slot, offset, payload.shape[1], payload) for slot, offset, payload in places]
        self.seen["private slots"] += len(private)
        return Held([slot for slot in filling.slots if slot not in private], views, private=private)

    def abort(self) -> None:
        client = self._some_client()
        if client is not None and client.own_reservations():
            self._abort(client, self.rng.choice(client.own_reservations()))

    def _abort(self, client: Client, number: int) -> None:
        client.reservations[number].abandoned = True

        def arrives() -> None:
            self.store.abort(client.session, number)
            del client.reservations[number]

        client.notices.append(arrives)

    def goodbye(self) -> None:
        client = self._some_client()
        if client is not None and self.rng.random() < 0.3:
            self.store.close_session(client.session, self.clock.now_ms())
            self.clients[self.clients.index(client)] = self._new_client()

    def notice_arrives(self) -> None:
        client = self.rng.choice(self.clients)
        if client.notices:  # also of a process that is dead by now: the frame was on its way
            client.notices.popleft()()

    def mover_works(self) -> None:
        """Reading is one step and writing the sum another, in any order among transfers."""
        self._take_transfers()
        if not self.sums:
            return
        transfer, values = self.sums.pop(self.rng.randrange(len(self.sums)))
        if values is None:
            self.sums.append((transfer, [self._sum(slot) for slot in transfer.slots]))
            return
        spec = transfer.entry.spec
        for slot, value in zip(transfer.slots, values, strict=True):
            header = self.slab.header(slot)
            if value is not None and header is not None:
                rect = Rect((0, spec.num_layers), (0, spec.num_kv_heads), value)
                self.slab.write(self.slab.offset(slot) + STATE_OFFSET, header_state(header.generation, (rect,)))
        self.store.complete(transfer)
        self.seen["summed"] += len(transfer.slots)

    def _take_transfers(self) -> None:
        for transfer in self.store.take_transfers():
            if isinstance(transfer, SumBlocks):
                self.sums.append((transfer, None))
            else:
                assert self.moves is not None
                self.moves.take(transfer)

    def disk_works(self) -> None:
        """Some steps of reads and writes that are under way, in any order."""
        self._take_transfers()
        for _ in range(self.rng.choice((1, 1, 5, 30))):
            if self.moves is not None and not self.moves.is_idle:
                self.moves.step(self.rng)

    # --- the daemon and its disk

    def _new_store(self) -> Store:
        self.generation += 1 << 40
        return Store(
            extent_nbytes=self.extent_nbytes,
            tables=self.slab.tables,
            symbols_of=self.slab.symbols_of,
            generation=self.generation,
            session_share=self.session_share,
            checksums=self.checksums,
        )

    def index_is_read(self) -> None:
        """The tier below is there, with what it held: clients may have worked without it for a while."""
        if self.moves is not None:
            return
        disk, rng = self.disk, self.rng
        disk.slab, disk.is_dead, disk.fail_in = self.slab, False, 0
        disk.classes[sorted(self.disk_lost)] = 0
        self.disk_lost.clear()  # a new path in the place of the one that failed
        budget = rng.choice((None, None, None, 100 << 10)) if self.faults else None
        settings = LowerSettings(rng.random() < 0.3, budget)
        lower = LowerTier(disk.extent_nbytes, disk.num_extents, disk.symbols, settings)
        kept = lower.adopt(disk.table(), disk.classes)
        assert kept <= len(disk.rows)
        for extent in range(disk.num_extents):
            if lower.tier.pool.class_of(extent) is None:
                lower.tier.add_extent(extent)
        self.store.add_lower(lower)
        self.moves = SimMoves(disk, lower, self.clock.now_ms)
        self._finds_rows(self.texts[-40:])
        self.seen["blocks found below"] += kept

    def _finds_rows(self, texts: list[Text]) -> None:
        """RST: what was committed is found."""
        lower = self.store.lower
        assert lower is not None
        below: dict[bytes, dict[bytes, bytes]] = {}
        for block, _, symbols in self.disk.rows.values():
            below.setdefault(block.parent, {})[block.block_hash] = symbols
        for text in texts:
            entry = self.store.attach(text.spec)
            if lower.serves(entry):
                assert self.store.find(entry.spec_id, text.query) >= self._tokens_in(below, text)

    def daemon_restarts(self) -> None:
        """In the twin a clean end: what waits to be written is written. Memory is not kept."""
        for client in self.clients:
            while client.notices:
                client.notices.popleft()()
            self.store.close_session(client.session, self.clock.now_ms())
        self.clients = []
        self._come_to_rest()
        self._begin_anew(keeps_memory=False)
        self.index_is_read()

    def daemon_crashes(self) -> None:
        """It and its clients die; the disk has what was committed, and memory what it had, or nothing."""
        if self.rng.random() < 0.7:
            return
        self.seen["crashed"] += 1
        for client in self.clients:
            if not client.pid_visible and client.state in ("alive", "stalled"):
                self.late += self._unfinished(client)
        self.clients = []
        keeps_memory = self.rng.random() < 0.5
        if not keeps_memory:
            self.late = []
        until = self.clock.now_ms() + QUARANTINE_MS
        self.late = [LateWrite(each.session, each.offset, each.data, min(each.before_ms, until)) for each in self.late]
        self._begin_anew(keeps_memory=keeps_memory)

    def _begin_anew(self, *, keeps_memory: bool) -> None:
        self.moves, self.sums, self.quarantine, self.asked = None, [], [], {}
        if keeps_memory:
            self.store = self._new_store()
            self._take_over()
        else:
            self.slab = SimSlab(self.num_extents, self.extent_nbytes)
            self.damaged.clear()
            self.store = self._new_store()
            self.store.on_time(self.clock.now_ms())
            self.extents_ready = 0
            for _ in range(1 if self.faults else self.num_extents):
                self._next_extent()
        self.texts = [Text(self.store.attach(text.spec), text.token_ids, text.keys) for text in self.texts]
        self.stored = [(Text(self.store.attach(t.spec), t.token_ids, t.keys), count) for t, count in self.stored]
        self.clients = [self._new_client() for _ in range(self.rng.randint(2, 5))]

    def _take_over(self) -> None:
        """As Service does, from what lies in the slab. All clients are dead, so nobody claims what is reserved."""
        self.store.on_time(self.clock.now_ms())
        tables, legacies, reserved, in_use = self.slab.tables, [], [], set()
        for slot_nbytes in np.unique(tables.extents[tables.extents > 0]).tolist():
            extents = np.flatnonzero(tables.extents == slot_nbytes)
            used = [slot for slot in np.flatnonzero(tables.slots["state"]).tolist() if self._extent_of(slot) in extents]
            in_use |= {self._extent_of(slot) for slot in used}
            heads = {slot: head for slot in used if self._is(slot, SEALED) and (head := self.slab.header(slot))}
            rest = [slot for slot in used if slot not in heads]
            legacies.append(Legacy(slot_nbytes, self._blocks(heads), array("I", rest)))
            reserved += rest
        for extent in set(range(self.extents_ready)) - in_use:
            tables.extents[extent] = 0
        self.store.take_over(legacies, ())
        for extent in sorted(set(range(self.extents_ready)) - in_use):
            self.store.add_extent(extent)
        if reserved:
            self.quarantine.append((self.clock.now_ms() + QUARANTINE_MS, reserved))
        self.damaged -= set(reserved)

    def _extent_of(self, slot: int) -> int:
        return slot // SLOTS_PER_EXTENT_MAX

    def _is(self, slot: int, state: int) -> bool:
        return bool(self.slab.tables.slots["state"][slot] == state)

    def _blocks(self, heads: dict[int, Header]) -> LoadedBlocks:
        whole = {spec.fingerprint: spec.block_tokens for spec in SPECS}
        rows = np.zeros(len(heads), SIM_ROW)
        for at, (slot, header) in enumerate(heads.items()):
            identity = header.identity
            short = len(identity.tokens) // 4 < whole[identity.fingerprint]
            rows[at] = (slot, identity.number, short, identity.block_hash, identity.parent, header.generation)
        return LoadedBlocks(
            rows["slot"], rows["hash"], rows["parent"], rows["number"], rows["short"] != 0, rows["last_used"]
        )

    def disk_fails(self) -> None:
        """The n-th read, write or commit from now on."""
        self.disk.fail_in = self.rng.randint(1, 20)

    def disk_bit_flips(self) -> None:
        if self.disk.rows:
            slot = self.rng.choice(sorted(self.disk.rows))
            data = bytearray(self.disk.slots[slot])
            bit = self.rng.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            self.disk.slots[slot] = bytes(data)
            self.disk_damaged.add(slot)
            self.seen["disk bits flipped"] += 1

    def path_fails(self) -> None:
        lower = self.store.lower
        if lower is not None and not self.disk_lost and self.rng.random() < 0.2:
            self.disk_lost = set(self.rng.sample(range(self.disk.num_extents), 1))
            self.disk.lose(self.disk_lost)
            lower.lose_extents(sorted(self.disk_lost))
            self.seen["paths lost"] += 1

    def _come_to_rest(self) -> None:
        """Changes state. All that is under way ends, and what waits to be written is written."""
        for _ in range(2000):
            self._advance(1000.0)
            self._on_time()
            self._take_transfers()
            lower = self.store.lower
            if lower is not None:
                group = lower.writes.start_group(self.store.now_ms, flush=True)
                if group is not None and self.moves is not None:
                    self.moves.take(group)
            while self.moves is not None and not self.moves.is_idle:
                self.moves.step(self.rng)
            while self.sums:
                self.mover_works()
            self._hear()
            if lower is None or (lower.writes.is_idle and not lower.loads.pins and not lower.tier.has_parked):
                return
        raise AssertionError("it does not come to rest")

    def _sum(self, slot: int) -> int | None:
        header = self.slab.header(slot)
        if header is None:
            return None
        return xxhash.xxh3_64_intdigest(self.slab.payload(self.slab.offset(slot), header.payload_nbytes).data)

    def _next_extent(self) -> None:
        if self.extents_ready < self.num_extents:
            self.store.add_extent(self.extents_ready)
            self.extents_ready += 1

    def extent_is_ready(self) -> None:
        self._next_extent()

    def time_passes(self) -> None:
        """TTL: also an hour at once; and the loop may be late."""
        self._advance(self.rng.choice((0.0, 1.0, 100.0, 4000.0, 3.6e6)))
        if self.rng.random() < 0.8:
            self._on_time()

    def _advance(self, by_ms: float) -> None:
        until = self.clock.now_ms() + by_ms
        for write in [each for each in self.late if each.before_ms <= until]:
            self._land(write)
        self.clock.advance(by_ms)

    def _on_time(self) -> None:
        now_ms = self.clock.now_ms()
        self.store.on_time(now_ms)
        self.quarantine = [(until, slots) for until, slots in self.quarantine if until > now_ms]

    # --- what can happen: faults

    def client_dies(self) -> None:
        """SIGKILL. What it had sent may still arrive; what its device was doing may still land."""
        client = self._some_client()
        if client is None:
            return
        client.state = "dead"
        if self.rng.random() < 0.5:
            client.notices.clear()
        if not client.pid_visible:
            self.late += self._unfinished(client)
        self.seen["died"] += 1

    def _unfinished(self, client: Client) -> Iterator[LateWrite]:
        for filling in client.reservations.values():
            for at, progress in enumerate(filling.progress):
                if HEADER <= progress < WHOLE and not filling.abandoned:
                    payload = filling.text.payload(filling.first + at).tobytes()
                    yield LateWrite(client.session, filling.offsets[at] + HEADER_NBYTES, payload)

    def death_is_noticed(self) -> None:
        """By its pidfd, or by its lock: then writes may still land, for less than QUARANTINE_MS."""
        for place, client in enumerate(self.clients):
            if client.state == "dead":
                self._bury(client, quarantine=not client.pid_visible)
                self.clients[place] = self._new_client()
                return

    def _bury(self, client: Client, *, quarantine: bool) -> None:
        now_ms = self.clock.now_ms()
        self.store.close_session(client.session, now_ms, died=True, quarantine=quarantine)
        self.store.close_session(client.session, now_ms, died=True)  # noticed twice
        if quarantine:
            until = now_ms + QUARANTINE_MS
            self.quarantine += [(until, filling.slots) for filling in client.reservations.values()]
            self.quarantine += [(until, held.private) for held in client.leases.values() if held.private]
            self.late = [
                LateWrite(*(each.session, each.offset, each.data), until) if each.session == client.session else each
                for each in self.late
            ]

    def write_lands(self) -> None:
        if self.late:
            self._land(self.rng.choice(self.late))

    def _land(self, write: LateWrite) -> None:
        self.late.remove(write)
        self.slab.write(write.offset, write.data)
        self.seen["landed late"] += 1

    def client_stalls(self) -> None:
        client = self._some_client()
        if client is not None:
            client.state = "stalled"

    def session_is_lost(self) -> None:
        """The daemon takes a stalled client for dead (its lock went with a stray close)."""
        for client in self.clients:
            if client.state == "stalled" and self.rng.random() < 0.5:
                self.late += self._unfinished(client)
                self._bury(client, quarantine=True)
                client.state = "lost"
                client.notices.clear()
                return

    def client_wakes(self) -> None:
        """One that was lost comes back with stale ids, is told so, and begins anew."""
        for place, client in enumerate(self.clients):
            if client.state == "lost":
                self._tries_stale_ids(client)
                self.clients[place] = self._new_client()
            elif client.state == "stalled":
                client.state = "alive"

    def _tries_stale_ids(self, client: Client) -> None:
        store, session = self.store, client.session
        text = self._text(client.entries[0])
        calls: list[Callable[[], object]] = [
            *(lambda number=number: store.commit(session, number, b"\0") for number in client.reservations),
            *(lambda number=number: store.abort(session, number) for number in client.reservations),
            *(lambda number=number: store.discard(session, number, 0, "header") for number in client.leases),
            lambda: store.release(session, list(client.leases)),
            lambda: store.acquire(session, text.entry.spec_id, 1, text.query),
            lambda: store.reserve(session, text.entry.spec_id, 1, text.hashes, 0, text.tail),
        ]
        for call in calls:
            try:
                call()
            except SessionLost:
                continue
            raise AssertionError("a lost session was served")
        self.seen["stale ids"] += 1

    def bit_flips(self) -> None:
        """A header is damaged; the reader sees it and says so."""
        client = self._some_client()
        if client is None:
            return
        leases = [number for number in client.own_leases() if client.leases[number].slots]
        if not leases:
            return
        number = self.rng.choice(leases)
        block = self.rng.randrange(len(client.leases[number].slots))
        slot = client.leases[number].slots[block]
        header = self.slab.header(slot)
        if slot in self.damaged or header is None or not self._is(slot, SEALED):
            return
        bit = self.rng.randrange(8 * (TOKENS_OFFSET + len(header.identity.tokens)))
        self.slab.bytes[self.slab.offset(slot) + bit // 8] ^= 1 << bit % 8
        assert self.slab.header(slot) is None, f"bit {bit} of a header flipped and nobody noticed"
        self.damaged.add(slot)
        leased = self.store.session(client.session).leases[number].slots
        self.store.discard(client.session, number, np.frombuffer(leased, np.uint32).tolist().index(slot), "header")
        self.seen["discarded"] += 1

    def collision_is_seen(self) -> None:
        """A reader finds another block under the name: it and what follows it go, in every tier."""
        client = self._some_client()
        numbers = [n for n in client.own_leases() if client.leases[n].views and client.leases[n].text] if client else []
        if client is None or not numbers or self.rng.random() < 0.5:
            return
        number = self.rng.choice(numbers)
        held = client.leases[number]
        block = self.rng.randrange(len(held.views))
        text = held.text
        assert text is not None
        if not self._is(held.slots[block], SEALED) or (block + 1) * text.spec.block_tokens > held.num_tokens:
            return
        self.store.discard(client.session, number, block, "header")
        prefix = text.query._replace(hashes=text.hashes[: 16 * (block + 1)], tokens=b"")
        assert not self.store.find(text.entry.spec_id, prefix), "a discarded block is found"
        self.seen["discarded whole"] += 1

    def clear(self) -> None:
        if self.rng.random() < 0.3:
            self.store.clear(self.rng.choice(self.store.specs).spec_id)
            self.seen["cleared"] += 1

    # --- the end

    def heal(self) -> None:
        """Changes state. Faults stop. All that was held is free or cached, and what is cached is found."""
        while self.extents_ready < self.num_extents:
            self._next_extent()
        for client in self.clients:
            while client.notices:
                client.notices.popleft()()
            if client.state == "dead":
                self._bury(client, quarantine=not client.pid_visible)
            elif client.state != "lost":
                self.store.close_session(client.session, self.clock.now_ms())
        self.clients = []
        self.index_is_read()
        lower = self.store.lower
        assert lower is not None
        self.disk.fail_in, self.disk.is_dead = 0, False
        self._come_to_rest()
        self._advance(QUARANTINE_MS)
        self._on_time()
        self.check()
        assert not self.store.memory.tree._detached
        assert not self.slab.slots_in(RESERVED) + self.slab.slots_in(ARRIVING) + self.slab.slots_in(FAILED)
        assert not self.asked
        assert not lower.tier.tree._detached
        assert lower.pins == ([], [])
        assert not lower.loads.queued_nbytes + lower.writes.queued_nbytes + lower.writes.writing_nbytes
        assert not lower.loads.arriving_from
        assert not lower.writes.writing_from
        assert set(np.flatnonzero(lower.tier._state).tolist()) == set(self.disk.rows), "usage is what the disk says"
        self._check_rows()
        self._finds_what_is_cached()
        self._stores_again()

    def _finds_what_is_cached(self) -> None:
        """Not only unharmed: found. What is in the slab says what must be hit."""
        fresh = self.store.open_session()
        assert fresh is not None
        below: dict[bytes, dict[bytes, bytes]] = {}  # parent -> block hash -> symbols
        for slot in self.slab.slots_in(SEALED):
            header = self.slab.header(slot)
            assert header is not None
            below.setdefault(header.identity.parent, {})[header.identity.block_hash] = self.slab.symbols_of(slot)
        on_disk: dict[bytes, dict[bytes, bytes]] = {}
        for block, _, symbols in self.disk.rows.values():
            on_disk.setdefault(block.parent, {})[block.block_hash] = symbols
        total = 0
        for text in self.texts:
            found = self.store.find(text.entry.spec_id, text.query)
            assert found == max(self._tokens_in(below, text), self._tokens_in(on_disk, text))
            total += found
        assert total or not below
        for entry in self.store.specs:
            self.store.report(entry.spec_id, 1000, 1e15, None)  # a load pays, however slow
        for number, text in enumerate(self.texts[-60:], 1):
            self._reads(fresh.id, number, text)
        self.store.close_session(fresh.id, self.clock.now_ms())

    def _reads(self, session_id: int, number: int, text: Text) -> None:
        """What is found is given, and what is given is right; less only where a bit flipped below."""
        found, failures = self.store.find(text.entry.spec_id, text.query), self.store.stats.load_failures.total()
        got = self.store.acquire(session_id, text.entry.spec_id, number, text.query)
        room = self.session_nbytes_max // text.spec.slot_nbytes * text.spec.block_tokens
        assert got.num_tokens == min(found, max(room, 0)) or found > room
        while got.slots and self.store.session(session_id).leases[number].loading and self._loads_on():
            pass
        if got.slots:
            self.last_token += 1
            self.store.wait(self.last_token, session_id, number, 1 << 30, self.store.now_ms)
            ((_, progress),) = self.store.take_progress()
            held = Held(np.frombuffer(got.slots, np.uint32).tolist(), [], text, got.num_tokens)
            self._look(held, progress.ready)
            assert all(self._shows(view) for view in held.views)
            assert progress.ready == len(held.slots) or self.store.stats.load_failures.total() > failures
            self.seen["read back from below"] += got.ready < progress.ready
        self.store.release(session_id, [number])

    def _loads_on(self) -> bool:
        """Changes state. Whether a load was under way."""
        self._take_transfers()
        assert self.moves is not None
        is_busy = not self.moves.is_idle
        while not self.moves.is_idle:
            self.moves.step(self.rng)
        return is_busy

    @staticmethod
    def _tokens_in(below: dict[bytes, dict[bytes, bytes]], text: Text) -> int:
        block = 0
        while block < text.num_blocks and text.block_hash(block) in below.get(text.parent_hash(block), {}):
            block += 1
        if block == text.num_blocks:
            return text.num_tokens
        others = below.get(text.parent_hash(block), {}).values()
        partial = max((common_tokens(other, text.symbols(block)) for other in others), default=0)
        return block * text.spec.block_tokens + partial - partial % text.spec.grain_tokens

    def _stores_again(self) -> None:
        """A full tier takes new blocks of every spec."""
        self._come_to_rest()
        self.clients = [self._new_client()]
        for entry in self.store.specs:
            text = Text(entry, (9,) * entry.spec.block_tokens, ())
            self.named[text.block_hash(0)] = text.payload(0)
            grant = self.store.reserve(self.clients[0].session, entry.spec_id, 1, text.hashes, 0)
            slots = np.frombuffer(grant.slots, np.uint32).tolist()
            assert len(slots) == 1, "a full tier takes no new block"
            (slot,) = slots
            filling = Filling(text, 0, [slot], [self.slab.offset(slot)], grant.generation, [NO_HEADER], [False])
            self.damaged.discard(slot)
            for _ in range(WHOLE):
                self._write_piece(filling, 0)
            assert self.store.commit(self.clients[0].session, 1, b"\1") == 1
            assert self.store.find(entry.spec_id, text.query) == text.num_tokens
        self.check()


Happening = Callable[[World], None]
NORMAL: list[tuple[Happening, int]] = [
    (World.acquire, 30),
    (World.release, 36),
    (World.reserve, 30),
    (World.write, 50),
    (World.commit, 40),
    (World.abort, 3),
    (World.goodbye, 1),
    (World.notice_arrives, 10),
    (World.mover_works, 16),
    (World.extent_is_ready, 3),
    (World.time_passes, 16),
    (World.disk_works, 40),
    (World.wait, 10),
    (World.prefetch, 3),
    (World.memory_is_needed, 1),
    (World.index_is_read, 2),
]
TWIN: list[tuple[Happening, int]] = [(World.daemon_restarts, 1)]
FAULTS: list[tuple[Happening, int]] = [
    (World.client_dies, 3),
    (World.death_is_noticed, 6),
    (World.write_lands, 3),
    (World.client_stalls, 2),
    (World.session_is_lost, 3),
    (World.client_wakes, 4),
    (World.bit_flips, 8),
    (World.collision_is_seen, 4),
    (World.clear, 2),
    (World.report, 3),
    (World.daemon_crashes, 3),
    (World.disk_fails, 4),
    (World.disk_bit_flips, 4),
    (World.path_fails, 1),
]


def main(first: int, count: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        for faults in (True, False):
            world = World(seed, faults=faults)
            world.run(500)
            total += world.seen
            total["evicted"] += world.store.memory.num_evicted
    print(f"{count} seeds: {dict(total)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
