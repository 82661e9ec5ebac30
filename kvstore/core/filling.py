"""Reservations: room for blocks to come, its writers, and how what they have filled becomes blocks. Pure.

reserve ──> slots, held by their writer, or by each rank of a group for its part ── all parts committed ──> blocks
                  └── abort, death, a missing part ──> free, once every writer has let go
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.core.groups import Group, Groups, Member
from kvstore.core.layout import Shard
from kvstore.core.leases import (
    RESERVATIONS_MAX,
    Filled,
    Keeper,
    Lease,
    Part,
    Reservation,
    Session,
    SpecEntry,
    require_unused,
)
from kvstore.core.lower import LowerTier
from kvstore.core.stats import Guard, Stats
from kvstore.core.sums import Sums
from kvstore.core.tier import JOINT, Tier
from kvstore.core.watch import Watch
from kvstore.ranks import whole_of
from radix import HASH_NBYTES, Match, common_tokens


class Grant(NamedTuple):
    """Room to store from token `start` on. Without slots, `available` says how many blocks could be had."""

    start: int
    slots: bytes
    generation: int
    available: int


class Filling:
    """All reservations that are open."""

    def __init__(
        self,
        memory: Tier,
        stats: Stats,
        watch: Watch,
        sessions: Mapping[int, Session],
        rows: npt.NDArray[np.void],
        *,
        room_blocks: Callable[[Session, SpecEntry], int],
        nbytes_max: int,
        generation: int,
        checksums: bool,
    ) -> None:
        """`room_blocks`: how many more a session may hold; `nbytes_max`: what it, or a group, may at most. `rows`: of
        the slot table. `generation`, `checksums`: as in Store."""
        self.groups = Groups()
        self.sums = Sums(memory, stats)
        self.lower: LowerTier | None = None
        self._memory = memory
        self._stats = stats
        self._watch = watch
        self._sessions = sessions
        self._rows = rows
        self._room_blocks = room_blocks
        self._nbytes_max = nbytes_max
        self._generation = generation
        self._checksums = checksums

    def reserve(
        self,
        session: Session,
        entry: SpecEntry,
        reservation_id: int,
        hashes: bytes,
        start: int,
        tail: bytes,
        member_id: int,
    ) -> Grant:
        """Changes state. See Store.reserve."""
        known = session.reservations.get(reservation_id)
        if known is not None:
            return _grant(known.reservation)
        require_unused(reservation_id, session.leases)
        rank = self.groups.place(session.id, member_id, entry) if member_id else None
        asked, num_blocks = hashes[-HASH_NBYTES:], len(hashes) // HASH_NBYTES
        if rank is not None and asked in rank[1].open:
            end = num_blocks * entry.spec.block_tokens
            return self._join(session, reservation_id, rank[1].open[asked], rank[0].shard, start, end)
        match = self._memory.match(entry.root, hashes, lambda index: tail if index == num_blocks - 1 else b"")
        done = match.num_blocks
        if tail and done == num_blocks - 1 and match.partial_tokens == common_tokens(tail, tail):
            done = num_blocks  # a longer block begins with exactly this tail
        start_token = done * entry.spec.block_tokens
        wanted = num_blocks - done
        if wanted == 0 or start_token < start:
            return Grant(start_token, b"", 0, wanted)
        match = match._replace(partial=None, partial_tokens=0)
        return self._reserve(session, entry, reservation_id, hashes, match, wanted, bool(tail), rank)

    def sealable(self, session: Session, reservation_id: int, count: int) -> int:
        """Query. See Store.sealable."""
        part = session.reservations.get(reservation_id)
        if part is None or part.reservation.is_over or part.reservation.parent.node.detached:
            return 0
        return min(count, len(part.reservation.slots))

    def commit(
        self, session: Session, reservation_id: int, summed: bytes, sums: Sequence[int], *, keep: bool, now_ms: float
    ) -> int:
        """Changes state. See Store.commit."""
        part = session.pop_part(reservation_id)
        if part is None:
            self._stats.guards[Guard.GENERATION] += 1
            return 0  # aborted, or of an earlier life: stale ids seal nothing
        reservation, keeper = part.reservation, None
        if keep:
            lease = Lease(reservation.entry.spec.slot_nbytes, None, (), 0, b"", reservation.slots[:])
            session.add_lease(reservation_id, lease)
            keeper = Keeper(session.id, reservation_id, lease)
        elif reservation.group is not None:
            self._memory.let_go(reservation.slots)
        if reservation.is_over:
            self._stats.guards[Guard.GENERATION] += 1
            return 0  # another rank gave it up
        unknown = 0 if reservation.group is None else None  # what is in the header need not be known here
        known = [*sums, *([unknown] * (len(summed) - len(sums)))]
        own = [each if is_summed else None for each, is_summed in zip(known, summed, strict=False)]
        reservation.shards[part.shard] = Filled(own, keeper)
        reservation.num_filling -= 1
        filled = reservation.filled
        if filled is not None:
            return self._seal(reservation, filled, now_ms)
        if not reservation.num_filling:
            self.groups.wait_for_parts(reservation, now_ms)
        return 0

    def open_reservations(self) -> set[Reservation]:
        """Query. All that are not over."""
        held = {part.reservation for part in self._parts if not part.reservation.is_over}
        return held.union(self.groups.open_reservations())

    def reserved_slots(self) -> set[int]:
        """Query. Slots that a writer holds, or a reservation that waits for its ranks."""
        held = {part.reservation for part in self._parts}
        return {slot for each in held.union(self.groups.open_reservations()) for slot in each.slots}

    def on_time(self, now_ms: float) -> None:
        """Changes state. Parts that never came are waited for no more."""
        for reservation in self.groups.overdue(now_ms):
            assert reservation.group is not None
            self._stats.reservations_unfilled += 1
            self.groups.unfilled[reservation.group.group_id] += 1
            self.give_up(reservation)

    def check(self) -> None:
        """Query. Assert that each part is of a reservation that wants it, or that is over and has other ranks, too."""
        self.groups.check()
        for part in self._parts:
            reservation = part.reservation
            assert reservation.is_over or reservation.shards[part.shard] is None, "committed, and still held"
            assert not reservation.is_over or reservation.group is not None, "over, and still held"

    @property
    def _parts(self) -> list[Part]:
        return [part for session in self._sessions.values() for part in session.reservations.values()]

    def end_part(self, session: Session, reservation_id: int) -> array[int]:
        """A writer lets go before it has committed: nobody's part counts. It may yet write: the slots that it held are
        still held, and the caller decides when they are let go."""
        part = session.pop_part(reservation_id)
        assert part is not None
        if not part.reservation.is_over:
            self.give_up(part.reservation)
        return part.reservation.slots

    def give_up(self, reservation: Reservation) -> None:
        """It will never be whole. Each writer that has yet to let go holds the slots for itself."""
        self._close(reservation)
        self._stats.reservations_aborted += 1
        self._stats.guards[Guard.SEAL] += len(reservation.slots)
        if reservation.group is not None:
            self._memory.let_go(reservation.slots)

    def _close(self, reservation: Reservation) -> None:
        """No part of it is taken any more, and nobody may join."""
        assert not reservation.is_over
        reservation.is_over = True
        self._memory.unpin(reservation.parent)
        if reservation.group is not None:
            del reservation.group.open[reservation.asked]
            self.groups.wait_no_more(reservation)

    def _join(
        self, session: Session, reservation_id: int, reservation: Reservation, shard: Shard, start: int, end: int
    ) -> Grant:
        """A rank asks for what others of its group fill already. `end`: token at which its chain ends."""
        first = reservation.start * reservation.entry.spec.block_tokens
        if shard in reservation.shards:
            self._stats.parts_already += 1
            return Grant(end, b"", 0, 0)
        if first < start or len(session.reservations) >= RESERVATIONS_MAX:
            return Grant(first, b"", 0, 0)
        reservation.num_filling += 1
        self.groups.wait_no_more(reservation)
        self._add_part(session, reservation_id, reservation, shard)
        return _grant(reservation)

    def _add_part(self, session: Session, reservation_id: int, reservation: Reservation, shard: Shard) -> None:
        """A rank holds the slots beside the others, and beside the reservation, which may wait for ranks to come."""
        reservation.shards[shard] = None
        session.add_part(reservation_id, Part(reservation, shard))
        if reservation.group is not None:
            for slot in reservation.slots:
                self._memory.keep(slot)

    def _seal(self, reservation: Reservation, filled: list[tuple[Shard, Filled]], now_ms: float) -> int:
        """All parts are there: the leading blocks that every writer has filled are blocks from now on."""
        entry, is_joint = reservation.entry, reservation.group is not None
        count = min(len(reservation.slots), *(len(each.sums) for _, each in filled))
        slots, dropped = reservation.slots[:count], reservation.slots[count:]
        self._stats.guards[Guard.SEAL] += len(dropped)
        hashes = reservation.hashes[: (reservation.start + count) * HASH_NBYTES]
        short = reservation.short and not dropped
        self._close(reservation)  # nothing is evicted before the insert, and only a free run may grow
        inserted = self._memory.insert(entry.root, hashes, reservation.start, slots, short=short)
        self._watch.note_change()  # a short block that gave way may have been on its way up
        self._count_commit(entry, inserted.inserted, len(inserted.unused))
        unused = array("I", inserted.unused) + dropped
        sealed = set(slots) - set(unused)
        self._memory.disown(sealed)
        sum_id = None
        if self._checksums or self.lower is not None:
            ours = [slot if slot in sealed else None for slot in slots]
            sum_id = self.sums.make_later(entry, hashes, ours, filled, in_headers=not is_joint)
        if inserted.inserted and self.lower is not None and self.lower.serves(entry):
            self.lower.writes.write_later(entry, hashes, now_ms, sum_id=sum_id)
        keepers = [each.keeper for _, each in filled if each.keeper is not None]
        for keeper in keepers:
            self._lease_to_keeper(keeper, entry, hashes, unused)
        if is_joint or not keepers:
            self._memory.let_go(unused)
        return inserted.inserted

    def _lease_to_keeper(self, keeper: Keeper, entry: SpecEntry, hashes: bytes, unused: array[int]) -> None:
        """What a writer still looks at are blocks now."""
        session = self._sessions.get(keeper.session_id)
        if session is not None and session.leases.get(keeper.lease_id) is keeper.lease:
            session.pop_lease(keeper.lease_id)
            session.add_lease(keeper.lease_id, self._lease_of_own(entry, hashes, unused))

    def _reserve(
        self,
        session: Session,
        entry: SpecEntry,
        reservation_id: int,
        hashes: bytes,
        match: Match,
        wanted: int,
        short: bool,
        rank: tuple[Member, Group] | None,
    ) -> Grant:
        start = match.num_blocks
        room = self._room_blocks(session, entry) if len(session.reservations) < RESERVATIONS_MAX else 0
        if rank is not None:
            room = min(room, self._room_to_wait(session, rank[1]) // entry.spec.slot_nbytes)
        parent = self._memory.pin(match)  # before room is made: the chain must not lose its own parent
        slots = self._take_slots(entry, wanted, room, trims=rank is not None)
        if slots is None:
            available = min(room, self._memory.available(entry.spec.slot_nbytes), wanted - 1)
            self._memory.unpin(parent)
            self._stats.reservations_refused += 1
            return Grant(start * entry.spec.block_tokens, b"", 0, available)
        generation = self._stamp(slots, session.number + (JOINT if rank is not None else 0))
        asked, short = hashes[-HASH_NBYTES:], short and len(slots) == wanted
        hashes = hashes[: (start + len(slots)) * HASH_NBYTES]
        group = rank[1] if rank is not None else None
        reservation = Reservation(entry, hashes, start, slots, generation, parent, short, {}, group, asked, session.id)
        if group is not None:
            group.open[asked] = reservation
            for slot in slots:
                self._memory.keep(slot)
        self._add_part(
            session, reservation_id, reservation, rank[0].shard if rank is not None else whole_of(entry.spec)
        )
        self._stats.reservations += 1
        return _grant(reservation)

    def _room_to_wait(self, session: Session, group: Group) -> int:
        """So many bytes may a session, and a group, still have open: they hold what no session holds any more."""
        begun = sum(each.nbytes for each in self.groups.open_reservations() if each.opener == session.id)
        return max(0, self._nbytes_max - max(begun, group.open_nbytes))

    def _take_slots(self, entry: SpecEntry, wanted: int, room: int, *, trims: bool) -> array[int] | None:
        """`wanted` slots; where they do not fit none, or with `trims` as many as do."""
        slot_nbytes = entry.spec.slot_nbytes
        slots = None
        if wanted <= room:
            slots = self._memory.reserve(slot_nbytes, wanted)
            self._stats.guards[Guard.PIN] += slots is None
        fits = min(room, self._memory.available(slot_nbytes), wanted) if slots is None and trims else 0
        return self._memory.reserve(slot_nbytes, fits) if fits > 0 else slots

    def _stamp(self, slots: array[int], owner: int) -> int:
        """Say in the slab who fills these slots. Their generation, which no other reservation has."""
        self._generation += 1
        rows = np.frombuffer(slots, np.uint32)
        self._rows["owner"][rows] = owner
        self._rows["generation"][rows] = self._generation
        return self._generation

    def _lease_of_own(self, entry: SpecEntry, hashes: bytes, private: array[int]) -> Lease:
        pin = self._memory.pin(self._memory.match(entry.root, hashes))
        return Lease(entry.spec.slot_nbytes, entry, (pin,), 0, self._memory.tree.path_slots(pin).tobytes(), private)

    def _count_commit(self, entry: SpecEntry, stored: int, already: int) -> None:
        self._stats.reservations_committed += 1
        self._stats.blocks_stored += stored
        self._stats.blocks_already += already
        self._stats.bytes_stored += stored * entry.spec.block_nbytes


def _grant(reservation: Reservation) -> Grant:
    start = reservation.start * reservation.entry.spec.block_tokens
    return Grant(start, reservation.slots.tobytes(), reservation.generation, len(reservation.slots))
