"""COR: names collide, bytes do not. Block hashes cut to 8 bits, and no hit ever shows another prompt's KV."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore import Cache, Client, KVSpec
from kvstore.service import prompt as prompt_module
from radix import HashKind, hashing
from tests.daemons import assert_balanced, embedded, holds

SMALL = KVSpec(model="tiny", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=2)
ROUNDS = 3000
KEYS: list[list[bytes | tuple[int, bytes]]] = [[], [], [b"salt"], [(4, b"image")]]
KEYS_START = (99, 99, 0, 4)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A store in which every 256th name, or so, is another block's, too."""
    monkeypatch.setitem(hashing._DIGESTS, HashKind.XXH3, lambda message: xxhash.xxh3_128_digest(message)[:1] * 16)
    with embedded() as client:
        yield client


def kv(tokens: list[int], keys: int, start: int, count: int) -> np.ndarray[Any, Any]:
    """Query. A function of all tokens and keys up to each token."""
    ends = range(start + 1, start + count + 1)
    marks = [hash((KEYS_START[keys] < end and keys, *tokens[:end])) % (1 << 48) for end in ends]
    return np.array([[mark >> 24 for mark in marks], [mark & 0xFFFFFF for mark in marks]]).reshape(1, 2, 1, count, 1)


def store_one(cache: Cache, tokens: list[int], keys: int) -> None:
    with cache.reserve(tokens, extra_keys=KEYS[keys]) as reservation:
        for block in reservation.blocks():
            block.write(kv(tokens, keys, block.start, block.num_tokens).astype(np.float32))
        reservation.commit()


def tokens_of(cache: Cache, tokens: list[int], keys: int) -> tuple[int, int]:
    """Query. Tokens that a hit gives, and how many of them have another prompt's bytes."""
    wrong = 0
    with cache.acquire(tokens, extra_keys=KEYS[keys]) as hit:
        for block in hit.blocks():
            right = np.array_equal(block.array, kv(tokens, keys, block.start, block.num_tokens))
            wrong += 0 if right else block.num_tokens
        return hit.verified_tokens, wrong


def store_and_read(client: Client, seed: int) -> tuple[int, int]:
    """Changes state. Random prompts over a tiny alphabet, with shared beginnings and endings."""
    choose, cache = random.Random(seed), client.attach(SMALL)
    endings = [choose.choices(range(4), k=choose.randrange(1, 13)) for _ in range(4)]
    total = all_wrong = 0
    for _ in range(ROUNDS):
        # Who reads a prompt first finds the other's blocks and drops them; so not all that is stored is read first.
        tokens = choose.choices(range(8), k=choose.choice((0, 2, 2, 4, 5))) + choose.choice(endings)
        tokens, keys = tokens[: choose.randrange(1, len(tokens) + 1)], choose.randrange(len(KEYS))
        if choose.random() < 0.5:
            store_one(cache, tokens, keys)
        else:
            found, wrong = tokens_of(cache, tokens, keys)
            total, all_wrong = total + found, all_wrong + wrong
    assert holds(client.status()["daemon"]) == (0, 0, 0)
    assert_balanced(client.status()["daemon"])
    return total, all_wrong


def twins(cache: Cache) -> tuple[list[int], list[int]]:
    """Query. Two first blocks of one name."""
    seen: dict[bytes, list[int]] = {}
    while True:
        tokens = [len(seen), 7]
        name = cache.acquire(tokens).prompt.block_hash(0)
        if name in seen:
            return seen[name], tokens
        seen[name] = tokens


@pytest.mark.parametrize(("stored", "asked"), [(2, 2), (2, 1), (1, 1)], ids=["whole", "in part", "short"])
@pytest.mark.parametrize("context", [True, False])
def test_a_block_behind_a_twin_is_a_miss(
    client: Client, monkeypatch: pytest.MonkeyPatch, stored: int, asked: int, context: bool
) -> None:
    """COR: its own name, tokens, parent and number are right, and so is the block before it."""
    if not context:
        monkeypatch.setattr(prompt_module, "context_digests", lambda tokens, *_: [0] * len(tokens))
    cache = client.attach(SMALL)
    one, other = twins(cache)
    store_one(cache, one, 0)
    store_one(cache, [*other, 5, 6][: 2 + stored], 0)
    found, wrong = tokens_of(cache, [*one, 5, 6][: 2 + asked], 0)
    assert (found, wrong) == ((2, 0) if context else (2 + asked, asked))
    if context:
        store_one(cache, [*one, 5, 6], 0)
        assert tokens_of(cache, [*one, 5, 6], 0) == (4, 0)


def test_no_hit_shows_bytes_of_a_prompt_with_equal_names(client: Client) -> None:
    """COR."""
    total, wrong = store_and_read(client, seed=0)
    assert not wrong
    assert total > ROUNDS // 2, "a cache that forgets everything is no way to pass"
    assert client.status()["daemon"]["stats"]["discards"]["header"] > 50, "names collided, and readers saw it"


def test_without_the_context_a_hit_would_lie(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """COR: the twin. All else that a header names agrees, and the bytes are another prompt's."""
    monkeypatch.setattr(prompt_module, "context_digests", lambda tokens, *_: [0] * len(tokens))
    _, wrong = store_and_read(client, seed=0)
    assert wrong
