"""One client of a soak: it stores and reads KV until it is killed. Every byte is a function of spec and tokens.

Every byte that it reads is compared; it does all that the connector API offers, in the order that its seed says. What
it has counted is in its files at once (benchmarks/soak_records.py). SIGTERM raises Leaving wherever it happens to be,
as Ctrl-C would in an engine; it then closes in order.
"""

import contextlib
import faulthandler
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import kvstore
from benchmarks.soak_records import CALL, LATE_WAKE_MS, WAKE, WAKE_MS, Count, Counts

SMALL = kvstore.KVSpec(model="soak-small", dtype="uint8", num_layers=2, num_kv_heads=2, head_dim=64, block_tokens=16)
LARGE = kvstore.KVSpec(model="soak-large", dtype="bfloat16", num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=32)
SPECS = SMALL, LARGE
SYSTEMS, BRANCHES, TURNS_MAX = 6, 10, 4  # of the conversations; all of them need three times the RAM tier
VOCABULARY = 32_000
ATTACH_MS = 1000.0  # what connect and attach may take where the deadline is shorter
NOTICE_MS = 5.0
PAUSE_S = 0.004  # between two operations, on average
HOLD_SHARE, HOLD_S_MAX, HELD_MAX = 0.15, 1.5, 12
CHILD_S_MAX = 5.0  # so long a forked child may take; SIGALRM ends it later
LANE = 8  # bytes of a pattern that are made at once
R = TypeVar("R")
Tokens = npt.NDArray[np.uint32]
Array = npt.NDArray[np.generic]


class Leaving(BaseException):
    """SIGTERM: not a failure, and nothing that may be caught as one.

    Where it comes in a finaliser, Python drops it: so the signal is also remembered until the operation has ended.
    """


@dataclass(frozen=True)
class Plan:
    """What a client is told."""

    address: str
    records: Path  # its files: with a suffix each
    seed: int  # of its operations
    prompts_seed: int  # of what they are about: the same for all, so that they hit each other's blocks
    deadline_ms: float

    def file(self, kind: str) -> Path:
        """Query. counts, calls, wakes or log."""
        return self.records.with_name(f"{self.records.name}.{kind}")


# --- what is stored


def kv_of(spec: kvstore.KVSpec, tokens: Tokens, start: int, count: int) -> Array:
    """Query. [L, 2, H, T, D] for tokens [start, start + count): each token's bytes depend on all tokens up to it."""
    ids = tokens[: start + count].astype(np.uint64)
    weights = np.arange(1, len(ids) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    marks = np.cumsum((ids + np.uint64(1)) * weights)[start:] + np.frombuffer(spec.fingerprint, np.uint64)[0]
    layers, sides, heads, _, width = spec.array_shape(count)
    lanes = width * spec.numpy_dtype.itemsize // LANE
    places = np.arange(layers * sides * heads * lanes, dtype=np.uint64).reshape(layers, sides, heads, 1, lanes)
    values = (places * np.uint64(0xD6E8FEB86659FD93)) ^ marks[None, None, None, :, None]
    values *= np.uint64(0xC2B2AE3D27D4EB4F)
    values ^= values >> np.uint64(32)
    bits: Array = values.view(spec.numpy_dtype)
    return bits


def wrong_bytes(array: Array, spec: kvstore.KVSpec, tokens: Tokens, start: int) -> int:
    """Query. Bytes of a block's array that are not what its tokens say; all of them where the shape is another."""
    count = array.shape[3]
    expected = kv_of(spec, tokens, start, count)
    if array.shape != expected.shape:
        return max(1, array.nbytes)
    found = np.ascontiguousarray(array).view(np.uint8)
    return int(np.count_nonzero(found != expected.view(np.uint8)))


def prompt(seed: int, system: int, branch: int, turns: int) -> Tokens:
    """Query. A conversation: what its system prompt shares with others, then turns of its own."""
    pieces = [np.random.default_rng([seed, system]).integers(0, VOCABULARY, 60 + 37 * system, dtype=np.uint32)]
    own = np.random.default_rng([seed, system, branch, 1])
    pieces += [own.integers(0, VOCABULARY, own.integers(20, 140), dtype=np.uint32) for _ in range(turns)]
    return np.concatenate(pieces)


# --- what happens to it


@dataclass(eq=False)
class Held:
    """An array that outlives its hit or its reservation."""

    array: Array
    spec: kvstore.KVSpec
    tokens: Tokens
    start: int
    until_s: float


@dataclass
class Notes:
    """The files of this life."""

    plan: Plan
    counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.counts = Counts(self.plan.file("counts"))
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._calls, self._wakes = (os.open(self.plan.file(kind), how, 0o600) for kind in ("calls", "wakes"))
        self._parent = os.getppid()

    def timed(self, call: Callable[[], R], deadline_ms: float | None = None) -> R:
        """Changes state. A call of the store, and when it began, was due and ended. Default: the client's deadline."""
        within_ms = self.plan.deadline_ms if deadline_ms is None else deadline_ms
        began_ns = time.monotonic_ns()
        self.counts.set(Count.BEGAN_NS, began_ns)
        try:
            return call()
        finally:
            times = began_ns, time.monotonic_ns(), began_ns + int(within_ms * 1e6)
            os.write(self._calls, np.array(times, np.int64).tobytes())
            self.counts.set(Count.BEGAN_NS, 0)

    def start_control(self) -> None:
        """Changes state. The thread that shows when this process could not run."""
        threading.Thread(target=self._control, name="control", daemon=True).start()

    def _control(self) -> None:
        while os.getppid() == self._parent:
            due_ns = time.monotonic_ns() + int(WAKE_MS * 1e6)
            time.sleep(WAKE_MS / 1000)
            woke_ns = time.monotonic_ns()
            if woke_ns - due_ns > LATE_WAKE_MS * 1e6:
                os.write(self._wakes, np.array((due_ns, woke_ns), np.int64).tobytes())
            self.counts.set(Count.AWAKE_NS, woke_ns)  # last: what was late before is on file
        os._exit(3)  # nobody is there to end this process


assert CALL.itemsize == 24
assert WAKE.itemsize == 16


class Worker:
    """Operations without end."""

    def __init__(self, plan: Plan, notes: Notes) -> None:
        """Changes state. Returns once a daemon answers."""
        self._plan, self._notes, self._counts = plan, notes, notes.counts
        self._random = random.Random(plan.seed)
        self._held: list[Held] = []
        self._client: kvstore.Client | None = None
        self._caches: list[kvstore.Cache] = []
        self._mix: dict[Callable[[], None], float] = {
            self._match: 15,
            self._read: 25,
            self._read_later: 15,
            self._read_as_it_comes: 10,
            self._store: 25,
            self._store_by_array: 8,
            self._abort: 5,
            self._leave: 4,
            self._prefetch: 8,
            self._report: 2,
            self._status: 1,
            self._reconnect: 0.8,
            self._fork: 0.5,
            self._clear: 0.04,
        }
        self._connect()

    def work(self) -> None:
        """Changes state. Until SIGTERM, which mostly raises Leaving in the midst of something."""
        operations, weights = list(self._mix), list(self._mix.values())
        while not _told_to_leave:
            self._random.choices(operations, weights)[0]()
            self._drop_held()
            self._counts.add(Count.OPERATIONS)
            time.sleep(self._random.expovariate(1 / PAUSE_S))

    def close(self) -> None:
        """Changes state. Some arrays outlive the client."""
        if self._client is not None:
            self._notes.timed(self._client.close)
        self._held.clear()

    # looking up

    def _match(self) -> None:
        cache, tokens = self._some_cache(), self._some_prompt()
        self._expect(0 <= self._notes.timed(lambda: cache.match(tokens)) <= len(tokens))

    def _read(self) -> None:
        cache, tokens = self._some_cache(), self._some_prompt()
        with self._notes.timed(lambda: cache.acquire(tokens)) as hit:
            found = self._notes.timed(hit.wait)
            self._expect(found == self._check_blocks(cache.spec, list(hit.blocks()), tokens))

    def _read_later(self) -> None:
        """As an engine's scheduler does: it asks, goes on, and comes back."""
        cache, tokens = self._some_cache(), self._some_prompt()
        hit = self._notes.timed(lambda: cache.acquire(tokens, request_id=f"r{self._random.random()}", wait=False), 0)
        for _ in range(self._random.randrange(20)):
            if self._notes.timed(lambda: hit.settled, 0) and self._notes.timed(hit.ready, 0):
                break
            time.sleep(0.001)
        if self._random.random() < 0.9:  # else it has lost interest
            found = self._notes.timed(hit.wait)
            self._expect(found == self._check_blocks(cache.spec, list(hit.blocks()), tokens))
        self._notes.timed(hit.release, 0)

    def _read_as_it_comes(self) -> None:
        cache, tokens = self._some_cache(), self._some_prompt()
        with self._notes.timed(lambda: cache.acquire(tokens)) as hit:
            coming, blocks = hit.blocks(), []
            while (block := self._notes.timed(lambda: next(coming, None))) is not None:
                blocks.append(block)
            self._check_blocks(cache.spec, blocks, tokens)

    def _check_blocks(self, spec: kvstore.KVSpec, blocks: list[kvstore.Block], tokens: Tokens) -> int:
        """Tokens of a hit. Some of its arrays are kept for later."""
        at = 0
        for block in blocks:
            array = block.array
            self._expect(block.start == at and array.shape[3] == block.num_tokens)
            self._compare(array, spec, tokens, block.start)
            if self._random.random() < HOLD_SHARE:
                self._hold(array, spec, tokens, block.start)
            at += block.num_tokens
        self._expect(at <= len(tokens))
        if at:
            self._counts.add(Count.HITS)
            self._counts.add(Count.HIT_TOKENS, at)
        return at

    # storing

    def _store(self) -> None:
        cache, tokens = self._some_cache(), self._some_prompt()
        start = self._random.choice((0, 0, 0, self._random.randrange(len(tokens))))
        with self._notes.timed(lambda: cache.reserve(tokens, start)) as reservation:
            for block in reservation.blocks():
                block.write(kv_of(cache.spec, tokens, block.start, block.num_tokens))
            self._commit(reservation)

    def _store_by_array(self) -> None:
        """Some writable arrays outlive their commit."""
        cache, tokens = self._some_cache(), self._some_prompt()
        with self._notes.timed(lambda: cache.reserve(tokens)) as reservation:
            for block in reservation.blocks():
                array = block.array
                array[...] = kv_of(cache.spec, tokens, block.start, block.num_tokens)
                if self._random.random() < HOLD_SHARE:
                    self._hold(array, cache.spec, tokens, block.start)
            self._commit(reservation)

    def _abort(self) -> None:
        """Bytes that are no KV are written, and must never be read."""
        cache, tokens = self._some_cache(), self._some_prompt()
        reservation = self._notes.timed(lambda: cache.reserve(tokens))
        for block in reservation.blocks():
            block.array[...] = 0xEE
        self._notes.timed(reservation.abort, 0)
        self._expect(not self._notes.timed(reservation.commit))

    def _leave(self) -> None:
        """Without a commit; or with one of the leading blocks, since the others were never written."""
        cache, tokens = self._some_cache(), self._some_prompt()
        with self._notes.timed(lambda: cache.reserve(tokens)) as reservation:
            blocks = list(reservation.blocks())
            for block in blocks[: self._random.randrange(len(blocks) + 1)]:
                block.write(kv_of(cache.spec, tokens, block.start, block.num_tokens))
            if self._random.random() < 0.5:
                self._commit(reservation)

    def _commit(self, reservation: kvstore.Reservation) -> None:
        if self._notes.timed(lambda: reservation.commit(output_tokens=len(SPECS))):
            self._counts.add(Count.BLOCKS_STORED, reservation.num_blocks)

    # notices, and the client itself

    def _prefetch(self) -> None:
        cache, tokens = self._some_cache(), self._some_prompt()
        self._notes.timed(lambda: cache.prefetch(tokens), NOTICE_MS)

    def _report(self) -> None:
        """An engine so slow that loading is worth it."""
        cache, tokens = self._some_cache(), self._random.randrange(100, 2000)
        self._notes.timed(lambda: cache.report(tokens, 5.0 * tokens, 6.0 * tokens), NOTICE_MS)

    def _status(self) -> None:
        self._notes.timed(self._the_client().status)

    def _clear(self) -> None:
        self._notes.timed(self._some_cache().clear)

    def _reconnect(self) -> None:
        cache, tokens = self._some_cache(), self._some_prompt()
        self._notes.timed(self._the_client().close)
        self._expect(self._notes.timed(lambda: cache.match(tokens), 0) == 0)
        self._counts.add(Count.RECONNECTS)
        self._connect()

    def _fork(self) -> None:
        """A child that uses what it inherits: to it, all is a miss; the parent's blocks stay right."""
        cache, tokens = self._some_cache(), self._some_prompt()
        with (
            self._notes.timed(lambda: cache.acquire(tokens)) as hit,
            self._notes.timed(lambda: cache.reserve(self._some_prompt())) as reservation,
        ):
            self._notes.timed(hit.wait)
            blocks = list(hit.blocks())
            arrays = [(block.array, block.start) for block in blocks]
            signal.signal(signal.SIGTERM, _leave_later)  # what Python itself does at a fork must not be interrupted
            child = os.fork()
            if child == 0:
                self._be_child(cache, tokens, blocks, reservation)
            signal.signal(signal.SIGTERM, _leave)
            self._counts.add(Count.FORKS)
            self._await(child)
            for array, start in arrays:
                self._compare(array, cache.spec, tokens, start)
            del arrays

    def _be_child(
        self,
        cache: kvstore.Cache,
        tokens: Tokens,
        blocks: list[kvstore.Block],
        reservation: kvstore.Reservation,
    ) -> None:
        """Never returns. The exit code is the number of wrong answers; 99 where something was raised."""
        code = 99
        try:
            signal.alarm(2 * int(CHILD_S_MAX))
            answers = [
                cache.match(tokens),
                cache.acquire(tokens).wait(),
                cache.acquire(tokens, wait=False).num_tokens,
                cache.reserve(tokens).num_blocks,
                int(self._the_client().status()["available"]),
                int(reservation.commit()),
                sum(_lends(block) for block in [*blocks, *reservation.blocks()]),
            ]
            cache.prefetch(tokens)
            cache.clear()
            self._the_client().close()
            code = sum(answer != 0 for answer in answers)
        finally:
            if code:
                faulthandler.dump_traceback()
            os._exit(code)

    def _await(self, child: int) -> None:
        until_s = time.monotonic() + CHILD_S_MAX
        while time.monotonic() < until_s:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                self._counts.add(Count.WRONG_ANSWERS, os.waitstatus_to_exitcode(status) != 0)
                return
            time.sleep(0.002)
        self._counts.add(Count.SILENT_CHILDREN)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    # --- means

    def _connect(self) -> None:
        within_ms = max(ATTACH_MS, self._plan.deadline_ms)
        while True:
            try:
                self._client = self._notes.timed(
                    lambda: kvstore.connect(self._plan.address, self._plan.deadline_ms), within_ms
                )
                self._caches = [self._attach(spec, within_ms) for spec in SPECS]
                return
            except kvstore.KVStoreError:
                if _told_to_leave:
                    raise Leaving from None
                time.sleep(0.02)

    def _attach(self, spec: kvstore.KVSpec, within_ms: float) -> kvstore.Cache:
        return self._notes.timed(lambda: self._the_client().attach(spec), within_ms)

    def _the_client(self) -> kvstore.Client:
        assert self._client is not None
        return self._client

    def _some_cache(self) -> kvstore.Cache:
        return self._caches[self._random.random() < 0.35]

    def _some_prompt(self) -> Tokens:
        """Whole, cut anywhere, or with another end: then only a part of it can hit."""
        chance = self._random
        turns = chance.randint(1, TURNS_MAX)
        found = prompt(self._plan.prompts_seed, chance.randrange(SYSTEMS), chance.randrange(BRANCHES), turns)
        how = chance.random()
        if how < 0.2:
            found = found[: chance.randint(1, len(found))]
        elif how < 0.3:
            found[chance.randrange(len(found)) :] += VOCABULARY
        return found

    def _expect(self, is_right: bool) -> None:
        if not is_right:
            self._counts.add(Count.WRONG_ANSWERS)
            faulthandler.dump_traceback(all_threads=False)

    def _compare(self, array: Array, spec: kvstore.KVSpec, tokens: Tokens, start: int) -> None:
        wrong = wrong_bytes(array, spec, tokens, start)
        self._counts.add(Count.BYTES_READ, array.nbytes)
        if wrong:
            self._counts.add(Count.WRONG_BYTES, wrong)
            print(f"{wrong} of {array.nbytes} bytes are wrong: {spec.model} token {start}", file=sys.stderr)
            faulthandler.dump_traceback(all_threads=False)

    def _hold(self, array: Array, spec: kvstore.KVSpec, tokens: Tokens, start: int) -> None:
        if len(self._held) < HELD_MAX:
            until_s = time.monotonic() + self._random.uniform(0, HOLD_S_MAX)
            self._held.append(Held(array, spec, tokens, start, until_s))

    def _drop_held(self) -> None:
        """Compared once more: an array must never show another block's bytes, however long it is kept."""
        now_s = time.monotonic()
        for held in [each for each in self._held if each.until_s <= now_s]:
            self._compare(held.array, held.spec, held.tokens, held.start)
            self._held.remove(held)


def _lends(block: Any) -> bool:
    try:
        return block.array is not None
    except ValueError:
        return False


def run(plan: Plan) -> None:
    """Changes state. The life of a client, in a process of its own."""
    with plan.file("log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 2)
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process that has threads: it is the point
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the soak, which then ends us
    signal.signal(signal.SIGTERM, _leave)
    notes = Notes(plan)
    notes.start_control()
    with contextlib.suppress(Leaving):
        worker = None
        try:
            worker = Worker(plan, notes)
            worker.work()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if worker is not None:
                worker.close()


_told_to_leave: list[int] = []


def _leave_later(signum: int, frame: FrameType | None) -> None:
    _told_to_leave.append(signum)


def _leave(signum: int, frame: FrameType | None) -> None:
    _told_to_leave.append(signum)
    raise Leaving
