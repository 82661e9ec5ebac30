"""KVSpec: every field is part of the name, sizes are what a calculator says, and what is wrong is named."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.core.layout import BLOCK_TOKENS_MAX, RECT_INDEX_MAX
from kvstore.errors import SpecMismatch
from kvstore.spec import CANONICAL, NUMPY_DTYPES, KVSpec, decode_spec, encode_spec
from radix import HashKind, root_hash

LLAMA = KVSpec(
    model="meta-llama/Llama-3.1-8B-Instruct", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128,
    block_tokens=64,
)  # fmt: skip
SMOL = KVSpec(model="SmolLM2-135M", dtype="float32", num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16)
MLA = KVSpec(model="DeepSeek-V3", dtype="bfloat16", num_layers=61, latent_dim=576, block_tokens=64)
OPAQUE = KVSpec(
    model="m", dtype="uint8", num_layers=2, block_tokens=48, layout="engine-x", token_nbytes=1000, grain_tokens=16
)
SPECS = [LLAMA, SMOL, MLA, OPAQUE]
FIELDS = [field.name for field in msgspec.structs.fields(KVSpec)]
GOLDEN_FINGERPRINT = "ac4b80da3241edbd23ec7bf20df0ffabfd46086907bca9f94ec7d391dd64528c"


def with_changed(spec: KVSpec, name: str) -> KVSpec:
    value = getattr(spec, name)
    return msgspec.structs.replace(spec, **{name: value + 1 if isinstance(value, int) else value + "x"})


# --- identity


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model)
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_alone_changes_the_name(spec: KVSpec, name: str) -> None:
    """IDN: a field outside the fingerprint would be a hit that should not be. New fields are covered as they come."""
    other = with_changed(spec, name)
    assert getattr(other, name) != getattr(spec, name)
    assert other.fingerprint != spec.fingerprint
    for kind in HashKind:
        assert root_hash(other.fingerprint, kind) != root_hash(spec.fingerprint, kind)


def test_text_cannot_move_between_fields() -> None:
    """IDN: "ab" + "c" is not "a" + "bc"."""
    texts = [name for name in FIELDS if isinstance(getattr(LLAMA, name), str)]
    moved = {msgspec.structs.replace(LLAMA, **{name: "same text"}).fingerprint for name in texts}
    assert len(moved) == len(texts)
    split = [
        msgspec.structs.replace(LLAMA, adapter="ab", rope=""),
        msgspec.structs.replace(LLAMA, adapter="a", rope="b"),
    ]
    assert split[0].fingerprint != split[1].fingerprint


def test_golden_fingerprint() -> None:
    """HSH: another value here makes every stored block of every user a miss."""
    assert LLAMA.fingerprint.hex() == GOLDEN_FINGERPRINT


def test_fingerprint_is_the_same_in_other_processes() -> None:
    """HSH."""
    code = (
        "import sys, msgspec; from kvstore.spec import decode_spec;"
        "print(decode_spec(sys.stdin.buffer.read()).fingerprint.hex())"
    )
    for seed in ("0", "random"):
        run = subprocess.run(
            [sys.executable, "-c", code], input=encode_spec(MLA), env={"PYTHONHASHSEED": seed}, capture_output=True,
            check=True,
        )  # fmt: skip
        assert run.stdout.decode().strip() == MLA.fingerprint.hex()


def test_order_of_keywords_does_not_matter() -> None:
    facts = msgspec.structs.asdict(LLAMA)
    assert KVSpec(**dict(reversed(facts.items()))).fingerprint == LLAMA.fingerprint


# --- sizes


@pytest.mark.parametrize(
    ("spec", "token_nbytes", "block_nbytes", "slot_nbytes", "shape"),
    [
        (LLAMA, 131072, 8388608, 8392704, (32, 2, 8, 64, 128)),
        (SMOL, 46080, 737280, 741376, (30, 2, 3, 16, 64)),
        (MLA, 70272, 4497408, 4501504, (61, 1, 1, 64, 576)),
        (OPAQUE, 1000, 48000, 53248, (48000,)),
    ],
    ids=lambda value: value.model if isinstance(value, KVSpec) else "",
)
def test_sizes_computed_by_hand(
    spec: KVSpec, token_nbytes: int, block_nbytes: int, slot_nbytes: int, shape: tuple[int, ...]
) -> None:
    assert spec.token_payload_nbytes == token_nbytes
    assert spec.block_nbytes == spec.payload_nbytes(spec.block_tokens) == block_nbytes
    assert spec.slot_nbytes == slot_nbytes
    assert spec.array_shape(spec.block_tokens) == shape


@given(spec=st.sampled_from(SPECS), num_tokens=st.integers(1, 64))
def test_arrays_fill_payloads_and_slots_are_whole_pages(spec: KVSpec, num_tokens: int) -> None:
    num_values = int(np.prod(spec.array_shape(num_tokens)))
    assert num_values * spec.numpy_dtype.itemsize == spec.payload_nbytes(num_tokens)
    assert spec.slot_nbytes % 4096 == 0
    assert 0 <= spec.slot_nbytes - 4096 - spec.block_nbytes < 4096


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_element_widths(dtype: str) -> None:
    widths = {"float32": 4, "float16": 2, "bfloat16": 2}
    spec = msgspec.structs.replace(SMOL, dtype=dtype)
    spec.validate()
    assert spec.token_payload_nbytes == 30 * 2 * 3 * 64 * widths.get(dtype, 1)


# --- validity


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model)
def test_valid_specs_travel(spec: KVSpec) -> None:
    spec.validate()
    assert decode_spec(encode_spec(spec)) == spec
    assert decode_spec(encode_spec(spec)).fingerprint == spec.fingerprint


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (LLAMA, "dtype", "float64"),
        (LLAMA, "dtype", "torch.bfloat16"),
        (LLAMA, "block_tokens", 0),
        (LLAMA, "block_tokens", BLOCK_TOKENS_MAX + 1),
        (LLAMA, "block_tokens", "64"),
        (LLAMA, "block_tokens", True),
        (LLAMA, "num_layers", 0),
        (LLAMA, "num_layers", RECT_INDEX_MAX + 1),
        (LLAMA, "num_layers", 32.0),
        (LLAMA, "num_kv_heads", -1),
        (LLAMA, "num_kv_heads", RECT_INDEX_MAX + 1),
        (LLAMA, "head_dim", 0),
        (LLAMA, "head_dim", 1 << 40),
        (LLAMA, "latent_dim", 576),
        (MLA, "num_kv_heads", 2),
        (MLA, "head_dim", 64),
        (LLAMA, "token_nbytes", 4096),
        (LLAMA, "grain_tokens", 16),
        (OPAQUE, "token_nbytes", 0),
        (OPAQUE, "grain_tokens", 32),
        (OPAQUE, "grain_tokens", 0),
        (LLAMA, "model", None),
        (LLAMA, "model", "m" * 1025),
        (LLAMA, "revision", 7),
        (LLAMA, "tenant_salt", b"bytes"),
        (LLAMA, "draft_layers", -1),
        (OPAQUE, "layout", CANONICAL),
    ],
)
def test_invalid_spec_names_the_field(base: KVSpec, field: str, value: Any) -> None:
    named = {"layout": "head_dim"}.get(field, field)  # a canonical layout lacks what an opaque one does not need
    spec = msgspec.structs.replace(base, **{field: value})
    with pytest.raises(SpecMismatch, match=named):
        spec.validate()
    with pytest.raises(SpecMismatch, match=named):
        decode_spec(encode_spec(spec))


def test_limits_themselves_are_valid() -> None:
    for change in (
        {"block_tokens": BLOCK_TOKENS_MAX},
        {"num_layers": RECT_INDEX_MAX},
        {"num_kv_heads": RECT_INDEX_MAX},
    ):
        msgspec.structs.replace(LLAMA, **change).validate()


@given(data=st.binary(max_size=200))
@example(data=b"\x81\xa1x" + b"\x91" * 8000)  # deeper than msgspec recurses
@example(data=msgspec.msgpack.encode(dict.fromkeys(FIELDS, 1 << 63)))
@example(data=encode_spec(LLAMA).replace(b"meta-llama", b"\xff\xfe" * 5))
@example(data=msgspec.msgpack.encode({"model": "m"}))
@example(data=msgspec.msgpack.encode(None))
def test_any_bytes_are_a_spec_or_a_mismatch(data: bytes) -> None:
    """SEC: an attach can hold anything."""
    try:
        decode_spec(data).validate()
    except SpecMismatch as exc:
        assert str(exc).startswith("invalid KVSpec: ")


@given(at=st.integers(0, 1 << 16), byte=st.integers(0, 255), spec=st.sampled_from(SPECS))
def test_mutated_specs_are_valid_or_a_mismatch(at: int, byte: int, spec: KVSpec) -> None:
    """SEC, IDN: and never the same name for another spec."""
    data = bytearray(encode_spec(spec))
    data[at % len(data)] = byte
    try:
        decoded = decode_spec(bytes(data))
    except SpecMismatch:
        return
    assert (decoded == spec) == (decoded.fingerprint == spec.fingerprint)


def test_fields_of_a_later_version_are_ignored_by_name() -> None:
    facts = msgspec.structs.asdict(LLAMA) | {"not_yet_known": {"a": [1]}}
    assert decode_spec(msgspec.msgpack.encode(facts)) == LLAMA
    assert json.loads(msgspec.json.encode(LLAMA))["num_layers"] == 32
