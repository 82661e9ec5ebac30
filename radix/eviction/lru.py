"""Least recently used leaf first; the same order as flat LRU over blocks whose chains are touched tail first."""

import heapq

from radix.node import Node

_SLACK = 64  # below this many stale entries, cleaning up is not worth a call


class LRU:
    """A lazy heap: a node that is touched or withdrawn leaves a stale entry behind, skipped when it surfaces.

    Not an ordered list moved on every touch: a touched chain comes on offer again only when its pins end. Stale entries
    never outnumber the nodes on offer by more than _SLACK, so the heap cannot grow with traffic.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []  # (last use, serial, node)
        self._offers: dict[Node, tuple[int, int]] = {}  # (last use, serial) of the one entry that counts
        self._serial = 0

    def __len__(self) -> int:
        """Query. Entries in the heap, the stale ones included."""
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Changes state. Among nodes used at the same tick, the one offered first goes first."""
        offered = self._offers.get(node)
        if offered is not None and offered[0] == node.last_used:
            return
        self._serial += 1
        self._offers[node] = (node.last_used, self._serial)
        heapq.heappush(self._heap, (node.last_used, self._serial, node))
        self._compact()

    def withdraw(self, node: Node) -> None:
        """Changes state."""
        if self._offers.pop(node, None) is not None:
            self._compact()

    def victim(self) -> Node | None:
        """Query. The node on offer that was used longest ago."""
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _counts(self, entry: tuple[int, int, Node]) -> bool:
        last_used, serial, node = entry
        return self._offers.get(node) == (last_used, serial)

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._offers) + _SLACK:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)
