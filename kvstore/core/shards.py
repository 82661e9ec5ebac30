"""Rectangles of layers x heads within a payload: where a rank's bytes lie, and whether they are what was summed.

A payload of n tokens is `[L, K/V, H, n, D]`; a shard of it is `[l0:l1, :, h0:h1]`: 2 rows per layer, each without
gaps. Where there is more than one head there are K and V; with one (MLA, or one K/V head) a shard has all of each
layer. So a header whose rectangles cover the block tells where each of them lies, without the KVSpec.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.layout import HEADER_NBYTES, Header, Rect, Shard

Bytes = npt.NDArray[np.uint8]


def shard_bytes(payload: Bytes, num_layers: int, num_heads: int, shard: Shard) -> Bytes:
    """Query. The shard's rows of a payload: `[layers, K/V, nbytes]`, a view with strides."""
    (first_layer, end_layer), (first_head, end_head) = shard
    heads = payload.reshape(num_layers, 2 if num_heads > 1 else 1, num_heads, -1)
    return heads[first_layer:end_layer, :, first_head:end_head]


def shard_sum(payload: Bytes, num_layers: int, num_heads: int, shard: Shard) -> int:
    """Query. XXH3-64 of the shard's bytes, in the order of layers, K/V, heads, tokens.

    What has gaps is copied first: two calls that release the GIL, where a sum of row after row would hold it.
    """
    if shard != ((0, num_layers), (0, num_heads)):
        payload = np.ascontiguousarray(shard_bytes(payload, num_layers, num_heads, shard)).reshape(-1)
    return xxhash.xxh3_64_intdigest(payload.data)


def are_right(payload: Bytes, num_layers: int, num_heads: int, rects: Iterable[Rect]) -> bool:
    """Query. Whether each of these rectangles holds what was summed."""
    return all(shard_sum(payload, num_layers, num_heads, rect.shard) == rect.sum for rect in rects)


def is_whole(header: Header, slot: memoryview) -> bool:
    """Query. Whether a slot's payload is what its rectangles were summed over, and they are all of it."""
    if not header.rects or header.payload_nbytes > len(slot) - HEADER_NBYTES:
        return False
    payload = np.frombuffer(slot, np.uint8, header.payload_nbytes, HEADER_NBYTES)
    if len(header.rects) == 1:
        return xxhash.xxh3_64_intdigest(payload.data) == header.rects[0].sum
    num_layers = max(rect.shard.layers[1] for rect in header.rects)
    num_heads = max(rect.shard.heads[1] for rect in header.rects)
    # Parts of one group are equal or apart (Groups.join), so those that differ cover what their areas sum to.
    covered = sum(shard.area for shard in {rect.shard for rect in header.rects}) == num_layers * num_heads
    rows = num_layers * (2 if num_heads > 1 else 1) * num_heads
    return covered and rows > 0 and not len(payload) % rows and are_right(payload, num_layers, num_heads, header.rects)
