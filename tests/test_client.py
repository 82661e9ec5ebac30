"""A client and its daemon as two processes of which either may die, stop or come back at any moment."""

import gc
import json
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import kvstore
from kvstore import Cache, Client, KVSpec
from kvstore.core.writes import Writes
from tests.daemons import (
    SPEC,
    Daemon,
    Other,
    assert_balanced,
    chat,
    embedded,
    holds,
    kv_of,
    read,
    store,
    verified,
    wait_until,
)
from transports import messages as wire
from transports.zeromq import ZmqListener

NOTHING = (0, 0, 0)


def heals(client: Client, cache: Cache) -> None:
    """Changes state. The client uses the daemon again, by itself."""
    wait_until(lambda: client.status()["available"], what="the client is back")
    assert store(cache, chat(900)) or cache.match(chat(900))
    assert read(cache, chat(900)) == 64


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# Death of a client

HOLD_ALL_KINDS = """
mine = 10 * os.getpid()
tokens = chat(mine)
store(cache, tokens)
hit = cache.acquire(tokens)
array = next(hit.blocks()).array
later = cache.acquire(tokens, wait=False)
reservation = cache.reserve(chat(mine + 1))
next(reservation.blocks()).array[...] = 1
kept = cache.reserve(chat(mine + 2))
block = next(kept.blocks())
view = block.array
view[...] = 2
kept.commit()
"""


def test_a_killed_client_leaves_nothing(daemon: Daemon) -> None:
    """LEK: L#1034, L#4980."""
    with Other(daemon, HOLD_ALL_KINDS + "later.wait(); say('holding'); hear()") as other:
        assert other.hear() == "holding"
        facts = daemon.status()
        assert holds(facts)[:2] == (3, 1)
        assert holds(facts)[2] >= 4 * SPEC.slot_nbytes
        died = facts["stats"]["sessions_died"]
        other.kill()
        wait_until(lambda: holds(daemon.status()) == NOTHING, seconds=1.0)
    facts = daemon.status()
    assert facts["sessions"] == []
    assert facts["stats"]["sessions_died"] == died + 1
    assert_balanced(facts)


def test_a_killed_client_whose_child_lives_on_leaves_nothing(daemon: Daemon) -> None:
    """LEK: the child has its parent's memory, sockets and descriptors."""
    snippet = """
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
say(child); hear()
"""
    with Other(daemon, HOLD_ALL_KINDS + snippet) as other:
        child = int(other.hear())
        assert holds(daemon.status())[1] == 1
        other.kill()
        wait_until(lambda: holds(daemon.status()) == NOTHING, seconds=1.0)
        assert psutil.pid_exists(child)
        os.kill(child, 9)
    assert daemon.status()["sessions"] == []


def test_a_client_that_ends_without_goodbye_leaves_nothing(daemon: Daemon) -> None:
    """LEK: whatever way a process ends."""
    for ending in ("sys.exit(0)", "raise RuntimeError('boom')", "os._exit(3)", "os.abort()"):
        with Other(daemon, HOLD_ALL_KINDS + f"sys.stderr = open(os.devnull, 'w'); say('holding')\n{ending}") as other:
            assert other.hear() == "holding"
            other.process.wait(20)
            wait_until(lambda: holds(daemon.status()) == NOTHING, seconds=1.0)


def test_the_blocks_of_a_dead_client_stay(daemon: Daemon) -> None:
    """RST: a restarted engine hits what the last one stored."""
    with Other(daemon, "store(cache, chat(50)); say('stored'); hear()") as other:
        assert other.hear() == "stored"
        other.kill()
    with daemon.connect() as client:
        assert read(client.attach(SPEC), chat(50)) == 64


# Forks


def test_a_forked_child_gets_misses_and_disturbs_nobody(daemon: Daemon) -> None:
    """LEK, COR: and the parent's hit stays valid, whatever the child does with its copies."""
    snippet = """
tokens = chat(60)
store(cache, tokens)
hit = cache.acquire(tokens)
parents = list(hit.blocks())
later = cache.acquire(tokens, wait=False)
reservation = cache.reserve(chat(61))
child = os.fork()
if not child:
    began = time.monotonic()
    with cache.acquire(tokens) as mine:
        assert mine.wait() == 0 and not list(mine.blocks())
    assert cache.match(tokens) == 0
    with cache.reserve(chat(62)) as mine:
        assert mine.num_blocks == 0 and mine.start == 64 and not mine.commit()
    assert not client.status()["available"]
    assert later.wait() == 0
    for touch in (lambda: next(reservation.blocks()).write(kv_of(SPEC, chat(61), 0, 16)), lambda: parents[0].array):
        try:
            touch()
            os._exit(2)
        except ValueError:
            pass
    assert not reservation.commit()
    cache.prefetch(tokens); cache.clear(); cache.report(ttft_ms=1.0)
    try:
        client.attach(BIG)
        os._exit(1)
    except kvstore.DaemonUnavailable:
        pass
    hit.release()
    reservation.abort()
    client.close()
    assert time.monotonic() - began < 1.0
    own = kvstore.connect(sys.argv[1])
    assert read(own.attach(SPEC), tokens) == 64
    own.close()
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert verified(hit, tokens) == 64
assert later.wait() == 64
for block in reservation.blocks():
    block.write(kv_of(SPEC, chat(61), block.start, 16))
assert reservation.commit()
assert read(cache, chat(61)) == 64
hit.release(); later.release()
say('fine'); hear()
"""
    with Other(daemon, snippet) as other:
        assert other.hear() == "fine"
        assert len(daemon.status()["sessions"]) == 1
        wait_until(lambda: holds(daemon.status()) == NOTHING)


def test_a_forked_child_of_an_embedded_store_gets_misses() -> None:
    """COR: its memory is shared, its index is a copy that knows nothing of the parent's evictions."""
    with embedded() as client:
        cache = client.attach(SPEC)
        assert store(cache, chat(1))
        child = os.fork()
        if not child:
            missed = read(cache, chat(1)) == 0 and not cache.reserve(chat(2)).num_blocks
            client.close()
            os._exit(7 if missed and not client.status()["available"] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert read(cache, chat(1)) == 64
        assert store(cache, chat(2))


# A daemon that does not answer


def test_a_stopped_daemon_costs_one_deadline_and_then_nothing(own_daemon: Daemon) -> None:
    """HNG: after the first missed deadline every call is a miss in microseconds, until the daemon answers again."""
    tokens = chat(1, 640)
    with own_daemon.connect(deadline_ms=150) as client:
        cache = client.attach(SPEC)
        assert store(cache, tokens)
        hit = cache.acquire(tokens)
        arrays = [block.array for block in hit.blocks()]
        reservation = cache.reserve(chat(2))
        with own_daemon.stopped():
            took_ms = []
            for _ in range(101):
                began = time.perf_counter()
                miss = cache.acquire(tokens)
                took_ms.append(1000 * (time.perf_counter() - began))
                assert miss.num_tokens == 0
            assert 140 < took_ms[0] < 400
            assert statistics.median(took_ms[1:]) < 0.02
            began = time.perf_counter()
            assert cache.match(tokens) == 0
            assert cache.reserve(tokens).num_blocks == 0
            assert cache.acquire(tokens, wait=False).settled
            assert not reservation.commit()
            assert not client.status()["available"]
            cache.prefetch(tokens)
            cache.clear()
            assert time.perf_counter() - began < 0.02
            assert client.status()["client"]["deadlines_missed"] == 1
        wait_until(lambda: client.status()["available"])
        assert client.status()["client"]["reconnects"] == 0, "the session went on"
        assert hit.wait() == verified(hit, tokens) == 640
        assert read(cache, tokens) == 640
        assert store(cache, chat(3))
        wait_until(lambda: holds(own_daemon.status())[:2] == (1, 0), what="what timed out left nothing behind")
        assert np.array_equal(arrays[39], kv_of(SPEC, tokens, 39 * 16, 16))
        del arrays
        hit.release()
        wait_until(lambda: holds(own_daemon.status()) == NOTHING)
        assert_balanced(own_daemon.status())


def test_a_stopped_daemon_costs_one_deadline_whoever_asks(own_daemon: Daemon) -> None:
    """HNG: threads that were already waiting pay theirs; a pending hit ends at its own deadline."""
    with own_daemon.connect(deadline_ms=150) as client:
        cache = client.attach(SPEC)
        assert store(cache, chat(1))
        with own_daemon.stopped():
            pending = cache.acquire(chat(1), wait=False)
            assert not pending.settled
            began = time.monotonic()
            threads = [threading.Thread(target=cache.match, args=(chat(1),)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert time.monotonic() - began < 0.4
            wait_until(partial(getattr, pending, "settled"), seconds=0.4)
            assert pending.wait() == 0
        heals(client, cache)
        wait_until(lambda: holds(own_daemon.status()) == NOTHING)


def test_a_deadline_of_its_own_bounds_one_call(own_daemon: Daemon) -> None:
    """HNG."""
    with own_daemon.connect(deadline_ms=5000) as client:
        cache = client.attach(SPEC)
        with own_daemon.stopped():
            began = time.monotonic()
            assert cache.acquire(chat(1), deadline_ms=50).num_tokens == 0
            assert time.monotonic() - began < 0.3
        heals(client, cache)


@pytest.mark.parametrize("deadline_ms", [float("inf"), 1e13, np.float32(2000), np.int64(2000), float("nan")])
def test_a_strange_deadline_of_the_client_is_bounded(daemon: Daemon, deadline_ms: float) -> None:
    """HNG."""
    with kvstore.connect(daemon.address, deadline_ms=deadline_ms) as client:
        json.dumps(client.status())
    with pytest.raises(kvstore.DaemonUnavailable):
        kvstore.connect("ipc:///tmp/nobody-listens-here.sock", deadline_ms=min(deadline_ms, 50.0))


@pytest.mark.parametrize("deadline_ms", [float("inf"), 1e13, np.float32(2000), 0, -1.0, float("nan")])
def test_a_strange_deadline_costs_nothing(daemon: Daemon, deadline_ms: float) -> None:
    """HNG, LEK: what is no time to wait for is none, what is beyond all bounds is patience."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(1))
        for wait in (True, False):
            with cache.acquire(chat(1), deadline_ms=deadline_ms, wait=wait) as hit:
                assert hit.wait(deadline_ms) in ({64} if deadline_ms > 1000 else {0, 64})
            heals(client, cache)
        wait_until(lambda: holds(daemon.status()) == NOTHING)


def test_an_answer_that_comes_too_late_is_given_back(own_daemon: Daemon) -> None:
    """LEK: the daemon reserves and leases for a client that has stopped waiting."""
    with own_daemon.connect(deadline_ms=100) as client:
        cache = client.attach(SPEC)
        assert store(cache, chat(1))
        for ask in (lambda: cache.acquire(chat(1)), lambda: cache.reserve(chat(2))):
            with own_daemon.stopped():
                assert not getattr(ask(), "num_tokens", 0)
            heals(client, cache)
            wait_until(lambda: holds(own_daemon.status()) == NOTHING)


def test_a_daemon_that_is_stopped_cannot_be_connected_to(own_daemon: Daemon) -> None:
    """HNG."""
    with own_daemon.stopped():
        before = num_fds()
        began = time.monotonic()
        with pytest.raises(kvstore.DaemonUnavailable, match="answer"):
            own_daemon.connect(deadline_ms=100)
        assert time.monotonic() - began < 3
        wait_until(lambda: num_fds() <= before)


# Death of the daemon


def test_a_killed_daemon_is_missed_once_and_used_again(own_daemon: Daemon) -> None:
    """RST: L#3206, L#4069. No new connect; what was held stays readable; what was reserved is lost."""
    tokens = chat(1)
    with own_daemon.connect(deadline_ms=150) as client:
        cache = client.attach(SPEC)
        other = client.attach(KVSpec(model="b", dtype="int8", num_layers=1, head_dim=64, block_tokens=32))
        assert store(cache, tokens)
        hit = cache.acquire(tokens)
        kept = [block.array for block in hit.blocks()]
        unread = cache.acquire(tokens)
        reservation = cache.reserve(chat(2))
        pending = cache.acquire(tokens, wait=False)
        own_daemon.kill()
        began = time.monotonic()
        assert read(cache, tokens) == 0
        assert read(cache, tokens) == 0
        assert cache.reserve(chat(3)).num_blocks == 0
        assert time.monotonic() - began < 0.4
        assert pending.wait() in (0, 64)
        assert unread.wait() == verified(unread, tokens) == 64, "the bytes are all there"

        own_daemon.start()
        own_daemon.wait_ready()
        wait_until(lambda: client.status()["available"])
        assert client.status()["client"]["reconnects"] == 1
        assert read(cache, tokens) == 64, "memory survives its daemon"
        assert store(other, tokens)
        assert read(other, tokens) == 64
        for block in reservation.blocks():
            block.write(kv_of(SPEC, chat(2), block.start, block.num_tokens))
        assert not reservation.commit()
        assert client.status()["available"], "a stale commit is not the new daemon's fault"
        assert cache.match(chat(2)) == 0
        for number, array in enumerate(kept):
            assert np.array_equal(array, kv_of(SPEC, tokens, 16 * number, 16))
        for each in (hit, unread, pending):
            each.release()
        del kept, array
        wait_until(lambda: holds(own_daemon.status()) == NOTHING)
        assert client.status()["client"]["reconnects"] == 1


def test_what_an_old_daemon_granted_touches_nobody_in_a_new_one(own_daemon: Daemon) -> None:
    """COR: ids are counted from the start again, so an old commit could seal another client's half-written block."""
    with own_daemon.connect(deadline_ms=150) as old:
        cache = old.attach(SPEC)
        assert store(cache, chat(1))
        stale_hit = cache.acquire(chat(1))
        stale = [cache.reserve(chat(number)) for number in range(2, 8)]
        for reservation in stale:
            for block in reservation.blocks():
                block.write(kv_of(SPEC, chat(2), block.start, block.num_tokens))
        own_daemon.kill()
        assert cache.match(chat(1)) == 0
        own_daemon.start()
        with Other(
            own_daemon,
            """
reservations = {number: cache.reserve(chat(number)) for number in range(20, 40)}
say(sum(reservation.num_blocks for reservation in reservations.values())); hear()
for number, reservation in reservations.items():
    for block in reservation.blocks():
        block.write(kv_of(SPEC, chat(number), block.start, 16))
say(sum(reservation.commit() for reservation in reservations.values())); hear()
""",
        ) as other:
            assert other.hear() == "80"
            wait_until(lambda: old.status()["available"])
            assert [reservation.commit() for reservation in stale] == [False] * 6
            stale_hit.hold.session.slab.write(stale_hit.offsets[0], bytes(200))
            assert stale_hit.wait() == 0
            stale_hit.release()
            old.status()
            facts = own_daemon.status()
            assert facts["stats"]["blocks_stored"] == 0
            assert not any(facts["stats"]["discards"].values())
            assert sum(each["reservations"] for each in facts["sessions"]) == 20
            other.say("go on")
            assert other.hear() == "20"
            for number in range(20, 40):
                assert read(cache, chat(number)) == 64


def test_many_clients_find_a_restarted_daemon(own_daemon: Daemon) -> None:
    """RST: each holds the byte of its old session; nobody is given a number that another process still holds."""
    snippet = """
while line := hear():
    while not (cached := read(cache, chat(int(line)))):
        store(cache, chat(int(line)))
        time.sleep(0.002)
    say(cached)
"""
    others = [Other(own_daemon, snippet) for _ in range(4)]
    try:
        for life in range(4):
            if life:
                own_daemon.kill()
                own_daemon.start()
                with own_daemon.connect(deadline_ms=500) as newcomer:
                    assert store(newcomer.attach(SPEC), chat(500 + life))
            for number, other in enumerate(others):
                other.say(f"{10 * life + number}")
            assert [other.hear() for other in others] == ["64"] * 4
        wait_until(lambda: len(own_daemon.status()["sessions"]) == 4)
    finally:
        for other in others:
            other.__exit__(None, None, None)
    wait_until(lambda: own_daemon.status()["sessions"] == [])


def test_a_pending_hit_does_not_accuse_the_next_daemon(own_daemon: Daemon) -> None:
    """RST: its answer died with the old one."""
    with own_daemon.connect(deadline_ms=3000) as client:
        cache = client.attach(SPEC)
        with own_daemon.stopped():
            pending = cache.acquire(chat(1), wait=False)
            own_daemon.kill()
        assert cache.acquire(chat(1), deadline_ms=1).num_tokens == 0
        own_daemon.start()
        wait_until(lambda: client.status()["available"])
        assert pending.settled
        assert pending.wait() == 0
        assert client.status()["available"]
        heals(client, cache)


@pytest.mark.parametrize("ended", ["terminate", "kill"])
def test_a_client_closes_in_peace_after_its_daemon(ended: str) -> None:
    """RST: also with hits, arrays and reservations in hand."""
    with Daemon() as daemon:
        client = daemon.connect(deadline_ms=100)
        cache = client.attach(SPEC)
        store(cache, chat(1))
        hit, reservation = cache.acquire(chat(1)), cache.reserve(chat(2))
        array = next(hit.blocks()).array
        getattr(daemon, ended)()
        client.close()
        client.close()
        assert np.array_equal(array, kv_of(SPEC, chat(1), 0, 16))
        hit.release()
        reservation.abort()
        del array
        wait_until(lambda: client._link._gone)
        assert not client.status()["available"]
        assert cache.match(chat(1)) == 0
        with pytest.raises(kvstore.DaemonUnavailable):
            client.attach(SPEC)


def test_a_hit_let_go_unsettled_may_be_asked_after_the_end(daemon: Daemon) -> None:
    """HNG."""
    client = daemon.connect()
    hit = client.attach(SPEC).acquire(chat(1), wait=False)
    hit.release()
    client.close()
    wait_until(lambda: client._link._gone)
    assert hit.settled
    assert hit.num_tokens == 0
    assert hit.wait() == 0
    assert list(hit.blocks()) == []


# Leaks


def test_ten_thousand_leases_leave_no_trace(daemon: Daemon) -> None:
    """LEK: L#3767, M#1845."""
    tokens, process = chat(70, 100), psutil.Process()
    served = psutil.Process(daemon.process.pid)
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        assert store(cache, tokens)

        def cycles(count: int) -> tuple[int, int, int, int]:
            for step in range(count):
                hit = cache.acquire(tokens, request_id=str(step % 10) if step % 3 == 0 else None)
                assert hit.num_tokens == 100
                if step % 2:
                    _ = [block.array[0, 0, 0, 0, 0] for block in hit.blocks()]
                hit.release()
            assert holds(client.status()["daemon"])[:2] == (0, 0)
            return num_fds(), served.num_fds(), process.memory_info().rss >> 20, served.memory_info().rss >> 20

        before, after = cycles(2000), cycles(8000)
        assert after[0] <= before[0]
        assert after[1] <= before[1]
        assert after[2] - before[2] < 8
        assert after[3] - before[3] < 8
        assert client.status()["client"]["deadlines_missed"] == 0
        session = client._link.session
        assert not session.in_use
        assert not session.lingering


def test_connections_that_end_leave_no_trace(daemon: Daemon) -> None:
    """LEK: M#1845, descriptors, mappings and threads."""

    def connections(count: int) -> tuple[int, int, int, int]:
        for number in range(count):
            with daemon.connect() as client:
                cache = client.attach(SPEC)
                store(cache, chat(number, 16))
                read(cache, chat(number, 16))
        wait_until(lambda: threading.active_count() <= threads)
        wait_until(lambda: len(served.open_files()) + served.num_fds() <= idle)
        maps = Path("/proc/self/maps").read_text().count(str(daemon.memory_path))
        return num_fds(), maps, threading.active_count(), served.num_fds()

    served = psutil.Process(daemon.process.pid)
    threads, idle = threading.active_count(), len(served.open_files()) + served.num_fds()
    before, after = connections(2), connections(20)
    assert after[:2] == before[:2]
    assert after[2] <= before[2]  # a keeper, and a session, of the test before this one may have gone since
    assert after[3] <= before[3]


def test_reconnections_leave_no_trace(own_daemon: Daemon) -> None:
    """LEK, RST: the slab of a dead daemon is let go once no array on it lives."""
    with own_daemon.connect(deadline_ms=100) as client:
        cache = client.attach(SPEC)
        counts = []
        for _ in range(4):
            heals(client, cache)
            maps = Path("/proc/self/maps").read_text().count(str(own_daemon.memory_path))
            counts.append((num_fds(), maps, client._link.session.id in own_ids(own_daemon)))
            own_daemon.kill()
            assert cache.match(chat(1)) == 0
            own_daemon.start()
        assert len(set(counts)) == 1
        assert counts[0][1:] == (1, True)


def own_ids(daemon: Daemon) -> set[int]:
    return {each["id"] for each in daemon.status()["sessions"]}


def test_embedded_stores_leave_no_trace() -> None:
    """LEK: a store per test of an engine."""
    with embedded():
        pass
    before = num_fds(), threading.active_count(), Path("/proc/self/maps").read_text().count("kvstore-slab")
    for number in range(5):
        client = embedded()
        cache = client.attach(SPEC)
        store(cache, chat(number))
        hit = cache.acquire(chat(number))
        array = next(hit.blocks()).array
        client.close()
        assert np.array_equal(array, kv_of(SPEC, chat(number), 0, 16))
        hit.release()
        del array, hit, cache
        wait_until(partial(getattr, client._link, "_gone"))
        del client
    wait_until(lambda: threading.active_count() <= before[1])
    gc.collect()
    assert num_fds() <= before[0]
    assert Path("/proc/self/maps").read_text().count("kvstore-slab") <= before[2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the bug shows, as it should
def test_an_embedded_store_that_failed_is_closed_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HNG, COR: nothing is made of a state that may contradict itself, and nobody waits for it."""
    disk = {"path": str(tmp_path / "ssd"), "capacity": "64MiB"}
    before = threading.active_count()

    def bug(*_: object) -> None:
        raise AssertionError("a bug of ours")

    with kvstore.open({"memory": {"capacity": "16MiB"}, "disk": disk}) as client:
        wait_until(lambda: client.status()["daemon"]["disk"]["ready"])
        monkeypatch.setattr(Writes, "committed", bug)
        store(client.attach(SPEC), chat(1))

        def has_failed() -> bool:
            try:
                return client.status()["daemon"] is None
            except AssertionError:  # of ours: this call met it, and not the store's own thread
                return False

        wait_until(has_failed)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 2
    wait_until(lambda: threading.active_count() <= before)


# Threads


def test_threads_share_a_client(daemon: Daemon) -> None:
    """COR: L#3388 and its kin; every byte compared."""
    with daemon.connect() as client, ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(work_at_random, client.attach(SPEC), seed) for seed in range(6)]:
            done.result()
        assert client.status()["client"]["deadlines_missed"] == 0
        assert holds(client.status()["daemon"]) == NOTHING


def work_at_random(cache: Cache, seed: int) -> None:
    choose = np.random.default_rng(seed)
    for step in range(60):
        tokens = [*chat(80, 100)[: choose.integers(0, 100)], *chat(int(choose.integers(81, 90)), 30)]
        if step % 2:
            store(cache, tokens, by_array=bool(step % 4 == 1))
        hit = cache.acquire(tokens, wait=bool(choose.integers(2)))
        assert hit.wait() == verified(hit, tokens)
        hit.release()


# What may be raised, and by whom


def test_nobody_there_is_one_clear_error() -> None:
    """CFG, LEK: M#1845, and nothing is left of the attempt."""
    before = num_fds()
    began = time.monotonic()
    with pytest.raises(kvstore.DaemonUnavailable, match=r"nobody answers there: is `kvstore serve` running\?"):
        kvstore.connect(f"ipc:///tmp/kvt-{os.getpid()}-nobody", deadline_ms=10)
    assert time.monotonic() - began < 3
    wait_until(lambda: num_fds() <= before)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "ipc://relative", "", "ipc:///" + "x" * 200])
def test_what_cannot_be_an_address_is_one_clear_error(address: str) -> None:
    """CFG, SEC."""
    with pytest.raises(kvstore.ConfigInvalid, match="address"):
        kvstore.connect(address)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"dtype": "int4"}, "dtype"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": 5000}, "num_layers"),
        ({"num_layers": "32"}, "num_layers"),
        ({"num_kv_heads": 5000}, "num_kv_heads"),
        ({"block_tokens": 513}, "block_tokens"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": -1}, "head_dim"),
        ({"latent_dim": 8}, "latent_dim"),
        ({"layout": "mine"}, "token_nbytes"),
        ({"token_nbytes": 8}, "token_nbytes"),
        ({"grain_tokens": 2}, "grain_tokens"),
        ({"layout": "mine", "token_nbytes": 8, "grain_tokens": 5}, "grain_tokens"),
        ({"model": "x" * 1025}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"num_kv_heads": 1024, "head_dim": 1024}, "block_tokens"),
    ],
)
def test_an_invalid_spec_is_one_clear_error(daemon: Daemon, wrong: dict[str, Any], field: str) -> None:
    """CFG: it names the field, and other specs are served on."""
    fields = {name: getattr(SPEC, name) for name in SPEC.__struct_fields__} | wrong
    with daemon.connect() as client:
        with pytest.raises(kvstore.SpecMismatch, match=field):
            client.attach(KVSpec(**fields))
        cache = client.attach(SPEC)
        assert store(cache, chat(95)) or cache.match(chat(95))
        assert read(cache, chat(95)) == 64


def test_the_longest_names_fit_the_protocol(daemon: Daemon) -> None:
    """HNG: a spec that is valid is answered."""
    name = "\N{GRINNING FACE}" * 1024
    fields = {name: getattr(SPEC, name) for name in SPEC.__struct_fields__}
    names = dict.fromkeys(("model", "revision", "kv_scales", "rope", "adapter", "tenant_salt"), name)
    with daemon.connect() as client:
        cache = client.attach(KVSpec(**(fields | names)))
        assert store(cache, chat(1), salt=9)
        assert read(cache, chat(1), salt=9) == 64
        assert client.status()["available"]


def test_another_version_is_one_clear_error(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """INS: L#2290."""
    monkeypatch.setattr(wire, "VERSION_MIN", 98)
    monkeypatch.setattr(wire, "VERSION_MAX", 99)
    with pytest.raises(kvstore.DaemonUnavailable, match="the client speaks protocol 98-99, the daemon 1-1"):
        daemon.connect()


@pytest.mark.parametrize("answer", ["rubbish", "silence", "another reply", "failure", "another slab", "absent slab"])
def test_a_daemon_that_talks_nonsense_is_no_daemon(tmp_path: Path, answer: str, daemon: Daemon) -> None:
    """SEC, HNG: at connect, one error in bounded time."""
    address = f"ipc://{daemon.folder}/nonsense"
    slab = {"another slab": daemon.slabs[0], "absent slab": tmp_path / "slab"}.get(answer, Path())
    welcome = wire.Welcome(0, 1, 5, 65536, str(slab), "", True)
    replies: dict[str, wire.Reply] = {
        "another reply": wire.Found(0, 5),
        "failure": wire.Failed(0, "error", "the daemon failed"),
    }

    def serve() -> None:
        with closing(ZmqListener(address)) as listener:
            listening.set()
            while not done.is_set():
                incoming = listener.receive()
                if incoming is None:
                    time.sleep(0.001)
                elif answer == "rubbish":
                    listener.send(incoming.peer, b"\xc1 rubbish")
                elif answer != "silence":
                    request = wire.decode(incoming.frame)
                    if isinstance(request, wire.Goodbye):  # it was told nonsense, and is off again
                        continue
                    assert isinstance(request, wire.Hello)
                    fields = {
                        name: getattr(replies.get(answer, welcome), name)
                        for name in replies.get(answer, welcome).__struct_fields__
                    }
                    kind = type(replies.get(answer, welcome))
                    listener.send(incoming.peer, wire.encode(kind(**(fields | {"request_id": request.request_id}))))

    done, listening = threading.Event(), threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    assert listening.wait(10)
    try:
        before = num_fds()
        began = time.monotonic()
        with pytest.raises(kvstore.KVStoreError):
            kvstore.connect(address, deadline_ms=50)
        assert time.monotonic() - began < 3
        wait_until(lambda: num_fds() <= before)
    finally:
        done.set()
        thread.join()


def test_what_the_engine_measured_may_be_any_kind_of_number(daemon: Daemon) -> None:
    """HNG: a report must not make a message that the daemon refuses to read; what is no number is left out."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)

        def reported(**measured: Any) -> tuple[float, ...]:
            """What the daemon has added to (prefill_tokens, prefill_ms, ttft_reports, ttft_ms)."""
            names = "prefill_tokens", "prefill_ms", "ttft_reports", "ttft_ms"
            before = client.status()["daemon"]["stats"]
            cache.report(**measured)
            after = client.status()["daemon"]["stats"]
            return tuple(after[name] - before[name] for name in names)

        assert reported(prefill_tokens=np.int64(7), prefill_ms=np.float64(2), ttft_ms=np.float32(4)) == (7, 2, 1, 4)
        assert reported(prefill_tokens=np.uint8(7), prefill_ms=2, ttft_ms=np.int16(4)) == (7, 2, 1, 4)
        assert reported(prefill_tokens=7.0, prefill_ms=True, ttft_ms=0) == (7, 1, 1, 0)
        assert reported(prefill_tokens=-7, prefill_ms=-2.0, ttft_ms=np.float64(-4)) == (0, 0, 1, 0)
        nan = float("nan")
        assert reported(prefill_tokens=nan, prefill_ms=np.float64(nan), ttft_ms=np.float32(nan)) == (0, 0, 0, 0)
        assert reported() == (0, 0, 0, 0)
        assert reported(ttft_ms=float("inf"))[2] == 1
        assert reported(prefill_tokens=1 << 200, prefill_ms=np.float64("-inf"))[1] == 0
        assert client.status()["client"]["deadlines_missed"] == 0
        assert "dropped a message" not in daemon.log


def test_facts_are_plain_json(daemon: Daemon) -> None:
    """OBS: and say what happened: L#2574."""
    with Daemon() as fresh, fresh.connect() as client:
        cache = client.attach(SPEC)
        assert read(cache, chat(1)) == 0
        assert store(cache, chat(1))
        assert read(cache, chat(1)) == 64
        assert read(cache, [*chat(1)[:40], 5, 5]) == 40
        cache.report(prefill_tokens=100, prefill_ms=50.0, ttft_ms=70.0)
        facts = json.loads(json.dumps(client.status()))
        stats = facts["daemon"]["stats"]
        assert (stats["lookups"], stats["hits"], stats["misses"]) == (3, 2, 1)
        assert (stats["tokens_asked"], stats["tokens_hit"], stats["blocks_hit"]) == (64 + 64 + 42, 104, 7)
        assert (stats["blocks_stored"], stats["bytes_stored"]) == (4, 4 * SPEC.block_nbytes)
        assert (stats["reservations"], stats["reservations_committed"]) == (1, 1)
        assert (stats["prefill_tokens"], stats["prefill_ms"], stats["ttft_ms"]) == (100, 50.0, 70.0)
        assert facts["daemon"]["memory"]["cached_nbytes"] == 4 * SPEC.slot_nbytes
        assert facts["available"]
