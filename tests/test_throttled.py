"""The slowed drive of the benchmarks: one rate for all, changed at any moment, and every byte is counted once."""

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from benchmarks import throttled
from benchmarks.daemon import Daemon
from benchmarks.disk_rate import disk_options
from kvstore.core.layout import PAGE_NBYTES

MIB = 1 << 20
SPEC = kvstore.KVSpec(model="slow", dtype="uint8", num_layers=1, num_kv_heads=16, head_dim=512, block_tokens=64)


class Time:
    """A clock that moves only while somebody sleeps, and rates that hold from given moments on."""

    def __init__(self, rates: dict[float, float | None]) -> None:
        self.now_s = 0.0
        self._rates = rates

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def rate(self) -> float | None:
        return [rate for since, rate in self._rates.items() if since <= self.now_s][-1]

    def turns(self) -> throttled.Turns:
        return throttled.Turns(self.rate, lambda: self.now_s, self.sleep)


@pytest.mark.parametrize(
    ("rates", "took_s"),
    [
        ({0.0: 100.0}, 10.0),
        ({0.0: None}, 0.0),
        ({0.0: 100.0, 4.0: 300.0}, 6.0),  # 400 bytes, then 600
        ({0.0: 1.0, 3.0: None}, 3.0),
        ({0.0: 1e9}, 0.0),
    ],
)
def test_bytes_take_as_long_as_the_rate_of_each_moment_says(rates: dict[float, float | None], took_s: float) -> None:
    clock = Time(rates)
    clock.turns().take(1000)
    assert clock.now_s == pytest.approx(took_s, abs=2 * throttled.NAP_S_MAX)


def test_those_who_come_later_wait_for_those_before() -> None:
    clock = Time({0.0: 100.0})
    turns = clock.turns()
    for _ in range(3):
        turns.take(100)
    assert clock.now_s == pytest.approx(3.0)


@pytest.mark.parametrize(("text", "rate"), [("", None), ("\n", None), ("5e6\n", 5e6), ("12", 12.0)])
def test_the_file_says_the_rate(tmp_path: Path, text: str, rate: float | None) -> None:
    (tmp_path / "rate").write_text(text)
    assert throttled.rate_of(tmp_path / "rate") == rate


def test_without_a_file_nothing_is_slowed(tmp_path: Path) -> None:
    assert throttled.rate_of(tmp_path / "rate") is None


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan"])
def test_what_is_no_rate_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rate").write_text(text)
    with pytest.raises(ValueError, match=r"no rate|could not convert"):
        throttled.rate_of(tmp_path / "rate")


def test_what_is_set_is_read(tmp_path: Path) -> None:
    for rate in (5e7, None, 1.5):
        throttled.set_rate(tmp_path / "rate", rate)
        assert throttled.rate_of(tmp_path / "rate") == rate


def test_every_access_takes_its_turn_once(tmp_path: Path) -> None:
    taken: list[int] = []

    class Noted(throttled.Turns):
        def take(self, nbytes: int) -> None:
            taken.append(nbytes)

    kind = throttled.throttled(Noted(lambda: None))
    with closing(kind.open([tmp_path / "ssd"], 16 * MIB)) as disk, mmap.mmap(-1, MIB) as memory:
        disk.allocate_extent(0)
        disk.set_class(0, MIB)
        with memoryview(memory) as whole, whole[:PAGE_NBYTES] as head:
            disk.write(0, MIB, whole)
            disk.read(0, MIB, whole)
            disk.read_head(0, MIB, head)
    assert taken == [MIB, MIB, PAGE_NBYTES]


@pytest.fixture
def rate_file(tmp_path: Path) -> Path:
    return tmp_path / "rate"


@pytest.fixture
def client(tmp_path: Path, rate_file: Path) -> Iterator[kvstore.Client]:
    options = disk_options(tmp_path, 64 * MIB)
    with (
        Daemon("16MiB", *options, command=throttled.command(rate_file)) as daemon,
        kvstore.connect(daemon.address, deadline_ms=10_000) as opened,
    ):
        yield opened


def test_a_real_daemon_reads_as_slowly_as_the_file_says(client: kvstore.Client, rate_file: Path) -> None:
    cache, tokens = client.attach(SPEC), np.arange(2 * SPEC.block_tokens, dtype=np.uint32)
    _wait_for(client, lambda disk: bool(disk["extents_unassigned"]))
    with cache.reserve(tokens) as reservation:
        for block in reservation.blocks():
            block.write(np.full(SPEC.array_shape(SPEC.block_tokens), 7, np.uint8))
        assert reservation.commit()
    _wait_for(client, lambda disk: disk["blocks"] == 2 and disk["idle"])
    fast_s = _load_s(cache, tokens)
    throttled.set_rate(rate_file, 4 * SPEC.slot_nbytes)
    slow_s = _load_s(cache, tokens)
    throttled.set_rate(rate_file, None)
    assert slow_s >= 0.5 > max(fast_s, _load_s(cache, tokens))


def _load_s(cache: kvstore.Cache, tokens: npt.NDArray[np.uint32]) -> float:
    """Of two blocks that are on the SSD only: asking for all of memory evicts them."""
    cache.reserve(np.arange(1000, 1000 + 64 * SPEC.block_tokens, dtype=np.uint32)).abort()
    began = time.monotonic()
    with cache.acquire(tokens) as hit:
        assert hit.wait() == len(tokens)
    return time.monotonic() - began


def _wait_for(client: kvstore.Client, until: Callable[[dict[str, Any]], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not ((disk := client.status()["daemon"]["disk"])["ready"] and until(disk)):
        assert time.monotonic() < give_up_at, disk
        time.sleep(0.01)
