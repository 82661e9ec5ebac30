"""Makes the rows of a lost index anew from the header pages in the slab (class RST).

Slots that were freed still hold their last block: it comes back, too. Where a hash is found twice, the newer one stays.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import HEADER_NBYTES, Header, parse_header
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.errors import TierUnavailable
from kvstore.media.index import BlockRow
from radix import block_symbols_of

if TYPE_CHECKING:
    from kvstore.media.disk import Disk

log = logging.getLogger("kvstore")

FOUND = np.dtype([("slot", "<u4"), ("hash", "<u8", (2,)), ("generation", "<u8")])
SLOTS_PER_COMMIT = 1024

T = TypeVar("T")


def rebuild_rows(disk: Disk, extents: Sequence[tuple[int, int]], progress: Callable[[int, int], None]) -> None:
    """Changes state. Rows for all blocks in these extents, given with their slot sizes. TierUnavailable."""
    with mmap.mmap(-1, HEADER_NBYTES) as page, memoryview(page) as view:
        found = _commit_all(disk, extents, view, progress)
        doubles = _older_doubles(found)
        for batch in _batches(found["slot"][doubles].tolist()):
            disk.commit((), batch)
    log.info("ssd: index rebuilt extents=%d blocks=%d", len(extents), len(found) - int(doubles.sum()))


def _commit_all(
    disk: Disk, extents: Sequence[tuple[int, int]], view: memoryview, progress: Callable[[int, int], None]
) -> npt.NDArray[np.void]:
    found = [np.zeros(0, FOUND)]
    for done, (extent, slot_nbytes) in enumerate(extents, 1):
        slots = range(extent * SLOTS_PER_EXTENT_MAX, extent * SLOTS_PER_EXTENT_MAX + _num_slots(disk, slot_nbytes))
        for some in _batches(slots):
            headers = {slot: header for slot in some if (header := _header(disk, slot, slot_nbytes, view))}
            disk.commit([_row(slot, header) for slot, header in headers.items()], ())
            found.append(np.array([_facts(slot, header) for slot, header in headers.items()], FOUND))
        progress(done, len(extents))
    return np.concatenate(found)


def _num_slots(disk: Disk, slot_nbytes: int) -> int:
    return disk.geometry.extent_nbytes // slot_nbytes


def _header(disk: Disk, slot: int, slot_nbytes: int, view: memoryview) -> Header | None:
    """A header that may be what was written there. A slot that cannot be read has none.

    One whose blocks lie in slots of another size is left over from when the extent had that size: taken for a block
    here, it would keep its whole spec from this tier.
    """
    try:
        disk.read_head(slot, slot_nbytes, view)
    except TierUnavailable:
        return None
    header = parse_header(view.tobytes())
    return header if header is not None and header.identity.tokens and header.slot_nbytes == slot_nbytes else None


def _row(slot: int, header: Header) -> BlockRow:
    identity = header.identity
    symbols = block_symbols_of(identity.tokens, identity.keys_start, identity.keys_digest)
    hashes = identity.block_hash, identity.parent
    return BlockRow(slot, *hashes, identity.number, header.is_short, header.generation, symbols)


def _facts(slot: int, header: Header) -> tuple[object, ...]:
    block_hash = header.identity.block_hash
    halves = int.from_bytes(block_hash[:8], "little"), int.from_bytes(block_hash[8:], "little")
    return slot, halves, header.generation


def _older_doubles(found: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which blocks are there again, from a later reservation."""
    order = np.lexsort((found["generation"], found["hash"][:, 1], found["hash"][:, 0]))
    hashes = found["hash"][order]
    doubles = np.zeros(len(found), np.bool_)
    doubles[order[:-1]] = (hashes[:-1] == hashes[1:]).all(axis=1)
    return doubles


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    left = iter(items)
    while batch := list(islice(left, SLOTS_PER_COMMIT)):
        yield batch
