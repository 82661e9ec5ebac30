"""Several threads, finalisers and signal handlers in one client: whatever meets whatever, nobody hangs, no answer is
lost and no slot is free while somebody still writes to it.
"""

import gc
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from kvstore import Client, Hit
from kvstore.config import config_from
from kvstore.service.embedded import EmbeddedEndpoint
from tests.daemons import SPEC, Daemon, assert_balanced, chat, embedded, holds, kv_of, read, store, wait_until
from transports import messages as wire

NOTHING = (0, 0, 0)
HANG_S = 30.0  # what is not done by then, on a machine as busy as may be, never will be
T = TypeVar("T")


def started(work: Callable[[], T]) -> Future[T]:
    """Changes state. `work` on a thread of its own: a hang fails the test that asks for its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def facts(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.status()["daemon"]
    return found


def held(client: Client) -> tuple[int, int]:
    """Query. (leases, reservations) of this client's session, by the daemon's word."""
    full = client.status()
    (own,) = [each for each in full["daemon"]["sessions"] if each["id"] == full["client"]["session"]]
    return own["leases"], own["reservations"]


# Finalisers


@pytest.fixture
def busy_collector() -> Iterator[None]:
    """Collects garbage at every allocation, but only what the test makes."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Cycle:
    """A hit that only the collector can end."""

    def __init__(self, hit: Hit) -> None:
        self.hit = hit
        self.itself = self

    def __del__(self) -> None:
        self.hit.release()


def test_hits_in_cycles_end_wherever_the_collector_finds_them(daemon: Daemon, busy_collector: None) -> None:
    """HNG, LEK: in any thread and under any lock, while others ask."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        assert store(cache, chat(1))
        is_over = threading.Event()

        def drop() -> None:
            for step in range(2000):
                Cycle(cache.acquire(chat(1), wait=bool(step % 2)))

        def ask() -> None:
            while not is_over.is_set():
                assert cache.match(chat(1)) == 64

        asking = started(ask)
        try:
            started(drop).result(HANG_S)
        finally:
            is_over.set()
        asking.result(HANG_S)
        gc.collect()
        wait_until(lambda: held(client) == (0, 0))
        assert client.status()["client"]["deadlines_missed"] == 0


@pytest.fixture
def at_each_line() -> Iterator[list[Callable[[], object]]]:
    """What stands in the list is called, the last first, between any two lines of threads that are started from now on,
    as a finaliser may be: in the midst of the standard library and under any lock."""
    calls: list[Callable[[], object]] = []

    def trace(_: object, event: str, __: object) -> Any:
        if calls and event == "line":
            calls.pop()()
        return trace

    threading.settrace(trace)
    yield calls
    threading.settrace(None)  # type: ignore[arg-type]


@pytest.mark.timeout(60)
def test_hits_may_end_at_any_line(daemon: Daemon, at_each_line: list[Callable[[], object]]) -> None:
    """HNG: of the keeper while it waits, and of a caller that has the lock."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(1))
        for ask in (lambda: cache.match(chat(1)), lambda: read(cache, chat(1)), lambda: 64):
            at_each_line.extend([hit.release for hit in [cache.acquire(chat(1)) for _ in range(300)]])
            while at_each_line:
                assert started(ask).result(HANG_S) == 64
        wait_until(lambda: held(client) == (0, 0))


# A copy in progress


@pytest.fixture
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(a copy has begun, it may end)."""
    begun, may_end, copy = threading.Event(), threading.Event(), np.copyto

    def slow(target: Any, source: Any) -> None:
        begun.set()
        assert may_end.wait(HANG_S)
        copy(target, source)

    monkeypatch.setattr(np, "copyto", slow)
    yield begun, may_end
    may_end.set()


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("contiguous", [True, False])
def test_an_abort_waits_for_a_write_in_progress(
    slow_copy: tuple[threading.Event, threading.Event], checksums: bool, contiguous: bool
) -> None:
    """COR: else the copy lands in the next owner's block."""
    begun, may_end = slow_copy
    source = kv_of(SPEC, chat(1), 0, 16)
    with embedded(checksums=checksums) as client:
        cache = client.attach(SPEC)
        reservation = cache.reserve(chat(1, 16))
        (block,) = reservation.blocks()
        writing = started(partial(block.write, source if contiguous else np.asfortranarray(source)))
        assert begun.wait(HANG_S)
        reservation.abort()
        assert holds(facts(client)) == (0, 1, SPEC.slot_nbytes)
        assert not writing.done()
        may_end.set()
        writing.result(HANG_S)
        wait_until(lambda: holds(facts(client)) == NOTHING)
        with pytest.raises(ValueError, match="has ended"):
            block.write(source)
        assert cache.match(chat(1, 16)) == 0
        assert_balanced(facts(client))


def test_a_commit_spares_the_slot_of_a_write_in_progress(slow_copy: tuple[threading.Event, threading.Event]) -> None:
    """COR: what is filled is cached; the rest is given back, when the copy has ended."""
    begun, may_end = slow_copy
    with embedded() as client:
        cache = client.attach(SPEC)
        reservation = cache.reserve(chat(1, 32))
        first, second = reservation.blocks()
        may_end.set()
        first.write(kv_of(SPEC, chat(1), 0, 16))
        begun.clear()
        may_end.clear()
        writing = started(lambda: second.write(kv_of(SPEC, chat(1), 16, 16)))
        assert begun.wait(HANG_S)
        assert reservation.commit()
        assert holds(facts(client)) == (1, 0, SPEC.slot_nbytes)
        may_end.set()
        writing.result(HANG_S)
        wait_until(lambda: holds(facts(client)) == NOTHING)
        assert read(cache, chat(1, 32)) == 16
        assert_balanced(facts(client))


# Pending hits


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """They take turns at every opportunity."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_two_threads_may_poll_one_hit(daemon: Daemon, hasty_threads: None) -> None:
    """COR: the one that comes second has the answer too, and all of it."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(1))

        def poll(hit: Hit, together: threading.Barrier) -> tuple[int, ...]:
            together.wait(HANG_S)
            while not hit.settled:  # at the latest by its deadline
                pass
            return hit.num_tokens, len(hit.offsets), hit.wait(), len(list(hit.blocks()))

        for _ in range(300):
            hit, together = cache.acquire(chat(1), wait=False), threading.Barrier(2)
            both = [started(partial(poll, hit, together)) for _ in range(2)]
            assert [each.result(HANG_S) for each in both] == [(64, 4, 64, 4)] * 2
            hit.release()
        wait_until(lambda: held(client) == (0, 0))


def test_each_thread_waits_for_a_hit_as_long_as_it_said(daemon: Daemon) -> None:
    """HNG: also where a more patient one waits already."""
    with daemon.connect(deadline_ms=400) as client:
        cache = client.attach(SPEC)
        with daemon.stopped():
            hit = cache.acquire(chat(1), wait=False)
            patient = started(hit.wait)
            wait_until(hit._busy.locked)
            began = time.monotonic()
            assert hit.wait(deadline_ms=50) == 0
            assert time.monotonic() - began < 0.2
            assert patient.result(HANG_S) == 0
        wait_until(lambda: client.status()["available"])
        wait_until(lambda: held(client) == (0, 0))


# A daemon that does not answer


def test_a_patient_thread_does_not_hold_up_the_others(daemon: Daemon) -> None:
    """HNG: theirs is the client's deadline, once; a report has none to lose."""
    with daemon.connect(deadline_ms=200) as client:
        cache = client.attach(SPEC)
        store(cache, chat(1))
        with daemon.stopped():
            patient = started(lambda: cache.acquire(chat(1), deadline_ms=2000))
            wait_until(lambda: client._link._exchange._replies, what="it has asked, and has the lock")
            took_ms = []
            for call in (lambda: cache.report(ttft_ms=1.0), *[lambda: cache.match(chat(1))] * 101, cache.report):
                began = time.perf_counter()
                assert not call()
                took_ms.append(1000 * (time.perf_counter() - began))
            assert took_ms[0] < 50
            assert 190 < took_ms[1] < 600
            assert statistics.median(took_ms[2:-1]) < 0.1
            assert took_ms[-1] < 50
            assert not patient.done()
        hit = patient.result(HANG_S)
        assert hit.wait() == 64, "the daemon is back before its deadline"
        hit.release()
        wait_until(lambda: client.status()["available"])
        assert read(cache, chat(1)) == 64
        wait_until(lambda: held(client) == (0, 0))


def test_a_client_closed_by_a_signal_in_its_own_request_goes_on(daemon: Daemon) -> None:
    """HNG: the handler runs on the thread that has the lock."""
    with daemon.connect(deadline_ms=200) as client:
        cache = client.attach(SPEC)
        store(cache, chat(1))
        took_ms = []

        def close(*_: object) -> None:
            began = time.monotonic()
            client.close()
            took_ms.append(1000 * (time.monotonic() - began))

        before = signal.signal(signal.SIGUSR1, close)
        try:
            with daemon.stopped():
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                began = time.monotonic()
                assert cache.match(chat(1)) == 0
                assert time.monotonic() - began < 0.7
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert len(took_ms) == 1
        assert took_ms[0] < 300
        assert cache.match(chat(1)) == 0
        wait_until(lambda: client._link._gone)


class Faltering:
    """An embedded store that takes its time for the first reservation and hears of no second."""

    LATE_MS = 120.0

    def __init__(self) -> None:
        self.num_reserves = 0
        self.is_deaf = True
        self._store = EmbeddedEndpoint(config_from({"memory": {"capacity": 16 << 20}}))

    def send(self, frame: bytes) -> None:
        self.num_reserves += isinstance(wire.decode(frame), wire.Reserve)
        if self.num_reserves < 2 or not self.is_deaf:
            self._store.send(frame)

    def receive(self, timeout_ms: float) -> bytes | None:
        frame = self._store.receive(timeout_ms)
        if frame is not None and isinstance(wire.decode(frame), wire.Reserved):
            time.sleep(self.LATE_MS / 1000)
        return frame

    def close(self) -> None:
        self._store.close()


def test_a_reservation_in_two_questions_has_one_deadline() -> None:
    """HNG: the second has what the first has left of it."""
    endpoint = Faltering()
    with Client(endpoint, deadline_ms=200) as client:
        cache = client.attach(SPEC)
        began = time.monotonic()
        reservation = cache.reserve(chat(1, 1 << 15))
        took_ms = 1000 * (time.monotonic() - began)
        assert endpoint.num_reserves == 2
        assert reservation.num_blocks == 0
        assert 190 < took_ms < 250
        endpoint.is_deaf = False
        wait_until(lambda: client.status()["available"])
        assert held(client) == (0, 0)
        assert_balanced(facts(client))


@pytest.mark.parametrize("deadline_ms", [float("nan"), float("inf"), 1e13, -1.0])
def test_a_pending_hit_ends_at_its_own_deadline_however_long_one_waits(daemon: Daemon, deadline_ms: float) -> None:
    """HNG: nobody holds the lock for ever."""
    with daemon.connect(deadline_ms=100) as client:
        cache = client.attach(SPEC)
        with daemon.stopped():
            hit = cache.acquire(chat(1), wait=False)
            assert started(lambda: hit.wait(deadline_ms)).result(0.5) == 0
        wait_until(lambda: client.status()["available"])
        wait_until(lambda: held(client) == (0, 0))
