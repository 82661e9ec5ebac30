"""Reads the whole SSD tier and compares every block with its row and its checksum: `kvstore check` (class COR)."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import HEADER_NBYTES, PAGE_NBYTES, Header, parse_header
from kvstore.core.shards import is_whole
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.errors import TierUnavailable
from kvstore.media.disk import Disk
from radix import block_symbols_of

DELETES_PER_COMMIT = 4096


class Fault(StrEnum):
    """What is wrong with a block; each has its first fault only."""

    UNREADABLE = "unreadable"
    HEADER = "damaged header"
    IDENTITY = "another block than its row says"
    UNVERIFIABLE = "without a checksum of the whole"
    SUM = "wrong checksum"
    TWICE = "in another slot, too"
    ORPHAN = "without its parent"


class Report(NamedTuple):
    """`num_blocks` = `num_good` + all of `bad`. `num_behind`: good, but below a bad block, and so out of reach.

    `num_removed`: bad or behind, where they were to be removed; 0 otherwise.
    """

    num_blocks: int
    nbytes: int
    num_good: int
    num_behind: int
    num_removed: int
    bad: Mapping[Fault, int]


def verify(disk: Disk, on_progress: Callable[[int, int], None], fix: bool) -> Report:
    """Changes state with `fix`: then no bad block keeps its row, nor one below it. `on_progress(done, total)`: blocks.

    TierUnavailable when the index cannot be read or written.
    """
    rows, classes = disk.rows(), disk.classes()
    sizes = classes[rows["slot"] // SLOTS_PER_EXTENT_MAX]
    faults: dict[int, Fault] = {}
    with mmap.mmap(-1, int(sizes.max(initial=PAGE_NBYTES))) as buffer, memoryview(buffer) as view:
        for done, (row, slot_nbytes) in enumerate(zip(rows, sizes.tolist(), strict=True), 1):
            if fault := _fault(disk, row, view[:slot_nbytes]):
                faults[int(row["slot"])] = fault
            on_progress(done, len(rows))
    out_of_reach = _out_of_reach(rows, faults)
    if fix:
        for at in range(0, len(out_of_reach), DELETES_PER_COMMIT):
            disk.commit((), out_of_reach[at : at + DELETES_PER_COMMIT])
    return Report(
        num_blocks=len(rows),
        nbytes=int(sizes.sum()),
        num_good=len(rows) - len(faults),
        num_behind=len(out_of_reach) - len(faults),
        num_removed=len(out_of_reach) if fix else 0,
        bad=Counter(faults.values()),
    )


def _fault(disk: Disk, row: np.void, view: memoryview) -> Fault | None:
    """What a look at the slot alone shows."""
    slot = int(row["slot"])
    try:
        disk.read(slot, view.nbytes, view)
    except TierUnavailable:
        return Fault.UNREADABLE
    header = parse_header(bytes(view[:HEADER_NBYTES]))
    if header is None or header.payload_nbytes > view.nbytes - HEADER_NBYTES:
        return Fault.HEADER
    identity = header.identity
    symbols = block_symbols_of(identity.tokens, identity.keys_start, identity.keys_digest)
    if (identity.block_hash, identity.parent, identity.number, symbols) != (
        *(row["hash"].tobytes(), row["parent"].tobytes(), int(row["number"])),
        disk.symbols(slot),
    ):
        return Fault.IDENTITY
    return _payload_fault(header, view)


def _payload_fault(header: Header, view: memoryview) -> Fault | None:
    if not header.rects:
        return Fault.UNVERIFIABLE
    return None if is_whole(header, view) else Fault.SUM


def _out_of_reach(rows: npt.NDArray[np.void], faults: dict[int, Fault]) -> list[int]:
    """Slots of bad blocks and of all below them. Adds what only a look at all rows shows to `faults`."""
    present = {row["hash"].tobytes() for row in rows}
    sound: set[bytes] = set()
    slots = []
    for row in rows[np.lexsort((~rows["last_used"], rows["number"]))]:  # parents first, and the newest of twins
        slot, number = int(row["slot"]), int(row["number"])
        block_hash, parent = row["hash"].tobytes(), row["parent"].tobytes()
        if slot not in faults and block_hash in sound:
            faults[slot] = Fault.TWICE
        elif slot not in faults and number and parent not in present:
            faults[slot] = Fault.ORPHAN
        if slot in faults or (number and parent not in sound):
            slots.append(slot)
        else:
            sound.add(block_hash)
    return slots
