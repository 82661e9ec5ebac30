"""One path of the SSD tier: a folder of ours with a slab file in it, locked while it is open.

    slab    superblock (4 KiB) | slot size of each extent, u32 | scratch page | extents, from 4 MiB on
    index/  what is in the slots: kvstore.media.index
    lock    held by the daemon that uses the folder
    replaying   there while a daemon starts and reads the index

    superblock: magic 8, version u32, zero 4, set id 16, path number u32, number of paths u32, extent_nbytes u64,
                number of extents here u64, XXH3-64 of all that

The file has its full size from the start; an extent's blocks are taken from the system before it is used. The
superblock and the table go through the page cache, the extents around it where the file system allows.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.layout import PAGE_NBYTES
from kvstore.errors import TierUnavailable
from kvstore.media.folder import make_private

log = logging.getLogger("kvstore")

MAGIC = b"KVDISK\r\n"
VERSION = 2
TABLE_OFFSET = PAGE_NBYTES
DATA_OFFSET = 4 << 20  # room for the table of as many extents as slot numbers (u32) can name, so that data never moves
SCRATCH_OFFSET = DATA_OFFSET - PAGE_NBYTES

_SUPERBLOCK = struct.Struct("<8sI4x16sIIQQ")
_SUM = struct.Struct("<Q")


class Superblock(NamedTuple):
    """Whose slab this is. `number` of `num_paths`: its place among the paths of the set."""

    set_id: bytes
    number: int
    num_paths: int
    extent_nbytes: int
    num_extents: int

    @property
    def identity(self) -> bytes:
        """Query. What an index of this slab is marked with."""
        return self.set_id + struct.pack("<II", self.number, self.num_paths)

    @property
    def file_nbytes(self) -> int:
        return DATA_OFFSET + self.num_extents * self.extent_nbytes

    def __str__(self) -> str:
        return f"path {self.number + 1} of {self.num_paths} of set {self.set_id.hex()[:8]}"

    def packed(self) -> bytes:
        """Query. The superblock's bytes: within one sector, which drives write whole or not at all."""
        fixed = _SUPERBLOCK.pack(MAGIC, VERSION, *self)
        return fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed))


class Folder:
    """A folder of this user's alone, locked by this process."""

    def __init__(self, path: Path) -> None:
        """Changes state. OSError when it cannot be made, TierUnavailable when it is not ours to use."""
        self.path = path
        if not make_private(path):
            raise TierUnavailable(f"disk.path={path}: must belong to this user with mode 0700")
        self._lock = open(path / "lock", "ab", buffering=0)  # noqa: SIM115 - held until release
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            self._lock.close()
            if isinstance(exc, BlockingIOError):
                raise TierUnavailable(f"disk.path={path}: in use by another daemon, or named twice") from exc
            raise

    @property
    def slab_path(self) -> Path:
        return self.path / "slab"

    def superblock(self) -> Superblock | None:
        """Query. None where there is no slab. TierUnavailable when that file is not one we know: it stays as it is."""
        try:
            with self.slab_path.open("rb") as file:
                data = file.read(_SUPERBLOCK.size + _SUM.size)
        except FileNotFoundError:
            return None
        reason = _fault_of(data)
        if reason:
            raise TierUnavailable(f"disk.path={self.path}: the file `slab` {reason}; it is left as it is")
        return Superblock(*_SUPERBLOCK.unpack_from(data)[2:])

    def create_slab(self, superblock: Superblock) -> None:
        """Changes state. The file gets its name once it is whole."""
        new = self.slab_path.with_name("slab.new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, superblock.file_nbytes)
            os.posix_fallocate(fd, 0, DATA_OFFSET)
            os.pwrite(fd, superblock.packed(), 0)
            os.fsync(fd)
        except OSError:
            new.unlink()
            raise
        finally:
            os.close(fd)
        new.rename(self.slab_path)
        folder_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)

    def release(self) -> None:
        """Changes state. Unlock the folder and leave it as it is. Idempotent."""
        self._lock.close()


class SlabFile:
    """An open slab. Errors: OSError, a short transfer being EIO. Extents and slots are counted within this file."""

    def __init__(self, folder: Folder, found: Superblock, wanted: Superblock) -> None:
        """Changes state. Opens a slab and gives it the size that is wanted. What was cut off has no class any more."""
        self.path = folder.path
        self.superblock = wanted
        self._dirty = False
        self._sync_error: OSError | None = None
        with ExitStack() as undo:
            self._fd = os.open(folder.slab_path, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, self._fd)
            self.classes = self._resize(found)
            direct_fd = _open_direct(folder.slab_path)
            undo.pop_all()
        self.is_direct = direct_fd is not None
        self._data_fd = self._fd if direct_fd is None else direct_fd

    def allocate(self, extent: int) -> None:
        """Changes state. Take the extent's blocks from the system. Quick where that was done before."""
        os.posix_fallocate(self._fd, self._offset(extent), self.superblock.extent_nbytes)

    def set_class(self, extent: int, slot_nbytes: int) -> None:
        """Changes state. Durable with the next sync."""
        if self.classes[extent] != slot_nbytes:
            self.classes[extent] = slot_nbytes
            self._write_table(extent, self.classes[extent : extent + 1])
            self._dirty = True

    def read(self, extent: int, offset: int, into: memoryview) -> None:
        """Changes state. Fill `into` from that place in the extent."""
        self._require_all(os.preadv(self._data_fd, [into], self._offset(extent) + offset), into, "read")

    def write(self, extent: int, offset: int, data: memoryview) -> None:
        """Changes state. Durable with the next sync."""
        num_done = os.pwritev(self._data_fd, [data], self._offset(extent) + offset)
        self._dirty = True  # after the write, so that a sync meanwhile cannot clear it unserved
        self._require_all(num_done, data, "write")

    def sync(self) -> None:
        """Changes state. Once it failed, the system may forget what it could not write: then it fails for good."""
        if self._sync_error is not None:
            raise self._sync_error
        if not self._dirty:
            return
        self._dirty = False
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            self._sync_error = exc
            raise

    def close(self) -> None:
        """Changes state."""
        for fd in {self._fd, self._data_fd}:
            os.close(fd)

    def _offset(self, extent: int) -> int:
        assert 0 <= extent < self.superblock.num_extents
        return DATA_OFFSET + extent * self.superblock.extent_nbytes

    def _require_all(self, num_done: int, buffer: memoryview, verb: str) -> None:
        if num_done != buffer.nbytes:
            raise OSError(errno.EIO, f"short {verb}: {num_done} of {buffer.nbytes} bytes")

    def _resize(self, found: Superblock) -> npt.NDArray[np.uint32]:
        """Make the file as long as wanted; the table without entries of extents that were not there.

        In an order that a crash at any point leaves a slab that this function can mend.
        """
        size, wanted = os.fstat(self._fd).st_size, self.superblock
        num_whole = max(0, size - DATA_OFFSET) // wanted.extent_nbytes
        table = self._read_table(max(found.num_extents, wanted.num_extents))
        if num_whole < found.num_extents:
            lost = found.num_extents - num_whole
            log.warning("disk.path=%s: the slab was cut; extents=%d are lost", self.path, lost)
        if size < wanted.file_nbytes:
            os.ftruncate(self._fd, wanted.file_nbytes)
        if found != wanted or size < found.file_nbytes:
            table[min(num_whole, found.num_extents, wanted.num_extents) :] = 0
            self._write_table(0, table)
            os.pwrite(self._fd, wanted.packed(), 0)
            os.fdatasync(self._fd)
        if size > wanted.file_nbytes:
            os.ftruncate(self._fd, wanted.file_nbytes)
        return table[: wanted.num_extents]

    def _read_table(self, count: int) -> npt.NDArray[np.uint32]:
        data = os.pread(self._fd, 4 * count, TABLE_OFFSET)
        return np.frombuffer(data.ljust(4 * count, b"\0"), "<u4").astype(np.uint32)

    def _write_table(self, first: int, entries: npt.NDArray[np.uint32]) -> None:
        data = entries.astype("<u4").tobytes()
        if os.pwrite(self._fd, data, TABLE_OFFSET + 4 * first) != len(data):
            raise OSError(errno.EIO, "short write of the extent table")


def _fault_of(data: bytes) -> str:
    """Why this is not the superblock of a slab that we know; nothing if it is."""
    if data[: len(MAGIC)] != MAGIC:
        return "is not a slab of ours"
    if len(data) < _SUPERBLOCK.size + _SUM.size:
        return "has a damaged superblock"
    if (version := _SUPERBLOCK.unpack_from(data)[1]) != VERSION:
        return f"has format version {version}, not {VERSION}"
    if _SUM.unpack_from(data, _SUPERBLOCK.size) != (xxhash.xxh3_64_intdigest(data[: _SUPERBLOCK.size]),):
        return "has a damaged superblock"
    return ""


def _open_direct(path: Path) -> int | None:
    """A descriptor around the page cache, tried out with a page; None where the file system refuses."""
    fd = None
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        with mmap.mmap(-1, PAGE_NBYTES) as page:
            os.preadv(fd, [page], SCRATCH_OFFSET)
            os.pwritev(fd, [page], SCRATCH_OFFSET)
    except OSError as exc:
        if fd is not None:
            os.close(fd)
        if exc.errno != errno.EINVAL:
            raise
        return None
    return fd
