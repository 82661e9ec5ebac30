"""Rank groups: sessions that fill the same blocks together, each its part, and the reservations they share. Pure.

    first rank's reserve ──> open ── other ranks join ── all parts committed ──> sealed
                              └── a rank aborts, leaves or dies; or one never comes ──> given up, for all

Ranks never vote: whether a block is there is told by its one slot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.core.layout import RECTS_MAX, Shard
from kvstore.core.leases import Reservation, SpecEntry
from kvstore.errors import SessionLost, SpecMismatch
from kvstore.ranks import require_part
from kvstore.spec import KVSpec

MEMBERS_MAX = 65536
PARTS_MS = 10_000.0  # nobody writes any more, and a part is missing: so long its rank may yet come


@dataclass(slots=True, eq=False)
class Group:
    """The ranks of one engine. `open`: reservations that wait for parts, by the hash of the chain asked for."""

    group_id: str
    entry: SpecEntry
    members: set[Member] = field(default_factory=set)
    open: dict[bytes, Reservation] = field(default_factory=dict)

    @property
    def open_nbytes(self) -> int:
        """Query. Held back by what waits for parts."""
        return sum(reservation.nbytes for reservation in self.open.values())


class Member(NamedTuple):
    """A rank: one of a session's places in groups."""

    id: int
    session_id: int
    group_id: str
    shard: Shard


class Groups:
    """All groups with members."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._members: dict[int, Member] = {}
        self._last_id = 0
        self.unfilled: Counter[str] = Counter()  # reservations for which a part never came, of groups that live
        self._due_ms: dict[Reservation, float] = {}  # of those that nobody fills now; the first is due first

    def join(self, session_id: int, entry: SpecEntry, group_id: str, shard: Shard) -> Member:
        """Changes state. A rank's place in its group, the same if it has it already.

        SpecMismatch where it does not fit: a part that this spec has not, or that overlaps another rank's; another
        spec than that of the ranks already there.
        """
        require_part(entry.spec, shard)
        group = self._groups.get(group_id) or Group(group_id, entry)
        for member in group.members:
            if (member.session_id, member.shard) == (session_id, shard) and group.entry is entry:
                return member
        self._require_fits(group, entry.spec, shard)
        self._last_id += 1
        member = Member(self._last_id, session_id, group_id, shard)
        self._groups[group_id] = group
        group.members.add(member)
        self._members[member.id] = member
        return member

    def place(self, session_id: int, member_id: int, entry: SpecEntry) -> tuple[Member, Group]:
        """Query. SessionLost for a place that this session never had for this spec, or in an earlier life."""
        member = self._members.get(member_id)
        if member is None or member.session_id != session_id or self._groups[member.group_id].entry is not entry:
            raise SessionLost(f"rank {member_id} of session {session_id} is unknown here")
        return member, self._groups[member.group_id]

    def leave(self, session_id: int) -> list[Reservation]:
        """Changes state. The session's ranks are gone; what their groups have open will never be whole."""
        gone = [member for member in self._members.values() if member.session_id == session_id]
        groups = {member.group_id: self._groups[member.group_id] for member in gone}
        for member in gone:
            del self._members[member.id]
            groups[member.group_id].members.discard(member)
        for group_id, group in groups.items():
            if not group.members:
                del self._groups[group_id]
                self.unfilled.pop(group_id, None)
        return [reservation for group in groups.values() for reservation in group.open.values()]

    def open_reservations(self) -> list[Reservation]:
        """Query. Also of groups without members: they are given up in the same step."""
        return [reservation for group in self._groups.values() for reservation in group.open.values()]

    def wait_for_parts(self, reservation: Reservation, now_ms: float) -> None:
        """Changes state. All ranks that came have filled their parts, and some have yet to come."""
        self._due_ms[reservation] = now_ms + PARTS_MS

    def wait_no_more(self, reservation: Reservation) -> None:
        """Changes state. Another rank has come, or nobody need come any more."""
        self._due_ms.pop(reservation, None)

    def next_deadline_ms(self) -> float | None:
        """Query. When the first of `overdue` is."""
        return next(iter(self._due_ms.values()), None)

    def overdue(self, now_ms: float) -> list[Reservation]:
        """Query. Those for whose missing ranks was waited long enough."""
        return [reservation for reservation, due_ms in self._due_ms.items() if due_ms <= now_ms]

    @property
    def all(self) -> list[Group]:
        """Query."""
        return list(self._groups.values())

    def check(self) -> None:
        """Query. Assert that members and groups know each other, and that parts do not overlap."""
        assert set(self._members.values()) == {each for group in self._groups.values() for each in group.members}
        for group in self._groups.values():
            shards = {member.shard for member in group.members}
            assert shards, "a group without members"
            assert not any(one.overlaps(other) for one in shards for other in shards if one != other)
            for reservation in group.open.values():
                assert reservation.group is group
                assert not reservation.is_over
                assert reservation.shards.keys() <= shards
                assert reservation.num_filling == sum(each is None for each in reservation.shards.values())
                assert (reservation in self._due_ms) == (not reservation.num_filling), "nobody comes, and nobody waits"
        assert set(self._due_ms) <= set(self.open_reservations())

    def _require_fits(self, group: Group, spec: KVSpec, shard: Shard) -> None:
        if group.entry.spec != spec:
            name, given, there = spec.first_difference(group.entry.spec)
            raise SpecMismatch(f"rank group {group.group_id!r}: {name}={given!r}, but {there!r} of the ranks there")
        shards = {member.shard for member in group.members}
        for other in shards - {shard}:
            if shard.overlaps(other):
                raise SpecMismatch(
                    f"rank group {group.group_id!r}: layers={shard.layers} heads={shard.heads} overlaps "
                    f"layers={other.layers} heads={other.heads} of another rank"
                )
        if len(shards | {shard}) > RECTS_MAX or len(self._members) >= MEMBERS_MAX:
            raise SpecMismatch(f"rank group {group.group_id!r}: too many ranks: a block has at most {RECTS_MAX} parts")
