"""Going on with the slab of an earlier daemon, under clients that are still alive.

They may read any slot that was sealed, and write any that was reserved, whatever this daemon knows of it. So until
each of them has been accounted for (it said hello and named what it holds, or it is dead), the tier is parking: what
becomes free is not reused, and nothing is evicted. Slots that were free are free.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.core.tier import Tier
from radix import LoadedBlocks, Pin


class Legacy(NamedTuple):
    """What a slab holds in slots of one size. `reserved`: neither free nor cached; somebody may be at work there."""

    slot_nbytes: int
    blocks: LoadedBlocks
    reserved: array[int]


class Takeover:
    """Which sessions of the earlier daemon live on, and which slots may be theirs."""

    def __init__(self, memory: Tier, legacies: Iterable[Legacy], strangers: Iterable[int]) -> None:
        """Changes state: adopts what is there. `strangers`: session numbers that a living process holds."""
        self.num_blocks = 0
        self.reserved: set[int] = set()
        self._memory = memory
        self._strangers = set(strangers)
        memory.parking = bool(self._strangers)
        for legacy in legacies:
            self.num_blocks += memory.adopt(legacy.slot_nbytes, legacy.blocks, legacy.reserved)
            self.reserved.update(legacy.reserved)

    @property
    def strangers(self) -> set[int]:
        """Query. Sessions that have yet to be accounted for."""
        return set(self._strangers)

    def claim(self, slots: Iterable[int]) -> tuple[tuple[Pin, ...], array[int]]:
        """Changes state. What a client says it still holds: pins on what is cached, and its reserved slots.

        Slots that are neither are ignored: the client held them under an even older daemon, or is mistaken.
        """
        pins: list[Pin] = []
        private = array("I")
        covered: set[int] = set()
        for slot in reversed(list(slots)):
            if slot in self.reserved:
                self.reserved.remove(slot)
                private.append(slot)
            elif slot not in covered and (pin := self._memory.tree.pin_slot(slot)) is not None:
                pins.append(pin)
                covered.update(self._memory.tree.path_slots(pin))
        return tuple(pins), private

    def account_for(self, number: int) -> None:
        """Changes state. This session has said what it holds, or its process is dead."""
        self._strangers.discard(number)
        if not self._strangers and self._memory.parking:
            self._memory.parking = False
            self._memory.unpark(self._memory.take_parked())

    def unclaimed(self) -> array[int]:
        """Changes state. Reserved slots that nobody claimed, once nobody is left who could."""
        if self._strangers:
            return array("I")
        slots, self.reserved = array("I", self.reserved), set()
        return slots
