"""The tier below host memory, as the store sees it: look up, promote, write down, forget. Pure.

memory tier ── Writes ──> groups ──> medium         Loads: medium ──> memory tier
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.core.leases import SpecEntry
from kvstore.core.loads import Loads, Promoted
from kvstore.core.moves import LoadBlocks, Outcome, WriteGroup
from kvstore.core.placement import LinearCost, LoadGate, Plan, WriteBudget
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.core.stats import Stats
from kvstore.core.tier import Tier
from kvstore.core.writes import Writes
from kvstore.spec import KVSpec
from radix import HASH_NBYTES, BlockHash, LoadedBlocks, Match, Pin

QUEUE_SHARE = 0.25  # of host memory: what blocks may take that wait to be written
QUEUE_SHARE_BACK, HOLD_SHARE_BACK = 0.7, 0.5  # write-back: as much may be held back, so that the rest is clean or free


class LowerSettings(NamedTuple):
    """What an operator chose, and what the medium remembers."""

    is_write_back: bool = False
    write_budget_nbytes: int | None = None  # a day; None: no bound
    bytes_ever: int = 0
    budget_level_nbytes: int | None = None


class LowerTier:
    """One medium below host memory. It decides and remembers; the movers carry out.

    Made and filled (`adopt`) by whoever opens the medium, on any thread; `start` hands it to the store.
    """

    def __init__(
        self, extent_nbytes: int, num_extents: int, row_symbols_of: Callable[[int], bytes], settings: LowerSettings
    ) -> None:
        """`row_symbols_of`: block symbols of a slot whose row is committed."""
        self.settings = settings
        self.num_extents_lost = 0
        self._row_symbols_of = row_symbols_of
        self._writes: Writes | None = None
        self._served: set[BlockHash] = set()  # roots of specs whose blocks fit here
        self._memory_symbols_of: Callable[[int], bytes] = row_symbols_of
        states = np.zeros(num_extents * SLOTS_PER_EXTENT_MAX, np.uint8)
        self.tier = Tier(extent_nbytes, np.zeros(num_extents, np.uint64), states, self.symbols_of)
        self.tier.parking = True  # a slot is reused only once its row is gone

    def adopt(self, rows: npt.NDArray[Any], classes: npt.NDArray[np.uint64]) -> int:
        """Changes state. Blocks of an earlier life, from the medium's index; how many have a place in a chain.

        `rows`: fields slot, hash, parent, number, short, last_used. `classes`: slot size of each extent.
        """
        size_of_row = classes[rows["slot"] // SLOTS_PER_EXTENT_MAX]
        kept = 0
        for slot_nbytes in np.unique(size_of_row).tolist():
            own = rows[size_of_row == slot_nbytes]
            blocks = LoadedBlocks(
                own["slot"], own["hash"], own["parent"], own["number"], own["short"] != 0, own["last_used"]
            )
            kept += self.tier.adopt(slot_nbytes, blocks, array("I"))
        return kept

    def start(self, memory: Tier, memory_symbols_of: Callable[[int], bytes], stats: Stats, now_ms: float) -> None:
        """Changes state. Below this memory tier from now on."""
        settings, capacity = self.settings, memory.pool.capacity_nbytes
        self._memory, self._memory_symbols_of, self._stats = memory, memory_symbols_of, stats
        self.gate = LoadGate()
        self.loads = Loads(memory, self.tier, self.gate, stats)
        self.budget = WriteBudget(settings.write_budget_nbytes, now_ms, settings.budget_level_nbytes)
        back = settings.is_write_back
        self._writes = Writes(
            memory,
            self.tier,
            self.budget,
            stats,
            queue_nbytes_max=int(capacity * (QUEUE_SHARE_BACK if back else QUEUE_SHARE)),
            hold_nbytes=int(capacity * HOLD_SHARE_BACK) if back else 0,
        )
        self._writes.bytes_ever = settings.bytes_ever

    @property
    def writes(self) -> Writes:
        assert self._writes is not None, "not started"
        return self._writes

    def add_spec(self, entry: SpecEntry) -> None:
        """Changes state. Blocks too large for an extent of this medium stay in memory."""
        slot_nbytes = entry.spec.slot_nbytes
        known = self.tier.tree.roots.get(entry.root)
        if known is not None and known.group != slot_nbytes:
            return  # the medium's table of slot sizes is damaged: nothing of this spec can be right there
        if slot_nbytes <= self.tier.pool.extent_nbytes:
            self.tier.add_spec(entry.root, slot_nbytes)
            self._served.add(entry.root)

    def serves(self, entry: SpecEntry) -> bool:
        """Query."""
        return entry.root in self._served

    def symbols_of(self, slot: int) -> bytes:
        """Query. Block symbols of a block here, also of one that is still being written."""
        source = self._writes.writing_from.get(slot) if self._writes is not None else None
        return self._row_symbols_of(slot) if source is None else self._memory_symbols_of(source)

    def choose(self, spec: KVSpec, num_blocks: int, num_tokens: int, prefill: LinearCost, now_ms: float) -> Plan:
        """Changes state. Whether so many blocks are worth loading, or a few, only to see how fast that is now."""
        return self.gate.choose(num_blocks, num_tokens, spec.slot_nbytes, self.loads.queued_nbytes, prefill, now_ms)

    def promote(
        self, entry: SpecEntry, match: Match, blocks_max: int, now_ms: float, *, background: bool
    ) -> Promoted | None:
        """Changes state. See Loads.promote."""
        return self.loads.promote(entry, match, blocks_max, now_ms, background=background)

    def loaded(self, load_id: int, index: int, outcome: Outcome, now_ms: float) -> None:
        """Changes state. A block's load has ended."""
        self.loads.loaded(load_id, index, outcome, now_ms)

    def damaged(self, group_id: int, disk_slot: int) -> None:
        """Changes state. A block that was to be written is not what was stored: memory forgets it."""
        self.writes.damaged(group_id, disk_slot)

    def forget(self, entry: SpecEntry, hashes: bytes) -> None:
        """Changes state. The last block of this chain, with all that follows it, if it is here."""
        if not self.serves(entry):
            return
        number = len(hashes) // HASH_NBYTES - 1
        match = self.tier.match(entry.root, hashes)
        if match.num_blocks > number:
            pin = self.tier.pin(match)
            self.tier.remove(pin, number)
            self.tier.unpin(pin)

    def lose_extents(self, extents: list[int]) -> None:
        """Changes state. A path is gone: forget what lies on these extents, and use them no more."""
        self.num_extents_lost += len(extents)
        self.tier.lose_extents(extents)

    def take_transfers(self, now_ms: float) -> Iterator[LoadBlocks | WriteGroup]:
        """Changes state. Work for the movers, loads first."""
        yield from self.loads.take_transfers()
        group = self.writes.start_group(now_ms)
        if group is not None:
            yield group

    def next_deadline_ms(self) -> float | None:
        """Query."""
        return self.writes.next_deadline_ms()

    @property
    def pins(self) -> tuple[list[Pin], list[Pin]]:
        """Query. All pins held for moves, in memory and here."""
        pairs = [*self.loads.pins, *self.writes.pins]
        return [m for m, _ in pairs if m is not None], [d for _, d in pairs if d is not None]

    def check(self) -> None:
        """Query. Assert that what moves is accounted for."""
        self.tier.check()
        self.tier.tree.check(self.pins[1])
