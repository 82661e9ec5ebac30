"""Where a daemon's slab lies: a private folder on a tmpfs, with the slab, the sessions file and a lock.

slab-<epoch>    the slab of the daemon that started at <epoch>
sessions        one byte per session number; a client locks its byte for as long as it lives
lock            held by the daemon that owns the folder
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from kvstore.errors import TierUnavailable

SHM = Path("/dev/shm")
PREFIX = "kvstore-"
SESSIONS_FILE = "sessions"
CGROUP_MEMBERSHIP, CGROUP_MOUNTS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def default_folder(address: str) -> Path:
    """Query. The user's folder for the daemon at this address."""
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return SHM / f"{PREFIX}{os.geteuid()}-{digest}"


def all_folders() -> list[Path]:
    """Query. Default folders of this user's daemons, living or dead."""
    return sorted(SHM.glob(f"{PREFIX}{os.geteuid()}-*"))


def make_private(path: Path) -> bool:
    """Changes state. A folder that this user alone can enter. False where there is one that is not ours, or shared.

    An empty one of ours becomes private: somebody has just made it for us. OSError when it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.stat()
    if facts.st_uid != os.geteuid():
        return False
    if not stat.S_IMODE(facts.st_mode) & 0o077:
        return True
    if any(path.iterdir()):
        return False
    path.chmod(0o700)
    return True


class SlabFolder:
    """A folder of ours, locked by this process. No two daemons share one."""

    def __init__(self, path: Path) -> None:
        """Changes state. TierUnavailable when it cannot be made private or another daemon owns it."""
        self.path = path
        try:
            if not make_private(path):
                raise TierUnavailable(f"memory.path={path}: must belong to this user with mode 0700")
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise TierUnavailable(f"memory.path={path}: {exc.strerror}") from exc
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock_fd)
            raise TierUnavailable(f"memory.path={path}: in use by another daemon") from exc
        if not self._holds_the_lock_file():
            os.close(self._lock_fd)
            raise TierUnavailable(f"memory.path={path}: another daemon was just ending there; try again")

    def _holds_the_lock_file(self) -> bool:
        """Whether what we locked is still what the folder shows: `remove` unlinks the file while it holds it."""
        try:
            return os.path.samestat(os.fstat(self._lock_fd), os.stat(self.path / "lock"))
        except FileNotFoundError:
            return False

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

    def old_slab(self) -> Path | None:
        """Query. The newest slab that a daemon left here."""
        return max(self.path.glob("slab-*"), default=None, key=lambda path: path.name)

    def new_slab(self, epoch: int) -> int:
        """Changes state. A descriptor of a new, empty slab file."""
        return os.open(self.slab_path(epoch), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def leave(self) -> None:
        """Changes state. The slab stays for the next daemon; without one, nothing does."""
        if self.old_slab() is None:
            self.remove()
        else:
            self.release()

    def release(self) -> None:
        """Changes state. Unlock the folder and leave it as it is."""
        os.close(self._lock_fd)

    def remove(self) -> None:
        """Changes state. Take the folder away; the lock goes last."""
        self.remove_old_slabs()
        for name in (SESSIONS_FILE, "lock"):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # it stays with a foreign file in it, as a mount point, or in a folder of others
            self.path.rmdir()
        self.release()


def require_memory(slab_nbytes: int, folder: Path | None) -> None:
    """Query. TierUnavailable, saying what to do, when a slab of this size cannot fit this machine or this container."""
    limits = [(_available_nbytes(), "memory is available on this machine")]
    limits += [(left, "is left in this cgroup") for left in _cgroup_left_nbytes()]
    if folder is not None:
        facts = os.statvfs(folder)
        limits.append((facts.f_bavail * facts.f_frsize, f"is free in {folder} (enlarge that tmpfs)"))
    for left, where in limits:
        if slab_nbytes > left:
            need, have = _size(slab_nbytes), _size(left)
            raise TierUnavailable(f"memory.capacity: a slab of {need} is too large: only {have} {where}")


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}GiB" if nbytes >= 2**30 else f"{nbytes >> 20}MiB"


def _available_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise TierUnavailable("/proc/meminfo has no MemAvailable")


def _cgroup_left_nbytes(membership: Path = CGROUP_MEMBERSHIP, mounts: Path = CGROUP_MOUNTS) -> list[int]:
    """What the limits above this process leave, from its group up to the root, in cgroup v2, v1 or both."""
    left = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names, mount = ("memory.max", "memory.current", "inactive_file "), mounts
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "
            mount = mounts / "memory"
        else:
            continue
        own = mount / path.lstrip("/")
        for place in (own, *own.parents):
            with suppress(OSError, ValueError):  # no such file here, or "max": no limit at this level
                left.append(_left_in(place, *names))
    return left


def _left_in(place: Path, limit: str, usage: str, cache: str) -> int:
    """What one group leaves; old file pages count as free, since the kernel drops them first."""
    used = int((place / usage).read_text())
    for line in (place / "memory.stat").read_text().splitlines():
        if line.startswith(cache):
            used -= int(line.removeprefix(cache))
    return int((place / limit).read_text()) - used
