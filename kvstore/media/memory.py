"""The host slab: one file of shared memory that the daemon owns and every client of the node maps.

    superblock (4 KiB) | extent table: u64 each | slot table: SLOT_ROW each | extents, from a 2 MiB boundary

    superblock: magic 8, version u32, zero 4, epoch u64, num_extents u64, extent_nbytes u64, extents_ready u64

The file has its full size from the start and no pages. An extent's pages are taken from the system (posix_fallocate)
before any of its slots is handed out, so that a shortage is an error at start and never a SIGBUS in an engine. A
mapped slab is never truncated or set up again: each cold start makes a new inode. A daemon that takes a slab over
changes its epoch, by which clients that map it see that they have a new daemon.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import HEADER_NBYTES, PAGE_NBYTES, Header, parse_header
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX, slot_offset
from kvstore.core.tier import ARRIVING, RESERVED, SLOT_ROW, Tables
from kvstore.errors import TierUnavailable

MAGIC = b"KVSLAB\r\n"
VERSION = 2
HUGE_PAGE_NBYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11's mmap module does not name it

_SUPERBLOCK = struct.Struct("<8sI4xQQQ")
EPOCH_OFFSET = 16
READY_OFFSET = _SUPERBLOCK.size
_libc = ctypes.CDLL(None, use_errno=True)  # a CDLL call releases the GIL; mmap.madvise would hold it for 45 ms
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Geometry(NamedTuple):
    """Sizes of a slab, from which all its offsets follow."""

    num_extents: int
    extent_nbytes: int

    @property
    def capacity_nbytes(self) -> int:
        return self.num_extents * self.extent_nbytes

    @property
    def extent_table_offset(self) -> int:
        return PAGE_NBYTES

    @property
    def slot_table_offset(self) -> int:
        return self.extent_table_offset + _round_up(8 * self.num_extents, PAGE_NBYTES)

    @property
    def data_offset(self) -> int:
        table_nbytes = SLOT_ROW.itemsize * SLOTS_PER_EXTENT_MAX * self.num_extents
        return _round_up(self.slot_table_offset + table_nbytes, HUGE_PAGE_NBYTES)

    @property
    def file_nbytes(self) -> int:
        return self.data_offset + self.capacity_nbytes


class Slab:
    """A mapped slab. Writing rules: the daemon writes tables; a reservation's holder writes its slots; nobody else."""

    def __init__(self, fd: int, geometry: Geometry) -> None:
        """Takes over `fd`."""
        self.geometry = geometry
        self._fd: int | None = fd
        self._map = mmap.mmap(fd, geometry.file_nbytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address = self._bytes.ctypes.data
        self._data_offset = geometry.data_offset

    @classmethod
    def create(cls, fd: int, geometry: Geometry, epoch: int) -> Slab:
        """Changes state. Give an empty file a slab's size and superblock. TierUnavailable when it cannot have it."""
        try:
            os.ftruncate(fd, geometry.file_nbytes)
            os.posix_fallocate(fd, 0, geometry.data_offset)
        except OSError as exc:
            raise TierUnavailable(f"memory.capacity={geometry.capacity_nbytes}: {exc.strerror}") from exc
        slab = cls(fd, geometry)
        superblock = _SUPERBLOCK.pack(MAGIC, VERSION, epoch, geometry.num_extents, geometry.extent_nbytes)
        slab._map[: len(superblock)] = superblock
        return slab

    @classmethod
    def open(cls, path: Path, epoch: int) -> Slab:
        """Query. Map a daemon's slab. TierUnavailable when it is not the slab of that epoch."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            superblock = os.pread(fd, _SUPERBLOCK.size, 0)
        except OSError as exc:
            raise TierUnavailable(f"slab {path}: {exc.strerror}") from exc
        if len(superblock) < _SUPERBLOCK.size:
            superblock = bytes(_SUPERBLOCK.size)
        magic, version, found_epoch, num_extents, extent_nbytes = _SUPERBLOCK.unpack(superblock)
        try:
            if (magic, version, found_epoch) != (MAGIC, VERSION, epoch):
                raise TierUnavailable(f"slab {path}: not the slab of this daemon (version {version})")
            slab = cls(fd, Geometry(num_extents, extent_nbytes))
        except (OSError, ValueError) as exc:  # no address space, or a file that was cut
            raise TierUnavailable(f"slab {path}: {exc}") from exc
        finally:
            os.close(fd)  # the mapping has its own
        slab._fd = None
        return slab

    @classmethod
    def take_over(cls, path: Path, geometry: Geometry) -> Slab:
        """Query. The slab of a daemon that is gone, to go on with. TierUnavailable where that cannot be.

        The new owner says so by setting `epoch`.
        """
        with ExitStack() as undo:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, fd)
            superblock = os.pread(fd, _SUPERBLOCK.size, 0).ljust(_SUPERBLOCK.size, b"\0")
            magic, version, _, *sizes, ready = (*_SUPERBLOCK.unpack(superblock), _ready_of(fd))
            if (magic, version) != (MAGIC, VERSION):
                raise TierUnavailable(f"slab {path}: version {version}, this daemon writes version {VERSION}")
            if Geometry(*sizes) != geometry or os.fstat(fd).st_size != geometry.file_nbytes:
                raise TierUnavailable(f"slab {path}: another memory.capacity, or cut short")
            needed = geometry.data_offset + ready * geometry.extent_nbytes
            if ready > geometry.num_extents or 512 * os.fstat(fd).st_blocks < needed:  # pages that are not there
                raise TierUnavailable(f"slab {path}: damaged superblock")
            slab = cls(fd, geometry)
            undo.pop_all()
        return slab

    @property
    def epoch(self) -> int:
        """Query. Of the daemon that owns the slab now."""
        return int.from_bytes(self.read(EPOCH_OFFSET, 8), "little")

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.write(EPOCH_OFFSET, epoch.to_bytes(8, "little"))

    @cached_property
    def tables(self) -> Tables:
        """The tables as arrays on the slab."""
        at, count = self.geometry.extent_table_offset, self.geometry.num_extents
        extents = np.frombuffer(self._map, np.uint64, count, at)
        slots = np.frombuffer(self._map, SLOT_ROW, count * SLOTS_PER_EXTENT_MAX, self.geometry.slot_table_offset)
        return Tables(extents, slots)

    @property
    def extents_ready(self) -> int:
        """Query. How many extents, from the first on, have their memory."""
        return int.from_bytes(self.read(READY_OFFSET, 8), "little")

    @extents_ready.setter
    def extents_ready(self, count: int) -> None:
        self.write(READY_OFFSET, count.to_bytes(8, "little"))

    def allocate_extent(self, extent: int) -> None:
        """Changes state. Take the extent's pages from the system and touch them.

        TierUnavailable when there are none.
        """
        offset = self._extent_offset(extent)
        assert self._fd is not None, "only the owner of an open slab allocates"
        try:
            os.posix_fallocate(self._fd, offset, self.geometry.extent_nbytes)
        except OSError as exc:
            name = errno.errorcode.get(exc.errno or 0, "?")
            raise TierUnavailable(f"extent {extent} of the slab: {exc.strerror} ({name})") from exc
        self.populate_extent(extent)

    def populate_extent(self, extent: int) -> None:
        """Changes state. Map the extent's pages into this process now, not at first touch.

        Best effort (Linux >= 5.14).
        """
        address = self._address + self._extent_offset(extent)
        _libc.madvise(address, self.geometry.extent_nbytes, MADV_POPULATE_WRITE)

    def offset(self, slot: int, slot_nbytes: int) -> int:
        """Query. Byte offset of a slot's header page in the file."""
        return self._data_offset + slot_offset(slot, slot_nbytes, self.geometry.extent_nbytes)

    def offsets(self, slots: bytes, slot_nbytes: int) -> npt.NDArray[np.int64]:
        """Query. Byte offsets of many slots (u32le). Callers who got them from elsewhere check `contains` first."""
        extents, indices = np.divmod(np.frombuffer(slots, "<u4").astype(np.int64), SLOTS_PER_EXTENT_MAX)
        offsets: npt.NDArray[np.int64] = extents * self.geometry.extent_nbytes + indices * slot_nbytes
        return offsets + self._data_offset

    def contains(self, offsets: npt.NDArray[np.int64], slot_nbytes: int) -> bool:
        """Query. Whether slots at these offsets lie within the slab."""
        return not len(offsets) or int(offsets.max()) + slot_nbytes <= self.geometry.file_nbytes

    def are_reserved(self, slots: bytes, slot_nbytes: int, generation: int) -> bool:
        """Query. Whether the daemon's table says the same of these slots (u32le, within the slab) as its answer."""
        numbers = np.frombuffer(slots, "<u4")
        rows, sizes = self.tables.slots[numbers], self.tables.extents[numbers // SLOTS_PER_EXTENT_MAX]
        return bool(((rows["state"] == RESERVED) & (rows["generation"] == generation) & (sizes == slot_nbytes)).all())

    def num_arrived(self, slots: bytes) -> int:
        """Query. How many of these slots (u32le, within the slab), from the first on, are not on their way up."""
        arriving = self.tables.slots["state"][np.frombuffer(slots, "<u4")] == ARRIVING
        return int(arriving.argmax()) if arriving.any() else len(arriving)

    def heads(self, offsets: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[np.uint8]:
        """Query. The first bytes of many slots, not more than a page of each: [B, nbytes], copied."""
        pages = np.ndarray(self.geometry.file_nbytes // PAGE_NBYTES, f"V{nbytes}", self._map, 0, (PAGE_NBYTES,))
        return pages[offsets // PAGE_NBYTES].view(np.uint8).reshape(len(offsets), nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Query. A copy of some bytes."""
        return self._map[offset : offset + nbytes]

    def write(self, offset: int, data: bytes) -> None:
        """Changes state."""
        self._map[offset : offset + len(data)] = data

    def slot(self, slot: int, slot_nbytes: int) -> memoryview:
        """Query. A whole slot, header and payload, for a medium to read from or write to."""
        offset = self.offset(slot, slot_nbytes)
        return memoryview(self._map)[offset : offset + slot_nbytes]

    def payload(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Query. A view of the first payload bytes of the slot at `offset`, for use under a lease or reservation."""
        return self._bytes[offset + HEADER_NBYTES : offset + HEADER_NBYTES + nbytes]

    def payload_buffer(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Query. The same as an object of its own, which lives exactly as long as any array made from it."""
        return (ctypes.c_char * nbytes).from_buffer(self._map, offset + HEADER_NBYTES)

    def header(self, slot: int) -> Header | None:
        """Query. The parsed header of a slot in use (the extent table knows its class); None when it is damaged."""
        slot_nbytes = int(self.tables.extents[slot // SLOTS_PER_EXTENT_MAX])
        return parse_header(self.read(self.offset(slot, slot_nbytes), HEADER_NBYTES))

    def headers(self, extent: int, slot_nbytes: int, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
        """Query. A view of the leading bytes of every slot in an extent of this slot size."""
        count = self.geometry.extent_nbytes // slot_nbytes
        return np.ndarray(count, dtype, self._map, self._extent_offset(extent), (slot_nbytes,))

    def close(self) -> None:
        """Changes state. No more memory is taken; the mapping goes when the last array on it does. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _extent_offset(self, extent: int) -> int:
        return self.geometry.data_offset + extent * self.geometry.extent_nbytes


def trim_heap() -> None:
    """Changes state. Give back to the system what a large piece of work left free in glibc's heap."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _ready_of(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 8, READY_OFFSET), "little")


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
