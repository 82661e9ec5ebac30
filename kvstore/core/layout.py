"""The slot: one header page, then the payload. This is the format of the slab and of every tier below it.

Header page, little endian (4,096 bytes; identity first, so that a reader compares it in one piece):

    offset  bytes  identity                          offset  bytes  state
         0      8  magic                               2160      8  payload_nbytes
         8      4  version                             2168      8  XXH3-64 of the identity and payload_nbytes
        12      2  num_tokens                          2176      8  generation of the reservation that filled it
        14      2  block_tokens: of a whole block
        16     32  fingerprint of the KVSpec           2184      4  num_rects (0: no checksums yet)
        48     16  block hash                          2188    108  zero
        64     16  parent's hash                       2296      8  XXH3-64 of [2176, 2296) and the rectangles
        80     16  keys digest                         2304     14  per rectangle: sum u64, then four 12-bit numbers:
        96      4  keys start                                       first layer, layers, first head, heads
       100      4  number of the block in its chain
       104      8  context: digest of all before it
       112     4n  token ids, u32 each

What lies between the last token id and 2160, and behind the last rectangle, is left over from earlier blocks.

The payload of a block of n tokens is `[layer, K/V, head, token, dim]` with token extent n, without gaps. A checksum
is XXH3-64 over the bytes of one rectangle of layers x heads, in that order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

PAGE_NBYTES = 4096
HEADER_NBYTES = PAGE_NBYTES
BLOCK_TOKENS_MAX = 512
RECTS_MAX = 128
RECT_INDEX_MAX = 4095
MAGIC = b"KVSLOT\r\n"
VERSION = 2

TOKENS_OFFSET = 112
NBYTES_OFFSET = 2160
STATE_OFFSET = 2176
STATE_SUM_OFFSET = 2296
RECTS_OFFSET = 2304
RECT_NBYTES = 14

_FIXED = struct.Struct("<8sIHH32s16s16s16sIIQ")
_SIZE = struct.Struct("<QQ")
_STATE = struct.Struct("<QI108x")
assert _FIXED.size == TOKENS_OFFSET
assert NBYTES_OFFSET + _SIZE.size == STATE_OFFSET
assert STATE_OFFSET + _STATE.size == STATE_SUM_OFFSET
assert RECTS_OFFSET + RECTS_MAX * RECT_NBYTES == HEADER_NBYTES


class Identity(NamedTuple):
    """What a block is.

    `number`: its place in the chain. `tokens`: u32 little-endian. `keys_start`: where in the block its first extra
    key starts; num_tokens if it has none. `context`: of all tokens and keys before the block, see radix.hashing. The
    other fields say which block it is as far as hashes do not collide; this one, whose KV it goes on from.
    `block_tokens`: of the spec, so that a header alone tells a short block, and the slot that its spec uses.
    """

    fingerprint: bytes
    block_hash: bytes
    parent: bytes
    number: int
    tokens: bytes
    keys_start: int
    keys_digest: bytes
    context: int
    block_tokens: int


class Shard(NamedTuple):
    """A rank's part of every block: half-open ranges of layers and K/V heads."""

    layers: tuple[int, int]
    heads: tuple[int, int]

    @property
    def area(self) -> int:
        return (self.layers[1] - self.layers[0]) * (self.heads[1] - self.heads[0])

    def overlaps(self, other: Shard) -> bool:
        """Query."""
        return _meet(self.layers, other.layers) and _meet(self.heads, other.heads)


class Rect(NamedTuple):
    """One writer's part of a payload, and the sum of its bytes."""

    shard: Shard
    sum: int


class Header(NamedTuple):
    """A parsed header page."""

    identity: Identity
    payload_nbytes: int
    generation: int
    rects: tuple[Rect, ...]

    @property
    def is_short(self) -> bool:
        """Query. Whether the block has fewer tokens than others of its spec."""
        return len(self.identity.tokens) // 4 < self.identity.block_tokens

    @property
    def slot_nbytes(self) -> int:
        """Query. Of the slots that blocks of this spec lie in; a header found in another one is a leftover."""
        num_tokens = len(self.identity.tokens) // 4
        return slot_nbytes_for(self.payload_nbytes // max(1, num_tokens) * self.identity.block_tokens)


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def slot_nbytes_for(block_nbytes: int) -> int:
    """Query. Header page plus payload of a whole block, rounded up to whole pages: O_DIRECT moves nothing else."""
    return HEADER_NBYTES + -(-block_nbytes // PAGE_NBYTES) * PAGE_NBYTES


def identity_bytes(identity: Identity) -> bytes:
    """Query. The leading bytes of a header up to the end of the token ids: equal bytes, equal block."""
    return (
        _FIXED.pack(
            MAGIC,
            VERSION,
            len(identity.tokens) // 4,
            identity.block_tokens,
            identity.fingerprint,
            identity.block_hash,
            identity.parent,
            identity.keys_digest,
            identity.keys_start,
            identity.number,
            identity.context,
        )
        + identity.tokens
    )


def identity_rows(
    fingerprint: bytes,
    parent: bytes,
    hashes: bytes,
    tokens: bytes,
    contexts: Sequence[int],
    block_tokens: int,
    first: int = 0,
) -> npt.NDArray[np.void]:
    """Query. `identity_bytes` of a chain of whole blocks without extra keys, one row each: [B] of 112 + 4T bytes.

    `parent`: hash before the first of `hashes`. `tokens`: u32le, B x T of them. `contexts`: B of them. `first`: which
    block of its prompt the first of these is.
    """
    rows = np.zeros(len(hashes) // 16, _identity_dtype(block_tokens))
    chain = np.frombuffer(parent + hashes, "V16")
    rows["magic"], rows["version"] = MAGIC, VERSION
    rows["num_tokens"] = rows["block_tokens"] = block_tokens
    rows["fingerprint"] = np.frombuffer(fingerprint, "V32")
    rows["block_hash"], rows["parent"] = chain[1:], chain[:-1]
    rows["keys_start"] = block_tokens
    rows["number"] = np.arange(first, first + len(rows))
    rows["context"] = contexts
    rows["tokens"] = np.frombuffer(tokens, "<u4").reshape(len(rows), block_tokens)
    return rows


@lru_cache(maxsize=64)
def _identity_dtype(block_tokens: int) -> np.dtype[np.void]:
    """The same layout as _FIXED and the tokens behind it. 16 zero bytes are the digest of no keys."""
    texts = [("fingerprint", "V32"), ("block_hash", "V16"), ("parent", "V16"), ("keys_digest", "V16")]
    numbers = [("keys_start", "<u4"), ("number", "<u4"), ("context", "<u8"), ("tokens", "<u4", (block_tokens,))]
    sizes = [("num_tokens", "<u2"), ("block_tokens", "<u2")]
    return np.dtype([("magic", "S8"), ("version", "<u4"), *sizes, *texts, *numbers])


def identity_sum(identity: bytes, payload_nbytes: int) -> int:
    """Query. Guards `identity_bytes` and the size of the payload."""
    return xxhash.xxh3_64_intdigest(identity + payload_nbytes.to_bytes(8, "little"))


def header_tail(payload_nbytes: int, sum_of_identity: int, generation: int, rects: tuple[Rect, ...]) -> bytes:
    """Query. Header bytes [NBYTES_OFFSET, ...)."""
    return _SIZE.pack(payload_nbytes, sum_of_identity) + header_state(generation, rects)


def header_state(generation: int, rects: tuple[Rect, ...]) -> bytes:
    """Query. Header bytes [STATE_OFFSET, ...): the reservation that filled the slot, and its checksums, if any."""
    state = _STATE.pack(generation, len(rects))
    packed = b"".join([rect.sum.to_bytes(8, "little") + _pack_ranges(*rect.shard) for rect in rects])
    return state + struct.pack("<Q", xxhash.xxh3_64_intdigest(state + packed)) + packed


@lru_cache(maxsize=1024)
def _pack_ranges(layers: tuple[int, int], heads: tuple[int, int]) -> bytes:
    packed = layers[0] | (layers[1] - layers[0]) << 12 | heads[0] << 24 | (heads[1] - heads[0]) << 36
    return packed.to_bytes(6, "little")


def _unpack_rect(data: bytes) -> Rect:
    packed = int.from_bytes(data[8:], "little")
    first_layer, layers, first_head, heads = (packed >> shift & 0xFFF for shift in (0, 12, 24, 36))
    shard = Shard((first_layer, first_layer + layers), (first_head, first_head + heads))
    return Rect(shard, int.from_bytes(data[:8], "little"))


def parse_header(page: bytes) -> Header | None:
    """Query. The header of a slot, or None when any part of it is not what was written (class COR)."""
    assert len(page) == HEADER_NBYTES
    magic, version, num_tokens, block_tokens, fingerprint, block_hash, parent, digest, keys_start, number, context = (
        _FIXED.unpack_from(page)
    )
    payload_nbytes, sum_of_identity = _SIZE.unpack_from(page, NBYTES_OFFSET)
    if magic != MAGIC or version != VERSION or not num_tokens <= block_tokens <= BLOCK_TOKENS_MAX:
        return None
    if identity_sum(page[: TOKENS_OFFSET + 4 * num_tokens], payload_nbytes) != sum_of_identity:
        return None
    state = parse_state(page[STATE_OFFSET:])
    if state is None:
        return None
    tokens = page[TOKENS_OFFSET : TOKENS_OFFSET + 4 * num_tokens]
    identity = Identity(fingerprint, block_hash, parent, number, tokens, keys_start, digest, context, block_tokens)
    return Header(identity, payload_nbytes, *state)


def parse_state(state: bytes) -> tuple[int, tuple[Rect, ...]] | None:
    """Query. Generation and checksums from header bytes [STATE_OFFSET, HEADER_NBYTES); None where they are damaged."""
    generation, num_rects = _STATE.unpack_from(state)
    if num_rects > RECTS_MAX:
        return None
    sum_at, rects_at = STATE_SUM_OFFSET - STATE_OFFSET, RECTS_OFFSET - STATE_OFFSET
    packed = state[rects_at : rects_at + num_rects * RECT_NBYTES]
    if xxhash.xxh3_64_intdigest(state[:sum_at] + packed) != int.from_bytes(state[sum_at:rects_at], "little"):
        return None
    return generation, tuple(_unpack_rect(packed[at : at + RECT_NBYTES]) for at in range(0, len(packed), RECT_NBYTES))
