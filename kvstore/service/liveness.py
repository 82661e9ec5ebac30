"""Who is alive, and who reads on. A session's process holds a POSIX record lock on one byte of the sessions file.

A record lock belongs to the process: a forked child does not inherit it, an exec keeps it, any death ends it, and it
goes early only if the process closes *any* descriptor of the file; so the client opens it once and never closes it.
Where the kernel vouches for the sender's pid, its pidfd must have fired too before slots are reused at once.

Bytes from the daemon's epoch on stand for shared leases. Their daemon holds them all exclusively, but for those of
leases that live: whoever gets a shared lock on one reads there as long as he has it, and until then the daemon does not
get it back. The byte at the epoch itself is nobody's: while it is held, the daemon lives, and so its word counts.
A reader's lock belongs to an open file description of its own, so that no other code of its process can lose it by
closing the file; forked children give up their part in that at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import struct
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

from kvstore.errors import DaemonUnavailable

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_FLOCK = struct.Struct("hhqqi4x")

_held_files: dict[tuple[int, int], int] = {}  # (device, inode) -> the one descriptor of this process, never closed
_reading_fds: dict[int, int] = {}  # such a descriptor -> another of the same file, for readers' locks, never closed
_readings: Counter[tuple[int | None, int]] = Counter()  # (descriptor, share) -> readers in this process
_admitted: set[int] = set()  # shares of stores in this process
_lock = threading.Lock()  # of all four


def _forget_in_child() -> None:
    """A forked child reads nothing: its parent's locks must end with the parent. Nor is whoever held `_lock` there."""
    global _lock
    _lock = threading.Lock()
    for fd in _reading_fds.values():
        os.close(fd)
    _reading_fds.clear()
    _readings.clear()
    _admitted.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class SessionsFile:
    """The daemon's view: one lock byte per session number."""

    def __init__(self, path: Path, num_sessions: int) -> None:
        """Changes state. Make the file, or go on with an old one: its inode stays, since clients hold locks on it."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._fd).st_size < num_sessions:
            os.ftruncate(self._fd, num_sessions)

    def is_held(self, number: int) -> bool:
        """Query. Whether a living process other than this one holds the byte."""
        return _is_locked(self._fd, number)

    def admit_from(self, epoch: int) -> None:
        """Changes state. This daemon gives out the shares above `epoch`, and has admitted nobody yet."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 0, epoch, os.SEEK_SET)

    def admit(self, share: int) -> None:
        """Changes state. From now on processes may begin to read under this number."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, share, os.SEEK_SET)

    def dismiss(self, share: int) -> bool:
        """Changes state. Unless another process reads: none may begin to any more, and true."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, share, os.SEEK_SET)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Changes state."""
        os.close(self._fd)


class LocalReaders:
    """The same for a store in the readers' own process, to which locks of its own mean nothing."""

    def __init__(self) -> None:
        self._own: set[int] = set()

    def admit(self, share: int) -> None:
        """Changes state."""
        with _lock:
            self._own.add(share)
            _admitted.add(share)

    def dismiss(self, share: int) -> bool:
        """Changes state."""
        with _lock:
            if _readings[None, share]:
                return False
            self._own.discard(share)
            _admitted.discard(share)
            return True

    def close(self) -> None:
        """Changes state. The store is gone, and with it all its shares."""
        with _lock:
            _admitted.difference_update(self._own)


def start_reading(fd: int | None, epoch: int, share: int) -> bool:
    """Changes state. Read on under a shared lease of the daemon of this epoch, until `stop_reading` as often.

    False where it has ended for everybody, or the daemon is gone. `fd`: of `hold_session`; None for a store in this
    process.
    """
    with _lock:
        if fd is None:
            may = share in _admitted
        else:
            may = _readings[fd, share] > 0 or _lock_share(fd, epoch, share)
        if may:
            _readings[fd, share] += 1
        return may


def stop_reading(fd: int | None, share: int) -> None:
    """Changes state."""
    with _lock:
        _readings[fd, share] -= 1
        if not _readings[fd, share]:
            del _readings[fd, share]
            if fd is not None:
                _set_share(_reading_fds[fd], share, fcntl.F_UNLCK)


def _lock_share(fd: int, epoch: int, share: int) -> bool:
    try:
        if fd not in _reading_fds:
            _reading_fds[fd] = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        reading_fd = _reading_fds[fd]
        _set_share(reading_fd, share, fcntl.F_RDLCK)
    except OSError:
        return False
    # Asked after it: the daemon lived when the lock was given, and so it did not hold that byte itself.
    if _is_locked(reading_fd, epoch, fcntl.F_OFD_GETLK):
        return True
    _set_share(reading_fd, share, fcntl.F_UNLCK)
    return False


def _set_share(reading_fd: int, share: int, kind: int) -> None:
    fcntl.fcntl(reading_fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, share, 1, 0))


def _is_locked(fd: int, number: int, ask: int = fcntl.F_GETLK) -> bool:
    """Whether somebody else holds the byte: another process or, asked by F_OFD_GETLK, another description."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
    return bool(_FLOCK.unpack(fcntl.fcntl(fd, ask, asked))[0] != fcntl.F_UNLCK)


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
    with _lock:
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
