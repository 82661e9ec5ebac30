"""What an earlier daemon left in a slab: read from its slot table and the headers, for a new one to go on with."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import (
    BLOCK_TOKENS_MAX,
    MAGIC,
    NBYTES_OFFSET,
    STATE_OFFSET,
    TOKENS_OFFSET,
    VERSION,
    identity_sum,
)
from kvstore.core.slots import SLOT_NBYTES_MIN, SLOTS_PER_EXTENT_MAX
from kvstore.core.takeover import Legacy
from kvstore.core.tier import FREE, SEALED
from kvstore.media.memory import Slab
from radix import LoadedBlocks

# The start of a header page, as layout.py draws it.
_HEAD = np.dtype(
    {
        "names": ["magic", "version", "num_tokens", "fingerprint", "hash", "parent", "number"],
        "formats": ["S8", "<u4", "<u4", "V32", "V16", "V16", "<u4"],
        "offsets": [0, 8, 12, 16, 48, 64, 100],
        "itemsize": STATE_OFFSET,
    }
)
_RAW = np.dtype((np.void, STATE_OFFSET))
_FIELDS = list(_HEAD.names or ())
_HEAD_FIELDS = np.dtype([(name, _HEAD[name]) for name in _FIELDS])


def read_legacies(slab: Slab) -> list[Legacy]:
    """Query. By slot size. A sealed slot whose header is damaged counts as reserved: nobody will hit it."""
    extents = slab.tables.extents[: slab.extents_ready]
    return [_legacy(slab, int(size)) for size in np.unique(extents) if _is_size(int(size), slab)]


def _is_size(slot_nbytes: int, slab: Slab) -> bool:
    return SLOT_NBYTES_MIN <= slot_nbytes <= slab.geometry.extent_nbytes


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
        sound.append(np.fromiter((_is_sound(page) for page in pages), np.bool_, len(pages)))
        unusable.append(numbers[~is_sealed & (states != FREE)])
    sealed, is_sound = np.concatenate(slots), np.concatenate(sound)
    reserved = np.concatenate((*unusable, sealed[~is_sound]))
    blocks = _blocks(slab, sealed[is_sound], np.concatenate(heads)[is_sound])
    return Legacy(slot_nbytes, blocks, array("I", reserved.tobytes()))


def _is_sound(head: np.void) -> bool:
    num_tokens, row = int(head["num_tokens"]), head.tobytes()
    if head["magic"] != MAGIC.rstrip(b"\0") or head["version"] != VERSION or num_tokens > BLOCK_TOKENS_MAX:
        return False
    nbytes = int.from_bytes(row[NBYTES_OFFSET : NBYTES_OFFSET + 8], "little")
    found = int.from_bytes(row[NBYTES_OFFSET + 8 : STATE_OFFSET], "little")
    return identity_sum(row[: TOKENS_OFFSET + 4 * num_tokens], nbytes) == found


def _blocks(slab: Slab, slots: npt.NDArray[np.uint32], heads: npt.NDArray[np.void]) -> LoadedBlocks:
    """A block is short if others of its spec hold more tokens. Last use is not kept: the order of writing stands in."""
    _, kind = np.unique(heads["fingerprint"].view("S32") if len(heads) else np.empty(0, "S32"), return_inverse=True)
    most = np.zeros(len(heads) + 1, np.uint32)
    np.maximum.at(most, kind, heads["num_tokens"])
    generations = slab.tables.slots["generation"][slots]
    order = np.empty(len(slots), np.int64)
    order[np.argsort(generations, kind="stable")] = np.arange(1, len(slots) + 1)
    return LoadedBlocks(slots, heads["hash"], heads["parent"], heads["number"], heads["num_tokens"] < most[kind], order)
