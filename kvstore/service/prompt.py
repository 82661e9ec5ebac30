"""A prompt as the index knows it: block hashes, token bytes and extra keys, cut into blocks.

Hashes and header texts are made when they are asked for, and what an earlier prompt of the same beginning has made of
it is not made again: the next turn of a chat costs what is new in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.layout import Identity, identity_bytes, identity_rows, identity_sum
from kvstore.spec import KVSpec
from radix import (
    HASH_NBYTES,
    HashKind,
    block_symbols,
    context_digests,
    hash_prefix,
    keys_digest,
    keys_in,
    normalise_keys,
    root_hash,
    token_bytes,
)
from transports.messages import BLOCKS_MAX, TOKENS_MAX

ExtraKeys = Sequence[bytes | tuple[int, bytes]]
PROMPTS_KEPT, TOKENS_KEPT = 8, 1 << 20  # 19 bytes a token in blocks of 16, header texts included


class Prompt:
    """Token ids and extra keys, hashed and cut into blocks. Pure.

    Whole grains only for opaque layouts; what exceeds the protocol's bounds is left out, since it may be forgotten.
    """

    def __init__(
        self, spec: KVSpec, kind: HashKind, token_ids: Any, extra_keys: ExtraKeys, hashes: bytes | None = None
    ) -> None:
        """`token_ids`: ints in [0, 2^32 - 2], a sequence or a one-dimensional integer array. ValueError, TypeError.

        `hashes`: of its blocks, where they are known.
        """
        tokens = token_bytes(token_ids)
        keys = normalise_keys(extra_keys)
        num_tokens = min(len(tokens) // 4, TOKENS_MAX, BLOCKS_MAX * spec.block_tokens)
        num_tokens -= num_tokens % spec.grain_tokens
        self.spec = spec
        self.tokens = tokens[: 4 * num_tokens]
        self.num_tokens = num_tokens
        self.num_blocks = -(-num_tokens // spec.block_tokens)
        self._kind = kind
        self._root = root_hash(spec.fingerprint, kind)
        self._keys = keys_in(keys, 0, num_tokens)
        self._known_hashes = b"" if hashes is None else hashes
        self._known_contexts: tuple[list[int], xxhash.xxh3_64] = [], xxhash.xxh3_64()
        self._known_identities: npt.NDArray[np.void] | None = None

    @property
    def num_whole_blocks(self) -> int:
        """Query."""
        return self.num_tokens // self.spec.block_tokens

    def is_same(self, other: Prompt) -> bool:
        """Query. Whether both are of the same tokens and extra keys, in one spec."""
        return (self._root, self._keys, self.tokens) == (other._root, other._keys, other.tokens)

    def num_shared_blocks(self, other: Prompt) -> int:
        """Query. Leading whole blocks of which both have the same tokens and extra keys."""
        if self._root != other._root:
            return 0
        count = min(self.num_tokens, other.num_tokens)
        differ = np.frombuffer(self.tokens, "<u4", count) != np.frombuffer(other.tokens, "<u4", count)
        count = int(differ.argmax()) if differ.any() else count
        if self._keys != other._keys:
            pairs = zip_longest(self._keys, other._keys)
            parting = next(pair for pair in pairs if pair[0] != pair[1])
            count = min(count, *(key[0] for key in parting if key is not None))
        return count // self.spec.block_tokens

    def go_on_from(self, other: Prompt, num_blocks: int) -> Self:
        """Changes state. What another prompt knows of the first whole blocks, which both share, is known here, too."""
        self._known_hashes = other.hashes[: num_blocks * HASH_NBYTES]
        contexts, state = other.__dict__.get("_whole_contexts", ([], None))
        if state is not None and num_blocks == len(contexts):
            self._known_contexts = contexts, state
        rows = other.__dict__.get("whole_identities")
        self._known_identities = None if rows is None else rows[:num_blocks]
        return self

    @cached_property
    def hashes(self) -> bytes:
        """Of all blocks."""
        known, at = self._known_hashes, len(self._known_hashes) // HASH_NBYTES
        if at == self.num_blocks:
            return known
        width = self.spec.block_tokens
        parent, tokens = known[-HASH_NBYTES:] or self._root, self.tokens[4 * at * width :]
        return known + hash_prefix(parent, tokens, width, self._kind, self._keys, first_token=at * width)

    @property
    def key_facts(self) -> list[tuple[int, bytes]]:
        """Query. Per block that has extra keys: where the first one starts, and the digest of them all."""
        blocks = sorted({start // self.spec.block_tokens for start, _ in self._keys})
        facts = []
        for block in blocks:
            first = block * self.spec.block_tokens
            keys = keys_in(self._keys, first, first + self.spec.block_tokens)
            facts.append((first + keys[0][0], keys_digest(keys)))
        return facts

    @property
    def tail(self) -> bytes:
        """Query. Symbols of a short last block; nothing if the last block is whole."""
        if self.num_tokens % self.spec.block_tokens == 0:
            return b""
        return self.symbols(self.num_blocks - 1)

    def leading(self, num_blocks: int) -> tuple[bytes, bytes, list[tuple[int, bytes]]]:
        """Query. Hashes, tokens (u32le) and extra keys of the first blocks: a prompt of them is of the same blocks."""
        num_tokens = min(self.num_tokens, num_blocks * self.spec.block_tokens)
        hashes, tokens = self.hashes[: num_blocks * HASH_NBYTES], self.tokens[: 4 * num_tokens]
        return hashes, tokens, list(keys_in(self._keys, 0, num_tokens))

    def block_hash(self, block: int) -> bytes:
        """Query."""
        return self.hashes[block * HASH_NBYTES : (block + 1) * HASH_NBYTES]

    def parent_hash(self, block: int) -> bytes:
        """Query. The hash before; the spec's root for block 0."""
        return self.block_hash(block - 1) if block else self._root

    def block_tokens(self, block: int) -> bytes:
        """Query. u32le token ids of a block."""
        width = 4 * self.spec.block_tokens
        return self.tokens[block * width : (block + 1) * width]

    def symbols(self, block: int) -> bytes:
        """Query. What token-granular matching compares."""
        first = block * self.spec.block_tokens
        return block_symbols(self.block_tokens(block), keys_in(self._keys, first, first + self.spec.block_tokens))

    @cached_property
    def _whole_contexts(self) -> tuple[list[int], xxhash.xxh3_64]:
        """Of whole blocks, and the state that has eaten them all."""
        width = self.spec.block_tokens
        known, state = self._known_contexts
        state, first, end = state.copy(), len(known) * width, self.num_whole_blocks * width
        new = context_digests(self.tokens[4 * first : 4 * end], width, self._keys, state, first)
        return known + new, state

    @cached_property
    def contexts(self) -> list[int]:
        """Per block, the digest of all tokens and extra keys before it."""
        contexts, state = self._whole_contexts
        return contexts if self.num_blocks == len(contexts) else [*contexts, state.intdigest()]

    @cached_property
    def whole_identities(self) -> npt.NDArray[np.void] | None:
        """Identity rows of all whole blocks, made at once; None where extra keys need the slow way."""
        if self._keys:
            return None
        known, count, width = self._known_identities, self.num_whole_blocks, self.spec.block_tokens
        first = 0 if known is None else len(known)
        new = identity_rows(
            self.spec.fingerprint,
            self.parent_hash(first),
            self.hashes[first * HASH_NBYTES : count * HASH_NBYTES],
            self.tokens[4 * first * width : 4 * count * width],
            self.contexts[first:count],
            width,
            first,
        )
        self._known_identities = None  # of another prompt, which need not live as long
        return new if known is None else np.concatenate((known, new))

    def identities(self, first: int) -> list[tuple[bytes, int]]:
        """Query. What the headers of the blocks from `first` on begin with, and its sum."""
        rows, spec = self.whole_identities, self.spec
        texts = [row.tobytes() for row in rows[first:]] if rows is not None else []
        texts += [identity_bytes(self.identity(block)) for block in range(first + len(texts), self.num_blocks)]
        starts = range(first * spec.block_tokens, self.num_tokens, spec.block_tokens)
        return [
            (text, identity_sum(text, spec.payload_nbytes(min(spec.block_tokens, self.num_tokens - start))))
            for text, start in zip(texts, starts, strict=True)
        ]

    def identity(self, block: int) -> Identity:
        """Query. What the header of this block must say."""
        first = block * self.spec.block_tokens
        tokens = self.block_tokens(block)
        keys = keys_in(self._keys, first, first + self.spec.block_tokens) if self._keys else ()
        return Identity(
            self.spec.fingerprint,
            self.block_hash(block),
            self.parent_hash(block),
            block,
            tokens,
            keys[0][0] if keys else len(tokens) // 4,
            keys_digest(keys),
            self.contexts[block],
            self.spec.block_tokens,
        )


class RecentPrompts:
    """The last prompts of a cache. Several threads may ask: what one of them adds, another may lose, no more."""

    def __init__(self) -> None:
        self._prompts: tuple[Prompt, ...] = ()

    def met(self, prompt: Prompt) -> Prompt:
        """Changes state. The prompt, or the same one met before; it knows what recent ones know of its beginning."""
        best, shared = None, 0
        for other in self._prompts:
            if prompt.block_tokens(shared) == other.block_tokens(shared):  # else it shares no more: a cheap look first
                count = prompt.num_shared_blocks(other)
                if count > shared:
                    best, shared = other, count
        if best is not None:
            prompt = best if prompt.is_same(best) else prompt.go_on_from(best, shared)
        is_grown = best is not None and shared == best.num_whole_blocks
        others = (other for other in self._prompts if other is not prompt and not (is_grown and other is best))
        self._prompts = _first_of((prompt, *others))
        _ = prompt.hashes  # now, and not while a connection is locked
        return prompt


def _first_of(prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """As many as may be kept."""
    kept, room = [], TOKENS_KEPT
    for prompt in prompts[:PROMPTS_KEPT]:
        room -= prompt.num_tokens
        if room < 0:
            break
        kept.append(prompt)
    return tuple(kept)
