"""Requests that hang: failures that users of such systems reported, each replayed in miniature.

docs/failures.md says which report each test stands for. Bounds are the client's deadline and what a busy machine adds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import kvstore
from kvstore import Client, KVSpec
from kvstore.media.disk import Disk
from kvstore.service import daemon as daemon_module
from tests.daemons import (
    SPEC,
    Daemon,
    Other,
    assert_balanced,
    chat,
    holds,
    kv_of,
    read,
    store,
    verified,
    wait_until,
)
from tests.test_ssd_edges import config_of, daemon_of, get, opened, put, tokens_of

NOTHING = (0, 0, 0)
DEADLINE_MS = 200.0
SLACK_MS = 250.0  # two cores, shared with other tests
PATIENT_MS = 2000.0  # of a client of a real daemon: what hangs here would hang for ever


@contextmanager
def within(ms: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took_ms = 1000 * (time.monotonic() - began)
    assert took_ms < ms, f"{took_ms:.0f} ms"


# --- a daemon, and what must not stop its loop

STUCK = """
import time
from kvstore.cli import main
from kvstore.media.disk import Disk
Disk.write = lambda *_: time.sleep(1000)
main()
"""


def test_a_call_that_never_returns_holds_up_no_answer(tmp_path: Path) -> None:
    """HNG: all threads that write to the SSD are stuck in the system; every request is answered all the same."""
    flags = ["--disk.path", str(tmp_path), "--disk.capacity", "16MiB"]
    with Daemon(*flags) as daemon:
        daemon.terminate()
        daemon.start([sys.executable, "-c", STUCK])
        with daemon.connect(PATIENT_MS) as client:
            cache = client.attach(SPEC)
            wait_until(lambda: (client.status()["daemon"]["disk"] or {}).get("extents_unassigned"))
            for number in range(30):
                with within(PATIENT_MS):
                    assert store(cache, chat(number))
                with within(PATIENT_MS):
                    assert read(cache, chat(number)) == 64
            assert daemon_of(client)["disk"]["queued_nbytes"] > 0, "the writers are stuck"
            assert client.status()["client"]["deadlines_missed"] == 0


def test_a_client_that_holds_its_interpreter_for_ever_holds_up_nobody(daemon: Daemon) -> None:
    """HNG, LEK: no thread of that process can run, its keeper neither; what it holds goes when it is killed."""
    snippet = """
import ctypes
store(cache, chat(1)); hit = cache.acquire(chat(1)); reservation = cache.reserve(chat(2))
say('holding')
ctypes.PyDLL(None).sleep(1000)
"""
    with Other(daemon, snippet) as other, daemon.connect(PATIENT_MS) as client:
        assert other.hear() == "holding"
        cache = client.attach(SPEC)
        for number in range(100, 150):
            with within(PATIENT_MS):
                store(cache, chat(number))
        assert read(cache, chat(1)) == 64
        assert holds(daemon.status())[:2] == (1, 1)
        other.kill()
        wait_until(lambda: holds(daemon.status()) == NOTHING, seconds=1.0)


BUSY = """
import kvstore.service.daemon as daemon
from kvstore.cli import main
daemon.MESSAGES_MS_MAX = 0.0  # as if every message took so long that completions have their turn next
main()
"""


def test_what_is_queued_behind_a_busy_turn_does_not_wait_for_the_next_event() -> None:
    """HNG: a turn ends with messages left over, and the turn after that has completions to run as well. The transport
    has said that there are messages, and will not say it again; a second would pass before the loop looks by itself.
    """
    with Daemon() as daemon:
        daemon.terminate()
        daemon.start([sys.executable, "-c", BUSY])
        with daemon.wait_ready().connect(PATIENT_MS) as client:
            cache = client.attach(SPEC)
            assert store(cache, chat(1))
            began = time.monotonic()
            for _ in range(5):
                hits = [cache.acquire(chat(1), wait=False) for _ in range(50)]
                assert [hit.wait(10_000) for hit in hits] == [64] * 50
            assert time.monotonic() - began < 2.0
            assert client.status()["client"]["deadlines_missed"] == 0


JUMPING = """
import os, sys
from pathlib import Path
from kvstore.cli import main
from kvstore.clock import MonotonicClock
hours, now_ms = sys.argv.pop(1), MonotonicClock.now_ms
MonotonicClock.now_ms = lambda self: now_ms(self) + 3.6e6 * os.stat(hours).st_size
main()
"""


class Jumping(Daemon):
    """A daemon for which hours pass when it is told so."""

    @property
    def hours(self) -> Path:
        return self.folder / "hours"

    def start(self, command: list[str] | None = None) -> None:
        self.hours.touch()
        super().start(command or [sys.executable, "-c", JUMPING, str(self.hours)])

    def jump(self, hours: int = 1) -> None:
        """Changes state."""
        with self.hours.open("ab") as file:
            file.write(b"." * hours)
        self.status()  # a turn of its loop, with all that has become due


def test_who_was_idle_for_days_is_served_at_once() -> None:
    """HNG, TTL: no grace, no reaper: the session is the same, and so is all that it holds."""
    with Jumping() as daemon, daemon.wait_ready().connect(PATIENT_MS) as client:
        cache = client.attach(SPEC)
        assert store(cache, chat(1))
        hit, reservation, session = cache.acquire(chat(1)), cache.reserve(chat(2)), client.status()["client"]["session"]
        array = next(hit.blocks()).array
        for _ in range(3):
            daemon.jump(24)
            with within(PATIENT_MS):
                assert read(cache, chat(1)) == 64
            wait_until(lambda: holds(daemon.status())[:2] == (1, 1), what="that read has ended, nothing else")
        facts = client.status()
        assert facts["daemon"]["uptime_s"] > 3 * 86400
        assert (facts["client"]["session"], facts["client"]["reconnects"]) == (session, 0)
        assert holds(facts["daemon"])[:2] == (1, 1)
        for block in reservation.blocks():
            block.write(kv_of(SPEC, chat(2), block.start, 16))
        assert reservation.commit()
        assert read(cache, chat(2)) == 64
        assert np.array_equal(array, kv_of(SPEC, chat(1), 0, 16))


def test_an_hour_between_any_two_steps_changes_no_byte_of_a_holder() -> None:
    """TTL, COR: of a lease, of an array whose lease has ended, of a slot that is being filled; others fill the slab."""
    with Jumping(capacity="4MiB") as daemon, daemon.wait_ready().connect(2000) as client:
        cache = client.attach(SPEC)
        garbage, numbers = np.full(SPEC.array_shape(16), -1.0, np.float32), iter(range(1000, 100_000))

        def hour() -> None:
            """All that nobody holds is replaced before and after."""
            for _ in range(2):
                for _ in range(5):
                    with cache.reserve(chat(next(numbers), 1024)) as reservation:
                        for block in reservation.blocks():
                            block.write(garbage)
                        reservation.commit()
                daemon.jump()

        reservation = cache.reserve(chat(1))
        blocks = list(reservation.blocks())
        for block in blocks:
            hour()
            block.array[...] = kv_of(SPEC, chat(1), block.start, 16)
        hour()
        for block in blocks:
            assert np.array_equal(block.array, kv_of(SPEC, chat(1), block.start, 16))
        assert reservation.commit()
        hit = cache.acquire(chat(1))
        assert hit.num_tokens == 64
        hour()
        assert hit.wait() == verified(hit, chat(1)) == 64
        arrays = [block.array for block in hit.blocks()]
        hit.release()
        hour()
        assert [np.array_equal(array, kv_of(SPEC, chat(1), 16 * at, 16)) for at, array in enumerate(arrays)] == [
            True
        ] * 4
        assert daemon_of(client)["memory"]["blocks_evicted"] > 0
        del arrays, blocks, block, reservation
        wait_until(lambda: holds(daemon_of(client)) == NOTHING)
        hour()
        assert cache.match(chat(1)) == 0, "the twin: who holds nothing loses it"


# --- odd arrays


def test_117_kinds_of_arrays_are_answered_at_once(daemon: Daemon) -> None:
    """HNG: ranks and widths mixed, some of them impossible; an answer or one clear error within a second each."""
    with daemon.connect(PATIENT_MS) as client:
        served = 0
        for number in range(117):
            head = {"model": f"m{number}", "dtype": ("float16", "float32", "int8")[number % 3], "block_tokens": 16}
            body: dict[str, Any] = (
                {"num_layers": 1 + number % 5, "num_kv_heads": 1 + number % 4, "head_dim": 8},
                {"num_layers": 2, "latent_dim": 1 + number},
                {"num_layers": 2, "layout": f"own {number}", "token_nbytes": 1 + number, "grain_tokens": 4},
                {"num_layers": number % 2, "num_kv_heads": 2, "head_dim": 0},
                {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "latent_dim": 4},
            )[number % 5]
            with within(1000):
                try:
                    cache = client.attach(KVSpec(**head, **body))
                except kvstore.SpecMismatch:
                    continue
                assert store(cache, chat(1, 40))
                assert read(cache, chat(1, 40)) == 40
                served += 1
        assert served == 71
        assert client.status()["client"]["deadlines_missed"] == 0


# --- full pools

MEGABYTE = KVSpec(model="megabyte", dtype="uint8", num_layers=32, num_kv_heads=1, head_dim=1020, block_tokens=16)
HALF = KVSpec(model="half", dtype="uint8", num_layers=16, num_kv_heads=1, head_dim=1016, block_tokens=16)
assert (4 << 20) // MEGABYTE.slot_nbytes == 4
assert (4 << 20) // HALF.slot_nbytes == 8


def pool(session_share: float = 1.0) -> Client:
    return kvstore.open({"memory": {"capacity": "4MiB", "session_share": session_share}})


def fill(cache: kvstore.Cache, tokens: list[int]) -> bool:
    with cache.reserve(tokens) as reservation:
        for block in reservation.blocks():
            block.write(
                np.ones(cache.spec.array_shape(block.num_tokens), np.uint8)
            )  # summed: else a mover would pin it
        return reservation.commit()


def test_eight_senders_for_four_slots_all_come_to_an_end() -> None:
    """HNG: who finds no room is told so at once, and nobody retries for anybody."""
    with pool() as client:
        cache = client.attach(MEGABYTE)

        def send(sender: int) -> int:
            sent = 0
            for turn in range(10):
                with within(DEADLINE_MS + SLACK_MS):
                    reservation = cache.reserve(chat(100 * sender + turn, 16))
                with reservation:
                    time.sleep(0.005)
                    for block in reservation.blocks():
                        block.array[...] = sender
                    with within(DEADLINE_MS + SLACK_MS):
                        sent += reservation.commit()
            return sent

        with ThreadPoolExecutor(8) as threads:
            sent = list(threads.map(send, range(8)))
        facts = daemon_of(client)
        assert sum(sent) >= 10, "four at a time"
        assert facts["stats"]["reservations_refused"] > 0, "eight at a time do not fit"
        assert holds(facts) == NOTHING
        assert_balanced(facts)


def test_room_that_only_has_to_be_evicted_is_given_at_once() -> None:
    """HNG: 8 slots, 1 free, 6 evictable, 1 in use; 4 are wanted, and one question gives them."""
    with pool() as client:
        cache = client.attach(HALF)
        assert all(fill(cache, chat(number, 16)) for number in range(7))
        hit = cache.acquire(chat(0, 16))
        counts = daemon_of(client)["memory"]["slots"][str(HALF.slot_nbytes)]
        assert (counts["free"], counts["cached"], daemon_of(client)["memory"]["extents_unassigned"]) == (1, 7, 0)
        with within(DEADLINE_MS + SLACK_MS), cache.reserve(chat(50, 64)) as reservation:
            assert reservation.num_blocks == 4
            for block in reservation.blocks():
                block.array[...] = 2
            assert reservation.commit()
        assert daemon_of(client)["stats"]["reservations_refused"] == 0
        assert daemon_of(client)["memory"]["blocks_evicted"] == 3
        assert hit.wait() == 16


# --- loads


class Silent(Disk):
    """A medium whose `lost`-th read fails, or never comes back while `gate` is shut."""

    gate: ClassVar[threading.Event] = threading.Event()
    fails: ClassVar[bool] = False
    left: ClassVar[int] = -1  # reads before the one that is lost

    def read(self, slot: int, slot_nbytes: int, into: memoryview) -> None:
        Silent.left -= 1
        if Silent.left == -1:
            if self.fails:
                raise kvstore.TierUnavailable("disk.path=here: Input/output error (EIO)")
            assert self.gate.wait(20)
        super().read(slot, slot_nbytes, into)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Silent]]:
    monkeypatch.setattr(daemon_module, "Disk", Silent)
    for name, value in (("gate", threading.Event()), ("fails", False), ("left", -1)):
        monkeypatch.setattr(Silent, name, value)
    yield Silent
    Silent.gate.set()


def on_ssd_only(folder: Path) -> None:
    with opened(config_of(folder)) as (client, cache):
        assert put(cache, 7)
        wait_until(lambda: daemon_of(client)["disk"]["blocks"] == 4)


WAYS: dict[str, Callable[[kvstore.Cache], int]] = {
    "wait": lambda cache: cache.acquire(tokens_of(7)).wait(),
    "blocks": lambda cache: sum(block.num_tokens for block in cache.acquire(tokens_of(7)).blocks()),
    "engine": lambda cache: polled(cache.acquire(tokens_of(7), wait=False)),
}


def polled(hit: kvstore.Hit) -> int:
    """Changes state. As a scheduler does that never waits: it asks, and does something else meanwhile."""
    until = time.monotonic() + 1
    while not hit.ready() and time.monotonic() < until:
        time.sleep(0.001)
    return hit.wait(0.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lost", range(4))
def test_a_load_that_fails_with_no_other_traffic_is_told(
    tmp_path: Path, silent: type[Silent], way: str, lost: int
) -> None:
    """HNG: nothing else wakes whoever waits; the failure itself does, long before any deadline."""
    on_ssd_only(tmp_path)
    with opened(config_of(tmp_path)) as (_, cache):
        silent.fails, silent.left = True, lost
        with within(DEADLINE_MS + SLACK_MS):
            assert WAYS[way](cache) in (0, 16, 32, 48)
        silent.fails = False
        assert put(cache, 7)
        assert get(cache, 7) == 64, "healed"


def test_one_block_of_many_that_never_comes_costs_one_deadline(tmp_path: Path, silent: type[Silent]) -> None:
    """HNG: what came before it counts; what the hole is in the middle of does not; the daemon is not accused."""
    on_ssd_only(tmp_path)
    with opened(config_of(tmp_path)) as (client, cache):
        silent.left = 2
        began = time.monotonic()
        with cache.acquire(tokens_of(7)) as hit:
            assert hit.num_tokens == 64
            assert hit.wait() < 64
        assert 1000 * (time.monotonic() - began) < DEADLINE_MS + SLACK_MS
        with within(2 * DEADLINE_MS + SLACK_MS):
            assert put(cache, 8)
            assert get(cache, 8) == 64
        assert client.status()["client"]["deadlines_missed"] == 0
        silent.gate.set()
        wait_until(lambda: get(cache, 7) == 64, what="late bytes are bytes")
        wait_until(lambda: holds(daemon_of(client)) == NOTHING)
