"""Leases whose blocks are not all in memory yet: how they get on, who waits, and when that is no longer worth it."""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

from kvstore.core.leases import Lease, Loading, SpecEntry
from kvstore.core.lower import LowerTier
from kvstore.core.placement import LinearCost, due_ms
from kvstore.core.stats import Guard, Stats
from kvstore.core.tier import FAILED, Tier

WAITS_MAX = 4096


class Progress(NamedTuple):
    """How many leading blocks of a lease have their bytes, and whether there will be no more of them."""

    ready: int
    final: bool


NOTHING = Progress(0, True)


class _Wait(NamedTuple):
    lease: Lease | None  # None: it has ended
    blocks: int
    until_ms: float


class Watch:
    """Leases that are loading, and callers that wait for them.

    Asked at every turn of the loop, so what it found is kept until something changes by which it is judged.
    """

    def __init__(self, memory: Tier, stats: Stats) -> None:
        self.lower: LowerTier | None = None
        self._memory = memory
        self._stats = stats
        self._prefill: dict[int, LinearCost] = {}  # by spec id
        self._loading: list[Lease] = []
        self._waits: dict[int, _Wait] = {}
        self._answers: list[tuple[int, Progress]] = []  # to callers who need not wait
        self._wait_due_ms = math.inf  # not after the first of them
        self._changes = 0  # apart from blocks that came
        self._changes_told = self._changes_reviewed = self._changes_timed = 0
        self._cut_due_ms = math.inf

    def prefill_of(self, entry: SpecEntry) -> LinearCost:
        """Query. What recomputing costs the engines that serve a spec, as they reported it."""
        return self._prefill.setdefault(entry.spec_id, LinearCost())

    def begin(self, entry: SpecEntry, lease: Lease, loaded_from: int | None, now_ms: float) -> None:
        """Changes state. Blocks of a new lease may be on their way for it, or for somebody else who came first.

        `loaded_from`: the token from which on they are on their way for it.
        """
        slots = array("I", lease.slots)
        ready = self._memory.num_sealed(slots)
        if ready == len(slots):
            return
        start = min(ready * entry.spec.block_tokens, lease.num_tokens) if loaded_from is None else loaded_from
        lease.loading = Loading(entry, now_ms, ready, max(1, lease.num_tokens - start))
        self._loading.append(lease)
        self._changes += 1
        if self.lower is not None:
            self.lower.loads.hurry(slots[ready:])
        self._stats.tokens_loaded += lease.num_tokens - start

    def end(self, lease: Lease) -> None:
        """Changes state. The lease has ended; who waits for it hears so."""
        if lease.loading is not None:
            lease.loading.is_cut = True
            self._changes += 1
            if lease in self._loading:
                self._loading.remove(lease)

    def note_change(self) -> None:
        """Changes state. Blocks that are on their way may have left memory's tree."""
        self._changes += 1

    def progress(self, lease: Lease) -> Progress:
        """Query."""
        if lease.entry is None:
            return NOTHING  # held since before a restart: what had not come by then will not
        slots = array("I", lease.slots)
        if lease.loading is None:
            return Progress(len(slots), True)
        ready = self._memory.num_sealed(slots)
        final = lease.loading.is_cut or ready == len(slots) or self._memory.state_of(slots[ready]) == FAILED
        return Progress(ready, final)

    def wait(self, token: int, lease: Lease | None, blocks: int, until_ms: float, now_ms: float) -> None:
        """Changes state. `take_progress` tells of `token` once that many blocks are ready, or there will be no more."""
        wait = _Wait(lease, blocks, until_ms)
        progress = self._told(wait, now_ms)
        if progress is None and len(self._waits) < WAITS_MAX:
            self._waits[token] = wait
            self._wait_due_ms = min(self._wait_due_ms, until_ms)
        else:
            self._answers.append((token, progress or NOTHING._replace(final=False)))

    def take_progress(self, now_ms: float) -> list[tuple[int, Progress]]:
        """Changes state. What waiting callers can be told now."""
        told, self._answers = self._answers, []
        if self._changes_told == self._num_changes and now_ms < self._wait_due_ms:
            return told  # many may wait, and most messages change nothing for them
        self._changes_told = self._num_changes
        for token, wait in list(self._waits.items()):
            progress = self._told(wait, now_ms)
            if progress is not None:
                told.append((token, progress))
                del self._waits[token]
        self._wait_due_ms = min((wait.until_ms for wait in self._waits.values()), default=math.inf)
        return told

    def next_deadline_ms(self) -> float | None:
        """Query. When `on_time` or `take_progress` has something to do though nothing else happens."""
        due_ms = min(self._wait_due_ms if self._waits else math.inf, self._next_cut_ms())
        return due_ms if due_ms < math.inf else None

    def on_time(self, now_ms: float) -> None:
        """Changes state. A lease whose load has ended, or is worth less than recomputing, is watched no more."""
        if not self._loading or (self._changes_reviewed == self._num_changes and now_ms < self._next_cut_ms()):
            return
        self._changes_reviewed, self._changes_timed = self._num_changes, -1
        for lease in list(self._loading):
            assert lease.loading is not None
            if now_ms >= self._cut_ms(lease) and not self.progress(lease).final:
                lease.loading.is_cut = True
                self._changes += 1
                self._stats.loads_cut += 1
                if self.lower is not None:
                    self.lower.gate.cut()
            if self.progress(lease).final:
                self._loading.remove(lease)

    @property
    def _num_changes(self) -> int:
        return self._changes + (self.lower.loads.num_ended if self.lower is not None else 0)

    def _told(self, wait: _Wait, now_ms: float) -> Progress | None:
        """What a waiting caller can be told now."""
        progress = NOTHING if wait.lease is None else self.progress(wait.lease)
        is_ready, is_time = progress.final or progress.ready >= wait.blocks, now_ms >= wait.until_ms
        self._stats.guards[Guard.DEADLINE] += is_time and not is_ready
        return progress if is_ready or is_time else None

    def _next_cut_ms(self) -> float:
        """When the first load falls behind recomputing."""
        if self._changes_timed != self._num_changes:
            self._changes_timed = self._num_changes
            self._cut_due_ms = min((self._cut_ms(lease) for lease in self._loading), default=math.inf)
        return self._cut_due_ms

    def _cut_ms(self, lease: Lease) -> float:
        """When a load falls behind recomputing if nothing more arrives."""
        loading = lease.loading
        assert loading is not None
        done = (self.progress(lease).ready - loading.first) * loading.entry.spec.block_tokens
        until_ms = due_ms(self.prefill_of(loading.entry), loading.started_ms, done, loading.num_tokens)
        return math.inf if until_ms is None else until_ms
