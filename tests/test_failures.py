"""Performance and trust: failures that users of such systems reported, each replayed in miniature.

docs/failures.md says which report each test stands for; the other classes have files of their own, test_failures_*.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from kvstore import Cache, Client
from kvstore.media.disk import Disk
from kvstore.service import daemon as daemon_module
from tests.daemons import SPEC, Daemon, chat, read, store, wait_until
from tests.test_lower import Node, ids
from tests.test_ssd_edges import config_of, daemon_of, opened, put, tokens_of


class Leisurely(Disk):
    """A medium that takes 10 ms for each read, however many there are."""

    def read(self, slot: int, slot_nbytes: int, into: memoryview) -> None:
        time.sleep(0.01)
        super().read(slot, slot_nbytes, into)


def test_loads_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PRF: two prompts of four blocks each, 10 ms a block; one after the other that would be 80 ms."""
    monkeypatch.setattr(daemon_module, "Disk", Leisurely)
    took_ms = []
    with opened(config_of(tmp_path)) as (client, cache):
        assert put(cache, 1)
        assert put(cache, 2)
        wait_until(lambda: daemon_of(client)["disk"]["blocks"] == 8)
    for _ in range(3):
        with opened(config_of(tmp_path)) as (_, cache):
            began = time.monotonic()
            hits = [cache.acquire(tokens_of(number)) for number in (1, 2)]
            assert [hit.wait() for hit in hits] == [64, 64]
            took_ms.append(1000 * (time.monotonic() - began))
            for hit in hits:
                hit.release()
    assert min(took_ms) < 60


def test_a_full_tier_makes_room_for_all_that_waits_and_not_for_one_chain_after_another() -> None:
    """PRF: 16 chains of one block, on an SSD whose every slot holds something colder. Each group waits for its rows to
    be durable, so what counts is how many groups it takes: one to make room, one to write.
    """
    node = Node(memory_extents=8, disk_extents=4)
    for first in range(8):
        node.put(ids(first, 4))
        node.run()
    assert node.counts()[1] == 32
    for first in range(100, 116):
        node.put(ids(first, 1))
    num_groups = 0
    while not node.lower.writes.is_idle:
        node.store.on_time(node.store.now_ms + 100)
        node.ask()
        while node.groups:
            node.write_one()
            num_groups += 1
        assert num_groups < 100
    assert num_groups <= 3
    assert node.store.stats.writes_dropped == {}
    assert node.store.stats.blocks_written == 32 + 16
    assert node.lower.tier.num_evicted < 32, "no more than that"


def test_nobody_is_called_in_the_network(daemon: Daemon) -> None:
    """SEC: no telemetry, no probe, no name resolution: neither side has a socket that could leave the machine."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        before = {each.fd for each in psutil.Process().net_connections("inet")}
        assert store(cache, chat(1))
        assert read(cache, chat(1)) == 64
        assert psutil.Process(daemon.process.pid).net_connections("inet") == []
        assert psutil.Process(daemon.process.pid).net_connections("unix")
        assert {each.fd for each in psutil.Process().net_connections("inet")} == before


def test_a_preempted_request_finds_what_it_had_computed(client: Client, cache: Cache) -> None:
    """PRF: its KV was saved as it went, generated tokens too; when it is resumed, only the last token is computed."""
    tokens = chat(1, 90)
    for computed in (30, 31, 48, 90):  # the prompt, and what was generated until it lost its pages
        assert store(cache, tokens[:computed])
        with cache.acquire(tokens[: computed - 1], request_id=f"resumed at {computed}") as hit:
            assert hit.wait() == computed - 1
    assert daemon_of(client)["stats"]["misses"] == 0
