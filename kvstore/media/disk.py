"""The SSD tier's medium: slab files with their indexes, one pair per path. It stores bytes and rows; the core decides.

Extent e lies on path e % num_paths, as its extent e // num_paths. A slot's number is that of memory's slab: extent *
SLOTS_PER_EXTENT_MAX + index. A path that fails is taken out, and its extents with it; the others keep their numbers.

Order of writes: data, sync, commit of its rows. So a crash leaves data without a row, never a row without its data
(class RST). Every failure of a device, and every shortage, is TierUnavailable (class DSK).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.errors import TierUnavailable
from kvstore.media.index import ROW, BlockRow, IndexDamaged
from kvstore.media.paths import DiskGeometry, DiskPath, open_paths
from kvstore.media.rebuild import rebuild_rows

__all__ = ["ROW", "BlockRow", "Disk", "DiskGeometry"]

log = logging.getLogger("kvstore")

NO_FACTS: Mapping[str, int] = MappingProxyType({})


class Disk:
    """The open tier. Movers call it; `symbols` belongs to the loop. One thread at a time commits."""

    def __init__(self, paths: Sequence[Path], geometry: DiskGeometry, working: dict[int, DiskPath]) -> None:
        """Takes over `working`, by number of the path."""
        self.geometry = geometry
        self._paths = list(paths)
        self._working = working  # never changed in place: other threads go through it
        self._opened = list(working.values())
        self._unsound: set[int] = set()  # paths of which a sync or the index has failed

    @classmethod
    def open(
        cls,
        paths: Sequence[Path],
        capacity_nbytes: int | None,
        extent_nbytes: int | None = None,
        *,
        index_nbytes: int | None = None,
    ) -> Disk:
        """Changes state. Open or make the slabs; `capacity_nbytes` is that of all together. None: as they are.

        A slab that is there keeps its extent size. `index_nbytes`: bound of each index; default an eighth of the path.
        TierUnavailable when a path is not ours to use; one that fails is left out as long as another works.
        """
        geometry, working = open_paths(paths, capacity_nbytes, extent_nbytes, index_nbytes)
        buffered = [str(path.folder.path) for path in working.values() if not path.slab.is_direct]
        if buffered:
            log.warning("disk.path=%s: no direct I/O; blocks go through the page cache", ",".join(buffered))
        return cls(paths, geometry, working)

    @property
    def is_direct(self) -> bool:
        """Query. Whether all data goes around the page cache."""
        return all(path.slab.is_direct for path in self._working.values())

    @property
    def usable_extents(self) -> list[int]:
        """Query. Extents on paths that work."""
        working, num_paths = self._working, len(self._paths)
        return [extent for extent in range(self.geometry.num_extents) if extent % num_paths in working]

    @property
    def needs_rebuild(self) -> bool:
        """Query. Whether an index lacks rows: known after `open` and, for damage deeper inside, after `rows`."""
        return any(path.needs_rebuild for path in self._working.values())

    def path_of(self, slot: int) -> Path:
        """Query."""
        return self._paths[self._number(slot)]

    def allocate_extent(self, extent: int) -> None:
        """Changes state. Take the extent's space from the file system. TierUnavailable names the shortage."""
        path, local = self._place(extent)
        try:
            path.slab.allocate(local)
        except OSError as exc:
            raise path.unavailable(exc) from exc

    def classes(self) -> npt.NDArray[np.uint64]:
        """Query. [num_extents]: slot_nbytes each extent serves; 0 for none, and on paths that are out."""
        classes = np.zeros(self.geometry.num_extents, np.uint64)
        for number, path in self._working.items():
            classes[number :: len(self._paths)] = path.slab.classes
        return classes

    def set_class(self, extent: int, slot_nbytes: int) -> None:
        """Changes state. Slot size of an extent none of whose slots has a row; durable with the next sync."""
        path, local = self._place(extent)
        try:
            path.slab.set_class(local, slot_nbytes)
        except OSError as exc:
            raise path.unavailable(exc) from exc

    def read(self, slot: int, slot_nbytes: int, into: memoryview) -> None:
        """Changes state. A whole slot, straight into page-aligned memory; what it holds is for the caller to check."""
        assert into.nbytes == slot_nbytes
        self.read_head(slot, slot_nbytes, into)

    def read_head(self, slot: int, slot_nbytes: int, into: memoryview) -> None:
        """Changes state. The first pages of a slot, as many as fill `into`."""
        path, local = self._place(slot // SLOTS_PER_EXTENT_MAX)
        try:
            path.slab.read(local, self._offset(slot, slot_nbytes), into)
        except OSError as exc:
            raise path.unavailable(exc) from exc

    def write(self, slot: int, slot_nbytes: int, data: memoryview) -> None:
        """Changes state. A whole slot, straight from page-aligned memory; durable with the next sync."""
        assert data.nbytes == slot_nbytes
        path, local = self._place(slot // SLOTS_PER_EXTENT_MAX)
        try:
            path.slab.write(local, self._offset(slot, slot_nbytes), data)
        except OSError as exc:
            raise path.unavailable(exc) from exc

    def sync(self) -> None:
        """Changes state. Make durable what was written before. Where it fails once, it fails until that path is out."""
        for number, path in self._working.items():
            try:
                path.slab.sync()
            except OSError as exc:
                self._unsound.add(number)
                raise path.unavailable(exc) from exc

    def commit(self, puts: Sequence[BlockRow], deletes: Sequence[int], facts: Mapping[str, int] = NO_FACTS) -> None:
        """Changes state. Durable on return; all or nothing per path. Deletes come first: a slot may be in both.

        Rows of a path that is out are passed over: that path is gone with all it holds. Facts are set by name.
        """
        for number, path in self._working.items():
            own_puts = [row for row in puts if self._number(row.slot) == number]
            own_deletes = [slot for slot in deletes if self._number(slot) == number]
            if not (own_puts or own_deletes or facts):
                continue
            try:
                path.commit(own_puts, own_deletes, facts)
            except (OSError, IndexDamaged) as exc:
                if isinstance(exc, IndexDamaged):
                    self._unsound.add(number)
                raise path.unavailable(exc) from exc
            facts = NO_FACTS

    def facts(self) -> dict[str, int]:
        """Query. They lie on the first path that works."""
        for path in self._working.values():
            try:
                return path.index.facts()
            except (OSError, IndexDamaged) as exc:
                raise path.unavailable(exc) from exc
        return {}

    def rows(self) -> npt.NDArray[np.void]:
        """Changes state. All rows that stand for a slot: ROW each. The next commits delete the others.

        An index found damaged here is set aside; its rows are missing, and `needs_rebuild` is set (class RST).
        """
        classes = self.classes()
        chunks = [np.zeros(0, ROW)]
        for number, path in self._working.items():
            try:
                chunks += self._rows_of(number, path, classes)
                path.replayed()
            except OSError as exc:
                raise path.unavailable(exc) from exc
        return np.concatenate(chunks)

    def symbols(self, slot: int) -> bytes:
        """Query. What the block in this slot says; nothing if the slot has no row. For the loop: about 1 us."""
        path = self._working.get(self._number(slot))
        if path is None:
            return b""
        try:
            return path.index.symbols(slot)
        except (OSError, IndexDamaged) as exc:
            raise path.unavailable(exc) from exc

    def rebuild(self, progress: Callable[[int, int], None]) -> None:
        """Changes state. Write the rows that indexes lack, from header pages. `progress(done, total)` in extents.

        Checksums of payloads are checked when blocks are read, as always (class COR).
        """
        paths = {number: path for number, path in self._working.items() if path.needs_rebuild}
        classes = self.classes()
        extents = [(e, int(classes[e])) for e in np.flatnonzero(classes).tolist() if e % len(self._paths) in paths]
        rebuild_rows(self, extents, progress)
        for path in paths.values():
            try:
                path.index.slab = path.slab.superblock.identity
            except (OSError, IndexDamaged) as exc:
                raise path.unavailable(exc) from exc
            path.needs_rebuild = False

    def fail_path(self, slot: int) -> list[int]:
        """Changes state. Take the path of this slot out of use; its extents. Its descriptors stay until `close`."""
        return self._take_out(self._number(slot))

    def fail_unsound(self) -> list[int]:
        """Changes state. Take the paths out of use on which no later write can be trusted; their extents."""
        return [extent for number in sorted(self._unsound) for extent in self._take_out(number)]

    def _take_out(self, number: int) -> list[int]:
        if number not in self._working:
            return []
        self._working = {other: path for other, path in self._working.items() if other != number}
        return list(range(number, self.geometry.num_extents, len(self._paths)))

    def close(self) -> None:
        """Changes state. For when no mover is at work on it. Idempotent."""
        self._working = {}
        while self._opened:
            self._opened.pop().close()

    def _number(self, slot: int) -> int:
        return slot // SLOTS_PER_EXTENT_MAX % len(self._paths)

    def _place(self, extent: int) -> tuple[DiskPath, int]:
        local, number = divmod(extent, len(self._paths))
        path = self._working.get(number)
        if path is None:
            raise TierUnavailable(f"disk.path={self._paths[number]}: out of use")
        return path, local

    def _offset(self, slot: int, slot_nbytes: int) -> int:
        offset = slot % SLOTS_PER_EXTENT_MAX * slot_nbytes
        assert offset + slot_nbytes <= self.geometry.extent_nbytes
        return offset

    def _stand_for_slots(
        self, slots: npt.NDArray[np.uint32], number: int, classes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        """Which slot numbers are of this path, in an extent with a class, and within it."""
        extents, indices = np.divmod(slots.astype(np.int64), SLOTS_PER_EXTENT_MAX)
        extents[extents >= len(classes)] = -1
        sizes = np.append(classes, np.uint64(0))[extents].astype(np.int64)  # -1: the zero appended
        fits = (sizes > 0) & ((indices + 1) * sizes <= self.geometry.extent_nbytes)
        stands: npt.NDArray[np.bool_] = fits & (extents % len(self._paths) == number)
        return stands

    def _rows_of(self, number: int, path: DiskPath, classes: npt.NDArray[np.uint64]) -> list[npt.NDArray[np.void]]:
        chunks = []
        try:
            for chunk in path.index.rows():
                stands = self._stand_for_slots(chunk["slot"], number, classes)
                path.stale.update(chunk["slot"][~stands].tolist())
                chunks.append(chunk[stands])
        except IndexDamaged as exc:
            path.replace_index(exc)
            return []
        return chunks
