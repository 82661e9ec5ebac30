"""What an earlier daemon left in a slab: read from its slot table and the headers, for a new one to go on with.

The tables have no checksums. What contradicts itself there, or the headers, is damage, and then nothing is gone on
with: where slots begin and end could be wrong, so that one block's bytes would be written over another's.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import (
    BLOCK_TOKENS_MAX,
    HEADER_NBYTES,
    MAGIC,
    NBYTES_OFFSET,
    PAGE_NBYTES,
    STATE_OFFSET,
    TOKENS_OFFSET,
    VERSION,
    identity_sum,
)
from kvstore.core.slots import SLOT_NBYTES_MIN, SLOTS_PER_EXTENT_MAX
from kvstore.core.takeover import Legacy
from kvstore.core.tier import FAILED, FREE, JOINT, SEALED
from kvstore.media.memory import Slab
from radix import LoadedBlocks

# The start of a header page, as layout.py draws it.
_HEAD = np.dtype(
    {
        "names": ["magic", "version", "num_tokens", "block_tokens", "hash", "parent", "number", "nbytes"],
        "formats": ["S8", "<u4", "<u2", "<u2", "V16", "V16", "<u4", "<u8"],
        "offsets": [0, 8, 12, 14, 48, 64, 100, NBYTES_OFFSET],
        "itemsize": STATE_OFFSET,
    }
)
_RAW = np.dtype((np.void, STATE_OFFSET))
_FIELDS = list(_HEAD.names or ())
_HEAD_FIELDS = np.dtype([(name, _HEAD[name]) for name in _FIELDS])


def are_sound(slab: Slab) -> bool:
    """Query. Whether the tables agree with themselves, and slot sizes with the blocks."""
    sizes, ready = slab.tables.extents.tolist(), slab.extents_ready
    if any(sizes[ready:]) or not all(_is_size(size, slab) for size in sizes if size):
        return False
    counts = [slab.geometry.extent_nbytes // size if size else 0 for size in sizes]
    states = slab.tables.slots["state"].reshape(len(sizes), SLOTS_PER_EXTENT_MAX)
    if any(row.max() > FAILED or row[count:].any() for row, count in zip(states, counts, strict=True)):
        return False
    extents = [extent for extent, size in enumerate(sizes) if size and (states[extent] == SEALED).any()]
    return not extents or not _names_another_size(slab, extents)


def _names_another_size(slab: Slab, extents: list[int]) -> bool:
    """Whether no block is where it should be, or one is whose slot should be of another size."""
    sizes = slab.tables.extents[extents].tolist()
    heads = [slab.headers(extent, size, _HEAD) for extent, size in zip(extents, sizes, strict=True)]
    states = slab.tables.slots["state"].reshape(-1, SLOTS_PER_EXTENT_MAX)[extents]
    sealed = [row[: len(head)] == SEALED for row, head in zip(states, heads, strict=True)]
    if any(at[1:].any() and not _has_magic(head[1:][at[1:]]) for head, at in zip(heads, sealed, strict=True)):
        return True  # only the first slot is at the same place whatever its size

    def column(name: str) -> npt.NDArray[Any]:
        return np.concatenate([head[name][at] for head, at in zip(heads, sealed, strict=True)])

    size_of = np.repeat(np.array(sizes, np.uint64), [int(at.sum()) for at in sealed])
    token_nbytes = column("nbytes") // np.maximum(column("num_tokens"), 1)
    nbytes, page = token_nbytes * column("block_tokens"), np.uint64(PAGE_NBYTES)
    size_wanted = (nbytes // page + (nbytes % page > 0)) * page + np.uint64(HEADER_NBYTES)
    odd = size_wanted != size_of
    if not odd.any():
        return False
    pages = [slab.headers(extent, size, _RAW)[at] for extent, size, at in zip(extents, sizes, sealed, strict=True)]
    return any(_is_whole(page) for page in np.concatenate(pages)[odd].view(_HEAD))


def _has_magic(heads: npt.NDArray[np.void]) -> bool:
    return bool((heads["magic"] == MAGIC).any())


def read_legacies(slab: Slab) -> list[Legacy]:
    """Query. By slot size. A sealed slot whose header is damaged counts as reserved: nobody will hit it."""
    extents = slab.tables.extents[: slab.extents_ready]
    return [_legacy(slab, int(size)) for size in np.unique(extents) if _is_size(int(size), slab)]


def _is_size(slot_nbytes: int, slab: Slab) -> bool:
    return SLOT_NBYTES_MIN <= slot_nbytes <= slab.geometry.extent_nbytes and slot_nbytes % PAGE_NBYTES == 0


def _legacy(slab: Slab, slot_nbytes: int) -> Legacy:
    per_extent = slab.geometry.extent_nbytes // slot_nbytes
    slots, heads, sound, unusable = [], [], [], []
    for extent in np.flatnonzero(slab.tables.extents[: slab.extents_ready] == slot_nbytes).tolist():
        numbers = np.arange(per_extent, dtype=np.uint32) + extent * SLOTS_PER_EXTENT_MAX
        states = slab.tables.slots["state"][numbers]
        is_sealed = states == SEALED
        pages = slab.headers(extent, slot_nbytes, _RAW)[is_sealed].view(_HEAD)  # a copy, the gaps between fields too
        slots.append(numbers[is_sealed])
        heads.append(pages[_FIELDS].astype(_HEAD_FIELDS))
        fits = pages["nbytes"] <= slot_nbytes - HEADER_NBYTES
        sound.append(fits & np.fromiter((_is_whole(page) for page in pages), np.bool_, len(pages)))
        unusable.append(numbers[~is_sealed & (states != FREE)])
    sealed, is_sound = np.concatenate(slots), np.concatenate(sound)
    reserved = np.concatenate((*unusable, sealed[~is_sound]))
    blocks = _blocks(slab, sealed[is_sound], np.concatenate(heads)[is_sound])
    joint = reserved[slab.tables.slots["owner"][reserved] >= JOINT]
    return Legacy(slot_nbytes, blocks, array("I", reserved.tobytes()), array("I", joint.tobytes()))


def _is_whole(head: np.void) -> bool:
    num_tokens, row = int(head["num_tokens"]), head.tobytes()
    if head["magic"] != MAGIC.rstrip(b"\0") or head["version"] != VERSION:
        return False
    if not num_tokens <= int(head["block_tokens"]) <= BLOCK_TOKENS_MAX:
        return False
    nbytes = int.from_bytes(row[NBYTES_OFFSET : NBYTES_OFFSET + 8], "little")
    found = int.from_bytes(row[NBYTES_OFFSET + 8 : STATE_OFFSET], "little")
    return identity_sum(row[: TOKENS_OFFSET + 4 * num_tokens], nbytes) == found


def _blocks(slab: Slab, slots: npt.NDArray[np.uint32], heads: npt.NDArray[np.void]) -> LoadedBlocks:
    """Last use is not kept: the order of writing stands in."""
    generations = slab.tables.slots["generation"][slots]
    order = np.empty(len(slots), np.int64)
    order[np.argsort(generations, kind="stable")] = np.arange(1, len(slots) + 1)
    is_short = heads["num_tokens"] < heads["block_tokens"]
    return LoadedBlocks(slots, heads["hash"], heads["parent"], heads["number"], is_short, order)
