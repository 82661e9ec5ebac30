"""Going on with the slab of an earlier daemon, under clients that are still alive.

They may read any slot that was sealed, and write any that was reserved, whatever this daemon knows of it. So until
each of them has been accounted for (it said hello and named what it holds, or it is dead), the tier is parking: what
becomes free is not reused, and nothing is evicted. Slots that were free are free.

What a client names is pinned where it is a block that can be found. All else is kept: reserved slots, blocks that left
the tree, before the restart or after it. Several may name the same slot; it is free once all of them have let it go.
What ranks filled together waits for a quarantine besides, claimed or not: one of them may be dead, and what its device
still writes must not land under another name.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvstore.core.tier import ARRIVING, FAILED, FREE, SEALED, Tier
from radix import LoadedBlocks, Pin


class Legacy(NamedTuple):
    """What a slab holds in slots of one size. `reserved`: neither free nor cached; somebody may be at work there.

    `joint`: those of them where several may be.
    """

    slot_nbytes: int
    blocks: LoadedBlocks
    reserved: array[int]
    joint: array[int]


class Takeover:
    """Which sessions of the earlier daemon live on, and which slots may be theirs."""

    def __init__(self, memory: Tier, legacies: Iterable[Legacy], strangers: Iterable[int]) -> None:
        """Changes state: adopts what is there. `strangers`: session numbers that a living process holds."""
        self.num_blocks = 0
        self.reserved: set[int] = set()
        self._joint: set[int] = set()
        self._memory = memory
        self._strangers = set(strangers)
        self._parked: set[int] = set()
        memory.parking = bool(self._strangers)
        for legacy in legacies:
            self.num_blocks += memory.adopt(legacy.slot_nbytes, legacy.blocks, legacy.reserved)
            self.reserved.update(legacy.reserved)
            self._joint.update(legacy.joint)

    @property
    def strangers(self) -> set[int]:
        """Query. Sessions that have yet to be accounted for."""
        return set(self._strangers)

    def claim(self, slots: array[int]) -> tuple[tuple[Pin, ...], array[int]]:
        """Changes state. What a client says it still holds: pins on what can be found, and what is kept for it.

        Slots that are neither are ignored: the client held them under an even older daemon, or is mistaken.
        """
        states = self._memory.states_of(slots)
        numbers = np.frombuffer(slots, np.uint32) if slots else np.empty(0, np.uint32)
        is_block = (states == SEALED) | (states == ARRIVING)
        private = array("I")
        for slot in dict.fromkeys(numbers[~is_block & (states != FREE)].tolist()):
            if self._keep(slot):
                private.append(slot)
        return self._pins(numbers[is_block].tolist()), private

    def account_for(self, number: int) -> int:
        """Changes state. This session has said what it holds, or its process is dead. Slots that may be reused now."""
        self._strangers.discard(number)
        if self._strangers or not self._memory.parking:
            return 0
        self._memory.parking = False
        parked = array("I", sorted(self._parked)) + self._memory.take_parked()
        self._parked.clear()
        self._memory.unpark(parked)
        return len(parked)

    def unclaim(self, slots: array[int]) -> None:
        """Changes state. A session ends while others are awaited: its carry-over may have failed half-way.

        Then its process claims these slots again, or dies before it can, and its device may still write there.
        """
        self._memory.let_go(slots)
        self._parked.update(self._memory.take_parked())
        for slot in set(slots) - self.reserved:
            if slot in self._parked:
                self._parked.remove(slot)
                self._memory.reserve_parked(slot)
                self.reserved.add(slot)
            elif self._memory.is_kept(slot):  # by others, who may let it go sooner than a late write lands
                self._memory.keep(slot)
                self.reserved.add(slot)

    def unclaimed(self) -> array[int]:
        """Changes state. Reserved slots that nobody claimed, or one of several, once nobody is left who could."""
        if self._strangers:
            return array("I")
        slots, self.reserved = array("I", sorted(self.reserved)), set()
        return slots

    def _pins(self, slots: list[int]) -> tuple[Pin, ...]:
        """A chain's last block holds all of it, so one pin is enough where it is whole."""
        tree, pins, covered = self._memory.tree, [], set[int]()
        while slots:
            slot = slots.pop()
            if slot not in covered and (pin := tree.pin_slot(slot)) is not None:
                pins.append(pin)
                covered.update(tree.path_slots(pin))
        return tuple(pins)

    def _keep(self, slot: int) -> bool:
        if not self._memory.is_kept(slot):
            self._parked.update(self._memory.take_parked())
            if slot in self._parked:
                self._parked.remove(slot)
                self._memory.reserve_parked(slot)
            elif slot in self.reserved and slot in self._joint:
                self._memory.keep(slot)  # for the quarantine
            elif slot in self.reserved:
                self.reserved.remove(slot)
            elif self._memory.state_of(slot) != FAILED:
                return False
        self._memory.keep(slot)
        return True
