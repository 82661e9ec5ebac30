"""An engine of several processes against one process that copies: ranks fill and read blocks together.

    put   4 ranks: reserve + block.write of a quarter of every block + commit, each from arrays of its own
    get   acquire by a scheduler, then 4 ranks: redeem its ticket + np.copyto of a quarter of every block + release

A round does in turn: plain copies of whole blocks by one process, private memory to a shared mapping; put; plain copies
back; get. All move the same bytes; a ratio is the plain copies' time by the store's, round by round. Plain copies keep
blocks whole, where a rank's part is a piece of 8 KiB in each layer and side.

put runs from the moment the first rank starts until the last one has its answer to commit; get likewise, until the last
one has released, and with the scheduler's acquire, which goes before. The start signal is no part of it: the ranks are
ready and look for it in a loop that yields the processor, as engines' workers look for the next step. `_gbps` are of
the same times, `_us` medians of what a rank spends in a call.

After every round each rank compares what it has copied out, and a reader of whole blocks all that was put together; no
round finds its tokens cached or its bytes in the slots. Pools are larger than a last-level cache.

    acquire_p50_us    acquire of 64 blocks by the scheduler, shared, while 8 ranks wait for its ticket on their pipes
    ticket_us         making the ticket of it
    redeem_p50_us     redeem and wait of one rank: all headers compared, no byte of KV moved
    handover_p50_us   from the begin of acquire until the last of the 8 ranks knows how many tokens it can read
"""

import contextlib
import gc
import mmap
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_longlong
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

import kvstore
from benchmarks.daemon import Daemon, DaemonFailed, terminated_like_interrupted
from benchmarks.report import Bar, at_least, finish, parser, ratios, spread

# Llama-3-8B's heads; 2 MiB a block
SPEC = kvstore.KVSpec(model="ranks", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16)
BARS = {"put_ratio": 0.7, "get_ratio": 0.7}
NUM_RANKS, NUM_WAITING = 4, 8
BATCH, HANDED_OVER = 128, 64  # blocks: 2,048 tokens, which is what engines prefill in one step; 1,024
POOL_NBYTES = 256 << 20  # of sources, and as many of targets: several times a last-level cache
CAPACITY = "1GiB"
WARM_UP = 5
DEADLINE_MS = 5000.0
START_S_MAX, ANSWER_S_MAX, STOP_S_MAX = 60.0, 20.0, 1.0
CONTEXT = multiprocessing.get_context("forkserver")  # no copy of this process, as engines' workers, yet soon there
Array = npt.NDArray[Any]
Results = dict[str, Any]


class RanksFailed(Exception):
    """A rank has ended or fallen silent. What it said of it is on stderr."""


@dataclass(frozen=True)
class Plan:
    """Who has what of which round."""

    address: str
    spec: kvstore.KVSpec
    num_ranks: int
    batch: int
    pool_nbytes: int = POOL_NBYTES

    @property
    def pool_blocks(self) -> int:
        """One more than whole batches: a slot that a round before has filled never has the bytes it is to get."""
        return max(1, self.pool_nbytes // self.spec.block_nbytes // self.batch) * self.batch + 1

    def places(self, number: int) -> list[int]:
        """Query. Of a round's blocks in the pool."""
        return [at % self.pool_blocks for at in range(number * self.batch, (number + 1) * self.batch)]

    def tokens(self, number: int) -> npt.NDArray[np.uint32]:
        """Query. A round's prompt; no two rounds share a token."""
        count = self.batch * self.spec.block_tokens
        return np.arange(number * count, (number + 1) * count, dtype=np.uint32)

    def group(self, index: int) -> kvstore.RankGroup:
        """Query. Heads are split evenly: TP`num_ranks`."""
        heads = self.spec.num_kv_heads // self.num_ranks
        return kvstore.RankGroup(
            group_id=f"tp{self.num_ranks}",
            layers=(0, self.spec.num_layers),
            heads=(index * heads, (index + 1) * heads),
        )

    def part(self, block: Array, index: int) -> Array:
        """Query. A rank's view of a whole block."""
        first, end = self.group(index).heads
        return block[:, :, first:end]


def kv_of(spec: kvstore.KVSpec, place: int) -> Array:
    """Query. A whole block, which follows from its place in the pool."""
    bits = np.frombuffer(np.random.default_rng(place).bytes(spec.block_nbytes), spec.numpy_dtype)
    return bits.reshape(spec.array_shape(spec.block_tokens))


def pool_of(count: int, like: Array, *, shared: bool = False) -> Array:
    """Query. `count` contiguous arrays one after the other, from a page boundary on, their pages there."""
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    memory = mmap.mmap(-1, count * like.nbytes, flags=kind | mmap.MAP_ANONYMOUS)
    if not shared:
        memory.madvise(mmap.MADV_HUGEPAGE)  # as numpy and engines allocate; shared memory has small pages, as the slab
    pool = np.frombuffer(memory, like.dtype).reshape(count, *like.shape)
    pool.view(np.uint8)[...] = 1
    return pool


# --- a rank, in its process


class Fill(NamedTuple):
    """Store a round's blocks, when the gate opens."""

    number: int


class Fetch(NamedTuple):
    """Copy a round's blocks out, when the gate opens."""

    number: int
    ticket: bytes


class Compare(NamedTuple):
    """See whether a round's blocks are those that were stored."""

    number: int


class Redeem(NamedTuple):
    """Say how many tokens can be read, at once."""

    ticket: bytes


Order = Fill | Fetch | Compare | Redeem


class Lap(NamedTuple):
    """When a rank did what; the clock is one for all processes. `num_tokens`: stored or read."""

    began_ns: int
    granted_ns: int  # reserved or redeemed
    copied_ns: int
    ended_ns: int
    num_tokens: int


class Gate:
    """Opens once for each time that all ranks start together."""

    def __init__(self) -> None:
        self._opened = CONTEXT.RawValue(c_longlong, 0)
        self._passed = 0

    def open(self) -> None:
        """Changes state."""
        self._opened.value += 1

    def wait(self) -> None:
        """Changes state. Runs until it has opened once more, and lets others run meanwhile."""
        give_up_at = time.monotonic() + ANSWER_S_MAX
        while self._opened.value == self._passed:
            assert time.monotonic() < give_up_at, "the gate did not open"
            os.sched_yield()
        self._passed += 1


class Rank:
    """One part of every block."""

    def __init__(
        self, plan: Plan, index: int, client: kvstore.Client, gate: Gate, pipe: "Connection[Any, Any]"
    ) -> None:
        """Changes state: attaches."""
        self._plan, self._gate, self._pipe = plan, gate, pipe
        self._cache = client.attach(plan.spec, group=plan.group(index))
        like = np.ascontiguousarray(plan.part(kv_of(plan.spec, 0), index))
        self._sources, self._targets = pool_of(plan.pool_blocks, like), pool_of(plan.pool_blocks, like)
        for place, source in enumerate(self._sources):
            source[...] = plan.part(kv_of(plan.spec, place), index)

    def obey(self, order: Order) -> Lap | None:
        """Changes state."""
        match order:
            case Fill(number):
                return self._fill(number)
            case Fetch(number, ticket):
                return self._fetch(number, ticket)
            case Compare(number):
                self._compare(number)
                return None
            case Redeem(ticket):
                return self._redeem(ticket)

    def _fill(self, number: int) -> Lap:
        plan = self._plan
        tokens, sources = plan.tokens(number), [self._sources[place] for place in plan.places(number)]
        for place in plan.places(number):
            self._targets[place][...] = 0  # a copy that does not happen shows; now, so that it is out of caches
        self._line_up()
        began_ns = time.monotonic_ns()
        with self._cache.reserve(tokens) as reservation:
            granted_ns = time.monotonic_ns()
            for block, source in zip(reservation.blocks(), sources, strict=True):
                block.write(source)
            copied_ns = time.monotonic_ns()
            stored = reservation.commit()
        ended_ns = time.monotonic_ns()
        return Lap(began_ns, granted_ns, copied_ns, ended_ns, len(tokens) if stored else 0)

    def _fetch(self, number: int, ticket: bytes) -> Lap:
        places = self._plan.places(number)
        targets = [self._targets[place] for place in places]
        self._line_up()
        began_ns = time.monotonic_ns()
        with self._cache.redeem(ticket) as hit:
            granted_ns = time.monotonic_ns()
            for block, target in zip(hit.blocks(), targets, strict=True):
                np.copyto(target, block.array)
            copied_ns = time.monotonic_ns()
        ended_ns = time.monotonic_ns()
        return Lap(began_ns, granted_ns, copied_ns, ended_ns, hit.verified_tokens)

    def _compare(self, number: int) -> None:
        for place in self._plan.places(number):
            same = np.array_equal(self._targets[place], self._sources[place])
            assert same, f"round {number}: not the bytes that were stored"

    def _redeem(self, ticket: bytes) -> Lap:
        began_ns = time.monotonic_ns()
        with self._cache.redeem(ticket) as hit:
            num_tokens = hit.wait()
            ended_ns = time.monotonic_ns()
        return Lap(began_ns, ended_ns, ended_ns, ended_ns, num_tokens)

    def _line_up(self) -> None:
        gc.collect()
        self._pipe.send(None)
        self._gate.wait()


def run_rank(plan: Plan, index: int, gate: Gate, pipe: "Connection[Any, Any]") -> None:
    """Changes state. The life of a rank: until its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which then ends us
    with kvstore.connect(plan.address, DEADLINE_MS) as client, contextlib.suppress(EOFError, ConnectionError):
        rank = Rank(plan, index, client, gate, pipe)
        gc.disable()
        pipe.send(None)
        while True:
            pipe.send(rank.obey(pipe.recv()))


# --- all ranks of an engine, as its scheduler sees them


class Ranks:
    """Processes that are there for as long as the block lasts."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._gate = Gate()
        self._undo = contextlib.ExitStack()
        self._pipes: list[Connection[Any, Any]] = []
        self.pids: list[int] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            for index in range(self._plan.num_ranks):
                self._start(index, undo)
            self._answers(START_S_MAX)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def together(self, order: Fill | Fetch) -> list[Lap]:
        """Changes state. All obey, and start at the same moment."""
        self._tell(order)
        self._answers(ANSWER_S_MAX)
        self._gate.open()
        return self._answers(ANSWER_S_MAX)

    def compare(self, number: int) -> None:
        """Changes state. All look at what they have fetched; apart, so that nobody who still reads is disturbed."""
        self._tell(Compare(number))
        self._answers(ANSWER_S_MAX)

    def hand_over(self, ticket: bytes) -> list[Lap]:
        """Changes state. All redeem it as it reaches them."""
        self._tell(Redeem(ticket))
        return self._answers(ANSWER_S_MAX)

    def _start(self, index: int, undo: contextlib.ExitStack) -> None:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=run_rank, args=(self._plan, index, self._gate, theirs), daemon=True)
        process.start()
        theirs.close()

        def end() -> None:
            ours.close()
            process.join(STOP_S_MAX)
            process.kill()
            process.join()
            process.close()

        undo.callback(end)
        self._pipes.append(ours)
        self.pids.append(process.pid or 0)

    def _tell(self, order: Order) -> None:
        for pipe in self._pipes:
            with self._or_failed():
                pipe.send(order)

    def _answers(self, seconds: float) -> list[Any]:
        return [self._answer(pipe, time.monotonic() + seconds) for pipe in self._pipes]

    def _answer(self, pipe: "Connection[Any, Any]", until: float) -> Any:
        with self._or_failed():
            if not pipe.poll(until - time.monotonic()):
                raise RanksFailed("a rank did not answer")
            return pipe.recv()

    @contextlib.contextmanager
    def _or_failed(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as exc:
            raise RanksFailed("a rank has ended") from exc


# --- rounds


@dataclass
class Times:
    """Seconds of each round."""

    copy_in: list[float] = field(default_factory=list)
    put: list[float] = field(default_factory=list)
    copy_out: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    acquire: list[float] = field(default_factory=list)
    fills: list[Lap] = field(default_factory=list)
    fetches: list[Lap] = field(default_factory=list)

    def figures(self, nbytes: int) -> Results:
        """Query. `nbytes`: of a round."""
        found: Results = {}
        for side, floor, taken in (("put", self.copy_in, self.put), ("get", self.copy_out, self.get)):
            ratio = spread(ratios(floor, taken))
            found[f"{side}_ratio"] = round(ratio.median, 3)
            found[f"{side}_ratio_range"] = [round(ratio.low, 3), round(ratio.high, 3)]
            found[f"{side}_gbps"] = _gbps(nbytes, taken)
            found[f"{side}_floor_gbps"] = _gbps(nbytes, floor)
        found["reserve_us"] = _p50_us(lap.granted_ns - lap.began_ns for lap in self.fills)
        found["write_us"] = _p50_us(lap.copied_ns - lap.granted_ns for lap in self.fills)
        found["commit_us"] = _p50_us(lap.ended_ns - lap.copied_ns for lap in self.fills)
        found["get_acquire_us"] = _p50_us(1e9 * seconds for seconds in self.acquire)
        found["get_copy_us"] = _p50_us(lap.copied_ns - lap.began_ns for lap in self.fetches)
        return found


def _gbps(nbytes: int, seconds: Sequence[float]) -> float:
    return round(spread(nbytes / each / 1e9 for each in seconds).median, 3)


def _p50_us(times_ns: Iterator[float]) -> float:
    return round(statistics.median(times_ns) / 1000, 1)


def span_s(laps: Sequence[Lap]) -> float:
    """Query. From the first that began until the last that ended."""
    return (max(lap.ended_ns for lap in laps) - min(lap.began_ns for lap in laps)) / 1e9


class Rounds:
    """The scheduler's side, and the one process that copies."""

    def __init__(self, plan: Plan, cache: kvstore.Cache, ranks: Ranks) -> None:
        self._plan, self._cache, self._ranks = plan, cache, ranks
        blocks = [kv_of(plan.spec, place) for place in range(plan.pool_blocks)]
        self._sources, self._copies = pool_of(len(blocks), blocks[0]), pool_of(len(blocks), blocks[0])
        self._shared = pool_of(len(blocks), blocks[0], shared=True)
        for source, block in zip(self._sources, blocks, strict=True):
            source[...] = block
        self.times = Times()

    def run(self, rounds: int, warm_up: int) -> None:
        """Changes state."""
        with _no_collector():
            for number in range(warm_up + rounds):
                if number == warm_up:
                    self.times = Times()
                self._round(number)

    def _round(self, number: int) -> None:
        plan, times = self._plan, self.times
        places = plan.places(number)
        times.copy_in.append(_timed(lambda: _copy(self._sources, self._shared, places)))
        laps = self._ranks.together(Fill(number))
        self._expect_all(number, laps)
        times.put.append(span_s(laps))
        times.fills += laps
        times.copy_out.append(_timed(lambda: _copy(self._shared, self._copies, places)))
        self._get(number)
        self._compare(number)
        self._cache.clear()

    def _get(self, number: int) -> None:
        times, tokens = self.times, self._plan.tokens(number)
        gc.collect()
        before = time.perf_counter()
        with self._cache.acquire(tokens, shared=True) as hit:
            ticket = hit.ticket
            times.acquire.append(time.perf_counter() - before)
            laps = self._ranks.together(Fetch(number, ticket))
        self._expect_all(number, laps)
        self._ranks.compare(number)
        times.get.append(times.acquire[-1] + span_s(laps))
        times.fetches += laps

    def _expect_all(self, number: int, laps: Sequence[Lap]) -> None:
        found = [lap.num_tokens for lap in laps]
        if found != [len(self._plan.tokens(number))] * self._plan.num_ranks:
            raise RanksFailed(f"round {number}: the ranks have {found} tokens")

    def _compare(self, number: int) -> None:
        """A reader of whole blocks, that is no rank, sees the parts put together."""
        with self._cache.acquire(self._plan.tokens(number)) as hit:
            for block, place in zip(hit.blocks(), self._plan.places(number), strict=True):
                same = np.array_equal(block.array, self._sources[place])
                assert same, f"round {number}: the block at token {block.start} is not what the ranks have stored"
                assert np.array_equal(self._copies[place], self._sources[place])


def _copy(sources: Array, targets: Array, places: Sequence[int]) -> None:
    for place in places:
        np.copyto(targets[place], sources[place])


def _timed(work: Callable[[], None]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def hand_over(plan: Plan, cache: kvstore.Cache, ranks: Ranks, rounds: int, warm_up: int) -> Results:
    """Changes state: fills the cache. `plan`: of the ranks that wait."""
    tokens = plan.tokens(0)
    with cache.reserve(tokens) as reservation:
        for block, place in zip(reservation.blocks(), plan.places(0), strict=True):
            block.write(kv_of(plan.spec, place))
        assert reservation.commit()
    acquires, tickets, redeems, whole = [], [], [], []
    with _no_collector():
        for number in range(warm_up + rounds):
            began_ns = time.monotonic_ns()
            hit = cache.acquire(tokens, shared=True)
            acquired_ns = time.monotonic_ns()
            ticket = hit.ticket
            made_ns = time.monotonic_ns()
            laps = ranks.hand_over(ticket)
            hit.release()
            assert [lap.num_tokens for lap in laps] == [len(tokens)] * plan.num_ranks
            if number >= warm_up:
                acquires.append(acquired_ns - began_ns)
                tickets.append(made_ns - acquired_ns)
                redeems += [lap.ended_ns - lap.began_ns for lap in laps]
                whole.append(max(lap.ended_ns for lap in laps) - began_ns)
    return {
        "acquire_p50_us": _p50_us(iter(acquires)),
        "acquire_us_range": [round(min(acquires) / 1000, 1), round(max(acquires) / 1000, 1)],
        "ticket_us": _p50_us(iter(tickets)),
        "ticket_nbytes": len(ticket),
        "redeem_p50_us": _p50_us(iter(redeems)),
        "handover_p50_us": _p50_us(iter(whole)),
        "handover_blocks": plan.batch,
        "handovers": rounds,
    }


def measure(
    rounds: int,
    handovers: int,
    blocks: int = BATCH,
    spec: kvstore.KVSpec = SPEC,
    capacity: str = CAPACITY,
    pool_nbytes: int = POOL_NBYTES,
) -> Results:
    """Changes state: runs a daemon, and processes that are its clients. `blocks`: of a round."""
    with Daemon(capacity) as daemon, kvstore.connect(daemon.address, DEADLINE_MS) as client:
        _wait_ready(client)
        cache = client.attach(spec)
        plan = Plan(daemon.address, spec, NUM_RANKS, blocks, pool_nbytes)
        with Ranks(plan) as ranks:
            runs = Rounds(plan, cache, ranks)
            runs.run(rounds, WARM_UP)
        results = {"blocks": plan.batch, "rounds": rounds, **runs.times.figures(plan.batch * spec.block_nbytes)}
        waiting = Plan(daemon.address, spec, NUM_WAITING, HANDED_OVER, pool_nbytes=0)
        with Ranks(waiting) as ranks:
            results |= hand_over(waiting, cache, ranks, handovers, WARM_UP)
    return results


def _wait_ready(client: kvstore.Client) -> None:
    """A slab is usable at once, but this measures the steady state: all its memory is there."""
    give_up_at = time.monotonic() + START_S_MAX
    while (memory := client.status()["daemon"]["memory"])["extents_ready"] < memory["extents"]:
        assert time.monotonic() < give_up_at, "the slab's memory is not there"
        time.sleep(0.1)


def bars(results: Results) -> list[Bar]:
    """Query."""
    return [at_least(name, results[name], bar) for name, bar in BARS.items()]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=30, help="counted rounds of put and get (%(default)s)")
    options.add_argument("--handovers", type=int, default=300, help="counted tickets to 8 ranks (%(default)s)")
    options.add_argument("--blocks", type=int, default=BATCH, help=f"of a round, 1 to {BATCH} (%(default)s)")
    given = options.parse_args()
    if min(given.rounds, given.handovers, given.blocks) < 1 or given.blocks > BATCH:
        options.error(f"there are 1 to {BATCH} blocks in a round, and at least one round and handover")
    CONTEXT.set_forkserver_preload(["benchmarks.ranks"])
    with terminated_like_interrupted():
        results = measure(given.rounds, given.handovers, given.blocks)
    return finish("ranks", results, bars(results), as_json=given.json)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DaemonFailed, RanksFailed, kvstore.KVStoreError) as failure:
        sys.exit(f"ranks: {failure}")
    except KeyboardInterrupt:
        sys.exit("ranks: interrupted")
