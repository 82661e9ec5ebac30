"""What a rank may say of itself: its group's name, and its ranges of layers and heads. All else is refused by name."""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import KVSpec, RankGroup, SpecMismatch
from kvstore.core.layout import Shard
from kvstore.ranks import require_part, whole_of

SPEC = KVSpec(model="m", dtype="float16", num_layers=4, num_kv_heads=4, head_dim=2, block_tokens=16)
OPAQUE = KVSpec(model="m", dtype="uint8", num_layers=4, block_tokens=16, layout="engine-x", token_nbytes=8)
MLA = KVSpec(model="m", dtype="float16", num_layers=4, latent_dim=8, block_tokens=16)


class Two(IntEnum):
    TWO = 2


class Whole(int): ...


class Span(NamedTuple):
    start: Any
    end: Any


def group(group_id: Any = "g", layers: Any = (0, 4), heads: Any = (0, 4)) -> RankGroup:
    return RankGroup(group_id=group_id, layers=layers, heads=heads)


@pytest.mark.parametrize("spec", [SPEC, OPAQUE, MLA], ids=["SPEC", "OPAQUE", "MLA"])
def test_all_of_a_block_is_a_part_of_it(spec: KVSpec) -> None:
    layers, heads = whole_of(spec)
    assert (layers, heads) == ((0, spec.num_layers), (0, spec.num_kv_heads))
    group("g", layers, heads).validate(spec)
    assert group("g", layers, heads).shard == whole_of(spec)


def test_every_range_within_is_a_part() -> None:
    for layer in range(4):
        for end in range(layer + 1, 5):
            for head in range(4):
                given_group = group("g", (layer, end), (head, head + 1))
                given_group.validate(SPEC)
                assert given_group.shard == Shard((layer, end), (head, head + 1))


def test_equal_groups_are_one() -> None:
    """A client keeps what it is attached to by the group."""
    assert hash(group()) == hash(group())
    assert group() == group()
    assert len({group(), group("h"), group(layers=(0, 2)), group(heads=(0, 2)), group()}) == 4


WRONG = [
    (0, 5),
    (4, 5),
    (2, 2),
    (3, 1),
    (-1, 2),
    (-2, -1),
    (0, -1),
    (0, 1 << 32),
    (0, 1 << 64),
    (0, 1 << 70),
    (-(1 << 70), 2),
    (1 << 70, 1 << 71),
    (),
    (0,),
    (0, 1, 2),
    (0, True),
    (False, 1),
    (0.0, 1.0),
    (0, 1.5),
    (0, float("nan")),
    (0, float("inf")),
    ("0", "1"),
    (b"\0", b"\1"),
    (None, 1),
    (0, None),
    ((0, 1), (1, 2)),
    [0, 1],
    {0, 1},
    {0: 1, 1: 2},
    range(2),
    slice(0, 2),
    array("I", [0, 1]),
    iter((0, 1)),
    None,
    1,
    "ab",
    b"\0\1",
    object(),
    np.array([0, 2]),
    (np.int64(0), np.int64(2)),
    (0, np.uint8(2)),
    (0, np.float32(1)),
]


@pytest.mark.parametrize("name", ["layers", "heads"])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: repr(wrong).split(" at 0x")[0])
def test_a_range_that_is_none_is_refused_by_name(name: str, wrong: object) -> None:
    """CFG: one error, whatever it is; a mistake in a launch script costs the cache, and never the engine."""
    with pytest.raises(SpecMismatch, match=rf"^invalid RankGroup: .*{name}"):
        group(**{name: wrong}).validate(SPEC)


@pytest.mark.parametrize("span", [(0, Two.TWO), (Whole(0), Whole(2)), Span(0, 2)], ids=repr)
def test_what_is_no_plain_number_or_tuple_is_refused_or_is_that_range(span: Any) -> None:
    """IDN: never another one."""
    given_group = group(layers=span)
    try:
        given_group.validate(SPEC)
    except SpecMismatch:
        return
    assert given_group == group(layers=(0, 2))
    assert hash(given_group) == hash(group(layers=(0, 2)))


@pytest.mark.parametrize(
    "group_id", ["", "\ud800", "a\udfffb", "x" * 1025, "x" * 10_000, 7, None, b"g", ["g"], object()], ids=lambda _: ""
)
def test_a_group_without_a_name_is_refused(group_id: object) -> None:
    with pytest.raises(SpecMismatch, match=r"^invalid RankGroup: .*group_id"):
        group(group_id).validate(SPEC)


@pytest.mark.parametrize("group_id", ["g", "0", " ", "\0", "x" * 1024, "\N{GRINNING FACE}", "Rang-Gruppe für #7"])
def test_any_text_is_a_name(group_id: str) -> None:
    group(group_id).validate(SPEC)


def test_nobody_has_a_part_of_what_nobody_can_read() -> None:
    """Opaque layouts, and the latent that all heads share."""
    with pytest.raises(SpecMismatch, match=r"layout='engine-x' is opaque: a rank has all of a block or nothing"):
        group(layers=(0, 2), heads=(0, 1)).validate(OPAQUE)
    with pytest.raises(SpecMismatch, match=r"heads=\(0, 2\) is no range within \(0, 1\)"):
        group(heads=(0, 2)).validate(MLA)
    group(layers=(1, 3), heads=(0, 1)).validate(MLA)


def test_the_first_wrong_field_is_named() -> None:
    with pytest.raises(SpecMismatch, match=r"layers=\(0, 9\)"):
        group(layers=(0, 9), heads=(0, 9)).validate(SPEC)


huge = st.integers() | st.sampled_from([0, 1, 4, 5, 4095, 4096, 1 << 63, -1])


@given(layers=st.tuples(huge, huge), heads=st.tuples(huge, huge))
def test_the_daemon_asks_the_same(layers: tuple[int, int], heads: tuple[int, int]) -> None:
    """SEC: of numbers from the wire, which nobody has validated; and it agrees with what is a part."""
    is_part = 0 <= layers[0] < layers[1] <= 4 and 0 <= heads[0] < heads[1] <= 4
    try:
        require_part(SPEC, Shard(layers, heads))
    except SpecMismatch as exc:
        assert not is_part
        assert "is no range within" in str(exc)
    else:
        assert is_part


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=3,
)


@given(group_id=values, layers=st.just((0, 4)) | values, heads=st.just((0, 4)) | values)
def test_any_values_are_a_rank_or_one_error(group_id: Any, layers: Any, heads: Any) -> None:
    """CFG: and whoever passes can be hashed, sent, and found again."""
    given_group = group(group_id, layers, heads)
    try:
        given_group.validate(SPEC)
    except SpecMismatch as exc:
        assert str(exc).startswith("invalid RankGroup: ")
        return
    assert hash(given_group) == hash(group(group_id, layers, heads))
    assert given_group.group_id.encode()
