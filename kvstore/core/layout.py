"""The slot: one header page, then the payload. This is the format of the slab and of every tier below it.

Header page, little endian (4,096 bytes; identity first, so that a reader compares it in one piece):

    offset  bytes  identity                          offset  bytes  state
         0      8  magic                               2160      8  payload_nbytes
         8      4  version                             2168      8  generation of the reservation that filled it
        12      4  num_tokens                          2176      8  XXH3-64 of bytes [0, 2176)
        16     32  fingerprint of the KVSpec           2184      4  num_rects (0: no checksums yet)
        48     16  block hash                          2188    108  zero
        64     16  parent's hash                       2296      8  XXH3-64 of the rectangles
        80     16  keys digest                         2304     14  per rectangle: sum u64, then four 12-bit numbers:
        96      4  keys start                                       first layer, layers, first head, heads
       100      4  number of the block in its chain
       104      8  zero
       112   2048  token ids, u32 each, zero padded

The payload of a block of n tokens is `[layer, K/V, head, token, dim]` with token extent n, without gaps. A checksum
is XXH3-64 over the bytes of one rectangle of layers x heads, in that order.
"""

import struct
from typing import NamedTuple

import xxhash

PAGE_NBYTES = 4096
HEADER_NBYTES = PAGE_NBYTES
BLOCK_TOKENS_MAX = 512
RECTS_MAX = 128
RECT_INDEX_MAX = 4095
MAGIC = b"KVSLOT\r\n"
VERSION = 1

TOKENS_OFFSET = 112
STATE_OFFSET = 2160
IDENTITY_SUM_OFFSET = 2176
RECT_COUNT_OFFSET = 2184
RECT_SUM_OFFSET = 2296
RECTS_OFFSET = 2304
RECT_NBYTES = 14

_FIXED = struct.Struct("<8sII32s16s16s16sII8x")
_STATE = struct.Struct("<QQQ")
_RECT_HEAD = struct.Struct("<I108xQ")
assert _FIXED.size == TOKENS_OFFSET
assert RECT_COUNT_OFFSET + _RECT_HEAD.size == RECTS_OFFSET
assert RECTS_OFFSET + RECTS_MAX * RECT_NBYTES == HEADER_NBYTES


class Identity(NamedTuple):
    """What a block is.

    `number`: its place in the chain. `tokens`: u32 little-endian. `keys_start`: where in the block its first extra
    key starts; num_tokens if it has none.
    """

    fingerprint: bytes
    block_hash: bytes
    parent: bytes
    number: int
    tokens: bytes
    keys_start: int
    keys_digest: bytes


class Rect(NamedTuple):
    """One writer's part of a payload: half-open ranges of layers and K/V heads, and the sum of its bytes."""

    layers: tuple[int, int]
    heads: tuple[int, int]
    sum: int


class Header(NamedTuple):
    """A parsed header page."""

    identity: Identity
    payload_nbytes: int
    generation: int
    rects: tuple[Rect, ...]


def identity_bytes(identity: Identity) -> bytes:
    """Query. The leading bytes of a header up to the end of the token ids: equal bytes, equal block."""
    return (
        _FIXED.pack(
            MAGIC,
            VERSION,
            len(identity.tokens) // 4,
            identity.fingerprint,
            identity.block_hash,
            identity.parent,
            identity.keys_digest,
            identity.keys_start,
            identity.number,
        )
        + identity.tokens
    )


def header_head(identity: bytes, payload_nbytes: int, generation: int) -> bytes:
    """Query. Header bytes [0, RECT_COUNT_OFFSET), from `identity_bytes`."""
    body = identity.ljust(STATE_OFFSET, b"\0") + struct.pack("<QQ", payload_nbytes, generation)
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def header_rects(rects: tuple[Rect, ...]) -> bytes:
    """Query. Header bytes [RECT_COUNT_OFFSET, ...) for these rectangles; none means: no checksums."""
    packed = b"".join(_pack_rect(rect) for rect in rects)
    return _RECT_HEAD.pack(len(rects), xxhash.xxh3_64_intdigest(packed)) + packed


def _pack_rect(rect: Rect) -> bytes:
    (first_layer, last_layer), (first_head, last_head) = rect.layers, rect.heads
    packed = first_layer | (last_layer - first_layer) << 12 | first_head << 24 | (last_head - first_head) << 36
    return rect.sum.to_bytes(8, "little") + packed.to_bytes(6, "little")


def _unpack_rect(data: bytes) -> Rect:
    packed = int.from_bytes(data[8:], "little")
    first_layer, layers, first_head, heads = (packed >> shift & 0xFFF for shift in (0, 12, 24, 36))
    return Rect(
        (first_layer, first_layer + layers), (first_head, first_head + heads), int.from_bytes(data[:8], "little")
    )


def parse_header(page: bytes) -> Header | None:
    """Query. The header of a slot, or None when any part of it is not what was written (class COR)."""
    assert len(page) == HEADER_NBYTES
    payload_nbytes, generation, identity_sum = _STATE.unpack_from(page, STATE_OFFSET)
    if xxhash.xxh3_64_intdigest(page[:IDENTITY_SUM_OFFSET]) != identity_sum:
        return None
    magic, version, num_tokens, fingerprint, block_hash, parent, digest, keys_start, number = _FIXED.unpack_from(page)
    num_rects, rect_sum = _RECT_HEAD.unpack_from(page, RECT_COUNT_OFFSET)
    if magic != MAGIC or version != VERSION or num_tokens > BLOCK_TOKENS_MAX or num_rects > RECTS_MAX:
        return None
    packed = page[RECTS_OFFSET : RECTS_OFFSET + num_rects * RECT_NBYTES]
    if xxhash.xxh3_64_intdigest(packed) != rect_sum:
        return None
    tokens = page[TOKENS_OFFSET : TOKENS_OFFSET + 4 * num_tokens]
    identity = Identity(fingerprint, block_hash, parent, number, tokens, keys_start, digest)
    rects = tuple(_unpack_rect(packed[at : at + RECT_NBYTES]) for at in range(0, len(packed), RECT_NBYTES))
    return Header(identity, payload_nbytes, generation, rects)
