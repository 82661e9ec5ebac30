"""The paths of the SSD tier: which of them work, whether they are one set in its order, and one path at work."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvstore.core.slots import EXTENT_NBYTES_MAX, SLOTS_PER_EXTENT_MAX, extent_nbytes_for
from kvstore.errors import TierUnavailable
from kvstore.media.index import BlockRow, IndexDamaged, new_index, open_index, set_aside
from kvstore.media.slabfile import Folder, SlabFile, Superblock

log = logging.getLogger("kvstore")

SLOT_NUMBERS = 1 << 32
INDEX_NBYTES_MIN, INDEX_NBYTES_MAX = 256 << 20, 1 << 40  # of address space; the file is as long as what is in it
STALE_PER_COMMIT_MAX = 4096

T = TypeVar("T")


class DiskGeometry(NamedTuple):
    """Sizes of the whole tier, all paths together."""

    num_extents: int
    extent_nbytes: int

    @property
    def capacity_nbytes(self) -> int:
        return self.num_extents * self.extent_nbytes


class DiskPath:
    """One path at work."""

    def __init__(self, folder: Folder, slab: SlabFile, map_nbytes: int) -> None:
        """Changes state. Opens the index of that slab. OSError."""
        self.folder, self.slab = folder, slab
        self.index_folder, self.map_nbytes = folder.path / "index", map_nbytes
        self.stale: set[int] = set()  # slots whose rows stand for nothing; the next commits delete them
        self._replaying = folder.path / "replaying"  # there from here to the end of the replay
        is_deadly, is_slab_empty = self._replaying.exists(), not slab.classes.any()
        self._replaying.touch(mode=0o600)
        identity = slab.superblock.identity
        self.index = open_index(
            self.index_folder, map_nbytes, identity, is_slab_empty=is_slab_empty, is_deadly=is_deadly
        )
        self.needs_rebuild = not self.index.slab

    def replayed(self) -> None:
        """Changes state. The index was read and nobody died. OSError."""
        self._replaying.unlink(missing_ok=True)

    def replace_index(self, reason: IndexDamaged) -> None:
        """Changes state. Go on with an empty index, to be rebuilt. OSError."""
        log.warning("%s is damaged: %s; it will be rebuilt from the slab", self.index_folder, reason)
        self.stale.clear()
        self.index.close()
        set_aside(self.index_folder)
        self.index = new_index(self.index_folder, self.map_nbytes)
        self.needs_rebuild = True

    def commit(self, puts: Sequence[BlockRow], deletes: Iterable[int], facts: Mapping[str, int]) -> None:
        """Changes state. With some of the stale rows. OSError, IndexDamaged."""
        self.stale.difference_update(row.slot for row in puts)
        stale = [slot for slot, _ in zip(self.stale, range(STALE_PER_COMMIT_MAX), strict=False)]
        self.index.commit(puts, [*stale, *deletes], facts)
        self.stale.difference_update(stale)

    def unavailable(self, exc: OSError | IndexDamaged) -> TierUnavailable:
        """Query. The one line for a failure here. EINVAL is none: what we asked for was wrong."""
        assert not isinstance(exc, OSError) or exc.errno != errno.EINVAL, exc
        return TierUnavailable(f"disk.path={self.folder.path}: {text_of(exc)}")

    def close(self) -> None:
        """Changes state."""
        with suppress(OSError):  # costs a rebuild at the next start, where even this does not work
            self.replayed()
        self.index.close()
        self.slab.close()
        self.folder.release()


def open_paths(
    paths: Sequence[Path], capacity_nbytes: int | None, extent_nbytes: int | None, index_nbytes: int | None
) -> tuple[DiskGeometry, dict[int, DiskPath]]:
    """Changes state. The set's geometry, and the paths at work by number. TierUnavailable: see Disk.open."""
    with ExitStack() as undo:
        folders = _each(paths, range(len(paths)), lambda number: _claimed(paths[number], undo))
        found = _each(paths, folders, lambda number: folders[number].superblock())
        known = _one_set(paths, found)
        if capacity_nbytes is None:
            capacity_nbytes = _capacity_of(paths, found, known)
        size = known.extent_nbytes if known else extent_nbytes or extent_nbytes_for(capacity_nbytes // len(paths))
        geometry = _geometry(paths, capacity_nbytes, size)
        set_id = known.set_id if known else os.urandom(16)
        map_nbytes = index_nbytes or _index_nbytes(capacity_nbytes // len(paths))

        def open_path(number: int) -> DiskPath:
            num_local = -(-(geometry.num_extents - number) // len(paths))
            wanted = Superblock(set_id, number, len(paths), size, num_local)
            return _open_path(folders[number], found[number], wanted, map_nbytes)

        working = _each(paths, found, open_path)
        undo.pop_all()
    for number in folders.keys() - working.keys():
        folders[number].release()
    return geometry, working


def text_of(exc: OSError | IndexDamaged) -> str:
    """Query. What happened, for one line."""
    if isinstance(exc, IndexDamaged):
        return f"the index is damaged: {exc}"
    return f"{exc.strerror} ({errno.errorcode.get(exc.errno or 0, '?')})"


def _each(paths: Sequence[Path], numbers: Iterable[int], make: Callable[[int], T]) -> dict[int, T]:
    """What `make` gives for each path, without those where the system refused; TierUnavailable when none is left."""
    made: dict[int, T] = {}
    failures: dict[int, OSError] = {}
    for number in numbers:
        try:
            made[number] = make(number)
        except OSError as exc:
            failures[number] = exc
    for number, failure in failures.items():
        if not made:
            raise TierUnavailable(f"disk.path={paths[number]}: {text_of(failure)}") from failure
        log.error("disk.path=%s: %s; going on without it", paths[number], text_of(failure))
    return made


def _claimed(path: Path, undo: ExitStack) -> Folder:
    folder = Folder(path)
    undo.callback(folder.release)
    return folder


def _open_path(folder: Folder, found: Superblock | None, wanted: Superblock, map_nbytes: int) -> DiskPath:
    if found is None:
        folder.create_slab(wanted)
    slab = SlabFile(folder, found or wanted, wanted)
    try:
        return DiskPath(folder, slab, map_nbytes)
    except OSError:
        slab.close()
        raise


def _one_set(paths: Sequence[Path], found: Mapping[int, Superblock | None]) -> Superblock | None:
    """The superblock that stands for all; None where all is new. TierUnavailable when they do not fit together."""
    known = {number: superblock for number, superblock in found.items() if superblock}
    if not known:
        return None
    first = next(iter(known.values()))
    for number, superblock in known.items():
        if superblock[:4] != (first.set_id, number, len(paths), first.extent_nbytes):
            slabs = "; ".join(f"{paths[each]} is {known[each]}" for each in known)
            raise TierUnavailable(f"disk.path: these {len(paths)} paths are no set, or not in its order: {slabs}")
    return first


def _capacity_of(paths: Sequence[Path], found: Mapping[int, Superblock | None], known: Superblock | None) -> int:
    """As the slabs that are there say. TierUnavailable where none is."""
    if known is None:
        raise TierUnavailable(f"disk.path={','.join(map(str, paths))}: there is no SSD tier")
    return sum((found.get(number) or known).num_extents for number in range(len(paths))) * known.extent_nbytes


def _geometry(paths: Sequence[Path], capacity_nbytes: int, extent_nbytes: int) -> DiskGeometry:
    assert extent_nbytes <= EXTENT_NBYTES_MAX
    geometry = DiskGeometry(capacity_nbytes // extent_nbytes, extent_nbytes)
    if not len(paths) <= geometry.num_extents <= SLOT_NUMBERS // SLOTS_PER_EXTENT_MAX:
        unit = f"{geometry.num_extents} extents of {extent_nbytes} bytes on {len(paths)} paths"
        raise TierUnavailable(f"disk.capacity={capacity_nbytes}: too small or too large: {unit}")
    return geometry


def _index_nbytes(capacity_nbytes: int) -> int:
    return min(INDEX_NBYTES_MAX, max(INDEX_NBYTES_MIN, capacity_nbytes // 8))
