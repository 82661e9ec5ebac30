"""KVSpec: everything that changes the bytes of a block, and the sizes that follow from it."""

import hashlib
from functools import cached_property
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvstore.core.layout import BLOCK_TOKENS_MAX, RECT_INDEX_MAX, slot_nbytes_for
from kvstore.errors import SpecMismatch

# Types numpy lacks are handed out as unsigned integers of the same width: the bits, not their value.
NUMPY_DTYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "int8": np.int8,
    "uint8": np.uint8,
}
CANONICAL = "canonical"

Name = Annotated[str, Meta(max_length=1024)]
Positive = Annotated[int, Meta(ge=1, le=1 << 32)]
NotNegative = Annotated[int, Meta(ge=0, le=1 << 32)]


class KVSpec(Struct, frozen=True, kw_only=True, dict=True):
    """Names one kind of KV. Two specs that differ in any field can never hit each other's blocks.

    `layout` "canonical" is `[L, 2, H, T, D]` (`[L, 1, 1, T, latent_dim]` when latent_dim is set). Any other name is
    an opaque layout: the engine's own bytes, `token_nbytes` per token, usable at multiples of `grain_tokens`.
    """

    model: Name
    revision: Name = ""
    dtype: Name
    num_layers: Positive
    num_kv_heads: Positive = 1
    head_dim: NotNegative = 0
    latent_dim: NotNegative = 0
    block_tokens: Positive
    layout: Name = CANONICAL
    token_nbytes: NotNegative = 0
    grain_tokens: Positive = 1
    kv_scales: Name = ""  # how quantised values are scaled, e.g. "per-tensor:<digest>"
    rope: Name = ""  # position encoding facts the model's config does not pin, e.g. a scaling override
    adapter: Name = ""  # digest of a LoRA's weights
    draft_layers: NotNegative = 0
    tenant_salt: Name = ""

    def validate(self) -> None:
        """Query. SpecMismatch naming the first field that is wrong."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), KVSpec, strict=True)
        except msgspec.ValidationError as exc:
            raise SpecMismatch(f"invalid KVSpec: {exc}") from exc
        for wrong, reason in self._contradictions():
            if wrong:
                raise SpecMismatch(f"invalid KVSpec: {reason}")

    def _contradictions(self) -> list[tuple[bool, str]]:
        opaque = self.layout != CANONICAL
        heads = self.num_kv_heads
        texts = [(name, text) for name, text in msgspec.structs.asdict(self).items() if isinstance(text, str)]
        return [
            *((not _is_utf8(text), f"{name}={text!r} is no text in UTF-8") for name, text in texts),
            (self.dtype not in NUMPY_DTYPES, f"dtype={self.dtype!r} is not one of {', '.join(NUMPY_DTYPES)}"),
            (
                self.block_tokens > BLOCK_TOKENS_MAX,
                f"block_tokens={self.block_tokens} is above {BLOCK_TOKENS_MAX}",
            ),
            (self.num_layers > RECT_INDEX_MAX, f"num_layers={self.num_layers} is above {RECT_INDEX_MAX}"),
            (heads > RECT_INDEX_MAX, f"num_kv_heads={heads} is above {RECT_INDEX_MAX}"),
            (
                not opaque and not self.latent_dim and not self.head_dim,
                "head_dim=0 (or set latent_dim, or an opaque layout)",
            ),
            (
                not opaque and self.latent_dim > 0 and (heads != 1 or self.head_dim != 0),
                "latent_dim excludes num_kv_heads and head_dim",
            ),
            (opaque and not self.token_nbytes, f"layout={self.layout!r} is opaque and needs token_nbytes"),
            (not opaque and self.token_nbytes != 0, "token_nbytes is for opaque layouts only"),
            (not opaque and self.grain_tokens != 1, "grain_tokens is for opaque layouts only"),
            (
                self.block_tokens % self.grain_tokens != 0,
                f"block_tokens={self.block_tokens} is no multiple of grain_tokens={self.grain_tokens}",
            ),
        ]

    @property
    def is_opaque(self) -> bool:
        return self.layout != CANONICAL

    @cached_property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The dtype of block arrays; uint8 for opaque layouts."""
        return np.dtype(np.uint8 if self.is_opaque else NUMPY_DTYPES[self.dtype])

    @cached_property
    def token_payload_nbytes(self) -> int:
        """2·L·H·D·itemsize for MHA and GQA; L·latent_dim·itemsize for MLA (K and V share the latent).

        H is the whole model's; a rank's share is a rectangle of the block, never part of the KVSpec.
        """
        if self.is_opaque:
            return self.token_nbytes
        values = self.latent_dim or 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * values * self.numpy_dtype.itemsize

    @cached_property
    def block_nbytes(self) -> int:
        """Payload of a whole block."""
        return self.payload_nbytes(self.block_tokens)

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of the slot that a block lies in, whole or short."""
        return slot_nbytes_for(self.block_nbytes)

    def payload_nbytes(self, num_tokens: int) -> int:
        """Query. Bytes of a block of `num_tokens` tokens."""
        return num_tokens * self.token_payload_nbytes

    def array_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Query. [L, 2, H, T, D]; [L, 1, 1, T, latent_dim] for MLA; [nbytes] for opaque layouts."""
        if self.is_opaque:
            return (self.payload_nbytes(num_tokens),)
        if self.latent_dim:
            return (self.num_layers, 1, 1, num_tokens, self.latent_dim)
        return (self.num_layers, 2, self.num_kv_heads, num_tokens, self.head_dim)

    def first_difference(self, other: "KVSpec") -> tuple[str, object, object]:
        """Query. The first field in which another spec differs: its name, our value, the other's."""
        ours, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return next((name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name])

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes: SHA-256 of the MessagePack of all fields, sorted by name."""
        return hashlib.sha256(msgspec.msgpack.encode(sorted(msgspec.structs.asdict(self).items()))).digest()


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= each <= "\udfff" for each in text)


def encode_spec(spec: KVSpec) -> bytes:
    """Query. The spec as it travels in an attach."""
    return msgspec.msgpack.encode(spec)


def decode_spec(data: bytes) -> KVSpec:
    """Query. SpecMismatch on anything that is not a valid spec."""
    try:
        spec = msgspec.msgpack.decode(data, type=KVSpec)
    except (msgspec.MsgspecError, RecursionError) as exc:  # msgspec recurses on nesting in unknown fields
        raise SpecMismatch(f"invalid KVSpec: {exc}") from exc
    spec.validate()
    return spec
