"""A prompt as the index knows it: block hashes, token bytes and extra keys, cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

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
        self._root = root_hash(spec.fingerprint, kind)
        self._keys = keys_in(keys, 0, num_tokens)
        if hashes is None:
            hashes = hash_prefix(self._root, self.tokens, spec.block_tokens, kind, self._keys)
        self.hashes = hashes

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
    def contexts(self) -> list[int]:
        """Per block, the digest of all tokens and extra keys before it."""
        return context_digests(self.tokens, self.spec.block_tokens, self._keys)

    @cached_property
    def whole_identities(self) -> npt.NDArray[np.void] | None:
        """Identity rows of all whole blocks, made at once; None where extra keys need the slow way."""
        if self._keys:
            return None
        count = self.num_tokens // self.spec.block_tokens
        return identity_rows(
            self.spec.fingerprint,
            self._root,
            self.hashes[: count * HASH_NBYTES],
            self.tokens[: count * 4 * self.spec.block_tokens],
            self.contexts[:count],
            self.spec.block_tokens,
        )

    @cached_property
    def identities(self) -> list[tuple[bytes, int]]:
        """What the headers of all blocks begin with, and its sum."""
        rows, spec = self.whole_identities, self.spec
        texts = [row.tobytes() for row in rows] if rows is not None else []
        texts += [identity_bytes(self.identity(block)) for block in range(len(texts), self.num_blocks)]
        return [
            (text, identity_sum(text, spec.payload_nbytes(min(spec.block_tokens, self.num_tokens - start))))
            for text, start in zip(texts, range(0, self.num_tokens, spec.block_tokens), strict=True)
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
