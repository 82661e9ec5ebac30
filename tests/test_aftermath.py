"""Odd endings, and what comes after them: a lost lock, a smaller daemon, variables that are gone, a client closed while
its daemon is silent. Whoever goes on is served on, and nothing is held for nobody.
"""

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvstore import Client, KVSpec
from kvstore.service.link import Link
from tests.daemons import SPEC, Daemon, Other, chat, embedded, holds, kv_of, read, store, verified, wait_until

NOTHING = (0, 0, 0)

QUICK = """
from pathlib import Path
import kvstore.service.daemon as daemon
from kvstore.cli import main
Path("/proc/self/comm").write_text("kvstore")
daemon.SWEEP_MS, daemon.CONFIRM_MS = 20.0, 200.0
main()
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One that looks for lost sessions all the time."""
    with ExitStack() as undo:
        daemon = Daemon()
        undo.push(daemon)
        daemon.start([sys.executable, "-c", QUICK])
        yield daemon.wait_ready()


def held(daemon: Daemon, session: int) -> tuple[int, int] | None:
    """Query. (leases, reservations) of one session; None once it has ended."""
    found = [each for each in daemon.status()["sessions"] if each["id"] == session]
    return (found[0]["leases"], found[0]["reservations"]) if found else None


# A record lock is gone

LOSE_THE_LOCK = """
mine = 10 * os.getpid()
tokens, others = chat(mine), chat(mine + 1)
store(cache, tokens)
hit = cache.acquire(tokens)
array = next(hit.blocks()).array
reservation = cache.reserve(others)
session = client._link.session
os.close(os.open(session.welcome.sessions_path, os.O_RDWR))
say(session.id); hear()
assert np.array_equal(array, kv_of(SPEC, tokens, 0, 16))
for block in reservation.blocks():
    block.write(kv_of(SPEC, others, block.start, 16))
assert reservation.commit()
assert read(cache, others) == 64
assert client._link.session is session
say('used'); hear()
"""


def test_a_process_that_lost_its_lock_keeps_what_it_holds(daemon: Daemon) -> None:
    """COR: it lives and may be reading; closing any descriptor of the file is enough to lose it."""
    with Other(daemon, LOSE_THE_LOCK) as other:
        session = int(other.hear())
        time.sleep(0.4)  # beyond the time by which a session must have its lock, and many sweeps
        assert held(daemon, session) == (1, 1)
        other.say("go on")
        assert other.hear() == "used"
        assert held(daemon, session) == (1, 0)
        other.kill()
        wait_until(lambda: held(daemon, session) is None, seconds=1.0)


def test_a_session_without_lock_and_holdings_ends_and_the_client_goes_on(daemon: Daemon) -> None:
    """LEK, RST: it gets another one by itself."""
    snippet = """
hit.release()
del array
say('released'); hear()
while not (cached := read(cache, tokens)):
    time.sleep(0.002)
assert client.status()["client"]["reconnects"] == 1
assert client._link.session is not session
say(cached); hear()
"""
    with Other(daemon, LOSE_THE_LOCK + snippet) as other:
        session = int(other.hear())
        for answer in ("used", "released"):
            other.say("go on")
            assert other.hear() == answer
        wait_until(lambda: held(daemon, session) is None, seconds=2.0)
        other.say("go on")
        assert other.hear() == "64"


# The next daemon is smaller


def test_a_spec_that_fits_no_more_is_a_miss_for_itself_alone() -> None:
    """RST, LEK: the client's other specs are served, in one session; after the next restart it fits again."""
    large = KVSpec(model="large", dtype="float32", num_layers=16, num_kv_heads=8, head_dim=128, block_tokens=32)
    with Daemon(capacity="64MiB") as daemon, daemon.connect(deadline_ms=500) as client:
        first, second = client.attach(large), client.attach(SPEC)
        assert store(first, chat(1, 32))
        assert store(second, chat(1))
        restart(daemon, client, "16MiB")
        for number in range(1, 10):
            assert store(second, chat(number))
            assert read(second, chat(number)) == 64
            assert read(first, chat(1, 32)) == 0
            assert first.match(chat(1, 32)) == 0
            assert first.reserve(chat(1, 32)).num_blocks == 0
            first.clear()
            first.report(ttft_ms=1.0)
        facts = client.status()
        assert [each["id"] for each in facts["daemon"]["sessions"]] == [facts["client"]["session"]]
        assert facts["client"]["reconnects"] == 1
        restart(daemon, client, "64MiB")
        assert store(first, chat(1, 32))
        assert read(first, chat(1, 32)) == 32
        assert store(second, chat(1))
        assert holds(client.status()["daemon"]) == NOTHING
        assert len(client.status()["daemon"]["sessions"]) == 1


def restart(daemon: Daemon, client: Client, capacity: str) -> None:
    """Changes state. SIGKILL, and another one in its place that the client has found."""
    daemon.kill()
    assert not client.status()["available"]
    daemon.flags[-1] = capacity
    daemon.start()
    wait_until(lambda: client.status()["available"])


# Variables that are gone


@pytest.mark.parametrize("connect", [lambda daemon: daemon.connect(), lambda _: embedded()], ids=["daemon", "embedded"])
def test_a_reservation_outlives_the_variables_of_its_client(
    daemon: Daemon, connect: Callable[[Daemon], Client]
) -> None:
    """LEK: and the session ends with it."""
    client = connect(daemon)
    link, gone = client._link, weakref.ref(client)
    reservation = client.attach(SPEC).reserve(chat(10))
    del client
    gc.collect()
    assert gone() is not None
    for block in reservation.blocks():
        block.write(kv_of(SPEC, chat(10), block.start, block.num_tokens))
    assert reservation.commit()
    del reservation, block
    assert gone() is None
    wait_until(lambda: link._gone)
    wait_until(lambda: held(daemon, link.session.id) is None)


def test_a_hit_outlives_the_variables_of_its_client(daemon: Daemon) -> None:
    """LEK."""
    client = daemon.connect()
    session = client._link.session.id
    store(client.attach(SPEC), chat(11))
    hit = client.attach(SPEC).acquire(chat(11), wait=False)
    del client
    gc.collect()
    assert hit.wait() == verified(hit, chat(11)) == 64
    assert held(daemon, session) == (1, 0)
    del hit
    wait_until(lambda: held(daemon, session) is None)


# Closed while nobody answers


def test_a_keeper_with_nothing_to_do_but_wait_for_arrays_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """PRF: closed, the breaker open, arrays alive."""
    turns = []
    tend = Link._tend
    with Daemon() as daemon:
        client = daemon.connect(deadline_ms=100)
        cache = client.attach(SPEC)
        store(cache, chat(1))
        with cache.acquire(chat(1)) as hit:
            array = next(hit.blocks()).array
        daemon.kill()
        assert cache.match(chat(1)) == 0
        client.close()
        monkeypatch.setattr(Link, "_tend", lambda link: turns.append(link is client._link) or tend(link))
        time.sleep(0.5)
        assert sum(turns) < 10
        assert np.array_equal(array, kv_of(SPEC, chat(1), 0, 16))
        del array
        wait_until(lambda: client._link._gone, seconds=1.0)


@pytest.mark.parametrize("late", ["release", "answer", "reservation"])
def test_a_client_closed_during_a_stall_leaves_nothing(daemon: Daemon, late: str) -> None:
    """LEK: its process lives, so that nothing but a goodbye ends what the daemon holds for it."""
    client = daemon.connect(deadline_ms=50)
    cache, session = client.attach(SPEC), client._link.session.id
    store(cache, chat(20))
    hit = cache.acquire(chat(20))
    if late != "release":
        hit.release()
    with daemon.stopped():
        ask = cache.reserve if late == "reservation" else cache.acquire
        given = ask(chat(21 if late == "reservation" else 20))
        assert not getattr(given, "num_blocks", 0)
        assert not getattr(given, "num_tokens", 0)
        hit.release()
        client.close()
        wait_until(lambda: client._link._gone)
    wait_until(lambda: held(daemon, session) is None, seconds=2.0, what="the daemon ends the session")


def test_a_child_that_runs_all_its_finalisers_disturbs_nobody(daemon: Daemon) -> None:
    """LEK, COR: at the end of an interpreter, and by a collection."""
    snippet = """
mine = 10 * os.getpid()
store(cache, chat(mine))
hit = cache.acquire(chat(mine))
array = next(hit.blocks()).array
reservation = cache.reserve(chat(mine + 1))
later = cache.acquire(chat(mine), wait=False)
child = os.fork()
if not child:
    del array, hit, reservation, later, cache, client
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
say(client._link.session.id); hear()
assert verified(hit, chat(mine)) == later.wait() == 64
assert np.array_equal(array, kv_of(SPEC, chat(mine), 0, 16))
say('fine'); hear()
"""
    with Other(daemon, snippet) as other:
        session = int(other.hear())
        time.sleep(0.1)
        assert held(daemon, session) == (2, 1)
        other.say("go on")
        assert other.hear() == "fine"
