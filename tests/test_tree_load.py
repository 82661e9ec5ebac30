"""Loading a tree: what has a place gets it, the rest is named, and both are as if the blocks had come one by one."""

import random
import time
from typing import NamedTuple

import numpy as np
import pytest

from radix import BlockHash, LoadedBlocks, Match, PrefixTree
from radix.load import grow

ROOT, OTHER_ROOT = BlockHash(bytes(16)), BlockHash(b"other root".ljust(16))
GROUP, OTHER_GROUP = 4096, 8192


class Row(NamedTuple):
    """A block whose hash is its name, padded, and whose symbols are what its name ends in."""

    slot: int
    name: str
    parent: str
    number: int
    short: bool = False
    last_used: int = 1


def hash_of(name: str) -> bytes:
    return ROOT if name == "root" else OTHER_ROOT if name == "other root" else name.encode().ljust(16, b".")


def columns(rows: list[Row]) -> LoadedBlocks:
    return LoadedBlocks(
        np.array([row.slot for row in rows], np.uint32),
        np.array([hash_of(row.name) for row in rows], "V16"),
        np.array([hash_of(row.parent) for row in rows], "V16"),
        np.array([row.number for row in rows], np.uint32),
        np.array([row.short for row in rows], np.bool_),
        np.array([row.last_used for row in rows], np.int64),
    )


class Loaded:
    """A tree, and the slots that had no place."""

    def __init__(self, *rows: Row, group: int = GROUP) -> None:
        self.headers = {row.slot: row.name.encode() for row in rows}
        self.tree = PrefixTree(self.headers.__getitem__)
        self.tree.add_root(OTHER_ROOT, OTHER_GROUP)
        self.load(*rows, group=group)

    def load(self, *rows: Row, group: int = GROUP) -> None:
        self.headers |= {row.slot: row.name.encode() for row in rows}
        self.lost = self.tree.load(group, columns(list(rows))).tolist()
        self.tree.check([])

    def match(self, *names: str) -> Match:
        match = self.tree.match(ROOT, b"".join(map(hash_of, names)))
        assert match is not None
        return match

    def num_known(self, *names: str) -> int:
        return self.match(*names).num_blocks


A, B, C = Row(7, "a", "root", 0), Row(3, "b", "a", 1), Row(5, "c", "b", 2)


def test_chain_in_any_order_becomes_one_run() -> None:
    loaded = Loaded(C, A, B)
    assert (loaded.lost, loaded.tree.num_nodes, loaded.tree.num_blocks(GROUP)) == ([], 1, 3)
    assert loaded.tree.path_slots(loaded.tree.pin(loaded.match("a", "b", "c"))).tolist() == [7, 3, 5]


def test_hash_columns_may_be_bytes_or_rows_of_bytes() -> None:
    rows = columns([A, B, C])
    as_bytes = rows._replace(
        hashes=rows.hashes.view(np.uint8).reshape(-1, 16), parents=rows.parents.view("S16").reshape(-1)
    )
    tree = PrefixTree(lambda slot: b"")
    assert tree.load(GROUP, as_bytes).size == 0
    assert tree.num_nodes == 1


def test_nothing_loads() -> None:
    loaded = Loaded()
    assert (loaded.lost, loaded.tree.num_blocks(GROUP)) == ([], 0)
    loaded.load(A)
    assert loaded.num_known("a") == 1


def test_runs_part_where_chains_do() -> None:
    loaded = Loaded(A, B, Row(1, "c1", "b", 2), Row(2, "c2", "b", 2), Row(8, "d", "c1", 3))
    assert (loaded.lost, loaded.tree.num_nodes) == ([], 3)
    assert loaded.num_known("a", "b", "c1", "d") == 4
    assert loaded.num_known("a", "b", "c2") == 3


def test_children_are_sorted_by_symbols_also_when_there_are_thousands() -> None:
    names = [f"{number:05}" for number in range(9000)]
    random.Random(1).shuffle(names)
    loaded = Loaded(*(Row(slot, name, "root", 0) for slot, name in enumerate(names)))
    assert [loaded.headers[child.first_slot].decode() for child in loaded.tree.roots[ROOT].order] == sorted(names)


@pytest.mark.parametrize(
    "orphan",
    [
        Row(9, "x", "nobody", 1),
        Row(9, "x", "b", 1),  # its number is not one more than its parent's
        Row(9, "x", "x", 1),  # its own parent
        Row(9, "x", "other root", 0),  # a root of another group
    ],
)
def test_orphan_has_no_place_nor_what_follows_it(orphan: Row) -> None:
    loaded = Loaded(Row(2, "z", "y", 3), A, B, orphan, Row(4, "y", "x", 2))
    assert loaded.lost == [2, 4, 9]
    assert loaded.num_known("a", "b") == 2
    assert loaded.tree.num_blocks(GROUP) == 2


def test_circle_has_no_place() -> None:
    assert Loaded(Row(1, "x", "z", 5), Row(2, "y", "x", 6), Row(3, "z", "y", 7)).lost == [1, 2, 3]


def test_first_of_two_rows_with_a_hash_stays() -> None:
    loaded = Loaded(A, B, Row(9, "b", "a", 1), C)
    assert loaded.lost == [9]
    assert loaded.tree.path_slots(loaded.tree.pin(loaded.match("a", "b", "c"))).tolist() == [7, 3, 5]


def test_slot_named_twice_has_no_place() -> None:
    """COR: one of the two blocks is not what lies there, and nobody knows which."""
    loaded = Loaded(A, B, C, Row(3, "x", "a", 1))
    assert loaded.lost == [3, 5]
    assert loaded.tree.num_blocks(GROUP) == 1


def test_nothing_follows_a_short_block() -> None:
    loaded = Loaded(A, B._replace(short=True), C)
    assert loaded.lost == [5]
    assert loaded.num_known("a", "b") == 2


def test_short_block_that_begins_a_sibling_gives_way() -> None:
    loaded = Loaded(
        Row(1, "ab", "root", 0, short=True),
        Row(2, "abcd", "root", 0),
        Row(3, "abc", "root", 0, short=True),
        Row(4, "abd", "root", 0, short=True),
        Row(5, "e", "abcd", 1),
    )
    assert loaded.lost == [1, 3]
    assert loaded.num_known("abd") == 1
    assert loaded.num_known("abcd", "e") == 2
    assert loaded.tree.num_nodes == 2  # the longer one goes on in one run


def test_short_block_with_a_damaged_header_gives_way_to_none() -> None:
    headers = {1: b"", 2: b"a"}
    tree = PrefixTree(headers.__getitem__)
    assert tree.load(GROUP, columns([Row(1, "x", "root", 0, short=True), Row(2, "a", "root", 0)])).size == 0
    tree.check([])


def test_slot_of_another_group_is_left_to_it() -> None:
    loaded = Loaded(A, B)
    loaded.load(A._replace(parent="other root", name="q"), Row(8, "r", "q", 1), group=OTHER_GROUP)
    assert loaded.lost == [8]
    assert (loaded.tree.num_blocks(GROUP), loaded.tree.num_blocks(OTHER_GROUP)) == (2, 0)


def test_group_that_has_blocks_is_not_loaded_again() -> None:
    with pytest.raises(AssertionError):
        Loaded(A).load(B)


def test_parent_is_used_when_its_last_descendant_was() -> None:
    loaded = Loaded(
        A._replace(last_used=2),
        B._replace(last_used=9),
        Row(1, "c1", "b", 2, last_used=40),
        Row(2, "c2", "b", 2, last_used=30),
        Row(4, "e", "root", 0, last_used=35),
    )
    assert [loaded.tree.evict(GROUP, 1) for _ in range(5)] == [[2], [4], [1], [3], [7]]


def test_time_goes_on_above_the_last_use() -> None:
    loaded = Loaded(A._replace(last_used=1 << 50), Row(1, "e", "root", 0, last_used=3))
    loaded.tree.touch(loaded.match("e"))
    assert loaded.tree.evict(GROUP, 2) == [7, 1]


def random_forest(rng: random.Random, count: int) -> list[Row]:
    rows: list[Row] = []
    for slot in range(count):
        parent = rng.choice([*rows[-3:], None, *rows[:5]])
        number = 0 if parent is None else parent.number + 1
        rows.append(Row(slot, f"{slot:05}", "root" if parent is None else parent.name, number, last_used=slot))
    rng.shuffle(rows)
    return rows


@pytest.mark.parametrize("seed", range(30))
def test_loaded_tree_holds_what_is_connected_and_names_the_rest(seed: int) -> None:
    rng = random.Random(seed)
    rows = [row for row in random_forest(rng, 300) if rng.random() < 0.98]
    loaded = Loaded(*rows)
    parents = {row.name: row.parent for row in rows}

    def connected(name: str) -> bool:
        return name == "root" or (name in parents and connected(parents[name]))

    assert loaded.lost == sorted(row.slot for row in rows if not connected(row.name))
    gone = loaded.tree.evict(GROUP, 300)
    assert sorted(gone + loaded.lost) == sorted(row.slot for row in rows)


def test_growing_asks_only_siblings_for_their_symbols() -> None:
    """PRF: reading a header of a disk is dear; a chain without forks needs none."""
    grow(columns([A, B, C]), np.ones(3, np.bool_), set(), {}.__getitem__)


def chains(count: int, length: int) -> LoadedBlocks:
    """`count` blocks in chains of `length` under one root."""
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 256, (count, 16), np.uint8)
    numbers = np.arange(count, dtype=np.uint32) % length
    parents = np.roll(hashes, 1, axis=0)
    parents[numbers == 0] = 0
    order = rng.permutation(count)
    slots = np.arange(count, dtype=np.uint32)
    blocks = LoadedBlocks(slots, hashes, parents, numbers, np.zeros(count, np.bool_), np.arange(count))
    return LoadedBlocks(*(column[order] for column in blocks))


@pytest.mark.parametrize(("length", "num_seconds"), [(1, 2.5), (64, 1.5)])
def test_100k_blocks_load_soon(length: int, num_seconds: float) -> None:
    """PRF: a daemon's start waits for its disk tier. Measured 0.36 s and 0.07 s; the bounds are for a busy machine."""
    blocks = chains(100_000, length)
    tree = PrefixTree(lambda slot: slot.to_bytes(4, "big"))
    start = time.perf_counter()
    lost = tree.load(GROUP, blocks)
    assert time.perf_counter() - start < num_seconds
    assert (lost.size, tree.num_nodes) == (0, -(-100_000 // length))
