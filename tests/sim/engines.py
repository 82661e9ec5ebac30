"""Engines that are split over processes: their ranks fill the same blocks, each its part, and read on a ticket."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random
from typing import NamedTuple

from kvstore.core.layout import Shard
from kvstore.ranks import RankGroup
from kvstore.spec import KVSpec
from tests.sim.texts import SPECS, Text

GQA, MLA = SPECS[:2]
TICKETS_MAX = 8  # remembered per world

SHAPES: tuple[tuple[KVSpec, tuple[Shard, ...]], ...] = (
    (GQA, (Shard((0, 2), (0, 1)), Shard((0, 2), (1, 2)))),  # TP2
    (GQA, (Shard((0, 1), (0, 2)), Shard((1, 2), (0, 2)))),  # PP2
    (GQA, tuple(Shard((at, at + 1), (head, head + 1)) for at, head in product(range(2), range(2)))),  # TP2 PP2
    (GQA, (Shard((0, 2), (0, 1)), Shard((0, 2), (0, 1)), Shard((0, 2), (1, 2)))),  # TP4 of two heads, a rank short
    (MLA, (Shard((0, 3), (0, 1)), Shard((0, 3), (0, 1)))),  # all ranks have all of it
    (MLA, (Shard((0, 1), (0, 1)), Shard((1, 3), (0, 1)))),  # PP2
)


@dataclass(eq=False)
class Engine:
    """What its ranks store now, and how many blocks at most: a rank that stores fewer shortens what all have."""

    name: str
    spec: KVSpec
    parts: tuple[Shard, ...]
    text: Text | None = None

    def group_of(self, rank: int) -> RankGroup:
        """Query."""
        return RankGroup(group_id=self.name, layers=self.parts[rank].layers, heads=self.parts[rank].heads)


class Rank(NamedTuple):
    """A place in an engine. Two processes may have the same one: an engine starts again before the old one is gone."""

    engine: Engine
    number: int

    @property
    def shard(self) -> Shard:
        return self.engine.parts[self.number]


class Told(NamedTuple):
    """What a scheduler has told its ranks to read: its decision was this many tokens of a prompt."""

    ticket: bytes
    text: Text
    num_tokens: int
    epoch: int


def some_engines(rng: Random) -> list[Engine]:
    """Query. One or two."""
    return [Engine(f"engine {number}", *rng.choice(SHAPES)) for number in range(rng.choice((1, 1, 2)))]
