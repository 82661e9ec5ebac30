"""Rectangles of a block: which bytes they have, their sums, and when together they are the block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.layout import HEADER_NBYTES, RECT_INDEX_MAX, Header, Identity, Rect, Shard, parse_header
from kvstore.core.shards import are_right, is_whole, shard_bytes, shard_sum
from tests.models import page_of

IDENTITY = Identity(bytes(32), bytes(16), bytes(16), 0, bytes(16), 4, bytes(16), 0, 16)
Bytes = npt.NDArray[np.uint8]


class Shape(NamedTuple):
    """Of a payload. `width`: bytes of one head and token."""

    layers: int
    heads: int
    tokens: int
    width: int

    @property
    def whole(self) -> Shard:
        return Shard((0, self.layers), (0, self.heads))


SHAPES = [Shape(4, 4, 3, 5), Shape(3, 1, 2, 7), Shape(1, 8, 16, 2), Shape(5, 2, 1, 1), Shape(1, 1, 1, 1)]
shapes = st.builds(Shape, st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 9))


def payload_of(shape: Shape) -> Bytes:
    """Query. The same as `[L, K/V, H, T, D]`: no two bytes that are near to each other are equal."""
    heads = shape.heads
    count = shape.layers * (2 if heads > 1 else 1) * heads * shape.tokens * shape.width
    values = (np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)).astype(np.uint8)
    return values.reshape(shape.layers, -1, heads, shape.tokens, shape.width)


def all_ranges(end: int) -> list[tuple[int, int]]:
    return [(first, last) for last in range(1, end + 1) for first in range(last)]


@st.composite
def ranges(draw: st.DrawFn, end: int) -> tuple[int, int]:
    return draw(st.sampled_from(all_ranges(end)))


@st.composite
def shaped(draw: st.DrawFn) -> tuple[Shape, Shard]:
    """A shape, and a part of it."""
    shape = draw(shapes)
    return shape, Shard(draw(ranges(shape.layers)), draw(ranges(shape.heads)))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Shape, list[Shard]]:
    """A shape, and rectangles that together are all of it, in any order."""
    shape = draw(shapes)
    parts = [shape.whole]
    for _ in range(draw(st.integers(0, 6))):
        layers, heads = parts.pop(draw(st.integers(0, len(parts) - 1)))
        if layers[1] - layers[0] > 1 and (heads[1] - heads[0] == 1 or draw(st.booleans())):
            at = draw(st.integers(layers[0] + 1, layers[1] - 1))
            parts += [Shard((layers[0], at), heads), Shard((at, layers[1]), heads)]
        elif heads[1] - heads[0] > 1:
            at = draw(st.integers(heads[0] + 1, heads[1] - 1))
            parts += [Shard(layers, (heads[0], at)), Shard(layers, (at, heads[1]))]
        else:
            parts.append(Shard(layers, heads))
    return shape, draw(st.permutations(parts))


def rects_of(shape: Shape, parts: list[Shard]) -> tuple[Rect, ...]:
    block = payload_of(shape)
    return tuple(
        Rect(part, xxhash.xxh3_64_intdigest(block[slice(*part.layers), :, slice(*part.heads)].tobytes()))
        for part in parts
    )


def slot_of(block: Bytes, rects: tuple[Rect, ...], *, nbytes: int | None = None) -> tuple[Header, bytearray]:
    """Query. A slot with that block, and room behind it."""
    header = Header(IDENTITY, block.size if nbytes is None else nbytes, 1, rects)
    return header, bytearray(page_of(header)) + block.tobytes() + bytes(100)


def cells(shard: Shard) -> set[tuple[int, int]]:
    return {(layer, head) for layer in range(*shard.layers) for head in range(*shard.heads)}


# --- bytes and sums


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_part_is_a_slice_of_layers_and_heads(shape: Shape) -> None:
    """COR: all parts that there are."""
    block = payload_of(shape)
    for layers in all_ranges(shape.layers):
        for heads in all_ranges(shape.heads):
            right = block[slice(*layers), :, slice(*heads)]
            part = shard_bytes(block.reshape(-1), shape.layers, shape.heads, Shard(layers, heads))
            assert part.tobytes() == right.tobytes()
            assert part.shape[:3] == right.shape[:3]


def test_a_parts_bytes_are_a_view() -> None:
    """Who writes into it writes into the block, and nowhere else."""
    for shape in SHAPES:
        for part in (shape.whole, Shard((shape.layers - 1, shape.layers), (shape.heads // 2, shape.heads))):
            block = payload_of(shape)
            right = block.copy()
            shard_bytes(block.reshape(-1), shape.layers, shape.heads, part)[...] = 77
            right[slice(*part.layers), :, slice(*part.heads)] = 77
            assert np.array_equal(block, right)


@given(drawn=shaped(), data=st.data())
def test_a_sum_is_of_the_parts_bytes_and_of_no_others(drawn: tuple[Shape, Shard], data: st.DataObject) -> None:
    """COR: against numpy's own slice; and a bit anywhere changes it exactly if it lies in the part."""
    (shape, part), block = drawn, payload_of(drawn[0])
    right = xxhash.xxh3_64_intdigest(block[slice(*part.layers), :, slice(*part.heads)].tobytes())
    assert shard_sum(block.reshape(-1), shape.layers, shape.heads, part) == right
    at = data.draw(st.tuples(*(st.integers(0, size - 1) for size in block.shape)))
    block[at] ^= 1 << data.draw(st.integers(0, 7))
    is_other = shard_sum(block.reshape(-1), shape.layers, shape.heads, part) != right
    assert is_other == ((at[0], at[2]) in cells(part))


def test_parts_overlap_where_they_share_a_head_of_a_layer() -> None:
    """All pairs of parts that four layers and three heads have."""
    parts = [Shard(layers, heads) for layers in all_ranges(4) for heads in all_ranges(3)]
    for part in parts:
        assert part.area == len(cells(part))
        for other in parts:
            assert part.overlaps(other) == bool(cells(part) & cells(other))


# --- whole blocks


@given(drawn=cuts(), data=st.data())
def test_a_block_is_whole_while_every_bit_is_what_was_summed(
    drawn: tuple[Shape, list[Shard]], data: st.DataObject
) -> None:
    """COR: whatever it was cut into; one bit that flips is seen in one rectangle."""
    (shape, parts), block = drawn, payload_of(drawn[0])
    rects = rects_of(shape, parts)
    header, slot = slot_of(block, rects)
    assert parse_header(bytes(slot[:HEADER_NBYTES])) == header
    assert is_whole(header, memoryview(slot))
    at = data.draw(st.integers(0, block.size - 1))
    block.reshape(-1)[at] ^= 1 << data.draw(st.integers(0, 7))
    header, slot = slot_of(block, rects)
    assert not is_whole(header, memoryview(slot))
    wrong = [rect for rect in rects if not are_right(block.reshape(-1), shape.layers, shape.heads, [rect])]
    layer, _, head, *_ = np.unravel_index(at, block.shape)
    assert [(int(layer), int(head)) in cells(rect.shard) for rect in wrong] == [True]


@given(drawn=cuts().filter(lambda drawn: len(drawn[1]) > 1), data=st.data())
def test_a_block_with_a_part_missing_is_not_whole(drawn: tuple[Shape, list[Shard]], data: st.DataObject) -> None:
    """COR: also where another one is there twice in its place, or says another sum."""
    (shape, parts), block = drawn, payload_of(drawn[0])
    rects = list(rects_of(shape, parts))
    at = data.draw(st.integers(0, len(rects) - 1))
    left = rects[:at] + rects[at + 1 :]
    again = [*left, left[0]]
    wrong = [*left, rects[at]._replace(sum=rects[at].sum ^ 1)]
    for given_rects in (again, wrong, *([left] if len(left) > 1 else [])):
        header, slot = slot_of(block, tuple(given_rects))
        assert not is_whole(header, memoryview(slot))


def test_without_sums_no_block_is_whole() -> None:
    header, slot = slot_of(payload_of(SHAPES[0]), ())
    assert not is_whole(header, memoryview(slot))
    assert are_right(payload_of(SHAPES[0]).reshape(-1), 4, 4, []), "there is nothing to be compared with"


@pytest.mark.parametrize("more", [-1, 1, 100, 101, 1 << 20, (1 << 63) - 1000])
def test_a_block_of_another_length_is_not_whole(more: int) -> None:
    """COR, SEC: shorter; a bit longer; longer than the slot."""
    for shape in SHAPES:
        block, (layers, heads) = payload_of(shape), shape.whole
        halves = [Shard((0, 1), heads), Shard((1, shape.layers), heads)] if shape.layers > 1 else [shape.whole]
        for parts in ([Shard(layers, heads)], halves):
            header, slot = slot_of(block, rects_of(shape, parts), nbytes=block.size + more)
            assert not is_whole(header, memoryview(slot))


EDGES = [0, 1, 2, 3, 5, RECT_INDEX_MAX, 2 * RECT_INDEX_MAX]
any_range = st.sampled_from([(a, b) for a in EDGES for b in EDGES if 0 < b - a <= RECT_INDEX_MAX])


@given(
    parts=st.lists(st.builds(Shard, any_range, any_range), max_size=5),
    nbytes=st.integers(0, 200),
)
def test_any_rectangles_at_all_are_a_block_or_none(parts: list[Shard], nbytes: int) -> None:
    """SEC: whoever writes to a slab can write any header with a sum that fits it."""
    block = np.zeros(nbytes, np.uint8)
    header, slot = slot_of(block, tuple(Rect(part, 0) for part in parts))
    assert is_whole(header, memoryview(slot)) is False


@pytest.mark.parametrize("part", [Shard((0, 0), (0, 4)), Shard((0, 4), (0, 0))], ids=str)
def test_rectangles_of_nothing_are_no_block(part: Shard) -> None:
    """SEC: a header may say so, and who looked at it divided by zero."""
    header, slot = slot_of(np.zeros(64, np.uint8), (Rect(part, 1), Rect(part, 1)))
    assert parse_header(bytes(slot[:HEADER_NBYTES])) == header
    assert not is_whole(header, memoryview(slot))
