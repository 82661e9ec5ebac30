"""The store: sessions, leases and reservations over a tier of blocks. Pure; one owner; no locks.

    command ──> Store ──> answer (a value)          completion ──> Store
                  └─────> transfers for the movers ───────────────────┘

A slot's life:   free ── reserve ──> reserved ── commit ──> cached ── evict / discard / clear ──> free
                                        └── abort, death (after quarantine where writes may still land) ──> free
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvstore.core.filling import Filling, Grant
from kvstore.core.layout import Shard
from kvstore.core.leases import LEASES_MAX, Lease, Session, SpecEntry, require_unused
from kvstore.core.lower import LowerTier
from kvstore.core.moves import SumBlocks, Transfer
from kvstore.core.placement import PROBE_NBYTES
from kvstore.core.shares import Readers, Shares
from kvstore.core.stats import Guard, Stats
from kvstore.core.takeover import Legacy, Takeover
from kvstore.core.tier import FAILED, Tables, Tier
from kvstore.core.watch import Progress, Watch
from kvstore.errors import SessionLost, SpecMismatch
from kvstore.spec import KVSpec
from radix import HASH_NBYTES, HashKind, Match, Pin, block_symbols_of, keys_digest, root_hash

SESSIONS_MAX = 1024
SESSION_ID_SHIFT = 15  # generations are nanoseconds: 33 us apart, ids differ, and they fit 47 bits until the year 2116
SPECS_MAX = 65536
QUARANTINE_MS = 10_000.0
DISCARD_REASONS = ("header", "payload")
NO_KEYS_DIGEST = keys_digest(())


class Query(NamedTuple):
    """A prompt as the wire carries it. `keys`: per block with extra keys, where the first starts and their digest."""

    hashes: bytes
    tokens: bytes
    keys: Sequence[tuple[int, bytes]] = ()


class Acquisition(NamedTuple):
    """What a lease holds: `slots` u32le, one per block; the last may be shared in part. `ready`: see Progress.

    `share`: the number under which other processes may read; 0 where that was not asked for.
    """

    num_tokens: int
    slots: bytes
    ready: int
    share: int = 0


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
        readers: Readers | None = None,
    ) -> None:
        """As in Tier. Extents enter by `add_extent`, when their memory is there; a lower tier by `add_lower`.

        `generation`: above all that an earlier owner of the tables gave out. `checksums`: whether blocks that nobody
        summed are summed after commit; they are in any case where there is a lower tier. `readers`: without them no
        lease is shared.
        """
        self.capacity_nbytes = extent_nbytes * len(tables.extents)
        self.memory = Tier(extent_nbytes, tables.extents, tables.slots["state"], self._symbols)
        self.lower: LowerTier | None = None
        self.stats = Stats()
        self.watch = Watch(self.memory, self.stats)
        self.now_ms = 0.0
        self._symbols_of = symbols_of
        self._takeover: Takeover | None = None
        self._session_nbytes_max = int(self.capacity_nbytes * session_share)
        self._specs: list[SpecEntry] = []
        self._spec_ids: dict[bytes, int] = {}
        self._sessions: dict[int, Session] = {}
        self._free_numbers = list(range(SESSIONS_MAX))[::-1]
        self._last_session = generation >> SESSION_ID_SHIFT  # so no id of an earlier daemon is used again
        self._quarantine: deque[tuple[float, array[int]]] = deque()
        self.shares = Shares(self.stats, readers, generation)
        self.filling = Filling(
            self.memory,
            self.stats,
            self.watch,
            self._sessions,
            tables.slots,
            room_blocks=self._room_blocks,
            nbytes_max=self._session_nbytes_max,
            generation=generation,
            checksums=checksums,
        )

    # Sessions and specs

    def open_session(self, is_held: Callable[[int], bool] = lambda _: False) -> Session | None:
        """Changes state. A new session, or None when SESSIONS_MAX processes are connected.

        `is_held`: whether a process still holds a number, since an earlier daemon gave it.
        """
        strangers = self.strangers
        number = next(
            (number for number in reversed(self._free_numbers) if number not in strangers and not is_held(number)), None
        )
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
            self.stats.guards[Guard.GENERATION] += 1
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
        if died:
            self.stats.guards[Guard.SESSION] += len(session.leases) + len(session.reservations)
        # Who says goodbye holds nothing, unless its carry-over failed half-way: then its process lives, and may write.
        quarantine |= not died and any(lease.entry is None for lease in session.leases.values())
        slots = array("I")
        for lease_id, lease in list(session.leases.items()):
            self._end_lease(session, lease_id)
            slots += lease.private
        for reservation_id in list(session.reservations):
            slots += self.filling.end_part(session, reservation_id)
        for reservation in self.filling.groups.leave(session_id):
            self.filling.give_up(reservation)
        if self._takeover is not None and self._takeover.strangers:
            self._takeover.unclaim(slots)
        elif quarantine:
            self._quarantine_later(slots, now_ms)
        else:
            self.memory.let_go(slots)
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
        if not self.memory.can_add_spec(entry.root, spec.slot_nbytes):
            raise SpecMismatch("blocks of this spec were found in slots of another size: the slab is damaged")
        self.memory.add_spec(entry.root, spec.slot_nbytes)
        if self.lower is not None:
            self.lower.add_spec(entry)
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

    def join_group(self, session_id: int, entry: SpecEntry, group_id: str, shard: Shard) -> int:
        """Changes state. A rank's place in its group, for `reserve`. SpecMismatch where it does not fit."""
        return self.filling.groups.join(self.session(session_id).id, entry, group_id, shard).id

    # Reading

    def find(self, spec_id: int, query: Query) -> int:
        """Query. Tokens cached now, in whatever tier; no pin, no promise."""
        entry = self.spec(spec_id)
        return max(_tokens_of(entry, query, match) for match in self._matches(entry, query) if match is not None)

    def acquire(
        self, session_id: int, spec_id: int, lease_id: int, query: Query, *, shared: bool = False
    ) -> Acquisition:
        """Changes state. Match, pin and begin to bring up what is only below, in one step.

        Repeated with a living lease id it answers the same. `shared`: other processes may read on under the lease's
        number, for as long as they do, also when it has ended here.
        """
        session, entry = self.session(session_id), self.spec(spec_id)
        lease = session.leases.get(lease_id)
        if lease is None:
            require_unused(lease_id, session.reservations)
            lease = self._lease(session, entry, query)
            self._count_lookup(query, lease)
            if lease is None:
                return Acquisition(0, b"", 0)
            session.add_lease(lease_id, lease)
            if shared:
                self.shares.share(lease)
        return Acquisition(lease.num_tokens, lease.slots, self.watch.progress(lease).ready, lease.share)

    def prefetch(self, session_id: int, spec_id: int, query: Query) -> None:
        """Changes state. Bring up what is only below, when nothing more urgent is to be done."""
        self.session(session_id)
        entry = self.spec(spec_id)
        match, below = self._matches(entry, query)
        if self.lower is not None and below is not None and below.num_blocks > match.num_blocks:
            self.lower.promote(entry, below, len(query.hashes) // HASH_NBYTES, self.now_ms, background=True)

    def wait(self, token: int, session_id: int, lease_id: int, blocks: int, until_ms: float, share: int = 0) -> None:
        """Changes state. `take_progress` tells of `token` once that many blocks are ready, or there will be no more.

        At `until_ms` at the latest. `token`: the caller's, not in use. `share`: of somebody else's lease, which the
        caller reads.
        """
        lease = self._lease_at(session_id, lease_id, share)
        self.watch.wait(token, lease, blocks, until_ms, self.now_ms)

    def take_progress(self) -> list[tuple[int, Progress]]:
        """Changes state. What waiting callers can be told now."""
        return self.watch.take_progress(self.now_ms)

    def release(self, session_id: int, lease_ids: Iterable[int]) -> None:
        """Changes state. Ends leases; unknown ids are no error, since a miss leaves no lease behind."""
        session = self.session(session_id)
        for lease_id in lease_ids:
            lease = self._end_lease(session, lease_id)
            if lease is not None:
                self.memory.let_go(lease.private)

    def discard(self, session_id: int, lease_id: int, block: int, reason: str, share: int = 0) -> None:
        """Changes state. A reader found a leased block wrong: it and all that depends on it leave the tier.

        `reason`: "header" if it is not the block of that name, "payload" if its bytes are not what was summed.
        `share`: as in `wait`.
        """
        lease = self._lease_at(session_id, lease_id, share)
        self.stats.discards[reason if reason in DISCARD_REASONS else "other"] += 1
        if lease is None or lease.entry is None or block >= lease.pins[0].num_slots:
            return
        self.watch.note_change()
        (pin,) = lease.pins
        # Of a damaged block, what the lower tier has is good: it was summed before it was written.
        is_damaged = reason == "payload" or not self._symbols(_slot_at(lease.slots, block))
        self.stats.guards[Guard.CHECKSUM if is_damaged else Guard.TOKENS] += 1
        if self.lower is not None and not is_damaged:
            # Its header is whole, so another block has this name: neither may be served, in no tier.
            hashes = self.memory.tree.path_hashes(pin)[: (block + 1) * HASH_NBYTES]
            self.lower.forget(lease.entry, hashes)
        self.memory.remove(pin, block)

    # Writing

    def reserve(
        self,
        session_id: int,
        spec_id: int,
        reservation_id: int,
        hashes: bytes,
        start: int,
        tail: bytes = b"",
        member_id: int = 0,
    ) -> Grant:
        """Changes state. Slots for the blocks of the chain that are missing: all of them, or none.

        `start`: the caller has no data before this token. Where the chain is not cached that far, the answer is the
        earlier start that it needs. `tail`: symbols of the last block if it is short. `member_id`: of a rank; the first
        of its group gets slots for as much as fits from the front, and those that ask for the same chain get the same.
        """
        session, entry = self.session(session_id), self.spec(spec_id)
        return self.filling.reserve(session, entry, reservation_id, hashes, start, tail, member_id)

    def sealable(self, session_id: int, reservation_id: int, count: int) -> int:
        """Query. How many of the first `count` reserved blocks `commit` would take: all, or none.

        None of a reservation that has ended, and none if the chain it goes on from was discarded meanwhile.
        """
        return self.filling.sealable(self.session(session_id), reservation_id, count)

    def commit(
        self, session_id: int, reservation_id: int, summed: bytes, *, keep: bool = False, sums: Sequence[int] = ()
    ) -> int:
        """Changes state. Seal what was reserved; the number of blocks that are cached now because of it.

        None yet where parts of other ranks are missing. `summed`: one byte per block to seal, 0 where the daemon must
        make the checksum; reserved blocks beyond it are given back. `sums`: a rank's, one per block, where `summed`
        says so; a writer of whole blocks leaves them in the headers. `keep`: the writer has living views of the slots,
        so a lease of the same id takes the reservation's place.
        """
        session = self.session(session_id)
        return self.filling.commit(session, reservation_id, summed, sums, keep=keep, now_ms=self.now_ms)

    def abort(self, session_id: int, reservation_id: int) -> None:
        """Changes state. Give everything back, for all ranks; unknown ids are no error."""
        session = self.session(session_id)
        if reservation_id in session.reservations:
            self.memory.let_go(self.filling.end_part(session, reservation_id))

    def clear(self, spec_id: int) -> None:
        """Changes state. Forget every block of a spec, in every tier."""
        entry = self.spec(spec_id)
        self.watch.note_change()
        self.memory.clear(entry.root)
        if self.lower is not None and self.lower.serves(entry):
            self.lower.tier.clear(entry.root)

    def report(self, spec_id: int, prefill_tokens: int | None, prefill_ms: float | None, ttft_ms: float | None) -> None:
        """Changes state. What an engine measured."""
        if prefill_tokens is not None and prefill_ms is not None:
            self.stats.prefill_tokens += prefill_tokens
            self.stats.prefill_ms += prefill_ms
            self.watch.prefill_of(self.spec(spec_id)).observe(prefill_tokens, prefill_ms)
            self.watch.note_change()
        if ttft_ms is not None:
            self.stats.ttft_reports += 1
            self.stats.ttft_ms += ttft_ms

    # Time, movers, memory

    def add_extent(self, extent: int) -> None:
        """Changes state. An extent's memory is there."""
        self.memory.add_extent(extent)

    def take_over(self, legacies: Iterable[Legacy], strangers: Iterable[int]) -> int:
        """Changes state. Go on with what an earlier daemon held in the same slab: see Takeover. How many blocks."""
        self._takeover = Takeover(self.memory, legacies, strangers)
        self._quarantine_later(self._takeover.unclaimed(), self.now_ms)
        return self._takeover.num_blocks

    @property
    def strangers(self) -> set[int]:
        """Query. Numbers of an earlier daemon's sessions that live and have yet to be accounted for."""
        return self._takeover.strangers if self._takeover is not None else set()

    def carry(self, session_id: int, holds: Iterable[tuple[int, bytes]]) -> None:
        """Changes state. A client of an earlier daemon says what it still holds: (lease id, slots u32le) each."""
        session = self.session(session_id)
        ours = self.filling.reserved_slots()  # reserved in this life, so no client of an earlier one holds it
        for number, slots in holds:
            require_unused(number, session.leases)
            require_unused(number, session.reservations)
            if self._takeover is not None:
                self._carry(session, self._takeover, number, slots, ours)

    def account_for(self, number: int, now_ms: float) -> None:
        """Changes state. An earlier daemon's session has carried over what it holds, or is dead."""
        if self._takeover is not None:
            self.stats.guards[Guard.RESTART] += self._takeover.account_for(number)
            self._quarantine_later(self._takeover.unclaimed(), now_ms)

    def add_lower(self, lower: LowerTier) -> None:
        """Changes state. A tier below memory, filled with what its medium held."""
        lower.start(self.memory, self._symbols, self.stats, self.now_ms)
        for entry in self._specs:
            lower.add_spec(entry)
        self.lower = self.watch.lower = self.filling.lower = lower

    def take_transfers(self) -> list[Transfer]:
        """Changes state. Work for the movers since the last call."""
        transfers: list[Transfer] = [*self.filling.sums.take_transfers()]
        if self.lower is not None:
            transfers += self.lower.take_transfers(self.now_ms)
        return transfers

    def complete(self, transfer: SumBlocks) -> None:
        """Changes state. A mover is done with the slots of a transfer."""
        self.filling.sums.complete(transfer)
        if self.lower is not None:
            self.lower.writes.summed(transfer.id)

    def next_deadline_ms(self) -> float | None:
        """Query. When `on_time` has something to do."""
        lower = self.lower
        parts = (self.watch, self.filling.groups, self.shares, *(() if lower is None else (lower,)))
        asked = [part.next_deadline_ms() for part in parts]
        times = [time for time in asked if time is not None]
        if self._quarantine:
            times.append(self._quarantine[0][0])
        return min(times, default=None)

    def on_time(self, now_ms: float) -> None:
        """Changes state. It is later: quarantines end, parts that never came are waited for no more, nor loads that
        fell behind recomputing."""
        self.now_ms = now_ms
        while self._quarantine and self._quarantine[0][0] <= now_ms:
            self.memory.let_go(self._quarantine.popleft()[1])
        self.filling.on_time(now_ms)
        for lease in self.shares.take_ended(self._sessions, now_ms):
            self._end_for_all(lease)
        self.watch.on_time(now_ms)

    def check(self) -> None:
        """Query. Assert every invariant (docs/design.md lists them)."""
        self.memory.check()
        self.filling.check()
        for session in self._sessions.values():
            held = sum(lease.nbytes for lease in session.leases.values())
            held += sum(part.nbytes for part in session.reservations.values())
            held += sum(lease.nbytes for lease in self.shares.read_on_from(session.id))
            assert held == session.held_nbytes
        by_class = dict.fromkeys(self.memory.pool.classes, 0)
        for slot in self._reserved_slots():
            by_class[self.memory.slot_nbytes_of(slot)] += self.memory.state_of(slot) != FAILED  # else a pin holds it
        for slot_nbytes, reserved in by_class.items():
            parked = self.memory.num_parked(slot_nbytes)
            assert self.memory.counts(slot_nbytes)[2] == reserved + parked, "a reserved slot has no owner"
        assert self.stats.lookups == self.stats.hits + self.stats.misses
        self.shares.check({lease.share for session in self._sessions.values() for lease in session.leases.values()})
        if self.lower is not None:
            self.lower.check()

    # Parts

    def _symbols(self, slot: int) -> bytes:
        """Block symbols of a block in memory, also of one that is on its way up."""
        lower = self.lower
        source = lower.loads.arriving_from.get(slot) if lower is not None else None
        return self._symbols_of(slot) if lower is None or source is None else lower.symbols_of(source)

    def _matches(self, entry: SpecEntry, query: Query) -> tuple[Match, Match | None]:
        """What memory and the tier below know of a prompt."""
        match = self._match(entry, query)
        if self.lower is None or not self.lower.serves(entry):
            return match, None
        below = self.lower.tier.match(entry.root, query.hashes, _symbols_at(entry, query))
        return match, _in_grains(entry, below)

    def _match(self, entry: SpecEntry, query: Query) -> Match:
        return _in_grains(entry, self.memory.match(entry.root, query.hashes, _symbols_at(entry, query)))

    def _lease(self, session: Session, entry: SpecEntry, query: Query) -> Lease | None:
        if len(session.leases) >= LEASES_MAX:
            return None
        match, below = self._matches(entry, query)
        if below is None or self.lower is None:
            return self._lease_of(session, entry, match, _tokens_of(entry, query, match))
        have, most = _tokens_of(entry, query, match), _tokens_of(entry, query, below)
        self.lower.tier.touch(below)
        if most <= have:
            lease = self._lease_of(session, entry, match, have)
            if below.num_blocks < match.num_blocks:  # used twice: worth a place below
                hashes = query.hashes[: match.num_blocks * HASH_NBYTES]
                self.lower.writes.write_later(entry, hashes, self.now_ms, used_twice=True)
            return lease
        wanted = below.num_blocks + (below.partial is not None) - match.num_blocks
        plan = self.lower.choose(entry.spec, wanted, most - have, self.watch.prefill_of(entry), self.now_ms)
        if plan.num_blocks:
            return self._lease_of_loaded(session, entry, query, match, below)
        lease = self._lease_of(session, entry, match, have)  # first: it must not wait for what a probe brings
        self._refuse(entry, below, match.num_blocks, plan.probe)
        return lease

    def _lease_of_loaded(
        self, session: Session, entry: SpecEntry, query: Query, match: Match, below: Match
    ) -> Lease | None:
        """Bring up the chain that is below, and lease what of it memory has now."""
        assert self.lower is not None
        have, most = _tokens_of(entry, query, match), _tokens_of(entry, query, below)
        wanted = below.num_blocks + (below.partial is not None)
        room = min(wanted, self._room_for(session, entry, match))
        promoted = self.lower.promote(entry, below, room, self.now_ms, background=False)
        if promoted is not None:
            num_tokens = min(most, promoted.num_blocks * entry.spec.block_tokens)
            if num_tokens > have:
                match = self.memory.match(entry.root, promoted.hashes)
                return self._lease_of(session, entry, match, num_tokens, loaded_from=have)
        match = self._match(entry, query)  # room may have been made in vain, of what was found before
        return self._lease_of(session, entry, match, _tokens_of(entry, query, match))

    def _lease_of(
        self, session: Session, entry: SpecEntry, match: Match, num_tokens: int, loaded_from: int | None = None
    ) -> Lease | None:
        num_blocks = match.num_blocks + (match.partial is not None)
        if not num_blocks:
            return None
        room = self._room_for(session, entry, match)
        if room < num_blocks:
            self.stats.hits_shortened += 1
            if not room:
                return None
            num_tokens = min(num_tokens, room * entry.spec.block_tokens)
            pin = self.memory.pin(match, room)
        else:
            pin = self.memory.pin(match)
        lease = Lease(
            entry.spec.slot_nbytes, entry, (pin,), num_tokens, self.memory.tree.path_slots(pin).tobytes(), array("I")
        )
        self.watch.begin(entry, lease, loaded_from, self.now_ms)
        return lease

    def _refuse(self, entry: SpecEntry, below: Match, have: int, probe: bool) -> None:
        """Recomputing is faster. `probe`: load a few blocks beside it, to see whether it still is."""
        assert self.lower is not None
        self.stats.loads_refused += 1
        if probe:
            self.stats.loads_probed += 1
            num_blocks = -(-PROBE_NBYTES // entry.spec.slot_nbytes)
            self.lower.promote(entry, below, have + num_blocks, self.now_ms, background=True)

    def _room_for(self, session: Session, entry: SpecEntry, match: Match) -> int:
        """How many blocks a lease may have: what the session holds of this match already costs it nothing."""
        num_blocks = match.num_blocks + (match.partial is not None)
        room = self._room_blocks(session, entry)
        if room < num_blocks:
            room += self.memory.held_blocks(match, [pin for lease in self._leases_of(session) for pin in lease.pins])
        return room

    def _room_blocks(self, session: Session, entry: SpecEntry) -> int:
        """How many blocks the session may still hold.

        Counted exactly only where the cheap bound says it is too much.
        """
        spare = self._session_nbytes_max - session.held_nbytes
        if spare < self._session_nbytes_max // 2:
            spare = self._session_nbytes_max - self._distinct_nbytes(session)
        return max(0, spare // entry.spec.slot_nbytes)

    def _distinct_nbytes(self, session: Session) -> int:
        nbytes = sum(each.nbytes for each in {part.reservation for part in session.reservations.values()})
        by_size: dict[int, list[Pin]] = {}
        for lease in self._leases_of(session):
            nbytes += len(lease.private) * lease.slot_nbytes
            by_size.setdefault(lease.slot_nbytes, []).extend(lease.pins)
        return nbytes + sum(size * self.memory.distinct_blocks(pins) for size, pins in by_size.items())

    def _leases_of(self, session: Session) -> list[Lease]:
        """All that count as its own, those that only others read included."""
        return [*session.leases.values(), *self.shares.read_on_from(session.id)]

    def _lease_at(self, session_id: int, lease_id: int, share: int) -> Lease | None:
        """The caller's lease of this id; or somebody's that it reads on under."""
        session = self.session(session_id)
        return self.shares.get(share) if share else session.leases.get(lease_id)

    def _end_lease(self, session: Session, lease_id: int) -> Lease | None:
        """Its private slots are still held: the caller decides when they are let go."""
        lease = session.pop_lease(lease_id)
        if lease is None:
            return None
        if self.shares.ends(lease, session, self.now_ms):
            self._end_for_all(lease)
        return lease

    def _end_for_all(self, lease: Lease) -> None:
        self.watch.end(lease)
        for pin in lease.pins:
            self.memory.unpin(pin)

    def _carry(self, session: Session, takeover: Takeover, number: int, slots: bytes, ours: set[int]) -> None:
        size, named = self.memory.of_one_class(slots)
        if size is None:
            return
        wanted = array("I", (slot for slot in named if slot not in ours))
        pins, private = takeover.claim(wanted)
        if pins or private:
            session.add_lease(number, Lease(size, None, pins, 0, wanted.tobytes(), private))

    def _quarantine_later(self, slots: array[int], now_ms: float) -> None:
        if slots:
            self._quarantine.append((now_ms + QUARANTINE_MS, slots))

    def _count_lookup(self, query: Query, lease: Lease | None) -> None:
        self.stats.lookups += 1
        self.stats.tokens_asked += len(query.tokens) // 4
        if lease is None:
            self.stats.misses += 1
        else:
            self.stats.hits += 1
            self.stats.tokens_hit += lease.num_tokens
            self.stats.blocks_hit += len(lease.slots) // 4

    def _reserved_slots(self) -> set[int]:
        """Slots that somebody holds beside the tree; after a takeover it may be several."""
        held = set(self._takeover.reserved) if self._takeover is not None else set()
        for session in self._sessions.values():
            held.update(*(lease.private for lease in session.leases.values()))
        return held.union(self.filling.reserved_slots(), *(slots for _, slots in self._quarantine))


def _symbols_at(entry: SpecEntry, query: Query) -> Callable[[int], bytes]:
    """Symbols of the query's blocks, by number."""
    block_nbytes, block_tokens = 4 * entry.spec.block_tokens, entry.spec.block_tokens

    def symbols_at(index: int) -> bytes:
        tokens = query.tokens[index * block_nbytes : (index + 1) * block_nbytes]
        first = index * block_tokens
        for start, digest in query.keys:
            if first <= start < first + len(tokens) // 4:
                return block_symbols_of(tokens, start - first, digest)
        return block_symbols_of(tokens, len(tokens) // 4, NO_KEYS_DIGEST)

    return symbols_at


def _in_grains(entry: SpecEntry, match: Match) -> Match:
    """Opaque layouts share whole grains only."""
    tokens = match.partial_tokens // entry.spec.grain_tokens * entry.spec.grain_tokens
    return match._replace(partial=match.partial if tokens else None, partial_tokens=tokens)


def _slot_at(slots: bytes, block: int) -> int:
    return int.from_bytes(slots[4 * block : 4 * block + 4], "little")


def _tokens_of(entry: SpecEntry, query: Query, match: Match) -> int:
    """Tokens of a query that a match covers."""
    return _num_tokens(entry, query, match.num_blocks) + match.partial_tokens


def _num_tokens(entry: SpecEntry, query: Query, num_blocks: int) -> int:
    """Tokens in the first blocks of a query: its last block may be short."""
    return min(num_blocks * entry.spec.block_tokens, len(query.tokens) // 4)
