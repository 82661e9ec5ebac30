"""The prefix tree: each rule by an example, then all of them against a model a child could check."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from radix import (
    NO_KEYS,
    BlockHash,
    HashKind,
    Inserted,
    Keys,
    LoadedBlocks,
    Match,
    Pin,
    PrefixTree,
    block_symbols,
    hash_prefix,
    keys_in,
    token_bytes,
)

ROOT, OTHER_ROOT = BlockHash(bytes(16)), BlockHash(b"other root".ljust(16))
GROUP, OTHER_GROUP = 8192, 4096
T = 3  # block_tokens
EXTENT = 4  # slots per extent

Tokens = tuple[int, ...]


class Cache:
    """A tree and the slots it may use: what a tier is to it."""

    def __init__(self, num_slots: int = 100) -> None:
        self.free = list(range(num_slots))[::-1]
        self.headers: dict[int, bytes] = {}
        self.tree = PrefixTree(self.headers.__getitem__)
        self.tree.add_root(ROOT, GROUP)

    def hashes(self, tokens: Tokens, keys: Keys = NO_KEYS) -> bytes:
        return hash_prefix(ROOT, token_bytes(tokens), T, HashKind.XXH3, keys)

    def match(self, tokens: Tokens, keys: Keys = NO_KEYS, root: BlockHash = ROOT) -> Match:
        match = self.tree.match(root, self.hashes(tokens, keys), lambda i: symbols_at(tokens, i, keys))
        assert match is not None
        return match

    def pin(self, tokens: Tokens, max_blocks: int | None = None) -> Pin:
        return self.tree.pin(self.match(tokens), max_blocks)

    def insert(self, tokens: Tokens, start: int = 0, keys: Keys = NO_KEYS, root: BlockHash = ROOT) -> Inserted:
        slots = [self.free.pop() for _ in range(start, math.ceil(len(tokens) / T))]
        for block, slot in enumerate(slots, start):
            self.headers[slot] = symbols_at(tokens, block, keys)
        inserted = self.tree.insert(
            root, self.hashes(tokens, keys), start, slots, lambda i: symbols_at(tokens, i, keys), len(tokens) % T > 0
        )
        self.give_back(inserted.unused)
        self.give_back(inserted.freed)
        assert inserted.inserted + len(inserted.unused) == len(slots)
        return inserted

    def give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.headers[slot]  # KeyError: freed twice
            self.free.append(slot)


def symbols_at(tokens: Tokens, block: int, keys: Keys = NO_KEYS) -> bytes:
    own = tokens[block * T : (block + 1) * T]
    return block_symbols(token_bytes(own), keys_in(keys, block * T, block * T + len(own)))


@pytest.fixture
def cache() -> Cache:
    return Cache()


def found(match: Match) -> tuple[int, int]:
    return match.num_blocks, match.partial_tokens


# --- match


def test_unknown_root_is_no_match(cache: Cache) -> None:
    assert cache.tree.match(OTHER_ROOT, bytes(16)) is None
    assert cache.tree.insert(OTHER_ROOT, bytes(16), 0, [5], lambda i: b"", False) == Inserted(0, [5], [])


def test_match_finds_whole_blocks_then_tokens(cache: Cache) -> None:
    cache.insert((1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert found(cache.match((1, 2, 3, 4, 5, 6, 7, 8, 9, 1))) == (3, 0)
    assert found(cache.match((1, 2, 3, 4, 5))) == (1, 2)  # inside a run
    assert found(cache.match((1, 9))) == (0, 1)  # among children
    assert found(cache.match((9,))) == (0, 0)
    assert found(cache.match(())) == (0, 0)


def test_match_without_symbols_finds_whole_blocks_only(cache: Cache) -> None:
    cache.insert((1, 2, 3, 4, 5, 6))
    match = cache.tree.match(ROOT, cache.hashes((1, 2, 3, 4, 5, 9)))
    assert match is not None
    assert found(match) == (1, 0)


def test_match_takes_the_child_that_shares_most(cache: Cache) -> None:
    for last in (1, 5, 9):
        cache.insert((7, last, last))
    match = cache.match((7, 5, 4))
    assert found(match) == (0, 2)
    assert match.partial is not None
    assert cache.headers[match.partial.first_slot] == symbols_at((7, 5, 5), 0)


def test_short_block_matches_whole_and_in_part(cache: Cache) -> None:
    cache.insert((1, 2, 3, 4, 5))
    assert found(cache.match((1, 2, 3, 4, 5))) == (2, 0)
    assert found(cache.match((1, 2, 3, 4, 5, 6))) == (1, 2)
    assert found(cache.match((1, 2, 3, 4))) == (1, 1)


def test_token_under_another_key_is_no_match(cache: Cache) -> None:
    """IDN: placeholder tokens of two images match up to where the images begin."""
    cache.insert((1, 2, 2), keys=((1, b"cat"),))
    assert found(cache.match((1, 2, 2), ((1, b"cat"),))) == (1, 0)
    assert found(cache.match((1, 2, 2), ((1, b"dog"),))) == (0, 1)
    assert found(cache.match((1, 2, 2))) == (0, 1)


def test_match_changes_nothing(cache: Cache) -> None:
    cache.insert((1, 2, 3, 4, 5, 6))
    before = cache.tree.num_nodes, cache.tree.coldest(GROUP)
    assert cache.match((1, 2, 3, 4, 9)) == cache.match((1, 2, 3, 4, 9))
    assert (cache.tree.num_nodes, cache.tree.coldest(GROUP)) == before


# --- pin and unpin


def test_pin_cuts_the_run_where_the_lease_ends(cache: Cache) -> None:
    cache.insert((1,) * 12)
    pin = cache.pin((1,) * 6)
    assert len(cache.tree.path_slots(pin)) == 2
    assert cache.tree.num_nodes == 2
    assert cache.tree.num_evictable(GROUP) == 2
    cache.tree.check([pin])


def test_pin_holds_and_uses_the_partial_block_but_not_its_run(cache: Cache) -> None:
    cache.insert((1, 1, 1, 2, 2, 2, 3, 3, 3))
    cache.insert((9,))
    pin = cache.pin((1, 1, 1, 2, 2, 9))
    assert (pin.num_blocks, pin.partial_tokens) == (1, 2)
    assert len(cache.tree.path_slots(pin)) == 2
    assert cache.tree.num_evictable(GROUP) == 2
    node, index = cache.tree.locate(pin, 1)
    assert (index, node.num_blocks) == (0, 1)
    assert cache.tree.unpin(pin) == []
    assert cache.tree.coldest(GROUP) == 1
    cache.tree.check([])


@pytest.mark.parametrize(("max_blocks", "pinned"), [(0, (0, 0)), (1, (1, 0)), (2, (2, 0)), (3, (2, 1)), (9, (2, 1))])
def test_pin_of_at_most_some_blocks(cache: Cache, max_blocks: int, pinned: tuple[int, int]) -> None:
    cache.insert((1,) * 6 + (2,) * 3)
    cache.tree.unpin(cache.pin((1,) * 3))
    pin = cache.pin((1,) * 6 + (2, 3), max_blocks)
    assert (pin.num_blocks, pin.partial_tokens) == pinned
    assert len(cache.tree.path_slots(pin)) == pin.num_slots
    cache.tree.check([pin])


def test_stale_match_is_refused(cache: Cache) -> None:
    cache.insert((1,) * 9)
    match = cache.match((1,) * 6)
    cache.give_back(cache.tree.evict(GROUP, 2))
    with pytest.raises(AssertionError):
        cache.tree.pin(match)


def test_pinned_leaf_survives_and_the_rest_does_not(cache: Cache) -> None:
    cache.insert((1,) * 9)
    cache.insert((2,) * 9)
    pin = cache.pin((1,) * 6)
    held = cache.tree.path_slots(pin).tolist()
    gone = cache.tree.evict(GROUP, 100)
    assert len(gone) == 4
    assert set(held).isdisjoint(gone)
    assert cache.tree.coldest(GROUP) is None
    cache.tree.check([pin])


def test_pin_slot_holds_the_path_that_ends_there(cache: Cache) -> None:
    cache.insert((1, 1, 1, 2, 2, 2, 3))
    slots = cache.tree.path_slots(cache.pin((1, 1, 1, 2, 2, 2, 3)))
    cache.insert((9,) * 9)
    for index, slot in enumerate(slots):
        pin = cache.tree.pin_slot(slot)
        assert pin is not None
        assert (pin.num_blocks, pin.partial_tokens) == (index + 1, 0)
        assert cache.tree.path_slots(pin) == slots[: index + 1]
        cache.tree.unpin(pin)
    middle = cache.tree.match(ROOT, cache.hashes((9,) * 6))
    assert middle is not None
    pin = cache.tree.pin_slot(middle.node.slot_at(1))
    assert pin is not None
    assert (len(cache.tree.path_slots(pin)), cache.tree.num_evictable(GROUP)) == (2, 1)


def test_pin_slot_of_no_attached_block_is_none(cache: Cache) -> None:
    cache.insert((1,) * 3)
    pin = cache.pin((1,) * 3)
    (slot,) = cache.tree.path_slots(pin)
    assert cache.tree.pin_slot(slot + 1) is None
    assert cache.tree.pin_slot(slot + 1_000_000) is None
    cache.tree.clear(ROOT)
    assert cache.tree.detached_slots().tolist() == [slot]
    assert cache.tree.pin_slot(slot) is None
    cache.tree.check([pin])


def test_path_hashes_are_those_of_the_pinned_blocks(cache: Cache) -> None:
    tokens = (1, 1, 1, 2, 2, 2, 3, 3, 3)
    cache.insert(tokens)
    assert cache.tree.path_hashes(cache.pin(tokens, 2)) == cache.hashes(tokens[:6])
    assert cache.tree.path_hashes(cache.pin((1, 1, 1, 2))) == cache.hashes(tokens[:6])  # the partial block as it is
    assert cache.tree.path_hashes(cache.pin((9,))) == b""


def test_touched_chain_goes_last_and_nothing_is_held_or_cut(cache: Cache) -> None:
    for token in (1, 2, 3):
        cache.insert((token,) * 6)
    cache.tree.touch(cache.match((1,) * 3))
    cache.tree.touch(cache.match((2, 2, 9)))  # a partial block
    cache.tree.touch(cache.match((9,)))  # nothing
    assert (cache.tree.num_nodes, cache.tree.num_evictable(GROUP)) == (3, 6)
    for token in (3, 1, 2):
        assert sum(found(cache.match((t,) * 6))[0] for t in (1, 2, 3)) == 2 * (3 - (3, 1, 2).index(token))
        cache.give_back(cache.tree.evict(GROUP, 2))
        assert found(cache.match((token,) * 6)) == (0, 0)
    cache.tree.check([])


def test_hash_under_another_root_is_not_found(cache: Cache) -> None:
    """Two specs never share a hash; if they did, neither would be answered with the other's blocks."""
    cache.tree.add_root(OTHER_ROOT, OTHER_GROUP)
    cache.insert((1,) * 3)
    assert found(cache.match((1,) * 3, root=OTHER_ROOT)) == (0, 0)
    cache.insert((1,) * 3, root=OTHER_ROOT)
    cache.give_back(cache.tree.clear(OTHER_ROOT))
    assert found(cache.match((1,) * 3)) == (1, 0)
    cache.tree.check([])


# --- insert


def test_insert_extends_a_free_leaf_in_place(cache: Cache) -> None:
    cache.insert((1,) * 6)
    cache.insert((1,) * 12, start=2)
    assert cache.tree.num_nodes == 1


def test_insert_does_not_extend_a_pinned_leaf(cache: Cache) -> None:
    """LEK: its lease would hold blocks that it did not ask for."""
    cache.insert((1,) * 6)
    pin = cache.pin((1,) * 6)
    before = cache.tree.path_slots(pin)
    cache.insert((1,) * 12, start=2)
    assert cache.tree.num_nodes == 2
    assert cache.tree.path_slots(pin) == before
    assert cache.tree.num_evictable(GROUP) == 2
    cache.tree.check([pin])


def test_insert_keeps_known_slots_and_hands_back_the_new_ones(cache: Cache) -> None:
    cache.insert((1,) * 6)
    slots = cache.tree.path_slots(cache.pin((1,) * 6))
    inserted = cache.insert((1,) * 9)
    assert (inserted.inserted, len(inserted.unused)) == (1, 2)
    assert cache.tree.path_slots(cache.pin((1,) * 9))[:2] == slots
    assert cache.insert((1,) * 9).inserted == 0


def test_insert_without_its_parent_takes_nothing(cache: Cache) -> None:
    cache.insert((1,) * 3)
    inserted = cache.insert((1,) * 9, start=2)
    assert (inserted.inserted, len(inserted.unused)) == (0, 1)
    assert cache.tree.num_blocks(GROUP) == 1


def test_insert_splits_where_chains_part(cache: Cache) -> None:
    cache.insert((1,) * 9)
    cache.insert((1,) * 3 + (2,) * 6)
    assert cache.tree.num_nodes == 3
    assert found(cache.match((1,) * 9)) == (3, 0)
    assert found(cache.match((1,) * 3 + (2,) * 6)) == (3, 0)
    cache.tree.check([])


def test_longer_block_replaces_the_short_one_it_begins_with(cache: Cache) -> None:
    cache.insert((1, 1, 1, 2))
    assert len(cache.insert((1, 1, 1, 2, 3), start=1).freed) == 1
    assert len(cache.insert((1, 1, 1, 2, 3, 4, 5, 5, 5), start=1).freed) == 1
    assert cache.tree.num_nodes == 1  # the run goes on in place once its short tail is gone
    cache.tree.check([])


def test_replaced_short_block_stays_with_its_lease(cache: Cache) -> None:
    cache.insert((1, 1, 1, 2))
    pin = cache.pin((1, 1, 1, 2))
    held = cache.tree.path_slots(pin)
    assert cache.insert((1, 1, 1, 2, 3, 4), start=1).freed == []
    assert cache.tree.path_slots(pin) == held
    assert found(cache.match((1, 1, 1, 2, 3, 4))) == (2, 0)
    assert cache.tree.num_blocks(GROUP) == 3
    cache.tree.check([pin])
    assert cache.tree.unpin(pin) == [held[1]]
    cache.tree.check([])


@pytest.mark.parametrize("longer", [(1, 1, 1, 2, 3), (1, 1, 1, 2, 3, 4), (1, 1, 1, 2, 3, 4, 5, 5, 5)])
def test_short_block_that_begins_a_longer_one_is_not_taken(cache: Cache, longer: Tokens) -> None:
    cache.insert(longer)
    inserted = cache.insert((1, 1, 1, 2), start=1)
    assert (inserted.inserted, len(inserted.unused), inserted.freed) == (0, 1, [])
    cache.tree.check([])


def test_short_block_stands_beside_the_run_it_leaves(cache: Cache) -> None:
    cache.insert((1,) * 9)
    cache.insert((1, 1, 1, 1, 2), start=1)
    assert found(cache.match((1, 1, 1, 1, 2))) == (2, 0)
    assert cache.tree.num_nodes == 3
    cache.tree.check([])


def test_chain_does_not_go_on_behind_a_short_block(cache: Cache) -> None:
    cache.insert((1, 1))
    hashes = cache.hashes((1, 1))
    follows = hash_prefix(hashes, token_bytes((1, 1, 1)), T, HashKind.XXH3)
    assert cache.tree.insert(ROOT, hashes + follows, 1, [50], lambda i: b"", False) == Inserted(0, [50], [])


def test_slot_in_two_places_stops_us(cache: Cache) -> None:
    cache.insert((1, 1, 1))
    slot = next(iter(cache.headers))
    with pytest.raises(AssertionError, match="two places"):
        cache.tree.insert(ROOT, cache.hashes((2, 2, 2)), 0, [slot], lambda i: symbols_at((2, 2, 2), i), False)


# --- remove, drain, clear


def test_removed_block_takes_its_subtree_along(cache: Cache) -> None:
    """COR: a damaged block and all that follows it is a miss in the same step."""
    cache.insert((1,) * 9)
    cache.insert((1,) * 6 + (2,) * 5)
    match = cache.match((1,) * 6)
    assert len(cache.tree.remove(match.node, 1)) == 4
    assert found(cache.match((1,) * 9)) == (1, 0)
    cache.tree.check([])


def test_removed_blocks_come_back_when_the_last_lease_ends(cache: Cache) -> None:
    """TTL: what a lease holds stays, though no match sees it any more."""
    cache.insert((1,) * 9)
    long, short = cache.pin((1,) * 9), cache.pin((1,) * 6)
    held = cache.tree.path_slots(long)
    assert cache.tree.remove(*cache.tree.locate(short, 1)) == []
    assert found(cache.match((1,) * 9)) == (1, 0)
    assert cache.tree.path_slots(long) == held
    cache.insert((1,) * 9)  # healed in other slots, beside the detached blocks
    assert cache.tree.path_slots(long) == held
    cache.tree.check([long, short])
    assert cache.tree.unpin(short) == []
    assert sorted(cache.tree.unpin(long)) == sorted(held[1:])
    cache.tree.check([])


def test_remove_of_a_detached_block_changes_nothing(cache: Cache) -> None:
    cache.insert((1,) * 6)
    pin = cache.pin((1,) * 6)
    where = cache.tree.locate(pin, 0)
    assert cache.tree.remove(*where) == []
    assert cache.tree.remove(*where) == []
    cache.tree.check([pin])


def test_run_does_not_grow_under_a_detached_child(cache: Cache) -> None:
    """COR: a lease counts its blocks through the runs above it."""
    cache.insert((1,) * 6)
    cache.tree.unpin(cache.pin((1,) * 3))
    pin = cache.pin((1,) * 6)
    held = cache.tree.path_slots(pin)
    cache.tree.remove(*cache.tree.locate(pin, 1))
    cache.insert((1,) * 3 + (2,) * 3, start=1)
    assert cache.tree.path_slots(pin) == held
    cache.tree.check([pin])


def test_extents_are_told_coldest_first_and_drained(cache: Cache) -> None:
    for token in (1, 2, 3):
        cache.insert((token,) * T * EXTENT)
    pin = cache.pin((1,) * T)  # one of extent 0's four blocks was used at tick 4, the others at tick 1
    assert cache.tree.extents_by_heat(EXTENT, EXTENT) == [(1.75, 0, False), (2.0, 1, True), (3.0, 2, True)]
    assert sorted(cache.tree.drain(1, EXTENT)) == [4, 5, 6, 7]
    with pytest.raises(AssertionError):
        cache.tree.drain(0, EXTENT)
    cache.tree.check([pin])


def test_drain_takes_followers_in_other_extents(cache: Cache) -> None:
    cache.insert((1,) * T * 6)
    cache.insert((1,) * T * 3 + (2,) * T * 3, start=3)
    assert cache.tree.extents_by_heat(EXTENT, EXTENT) == [(1.5, 1, True), (1.75, 0, True), (2.0, 2, True)]
    assert len(cache.tree.drain(0, EXTENT)) == 9
    assert cache.tree.extents_by_heat(EXTENT, EXTENT) == []
    cache.tree.check([])


def test_drain_forgets_no_more_than_what_is_in_the_extent_or_follows(cache: Cache) -> None:
    cache.free = [3, 2, 9, 1, 0]
    cache.insert((1,) * 6)  # slots 0, 1
    cache.insert((2,) * 6)  # slots 9, 2: its first block stays
    cache.insert((1,) * 7, start=2)  # slot 3, goes with slot 0
    assert sorted(cache.tree.drain(0, EXTENT)) == [0, 1, 2, 3]
    assert found(cache.match((2,) * 6)) == (1, 0)
    cache.tree.check([])


def test_clear_forgets_one_root(cache: Cache) -> None:
    cache.tree.add_root(OTHER_ROOT, OTHER_GROUP)
    cache.insert((1,) * 6, root=OTHER_ROOT)
    cache.insert((1,) * 6)
    pin = cache.pin((1,) * 3)
    assert len(cache.tree.clear(ROOT)) == 1
    assert found(cache.match((1,) * 6)) == (0, 0)
    assert (cache.tree.num_blocks(GROUP), cache.tree.num_blocks(OTHER_GROUP)) == (1, 2)
    assert len(cache.tree.unpin(pin)) == 1
    assert cache.tree.evict(GROUP, 9) == []
    assert len(cache.tree.evict(OTHER_GROUP, 9)) == 2
    assert set(cache.tree.roots) == {ROOT, OTHER_ROOT}
    cache.tree.check([])


# --- all of it against a model


def chain_of(tokens: Tokens) -> list[Tokens]:
    """The names of a prompt's blocks: all tokens up to each block's end."""
    return [tokens[: min(end, len(tokens))] for end in range(T, len(tokens) + T, T)]


def parent_of(block: Tokens) -> Tokens:
    return block[: (len(block) - 1) // T * T]


def common(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def begins(short: Tokens, longer: Tokens) -> bool:
    """Whether a block gives way to another: same parent, and its tokens begin the other's."""
    return parent_of(short) == parent_of(longer) and longer[: len(short)] == short


def rows_of(model: dict[Tokens, int], rng: random.Random) -> LoadedBlocks:
    """The model's blocks in any order, used at any time."""
    blocks = list(model)
    rng.shuffle(blocks)
    hashes = [hash_prefix(ROOT, token_bytes(block), T, HashKind.XXH3) for block in blocks]
    return LoadedBlocks(
        np.array([model[block] for block in blocks], np.uint32),
        np.array([chain[-16:] for chain in hashes], "V16"),
        np.array([chain[-32:-16] or ROOT for chain in hashes], "V16"),
        np.array([len(parent_of(block)) // T for block in blocks], np.uint32),
        np.array([len(block) % T > 0 for block in blocks], np.bool_),
        np.array([rng.randrange(9) for _ in blocks], np.int64),
    )


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=13).map(tuple)


class TreeMachine(RuleBasedStateMachine):
    """Model: a dict from a block's tokens, all those before it included, to its slot."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(400)
        self.tree = self.cache.tree
        self.model: dict[Tokens, int] = {}
        self.held: list[tuple[Pin, list[int]]] = []

    def expected(self, tokens: Tokens) -> tuple[int, int]:
        whole = [block for block in chain_of(tokens) if block in self.model]
        end = whole[-1] if whole else ()
        siblings = [block for block in self.model if parent_of(block) == end and len(end) % T == 0]
        return len(whole), max((common(block, tokens) - len(end) for block in siblings if block != end), default=0)

    def lost(self, gone: list[int]) -> None:
        """The model forgets what the tree gave back; it must not be held, and must not leave orphans."""
        assert all(set(gone).isdisjoint(slots) for _, slots in self.held)
        self.model = {block: slot for block, slot in self.model.items() if slot not in gone}
        assert all(parent_of(block) in self.model for block in self.model if parent_of(block))
        self.cache.give_back(gone)

    @rule(tokens=prompts, start=st.integers(0, 2))
    def insert(self, tokens: Tokens, start: int) -> None:
        chain = chain_of(tokens)
        start = min(start, len(chain) - 1)
        slots = self.cache.free[-1 : -1 - len(chain[start:]) : -1]
        num_known, _ = self.expected(tokens)
        new = dict(zip(chain[start:], slots, strict=True)) if num_known >= start else {}
        for block, slot in new.items():
            siblings = [other for other in self.model if parent_of(other) == parent_of(block)]
            if not any(other[: len(block)] == block for other in siblings):
                self.model = {other: kept for other, kept in self.model.items() if not begins(other, block)}
                self.model[block] = slot
        self.cache.insert(tokens, start)

    @rule(tokens=prompts)
    def match(self, tokens: Tokens) -> None:
        assert found(self.cache.match(tokens)) == self.expected(tokens)

    @rule(target=leases, tokens=prompts, max_blocks=st.none() | st.integers(0, 4))
    def pin(self, tokens: Tokens, max_blocks: int | None) -> tuple[Pin, list[int]]:
        pin = self.cache.pin(tokens, max_blocks)
        slots = self.tree.path_slots(pin).tolist()
        whole = [self.model[block] for block in chain_of(tokens)[: pin.num_blocks]]
        assert slots[: pin.num_blocks] == whole
        hashes = self.tree.path_hashes(pin)
        assert hashes.startswith(self.cache.hashes(tokens)[: pin.num_blocks * 16])
        assert len(hashes) == len(slots) * 16
        assert set(slots) <= set(self.model.values())
        assert max_blocks is None or len(slots) <= max_blocks
        self.held.append((pin, slots))
        return pin, slots

    @rule(tokens=prompts)
    def touch(self, tokens: Tokens) -> None:
        before = self.tree.num_nodes, self.tree.num_evictable(GROUP)
        self.tree.touch(self.cache.match(tokens))
        assert (self.tree.num_nodes, self.tree.num_evictable(GROUP)) == before

    @rule(target=leases, tokens=prompts)
    def pin_slot(self, tokens: Tokens) -> tuple[Pin, list[int]]:
        known = chain_of(tokens)[: self.expected(tokens)[0]]
        pin = self.tree.pin_slot(self.model[known[-1]]) if known else self.cache.pin((9,))
        assert pin is not None
        assert (pin.num_blocks, pin.partial_tokens) == (len(known), 0)
        slots = self.tree.path_slots(pin).tolist()
        assert slots == [self.model[block] for block in known]
        self.held.append((pin, slots))
        return pin, slots

    @rule(rng=st.randoms(use_true_random=False))
    def load(self, rng: random.Random) -> None:
        """A tree that is loaded with the same blocks answers the same, and goes on like this one."""
        loaded = PrefixTree(self.cache.headers.__getitem__)
        loaded.add_root(ROOT, GROUP)
        assert loaded.load(GROUP, rows_of(self.model, rng)).size == 0
        loaded.check([])
        assert loaded.num_blocks(GROUP) == len(self.model)
        for block, slot in self.model.items():
            match = loaded.match(ROOT, self.cache.hashes(block))
            assert match is not None
            assert match.num_blocks == len(chain_of(block))
            assert match.node.slot_at(match.depth - 1) == slot
        if not self.held:
            self.tree = self.cache.tree = loaded

    @rule(lease=consumes(leases))
    def unpin(self, lease: tuple[Pin, list[int]]) -> None:
        self.held.remove(lease)
        gone = self.tree.unpin(lease[0])
        assert set(gone).isdisjoint(self.model.values())
        self.lost(gone)

    @rule(tokens=prompts, index=st.integers(0, 4))
    def remove(self, tokens: Tokens, index: int) -> None:
        chain = chain_of(tokens)
        if index < self.expected(tokens)[0]:
            pin = self.cache.pin(tokens)
            node, place = self.tree.locate(pin, index)
            assert node.slot_at(place) == self.model[chain[index]]
            assert self.tree.unpin(pin) == []
            gone = self.tree.remove(node, place)
            self.model = {b: s for b, s in self.model.items() if b[: len(chain[index])] != chain[index]}
            self.lost(gone)

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        gone = self.tree.evict(GROUP, count)
        assert set(gone) <= set(self.model.values())
        assert self.tree.num_evictable(GROUP) == 0 or len(gone) == count
        self.lost(gone)

    @rule()
    def drain(self) -> None:
        extent = next((extent for _, extent, drainable in self.tree.extents_by_heat(EXTENT, EXTENT) if drainable), None)
        if extent is not None:
            gone = self.tree.drain(extent, EXTENT)
            assert {slot for slot in self.model.values() if slot // EXTENT == extent} <= set(gone)
            self.lost(gone)

    @invariant()
    def tree_is_sound(self) -> None:
        self.tree.check(pin for pin, _ in self.held)
        assert len(self.cache.free) + self.tree.num_blocks(GROUP) == 400
        if not self.held:
            assert set(self.cache.headers) == set(self.model.values())

    @invariant()
    def leases_see_what_they_pinned(self) -> None:
        for pin, slots in self.held:
            assert self.tree.path_slots(pin).tolist() == slots
            for index, slot in enumerate(slots):
                node, place = self.tree.locate(pin, index)
                assert node.slot_at(place) == slot


TreeMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
test_tree_against_model = TreeMachine.TestCase


class DamagedMachine(RuleBasedStateMachine):
    """Headers that change under the tree: what it finds is never wrong, and no slot is lost or given back twice."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(400)
        self.tree = self.cache.tree
        self.truth: dict[int, bytes] = {}  # slot -> hash of the block that is stored there
        self.held: list[tuple[Pin, list[int]]] = []

    @rule(tokens=prompts)
    def insert(self, tokens: Tokens) -> None:
        hashes = self.cache.hashes(tokens)
        blocks = [hashes[at : at + 16] for at in range(0, len(hashes), 16)]
        self.truth.update(zip(self.cache.free[-1 : -1 - len(blocks) : -1], blocks, strict=True))
        self.cache.insert(tokens)

    @rule(pick=st.integers(0, 400), symbols=st.sampled_from([b"", b"\0", b"\0\0\0\1", b"\0\0\0\2", b"\xff" * 40]))
    def damage(self, pick: int, symbols: bytes) -> None:
        slots = sorted(self.cache.headers)
        if slots:
            self.cache.headers[slots[pick % len(slots)]] = symbols

    @rule(tokens=prompts)
    def pin(self, tokens: Tokens) -> None:
        pin = self.cache.pin(tokens)
        slots = self.tree.path_slots(pin).tolist()
        assert b"".join(self.truth[slot] for slot in slots) == self.tree.path_hashes(pin)
        assert self.tree.path_hashes(pin).startswith(self.cache.hashes(tokens)[: 16 * pin.num_blocks])
        self.held.append((pin, slots))

    @rule(pick=st.integers(0, 20))
    def unpin(self, pick: int) -> None:
        if self.held:
            pin, slots = self.held.pop(pick % len(self.held))
            assert self.tree.path_slots(pin).tolist() == slots
            self.cache.give_back(self.tree.unpin(pin))

    @rule(pick=st.integers(0, 20))
    def remove(self, pick: int) -> None:
        pins = [pin for pin, slots in self.held if slots]
        if pins:
            self.cache.give_back(self.tree.remove(*self.tree.locate(pins[pick % len(pins)], 0)))

    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        expected = min(count, self.tree.num_evictable(GROUP))
        gone = self.tree.evict(GROUP, count)
        assert len(gone) == expected
        self.cache.give_back(gone)

    def teardown(self) -> None:
        for pin, _ in self.held:
            self.cache.give_back(self.tree.unpin(pin))
        self.cache.give_back(self.tree.evict(GROUP, 400))
        assert sorted(self.cache.free) == list(range(400))
        assert (self.tree.num_nodes, self.tree.num_blocks(GROUP)) == (0, 0)
        self.tree.check([])


DamagedMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
test_damaged_headers_cost_no_more_than_matches = DamagedMachine.TestCase
