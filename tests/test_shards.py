"""Rectangles of a block: which bytes they have, their sums, and when together they are the block."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from kvstore import KVSpec, RankGroup, SpecMismatch
from kvstore.core.layout import HEADER_NBYTES, Header, Identity, Rect, Shard
from kvstore.core.shards import are_right, is_whole, shard_bytes, shard_sum
from kvstore.ranks import whole_of
from tests.models import page_of

IDENTITY = Identity(bytes(32), bytes(16), bytes(16), 0, bytes(16), 4, bytes(16), 0, 16)
SHAPES = [(4, 4, 3, 5), (3, 1, 2, 7), (1, 8, 16, 2), (5, 2, 1, 1)]  # layers, heads, tokens, bytes of a head and token


def payload_of(shape: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Query. A payload, and the same as `[L, K/V, H, T, D]`."""
    layers, heads, tokens, width = shape
    block = np.random.default_rng(layers).integers(0, 256, (layers, 2 if heads > 1 else 1, heads, tokens, width), "u1")
    return block.reshape(-1), block


def all_shards(layers: int, heads: int) -> Iterator[Shard]:
    for first_layer in range(layers):
        for end_layer in range(first_layer + 1, layers + 1):
            for first_head in range(heads):
                for end_head in range(first_head + 1, heads + 1):
                    yield Shard((first_layer, end_layer), (first_head, end_head))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shard_is_a_slice_of_layers_and_heads(shape: tuple[int, int, int, int]) -> None:
    payload, block = payload_of(shape)
    for shard in all_shards(*shape[:2]):
        right = block[slice(*shard.layers), :, slice(*shard.heads)]
        assert shard_bytes(payload, *shape[:2], shard).tobytes() == right.tobytes()
        assert shard_sum(payload, *shape[:2], shard) == xxhash.xxh3_64_intdigest(right.tobytes())


def cut(rng: random.Random, shard: Shard) -> list[Shard]:
    """Query. Some rectangles that together are this one."""
    (first_layer, end_layer), (first_head, end_head) = shard
    if rng.random() < 0.3 or shard.area == 1:
        return [shard]
    if end_head - first_head == 1 or (end_layer - first_layer > 1 and rng.random() < 0.5):
        at = rng.randrange(first_layer + 1, end_layer)
        parts = Shard((first_layer, at), shard.heads), Shard((at, end_layer), shard.heads)
    else:
        at = rng.randrange(first_head + 1, end_head)
        parts = Shard(shard.layers, (first_head, at)), Shard(shard.layers, (at, end_head))
    return [each for part in parts for each in cut(rng, part)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_a_block_is_whole_while_every_rectangle_is_what_was_summed(shape: tuple[int, int, int, int], seed: int) -> None:
    rng, (payload, _) = random.Random(seed), payload_of(shape)
    parts = cut(rng, Shard((0, shape[0]), (0, shape[1])))
    rng.shuffle(parts)
    rects = tuple(Rect(part, shard_sum(payload, *shape[:2], part)) for part in parts)
    slot = bytearray(HEADER_NBYTES) + payload.tobytes() + bytes(100)

    def whole(rects: tuple[Rect, ...], nbytes: int = payload.size) -> bool:
        header = Header(IDENTITY, nbytes, 1, rects)
        slot[:HEADER_NBYTES] = page_of(header)
        return is_whole(header, memoryview(slot))

    assert whole(rects)
    assert not whole(())
    assert not whole(rects, payload.size + 1000), "more than the slot has"
    if len(rects) > 1:
        assert not whole(rects[1:]), "a part is missing"
        assert not whole(rects[:1] * len(rects)), "one part again and again"
    for at in rng.sample(range(payload.size), min(20, payload.size)):
        slot[HEADER_NBYTES + at] ^= 16
        assert not whole(rects), "every byte counts"
        view = np.frombuffer(slot, np.uint8, payload.size, HEADER_NBYTES)
        wrong = [rect for rect in rects if not are_right(view, *shape[:2], [rect])]
        del view
        assert len(wrong) == 1, "and it lies in one rectangle"
        slot[HEADER_NBYTES + at] ^= 16
    assert whole(rects)


# --- what a rank may say of itself

SPEC = KVSpec(model="m", dtype="float16", num_layers=4, num_kv_heads=8, head_dim=2, block_tokens=16)
OPAQUE = KVSpec(model="m", dtype="uint8", num_layers=4, block_tokens=16, layout="engine-x", token_nbytes=8)
MLA = KVSpec(model="m", dtype="float16", num_layers=4, latent_dim=8, block_tokens=16)


@pytest.mark.parametrize("spec", [SPEC, OPAQUE, MLA])
def test_all_of_a_block_is_a_part_of_it(spec: KVSpec) -> None:
    layers, heads = whole_of(spec)
    RankGroup(group_id="g", layers=layers, heads=heads).validate(spec)


@pytest.mark.parametrize("layers", [(0, 5), (2, 2), (3, 1), (-1, 2), (4, 5), (0, 1 << 70), (0,), (0, 1, 2), None, "ab"])
def test_layers_that_are_none_are_named(layers: object) -> None:
    with pytest.raises(SpecMismatch, match=r"invalid RankGroup.*layers"):
        RankGroup(group_id="g", layers=layers, heads=(0, 8)).validate(SPEC)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [(0, 9), (8, 8), (0, True), (0.0, 1.0), [0, 1], (np.int64(0), np.int64(1))])
def test_heads_that_are_none_are_named(heads: object) -> None:
    with pytest.raises(SpecMismatch, match=r"invalid RankGroup.*heads"):
        RankGroup(group_id="g", layers=(0, 4), heads=heads).validate(SPEC)  # type: ignore[arg-type]


@pytest.mark.parametrize("group_id", ["", "\ud800", "x" * 10_000, 7, None])
def test_a_group_without_a_name_is_refused(group_id: object) -> None:
    with pytest.raises(SpecMismatch, match=r"invalid RankGroup.*group_id"):
        RankGroup(group_id=group_id, layers=(0, 4), heads=(0, 8)).validate(SPEC)  # type: ignore[arg-type]


def test_nobody_has_a_part_of_what_nobody_can_read() -> None:
    """Opaque layouts, and the latent that all heads share."""
    with pytest.raises(SpecMismatch, match="opaque"):
        RankGroup(group_id="g", layers=(0, 2), heads=(0, 1)).validate(OPAQUE)
    with pytest.raises(SpecMismatch, match="heads"):
        RankGroup(group_id="g", layers=(0, 4), heads=(0, 2)).validate(MLA)
