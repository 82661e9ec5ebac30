"""Which node holds which slot: arrays, so that questions about a million slots are vectorised."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radix.node import Node, unpack_slot

_PAGE = 64  # slots
_CHUNK = 1 << 16  # elements that become Python objects in one call, which nothing interrupts


def distinct(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Query. Each value once, sorted. `np.unique` would hold the interpreter's lock for as long as it takes."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]


class Owners:
    """Slot -> row of its run's first slot; row of a run's first slot -> node, last use, whether a pin holds it.

    A run is named by its first slot, so nodes need no ids. Slot numbers are sparse: an extent has thousands of them and
    uses few when slots are big. So rows are given out by pages of 64 slot numbers, when one of them is first used.
    Zeroed memory would not do: with huge pages, which numpy asks for, one byte that is touched takes 2 MiB.

        slot ── page of slot // 64 ──> row = page * 64 + slot % 64
    """

    def __init__(self) -> None:
        self.num_nodes = 0
        self._page_of = array("I")  # slot // 64 -> page; 0 where none was given out
        self._number_of = array("I")  # page -> slot // 64
        self._first = array("I")  # row -> row of the run's first slot; 0: nobody holds this slot
        self._last_used = array("q")  # row of a run's first slot -> tick
        self._pinned = bytearray()  # row of a run's first slot -> bool
        self._nodes: list[Node | None] = []  # row of a run's first slot -> node
        self._add_page(0)  # page 0 is nobody's: its rows stand for all slots that have none

    def _add_page(self, number: int) -> None:
        self._number_of.append(number)
        self._first.frombytes(bytes(_PAGE * self._first.itemsize))
        self._last_used.frombytes(bytes(_PAGE * self._last_used.itemsize))
        self._pinned.extend(bytes(_PAGE))
        self._nodes.extend([None] * _PAGE)

    def _give_rows(self, slots: NDArray[np.uint32]) -> None:
        """Changes state. All `slots` have rows from now on."""
        numbers = slots // _PAGE
        num_missing = int(numbers.max(initial=0)) + 1 - len(self._page_of)
        self._page_of.frombytes(bytes(self._page_of.itemsize) * num_missing)
        unknown = numbers[np.frombuffer(self._page_of, np.uintc)[numbers] == 0]
        for number in distinct(unknown).tolist() if unknown.size else ():
            self._page_of[number] = len(self._number_of)
            self._add_page(number)

    def _row(self, slot: int) -> int:
        """Query. 0: it has none."""
        number = slot // _PAGE
        page = self._page_of[number] if number < len(self._page_of) else 0
        return page and page * _PAGE + slot % _PAGE

    def _rows(self, slots: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Query. Rows of slots below the last that has one; for those that have none, rows that nobody holds."""
        pages = np.frombuffer(self._page_of, np.uintc)[slots // _PAGE]
        return pages.astype(np.int64) * _PAGE + slots % _PAGE

    # --- one run

    def enrol(self, node: Node, last_used: int) -> None:
        """Changes state. `node` holds its slots from now on, which were nobody's."""
        self.take(node, node.slots)
        self._name(node, last_used)
        self.num_nodes += 1

    def take(self, node: Node, slots: bytes) -> None:
        """Changes state. `node` holds `slots` from now on, which were nobody's."""
        numbers = np.frombuffer(slots, "<u4")
        self._give_rows(numbers)
        first, rows = np.frombuffer(self._first, np.uintc), self._rows(numbers)
        assert not first[rows].any(), "a slot in two places"
        first[rows] = self._row(node.first_slot)

    def _name(self, node: Node, last_used: int) -> None:
        row = self._row(node.first_slot)
        self._nodes[row] = node
        self._last_used[row] = last_used
        self._pinned[row] = node.pins > 0

    def split(self, upper: Node, lower: Node) -> None:
        """Changes state. The run of `lower` has lost its beginning to the new node `upper`."""
        last_used = self.last_used(upper.first_slot)
        self._name(upper, last_used)
        rows = self._rows(np.frombuffer(lower.slots, "<u4"))
        np.frombuffer(self._first, np.uintc)[rows] = rows[0]
        self._name(lower, last_used)
        self.num_nodes += 1

    def retire(self, node: Node) -> None:
        """Changes state. `node` is gone, and so is its claim to its slots."""
        self._nodes[self._row(node.first_slot)] = None
        self.give_back(node.slots)
        self.num_nodes -= 1

    def give_back(self, slots: bytes) -> None:
        """Changes state. Nobody holds `slots` any more."""
        np.frombuffer(self._first, np.uintc)[self._rows(np.frombuffer(slots, "<u4"))] = 0

    def node_at(self, slot: int) -> Node | None:
        """Query. The node that holds a slot."""
        return self._nodes[self._first[self._row(slot)]]

    def last_used(self, slot: int) -> int:
        """Query. Last use of the run that begins in this slot."""
        return self._last_used[self._row(slot)]

    def rows_of(self, nodes: list[Node]) -> list[int]:
        """Query. Rows that name `nodes`. A plain loop: most paths are shorter than a numpy call is long."""
        page_of = self._page_of
        return [page_of[(slot := unpack_slot(node.slots)[0]) // _PAGE] * _PAGE + slot % _PAGE for node in nodes]

    def touch(self, rows: list[int], tick: int) -> None:
        """Changes state. The runs that these rows name were used at `tick`."""
        last_used = self._last_used
        for row in rows:
            last_used[row] = tick

    def set_pinned(self, rows: list[int], pinned: bool) -> None:
        """Changes state. A pin holds the runs that these rows name, or none does any more."""
        flags = self._pinned
        for row in rows:
            flags[row] = pinned

    # --- many at once

    def enrol_all(
        self, nodes: Sequence[Node], slots: NDArray[np.uint32], starts: NDArray[np.int64], last_used: NDArray[np.int64]
    ) -> None:
        """Changes state. Node i holds slots[starts[i]:starts[i + 1]] from now on, which were nobody's."""
        self._give_rows(slots)
        rows = self._rows(slots)
        heads = rows[starts[:-1]]
        first = np.frombuffer(self._first, np.uintc)
        assert not first[rows].any(), "a slot in two places"
        first[rows] = np.repeat(heads, np.diff(starts))
        np.frombuffer(self._last_used, np.int64)[heads] = last_used
        for start in range(0, len(nodes), _CHUNK):
            for row, node in zip(heads[start : start + _CHUNK].tolist(), nodes[start : start + _CHUNK], strict=True):
                self._nodes[row] = node
        self.num_nodes += len(nodes)

    def are_held(self, slots: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Query. Which of `slots` a node holds."""
        held = np.zeros(len(slots), np.bool_)
        known = np.flatnonzero(slots // _PAGE < len(self._page_of))
        held[known] = np.frombuffer(self._first, np.uintc)[self._rows(slots[known])] != 0
        return held

    def nodes_in(self, extent: int, slots_per_extent: int) -> list[Node]:
        """Query. Nodes that hold a slot of `extent`, each once."""
        end = min((extent + 1) * slots_per_extent, len(self._page_of) * _PAGE)
        slots = np.arange(extent * slots_per_extent, end, dtype=np.uint32)
        heads = distinct(np.frombuffer(self._first, np.uintc)[self._rows(slots)])
        return [node for row in heads.tolist() if (node := self._nodes[row]) is not None]

    def _held(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Query. For each slot that a node holds: row of its run's first slot, and its own number."""
        first = np.frombuffer(self._first, np.uintc)
        rows = np.flatnonzero(first)
        numbers = np.frombuffer(self._number_of, np.uintc)[rows // _PAGE]
        return first[rows], numbers * np.uintc(_PAGE) + (rows % _PAGE).astype(np.uintc)

    def extents_by_heat(self, slots_per_extent: int, width: int) -> list[tuple[float, int, bool]]:
        """Query. (mean last use of its blocks, extent, whether no pin holds any of them), coldest first."""
        first, slots = self._held()
        extents, places = np.divmod(slots, np.uintc(slots_per_extent))
        assert not (places >= width).any()
        num_blocks = np.bincount(extents)
        used = np.flatnonzero(num_blocks)
        ticks = np.bincount(extents, np.frombuffer(self._last_used, np.int64)[first])
        pinned = np.bincount(extents, np.frombuffer(self._pinned, np.bool_)[first]) > 0
        heat = ticks[used] / num_blocks[used]
        coldest_first = np.argsort(heat, kind="stable")
        used, heat = used[coldest_first], heat[coldest_first]
        return list(zip(heat.tolist(), used.tolist(), (~pinned[used]).tolist(), strict=True))

    def last_uses(self, slots: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Query. Last use of the runs that begin in `slots`; any number where none does."""
        return np.frombuffer(self._last_used, np.int64)[self._rows(slots)]

    def check(self, nodes: set[Node]) -> None:
        """Query. Assert that exactly `nodes` are enrolled, with what the arrays say of them."""
        assert {node for node in self._nodes if node is not None} == nodes
        assert self.num_nodes == len(nodes)
        assert np.count_nonzero(self._first) == sum(node.num_blocks for node in nodes)
        assert len(self._first) == len(self._last_used) == len(self._pinned) == len(self._nodes)
        for node in nodes:
            row = self._row(node.first_slot)
            assert self._nodes[row] is node
            assert bool(self._pinned[row]) == (node.pins > 0)
            rows = self._rows(np.frombuffer(node.slots, "<u4"))
            assert (np.frombuffer(self._first, np.uintc)[rows] == row).all()


@dataclass(frozen=True, slots=True)
class Leaves:
    """The runs of one group as an eviction policy sees them. It may read nodes but never changes them."""

    owners: Owners
    group: int

    def victim_at(self, slot: int, last_used: int) -> Node | None:
        """Query. The node whose run begins in `slot`, if it may lose its tail now, and was last used then."""
        node = self.owners.node_at(slot)
        if node is None or not node.is_victim or (node.group, node.first_slot) != (self.group, slot):
            return None
        return node if self.owners.last_used(slot) == last_used else None

    def last_uses(self, slots: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Query. Last use of the runs that begin in `slots`; any number where none does. All have been offered."""
        return self.owners.last_uses(slots)
