"""Where a daemon's slab lies: a private folder on a tmpfs, with the slab, the sessions file and a lock.

slab-<epoch>    the slab of the daemon that started at <epoch>
sessions        one byte per session number; a client locks its byte for as long as it lives
lock            held by the daemon that owns the folder
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from pathlib import Path

from kvstore.errors import TierUnavailable

SHM = Path("/dev/shm")
PREFIX = "kvstore-"
SESSIONS_FILE = "sessions"


def default_folder(address: str) -> Path:
    """Query. The user's folder for the daemon at this address."""
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return SHM / f"{PREFIX}{os.geteuid()}-{digest}"


def all_folders() -> list[Path]:
    """Query. Default folders of this user's daemons, living or dead."""
    return sorted(SHM.glob(f"{PREFIX}{os.geteuid()}-*"))


class SlabFolder:
    """A folder of ours, locked by this process. No two daemons share one."""

    def __init__(self, path: Path) -> None:
        """Changes state. TierUnavailable when it cannot be made private or another daemon owns it."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = path.stat()
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise TierUnavailable(f"memory.path={path}: {exc.strerror}") from exc
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            os.close(self._lock_fd)
            raise TierUnavailable(f"memory.path={path}: must belong to this user with mode 0700")
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock_fd)
            raise TierUnavailable(f"memory.path={path}: in use by another daemon") from exc

    @property
    def sessions_path(self) -> Path:
        return self.path / SESSIONS_FILE

    def slab_path(self, epoch: int) -> Path:
        """Query."""
        return self.path / f"slab-{epoch}"

    def remove_old_slabs(self) -> None:
        """Changes state. Unlink what dead daemons left. Clients that still map one keep its pages until they let go."""
        for path in self.path.glob("slab-*"):
            path.unlink()

    def new_slab(self, epoch: int) -> int:
        """Changes state. A descriptor of a new, empty slab file."""
        return os.open(self.slab_path(epoch), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def release(self) -> None:
        """Changes state. Unlock the folder and leave it as it is."""
        os.close(self._lock_fd)

    def remove(self) -> None:
        """Changes state. Take the folder away; the lock goes last."""
        self.remove_old_slabs()
        for name in (SESSIONS_FILE, "lock"):
            (self.path / name).unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError as exc:
            if exc.errno not in (
                errno.ENOTEMPTY,
                errno.ENOENT,
            ):  # a file that is not ours stays, and the folder with it
                raise
        self.release()


def require_memory(capacity_nbytes: int, folder: Path | None) -> None:
    """Query. TierUnavailable, saying what to do, when a slab of this size cannot fit this machine or this container."""
    limits = [(_available_nbytes(), "memory is available on this machine")]
    limits += [(left, "is left in this cgroup") for left in _cgroup_left_nbytes()]
    if folder is not None:
        facts = os.statvfs(folder)
        limits.append((facts.f_bavail * facts.f_frsize, f"is free in {folder} (enlarge that tmpfs)"))
    for left, where in limits:
        if capacity_nbytes > left:
            need, have = capacity_nbytes / 2**30, left / 2**30
            raise TierUnavailable(f"memory.capacity={need:.2f}GiB is too large: only {have:.2f}GiB {where}")


def _available_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise TierUnavailable("/proc/meminfo has no MemAvailable")


def _cgroup_left_nbytes() -> list[int]:
    """What the limits above this process leave: cgroup v2 on the path to the root, and v1's one limit."""
    left = []
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / own[3:].lstrip("/")
    except (OSError, StopIteration):
        folder = Path("/sys/fs/cgroup/memory")
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for place in (folder, *folder.parents):
            try:
                left.append(int((place / limit).read_text()) - int((place / usage).read_text()))
            except (OSError, ValueError):  # no such file here, or "max": no limit at this level
                continue
    return left
