"""The kernel's part in kvstore.service.liveness: record locks of processes and of open file descriptions, on one file.

Readers take and give them back with the product's own code, and may be interrupted between any two of its calls.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from kvstore.service import liveness
from kvstore.service.liveness import SessionsFile
from tests.sim.machine import Machine

DAEMON_FD = 3


class Held:
    """What one process, or one open file description, has locked: bytes, and all from `first` on but those given up."""

    def __init__(self) -> None:
        self.kinds: dict[int, int] = {}
        self.first = math.inf

    def kind_of(self, number: int) -> int:
        """Query."""
        return self.kinds.get(number, fcntl.F_WRLCK if number >= self.first else fcntl.F_UNLCK)


class Described:
    """What a process knows of its descriptors and readers: globals of liveness.py, of which each has its own."""

    def __init__(self) -> None:
        self.files: dict[tuple[int, int], int] = {}
        self.reading_fds: dict[int, int] = {}
        self.readings: Counter[tuple[int | None, int]] = Counter()


class SimLocks:
    """Record locks on the sessions file. `runs`: whose code goes on now; the daemon's is None."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._own: dict[object, Held] = {}  # of processes
        self._files: dict[int, tuple[object, Held]] = {}  # by descriptor: whose, and its description's locks
        self._described: dict[object, Described] = {}
        self._current: object = None
        self._last_fd = DAEMON_FD

    @contextmanager
    def installed(self) -> Iterator[SessionsFile]:
        """Changes state. While the block runs, liveness.py stands on these. The daemon's view of the file."""
        names = [name for name in dir(fcntl) if name.startswith(("F_", "LOCK_"))]
        calls = SimpleNamespace(lockf=self._lockf, fcntl=self._fcntl, **{name: getattr(fcntl, name) for name in names})
        flags = {name: getattr(os, name) for name in ("O_RDWR", "O_CLOEXEC", "SEEK_SET")}
        files = SimpleNamespace(open=self._open, stat=lambda _: SimpleNamespace(st_dev=0, st_ino=0), **flags)
        with ExitStack() as stack:
            for name, thing in (("fcntl", calls), ("os", files), ("_lock", nullcontext())):
                stack.enter_context(mock.patch.object(liveness, name, thing))
            for name in ("_held_files", "_reading_fds", "_readings"):
                stack.enter_context(mock.patch.object(liveness, name, None))
            file = SessionsFile.__new__(SessionsFile)
            file._fd = DAEMON_FD
            yield file

    def runs(self, process: object) -> None:
        """Changes state. From now on this process's code goes on; None: the daemon's."""
        if process is not self._current:
            self._current = process
            own = self._described.setdefault(process, Described())
            liveness._held_files, liveness._reading_fds, liveness._readings = own.files, own.reading_fds, own.readings

    def lose(self, process: object) -> None:
        """Changes state. It has closed a descriptor of the file: its own locks are gone, those of descriptions not."""
        self._own.pop(process, None)

    def dies(self, process: object) -> None:
        """Changes state. The kernel lets go of all that it had locked; None: the daemon."""
        self._own.pop(process, None)
        self._described.pop(process, None)
        self._files = {fd: file for fd, file in self._files.items() if file[0] is not process}
        self._current = self  # nobody

    def shares_of(self, process: object) -> set[int]:
        """Query. Where this process has a reader's lock."""
        return {number for owner, held in self._files.values() if owner is process for number in held.kinds}

    def _open(self, path: Path | str, flags: int) -> int:
        self._last_fd += 1
        self._files[self._last_fd] = self._current, Held()
        return self._last_fd

    def _lockf(self, fd: int, command: int, length: int, start: int, whence: int) -> None:
        held = self._own.setdefault(self._current, Held())
        kind = fcntl.F_UNLCK if command == fcntl.LOCK_UN else fcntl.F_WRLCK
        if length:
            self._set(held, start, kind)
            return
        assert not any(max(other.kinds, default=0) >= start for other in self._others(held)), "shares of other daemons"
        held.first = start

    def _fcntl(self, fd: int, command: int, asked: bytes) -> bytes:
        kind, whence, start, length, pid = liveness._FLOCK.unpack(asked)
        if command == fcntl.F_OFD_SETLK:
            self._machine.pause()  # anything may happen before it
            self._set(self._files[fd][1], start, kind)
            return asked
        if command == fcntl.F_OFD_GETLK:
            self._machine.pause()
        held = self._own.get(self._current) if command == fcntl.F_GETLK else self._files[fd][1]
        found = max((other.kind_of(start) for other in self._others(held)), key=_strength, default=fcntl.F_UNLCK)
        return liveness._FLOCK.pack(found, whence, start, length, pid)

    def _set(self, held: Held, number: int, kind: int) -> None:
        if any(_conflict(kind, other.kind_of(number)) for other in self._others(held)):
            raise BlockingIOError("somebody else has locked it")
        held.kinds.pop(number, None)
        if held.kind_of(number) != kind:
            held.kinds[number] = kind

    def _others(self, held: Held | None) -> list[Held]:
        everybody = [*self._own.values(), *(file[1] for file in self._files.values())]
        return [other for other in everybody if other is not held]


def _strength(kind: int) -> int:
    return (fcntl.F_UNLCK, fcntl.F_RDLCK, fcntl.F_WRLCK).index(kind)


def _conflict(wanted: int, there: int) -> bool:
    return fcntl.F_UNLCK not in (wanted, there) and fcntl.F_WRLCK in (wanted, there)
