"""What the movers are asked to do between tiers: values, nothing else."""

from __future__ import annotations

from array import array
from enum import Enum
from typing import NamedTuple

from kvstore.core.layout import Shard
from kvstore.core.leases import SpecEntry
from radix import BlockHash


class Outcome(Enum):
    """What became of one block's move. Whatever is not OK is a miss, counted by kind."""

    OK = "ok"
    CORRUPT = "corrupt"  # what came back is not what was written
    IO = "io"  # the medium said no


class SumBlocks(NamedTuple):
    """Write into the headers of these slots what their payloads sum to.

    `shards`: the parts that are summed each for itself. `sums`: per slot one for each part; None where it has to be
    made, since a device or a plain array store filled it.
    """

    id: int
    entry: SpecEntry
    slots: tuple[int, ...]
    shards: tuple[Shard, ...]
    sums: tuple[tuple[int | None, ...], ...]


class LoadedBlock(NamedTuple):
    """A block to bring up. What arrives must have this hash."""

    disk_slot: int
    memory_slot: int
    block_hash: BlockHash


class LoadBlocks(NamedTuple):
    """Bring blocks up, in this order; each is reported as soon as it is there and verified."""

    id: int
    slot_nbytes: int
    blocks: tuple[LoadedBlock, ...]


class WrittenBlock(NamedTuple):
    """A block to write down, and its place in its chain."""

    memory_slot: int
    disk_slot: int
    slot_nbytes: int
    block_hash: BlockHash
    parent: BlockHash
    number: int
    is_short: bool


class WriteGroup(NamedTuple):
    """Write blocks, parents first; sync; then forget the rows of `deletes` and add those of the blocks, at once."""

    id: int
    last_used: int
    blocks: tuple[WrittenBlock, ...]
    deletes: array[int]
    facts: dict[str, int]


Transfer = SumBlocks | LoadBlocks | WriteGroup
