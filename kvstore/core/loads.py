"""Promotion: blocks of the lower tier on their way into host memory.

A block on its way is in the memory tier's tree already, ARRIVING: whoever asks for it meanwhile waits for the same
load. Pins hold it in both tiers until its bytes are there, or are known never to come.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.core.leases import SpecEntry
from kvstore.core.moves import LoadBlocks, LoadedBlock, Outcome
from kvstore.core.placement import LoadGate
from kvstore.core.stats import Guard, Stats
from kvstore.core.tier import ARRIVING, FAILED, SEALED, Tier
from radix import HASH_NBYTES, BlockHash, Match, Pin

BACKGROUND_NBYTES_MAX = 64 << 20
BACKGROUND_SHARE_MAX = 0.25  # of memory, where that is less
OBSERVED_MS_MIN = 2.0


class Promoted(NamedTuple):
    """A chain that is in memory now, or on its way: `hashes` of all its blocks from number 0 on."""

    hashes: bytes
    num_blocks: int


@dataclass(slots=True)
class _Load:
    entry: SpecEntry
    start: int  # number of its first block in the chain
    blocks: tuple[LoadedBlock, ...]
    memory_pin: Pin
    disk_pin: Pin
    background: bool
    num_left: int


class Loads:
    """All loads that have not ended, and how fast the lower tier is."""

    def __init__(self, memory: Tier, disk: Tier, gate: LoadGate, stats: Stats) -> None:
        self.arriving_from: dict[int, int] = {}  # memory slot -> disk slot
        self._memory = memory
        self._disk = disk
        self._gate = gate
        self._stats = stats
        self._loads: dict[int, _Load] = {}
        self._last_id = 0
        self._transfers: list[LoadBlocks] = []
        self._background: deque[LoadBlocks] = deque()  # waits until no engine waits
        self._background_nbytes_max = min(
            BACKGROUND_NBYTES_MAX, int(memory.pool.capacity_nbytes * BACKGROUND_SHARE_MAX)
        )
        self._num_waited_for = 0  # blocks that a lease waits for
        self._busy_since_ms = 0.0
        self._moved_nbytes = 0
        self.queued_nbytes = 0
        self.num_ended = 0  # blocks whose load has ended, in whatever way

    @property
    def pins(self) -> list[tuple[Pin, Pin]]:
        """Query. (memory, disk) of each load."""
        return [(load.memory_pin, load.disk_pin) for load in self._loads.values()]

    def hurry(self, slots: array[int]) -> None:
        """Changes state. Somebody waits for these blocks of memory now: loads in the background that bring them
        are in the background no more, or they would wait as long as anybody waits for something else."""
        wanted = set(slots)
        for load_id, load in self._loads.items():
            if load.background and not wanted.isdisjoint(block.memory_slot for block in load.blocks):
                load.background = False
                self._num_waited_for += load.num_left
                for transfer in [each for each in self._background if each.id == load_id]:
                    self._background.remove(transfer)
                    self._transfers.append(transfer)

    def promote(
        self, entry: SpecEntry, match: Match, blocks_max: int, now_ms: float, *, background: bool
    ) -> Promoted | None:
        """Changes state. Bring up what memory lacks of a chain found in the lower tier: as many blocks as find room.

        `match` is fresh. `blocks_max`: of the chain, those in memory included. None: nothing can be brought up. What
        comes in the background has a share of memory.
        """
        pin, hashes, slots = self._pin_readable(entry, match, blocks_max)
        num_blocks, short = len(slots), bool(slots) and pin.node.short
        start = self._memory.match(entry.root, hashes).num_blocks
        if 0 < num_blocks <= start:  # memory has them by name, and found less there: its reader will see the damage
            self._disk.unpin(pin)
            return Promoted(hashes, num_blocks)
        wanted = num_blocks - start
        if background:
            wanted = min(wanted, self._background_room(entry.spec.slot_nbytes))
        taken = self._reserve(entry, hashes, wanted)
        num_blocks, short = start + len(taken), short and start + len(taken) == num_blocks
        hashes = hashes[: num_blocks * HASH_NBYTES]
        blocks = self._insert(entry, hashes, start, slots, taken, short) if taken else ()
        if not blocks:
            self._disk.unpin(pin)
            return None
        memory_pin = self._memory.pin(self._memory.match(entry.root, hashes))
        self._begin(_Load(entry, num_blocks - len(blocks), blocks, memory_pin, pin, background, len(blocks)), now_ms)
        return Promoted(hashes, num_blocks)

    def loaded(self, load_id: int, index: int, outcome: Outcome, now_ms: float) -> None:
        """Changes state. A block's load has ended. One that failed leaves both tiers, with all that hangs below it."""
        load = self._loads[load_id]
        block = load.blocks[index]
        if outcome is Outcome.OK:
            self._memory.settle(array("I", (block.memory_slot,)), SEALED)
            self._stats.blocks_loaded += 1
            self._stats.bytes_loaded += load.entry.spec.slot_nbytes
        else:
            self._stats.load_failures[outcome.value] += 1
            self._stats.guards[Guard.CHECKSUM] += outcome is Outcome.CORRUPT
            self._memory.settle(array("I", (block.memory_slot,)), FAILED)
            self._memory.remove(load.memory_pin, load.start + index)
            self._disk.remove(load.disk_pin, load.start + index)
        del self.arriving_from[block.memory_slot]
        self.num_ended += 1
        self._measure(load, now_ms)
        load.num_left -= 1
        if not load.num_left:
            self._end(load_id)

    def take_transfers(self) -> list[LoadBlocks]:
        """Changes state. Work for the movers; what nobody waits for only while nobody waits."""
        transfers, self._transfers = self._transfers, []
        if not self._num_waited_for and self._background:
            transfers.append(self._background.popleft())
        return transfers

    def _background_room(self, slot_nbytes: int) -> int:
        """How many more blocks may come up though nobody waits for them."""
        queued = sum(load.num_left * load.entry.spec.slot_nbytes for load in self._loads.values() if load.background)
        return (self._background_nbytes_max - queued) // slot_nbytes

    def _pin_readable(self, entry: SpecEntry, match: Match, blocks_max: int) -> tuple[Pin, bytes, array[int]]:
        """The leading blocks that are written already, pinned; they may be none."""
        pin = self._disk.pin(match, blocks_max)
        slots, hashes = self._disk.tree.path_slots(pin), self._disk.tree.path_hashes(pin)
        readable = self._disk.num_sealed(slots)
        if readable == len(slots):
            return pin, hashes, slots
        self._disk.unpin(pin)
        hashes = hashes[: readable * HASH_NBYTES]
        return self._disk.pin(self._disk.match(entry.root, hashes)), hashes, slots[:readable]

    def _reserve(self, entry: SpecEntry, hashes: bytes, wanted: int) -> array[int]:
        """Slots for as many of the missing blocks as there is room for."""
        if wanted <= 0:
            return array("I")
        parent = self._memory.pin(self._memory.match(entry.root, hashes))  # room must not be made of what we go on from
        slot_nbytes = entry.spec.slot_nbytes
        taken = self._memory.reserve(slot_nbytes, wanted)
        if taken is None:
            fits = min(wanted, self._memory.available(slot_nbytes))
            taken = self._memory.reserve(slot_nbytes, fits) if fits else None
            self._stats.loads_shortened += 1
        self._memory.unpin(parent)
        return taken or array("I")

    def _insert(
        self, entry: SpecEntry, hashes: bytes, start: int, sources: array[int], taken: array[int], short: bool
    ) -> tuple[LoadedBlock, ...]:
        pairs = dict(zip(taken, sources[start:], strict=False))
        self.arriving_from |= pairs
        inserted = self._memory.insert(entry.root, hashes, start, taken, short=short, state=ARRIVING)
        unused = set(inserted.unused)
        for slot in unused:
            del self.arriving_from[slot]
        self._memory.give_back(unused)
        return tuple(
            LoadedBlock(source, slot, BlockHash(_hash_at(hashes, start + index)))
            for index, (slot, source) in enumerate(pairs.items())
            if slot not in unused
        )

    def _begin(self, load: _Load, now_ms: float) -> None:
        self._last_id += 1
        self._loads[self._last_id] = load
        transfer = LoadBlocks(self._last_id, load.entry.spec.slot_nbytes, load.blocks)
        if not self.queued_nbytes:
            self._busy_since_ms = now_ms
        self.queued_nbytes += len(load.blocks) * transfer.slot_nbytes
        if load.background:
            self._background.append(transfer)
        else:
            self._transfers.append(transfer)
            self._num_waited_for += len(load.blocks)

    def _measure(self, load: _Load, now_ms: float) -> None:
        """Time the medium was busy, and what it gave meanwhile; in steps a clock can tell apart."""
        slot_nbytes = load.entry.spec.slot_nbytes
        self.queued_nbytes -= slot_nbytes
        self._num_waited_for -= not load.background
        self._moved_nbytes += slot_nbytes
        busy_ms = now_ms - self._busy_since_ms
        if busy_ms >= OBSERVED_MS_MIN or not self.queued_nbytes:
            self._gate.observe(self._moved_nbytes, busy_ms)
            self._busy_since_ms, self._moved_nbytes = now_ms, 0

    def _end(self, load_id: int) -> None:
        load = self._loads.pop(load_id)
        self._memory.unpin(load.memory_pin)
        self._disk.unpin(load.disk_pin)


def _hash_at(hashes: bytes, number: int) -> bytes:
    return hashes[number * HASH_NBYTES : (number + 1) * HASH_NBYTES]
