"""Who is alive. A session's process holds a POSIX record lock on one byte of the sessions file.

A record lock belongs to the process: a forked child does not inherit it, an exec keeps it, any death ends it, and it
goes early only if the process closes *any* descriptor of the file; so the client opens it once and never closes it.
Where the kernel vouches for the sender's pid, its pidfd must have fired too before slots are reused at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import struct
import threading
from contextlib import suppress
from pathlib import Path

from kvstore.errors import DaemonUnavailable

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_FLOCK = struct.Struct("hhqqi4x")

_held_files_lock = threading.Lock()
_held_files: dict[tuple[int, int], int] = {}  # (device, inode) -> the one descriptor of this process, never closed


class SessionsFile:
    """The daemon's view: one lock byte per session number."""

    def __init__(self, path: Path, num_sessions: int) -> None:
        """Changes state. Make the file, or go on with an old one: its inode stays, since clients hold locks on it."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._fd).st_size < num_sessions:
            os.ftruncate(self._fd, num_sessions)

    def is_held(self, number: int) -> bool:
        """Query. Whether a living process other than this one holds the byte."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        found = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return bool(found[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Changes state."""
        os.close(self._fd)


def hold_session(path: Path, number: int) -> int:
    """Changes state. Lock this session's byte for the life of this process; the descriptor that holds it.

    DaemonUnavailable if another process holds it, or the daemon's folder is gone.
    """
    try:
        fd = _descriptor(path)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number, os.SEEK_SET)
    except OSError as exc:
        raise DaemonUnavailable(f"sessions file {path}: {exc.strerror}") from exc
    return fd


def let_session_go(fd: int, number: int) -> None:
    """Changes state. Unlock a session's byte."""
    with suppress(OSError):  # somebody closed the descriptor, and with it went the lock
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, number, os.SEEK_SET)


def _descriptor(path: Path) -> int:
    with _held_files_lock:
        facts = os.stat(path)
        key = facts.st_dev, facts.st_ino
        if key not in _held_files:
            _held_files[key] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return _held_files[key]


# gone already, a pid of a namespace that is not ours, an old kernel, no descriptor left
_NOT_WATCHED = {errno.ESRCH, errno.EINVAL, errno.ENOSYS, errno.EMFILE, errno.ENFILE}


def _unless_scarce(fd: int) -> int | None:
    """Changes state. None, and closed, where half of all descriptors are in use: the rest is for connections.

    A new descriptor has the lowest number that is free.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or fd < limit // 2:
        return fd
    os.close(fd)
    return None


class Watched:
    """A client process as the daemon sees it."""

    def __init__(self, pid: int | None) -> None:
        """Changes state. `pid`: from the kernel, None where it is not visible."""
        self.pidfd: int | None = None
        if pid is not None:
            try:
                self.pidfd = _unless_scarce(os.pidfd_open(pid))
            except OSError as exc:
                if exc.errno not in _NOT_WATCHED:
                    raise

    def close(self) -> None:
        """Changes state."""
        if self.pidfd is not None:
            os.close(self.pidfd)
