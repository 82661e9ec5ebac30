"""Block hashes and block symbols: the only place keys are made.

A block hash names the KV of one block: 16 bytes over everything that conditions its bytes, so a pure function of bytes,
equal in every process, interpreter and machine. Message of a block, all integers u32 little endian:

    parent hash (16) | num_tokens | token ids | num_keys | (start in block | length | key bytes) ...

A key's start is part of the message, since the same key at another place is another context. The root of a chain is
made from the KVSpec's fingerprint, so chains of two specs never meet.

Block symbols serve matching inside a block: a byte string whose order is the order of tokens, token by token:

    token ids before the first key, u32 BIG endian | [0xFFFFFFFF | digest of all the block's keys (16)] | the other ids

Two blocks agree on a token exactly as far as their symbols agree, so a token never matches under another key.

A block's context is 8 bytes over everything before it. It owes nothing to the chain of hashes, so a reader sees by it
that a block continues another prompt, also where hashes collide: XXH3-64 of, for each block before it,

    token ids | 0xFFFFFFFF | num_keys | (start in the prompt | length | key bytes) ...

where a block without keys ends with its token ids.
"""

import array
import enum
import hashlib
import operator
import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NewType

import numpy as np
import xxhash
from numpy.typing import NDArray

HASH_NBYTES = 16
TOKEN_NBYTES = 4
TOKEN_MAX = 0xFFFFFFFE  # the value above it marks keys in block symbols
KEY_START_MAX = 0xFFFFFFFF
KEY_NBYTES_MAX = 65535
NUM_KEYS_MAX = 1024

BlockHash = NewType("BlockHash", bytes)

Keys = tuple[tuple[int, bytes], ...]
"""Normalised extra keys: (start token, key), sorted by start; the caller's order is kept among equal starts."""
NO_KEYS: Keys = ()

_ROOT_DOMAIN = b"kvstore chain root, version 1"
_FINGERPRINT_NBYTES = 32
_KEY_MARKER = b"\xff" * TOKEN_NBYTES
_MARKED_NBYTES = len(_KEY_MARKER) + HASH_NBYTES
_NO_DIGEST = bytes(HASH_NBYTES)


class HashKind(enum.StrEnum):
    """How blocks are hashed. XXH3 can be forged: only inside one trust domain. SHA256 is cut to its first 16 bytes."""

    XXH3 = "xxh3-128"
    SHA256 = "sha256-128"


def _sha256_128(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()[:HASH_NBYTES]


_DIGESTS: dict[HashKind, Callable[[bytes], bytes]] = {
    HashKind.XXH3: xxhash.xxh3_128_digest,
    HashKind.SHA256: _sha256_128,
}


def token_bytes(token_ids: Any) -> bytes:
    """Token ids as u32 little endian. Takes a sequence of ints, or anything with `__array__` (numpy, torch).

    ValueError: an id is negative or above TOKEN_MAX, or the array is not one-dimensional. TypeError: not integers.
    """
    ids = _array_of(token_ids) if hasattr(token_ids, "__array__") else _array_of_sequence(token_ids)
    if ids.size and (ids.min() < 0 or ids.max() > TOKEN_MAX):
        raise ValueError(f"token ids must lie in 0..{TOKEN_MAX}")
    return ids.astype("<u4", copy=False).tobytes()


def _array_of(token_ids: Any) -> NDArray[Any]:
    ids = np.asarray(token_ids)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, not {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, not of shape {ids.shape}")
    return ids


def _array_of_sequence(token_ids: object) -> NDArray[Any]:
    # Byte strings are sequences of ints too, and `array` would even read them as raw memory.
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"token ids must be a sequence of integers, not {type(token_ids).__name__}")
    try:
        packed = array.array("I", token_ids)
    except OverflowError as exc:
        raise ValueError(f"token ids must lie in 0..{TOKEN_MAX}") from exc
    return np.frombuffer(packed, np.uintc)


def normalise_keys(extra_keys: Sequence[bytes | tuple[int, bytes]]) -> Keys:
    """Extra keys in normal form; bare bytes start at token 0. ValueError: out of bounds. TypeError: another shape."""
    if len(extra_keys) > NUM_KEYS_MAX:
        raise ValueError(f"at most {NUM_KEYS_MAX} extra keys, not {len(extra_keys)}")
    return tuple(sorted((_normal_key(key) for key in extra_keys), key=operator.itemgetter(0)))


def _normal_key(extra_key: object) -> tuple[int, bytes]:
    match extra_key:
        case bytes() as key:
            start = 0
        case (int(start), bytes() as key) if isinstance(extra_key, tuple):
            pass
        case _:
            raise TypeError(f"an extra key is bytes or (start token, bytes), not {type(extra_key).__name__}")
    if not 0 <= start <= KEY_START_MAX:
        raise ValueError(f"an extra key must start in 0..{KEY_START_MAX}, not at {start}")
    if len(key) > KEY_NBYTES_MAX:
        raise ValueError(f"an extra key has at most {KEY_NBYTES_MAX} bytes, not {len(key)}")
    return int(start), key


def keys_in(keys: Keys, start: int, stop: int) -> Keys:
    """The keys that start in the token range [start, stop), their starts made relative to `start`.

    For a block, `stop` is where its own tokens end, also when it is short.
    """
    first, last = bisect_left(keys, (start,)), bisect_left(keys, (stop,))
    return tuple((key_start - start, key) for key_start, key in keys[first:last])


def root_hash(fingerprint: bytes, kind: HashKind) -> BlockHash:
    """The parent of every first block of a spec. Always SHA-256: it is made once, and must not be forged."""
    if len(fingerprint) != _FINGERPRINT_NBYTES:
        raise ValueError(f"a fingerprint has {_FINGERPRINT_NBYTES} bytes, not {len(fingerprint)}")
    return BlockHash(_sha256_128(b"\0".join((_ROOT_DOMAIN, kind.value.encode(), fingerprint))))


def hash_block(parent: bytes, tokens: bytes, keys: Keys, kind: HashKind) -> BlockHash:
    """Hash of one block: `tokens` u32 little endian, `keys` relative to its first token."""
    assert len(parent) == HASH_NBYTES
    return BlockHash(_DIGESTS[kind](parent + _body(tokens, keys)))


def hash_prefix(
    parent: bytes,
    tokens: bytes,
    block_tokens: int,
    kind: HashKind,
    keys: Keys = NO_KEYS,
    *,
    first_token: int = 0,
) -> bytes:
    """Hashes of all blocks of `tokens`, concatenated; the last block may be short.

    `first_token` is the position of tokens[0] in the prompt and starts a block, `parent` the hash of the block before
    it. `keys` are the whole prompt's: those that start before `first_token` are already in `parent`.
    """
    assert len(parent) == HASH_NBYTES
    assert first_token % block_tokens == 0
    digest = _DIGESTS[kind]
    return b"".join([parent := digest(parent + body) for body in _bodies(tokens, block_tokens, keys, first_token)])


def _bodies(tokens: bytes, block_tokens: int, keys: Keys, first_token: int) -> list[bytes]:
    """Each block's message without its parent. Blocks without keys are packed in one go: they are nearly all."""
    block_nbytes = block_tokens * TOKEN_NBYTES
    num_whole = len(tokens) // block_nbytes
    rows = np.zeros((num_whole, block_tokens + 2), "<u4")  # num_tokens | token ids | num_keys = 0
    rows[:, 0] = block_tokens
    rows[:, 1:-1] = np.frombuffer(tokens, "<u4", num_whole * block_tokens).reshape(num_whole, block_tokens)
    bodies = _cut(rows, rows.itemsize * rows.shape[1])
    if num_whole * block_nbytes < len(tokens):
        bodies.append(_body(tokens[num_whole * block_nbytes :], NO_KEYS))
    own_keys = keys_in(keys, first_token, first_token + len(tokens) // TOKEN_NBYTES)
    for block in {start // block_tokens for start, _ in own_keys}:
        block_keys = keys_in(own_keys, block * block_tokens, (block + 1) * block_tokens)
        bodies[block] = _body(tokens[block * block_nbytes : (block + 1) * block_nbytes], block_keys)
    return bodies


def _cut(packed: bytes | NDArray[Any], width: int) -> list[bytes]:
    """Pieces of `width` bytes each; numpy cuts several times as fast as slices in Python."""
    pieces: list[bytes] = np.frombuffer(packed, f"V{width}").tolist()
    return pieces


def _body(tokens: bytes, keys: Keys) -> bytes:
    num_tokens, rest = divmod(len(tokens), TOKEN_NBYTES)
    assert num_tokens > 0
    assert rest == 0
    return struct.pack("<I", num_tokens) + tokens + _packed_keys(keys)


def _packed_keys(keys: Keys) -> bytes:
    parts = [struct.pack("<I", len(keys))]
    for start, key in keys:
        parts += (struct.pack("<II", start, len(key)), key)
    return b"".join(parts)


def context_digests(
    tokens: bytes, block_tokens: int, keys: Keys = NO_KEYS, state: xxhash.xxh3_64 | None = None, first_token: int = 0
) -> list[int]:
    """The context of each block of a prompt, u64; the last block may be short. `keys` are the prompt's.

    One pass, about 0.15 us a block: what has been fed stays in the state, of which a digest is taken before each block.
    `tokens` are those from `first_token` on, where a block starts; `state` is of what comes before, and gets them, too.
    """
    assert first_token % block_tokens == 0
    width = block_tokens * TOKEN_NBYTES
    pieces = _cut(tokens[: len(tokens) // width * width], width)
    if len(tokens) % width:
        pieces.append(tokens[len(pieces) * width :])
    blocks_with_keys = {start // block_tokens for start, _ in keys}
    state = xxhash.xxh3_64() if state is None else state
    update, digest, contexts = state.update, state.intdigest, []
    for block, piece in enumerate(pieces, first_token // block_tokens):
        contexts.append(digest())
        update(piece)
        if block in blocks_with_keys:
            first, last = bisect_left(keys, (block * block_tokens,)), bisect_left(keys, ((block + 1) * block_tokens,))
            update(_KEY_MARKER + _packed_keys(keys[first:last]))  # no token id equals the marker
    return contexts


def keys_digest(keys: Keys) -> bytes:
    """16 bytes over the keys of one block, relative to it; zeros for no keys. Stored in a slot's header."""
    return _sha256_128(_packed_keys(keys)) if keys else _NO_DIGEST


def block_symbols(tokens: bytes, keys: Keys) -> bytes:
    """Symbols of one block: `tokens` u32 little endian, `keys` relative to its first token."""
    keys_start = keys[0][0] if keys else len(tokens) // TOKEN_NBYTES
    return block_symbols_of(tokens, keys_start, keys_digest(keys))


def block_symbols_of(tokens: bytes, keys_start: int, digest: bytes) -> bytes:
    """Symbols from what a slot's header stores; `keys_start` is the token count, or more, where there are no keys."""
    symbols = np.frombuffer(tokens, "<u4").astype(">u4").tobytes()
    cut = keys_start * TOKEN_NBYTES
    if cut >= len(symbols):
        return symbols
    return b"".join((symbols[:cut], _KEY_MARKER, digest, symbols[cut:]))


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading tokens on which two symbol strings agree, keys included."""
    common_nbytes = _common_nbytes(a, b)
    marker = _marker_at(a[:common_nbytes])
    if marker is None:
        return common_nbytes // TOKEN_NBYTES
    return max(marker, common_nbytes - _MARKED_NBYTES) // TOKEN_NBYTES


def _common_nbytes(a: bytes, b: bytes) -> int:
    nbytes = min(len(a), len(b))
    # As big-endian numbers, the strings differ first where their exclusive or has its highest bit.
    difference = int.from_bytes(a[:nbytes], "big") ^ int.from_bytes(b[:nbytes], "big")
    return nbytes - (difference.bit_length() + 7) // 8


def _marker_at(symbols: bytes) -> int | None:
    """Where the key marker begins; only whole words count, since FF bytes of two neighbours can look like it."""
    at = symbols.find(_KEY_MARKER)
    while at > 0 and at % TOKEN_NBYTES:
        at = symbols.find(_KEY_MARKER, at + 1)
    return at if at >= 0 else None
