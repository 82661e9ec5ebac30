"""Least recently used leaf first; the same order as flat LRU over blocks whose chains are touched tail first."""

import heapq
from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radix.node import Node
from radix.owners import Leaves

_SLACK = 64  # below this many stale offers, cleaning up is not worth a call
_SLOT_BITS = 32


@dataclass(slots=True)
class Offers:
    """Nodes and when they were last used, in 12 bytes each."""

    ticks: "array[int]" = field(default_factory=lambda: array("q"))
    slots: "array[int]" = field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.ticks)

    def columns(self, start: int = 0) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Query. As numpy arrays, from offer `start` on."""
        return np.frombuffer(self.ticks, np.int64)[start:], np.frombuffer(self.slots, np.uintc)[start:]


def _offers(ticks: NDArray[np.int64], slots: NDArray[np.uint32]) -> Offers:
    return Offers(array("q", ticks.tobytes()), array("I", slots.tobytes()))


class LRU:
    """Lazy: a node that is used again or is no victim any more leaves a stale offer behind, skipped when it surfaces.

    Most offers are of nodes used just now. They are only appended, and sorted all at once when no older offer is left:
    12 bytes a node, where a heap of millions needs 40. Offers that come late, such as that of a node whose child was
    evicted, wait in a small heap; the coldest of the sorted ones join it one by one.

        heap ──> victim        sorted ──> heap        recent ──> sorted, when heap and sorted are empty
    """

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._heap: list[int] = []  # last use << _SLOT_BITS | slot
        self._sorted = Offers()
        self._next = 0  # sorted offers before this one have left
        self._recent = Offers()  # all used after `_horizon`
        self._horizon = -1  # last use of the last offer that was ever sorted: none in the heap is later
        self._num_left = _SLACK  # offers until the stale ones are cleaned up

    def __len__(self) -> int:
        """Query. Offers that are kept, the stale ones included: at most twice as many as ever counted, and _SLACK."""
        return len(self._heap) + len(self._sorted) - self._next + len(self._recent)

    def offer(self, slot: int, last_used: int) -> None:
        """Changes state."""
        self._num_left -= 1
        if self._num_left < 0:
            self._compact()
        if last_used > self._horizon:
            self._recent.ticks.append(last_used)
            self._recent.slots.append(slot)
        else:
            heapq.heappush(self._heap, last_used << _SLOT_BITS | slot)

    def victim(self) -> Node | None:
        """Query. The victim that was used longest ago."""
        while self._settle():
            last_used, slot = _unpacked(self._heap[0])
            node = self._leaves.victim_at(slot, last_used)
            if node is not None:
                return node
            heapq.heappop(self._heap)
        return None

    def _settle(self) -> bool:
        """Bring the coldest offer to the top of the heap. False: there are no offers."""
        if not self._heap and self._next == len(self._sorted):
            self._sort(*self._recent.columns())
            self._recent = Offers()
        if self._next < len(self._sorted):
            coldest = self._sorted.ticks[self._next] << _SLOT_BITS | self._sorted.slots[self._next]
            if not self._heap or coldest < self._heap[0]:
                heapq.heappush(self._heap, coldest)
                self._next += 1
        return bool(self._heap)

    def _sort(self, ticks: NDArray[np.int64], slots: NDArray[np.uint32]) -> None:
        """Changes state. These offers, without the stale ones, are the sorted ones now."""
        ticks, slots = self._current(ticks, slots)
        order = np.lexsort((slots, ticks))
        self._sorted, self._next = _offers(ticks[order], slots[order]), 0
        if len(ticks):
            self._horizon = max(self._horizon, self._sorted.ticks[-1])

    def _current(
        self, ticks: NDArray[np.int64], slots: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Query. Offers without those of nodes that were used again; there are the most of these."""
        kept = self._leaves.last_uses(slots) == ticks
        return ticks[kept], slots[kept]

    def _compact(self) -> None:
        """Changes state. Forget stale offers before they outnumber the others."""
        self._heap = [offer for offer in self._heap if self._is_current(offer)]
        heapq.heapify(self._heap)
        self._sorted, self._next = _offers(*self._current(*self._sorted.columns(self._next))), 0
        self._recent = _offers(*self._current(*self._recent.columns()))
        self._num_left = len(self) + _SLACK

    def _is_current(self, offer: int) -> bool:
        last_used, slot = _unpacked(offer)
        return self._leaves.victim_at(slot, last_used) is not None


def _unpacked(offer: int) -> tuple[int, int]:
    """(last use, slot) of a packed offer."""
    return offer >> _SLOT_BITS, offer & ((1 << _SLOT_BITS) - 1)
