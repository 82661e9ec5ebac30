"""Bytes per second to and from the SSD: through the store, and by plain system calls on the same file. For copy_rate.

    raw_write, raw_read   pwritev and preadv around the page cache, from as many threads as the daemon has, each taking
                          the next block; one fdatasync per 64 MiB written
    write                 reserve + block.write + commit of several chains, until the index has the rows of all blocks
    read                  acquire + wait of chains that only the SSD has, not copied out; while one is waited for, the
                          next is asked for already, as engines do that serve several requests

All move slots of the same size between the same file and the same memory: the raw side borrows slots of the daemon's
slab by a reservation, since a virtual drive is up to twice as fast with memory whose pages happen to be neighbours: one
read 1.1 to 2.8 GB/s, the runs of contiguous pages being 1 to 64 long. The file is written in full before. The upper
half of it, which the daemon has not come to, is for the raw side; both halves are written and read once from end to
end, in rounds by turns, never at the same time. Reads are those of a new daemon, so that nothing is in memory. After
each round of them, the last chain is compared byte by byte.
"""

import contextlib
import itertools
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvstore
from benchmarks.daemon import Daemon, DaemonFailed
from benchmarks.report import Bar, at_least, ratios, spread
from kvstore.core.layout import HEADER_NBYTES
from kvstore.core.lower import QUEUE_SHARE
from kvstore.core.slots import EXTENT_NBYTES_MAX
from kvstore.media.slabfile import DATA_OFFSET
from kvstore.service.movers import Lane

BARS = {"disk_read": 0.85, "disk_write": 0.85}
BATCH = 32  # blocks of a chain
REQUESTS = 2  # outstanding reads
ROUND_NBYTES = 1 << 30
WARM_UP = 1
SYNC_NBYTES = 64 << 20
HALF_EXTENTS_MIN = 2  # extents of a smaller file are smaller
READ_MEMORY_NBYTES = 256 << 20  # a quarter of what a round reads
SPARE_NBYTES = 256 << 20
FILL_NBYTES = 16 << 20
SSD = "ssd"  # the tier's folder within ours
POLL_S = 0.002
WAIT_S_MAX = 60.0
DEADLINE_MS = 10_000.0
QUEUE_DEPTH = Lane.READS.num_threads
assert Lane.WRITES.num_threads == QUEUE_DEPTH
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where things lie. Slots are numbered through the extents, `per_extent` in each."""

    spec: kvstore.KVSpec
    num_rounds: int
    batch: int = BATCH
    round_nbytes: int = ROUND_NBYTES

    @property
    def slot_nbytes(self) -> int:
        return self.spec.slot_nbytes

    @property
    def per_extent(self) -> int:
        return EXTENT_NBYTES_MAX // self.slot_nbytes

    @property
    def chains_per_round(self) -> int:
        return max(1, round(self.round_nbytes / (self.batch * self.slot_nbytes)))

    @property
    def slots_per_round(self) -> int:
        return self.chains_per_round * self.batch

    @property
    def half_extents(self) -> int:
        """Extents of each side."""
        return max(HALF_EXTENTS_MIN, -(-self.num_rounds * self.slots_per_round // self.per_extent))

    @property
    def capacity_nbytes(self) -> int:
        return 2 * self.half_extents * EXTENT_NBYTES_MAX

    @property
    def write_memory_nbytes(self) -> int:
        """Enough that a whole round may wait to be written."""
        return int(self.slots_per_round * self.slot_nbytes / QUEUE_SHARE) + SPARE_NBYTES

    @property
    def slots_to_read_into(self) -> int:
        """Nearly all that READ_MEMORY_NBYTES is cut into: the raw side reads into the same memory as the other."""
        return READ_MEMORY_NBYTES // EXTENT_NBYTES_MAX * self.per_extent // self.batch * self.batch

    def chains(self, number: int) -> range:
        """Query. The chains of a round."""
        return range(number * self.chains_per_round, (number + 1) * self.chains_per_round)

    def raw_offset(self, slot: int) -> int:
        """Query. Place in the file of a slot of the raw side."""
        extent, index = divmod(slot, self.per_extent)
        return DATA_OFFSET + (self.half_extents + extent) * EXTENT_NBYTES_MAX + index * self.slot_nbytes

    def tokens(self, chain: int, num_blocks: int) -> Tokens:
        """Query. A prompt; no two chains share a token."""
        first = chain * self.batch * self.spec.block_tokens
        return np.arange(first, first + num_blocks * self.spec.block_tokens, dtype=np.uint32)


# What is timed of a round; entering prepares it, leaving checks and tidies up.
Round = contextlib.AbstractContextManager[Callable[[], None]]


class Stored:
    """The store's side: a daemon with an SSD tier, and a client of it."""

    def __init__(self, client: kvstore.Client, plan: Plan) -> None:
        """Changes state. Returns once memory and file are all there."""
        self._client, self._plan = client, plan
        self._cache = client.attach(plan.spec)
        shape = plan.spec.array_shape(plan.spec.block_tokens)
        random = np.random.default_rng(0)
        self._blocks = [random.integers(0, 1 << 16, shape, dtype=np.uint16) for _ in range(plan.batch)]
        self._tokens = [plan.tokens(chain, plan.batch) for chain in range(plan.num_rounds * plan.chains_per_round)]
        self._wait(self._is_ready)

    @contextlib.contextmanager
    def writes(self, number: int) -> Iterator[Callable[[], None]]:
        """Changes state. Nothing of it may be dropped, and the daemon keeps to its half of the file."""
        yield lambda: self._write(number)
        self._wait(lambda: bool(self._status()["disk"]["idle"]))
        status = self._status()
        assert not status["stats"]["writes_dropped"], status["stats"]["writes_dropped"]
        assert status["disk"]["extents_unassigned"] >= self._plan.half_extents

    @contextlib.contextmanager
    def reads(self, number: int) -> Iterator[Callable[[], None]]:
        """Changes state. All comes from the SSD, and it is what was written."""
        loaded_before = self._status()["stats"]["blocks_loaded"]
        yield lambda: self._read(number)
        assert self._status()["stats"]["blocks_loaded"] == loaded_before + self._plan.slots_per_round
        self._verify(self._plan.chains(number)[-1])

    @contextlib.contextmanager
    def borrowed(self, count: int) -> Iterator[list[memoryview]]:
        """Changes state. Payloads of so many slots of the daemon's memory, to write to."""
        with self._cache.reserve(self._plan.tokens(len(self._tokens), count)) as reservation:
            memory = [block.array.reshape(-1).view(np.uint8).data for block in reservation.blocks()]
            assert len(memory) == count, f"{len(memory)} of {count} slots could be borrowed"
            yield memory
            memory.clear()  # a view that lives keeps the slot, whoever has it

    def _write(self, number: int) -> None:
        due = self._status()["stats"]["blocks_written"] + self._plan.slots_per_round
        for chain in self._plan.chains(number):
            self._put(chain)
        self._wait(lambda: bool(self._status()["stats"]["blocks_written"] >= due))

    def _read(self, number: int) -> None:
        asked: deque[kvstore.Hit] = deque()
        for chain in self._plan.chains(number):
            asked.append(self._cache.acquire(self._tokens[chain], wait=False))
            if len(asked) == REQUESTS:
                self._take(asked.popleft())
        for hit in asked:
            self._take(hit)

    def _take(self, hit: kvstore.Hit) -> None:
        with hit:
            loaded = hit.wait(DEADLINE_MS)
        assert loaded == len(self._tokens[0]), f"{loaded} tokens of a chain were loaded"

    def _put(self, chain: int) -> None:
        with self._cache.reserve(self._tokens[chain]) as reservation:
            for index, block in enumerate(reservation.blocks()):
                block.write(self._block(chain, index).view(self._plan.spec.numpy_dtype))
            stored = reservation.commit()
        assert stored, f"chain {chain} found no room"

    def _verify(self, chain: int) -> None:
        with self._cache.acquire(self._tokens[chain]) as hit:
            for index, block in enumerate(hit.blocks()):
                assert np.array_equal(block.array.view(np.uint16), self._block(chain, index)), f"chain {chain}: damaged"
            assert hit.verified_tokens == len(self._tokens[chain])

    def _block(self, chain: int, index: int) -> npt.NDArray[np.uint16]:
        """Query. The block's bytes: one of `batch` patterns, marked with its place. Valid until the next call."""
        block = self._blocks[index]
        block.view(np.uint32).reshape(-1)[0] = chain * self._plan.batch + index
        return block

    def _is_ready(self) -> bool:
        memory, disk = self._status()["memory"], self._status()["disk"]
        all_there: bool = memory["extents_ready"] == memory["extents"] and disk["ready"]
        return all_there and disk["extents_unassigned"] >= self._plan.half_extents

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] | None = self._client.status()["daemon"]
        assert status is not None, "the daemon is gone"
        return status

    def _wait(self, until: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + WAIT_S_MAX
        while not until():
            if time.monotonic() > give_up_at:
                raise DaemonFailed(f"the SSD tier does not come along: {self._status()}")
            time.sleep(POLL_S)


class Raw:
    """The raw side: threads and system calls."""

    def __init__(self, path: Path, plan: Plan, stored: Stored) -> None:
        """Changes state. OSError where the file system has no O_DIRECT."""
        self._plan, self._stored = plan, stored
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        self._header = mmap.mmap(-1, HEADER_NBYTES)

    def fill(self) -> None:
        """Changes state. Write all places for blocks once: the first write of a place is another, slower thing."""
        with mmap.mmap(-1, FILL_NBYTES) as piece:
            piece[:] = np.random.default_rng(1).bytes(len(piece))
            for at in range(DATA_OFFSET, DATA_OFFSET + self._plan.capacity_nbytes, len(piece)):
                os.pwritev(self._fd, [piece], at)
        os.fdatasync(self._fd)

    @contextlib.contextmanager
    def writes(self, number: int) -> Iterator[Callable[[], None]]:
        """Changes state."""
        with self._stored.borrowed(self._plan.slots_per_round) as memory:
            yield lambda: self._write(number, memory)

    @contextlib.contextmanager
    def reads(self, number: int) -> Iterator[Callable[[], None]]:
        """Changes state."""
        with self._stored.borrowed(self._plan.slots_to_read_into) as memory:
            yield lambda: self._read(number, memory)

    def close(self) -> None:
        """Changes state."""
        os.close(self._fd)

    def _write(self, number: int, memory: list[memoryview]) -> None:
        places = [*zip(self._offsets(number), memory, strict=True)]
        size = max(1, SYNC_NBYTES // self._plan.slot_nbytes)
        for first in range(0, len(places), size):
            self._each(os.pwritev, places[first : first + size])
            os.fdatasync(self._fd)

    def _read(self, number: int, memory: list[memoryview]) -> None:
        self._each(os.preadv, [*zip(self._offsets(number), itertools.cycle(memory), strict=False)])

    def _offsets(self, number: int) -> list[int]:
        count = self._plan.slots_per_round
        return [self._plan.raw_offset(slot) for slot in range(number * count, (number + 1) * count)]

    def _each(
        self, call: Callable[[int, list[mmap.mmap | memoryview], int], int], places: list[tuple[int, memoryview]]
    ) -> None:
        """A slot between each (offset, memory), QUEUE_DEPTH of them at a time."""
        work, moved = iter(places), list[int]()

        def run() -> None:
            for offset, payload in work:
                moved.append(call(self._fd, [self._header, payload], offset))

        threads = [threading.Thread(target=run) for _ in range(QUEUE_DEPTH)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert moved == [self._plan.slot_nbytes] * len(places)


class Times(NamedTuple):
    """Seconds of each counted round."""

    stored: list[float]
    raw: list[float]


def measure(spec: kvstore.KVSpec, rounds: int, base: Path, round_nbytes: int = ROUND_NBYTES) -> dict[str, Any]:
    """Changes state: makes a folder in `base` for as long as it takes, and runs two daemons in turn."""
    plan = Plan(spec, WARM_UP + rounds, round_nbytes=round_nbytes)
    with folder_in(base) as folder:
        require_room(folder, plan.capacity_nbytes)
        with _opened(plan, folder, plan.write_memory_nbytes) as (stored, raw):
            raw.fill()
            writes = _by_turns(plan.num_rounds, stored.writes, raw.writes)
        with _opened(plan, folder, READ_MEMORY_NBYTES) as (stored, raw):
            reads = _by_turns(plan.num_rounds, stored.reads, raw.reads)
    nbytes = plan.slots_per_round * plan.slot_nbytes
    return _figures("read", reads, nbytes) | _figures("write", writes, nbytes)


def bars(results: dict[str, Any], at: str = "") -> list[Bar]:
    """Query. `at`: what precedes the names."""
    return [at_least(f"{at}{side}_ratio", results[f"{side}_ratio"], bar) for side, bar in BARS.items()]


@contextlib.contextmanager
def folder_in(base: Path) -> Iterator[Path]:
    """Gone afterwards, and `base` with it if it is empty then."""
    base.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=base) as folder:
            yield Path(folder)
    finally:
        with contextlib.suppress(OSError):
            base.rmdir()


def require_room(folder: Path, nbytes: int) -> None:
    """Query. SystemExit where the file system cannot hold so much."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise SystemExit(f"{folder} has room for {free >> 20} MiB, not for {nbytes >> 20}: name another --folder")


def disk_options(folder: Path, capacity_nbytes: int) -> tuple[str, ...]:
    """Query. Of `kvstore serve`: an SSD tier in `folder` that is not spared."""
    return (
        *("--disk.path", str(folder / SSD), "--disk.capacity", str(capacity_nbytes)),
        *("--disk.write_budget", "unlimited", "--memory.keep", "false", "--memory.session_share", "1"),
    )


@contextlib.contextmanager
def _opened(plan: Plan, folder: Path, memory_nbytes: int) -> Iterator[tuple[Stored, Raw]]:
    with (
        Daemon(str(memory_nbytes), *disk_options(folder, plan.capacity_nbytes)) as daemon,
        kvstore.connect(daemon.address, deadline_ms=DEADLINE_MS) as client,
    ):
        stored = Stored(client, plan)
        with contextlib.closing(Raw(folder / SSD / "slab", plan, stored)) as raw:
            yield stored, raw


def _by_turns(num_rounds: int, stored: Callable[[int], Round], raw: Callable[[int], Round]) -> Times:
    """Changes state. Rounds of both sides; which goes first changes."""
    times = Times([], [])
    for number in range(num_rounds):
        sides = [*zip((stored, raw), times, strict=True)]
        for prepared, seconds in sides if number % 2 else reversed(sides):
            with prepared(number) as run:
                began = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - began)
    return Times(times.stored[WARM_UP:], times.raw[WARM_UP:])


def _figures(verb: str, times: Times, nbytes: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, seconds in ((f"disk_raw_{verb}", times.raw), (f"disk_{verb}", times.stored)):
        rate = spread(nbytes / each / 1e9 for each in seconds)
        found[f"{name}_gbps"] = round(rate.median, 3)
        found[f"{name}_gbps_range"] = [round(rate.low, 3), round(rate.high, 3)]
    ratio = spread(ratios(times.raw, times.stored))
    found[f"disk_{verb}_ratio"] = round(ratio.median, 3)
    found[f"disk_{verb}_ratio_range"] = [round(ratio.low, 3), round(ratio.high, 3)]
    return found
