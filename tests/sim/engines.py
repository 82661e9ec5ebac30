"""Engines that are split over processes: their ranks fill the same blocks, each its part, and read on a ticket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import NamedTuple

from kvstore.core.groups import PARTS_MS
from kvstore.core.layout import Shard
from kvstore.ranks import RankGroup
from kvstore.spec import KVSpec, decode_spec
from tests.sim.texts import SPECS, Text
from transports import messages as wire

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
    """What a scheduler has told its ranks to read: its decision was this many tokens of a prompt.

    `is_ready`: all of them had their bytes then. `is_leased`: whether its own lease lives.
    """

    ticket: bytes
    text: Text
    num_tokens: int
    epoch: int
    share: int
    is_ready: bool
    is_leased: Callable[[], bool]


def some_engines(rng: Random) -> list[Engine]:
    """Query. One or two; these may be one that starts again in another shape before its old ranks are gone."""
    first = Engine("engine 0", *rng.choice(SHAPES))
    if rng.random() < 0.5:
        return [first]
    others = [parts for spec, parts in SHAPES if spec == first.spec and parts != first.parts]
    if rng.random() < 0.5:
        return [first, Engine(first.name, first.spec, rng.choice(others))]
    return [first, Engine("engine 1", *rng.choice(SHAPES))]


# What has been told of joint reservations


@dataclass(eq=False)
class Joint:
    """A reservation of a group: what its ranks have said of it, in the order in which the daemon heard it."""

    group_id: str
    spec: KVSpec
    first: int  # number of its first block
    slots: bytes
    writing: set[tuple[int, int]] = field(default_factory=set)  # (session, reservation) of those who may commit
    filled: dict[Shard, int] = field(default_factory=dict)  # how many blocks, by those who have
    is_over: bool = False
    quiet_ms: float = 0.0  # since when nobody writes

    @property
    def num_whole(self) -> int:
        """Query. How many leading blocks have all their parts."""
        area = sum(shard.area for shard in self.filled)
        return min(self.filled.values()) if area == self.spec.num_layers * self.spec.num_kv_heads else 0

    def give_up(self) -> None:
        """Changes state. Unless it is whole."""
        if not self.is_over:
            self.is_over = True
            self.filled.clear()


class Ledger:
    """A second opinion on what the ranks of a daemon have made together, from nothing but the messages that it heard.

    A group's reservations are told apart by generation, which is above the daemon's epoch.
    """

    def __init__(self) -> None:
        self._joint: dict[int, Joint] = {}
        self._ranks: dict[tuple[int, int], tuple[str, KVSpec, Shard]] = {}  # by session and member
        self._writing: dict[tuple[int, int], tuple[int, Shard]] = {}  # (session, reservation) -> generation, part

    def note(self, message: wire.Message, reply: wire.Reply | None, now_ms: float) -> None:
        """Changes state. The daemon has answered."""
        match message, reply:
            case wire.Attach(), wire.Attached() if reply.member:
                shard = Shard(message.layers, message.heads)
                rank = message.group, decode_spec(message.spec), shard
                self._ranks[message.session, reply.member] = rank
                self._check_fits(*rank)
            case wire.Reserve(), wire.Reserved() if message.member and reply.slots:
                self._begin((message.session, message.reservation), message.member, reply)
            case wire.Commit(), wire.Committed():
                self._commit((message.session, message.reservation), len(message.summed), now_ms)
            case wire.Abort(), _:
                self._abort((message.session, message.reservation))
            case wire.Goodbye(), _:
                self.note_end(message.session)
            case _:
                pass

    def note_end(self, session_id: int) -> None:
        """Changes state. This session has ended, and with it all that its groups had open."""
        for key in [key for key in self._writing if key[0] == session_id]:
            self._abort(key)
        gone = [key for key in self._ranks if key[0] == session_id]
        groups = {self._ranks.pop(key)[0] for key in gone}
        for joint in self._joint.values():
            if joint.group_id in groups:
                joint.give_up()

    def check_open(self, generations: set[int], now_ms: float) -> None:
        """Query. What waits for parts is what it should be: no more, no less, and each for its time."""
        expected = {generation for generation, joint in self._joint.items() if not joint.is_over}
        assert generations <= expected, "a rank is gone, or all parts are there, and the others are waited for"
        for generation in expected:
            joint = self._joint[generation]
            is_due = not joint.writing and now_ms >= joint.quiet_ms + PARTS_MS
            assert is_due == (generation not in generations), "waited for too long, or not long enough"
            if is_due:
                joint.give_up()

    def check_block(self, number: int, generation: int) -> None:
        """Query. A block that is there was made by all its ranks; number and generation are of its header."""
        joint = self._joint.get(generation)
        if joint is not None:
            assert joint.is_over, "seen before all of its parts are there"
            assert joint.num_whole, "seen though a rank gave it up"
            assert number - joint.first < joint.num_whole, "seen though a rank has not filled it"

    def _begin(self, key: tuple[int, int], member: int, reply: wire.Reserved) -> None:
        group_id, spec, shard = self._ranks[key[0], member]
        begun = Joint(group_id, spec, reply.start // spec.block_tokens, reply.slots)
        joint = self._joint.setdefault(reply.generation, begun)
        taken = {self._writing[other][1] for other in joint.writing} | joint.filled.keys()
        assert not joint.is_over, "a rank joins what is over"
        assert (joint.first, joint.slots) == (begun.first, begun.slots), "ranks are given different slots"
        assert not any(shard.overlaps(other) for other in taken), "two ranks write the same bytes"
        joint.writing.add(key)
        self._writing[key] = reply.generation, shard

    def _commit(self, key: tuple[int, int], num_blocks: int, now_ms: float) -> None:
        if key not in self._writing:
            return
        generation, shard = self._writing.pop(key)
        joint = self._joint[generation]
        joint.writing.discard(key)
        if not joint.is_over:
            joint.filled[shard] = num_blocks
            joint.is_over = joint.num_whole > 0
            joint.quiet_ms = now_ms

    def _abort(self, key: tuple[int, int]) -> None:
        generation, _ = self._writing.pop(key, (0, None))
        joint = self._joint.get(generation)
        if joint is not None:
            joint.writing.discard(key)
            joint.give_up()

    def _check_fits(self, group_id: str, spec: KVSpec, shard: Shard) -> None:
        others = [rank for rank in self._ranks.values() if rank[0] == group_id]
        assert all(other[1] == spec for other in others), "a group of two specs"
        assert not any(other[2] != shard and other[2].overlaps(shard) for other in others), "parts that overlap"
