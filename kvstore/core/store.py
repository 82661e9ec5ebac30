"""The store: sessions, leases and reservations over a tier of blocks. Pure; one owner; no locks.

    command ──> Store ──> answer (a value)          completion ──> Store
                  └─────> transfers for the movers ───────────────────┘

A slot's life:   free ── reserve ──> reserved ── commit ──> cached ── evict / discard / clear ──> free
                                        └── abort, death (after quarantine where writes may still land) ──> free
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

from kvstore.core.leases import LEASES_MAX, RESERVATIONS_MAX, Lease, Reservation, Session, SpecEntry
from kvstore.core.stats import Stats
from kvstore.core.tier import Tables, Tier
from kvstore.errors import KVStoreError, SessionLost, SpecMismatch
from kvstore.spec import KVSpec
from radix import HashKind, Match, Pin, block_symbols_of, common_tokens, keys_digest, root_hash

SESSIONS_MAX = 1024
SESSION_ID_SHIFT = 15  # generations are nanoseconds: 33 us apart, ids differ, and they fit 47 bits until the year 2116
SPECS_MAX = 65536
QUARANTINE_MS = 10_000.0
DISCARD_REASONS = ("header",)
NO_KEYS_DIGEST = keys_digest(())
HASH_NBYTES = 16


class Query(NamedTuple):
    """A prompt as the wire carries it. `keys`: per block with extra keys, where the first starts and their digest."""

    hashes: bytes
    tokens: bytes
    keys: Sequence[tuple[int, bytes]] = ()


class Acquisition(NamedTuple):
    """What a lease holds: `slots` u32le, one per block; the last may be shared in part."""

    num_tokens: int
    slots: bytes


class Grant(NamedTuple):
    """Room to store from token `start` on. Without slots, `available` says how many blocks could be had."""

    start: int
    slots: bytes
    generation: int
    available: int


class SumBlocks(NamedTuple):
    """Transfer: sum the payloads of slots that a device or a plain array store filled."""

    id: int
    entry: SpecEntry
    slots: tuple[int, ...]


class Store:
    """Owner of all state of a node's cache."""

    def __init__(
        self,
        *,
        extent_nbytes: int,
        tables: Tables,
        symbols_of: Callable[[int], bytes],
        generation: int = 0,
        session_share: float = 0.5,
        checksums: bool = True,
    ) -> None:
        """All but the switches as in Tier. Extents enter by `add_extent`, when their memory is there."""
        self.capacity_nbytes = extent_nbytes * len(tables.extents)
        self.memory = Tier(extent_nbytes, tables, symbols_of, generation)
        self.stats = Stats()
        self._session_nbytes_max = int(self.capacity_nbytes * session_share)
        self._checksums = checksums
        self._specs: list[SpecEntry] = []
        self._spec_ids: dict[bytes, int] = {}
        self._sessions: dict[int, Session] = {}
        self._free_numbers = list(range(SESSIONS_MAX))[::-1]
        self._last_session = generation >> SESSION_ID_SHIFT  # so no id of an earlier daemon is used again
        self._quarantine: deque[tuple[float, array[int]]] = deque()
        self._transfers: list[SumBlocks] = []
        self._summing: dict[int, Pin] = {}
        self._last_transfer = 0

    # Sessions and specs

    def open_session(self, is_held: Callable[[int], bool] = lambda _: False) -> Session | None:
        """Changes state. A new session, or None when SESSIONS_MAX processes are connected.

        `is_held`: whether a process still holds a number, since an earlier daemon gave it.
        """
        number = next((number for number in reversed(self._free_numbers) if not is_held(number)), None)
        if number is None:
            return None
        self._free_numbers.remove(number)
        self._last_session += 1
        self.stats.sessions_opened += 1
        session = Session(id=self._last_session << 16 | number, number=number)
        self._sessions[session.id] = session
        return session

    def session(self, session_id: int) -> Session:
        """Query. SessionLost when it has ended or was another daemon's."""
        try:
            return self._sessions[session_id]
        except KeyError:
            raise SessionLost(f"session {session_id} is unknown here") from None

    @property
    def sessions(self) -> list[Session]:
        """Query."""
        return list(self._sessions.values())

    def close_session(self, session_id: int, now_ms: float, *, died: bool = False, quarantine: bool = False) -> None:
        """Changes state. End everything the session holds. The one way out for a session, whatever the cause.

        `quarantine`: the process may still write into its reserved slots, so they stay reserved for QUARANTINE_MS.
        """
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        for lease_id in list(session.leases):
            self._end_lease(session, lease_id)
        for reservation_id in list(session.reservations):
            slots = self._end_reservation(session, reservation_id)
            if quarantine:
                self._quarantine.append((now_ms + QUARANTINE_MS, slots))
            else:
                self.memory.give_back(slots)
        self._free_numbers.insert(0, session.number)  # the number last in line for reuse
        self.stats.sessions_closed += 1
        self.stats.sessions_died += died

    def attach(self, spec: KVSpec) -> SpecEntry:
        """Changes state. Serve a valid spec; SpecMismatch when its blocks fit no extent."""
        spec_id = self._spec_ids.get(spec.fingerprint)
        if spec_id is not None:
            return self._specs[spec_id]
        extent_nbytes = self.memory.pool.extent_nbytes
        if spec.slot_nbytes > extent_nbytes:
            raise SpecMismatch(
                f"a block of {spec.slot_nbytes} bytes fits no extent of {extent_nbytes}: "
                f"lower block_tokens={spec.block_tokens} or raise memory.capacity"
            )
        if len(self._specs) == SPECS_MAX:
            raise SpecMismatch(f"this daemon already serves {SPECS_MAX} specs")
        # Salted names must not be forgeable, and XXH3 collisions can be made at will.
        kind = HashKind.SHA256 if spec.tenant_salt else HashKind.XXH3
        entry = SpecEntry(len(self._specs), spec, root_hash(spec.fingerprint, kind), kind)
        self.memory.add_spec(entry.root, spec.slot_nbytes)
        self._specs.append(entry)
        self._spec_ids[spec.fingerprint] = entry.spec_id
        return entry

    @property
    def specs(self) -> list[SpecEntry]:
        """Query."""
        return list(self._specs)

    def spec(self, spec_id: int) -> SpecEntry:
        """Query. SessionLost for an id this daemon never gave: the caller attached to another one."""
        if spec_id >= len(self._specs):
            raise SessionLost(f"spec {spec_id} is unknown here")
        return self._specs[spec_id]

    # Reading

    def find(self, spec_id: int, query: Query) -> int:
        """Query. Tokens cached now; no pin, no promise."""
        entry = self.spec(spec_id)
        match = self._match(entry, query)
        return _num_tokens(entry, query, match.num_blocks) + match.partial_tokens

    def acquire(self, session_id: int, spec_id: int, lease_id: int, query: Query) -> Acquisition:
        """Changes state. Match and pin in one step; repeated with a living lease id it answers the same."""
        session, entry = self.session(session_id), self.spec(spec_id)
        lease = session.leases.get(lease_id)
        if lease is None:
            _require_unused(lease_id, session.reservations)
            lease = self._lease(session, entry, query)
            self._count_lookup(query, lease)
            if lease is None:
                return Acquisition(0, b"")
            session.add_lease(lease_id, lease)
        return Acquisition(lease.num_tokens, lease.slots)

    def release(self, session_id: int, lease_ids: Iterable[int]) -> None:
        """Changes state. Ends leases; unknown ids are no error, since a miss leaves no lease behind."""
        session = self.session(session_id)
        for lease_id in lease_ids:
            self._end_lease(session, lease_id)

    def discard(self, session_id: int, lease_id: int, block: int, reason: str) -> None:
        """Changes state. A reader found a leased block wrong: it and all that depends on it leave the tier."""
        lease = self.session(session_id).leases.get(lease_id)
        self.stats.discards[reason if reason in DISCARD_REASONS else "other"] += 1
        if lease is not None and block < len(lease.slots) // 4:
            self.memory.remove(lease.pin, block)

    # Writing

    def reserve(
        self, session_id: int, spec_id: int, reservation_id: int, hashes: bytes, start: int, tail: bytes = b""
    ) -> Grant:
        """Changes state. Slots for the blocks of the chain that are missing: all of them, or none.

        `start`: the caller has no data before this token. Where the chain is not cached that far, the answer is the
        earlier start that it needs. `tail`: symbols of the last block if it is short.
        """
        session, entry = self.session(session_id), self.spec(spec_id)
        known = session.reservations.get(reservation_id)
        if known is not None:
            return _grant(known)
        _require_unused(reservation_id, session.leases)
        num_blocks = len(hashes) // HASH_NBYTES
        match = self.memory.match(entry.root, hashes, lambda index: tail if index == num_blocks - 1 else b"")
        done = match.num_blocks
        if tail and done == num_blocks - 1 and match.partial_tokens == common_tokens(tail, tail):
            done = num_blocks  # a longer block begins with exactly this tail
        start_token = done * entry.spec.block_tokens
        wanted = num_blocks - done
        if wanted == 0 or start_token < start:
            return Grant(start_token, b"", 0, wanted)
        match = match._replace(partial=None, partial_tokens=0)
        return self._reserve(session, entry, reservation_id, hashes, match, wanted, bool(tail))

    def sealable(self, session_id: int, reservation_id: int, count: int) -> int:
        """Query. How many of the first `count` reserved blocks `commit` would leave cached: all, or none.

        None of a reservation that has ended, and none if the chain it goes on from was discarded meanwhile.
        """
        reservation = self.session(session_id).reservations.get(reservation_id)
        if reservation is None or reservation.parent.node.detached:
            return 0
        return min(count, len(reservation.slots))

    def commit(self, session_id: int, reservation_id: int, summed: bytes, *, keep: bool = False) -> int:
        """Changes state. Seal what was reserved; the number of blocks that are cached now because of it.

        `summed`: one byte per block to seal, 0 where the daemon must make the checksum; reserved blocks beyond it are
        given back. `keep`: the writer has living views of the slots, so a lease of the same id takes the
        reservation's place.
        """
        session = self.session(session_id)
        reservation = session.pop_reservation(reservation_id)
        if reservation is None:
            return 0  # aborted, or of an earlier life: stale ids seal nothing
        entry, count = reservation.entry, min(len(summed), len(reservation.slots))
        slots, dropped = reservation.slots[:count], reservation.slots[count:]
        hashes = reservation.hashes[: (reservation.start + count) * HASH_NBYTES]
        short = reservation.short and not dropped
        self.memory.unpin(reservation.parent)  # nothing is evicted before the insert, and only a free run may grow
        inserted = self.memory.insert(entry.root, hashes, reservation.start, slots, short=short)
        self._count_commit(entry, inserted.inserted, len(inserted.unused))
        unused = array("I", inserted.unused) + dropped
        sealed = set(slots) - set(unused)
        unsummed = tuple(
            slot for slot, is_summed in zip(slots, summed, strict=False) if slot in sealed and not is_summed
        )
        if unsummed and self._checksums:
            self._sum_later(entry, hashes, unsummed)
        if keep:
            session.add_lease(reservation_id, self._lease_of_own(entry, hashes, unused))
        else:
            self.memory.give_back(unused)
        return inserted.inserted

    def abort(self, session_id: int, reservation_id: int) -> None:
        """Changes state. Give everything back; unknown ids are no error."""
        session = self.session(session_id)
        if reservation_id in session.reservations:
            self.memory.give_back(self._end_reservation(session, reservation_id))

    def clear(self, spec_id: int) -> None:
        """Changes state. Forget every block of a spec."""
        self.memory.clear(self.spec(spec_id).root)

    def report(self, prefill_tokens: int | None, prefill_ms: float | None, ttft_ms: float | None) -> None:
        """Changes state. What an engine measured."""
        if prefill_tokens is not None and prefill_ms is not None:
            self.stats.prefill_tokens += prefill_tokens
            self.stats.prefill_ms += prefill_ms
        if ttft_ms is not None:
            self.stats.ttft_reports += 1
            self.stats.ttft_ms += ttft_ms

    # Time, movers, memory

    def add_extent(self, extent: int) -> None:
        """Changes state. An extent's memory is there."""
        self.memory.add_extent(extent)

    def take_transfers(self) -> list[SumBlocks]:
        """Changes state. Work for the movers since the last call."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def complete(self, transfer: SumBlocks) -> None:
        """Changes state. A mover is done with the slots of a transfer."""
        self.stats.blocks_summed += len(transfer.slots)
        self.memory.unpin(self._summing.pop(transfer.id))

    def next_deadline_ms(self) -> float | None:
        """Query. When `on_time` has something to do."""
        return self._quarantine[0][0] if self._quarantine else None

    def on_time(self, now_ms: float) -> None:
        """Changes state. Slots whose quarantine is over are free again."""
        while self._quarantine and self._quarantine[0][0] <= now_ms:
            self.memory.give_back(self._quarantine.popleft()[1])

    def check(self) -> None:
        """Query. Assert every invariant (docs/design.md lists them)."""
        self.memory.check()
        for session in self._sessions.values():
            held = sum(lease.nbytes for lease in session.leases.values())
            held += sum(reservation.nbytes for reservation in session.reservations.values())
            assert held == session.held_nbytes
        by_class = dict.fromkeys(self.memory.pool.classes, 0)
        for entry, slots in self._reserved_slots():
            by_class[entry] += len(slots)
        for slot_nbytes, reserved in by_class.items():
            assert self.memory.counts(slot_nbytes)[2] == reserved, "a reserved slot has no owner"
        assert self.stats.lookups == self.stats.hits + self.stats.misses

    # Parts

    def _match(self, entry: SpecEntry, query: Query) -> Match:
        block_nbytes, block_tokens = 4 * entry.spec.block_tokens, entry.spec.block_tokens

        def symbols_at(index: int) -> bytes:
            tokens = query.tokens[index * block_nbytes : (index + 1) * block_nbytes]
            first = index * block_tokens
            for start, digest in query.keys:
                if first <= start < first + len(tokens) // 4:
                    return block_symbols_of(tokens, start - first, digest)
            return block_symbols_of(tokens, len(tokens) // 4, NO_KEYS_DIGEST)

        match = self.memory.match(entry.root, query.hashes, symbols_at)
        partial_tokens = match.partial_tokens // entry.spec.grain_tokens * entry.spec.grain_tokens
        return match._replace(partial=match.partial if partial_tokens else None, partial_tokens=partial_tokens)

    def _lease(self, session: Session, entry: SpecEntry, query: Query) -> Lease | None:
        match = self._match(entry, query)
        num_blocks = match.num_blocks + (match.partial is not None)
        if not num_blocks or len(session.leases) >= LEASES_MAX:
            return None
        room = self._room_blocks(session, entry)
        if room < num_blocks:  # what the session holds already costs it nothing
            room += self.memory.held_blocks(match, [lease.pin for lease in session.leases.values()])
        if room < num_blocks:
            self.stats.hits_shortened += 1
            if not room:
                return None
            pin = self.memory.pin(match, room)
            num_tokens = _num_tokens(entry, query, room)
        else:
            pin = self.memory.pin(match)
            num_tokens = _num_tokens(entry, query, match.num_blocks) + match.partial_tokens
        return Lease(entry, pin, num_tokens, self.memory.tree.path_slots(pin).tobytes(), array("I"))

    def _room_blocks(self, session: Session, entry: SpecEntry) -> int:
        """How many blocks the session may still hold.

        Counted exactly only where the cheap bound says it is too much.
        """
        spare = self._session_nbytes_max - session.held_nbytes
        if spare < self._session_nbytes_max // 2:
            spare = self._session_nbytes_max - self._distinct_nbytes(session)
        return max(0, spare // entry.spec.slot_nbytes)

    def _distinct_nbytes(self, session: Session) -> int:
        nbytes = sum(reservation.nbytes for reservation in session.reservations.values())
        by_size: dict[int, list[Pin]] = {}
        for lease in session.leases.values():
            size = lease.entry.spec.slot_nbytes
            nbytes += len(lease.private) * size
            by_size.setdefault(size, []).append(lease.pin)
        return nbytes + sum(size * self.memory.distinct_blocks(pins) for size, pins in by_size.items())

    def _end_lease(self, session: Session, lease_id: int) -> None:
        lease = session.pop_lease(lease_id)
        if lease is not None:
            self.memory.unpin(lease.pin)
            self.memory.give_back(lease.private)

    def _end_reservation(self, session: Session, reservation_id: int) -> array[int]:
        """The slots are still reserved: the caller decides when they are free."""
        reservation = session.pop_reservation(reservation_id)
        assert reservation is not None
        self.memory.unpin(reservation.parent)
        self.stats.reservations_aborted += 1
        return reservation.slots

    def _reserve(
        self,
        session: Session,
        entry: SpecEntry,
        reservation_id: int,
        hashes: bytes,
        match: Match,
        wanted: int,
        short: bool,
    ) -> Grant:
        start = match.num_blocks
        room = self._room_blocks(session, entry) if len(session.reservations) < RESERVATIONS_MAX else 0
        parent = self.memory.pin(match)  # before room is made: the chain must not lose its own parent
        taken = None
        if wanted <= room:
            taken = self.memory.reserve(entry.spec.slot_nbytes, wanted, session.number)
        if taken is None:
            available = min(room, self.memory.available(entry.spec.slot_nbytes), wanted - 1)
            self.memory.unpin(parent)
            self.stats.reservations_refused += 1
            return Grant(start * entry.spec.block_tokens, b"", 0, available)
        slots, generation = taken
        reservation = Reservation(entry, hashes, start, slots, generation, parent, short)
        session.add_reservation(reservation_id, reservation)
        self.stats.reservations += 1
        return _grant(reservation)

    def _lease_of_own(self, entry: SpecEntry, hashes: bytes, private: array[int]) -> Lease:
        pin = self.memory.pin(self.memory.match(entry.root, hashes))
        return Lease(entry, pin, 0, self.memory.tree.path_slots(pin).tobytes(), private)

    def _sum_later(self, entry: SpecEntry, hashes: bytes, slots: tuple[int, ...]) -> None:
        self._last_transfer += 1
        self._summing[self._last_transfer] = self.memory.pin(self.memory.match(entry.root, hashes))
        self._transfers.append(SumBlocks(self._last_transfer, entry, slots))

    def _count_lookup(self, query: Query, lease: Lease | None) -> None:
        self.stats.lookups += 1
        self.stats.tokens_asked += len(query.tokens) // 4
        if lease is None:
            self.stats.misses += 1
        else:
            self.stats.hits += 1
            self.stats.tokens_hit += lease.num_tokens
            self.stats.blocks_hit += len(lease.slots) // 4

    def _count_commit(self, entry: SpecEntry, stored: int, already: int) -> None:
        self.stats.reservations_committed += 1
        self.stats.blocks_stored += stored
        self.stats.blocks_already += already
        self.stats.bytes_stored += stored * entry.spec.block_nbytes

    def _reserved_slots(self) -> Iterable[tuple[int, array[int]]]:
        for session in self._sessions.values():
            for reservation in session.reservations.values():
                yield reservation.entry.spec.slot_nbytes, reservation.slots
            for lease in session.leases.values():
                yield lease.entry.spec.slot_nbytes, lease.private
        for _, slots in self._quarantine:
            if slots:
                yield self.memory.slot_nbytes_of(slots[0]), slots


def _require_unused(number: int, others: Container[int]) -> None:
    """Query. A lease and a reservation of one id would meet when a commit makes one of the other."""
    if number in others:
        raise KVStoreError(f"id {number} is in use in this session")


def _num_tokens(entry: SpecEntry, query: Query, num_blocks: int) -> int:
    """Tokens in the first blocks of a query: its last block may be short."""
    return min(num_blocks * entry.spec.block_tokens, len(query.tokens) // 4)


def _grant(reservation: Reservation) -> Grant:
    start = reservation.start * reservation.entry.spec.block_tokens
    return Grant(start, reservation.slots.tobytes(), reservation.generation, len(reservation.slots))
