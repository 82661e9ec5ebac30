"""Capacity: failures that users of such systems reported, each replayed in miniature.

docs/failures.md says which report each test stands for.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import KVSpec
from kvstore.media.slabfile import DATA_OFFSET
from radix.eviction.lru import LRU
from tests.daemons import SPEC, Daemon, assert_balanced, chat, embedded, read, store, wait_until
from tests.test_ssd_edges import config_of, daemon_of, get, opened, put

MIB = 1 << 20
LARGE = KVSpec(model="megabyte", dtype="uint8", num_layers=32, num_kv_heads=1, head_dim=1020, block_tokens=16)
assert LARGE.slot_nbytes == MIB


def du(folder: Path) -> int:
    """Query. Bytes that the files of a tier take, all of them."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def facts_of(client: kvstore.Client) -> dict[str, Any]:
    found: dict[str, Any] = daemon_of(client)["disk"]
    return found


def settled(client: kvstore.Client) -> dict[str, Any]:
    wait_until(lambda: facts_of(client)["idle"] and not facts_of(client)["queued_nbytes"])
    return facts_of(client)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder on a tmpfs: 640 MiB take seconds on a drive that others use."""
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_ten_times_the_limit_with_restarts_never_takes_more_than_the_limit(in_memory: Path) -> None:
    """DSK: 64 MiB, 640 MiB written in ten lives. Beside blocks lie the tables (4 MiB, sparse or not) and the index."""
    config, capacity, used = config_of(in_memory, memory="128MiB", capacity="64MiB"), 64 * MIB, 0
    ones = np.ones(LARGE.array_shape(16), np.uint8)
    for life in range(10):
        with opened(config) as (client, _):
            cache = client.attach(LARGE)
            assert facts_of(client)["cached_nbytes"] == used, "a restart counts what is there, and no less"
            for number in range(4):
                with cache.reserve(chat(100 * life + number, 256)) as reservation:
                    for block in reservation.blocks():
                        block.write(ones)
                    assert reservation.commit()
                facts = settled(client) if number % 2 else facts_of(client)
                assert facts["cached_nbytes"] <= facts["capacity_nbytes"] == capacity
                assert du(in_memory) <= capacity + DATA_OFFSET + MIB
            used = facts["cached_nbytes"]
            assert used > capacity // 2, "it is used, too"
    assert facts["bytes_written_ever"] >= 600 * MIB
    assert (in_memory / "slab").stat().st_blocks * 512 <= capacity + DATA_OFFSET + 65536  # the file system's own


@pytest.mark.parametrize("options", [{}, {"write": "back"}, {"write_budget": "unlimited"}], ids=str)
def test_with_defaults_alone_both_tiers_stay_within_their_limits(tmp_path: Path, options: dict[str, str]) -> None:
    """DSK: nothing is set but what must be; three times both capacities are stored, and old blocks make room."""
    config = {"memory": {"capacity": "4MiB"}, "disk": {"path": str(tmp_path), "capacity": "16MiB", **options}}
    with opened(config) as (client, cache):
        for number in range(600):
            put(cache, number)
            if number % 16 == 0 and options.get("write") != "back":  # which holds back by design
                wait_until(lambda: facts_of(client)["queued_nbytes"] < MIB)
        facts, memory = facts_of(client), daemon_of(client)["memory"]
        assert memory["cached_nbytes"] + memory["reserved_nbytes"] <= memory["capacity_nbytes"] == 4 * MIB
        assert memory["blocks_evicted"] > 0
        assert facts["cached_nbytes"] <= facts["capacity_nbytes"] == 16 * MIB
        assert du(tmp_path) <= 16 * MIB + DATA_OFFSET + MIB
        assert get(cache, 599) == 64, "the newest are there"
        assert_balanced(daemon_of(client))


def test_what_the_ssd_holds_after_a_restart_is_what_it_held_before(tmp_path: Path) -> None:
    """DSK, RST: in blocks, in bytes, and in what the files take."""
    with opened(config_of(tmp_path)) as (client, cache):
        for number in range(40):
            assert put(cache, number)
            if number % 10 == 9:
                facts = settled(client)
        before = facts["blocks"], facts["cached_nbytes"], facts["bytes_written_ever"]
        wait_until(lambda: du(tmp_path) >= 16 * MIB)
        taken = du(tmp_path)
    with opened(config_of(tmp_path)) as (client, cache):
        facts = facts_of(client)
        assert (facts["blocks"], facts["cached_nbytes"], facts["bytes_written_ever"]) == before
        assert facts["cached_nbytes"] == 160 * 20480
        assert abs(du(tmp_path) - taken) < MIB // 4
        assert [get(cache, number) for number in range(40)] == [64] * 40


# --- a policy that fails

POLICY_FAILS = """
import os, sys
from kvstore.cli import main
from radix.eviction.lru import LRU
flag, victim = sys.argv.pop(1), LRU.victim
def fails_once(self):
    if os.path.exists(flag):
        os.unlink(flag)
        raise ValueError("not enough values to unpack")
    return victim(self)
LRU.victim = fails_once
main()
"""


def test_an_eviction_policy_that_raises_once_is_loud_and_eviction_goes_on() -> None:
    """DSK, HNG, RST: no thread dies in silence while the tier stays full. The daemon ends with a trace, engines see
    misses meanwhile, and the daemon that is started next goes on with the blocks and evicts them.
    """
    with Daemon(capacity="4MiB") as daemon:
        flag = daemon.folder / "flag"
        command = [sys.executable, "-c", POLICY_FAILS, str(flag)]
        daemon.terminate()
        daemon.start(command)
        with daemon.connect(500) as client:
            cache = client.attach(SPEC)
            for number in range(8):
                assert store(cache, chat(number, 1024))
            assert daemon_of(client)["memory"]["blocks_evicted"] > 0
            flag.touch()
            with cache.reserve(chat(50, 1024)) as reservation:
                assert reservation.num_blocks == 0, "a miss for the engine"
            assert daemon.process.wait(10) != 0
            assert "ValueError: not enough values to unpack" in daemon.log
            assert read(cache, chat(7, 1024)) == 0
            daemon.start(command)
            wait_until(lambda: client.status()["available"])
            wait_until(lambda: not daemon_of(client)["memory"]["sessions_unaccounted"])
            assert daemon_of(client)["memory"]["blocks_taken_over"] > 0
            for number in range(100, 120):
                assert store(cache, chat(number, 1024))
                assert read(cache, chat(number, 1024)) == 1024
            facts = daemon_of(client)
            assert facts["memory"]["blocks_evicted"] > 20 * 64 - 341
            assert_balanced(facts)


def test_a_store_in_this_process_that_failed_goes_on_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """DSK, COR: a bug of ours shows in the call that met it; a state left half-way serves nobody after that."""
    real, fails = LRU.victim, [False]

    def victim(lru: LRU) -> Any:
        if fails[0]:
            raise ValueError("not enough values to unpack")
        return real(lru)

    monkeypatch.setattr(LRU, "victim", victim)
    with embedded("4MiB") as client:
        cache = client.attach(SPEC)
        for number in range(8):
            assert store(cache, chat(number, 1024))
        fails[0] = True
        with pytest.raises(ValueError, match="not enough values"):
            cache.reserve(chat(50, 1024))
        fails[0] = False
        assert read(cache, chat(7, 1024)) == cache.match(chat(7, 1024)) == 0
        assert cache.reserve(chat(51, 1024)).num_blocks == 0
        assert not client.status()["available"]
