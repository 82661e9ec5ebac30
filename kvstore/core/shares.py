"""Leases that other processes read under: a scheduler's decision, handed on to the ranks of its engine. Pure.

Such a lease ends for its owner as any other does. Its blocks stay until those who read under its number have let go,
which only the kernel knows, since they ask nobody: see Readers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from kvstore.core.leases import Lease, Session
from kvstore.core.stats import Stats

SHARES_MAX = 4096  # what the kernel has to look through grows with them: 80 us for both ends of a share at this many
LOOK_MS = 20.0  # between two looks whether somebody still reads


class Readers(Protocol):
    """Whom a shared lease is handed on to: processes that read under its number. The kernel knows them, not we."""

    def admit(self, share: int) -> None:
        """Changes state. From now on processes may begin to read under this number."""

    def dismiss(self, share: int) -> bool:
        """Changes state. Unless somebody reads: nobody may begin to any more, and true."""


class Shares:
    """All shared leases that live, or are still read."""

    def __init__(self, stats: Stats, readers: Readers | None, last: int) -> None:
        """`readers`: without them nothing is shared. `last`: the last number that was ever given."""
        self._stats = stats
        self._readers = readers
        self._last = last
        self._leases: dict[int, Lease] = {}  # by share
        self._owner: dict[int, int] = {}  # share of a lease that has ended for its owner -> that session
        self._due_ms = math.inf

    def share(self, lease: Lease) -> None:
        """Changes state. From now on others may read under its own number; it has none where there are too many."""
        if self._readers is None or len(self._leases) >= SHARES_MAX:
            self._stats.shares_refused += 1
            return
        self._last += 1
        lease.share = self._last
        self._leases[lease.share] = lease
        self._readers.admit(lease.share)

    def get(self, share: int) -> Lease | None:
        """Query. None where nobody reads there any more, nor may."""
        return self._leases.get(share)

    def ends(self, lease: Lease, session: Session, now_ms: float) -> bool:
        """Changes state. A lease ends for its owner; whether it does for everybody."""
        if not lease.share or self._is_dismissed(lease.share):
            return True
        session.held_nbytes += lease.nbytes  # its bytes count on, or sharing would be a way to hold all there is
        self._owner[lease.share] = session.id
        self._due_ms = min(self._due_ms, now_ms + LOOK_MS)
        return False

    def take_ended(self, sessions: Mapping[int, Session], now_ms: float) -> list[Lease]:
        """Changes state. Leases that are not read any more: they have ended for everybody."""
        ended: list[Lease] = []
        if now_ms < self._due_ms:
            return ended
        for share, session_id in list(self._owner.items()):
            lease = self._leases[share]
            if self._is_dismissed(share):
                del self._owner[share]
                if session_id in sessions:
                    sessions[session_id].held_nbytes -= lease.nbytes
                ended.append(lease)
        self._due_ms = now_ms + LOOK_MS if self._owner else math.inf
        return ended

    def next_deadline_ms(self) -> float | None:
        """Query. When `take_ended` has something to say."""
        return self._due_ms if self._due_ms < math.inf else None

    @property
    def read_on(self) -> list[Lease]:
        """Query. Leases that have ended for their owners only."""
        return [self._leases[share] for share in self._owner]

    def read_on_from(self, session_id: int) -> list[Lease]:
        """Query. Those that were this session's."""
        return [self._leases[share] for share, owner in self._owner.items() if owner == session_id]

    def check(self, living: set[int]) -> None:
        """Query. Assert that each is held by its owner, or read on. `living`: shares of the leases of all sessions."""
        assert living - {0} == self._leases.keys() - self._owner.keys()
        assert (self._due_ms < math.inf) == bool(self._owner)

    def _is_dismissed(self, share: int) -> bool:
        assert self._readers is not None
        if not self._readers.dismiss(share):
            return False
        del self._leases[share]
        return True
