"""Many blocks at once become runs: what `PrefixTree.load` adds to a group that has none yet.

    blocks, in any order ── grow ──> Forest: runs, each after its parent, siblings side by side ── plant ──> nodes

Vectorised, but for the order of siblings (their symbols lie in slots' headers) and one object per run. It runs beside
threads that must not wait: numpy sorts and gathers without the interpreter's lock, all else goes in portions.
"""

import heapq
from array import array
from collections.abc import Iterator, Set
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radix.hashing import HASH_NBYTES
from radix.node import SLOT_NBYTES, Node, SymbolsOf, gives_way, kind
from radix.owners import distinct

_PORTION = 4096  # rows, runs or siblings that one call turns into Python objects, or sorts

Rows = NDArray[np.int64]
"""Rows of LoadedBlocks. As parents, numbers from the count of rows on are roots, and the one after them is none."""
Symbols = tuple[bytes, int]
"""The symbols of a block, and its row."""


class LoadedBlocks(NamedTuple):
    """Blocks in any order, one a row: columns of equal length."""

    slots: NDArray[np.uint32]
    hashes: NDArray[Any]  # HASH_NBYTES bytes a row, in one element or in as many
    parents: NDArray[Any]  # hashes of the blocks before, as above; of a block number 0, its root
    numbers: NDArray[np.uint32]  # place in the chain
    shorts: NDArray[np.bool_]
    last_used: NDArray[np.int64]


class Forest(NamedTuple):
    """Runs of blocks under roots. A run comes after its parent; siblings side by side, sorted by symbols."""

    roots: list[bytes]
    parents: Rows  # of each run: number of its root, or of its parent run, counted from len(roots) on
    starts: Rows  # of each run: its first place in the columns below; one more for their end
    slots: NDArray[np.uint32]
    hashes: NDArray[np.uint64]  # (B, 2)
    shorts: NDArray[np.bool_]  # of each run: whether it is one short block
    last_used: NDArray[np.int64]  # of each run, its descendants included
    lost: NDArray[np.uint32]  # slots of usable blocks that have no place

    def leaves(self) -> Iterator[tuple[int, int]]:
        """Query. (first slot, last use) of each run that no other follows."""
        is_leaf = np.ones(len(self.parents), np.bool_)
        is_leaf[self.parents[self.parents >= len(self.roots)] - len(self.roots)] = False
        slots, last_used = self.slots[self.starts[:-1][is_leaf]], self.last_used[is_leaf]
        for portion in _portions(len(slots)):
            yield from zip(slots[portion].tolist(), last_used[portion].tolist(), strict=True)

    def plant(self, roots: list[Node], group: int) -> list[Node]:
        """Query, but for the children of `roots`. The nodes of all runs, linked."""
        nodes = list(roots)
        for portion in _portions(len(self.parents)):
            self._plant_some(nodes, portion.start, portion.stop, group)
        for first, end in _groups_of(self.parents):
            parent = int(self.parents[first])
            nodes[parent].order = nodes[len(roots) + first : len(roots) + end]
        return nodes[len(roots) :]

    def _plant_some(self, nodes: list[Node], first: int, end: int, group: int) -> None:
        """Append the nodes of runs [first:end] to `nodes`, which holds the roots and those before."""
        starts = self.starts[first : end + 1]
        low, high = int(starts[0]), int(starts[-1])
        hashes, slots = self.hashes[low:high].tobytes(), self.slots[low:high].tobytes()
        kinds = kind(group), kind(group, short=True)
        parents, shorts = self.parents[first:end].tolist(), self.shorts[first:end].tolist()
        bounds = (starts - low).tolist()
        for (start, stop), parent, short in zip(pairwise(bounds), parents, shorts, strict=True):
            run_hashes = hashes[start * HASH_NBYTES : stop * HASH_NBYTES]
            run_slots = slots[start * SLOT_NBYTES : stop * SLOT_NBYTES]
            nodes.append(Node(run_hashes, run_slots, nodes[parent], kinds[short]))


def grow(blocks: LoadedBlocks, usable: NDArray[np.bool_], foreign: Set[bytes], symbols_of: SymbolsOf) -> Forest:
    """Query. The runs of all `usable` blocks that have a place: of the rules, see PrefixTree.load.

    `foreign`: hashes that are no roots of this group.
    """
    parents, roots = _parents_of(blocks, usable & ~_named_twice(blocks.slots), foreign)
    count, nowhere = len(parents), len(parents) + len(roots)
    placed = _ends(np.append(parents, np.arange(count, nowhere + 1)))[:count] < nowhere
    ranks, begun = _ranks(np.flatnonzero(placed), parents, blocks, symbols_of)
    placed[begun] = False
    lost = distinct(blocks.slots[usable & ~placed])
    return _cut_into_runs(blocks, np.flatnonzero(placed), parents, ranks, roots, lost)


def _parents_of(blocks: LoadedBlocks, usable: NDArray[np.bool_], foreign: Set[bytes]) -> tuple[Rows, list[bytes]]:
    """The parent of each row, and the roots. A row that cannot be has none."""
    count = len(blocks.slots)
    words = np.concatenate((_words(blocks.hashes), _words(blocks.parents)))
    same = _first_equal(words)
    usable = usable & (same[:count] == np.arange(count))
    named = same[count:]  # if below count: the first row that has the parent's hash
    is_first = blocks.numbers == 0
    is_root = np.zeros(len(words), np.bool_)
    is_root[named[usable & is_first]] = True
    names = [(name, words[name].tobytes()) for name in np.flatnonzero(is_root).tolist()]
    roots = {name: root for name, root in names if root not in foreign}
    root_of = np.full(len(words), count + len(roots))
    root_of[list(roots)] = np.arange(count, count + len(roots))
    above = np.where(named < count, named, 0)
    follows = (named < count) & usable[above] & ~blocks.shorts[above] & (blocks.numbers[above] + 1 == blocks.numbers)
    parents = np.where(is_first, root_of[named], np.where(follows, named, count + len(roots)))
    parents[~usable] = count + len(roots)
    return parents, list(roots.values())


def _ranks(rows: Rows, parents: Rows, blocks: LoadedBlocks, symbols_of: SymbolsOf) -> tuple[Rows, Rows]:
    """A number per block by which siblings are sorted by symbols, and the short blocks that begin a sibling."""
    by_parent = rows[np.argsort(parents[rows], kind="stable")]
    sizes = np.diff(_bounds(parents[by_parent]))
    several, shorts = by_parent[np.repeat(sizes > 1, sizes)], blocks.shorts.tobytes()
    read = _read_symbols(several, blocks.slots, symbols_of)
    ranked, begun = array("q"), array("q")
    for size in sizes[sizes > 1].tolist():
        siblings = _sorted(list(islice(read, size)))
        ranked.extend([row for _, row in siblings])
        begun.extend(
            [row for (lower, row), (upper, _) in pairwise(siblings) if shorts[row] and gives_way(lower, upper)]
        )
    ranks = np.zeros(len(parents), np.int64)
    ranks[np.frombuffer(ranked, np.int64)] = np.arange(len(ranked))
    return ranks, np.frombuffer(begun, np.int64)


def _cut_into_runs(
    blocks: LoadedBlocks, rows: Rows, parents: Rows, ranks: Rows, roots: list[bytes], lost: NDArray[np.uint32]
) -> Forest:
    """A block goes on in its parent's run if it is an only child, not short, and no block number 0."""
    count = len(parents)
    num_children = np.bincount(parents[rows], minlength=count + len(roots))
    goes_on = np.zeros(count, np.bool_)
    goes_on[rows] = (parents[rows] < count) & (num_children[parents[rows]] == 1) & ~blocks.shorts[rows]
    run_heads = _ends(np.where(goes_on, parents, np.arange(count)))
    heads = rows[~goes_on[rows]]
    heads = heads[np.lexsort((ranks[heads], parents[heads], blocks.numbers[heads]))]
    run_of = np.zeros(count, np.int64)
    run_of[heads] = np.arange(len(heads))
    runs = run_of[run_heads[rows]]
    in_order = np.lexsort((blocks.numbers[rows], runs))
    rows, starts = rows[in_order], np.append(0, np.bincount(runs, minlength=len(heads)).cumsum())
    above = parents[heads]
    under_root = above >= count
    above[under_root] -= count
    above[~under_root] = len(roots) + run_of[run_heads[above[~under_root]]]
    last_used = _with_descendants(blocks.last_used[rows], starts, above - len(roots), blocks.numbers[heads])
    hashes = _words(blocks.hashes)[rows]
    return Forest(roots, above, starts, blocks.slots[rows], hashes, blocks.shorts[heads], last_used, lost)


def _with_descendants(
    last_used: NDArray[Any], starts: Rows, parents: Rows, depths: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Last use of each run, its descendants included. `parents`: below 0 for roots; `depths`: first block's number."""
    latest = np.maximum.reduceat(last_used.astype(np.int64), starts[:-1]) if len(parents) else np.zeros(0, np.int64)
    for first, end in reversed(list(_groups_of(depths))):  # from the deepest on: children before their parents
        if parents[first] >= 0:  # else all of them begin at roots: only they are of depth 0
            families = _bounds(parents[first:end])[:-1]
            above = parents[first + families]
            latest[above] = np.maximum(latest[above], np.maximum.reduceat(latest[first:end], families))
    return latest


# --- what several steps share


def _words(hashes: NDArray[Any]) -> NDArray[np.uint64]:
    """(B, 2)."""
    return np.ascontiguousarray(hashes).view(np.uint64).reshape(-1, 2)


def _first_equal(words: NDArray[np.uint64]) -> Rows:
    """For each row of `words`, the first row that equals it."""
    order = np.lexsort((words[:, 1], words[:, 0]))
    in_order = words[order]
    is_new = np.ones(len(words), np.bool_)
    is_new[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    first = np.empty(len(words), np.int64)
    first[order] = order[is_new][np.cumsum(is_new) - 1]
    return first


def _named_twice(slots: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Which rows name a slot that another row names too."""
    order = np.argsort(slots)
    same = slots[order[1:]] == slots[order[:-1]]
    twice = np.zeros(len(slots), np.bool_)
    twice[order[1:][same]] = twice[order[:-1][same]] = True
    return twice


def _ends(steps: Rows) -> Rows:
    """Where each row ends when it goes on by `steps` until a row that stays: in log2 rounds of the longest way."""
    while True:
        further = steps[steps]
        if np.array_equal(further, steps):
            return steps
        steps = further


def _portions(count: int) -> Iterator[slice]:
    for start in range(0, count, _PORTION):
        yield slice(start, min(start + _PORTION, count))


def _bounds(values: NDArray[Any]) -> Rows:
    """Where each group of equal values begins, and where the last one ends."""
    if not len(values):
        return np.zeros(1, np.int64)
    return np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1, [len(values)]))


def _groups_of(values: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """(first, end) of each group of equal values."""
    bounds = _bounds(values)
    for portion in _portions(len(bounds) - 1):
        yield from pairwise(bounds[portion.start : portion.stop + 1].tolist())


def _read_symbols(rows: Rows, slots: NDArray[np.uint32], symbols_of: SymbolsOf) -> Iterator[Symbols]:
    for portion in _portions(len(rows)):
        yield from zip(map(symbols_of, slots[rows[portion]].tolist()), rows[portion].tolist(), strict=True)


def _sorted(siblings: list[Symbols]) -> list[Symbols]:
    if len(siblings) <= _PORTION:
        siblings.sort()
        return siblings
    return list(heapq.merge(*(sorted(siblings[portion]) for portion in _portions(len(siblings)))))
