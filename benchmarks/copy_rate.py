"""Bytes per second into and out of the store against plain memcpy, to and from its SSD against plain system calls.

Memory, from another process than the daemon:

    put = reserve + block.write of every block + commit      get = acquire + copy into the client's own array + release

`round_trip_us` is what a bare ZeroMQ echo between two processes takes after such a copy, `copy_sum_gbps` a bare loop of
XXH3-64 and memcpy. A `_ratio_limit` is what these and bare round trips (two for put, one for get) would give together:
where it lies below a bar, the bar cannot be met on that machine.

Every round does memcpy, put with checksums, put without, and get in turn, on the same blocks; ratios are taken round by
round. The blocks of consecutive rounds are different ones, more than a last-level cache holds, because KV that moves
was not used a millisecond ago. Each side runs on one thread. Bytes are compared after the last round.

SSD: benchmarks.disk_rate says how. Its figures begin with `disk_`.
"""

import argparse
import contextlib
import math
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

import kvstore
from benchmarks import disk_rate
from benchmarks.daemon import Daemon, DaemonFailed, terminated_like_interrupted
from benchmarks.report import Bar, at_least, finish, parser, ratios, spread
from transports.errors import PeerLost
from transports.zeromq import ZmqEndpoint, ZmqListener

BATCH = 32
POOL_NBYTES = 512 << 20  # source arrays, and as many targets: several times a last-level cache
ALIGN_NBYTES = 64
SIDES = ("memcpy", "put", "put_nosum", "get", "copy_sum", "round_trip")
BARS = {"put": 0.75, "put_nosum": 0.85, "get": 0.85}
Blocks = list[npt.NDArray[Any]]
Results = dict[str, Any]
_random = np.random.default_rng(0)


def spec_of(block_kib: int) -> kvstore.KVSpec:
    """Query. float16 KV of 8 heads: 2 MiB a block with 16 layers of 64 tokens; 736 KiB with 23 of 16."""
    layers, tokens = {2048: (16, 64), 736: (23, 16)}[block_kib]
    spec = kvstore.KVSpec(
        model="copy-rate", dtype="float16", num_layers=layers, num_kv_heads=8, head_dim=64, block_tokens=tokens
    )
    assert spec.block_nbytes == block_kib << 10
    return spec


class Rounds:
    """Runs the sides in turn over a pool of blocks, and keeps their times."""

    def __init__(self, summed: kvstore.Cache, unsummed: kvstore.Cache, echo: "Echo", batch: int) -> None:
        self._summed, self._unsummed, self._echo, self._batch = summed, unsummed, echo, batch
        spec = summed.spec
        self._spec = spec
        shape = spec.array_shape(spec.block_tokens)
        count = max(batch, POOL_NBYTES // spec.block_nbytes // batch * batch)
        self._sources, self._copies, self._targets = (_pool(count, shape, spec.numpy_dtype) for _ in range(3))
        for source in self._sources:
            source.view(np.uint16)[...] = _random.integers(0, 1 << 16, shape, dtype=np.uint16)
        self.seconds: dict[str, list[float]] = {side: [] for side in SIDES}

    def run(self, rounds: int, warm_up: int) -> None:
        """Changes state."""
        for number in range(warm_up + rounds):
            times = self._round(number)
            for cache in (self._summed, self._unsummed):
                cache.clear()
            if number >= warm_up:
                for side, seconds in times.items():
                    self.seconds[side].append(seconds)

    def _round(self, number: int) -> dict[str, float]:
        at = number * self._batch % len(self._sources)
        pools = (self._sources, self._copies, self._targets)
        sources, copies, targets = (pool[at : at + self._batch] for pool in pools)
        for target in targets:
            target.view(np.uint16)[...] = 0  # so that a copy which did not happen shows
        tokens = np.arange(self._batch * self._spec.block_tokens, dtype=np.uint32) + 1_000_000 * number
        times = {
            "memcpy": _timed(lambda: _copy(sources, copies)),
            "round_trip": _timed(self._echo.ask),
            "put": _timed(lambda: _put(self._summed, tokens, sources)),
            "put_nosum": _timed(lambda: _put(self._unsummed, tokens, sources)),
            "get": _timed(lambda: _get(self._summed, tokens, targets)),
            "copy_sum": _timed(lambda: _copy_sum(sources, copies)),
        }
        self._verify(number, sources, targets)
        return times

    def figures(self) -> dict[str, Any]:
        """Query. GB/s of each side, and its ratio to memcpy of the same round, as medians with their spread."""
        nbytes = self._batch * self._spec.block_nbytes
        found: dict[str, Any] = {}
        for side in SIDES[:-1]:
            rate = spread(nbytes / seconds / 1e9 for seconds in self.seconds[side])
            found[f"{side}_gbps"] = round(rate.median, 3)
            found[f"{side}_gbps_range"] = [round(rate.low, 3), round(rate.high, 3)]
        found["round_trip_us"] = round(1e6 * spread(self.seconds["round_trip"]).median, 1)
        for side in BARS:
            ratio = spread(ratios(self.seconds["memcpy"], self.seconds[side]))
            found[f"{side}_ratio"] = round(ratio.median, 3)
            found[f"{side}_ratio_range"] = [round(ratio.low, 3), round(ratio.high, 3)]
            found[f"{side}_ratio_limit"] = round(spread(ratios(self.seconds["memcpy"], self._floor(side))).median, 3)
        return found

    def _floor(self, side: str) -> list[float]:
        """Query. What the copying and bare round trips take together: nothing that asks over ZeroMQ is faster."""
        trips = 1 if side == "get" else 2
        copies = self.seconds["copy_sum" if side == "put" else "memcpy"]
        return [copy + trips * trip for copy, trip in zip(copies, self.seconds["round_trip"], strict=True)]

    def _verify(self, number: int, sources: Blocks, targets: Blocks) -> None:
        for source, target in zip(sources, targets, strict=True):
            if not np.array_equal(source.view(np.uint16), target.view(np.uint16)):
                raise AssertionError(f"round {number}: the bytes that came back are not the bytes that were stored")


def _pool(count: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Blocks:
    """Touched arrays on 64-byte boundaries, as torch and CUDA allocate them; numpy's own start 16 bytes past one, which
    halves the speed of a copy from a page-aligned source on some processors (docs/measurements.md)."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.ones(count * nbytes + ALIGN_NBYTES, np.uint8)
    first = -memory.ctypes.data % ALIGN_NBYTES
    return list(memory[first : first + count * nbytes].view(dtype).reshape(count, *shape))


def _timed(work: Callable[[], None]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def _copy(sources: Blocks, targets: Blocks) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


def _put(cache: kvstore.Cache, tokens: npt.NDArray[np.uint32], sources: Blocks) -> None:
    with cache.reserve(tokens) as reservation:
        for block, source in zip(reservation.blocks(), sources, strict=True):
            block.write(source)
        stored = reservation.commit()
    assert stored


def _get(cache: kvstore.Cache, tokens: npt.NDArray[np.uint32], targets: Blocks) -> None:
    with cache.acquire(tokens) as hit:
        for block, target in zip(hit.blocks(), targets, strict=True):
            np.copyto(target, block.array)


def _copy_sum(sources: Blocks, targets: Blocks) -> None:
    for source, target in zip(sources, targets, strict=True):
        xxhash.xxh3_64_intdigest(source.data)
        np.copyto(target, source)


class Echo:
    """Another process that sends back what it gets, over the sockets that the daemon and its clients use."""

    def __init__(self, folder: str) -> None:
        address = f"ipc://{folder}/echo.sock"
        self._process = subprocess.Popen([sys.executable, "-m", "benchmarks.copy_rate", "--echo", address])
        self._endpoint = ZmqEndpoint(address)
        give_up_at = time.monotonic() + 30
        while not self._connected():
            assert time.monotonic() < give_up_at, "the echo process did not come up"
            time.sleep(0.05)

    def _connected(self) -> bool:
        try:
            self.ask()
        except PeerLost:
            return False
        return True

    def ask(self) -> None:
        self._endpoint.send(b"x" * 100)
        assert self._endpoint.receive(10_000)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._endpoint.close()


def serve_echo(address: str) -> None:
    """Changes state. Until it is killed."""
    listener = ZmqListener(address)
    poll = select.poll()
    poll.register(listener.fd, select.POLLIN)
    while True:
        poll.poll()
        while (incoming := listener.receive()) is not None:
            listener.send(incoming.peer, incoming.frame)


def measure(rounds: int) -> Results:
    """Changes state: runs two daemons.

    2 MiB figures lie flat, 736 KiB ones under `kib736`, batches of one under `batch1` of each.
    """
    results: Results = {}
    with (
        Daemon("1GiB") as summed,
        Daemon("1GiB", "--memory.checksums", "false") as unsummed,
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Echo(folder)) as echo,
    ):
        clients = [kvstore.connect(daemon.address, deadline_ms=5000) for daemon in (summed, unsummed)]
        _wait_ready(clients)
        for block_kib, place in ((2048, results), (736, results.setdefault("kib736", {}))):
            caches = [client.attach(spec_of(block_kib)) for client in clients]
            for batch, figures in ((BATCH, place), (1, place.setdefault("batch1", {}))):
                runs = Rounds(caches[0], caches[1], echo, batch)
                runs.run(rounds, warm_up=rounds // 4 + 1)
                figures.update(runs.figures())
        for client in clients:
            client.close()
    return results


def _wait_ready(clients: list[kvstore.Client]) -> None:
    """A slab is usable at once, but this measures the steady state: all its memory is there and mapped."""
    for client in clients:
        while (memory := client.status()["daemon"]["memory"])["extents_ready"] < memory["extents"]:
            time.sleep(0.1)
    time.sleep(1.0)


def add_disk(results: Results, rounds: int, base: Path) -> None:
    """Changes state: runs daemons, and adds their figures where those of the same block size are."""
    for block_kib, place in ((2048, results), (736, results["kib736"])):
        place.update(disk_rate.measure(spec_of(block_kib), rounds, base))


def bars(results: Results) -> list[Bar]:
    """Query. The bars hold for batches of 32, for both block sizes."""
    found = []
    for at, figures in (("", results), ("kib736.", results["kib736"])):
        found += [at_least(f"{at}{side}_ratio", figures[f"{side}_ratio"], bar) for side, bar in BARS.items()]
        found += disk_rate.bars(figures, at)
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=40, help="counted rounds for each size and batch")
    options.add_argument("--disk-rounds", type=int, default=5, help="of 1 GiB, for each size (%(default)s)")
    options.add_argument("--folder", type=Path, default=Path(".bench"), help="on the SSD to use (%(default)s)")
    options.add_argument("--echo", metavar="ADDRESS", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.echo:
        serve_echo(given.echo)
    with terminated_like_interrupted():
        results = measure(given.rounds)
        add_disk(results, given.disk_rounds, given.folder)
    return finish("copy_rate", results, bars(results), as_json=given.json)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DaemonFailed, kvstore.KVStoreError) as failure:
        sys.exit(f"copy_rate: {failure}")
    except KeyboardInterrupt:
        sys.exit("copy_rate: interrupted")
