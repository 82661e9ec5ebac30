"""Keys are pure functions of bytes: golden vectors, other processes, and a slow model of the symbols."""

import array
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from radix import (
    NO_KEYS,
    TOKEN_MAX,
    HashKind,
    Keys,
    block_symbols,
    block_symbols_of,
    common_tokens,
    context_digests,
    hash_block,
    hash_prefix,
    keys_digest,
    keys_in,
    normalise_keys,
    root_hash,
    token_bytes,
)
from radix.hashing import HASH_NBYTES, KEY_NBYTES_MAX, KEY_START_MAX, NUM_KEYS_MAX

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / "block_hashes.json").read_text())
PARENT = bytes(range(16))
kinds = pytest.mark.parametrize("kind", HashKind)


def hashes_of(
    tokens: list[int], keys: Keys = NO_KEYS, kind: HashKind = HashKind.XXH3, block_tokens: int = 4
) -> list[bytes]:
    packed = hash_prefix(PARENT, token_bytes(tokens), block_tokens, kind, keys)
    return [packed[at : at + HASH_NBYTES] for at in range(0, len(packed), HASH_NBYTES)]


# --- golden vectors: a changed one is a format change


@kinds
def test_golden_hashes(kind: HashKind) -> None:
    """HSH: the same keys in every version; stored blocks stay findable."""
    golden = VECTORS["kinds"][kind.value]
    root = root_hash(bytes.fromhex(VECTORS["fingerprint"]), kind)
    tokens = token_bytes(VECTORS["tokens"])
    keys = normalise_keys([(start, bytes.fromhex(key)) for start, key in VECTORS["keys"]])
    assert root.hex() == golden["root"]
    assert hash_prefix(root, tokens, VECTORS["block_tokens"], kind).hex() == "".join(golden["hashes"])
    assert hash_prefix(root, tokens, VECTORS["block_tokens"], kind, keys).hex() == "".join(golden["hashes_with_keys"])


def test_golden_symbols() -> None:
    keys = normalise_keys([(start, bytes.fromhex(key)) for start, key in VECTORS["keys"]])
    assert keys_digest(keys_in(keys, 8, 16)).hex() == VECTORS["digest_of_block_1"]
    assert block_symbols(token_bytes(VECTORS["tokens"][:8]), keys_in(keys, 0, 8)).hex() == VECTORS["symbols_of_block_0"]


def test_golden_contexts() -> None:
    """COR: a changed one makes every stored block a miss."""
    tokens, block_tokens = token_bytes(VECTORS["tokens"]), VECTORS["block_tokens"]
    keys = normalise_keys([(start, bytes.fromhex(key)) for start, key in VECTORS["keys"]])
    assert [f"{each:016x}" for each in context_digests(tokens, block_tokens)] == VECTORS["contexts"]
    assert [f"{each:016x}" for each in context_digests(tokens, block_tokens, keys)] == VECTORS["contexts_with_keys"]


def test_context_is_the_documented_one() -> None:
    """COR: all that comes before a block, and nothing of the block itself."""
    tokens, keys = token_bytes(range(10)), normalise_keys([(1, b"cat"), (5, b""), (5, b"dog"), (9, b"last")])
    first = tokens[:16] + b"\xff\xff\xff\xff" + struct.pack("<III", 1, 1, 3) + b"cat"
    second = tokens[16:32] + b"\xff\xff\xff\xff" + struct.pack("<III", 2, 5, 0) + struct.pack("<II", 5, 3) + b"dog"
    messages = [b"", first, first + second]
    assert context_digests(tokens, 4, keys) == [xxhash.xxh3_64_intdigest(message) for message in messages]
    assert context_digests(b"", 4) == []
    assert context_digests(tokens[:4], 4) == [xxhash.xxh3_64_intdigest(b"")]


@given(
    prompts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=4, max_size=9),
            st.lists(st.tuples(st.integers(0, 4), st.sampled_from([b"", b"\0", b"\xff" * 4])), max_size=3),
        ),
        min_size=2,
        max_size=2,
    )
)
def test_contexts_are_equal_only_where_all_before_is(prompts: list[tuple[list[int], list[tuple[int, bytes]]]]) -> None:
    """COR, IDN."""
    (one, one_keys), (other, other_keys) = [(tokens, normalise_keys(keys)) for tokens, keys in prompts]
    pairs = zip(
        context_digests(token_bytes(one), 2, one_keys), context_digests(token_bytes(other), 2, other_keys), strict=False
    )
    for block, (a, b) in enumerate(pairs):
        before = 2 * block
        same = one[:before] == other[:before] and keys_in(one_keys, 0, before) == keys_in(other_keys, 0, before)
        assert (a == b) == same


def test_message_is_the_documented_one() -> None:
    message = PARENT + struct.pack("<IIII", 2, 7, 9, 1) + struct.pack("<II", 1, 3) + b"cat"
    assert hash_block(PARENT, token_bytes([7, 9]), ((1, b"cat"),), HashKind.XXH3) == xxhash.xxh3_128_digest(message)
    expected = hashlib.sha256(message).digest()[:16]
    assert hash_block(PARENT, token_bytes([7, 9]), ((1, b"cat"),), HashKind.SHA256) == expected


def test_hashes_are_equal_in_processes_with_other_seeds() -> None:
    """HSH: keys depend on no environment seed."""
    program = (
        "from radix import *; k = normalise_keys([b'salt', (9, b'image')]);"
        "t = token_bytes(range(50));"
        "print([hash_prefix(root_hash(bytes(32), kind), t, 8, kind, k).hex() for kind in HashKind])"
    )
    seeds = ("0", "1", "4242", "random")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        for seed in seeds
    ]
    answers = {child.communicate()[0] for child in children}
    assert [child.returncode for child in children] == [0] * len(seeds)
    assert len(answers) == 1


# --- chains


@kinds
@given(tokens=st.lists(st.integers(0, TOKEN_MAX), max_size=40), data=st.data())
def test_incremental_equals_whole(kind: HashKind, tokens: list[int], data: st.DataObject) -> None:
    """HSH: a chain continued from any block is the chain, and each block is what hash_block says."""
    places = st.tuples(st.integers(0, 45), st.binary(max_size=3))
    keys = normalise_keys(data.draw(st.lists(places, max_size=4)))
    packed = token_bytes(tokens)
    whole = hash_prefix(PARENT, packed, 4, kind, keys)
    parent, single = PARENT, []
    for start in range(0, len(tokens), 4):
        own = tokens[start : start + 4]
        parent = hash_block(parent, token_bytes(own), keys_in(keys, start, start + len(own)), kind)
        single.append(parent)
    assert whole == b"".join(single)
    block = data.draw(st.integers(0, len(tokens) // 4))
    parent = single[block - 1] if block else PARENT
    rest = hash_prefix(parent, packed[16 * block :], 4, kind, keys, first_token=4 * block)
    assert whole == b"".join(single[:block]) + rest


def test_no_tokens_have_no_hashes() -> None:
    assert hash_prefix(PARENT, b"", 16, HashKind.XXH3) == b""


def test_short_block_is_not_the_block_it_begins() -> None:
    assert hashes_of([1, 2])[0] != hashes_of([1, 2, 0, 0])[0]


def test_roots_differ_by_kind_and_fingerprint() -> None:
    """IDN: the fingerprint seeds the chain."""
    roots = {root_hash(fingerprint, kind) for fingerprint in (bytes(32), b"\1" * 32) for kind in HashKind}
    assert len(roots) == 4
    with pytest.raises(ValueError, match="32 bytes"):
        root_hash(b"short", HashKind.XXH3)


# --- extra keys


def test_key_changes_its_block_and_all_after_it() -> None:
    """IDN: two images over the same placeholder tokens."""
    plain, cat, dog = (hashes_of([5] * 16, keys) for keys in (NO_KEYS, ((6, b"cat"),), ((6, b"dog"),)))
    assert plain[0] == cat[0] == dog[0]
    assert set(plain[1:]).isdisjoint(cat[1:])
    assert set(cat[1:]).isdisjoint(dog[1:])


def test_same_key_at_another_token_is_another_context() -> None:
    """IDN: the key's place inside its block counts."""
    assert hashes_of([5] * 8, ((1, b"cat"),))[0] != hashes_of([5] * 8, ((2, b"cat"),))[0]


def test_adjacent_images_split_differently_are_disjoint() -> None:
    """IDN: the same two images over the same placeholders, with the border elsewhere in one block."""
    one, other = (hashes_of([5] * 16, ((0, b"cat"), (border, b"dog"))) for border in (5, 6))
    assert one[0] == other[0]
    assert set(one[1:]).isdisjoint(other[1:])


def test_keys_do_not_run_together() -> None:
    """IDN: lengths are hashed, so no two lists of keys spell the same bytes."""
    lists: list[Keys] = [((0, b"ab"), (0, b"c")), ((0, b"a"), (0, b"bc")), ((0, b"abc"),), ((0, b"c"), (0, b"ab"))]
    assert len({hashes_of([1, 2], keys)[0] for keys in lists}) == len(lists)
    assert len({keys_digest(keys) for keys in lists}) == len(lists)


def test_keys_are_normalised() -> None:
    assert normalise_keys([(7, b"b"), b"salt", (7, b"a")]) == ((0, b"salt"), (7, b"b"), (7, b"a"))
    assert normalise_keys([]) == NO_KEYS


@pytest.mark.parametrize(
    ("extra_keys", "error"),
    [
        ([(-1, b"x")], ValueError),
        ([(KEY_START_MAX + 1, b"x")], ValueError),
        ([bytes(KEY_NBYTES_MAX + 1)], ValueError),
        ([b"x"] * (NUM_KEYS_MAX + 1), ValueError),
        (["text"], TypeError),
        ([(0, "text")], TypeError),
        ([("0", b"x")], TypeError),
        ([[0, b"x"]], TypeError),
        ([(0, b"x", 1)], TypeError),
        (b"bytes", TypeError),
    ],
)
def test_bad_keys_are_refused(extra_keys: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        normalise_keys(extra_keys)


def test_keys_of_a_range_are_relative_to_it() -> None:
    keys: Keys = ((0, b"a"), (4, b"b"), (7, b"c"), (8, b"d"))
    assert keys_in(keys, 4, 8) == ((0, b"b"), (3, b"c"))
    assert keys_in(keys, 9, 20) == NO_KEYS


# --- token ids


class Tensor:
    """Stands for a torch tensor: all we use of one is `__array__`."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.array([1, 2, TOKEN_MAX])


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2, TOKEN_MAX],
        (1, 2, TOKEN_MAX),
        array.array("q", [1, 2, TOKEN_MAX]),
        [np.int64(1), np.int64(2), np.int64(TOKEN_MAX)],
        np.array([1, 2, TOKEN_MAX]),
        np.array([1, 2, TOKEN_MAX], ">u8"),
        np.array([1, 0, 2, 0, TOKEN_MAX, 0], np.uint32)[::2],
        Tensor(),
    ],
)
def test_token_ids_of_any_kind_give_the_same_bytes(token_ids: Any) -> None:
    """HSH: list, tuple, array or tensor."""
    assert token_bytes(token_ids) == struct.pack("<III", 1, 2, TOKEN_MAX)


def test_no_token_ids_are_no_bytes() -> None:
    assert token_bytes([]) == token_bytes(np.array([], np.int64)) == b""


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [
        ([-1], ValueError),
        ([TOKEN_MAX + 1], ValueError),
        ([1 << 32], ValueError),
        (np.array([-1]), ValueError),
        (np.array([TOKEN_MAX + 1]), ValueError),
        (np.array([[1, 2]]), ValueError),
        (np.array(1), ValueError),
        ([1.0], TypeError),
        ([[1, 2]], TypeError),
        (["1"], TypeError),
        ("12", TypeError),
        (b"1234", TypeError),
        (memoryview(b"1234"), TypeError),
        ({1, 2}, TypeError),
        (12, TypeError),
        (np.array([1.0]), TypeError),
        (np.array([True]), TypeError),
        (array.array("d", [1.0]), TypeError),
    ],
)
def test_bad_token_ids_are_refused(token_ids: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        token_bytes(token_ids)


# --- symbols, against a slow model

few_tokens = st.lists(st.sampled_from([0, 1, 0xFFFFFF, 0xFF, 0xFFFFFFFE]), min_size=1, max_size=6)
few_keys = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([b"x", b"y"])), max_size=2).map(normalise_keys)
blocks = st.tuples(few_tokens, few_keys).map(lambda block: (block[0], keys_in(block[1], 0, len(block[0]))))
Block = tuple[list[int], Keys]


def symbols(block: Block) -> bytes:
    return block_symbols(token_bytes(block[0]), block[1])


def context(block: Block, token: int) -> tuple[int, Keys]:
    """All that a block says about a token: its id, and from the first key on all the block's keys."""
    tokens, keys = block
    return tokens[token], keys if keys and keys[0][0] <= token else NO_KEYS


def slow_common(a: Block, b: Block) -> int:
    num_tokens = min(len(a[0]), len(b[0]))
    return next((i for i in range(num_tokens) if context(a, i) != context(b, i)), num_tokens)


@given(a=blocks, b=blocks)
def test_common_tokens_against_the_model(a: Block, b: Block) -> None:
    """IDN: a token counts only where everything that conditions it agrees."""
    assert common_tokens(symbols(a), symbols(b)) == common_tokens(symbols(b), symbols(a)) == slow_common(a, b)


@given(block=blocks, cut=st.integers(0, 60))
def test_common_tokens_of_a_cut_string_never_counts_half_a_marker(block: Block, cut: int) -> None:
    tokens, keys = block
    whole = symbols(block)
    first = keys[0][0] if keys else len(tokens)
    cut = min(cut, len(whole))
    inside = min(cut // 4, first) if cut < 4 * first + 20 else (cut - 20) // 4
    assert common_tokens(whole, whole[:cut]) == (inside if keys else cut // 4)


@given(query=blocks, others=st.lists(blocks, min_size=1, max_size=8))
def test_best_match_is_a_neighbour_in_symbol_order(query: Block, others: list[Block]) -> None:
    """Why a bisection finds it: nothing further away shares more."""
    ordered = sorted(symbols(other) for other in others)
    place = sum(other < symbols(query) for other in ordered)
    nearest = ordered[max(0, place - 1) : place + 1]
    assert max(common_tokens(symbols(query), other) for other in nearest) == max(slow_common(query, o) for o in others)


@given(block=blocks)
def test_symbols_from_a_header_are_the_same(block: Block) -> None:
    tokens, keys = block
    keys_start = keys[0][0] if keys else len(tokens)
    assert block_symbols_of(token_bytes(tokens), keys_start, keys_digest(keys)) == symbols(block)


def test_symbols_order_like_token_ids() -> None:
    ids = [0, 1, 255, 256, 65536, TOKEN_MAX]
    assert sorted(block_symbols(token_bytes([i]), NO_KEYS) for i in ids) == [
        block_symbols(token_bytes([i]), NO_KEYS) for i in ids
    ]


def test_no_keys_have_a_digest_of_zeros() -> None:
    assert keys_digest(NO_KEYS) == bytes(16)
