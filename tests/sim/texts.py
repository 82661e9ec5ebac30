"""Prompts whose KV follows from their tokens: a byte of any other block, or of another prompt's, is seen at once."""

from __future__ import annotations

from functools import cached_property
from random import Random

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.layout import Shard
from kvstore.service.hit import part_of
from kvstore.spec import KVSpec
from radix import HashKind, hash_block, keys_in, normalise_keys, root_hash, token_bytes
from tests.models import rows_of

Bytes = npt.NDArray[np.uint8]
Keys = tuple[tuple[int, bytes], ...]

SPECS = (
    KVSpec(model="gqa", dtype="float16", num_layers=2, num_kv_heads=2, head_dim=2, block_tokens=4),
    KVSpec(model="mla", dtype="bfloat16", num_layers=3, latent_dim=100, block_tokens=8),
    KVSpec(model="opaque", dtype="uint8", num_layers=1, block_tokens=6, layout="x", token_nbytes=700, grain_tokens=2),
    KVSpec(model="gqa", dtype="float16", num_layers=2, num_kv_heads=2, head_dim=2, block_tokens=4, tenant_salt="other"),
)  # slots of 8, 12, 12 and again 8 KiB
TOKENS_MAX = 60


class Text:
    """A prompt, and the KV of each of its tokens: a function of the spec, the tokens up to it, and the keys so far."""

    def __init__(self, spec: KVSpec, token_ids: tuple[int, ...], keys: Keys) -> None:
        num_tokens = len(token_ids) - len(token_ids) % spec.grain_tokens
        self.spec = spec
        self.token_ids = token_ids[:num_tokens]
        self.keys = keys_in(normalise_keys(keys), 0, num_tokens)
        self.num_tokens = num_tokens
        self.num_blocks = -(-num_tokens // spec.block_tokens)

    @cached_property
    def kv(self) -> Bytes:
        """Query. [rows, tokens, width]."""
        rows, width = rows_of(self.spec)
        state, states = self.spec.fingerprint, np.empty(self.num_tokens, np.uint64)
        for token, token_id in enumerate(self.token_ids):
            begun = b"".join(key for start, key in self.keys if start == token)
            state = xxhash.xxh3_64_digest(state + token_id.to_bytes(4, "little") + begun)
            states[token] = int.from_bytes(state, "little")
        places = np.arange(1, -(-rows * width // 8) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        values = states[:, None] * (places | np.uint64(1))[None, :] + places[None, :]
        values ^= values >> np.uint64(29)
        flat = values.view(np.uint8).reshape(self.num_tokens, -1)[:, : rows * width]
        return np.ascontiguousarray(flat.reshape(self.num_tokens, rows, width).transpose(1, 0, 2))

    def expected(self, start: int, num_tokens: int) -> Bytes:
        """Query. [rows, num_tokens, width] of the tokens from `start` on."""
        return self.kv[:, start : start + num_tokens]

    def array(self, start: int, num_tokens: int, shard: Shard | None = None) -> npt.NDArray[np.generic]:
        """Query. The same as a block's array, or a rank's part of that."""
        whole = np.ascontiguousarray(self.expected(start, num_tokens)).view(self.spec.numpy_dtype)
        return part_of(whole.reshape(self.spec.array_shape(num_tokens)), shard)

    def shows(self, array: npt.NDArray[np.generic], start: int, num_tokens: int, shard: Shard | None = None) -> bool:
        """Query. Whether a block's array, or a rank's, holds what belongs there, bit for bit."""
        if shard is not None:
            right = self.array(start, num_tokens, shard)
            return array.shape == right.shape and array.tobytes() == right.tobytes()
        rows, width = rows_of(self.spec)
        found = np.ascontiguousarray(array).view(np.uint8).reshape(rows, num_tokens, width)
        return bool((found == self.expected(start, num_tokens)).all())

    def begins(self, payload: Bytes, start: int, num_tokens: int) -> bool:
        """Query. Whether a whole payload begins, in each row, with what belongs to so many tokens there."""
        rows = payload.reshape(len(self.kv), -1, self.kv.shape[2])
        return bool((rows[:, :num_tokens] == self.expected(start, num_tokens)).all())

    def common(self, other: Text, num_tokens: int) -> int:
        """Query. Leading tokens, of the other's first `num_tokens`, that may be used for this prompt.

        The store's rule, stricter than the pattern: from a block's first extra key on, all keys of the block count.
        """
        if self.spec != other.spec:
            return 0
        most = min(self.num_tokens, num_tokens)
        for token in range(most):
            if self.token_ids[token] != other.token_ids[token] or self._facts(token) != other._facts(token):
                return token
        return most

    def _facts(self, token: int) -> Keys:
        if not self.keys:
            return ()
        first = token - token % self.spec.block_tokens
        own = tuple(key for key in self.keys if first <= key[0] < first + self.spec.block_tokens)
        return own if own and own[0][0] <= token else ()


def _grafted(head: Text, tail: Text, rng: Random) -> Text:
    """The first blocks of one prompt before the last ones of another: equal tokens in another context."""
    cut = head.spec.block_tokens * rng.randint(1, max(1, min(head.num_blocks, tail.num_blocks)))
    return Text(head.spec, head.token_ids[:cut] + tail.token_ids[cut:], ())


def hash_kind(spec: KVSpec) -> HashKind:
    """Query. As the store chooses it."""
    return HashKind.SHA256 if spec.tenant_salt else HashKind.XXH3


def collided(text: Text, rng: Random) -> Text:
    """Query. The prompt with another first block of the same name, where hashes are so short that one is found."""
    size, kind = text.spec.block_tokens, hash_kind(text.spec)
    root = root_hash(text.spec.fingerprint, kind)
    wanted = hash_block(root, token_bytes(text.token_ids[:size]), (), kind)
    for _ in range(1000):
        head = tuple(rng.choices(range(1, 51), k=size))
        if head != text.token_ids[:size] and hash_block(root, token_bytes(head), (), kind) == wanted:
            return Text(text.spec, head + text.token_ids[size:], ())
    return text


def some_text(spec: KVSpec, known: list[Text], rng: Random, *, alphabet: int) -> Text:
    """Query. A new prompt; or one of those known, one that goes on from it, or one that leaves it midway."""
    ids: tuple[int, ...] = ()
    keys: Keys = ()
    if len(known) > 1 and rng.random() < 0.08:
        return _grafted(*rng.choices(known[-24:], k=2), rng)
    if known and rng.random() < 0.9:
        old = rng.choice(known[-24:])
        if rng.random() < 0.45:
            return old
        ids, keys = old.token_ids[: rng.choice((old.num_tokens, rng.randint(0, old.num_tokens)))], old.keys
    if not ids or rng.random() < 0.7:
        ids = (ids + tuple(rng.choices(range(1, alphabet + 1), k=rng.randint(1, 12))))[:TOKENS_MAX]
    if rng.random() < 0.1:
        keys = tuple(sorted({(rng.randrange(len(ids)), rng.choice((b"cat", b"dog"))) for _ in range(2)}))
    return Text(spec, ids, keys)
