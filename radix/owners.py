"""Which node holds which slot: arrays, so that questions about a million slots are vectorised."""

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from radix.node import Node

_NOBODY = -1
_GROWTH = 1 << 16  # slots; extents of any power of two below divide it


class Owners:
    """Slot -> node id in 4 bytes a slot; node id -> node, last use, and whether a pin holds it."""

    def __init__(self) -> None:
        self._owner: NDArray[np.int32] = np.empty(0, np.int32)
        self._nodes: list[Node | None] = []
        self._last_used = array("q")
        self._pinned = bytearray()
        self._free_ids: list[int] = []

    @property
    def num_nodes(self) -> int:
        """Query. Nodes that are enrolled."""
        return len(self._nodes) - len(self._free_ids)

    def enrol(self, node: Node) -> None:
        """Changes state. Give `node` an id, and itself the slots it has."""
        assert node.id < 0
        if not self._free_ids:
            self._free_ids.append(len(self._nodes))
            self._nodes.append(None)
            self._last_used.append(0)
            self._pinned.append(0)
        node.id = self._free_ids.pop()
        self._nodes[node.id] = node
        self._last_used[node.id] = node.last_used
        self._pinned[node.id] = node.pins > 0
        self.take(node, node.slots)

    def retire(self, node: Node) -> None:
        """Changes state. `node` is gone, and so is its claim to its slots."""
        self.give_back(node.slots)
        self._nodes[node.id] = None
        self._free_ids.append(node.id)
        node.id = -1

    def take(self, node: Node, slots: "array[int]") -> None:
        """Changes state. `node` holds `slots` from now on, which were nobody's."""
        if not slots:
            return
        numbers = np.frombuffer(slots, np.uintc)
        self._grow(int(numbers.max()) + 1)
        assert (self._owner[numbers] == _NOBODY).all(), "a slot in two places"
        self._owner[numbers] = node.id

    def give_back(self, slots: "array[int]") -> None:
        """Changes state. Nobody holds `slots` any more."""
        self._owner[np.frombuffer(slots, np.uintc)] = _NOBODY

    def _grow(self, num_slots: int) -> None:
        if num_slots > len(self._owner):
            wanted = max(num_slots, 2 * len(self._owner))
            grown = np.full(-(-wanted // _GROWTH) * _GROWTH, _NOBODY, np.int32)
            grown[: len(self._owner)] = self._owner
            self._owner = grown

    def touch(self, node: Node, tick: int) -> None:
        """Changes state."""
        node.last_used = self._last_used[node.id] = tick

    def set_pinned(self, node: Node, pinned: bool) -> None:
        """Changes state."""
        self._pinned[node.id] = pinned

    def nodes_in(self, extent: int, slots_per_extent: int) -> Iterator[Node]:
        """Query. Nodes that hold a slot of `extent`, each once, without those that leave between two answers."""
        owner = self._owner[extent * slots_per_extent : (extent + 1) * slots_per_extent]
        for node_id in np.unique(owner[owner != _NOBODY]).tolist():
            node = self._nodes[node_id]
            if node is not None:
                yield node

    def extents_by_heat(self, slots_per_extent: int, width: int) -> list[tuple[float, int, bool]]:
        """Query. (mean last use of its blocks, extent, whether no pin holds any of them), coldest first.

        Only the first `width` slot numbers of each extent are looked at.
        """
        assert _GROWTH % slots_per_extent == 0
        owner = self._owner.reshape(-1, slots_per_extent)[:, :width]
        owned = owner != _NOBODY
        num_blocks = owned.sum(axis=1)
        used = np.flatnonzero(num_blocks)
        ticks = np.where(owned, np.frombuffer(self._last_used, np.int64)[owner], 0).sum(axis=1)
        pinned = (owned & np.frombuffer(self._pinned, np.bool_)[owner]).any(axis=1)
        heat = ticks[used] / num_blocks[used]
        coldest_first = np.argsort(heat, kind="stable")
        used, heat = used[coldest_first], heat[coldest_first]
        return list(zip(heat.tolist(), used.tolist(), (~pinned[used]).tolist(), strict=True))

    def check(self, nodes: set[Node]) -> None:
        """Query. Assert that exactly `nodes` are enrolled, with what the arrays say of them."""
        assert {node for node in self._nodes if node is not None} == nodes
        assert np.count_nonzero(self._owner != _NOBODY) == sum(len(node.slots) for node in nodes)
        for node in nodes:
            assert self._nodes[node.id] is node
            assert self._last_used[node.id] == node.last_used
            assert bool(self._pinned[node.id]) == (node.pins > 0)
            assert not node.slots or (self._owner[np.frombuffer(node.slots, np.uintc)] == node.id).all()
