"""Which headers still lack checksums: what a device filled, and what ranks have summed each for itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.layout import Shard
from kvstore.core.leases import Filled, SpecEntry
from kvstore.core.moves import SumBlocks
from kvstore.core.stats import Stats
from kvstore.core.tier import Tier
from radix import Pin


class Sums:
    """Transfers that write sums into headers. Their blocks are pinned until that is done."""

    def __init__(self, memory: Tier, stats: Stats) -> None:
        self._memory = memory
        self._stats = stats
        self._pins: dict[int, Pin] = {}
        self._last_id = 0
        self._transfers: list[SumBlocks] = []

    @property
    def pins(self) -> list[Pin]:
        """Query."""
        return list(self._pins.values())

    def make_later(
        self,
        entry: SpecEntry,
        hashes: bytes,
        slots: Sequence[int | None],
        filled: Sequence[tuple[Shard, Filled]],
        *,
        in_headers: bool,
    ) -> int | None:
        """Changes state. Have made what is missing in the last blocks of a chain; the transfer's id, if there is any.

        `slots`: of those blocks; None for one that is not sealed. `filled`: by whom, with the sums that are known.
        `in_headers`: whether those are in the headers already.
        """
        rows = zip(slots, zip(*(each.sums for _, each in filled), strict=False), strict=False)
        wanted = [(slot, sums) for slot, sums in rows if slot is not None and not (in_headers and None not in sums)]
        if not wanted:
            return None
        self._last_id += 1
        self._pins[self._last_id] = self._memory.pin(self._memory.match(entry.root, hashes))
        slots_wanted, sums_known = zip(*wanted, strict=True)
        shards = tuple(shard for shard, _ in filled)
        self._transfers.append(SumBlocks(self._last_id, entry, slots_wanted, shards, sums_known))
        return self._last_id

    def take_transfers(self) -> list[SumBlocks]:
        """Changes state. Work for the movers since the last call."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def complete(self, transfer: SumBlocks) -> None:
        """Changes state. A mover is done with the slots of a transfer."""
        self._stats.blocks_summed += len(transfer.slots)
        self._memory.unpin(self._pins.pop(transfer.id))
