"""RankGroup: which part of every block a rank of an engine has."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from kvstore.core.layout import RECT_INDEX_MAX, Shard
from kvstore.errors import SpecMismatch
from kvstore.spec import KVSpec, Name


class RankGroup(Struct, frozen=True, kw_only=True):
    """One rank of an engine that is split over processes, by tensor or pipeline parallelism or both.

    `group_id`: the same for all ranks of one engine and one KVSpec, and for no others. `layers`, `heads`: half-open
    ranges of the model's layers and K/V heads that this rank computes. Of one group two ranks have the same part (MLA,
    replicated K/V heads), or parts that do not overlap; together they have all.
    """

    group_id: Name
    layers: tuple[int, int]
    heads: tuple[int, int]

    @property
    def shard(self) -> Shard:
        return Shard(self.layers, self.heads)

    def validate(self, spec: KVSpec) -> None:
        """Query. SpecMismatch naming the first field that is wrong, or is none of this spec's."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), RankGroup, strict=True)
        except msgspec.ValidationError as exc:
            raise SpecMismatch(f"invalid RankGroup: {exc}") from exc
        for name, given in (("layers", self.layers), ("heads", self.heads)):
            if not isinstance(given, tuple):  # a list would do as a range, but has no hash
                raise SpecMismatch(f"invalid RankGroup: {name}={given!r} is no tuple")
        if not self.group_id or any("\ud800" <= each <= "\udfff" for each in self.group_id):
            raise SpecMismatch(f"invalid RankGroup: group_id={self.group_id!r} is no name")
        require_part(spec, self.shard)


def require_part(spec: KVSpec, shard: Shard) -> None:
    """Query. SpecMismatch where blocks of this spec have no such part."""
    whole = whole_of(spec)
    for name, (start, end), (_, count) in zip(("layers", "heads"), shard, whole, strict=True):
        if not 0 <= start < end <= min(count, RECT_INDEX_MAX):
            raise SpecMismatch(f"invalid RankGroup: {name}=({start}, {end}) is no range within (0, {count})")
    if spec.is_opaque and shard != whole:
        raise SpecMismatch(f"invalid RankGroup: layout={spec.layout!r} is opaque: a rank has all of a block or nothing")


def whole_of(spec: KVSpec) -> Shard:
    """Query. All layers and heads."""
    return Shard((0, spec.num_layers), (0, spec.num_kv_heads))
