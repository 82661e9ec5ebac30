"""The SSD tier at its edges, with a real store on real files: killed at any moment, full, limited, failing."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import random
import resource
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.media.check import verify
from kvstore.media.disk import Disk
from kvstore.service import daemon as daemon_module
from tests.daemons import KVSTORE, wait_until

SPEC = kvstore.KVSpec(model="edges", dtype="float16", num_layers=2, num_kv_heads=2, head_dim=64, block_tokens=16)
BLOCKS = 4
KILLS = 100


def tokens_of(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 16 * BLOCKS))


def kv_of(number: int, start: int) -> Any:
    """Derived from the chain, so that wrong bytes show."""
    shape = SPEC.array_shape(16)
    return np.random.default_rng([number, start]).integers(0, 1 << 16, shape, dtype=np.uint16).view(np.float16)


def config_of(folder: Path, memory: str = "4MiB", **disk: Any) -> dict[str, Any]:
    facts = {"path": str(folder), "capacity": "16MiB", "write_budget": "unlimited"}
    return {"memory": {"capacity": memory, "session_share": 1.0}, "disk": facts | disk}


@contextlib.contextmanager
def opened(config: dict[str, Any]) -> Iterator[tuple[kvstore.Client, kvstore.Cache]]:
    with kvstore.open(config) as client:
        wait_until(lambda: daemon_of(client)["disk"]["ready"])
        wait_until(lambda: has_room(daemon_of(client)["disk"]))
        yield client, client.attach(SPEC)


def has_room(disk: dict[str, Any]) -> bool:
    return bool(disk["extents_unassigned"] or disk["blocks"] or disk["failures"])


def daemon_of(client: kvstore.Client) -> dict[str, Any]:
    facts: dict[str, Any] = client.status()["daemon"]
    return facts


def put(cache: kvstore.Cache, number: int) -> bool:
    with cache.reserve(tokens_of(number)) as reservation:
        for block in reservation.blocks():
            block.write(kv_of(number, block.start))
        return reservation.commit()


def get(cache: kvstore.Cache, number: int) -> int:
    """Tokens of a hit; its bytes are compared."""
    with cache.acquire(tokens_of(number)) as hit:
        for block in hit.blocks(5000):
            assert np.array_equal(block.array.view(np.uint16), kv_of(number, block.start).view(np.uint16)), number
        return hit.verified_tokens


def write_until_killed(folder: str, first: int, said: Connection) -> None:
    """In a child: says the number of each chain whose rows are committed."""
    with opened(config_of(Path(folder))) as (client, cache):
        said.send(-1)
        for number in range(first, first + 1000):
            before = daemon_of(client)["stats"]["blocks_written"]
            assert put(cache, number)
            while daemon_of(client)["stats"]["blocks_written"] < before + BLOCKS:
                time.sleep(0.001)
            said.send(number)


def test_killed_at_a_hundred_random_points_of_writing(tmp_path: Path) -> None:
    """RST, COR, DSK: no wrong byte, what was committed is found, and usage is what the files hold."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_ssd_edges"])
    rng, committed = random.Random(1), []
    for kill in range(KILLS):
        heard, said = context.Pipe(duplex=False)
        child = context.Process(target=write_until_killed, args=(str(tmp_path), 1000 * kill, said))
        child.start()
        said.close()
        assert heard.poll(20)
        until = time.monotonic() + rng.uniform(0, 0.2)
        while (left := until - time.monotonic()) > 0:
            if heard.poll(left):
                committed.append(heard.recv())
        child.kill()
        child.join()
        with contextlib.suppress(EOFError):
            while heard.poll():
                committed.append(heard.recv())
        heard.close()
        if kill % 20 == 19 or kill == KILLS - 1:
            check_what_is_there(tmp_path, [number for number in committed if number >= 0])
    assert sum(number >= 0 for number in committed) > KILLS / 4


def check_what_is_there(folder: Path, committed: list[int]) -> None:
    disk = Disk.open([folder], None)
    try:
        num_rows = len(disk.rows())
        report = verify(disk, lambda done, total: None, fix=False)
    finally:
        disk.close()
    assert not report.bad
    assert report.num_good == num_rows
    with opened(config_of(folder)) as (client, cache):
        facts = daemon_of(client)["disk"]
        assert facts["blocks"] == num_rows
        assert facts["cached_nbytes"] == num_rows * SPEC.slot_nbytes <= facts["capacity_nbytes"]
        fits = facts["capacity_nbytes"] // SPEC.slot_nbytes // BLOCKS
        for number in committed[-fits // 2 :]:  # older ones may have been evicted
            assert get(cache, number) == 16 * BLOCKS
        for number in committed[: -fits // 2]:
            assert get(cache, number) in range(16 * BLOCKS + 1)


def test_a_working_set_larger_than_memory_is_found_whole(tmp_path: Path) -> None:
    """DSK, RST: and again after a restart with empty memory."""
    with opened(config_of(tmp_path)) as (client, cache):
        numbers = range(70)  # memory holds 51
        for number in numbers:
            assert put(cache, number)
            if number % 10 == 9:
                wait_until(lambda: daemon_of(client)["disk"]["idle"])
        assert daemon_of(client)["memory"]["blocks_evicted"] > 0
        assert [get(cache, number) for number in numbers] == [64] * len(numbers)
    with opened(config_of(tmp_path)) as (client, cache):
        assert [get(cache, number) for number in numbers] == [64] * len(numbers)
        assert daemon_of(client)["stats"]["blocks_loaded"] >= 4 * len(numbers)


def test_three_times_the_capacity_is_never_above_it(tmp_path: Path) -> None:
    """DSK, L#1454: `du` counts."""
    with opened(config_of(tmp_path)) as (client, cache):
        for number in range(3 * (16 << 20) // (SPEC.slot_nbytes * BLOCKS)):
            assert put(cache, number)
            if number % 16 == 0:
                wait_until(lambda: daemon_of(client)["disk"]["queued_nbytes"] == 0)
        wait_until(lambda: daemon_of(client)["disk"]["idle"])
        facts = daemon_of(client)["disk"]
        assert facts["cached_nbytes"] <= facts["capacity_nbytes"] == 16 << 20
        assert facts["blocks_evicted"] > 0
        slab_nbytes = (tmp_path / "slab").stat().st_blocks * 512
        assert slab_nbytes <= facts["capacity_nbytes"] + (8 << 20)  # and its tables


class Failing(Disk):
    """A medium that fails by the flags of the test."""

    fails: frozenset[str] = frozenset()

    def _maybe(self, what: str) -> None:
        if what in self.fails:
            raise kvstore.TierUnavailable(f"disk.path=here: {os.strerror(errno.EIO)} (EIO)")

    def read(self, slot: int, slot_nbytes: int, into: memoryview) -> None:
        self._maybe("read")
        super().read(slot, slot_nbytes, into)

    def write(self, slot: int, slot_nbytes: int, data: memoryview) -> None:
        self._maybe("write")
        super().write(slot, slot_nbytes, data)

    def commit(self, *args: Any) -> None:
        self._maybe("commit")
        super().commit(*args)


@pytest.mark.parametrize("what", ["read", "write", "commit"])
def test_a_device_that_fails_costs_misses_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """DSK, COR: EIO is an expected result."""
    monkeypatch.setattr(daemon_module, "Disk", Failing)
    monkeypatch.setattr(Failing, "fails", frozenset())
    with opened(config_of(tmp_path)) as (client, cache):
        for number in range(60):  # memory holds 51
            assert put(cache, number)
            if number % 10 == 9:
                wait_until(lambda: daemon_of(client)["disk"]["idle"])
        monkeypatch.setattr(Failing, "fails", frozenset([what]))
        assert get(cache, 0) in ((0, 64) if what != "read" else (0,))
        assert put(cache, 100)
        wait_until(lambda: daemon_of(client)["disk"]["idle"])
        assert get(cache, 100) == 64
        assert daemon_of(client)["disk"]["failures"] >= 1
        monkeypatch.setattr(Failing, "fails", frozenset())
        assert put(cache, 101)
        assert get(cache, 101) == 64


def test_an_index_without_room_forgets_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DSK: LMDB's map is full."""

    class Cramped(Disk):
        @classmethod
        def open(cls, paths: Any, capacity_nbytes: int | None, *_: Any, **__: Any) -> Disk:
            return Disk.open(paths, capacity_nbytes, index_nbytes=64 << 10)

    monkeypatch.setattr(daemon_module, "Disk", Cramped)
    with opened(config_of(tmp_path)) as (client, cache):
        for number in range(120):
            put(cache, number)
            if daemon_of(client)["stats"]["groups_failed"]:
                break
            wait_until(lambda: daemon_of(client)["disk"]["idle"])
        assert daemon_of(client)["stats"]["groups_failed"] >= 1
        assert put(cache, 500)
        assert get(cache, 500) == 64


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 20, 12 << 20))


def test_a_limit_on_file_size_is_one_clear_line(tmp_path: Path) -> None:
    """DSK, L#4991: no SIGXFSZ, and no half-written block is served."""
    flags = ["--address", f"ipc://{tmp_path}/kv.sock", "--memory.capacity", "4MiB", "--memory.path", f"{tmp_path}/m"]
    flags += ["--memory.keep", "false", "--disk.path", f"{tmp_path}/d", "--disk.capacity", "16MiB"]
    ran = subprocess.run(
        [str(KVSTORE), "serve", *flags], preexec_fn=limited, capture_output=True, text=True, timeout=30, check=False
    )
    assert ran.returncode == 1
    assert "EFBIG" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_full_disk_is_one_line_and_memory_goes_on(tmp_path: Path) -> None:
    """DSK."""
    if os.geteuid():
        pytest.skip("mounting a small file system takes root")
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m,mode=0700", "tmpfs", str(place)], check=False
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with opened(config_of(place)) as (client, cache):
            for number in range(40):
                assert put(cache, number)
            wait_until(lambda: daemon_of(client)["disk"]["idle"])
            facts = daemon_of(client)["disk"]
            assert facts["cached_nbytes"] <= 12 << 20
            assert get(cache, 39) == 64
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_check_finds_what_was_damaged_and_fix_removes_it(tmp_path: Path) -> None:
    """COR, LMCache 0.5.6: a flipped byte on disk."""
    with opened(config_of(tmp_path)) as (client, cache):
        for number in range(5):
            assert put(cache, number)
        wait_until(lambda: daemon_of(client)["disk"]["blocks"] == 5 * BLOCKS)
    check = [str(KVSTORE), "check", "--disk.path", str(tmp_path), "--json"]
    assert json.loads(subprocess.run(check, capture_output=True, check=True).stdout)["num_good"] == 20
    payload = kv_of(3, 16).tobytes()
    slab = (tmp_path / "slab").read_bytes()
    with (tmp_path / "slab").open("r+b") as file:
        file.seek(slab.index(payload) + 100)
        file.write(b"\xff\x00\xff\x00")
    ran = subprocess.run(check, capture_output=True, check=False)
    assert ran.returncode == 1
    assert json.loads(ran.stdout)["bad"] == {"wrong checksum": 1}
    fixed = json.loads(subprocess.run([*check, "--fix"], capture_output=True, check=True).stdout)
    assert (fixed["num_removed"], fixed["num_behind"]) == (3, 2)
    with opened(config_of(tmp_path)) as (_, cache):
        assert [get(cache, number) for number in range(5)] == [64, 64, 64, 16, 64]
