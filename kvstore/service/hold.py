"""A lease or reservation as this process holds it, and the arrays it lends.

It ends when its owner has let go **and** no array on its slots is alive: an array must never show another block's
bytes. Each lent buffer is an object of its own under the array, because numpy collapses `.base`, so that a weak
reference to an array or a slice dies while its views live on.
"""

from __future__ import annotations

import logging
import weakref
from mmap import mmap
from typing import cast

import numpy as np
import numpy.typing as npt

from kvstore.service.link import LEASE, RESERVATION, Holding, Link, Session

log = logging.getLogger("kvstore")
Array = npt.NDArray[np.generic]


class Hold:
    """One lease or reservation of a session, or its reading under somebody else's lease."""

    def __init__(self, owner: object, link: Link, session: Session, *kinds: str) -> None:
        """Changes state. From now on the session is in use. `owner`: lives as long as this does.

        `kinds`: what the daemon is to be told of in the end, LEASE or RESERVATION; of a reading nothing.
        """
        self.link = link
        self._owner = owner
        self.session = session
        self.number = number = link.new_id()
        self._ends = kinds
        self._lent: dict[int, _Lent] = {}  # by the buffer's id; a weak reference to a buffer has no hash
        self._lends = True
        self._let_go = False
        self._welcome = session.welcome
        self._holding = session.in_use[number] = Holding()

    @property
    def is_over(self) -> bool:
        """Query. Whether the owner has let go."""
        return self._let_go

    @property
    def can_be_told(self) -> bool:
        """Query. Whether the daemon that gave it is still the one we talk to."""
        return self.link.usable and self.session is self.link.session and self._welcome is self.session.welcome

    @property
    def has_views(self) -> bool:
        """Query. Whether an array lent under this hold is alive."""
        return any(lent() is not None for lent in list(self._lent.values()))

    def read_under(self, share: int) -> bool:
        """Changes state. Read under somebody else's lease from now on. False where that has ended."""
        return self.session.read_under(self.number, share)

    def becomes_lease(self, *, surely: bool) -> None:
        """Changes state. A commit turned the reservation into a lease of the same number.

        If that is not sure, both are ended in the end, since ending what does not exist is no error.
        """
        self._ends = (LEASE,) if surely else (RESERVATION, LEASE)

    def lend(
        self, offset: int, nbytes: int, dtype: np.dtype[np.generic], shape: tuple[int, ...], *, writeable: bool
    ) -> Array:
        """Changes state. An array on the payload of a slot; the hold lasts while it or any view of it lives.

        ValueError once the hold has ended, and in a forked child: the slot may be another block's by then.
        """
        buffer = self.session.slab.payload_buffer(offset, nbytes)
        self._last_as_long_as(buffer)
        array: Array = np.ndarray(shape, dtype, cast("mmap", buffer))  # numpy's stubs do not know ctypes
        array.flags.writeable = writeable
        return array

    def grip(self) -> object:
        """Changes state. The hold lasts while what this gives lives: for bytes that are used here and not lent.

        ValueError as `lend`.
        """
        grip = _Grip()
        self._last_as_long_as(grip)
        return grip

    def receive(self, slots: bytes) -> bool:
        """Changes state. The daemon's answer. False if another daemon has taken over since, which never heard of it."""
        with self.session.guard:
            if not self._holding.is_lost:
                self._holding.slots = slots
            return not self._holding.is_lost

    def stop_lending(self) -> None:
        """Changes state. What is lent stays valid; nothing is lent any more."""
        self._lends = False

    def let_go(self) -> None:
        """Changes state. The owner is done. Idempotent."""
        if self._let_go:
            return
        self.session.lingering.add(self)  # first: the last array may go on another thread meanwhile
        self._lends = False
        self._let_go = True
        if self.has_views:
            _say_once()
        else:
            self._end()
            self.link.flush()

    def forget(self) -> None:
        """Changes state. The daemon has ended it already (a commit without living arrays)."""
        self._lends = False
        self._let_go = True
        self.session.end(self.number)

    def returned(self, number: int) -> None:
        """Changes state. No array lives on this buffer any more."""
        self._lent.pop(number, None)
        if self._let_go and not self._lent:
            self._end()

    def _last_as_long_as(self, thing: object) -> None:
        self._lent[id(thing)] = _Lent(thing, self)
        if not self._lends or not self.link.is_own_process:  # asked last: another thread may end it at any moment
            raise ValueError("the lease or reservation of this block has ended")

    def _end(self) -> None:
        self.session.lingering.discard(self)
        self.session.end(self.number, *self._ends)


class _Grip:
    """Stands for bytes in use."""

    __slots__ = ("__weakref__",)


class _Lent(weakref.ref[object]):
    """A lent buffer, or a grip. It knows the Hold that this comes back to."""

    __slots__ = ("hold", "number")
    hold: Hold
    number: int

    def __new__(cls, thing: object, hold: Hold) -> _Lent:
        lent = super().__new__(cls, thing, _say_returned)
        lent.hold, lent.number = hold, id(thing)
        return lent


def _say_returned(lent: _Lent) -> None:
    lent.hold.returned(lent.number)


_said: list[bool] = []  # anything with a lock in it could be held by whom a finaliser interrupts


def _say_once() -> None:
    if not _said:
        _said.append(True)
        log.warning("arrays outlive their lease or reservation: their blocks stay in memory until the arrays are gone")
