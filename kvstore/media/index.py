"""What is in the slots of one path of the SSD tier: an LMDB environment in the folder `index` beside its slab.

    rows     slot u32 -> number, last_used, hash, parent, short: the fields of ROW behind the first
    symbols  slot u32 -> what the block says, apart from the rows so that a replay does not read it
    facts    name -> u64
    about    "slab" -> which slab this index belongs to; absent while the index does not list all that the slab holds

Numbers are little endian; keys are LMDB integer keys, which are the host's, as LMDB files are. Classes RST, DSK.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt

log = logging.getLogger("kvstore")

ROW = np.dtype(
    [
        *(("slot", "<u4"), ("number", "<u4"), ("last_used", "<u8")),
        *(("hash", "V16"), ("parent", "V16"), ("short", "u1"), ("zero", "V7")),
    ]
)
KEY_NBYTES = 4
ROWS_PER_CHUNK = 8192  # one C call, under 10 ms with the GIL held
READERS_MAX = 16
ASIDE = "index.aside-"
_ABOUT_SLAB = b"slab"


class BlockRow(NamedTuple):
    """One block on the SSD. `symbols`: radix.block_symbols_of its tokens and keys."""

    slot: int
    block_hash: bytes
    parent: bytes
    number: int
    is_short: bool
    last_used: int
    symbols: bytes


class IndexDamaged(Exception):
    """The index is not what was written. Never leaves kvstore.media: an index can be rebuilt from its slab."""


class Index:
    """An open index. Errors: OSError, and IndexDamaged."""

    def __init__(self, folder: Path, map_nbytes: int) -> None:
        """Changes state. Opens the index, or makes an empty one that belongs to no slab yet."""
        try:
            self._env = lmdb.open(
                str(folder),
                map_size=map_nbytes,
                mode=0o600,
                max_readers=READERS_MAX,
                max_dbs=4,
                max_spare_txns=1,  # `symbols` then renews a reader instead of making one
                readahead=False,
            )
        except lmdb.Error as exc:
            raise _translated(exc) from exc
        try:
            _require_whole(self._env, folder / "data.mdb")
            self._rows = self._env.open_db(b"rows", integerkey=True)
            self._symbols = self._env.open_db(b"symbols", integerkey=True)
            self._facts = self._env.open_db(b"facts")
            self._about = self._env.open_db(b"about")
        except lmdb.Error as exc:
            self._env.close()
            raise _translated(exc) from exc
        except IndexDamaged:
            self._env.close()
            raise

    @property
    def slab(self) -> bytes:
        """Query. Which slab this index lists in full; empty for none."""
        try:
            with self._env.begin() as txn:
                return txn.get(_ABOUT_SLAB, b"", self._about)
        except lmdb.Error as exc:
            raise _translated(exc) from exc

    @slab.setter
    def slab(self, identity: bytes) -> None:
        try:
            with self._env.begin(write=True) as txn:
                txn.put(_ABOUT_SLAB, identity, db=self._about)
        except lmdb.Error as exc:
            raise _translated(exc) from exc

    def commit(self, puts: Sequence[BlockRow], deletes: Iterable[int], facts: Mapping[str, int]) -> None:
        """Changes state. One transaction, durable on return: deletes first, so that a slot may be in both."""
        try:
            with self._env.begin(write=True) as txn:
                for slot in deletes:
                    txn.delete(_key(slot), db=self._rows)
                    txn.delete(_key(slot), db=self._symbols)
                for row in puts:
                    txn.put(_key(row.slot), _packed(row), db=self._rows)
                    txn.put(_key(row.slot), row.symbols, db=self._symbols)
                for name, value in facts.items():
                    txn.put(name.encode(), value.to_bytes(8, "little"), db=self._facts)
        except lmdb.Error as exc:
            raise _translated(exc) from exc

    def rows(self) -> Iterator[npt.NDArray[np.void]]:
        """Query. All rows, in order of slots, in chunks."""
        try:
            with self._env.begin() as txn:
                items = txn.cursor(self._rows).iternext()
                while packed := b"".join(chain.from_iterable(islice(items, ROWS_PER_CHUNK))):
                    if len(packed) % ROW.itemsize:
                        raise IndexDamaged("a row has another size")
                    yield np.frombuffer(packed, ROW)
        except lmdb.Error as exc:
            raise _translated(exc) from exc

    def symbols(self, slot: int) -> bytes:
        """Query. Beside a commit of another thread too; nothing when there is no such row."""
        try:
            with self._env.begin() as txn:
                return txn.get(_key(slot), b"", self._symbols)
        except lmdb.Error as exc:
            raise _translated(exc) from exc

    def facts(self) -> dict[str, int]:
        """Query."""
        try:
            with self._env.begin() as txn:
                return {name.decode(): int.from_bytes(value, "little") for name, value in txn.cursor(self._facts)}
        except lmdb.Error as exc:
            raise _translated(exc) from exc

    def close(self) -> None:
        """Changes state. Idempotent."""
        self._env.close()


def open_index(folder: Path, map_nbytes: int, slab: bytes, *, is_slab_empty: bool, is_deadly: bool = False) -> Index:
    """Changes state. The index of a slab. One that is damaged, unfinished or another slab's is set aside (class RST).

    `is_deadly`: the last process that read it died of that. LMDB checks little of what it reads, and may abort.
    The caller looks at `slab` of the result: where it is not the slab asked for, the index has to be rebuilt.
    """
    reason = "there is none"
    if folder.exists():
        index, reason = (None, "who read it died") if is_deadly else _try_open(folder, map_nbytes, slab)
        if index:
            return index
        set_aside(folder)
    if not is_slab_empty:
        log.warning("%s does not open: %s; it will be rebuilt from the slab", folder, reason)
    index = new_index(folder, map_nbytes)
    if is_slab_empty:
        index.slab = slab
    return index


def _try_open(folder: Path, map_nbytes: int, slab: bytes) -> tuple[Index | None, str]:
    """The index, if it lists that slab; why not, otherwise."""
    try:
        index = Index(folder, map_nbytes)
        if (found := index.slab) == slab:
            return index, ""
    except IndexDamaged as exc:
        return None, str(exc)
    index.close()
    return None, "it belongs to another slab" if found else "it is unfinished"


def new_index(folder: Path, map_nbytes: int) -> Index:
    """Changes state. OSError, too, when an index just made is damaged: then the path is not fit for use."""
    try:
        return Index(folder, map_nbytes)
    except IndexDamaged as exc:
        raise OSError(errno.EIO, f"a new index is damaged: {exc}") from exc


def set_aside(folder: Path) -> None:
    """Changes state. Rename the index for whoever wants to look into it; the ones before it go."""
    older = list(folder.parent.glob(f"{ASIDE}*"))
    numbers = [int(tail) for path in older if (tail := path.name.removeprefix(ASIDE)).isdecimal()]
    folder.rename(folder.with_name(f"{ASIDE}{max(numbers, default=0) + 1}"))
    for path in older:
        shutil.rmtree(path)


def _require_whole(env: lmdb.Environment, data: Path) -> None:
    """LMDB maps the file: to read a page behind its end would be a SIGBUS."""
    pages, page_nbytes = env.info()["last_pgno"] + 1, env.stat()["psize"]
    if data.stat().st_size < pages * page_nbytes:
        raise IndexDamaged("its file was cut")


def _translated(exc: lmdb.Error) -> OSError | IndexDamaged:
    """LMDB passes on errors of the system as positive numbers; its own are below zero."""
    if isinstance(exc, lmdb.MapFullError | lmdb.TxnFullError):
        return OSError(errno.ENOSPC, f"the index is full: {exc}")
    if exc.code > 0 and exc.code != errno.EINVAL:
        return OSError(exc.code, str(exc))
    return IndexDamaged(str(exc))


def _key(slot: int) -> bytes:
    return slot.to_bytes(KEY_NBYTES, "little")


def _packed(row: BlockRow) -> bytes:
    """A row behind its key: the layout of ROW."""
    numbers = row.number.to_bytes(4, "little") + row.last_used.to_bytes(8, "little")
    packed = b"".join((numbers, row.block_hash, row.parent, bytes((row.is_short,)), bytes(7)))
    assert len(packed) == ROW.itemsize - KEY_NBYTES
    return packed
