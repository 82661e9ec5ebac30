"""Ranks as processes: each is forked from a server that has everything loaded, and does what it is told over a pipe."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
import torch

import kvstore
from tests.daemons import WAIT_S_MAX, kv_of

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.rank_processes", "benchmarks.ranks"])  # one server for all tests of a session

Part = tuple[tuple[int, int], tuple[int, int]]  # layers, heads; half open
Array = np.ndarray[Any, Any]
DEADLINE_MS, START_S_MAX = 5000.0, 60.0  # the machine may be busy with other tests


def tp(num_ranks: int, spec: kvstore.KVSpec) -> list[Part]:
    """Query. Tensor parallel: heads are split, or repeated where there are fewer heads than ranks."""
    heads = 1 if spec.latent_dim else spec.num_kv_heads
    width = max(1, heads // num_ranks)
    firsts = [rank * heads // num_ranks for rank in range(num_ranks)]
    return [((0, spec.num_layers), (first, first + width)) for first in firsts]


def pp(num_stages: int, spec: kvstore.KVSpec) -> list[Part]:
    """Query. Pipeline parallel: layers are split, the first stages having one more."""
    cuts = [-(-stage * spec.num_layers // num_stages) for stage in range(num_stages + 1)]
    heads = 1 if spec.latent_dim else spec.num_kv_heads
    return [(layers, (0, heads)) for layers in itertools.pairwise(cuts)]


def tp_pp(num_ranks: int, num_stages: int, spec: kvstore.KVSpec) -> list[Part]:
    """Query. Each stage is split by heads."""
    return [(layers, heads) for layers, _ in pp(num_stages, spec) for _, heads in tp(num_ranks, spec)]


def slice_of(spec: kvstore.KVSpec, part: Part, tokens: list[int], start: int, count: int) -> Array:
    """Query. A rank's piece of a block's KV, made from the whole."""
    (first_layer, end_layer), (first_head, end_head) = part
    return kv_of(spec, tokens, start, count)[first_layer:end_layer, :, first_head:end_head]


class Work:
    """What a rank does. `with_torch`: its KV is in tensors, as an engine's."""

    def __init__(self, client: kvstore.Client) -> None:
        self._client = client
        self._reservations: dict[str, kvstore.Reservation] = {}
        self._hits: dict[str, kvstore.Hit] = {}

    def attach(self, spec: kvstore.KVSpec, group: str, part: Part, with_torch: bool = False) -> str:
        """Changes state. What is said where it does not fit; nothing where it does."""
        self._spec, self._part, self._with_torch = spec, part, with_torch
        try:
            self._cache = self._client.attach(
                spec, group=kvstore.RankGroup(group_id=group, layers=part[0], heads=part[1])
            )
        except kvstore.SpecMismatch as exc:
            return str(exc)
        return ""

    def put(self, tokens: list[int]) -> bool:
        self.reserve("put", tokens)
        self.fill("put", tokens)
        return self.commit("put")

    def reserve(self, name: str, tokens: list[int]) -> int:
        self._reservations[name] = self._cache.reserve(tokens)
        return self._reservations[name].num_blocks

    def fill(self, name: str, tokens: list[int], num_blocks: int = 1000) -> None:
        for block in list(self._reservations[name].blocks())[:num_blocks]:
            piece = slice_of(self._spec, self._part, tokens, block.start, block.num_tokens)
            block.write(torch.from_numpy(np.ascontiguousarray(piece)) if self._with_torch else piece)

    def commit(self, name: str) -> bool:
        return self._reservations[name].commit()

    def abort(self, name: str) -> None:
        self._reservations.pop(name).abort()

    def match(self, tokens: list[int]) -> int:
        return self._cache.match(tokens)

    def acquire(self, name: str, tokens: list[int]) -> bytes:
        """Changes state. A scheduler's decision: its ticket."""
        self._hits[name] = self._cache.acquire(tokens, shared=True)
        return self._hits[name].ticket

    def redeem(self, name: str, ticket: bytes) -> int:
        self._hits[name] = self._cache.redeem(ticket)
        return self._hits[name].num_tokens

    def look(self, name: str, tokens: list[int]) -> int:
        """Query. Tokens of a hit, every byte of this rank's part compared with the whole model's KV."""
        hit, at = self._hits[name], 0
        for block in hit.blocks():
            right = slice_of(self._spec, self._part, tokens, block.start, block.num_tokens)
            assert block.start == at
            assert block.array.shape == right.shape
            assert np.array_equal(self._copied(block.array), right), f"the block at token {at} is not this prompt's"
            at += block.num_tokens
        assert at == hit.verified_tokens
        return at

    def _copied(self, array: Array) -> Array:
        if not self._with_torch:
            return array.copy()
        target = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype)
        np.copyto(target.numpy(), array)
        return target.numpy()

    def let_go(self, name: str) -> None:
        self._hits.pop(name).release()

    def read_unplanned(self, ticket: bytes, tokens: list[int]) -> int:
        """Changes state. As `read`, of blocks of which some may turn out wrong."""
        self.redeem("read", ticket)
        num_tokens = self.look("read", tokens)
        self.let_go("read")
        return num_tokens

    def read(self, ticket: bytes, tokens: list[int]) -> int:
        """Changes state. Redeem, compare, release: how many tokens."""
        num_tokens = self.redeem("read", ticket)
        assert self.look("read", tokens) == num_tokens
        self.let_go("read")
        return num_tokens


def _live(address: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with kvstore.connect(address, DEADLINE_MS) as client:
        work = Work(client)
        pipe.send(None)
        while True:
            try:
                verb, how = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(work, verb)(*how))  # what it raises ends this process: pytest shows its stderr


class Rank:
    """A process, seen from the test."""

    def __init__(self, address: str) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_live, args=(address, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._is_there = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def begin(self, verb: str, *how: Any) -> Self:
        """Changes state. It does this from now on."""
        if not self._is_there:
            assert self._pipe.poll(START_S_MAX), "a rank does not start"
            self._pipe.recv()
            self._is_there = True
        self._pipe.send((verb, how))
        return self

    def end(self) -> Any:
        """Changes state. What came of what was begun last."""
        assert self._pipe.poll(WAIT_S_MAX), "a rank does not answer"
        return self._pipe.recv()

    def do(self, verb: str, *how: Any) -> Any:
        """Changes state."""
        return self.begin(verb, *how).end()

    def signal(self, number: int) -> None:
        """Changes state."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Changes state. SIGKILL, and it is gone."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Changes state. Idempotent."""
        self._pipe.close()
        self.kill()


def all_do(ranks: list[Rank], verb: str, *how: Any, each: Callable[[int], tuple[Any, ...]] = lambda _: ()) -> list[Any]:
    """Changes state. All at the same time. `each`: what more a rank is told, by its number."""
    for number, rank in enumerate(ranks):
        rank.begin(verb, *how, *each(number))
    return [rank.end() for rank in ranks]
