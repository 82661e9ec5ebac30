"""Daemons that die or are replaced under clients that live, on one slab: memory survives, and nobody is lied to.

What a store does with any order of events is in test_takeover.py; here the processes, the slab file and the client's
keeper are real.
"""

import gc
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore.service.daemon as daemon_module
from kvstore import Client
from kvstore.config import config_from
from kvstore.core.tier import SLOT_ROW
from kvstore.errors import TierUnavailable
from kvstore.media.folder import SlabFolder
from kvstore.media.memory import EPOCH_OFFSET, READY_OFFSET, Geometry, Slab
from kvstore.service import link as link_module
from kvstore.service.link import Link
from kvstore.service.liveness import let_session_go
from tests.daemons import (
    BIG,
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
from transports import messages as wire

NOTHING = (0, 0, 0)
GEOMETRY = Geometry(4, 4 << 20)  # of 16 MiB

QUICK = """
from pathlib import Path
import kvstore.core.store as store
from kvstore.cli import main
Path("/proc/self/comm").write_text("kvstore")
store.QUARANTINE_MS = 150.0
main()
"""


class Phoenix(Daemon):
    """One whose quarantine is short, and that can be made to rise again."""

    def start(self, command: list[str] | None = None) -> None:
        super().start(command or [sys.executable, "-c", QUICK])

    def rise(self, ending: str = "kill") -> None:
        """Changes state. Another daemon in its place."""
        getattr(self, ending)()
        self.start()

    def unaccounted(self) -> int:
        found: int = self.status()["memory"]["sessions_unaccounted"]
        return found

    def wait_accounted(self, *clients: Client) -> None:
        """Query. Returns once every old session has said what it holds, or is dead, and these clients are back."""
        wait_until(lambda: not self.unaccounted(), what="all old sessions are accounted for")
        wait_until(lambda: all(client.status()["available"] for client in clients), what="the clients are back")

    def wait_empty_handed(self) -> dict[str, Any]:
        """Query. Returns once nobody holds anything, and all memory is free or cached."""
        wait_until(lambda: holds(self.status()) == NOTHING, what="nothing is held")
        facts = self.status()
        assert_balanced(facts)
        return facts

    def fill(self, first: int, count: int = 24) -> None:
        """Changes state. Store more than fits, so that all that may be reused is."""
        with self.connect() as client:
            cache = client.attach(SPEC)
            for number in range(first, first + count):
                store(cache, chat(number, 1024))


@pytest.fixture(scope="module")
def one_for_all() -> Iterator[Phoenix]:
    with Phoenix() as daemon:
        yield daemon.wait_ready()


@pytest.fixture
def phoenix(one_for_all: Phoenix) -> Phoenix:
    """Empty, and nobody is connected."""
    with one_for_all.connect() as client:
        for spec in (SPEC, BIG):
            client.attach(spec).clear()
    one_for_all.wait_empty_handed()
    return one_for_all


def shows(array: Any, number: int, start: int = 0, num_tokens: int = 64) -> bool:
    """Query. Whether an array still shows the block at `start` of this prompt."""
    return np.array_equal(array, kv_of(SPEC, chat(number, num_tokens), start, 16))


# --- who holds what


@pytest.mark.parametrize("ending", ["kill", "terminate"])
def test_all_that_is_held_is_held_on(phoenix: Phoenix, ending: str) -> None:
    """RST, COR, LEK: arrays, writable arrays, a commit whose arrays live, a reservation, two specs, a short block."""
    with phoenix.connect() as client:
        cache, big = client.attach(SPEC), client.attach(BIG)
        assert store(cache, chat(1)) and store(big, chat(2, 200)) and store(cache, chat(3, 40))
        hits = [cache.acquire(chat(1)), big.acquire(chat(2, 200)), cache.acquire(chat(3, 40))]
        arrays = [[block.array for block in hit.blocks()] for hit in hits]
        kept = cache.reserve(chat(4))
        views = [block.array for block in kept.blocks()]
        for at, view in enumerate(views):
            view[...] = kv_of(SPEC, chat(4), 16 * at, 16)
        assert kept.commit()
        reservation = cache.reserve(chat(5))
        writable = [block.array for block in reservation.blocks()]
        unread = cache.acquire(chat(1))
        phoenix.rise(ending)
        for at, target in enumerate(writable):  # as a device does that knows nothing of daemons
            target[...] = kv_of(SPEC, chat(5), 16 * at, 16)
        assert not reservation.commit()
        phoenix.wait_accounted(client)
        assert client.status()["client"]["reconnects"] == 1, "its keeper noticed, though no call was needed"
        facts = phoenix.status()
        assert holds(facts)[:2] == (6, 0)
        assert facts["memory"]["blocks_taken_over"] == 4 + 4 + 3 + 4
        assert facts["memory"]["slots"][str(SPEC.slot_nbytes)]["reserved"] == 4
        phoenix.fill(100)
        for hit, spec, number, length in zip(hits, (SPEC, BIG, SPEC), (1, 2, 3), (64, 200, 40), strict=True):
            assert hit.wait() == verified(hit, chat(number, length)) == length
            for block, array in zip(hit.blocks(), arrays.pop(0), strict=True):
                assert np.array_equal(array, kv_of(spec, chat(number, length), block.start, block.num_tokens))
        assert unread.wait() == verified(unread, chat(1)) == 64
        assert all(shows(view, 4, 16 * at) for at, view in enumerate(views))
        assert all(shows(target, 5, 16 * at) for at, target in enumerate(writable))
        assert read(cache, chat(4)) == 64
        assert cache.match(chat(5)) == 0
        for each in (*hits, unread):
            each.release()
        assert store(cache, chat(6)) and read(cache, chat(6)) == 64
        del array, views, view, writable, target, arrays, block, kept, reservation, hit, each, hits, unread
        gc.collect()
        phoenix.wait_empty_handed()


def test_a_second_restart_before_anybody_noticed_the_first(phoenix: Phoenix) -> None:
    """RST, COR: a stopped client says nothing; nothing it may look at is reused, for as long as that takes."""
    snippet = """
store(cache, chat(1))
hit, reservation = cache.acquire(chat(1)), cache.reserve(chat(2))
arrays = [block.array for block in hit.blocks()]
writable = [block.array for block in reservation.blocks()]
say('holding'); hear()
for at, target in enumerate(writable):
    target[...] = kv_of(SPEC, chat(2), 16 * at, 16)
hear()
assert all(np.array_equal(array, kv_of(SPEC, chat(1), 16 * at, 16)) for at, array in enumerate(arrays))
assert all(np.array_equal(target, kv_of(SPEC, chat(2), 16 * at, 16)) for at, target in enumerate(writable))
assert not reservation.commit()
assert hit.wait() == verified(hit, chat(1)) == 64
hit.release()
del arrays, writable, target
say('fine'); hear()
"""
    with Other(phoenix, snippet) as other:
        assert other.hear() == "holding"
        other.process.send_signal(signal.SIGSTOP)
        phoenix.rise()
        phoenix.fill(100)
        with phoenix.connect() as client:
            client.attach(SPEC).clear()
        phoenix.rise("terminate")
        phoenix.fill(200)
        assert phoenix.unaccounted() == 1
        other.process.send_signal(signal.SIGCONT)
        other.say("write")
        phoenix.wait_accounted()
        phoenix.rise()
        phoenix.wait_accounted()
        phoenix.fill(300)
        other.say("compare")
        assert other.hear() == "fine"
        phoenix.wait_empty_handed()


def test_a_stopped_client_that_dies_gives_all_back(phoenix: Phoenix) -> None:
    """LEK, RST: nobody says what it held; the kernel says that it is gone."""
    snippet = "store(cache, chat(1)); hit = cache.acquire(chat(1)); kept = cache.reserve(chat(2)); say(1); hear()"
    with Other(phoenix, snippet) as other:
        other.hear()
        other.process.send_signal(signal.SIGSTOP)
        phoenix.rise()
        assert phoenix.unaccounted() == 1
        assert holds(phoenix.status())[2] == 4 * SPEC.slot_nbytes
        other.kill()
        phoenix.wait_accounted()
        phoenix.wait_empty_handed()
    with phoenix.connect() as client:
        assert read(client.attach(SPEC), chat(1)) == 64


def test_a_closed_client_says_what_its_arrays_hold(phoenix: Phoenix) -> None:
    """RST, COR, LEK: and ends when they do. A child forked from it has no say."""
    snippet = """
store(cache, chat(1))
hit = cache.acquire(chat(1))
array = next(hit.blocks()).array
hit.release()
client.close()
child = os.fork()
if not child:
    del array
    time.sleep(60)
say(child); hear()
assert np.array_equal(array, kv_of(SPEC, chat(1), 0, 16))
del array
say('gone'); hear()
"""
    with Other(phoenix, snippet) as other:
        child = int(other.hear())
        phoenix.rise()
        phoenix.wait_accounted()
        assert holds(phoenix.status())[:2] == (1, 0)
        phoenix.fill(100)
        other.say("compare")
        assert other.hear() == "gone"
        wait_until(lambda: phoenix.status()["sessions"] == [], what="its session ends")
        phoenix.wait_empty_handed()
        os.kill(child, signal.SIGKILL)


def test_two_hits_of_blocks_that_were_cleared_before(phoenix: Phoenix) -> None:
    """COR, LEK: what was cleared stays away, and its slots are reused when the last of all that show it is gone."""
    with phoenix.connect() as one, phoenix.connect() as two:
        cache = one.attach(SPEC)
        store(cache, chat(1))
        hits = [each.attach(SPEC).acquire(chat(1)) for each in (one, one, two)]
        arrays = [list(hit.blocks())[3].array for hit in hits]
        cache.clear()
        assert cache.match(chat(1)) == 0
        phoenix.rise()
        phoenix.wait_accounted(one, two)
        assert phoenix.status()["memory"]["blocks_taken_over"] == 0
        for number in (100, 200, 300):
            phoenix.fill(number)
            assert all(shows(array, 1, 48) for array in arrays)
            hits.pop().release()
            del arrays[-1]
            wait_until(lambda: holds(phoenix.status())[0] == len(hits))
        phoenix.wait_empty_handed()


def test_twenty_clients_with_long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """RST, PRF: 200 leases of 1,000 blocks, in several messages; each client is back by itself, and soon."""
    monkeypatch.setattr(link_module, "CARRY_NBYTES", 10_000)
    with ExitStack() as stack:
        phoenix = stack.enter_context(Phoenix(capacity="32MiB")).wait_ready()
        clients = [stack.enter_context(phoenix.connect()) for _ in range(20)]
        caches = [client.attach(SPEC) for client in clients]
        for at in range(0, 16000, 4000):
            assert store(caches[0], chat(1, at + 4000))
        held = [[cache.acquire(chat(1, 16000)) for _ in range(10)] for cache in caches]
        assert all(hit.num_tokens == 16000 for hits in held for hit in hits)
        phoenix.rise()
        phoenix.wait_accounted(*clients)
        facts = phoenix.status()
        assert holds(facts) == (200, 0, 0)
        assert facts["longest_turn_ms"] < 500
        assert all(client.status()["available"] for client in clients)
        assert read(caches[7], chat(1, 16000)) == 16000
        for hits in held:
            for hit in hits:
                hit.release()
        phoenix.wait_empty_handed()


# --- between two instructions of a client


def test_what_ends_while_it_is_carried_over_does_not_stay(phoenix: Phoenix, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEK: the new daemon was told of a lease, and must be told of its end, whatever it was before."""
    with phoenix.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(1))
        hit, reservation = cache.acquire(chat(1)), cache.reserve(chat(2))
        attach_all = Link._attach_all

        def end_both(*args: Any) -> Any:
            hit.release()
            reservation.abort()
            return attach_all(*args)

        monkeypatch.setattr(Link, "_attach_all", end_both)
        phoenix.rise()
        phoenix.wait_accounted(client)
        phoenix.wait_empty_handed()
        assert client.status()["client"]["reconnects"] == 1


def test_a_commit_that_was_answered_just_before(phoenix: Phoenix) -> None:
    """LEK: the keeper says what is held before the committer has noted that it holds it no more."""
    with phoenix.connect() as client:
        cache = client.attach(SPEC)
        reservation = cache.reserve(chat(1))
        for block in reservation.blocks():
            block.write(kv_of(SPEC, chat(1), block.start, 16))
        hold, forget = reservation.hold, reservation.hold.forget

        def forget_late() -> None:
            client.status()  # a commit is answered before it is done
            phoenix.rise()
            phoenix.wait_accounted(client)
            assert holds(phoenix.status())[0] == 1
            forget()

        hold.forget = forget_late  # type: ignore[method-assign]
        assert reservation.commit()
        assert read(cache, chat(1)) == 64
        phoenix.wait_empty_handed()


@pytest.mark.parametrize("kind", [wire.Acquired, wire.Reserved], ids=["lease", "reservation"])
def test_an_answer_that_is_read_after_the_keeper_has_spoken(
    phoenix: Phoenix, monkeypatch: pytest.MonkeyPatch, kind: type[wire.Reply]
) -> None:
    """COR, LEK: the new daemon was not told of these slots, so there is no hit and no room."""
    ask = Link.ask

    def ask_and_dawdle(link: Link, wanted: type[wire.Reply], *args: Any) -> Any:
        reply = ask(link, wanted, *args)
        if wanted is kind:
            phoenix.rise()
            phoenix.wait_accounted(client)
        return reply

    with phoenix.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(1))
        monkeypatch.setattr(Link, "ask", ask_and_dawdle)
        if kind is wire.Acquired:
            hit = cache.acquire(chat(1))
            assert hit.num_tokens == hit.wait() == 0
        else:
            assert not cache.reserve(chat(2)).num_blocks
        monkeypatch.undo()
        assert read(cache, chat(1)) == 64
        phoenix.wait_empty_handed()


# --- what lies in the slab


def test_a_damaged_header_is_not_served(phoenix: Phoenix) -> None:
    """COR: nor what follows it; the rest is. Who shows it goes on doing so."""
    with phoenix.connect() as client:
        cache = client.attach(SPEC)
        assert store(cache, chat(1)) and store(cache, chat(2))
        hit = cache.acquire(chat(1))
        arrays = [block.array for block in hit.blocks()]
        phoenix.kill()
        client._link.session.slab.write(hit.offsets[1] + 100, b"\x77")
        phoenix.start()
        phoenix.wait_accounted(client)
        assert (read(cache, chat(1)), read(cache, chat(2))) == (16, 64)
        assert store(cache, chat(1)) and read(cache, chat(1)) == 64
        phoenix.fill(100)
        assert all(shows(array, 1, 16 * at) for at, array in enumerate(arrays))
        del arrays
        hit.release()
        phoenix.wait_empty_handed()


@pytest.mark.parametrize(
    ("at", "data", "why"),
    [
        (0, b"?", "version 2, this daemon"),
        (8, b"\x09", "version 9"),
        (EPOCH_OFFSET, b"\xff" * 8, "damaged superblock"),
        (READY_OFFSET - 16, b"\x05", "another memory.capacity"),
        (READY_OFFSET, b"\x05", "damaged superblock"),
        (GEOMETRY.extent_table_offset, b"\x01\x70", "damaged tables"),
        (GEOMETRY.slot_table_offset, b"\x77", "damaged tables"),
    ],
)
def test_a_damaged_table_is_one_line_and_an_empty_slab(at: int, data: bytes, why: str) -> None:
    """RST, COR: and no start is in vain."""
    folder = SlabFolder(Path(f"/dev/shm/kvstore-test-{os.getpid()}-{at}"))
    try:
        slab = Slab.create(folder.new_slab(5), GEOMETRY, 5)
        slab.allocate_extent(0)
        slab.extents_ready = 1
        slab.write(at, data)
        with pytest.raises(TierUnavailable, match=why):
            daemon_module._old_slab(folder.slab_path(5), GEOMETRY, 6)
        with ExitStack() as undo:
            new, path = daemon_module._take_slab(folder, GEOMETRY, 6, undo)
            assert (path, new.epoch) == (folder.slab_path(6), 6)
            assert slab.epoch == 6, "who still maps the old one sees that it is left"
            undo.pop_all()
            new.close()
            slab.close()
    finally:
        folder.remove()


def test_pages_that_are_not_there_are_not_counted_on(tmp_path: Path) -> None:
    """RST: a slab that was copied, or cut and stretched, would end an engine with SIGBUS."""
    folder = SlabFolder(tmp_path / "memory")
    slab = Slab.create(folder.new_slab(5), GEOMETRY, 5)
    slab.extents_ready = 3
    slab.close()
    with pytest.raises(TierUnavailable, match="damaged"):
        daemon_module._old_slab(folder.slab_path(5), GEOMETRY, 6)
    folder.remove()


def test_garbage_anywhere_stops_no_daemon(phoenix: Phoenix) -> None:
    """COR, RST: random bytes in the tables, and in headers; what is served is right."""
    rng = random.Random(1)
    for life in range(3):
        with phoenix.connect() as client:
            cache, big = client.attach(SPEC), client.attach(BIG)
            for number in range(life * 10, life * 10 + 10):
                assert store(cache, chat(number)) and store(big, chat(number, 130))
        phoenix.kill()
        with phoenix.slabs[0].open("r+b", buffering=0) as file:
            row = rng.randrange(60) * SLOT_ROW.itemsize
            place = [GEOMETRY.slot_table_offset + row, GEOMETRY.extent_table_offset, GEOMETRY.data_offset][life]
            os.pwrite(file.fileno(), rng.randbytes(24), place)
        phoenix.start()
        assert "Traceback" not in phoenix.log
        with phoenix.connect() as client:
            cache, big = client.attach(SPEC), client.attach(BIG)
            found = [(read(cache, chat(number)), read(big, chat(number, 130))) for number in range(life * 10 + 10)]
            assert set(found) <= {(at, big_at) for at in (0, 16, 32, 48, 64) for big_at in (0, 64, 128, 130)}
            cache.clear()
            big.clear()
        phoenix.wait_empty_handed()


def test_memory_that_was_not_all_there_comes_later() -> None:
    """RST: the first daemon dies while it still asks the system for memory."""
    with Phoenix(capacity="256MiB") as phoenix, phoenix.connect() as client:
        cache = client.attach(SPEC)
        assert store(cache, chat(1)) and read(cache, chat(1)) == 64
        phoenix.rise()
        phoenix.wait_accounted(client)
        assert read(cache, chat(1)) == 64
        phoenix.wait_ready()
        phoenix.fill(100, count=4)
        phoenix.wait_empty_handed()


def test_blocks_that_were_coming_from_the_ssd() -> None:
    """COR, RST: they come or they do not, but what is shown is right."""
    with Phoenix(capacity="32MiB") as phoenix:
        phoenix.flags[-2:-2] = ["--disk.path", str(phoenix.folder / "ssd"), "--disk.capacity", "64MiB"]
        phoenix.rise()
        with phoenix.connect() as client:
            cache = client.attach(SPEC)
            wait_until(lambda: phoenix.status()["disk"]["ready"])
            for number in range(3):
                assert store(cache, chat(number, 4096))
                wait_until(lambda: phoenix.status()["disk"]["idle"], what="all is written")
        phoenix.kill()
        phoenix.slabs[0].unlink()
        phoenix.start()
        with phoenix.connect() as client:
            cache = client.attach(SPEC)
            wait_until(lambda: phoenix.status()["disk"]["ready"])
            hits = [cache.acquire(chat(number, 4096)) for number in range(3)]
            assert any(hit.num_tokens for hit in hits)
            phoenix.rise()
            phoenix.wait_accounted(client)
            for number, hit in enumerate(hits):
                assert hit.wait() == verified(hit, chat(number, 4096)) <= 4096
            wait_until(lambda: phoenix.status()["disk"]["ready"])
            for number, hit in enumerate(hits):
                hit.release()
                assert read(cache, chat(number, 4096)) == 4096
            phoenix.wait_empty_handed()


# --- other daemons than the next


def test_a_slab_that_was_left_holds_nobody_up() -> None:
    """HNG, LEK: a client that asks for nothing maps a slab that no daemon goes on with; the next ones may reuse all."""
    with Phoenix() as phoenix, phoenix.connect() as idle:
        cache = idle.attach(SPEC)
        store(cache, chat(1))
        hit = cache.acquire(chat(1))
        array = next(hit.blocks()).array
        phoenix.kill()
        phoenix.flags[-1] = "20MiB"
        phoenix.start()
        assert phoenix.log.count("starting with an empty one") == 1
        assert phoenix.unaccounted() == 0
        session = idle._link.session
        wait_until(lambda: idle._link.session is not session, what="the idle client has found the new daemon")
        phoenix.rise()
        phoenix.wait_accounted(idle)
        phoenix.fill(100, count=30)
        assert phoenix.status()["memory"]["blocks_evicted"] > 0
        assert shows(array, 1)
        assert hit.wait() == verified(hit, chat(1)) == 64
        hit.release()
        phoenix.wait_empty_handed()


def test_a_daemon_that_keeps_nothing_says_so_to_all() -> None:
    """RST, LEK: also to a client that asks for nothing."""
    with Phoenix("--memory.keep", "false") as phoenix, phoenix.connect() as idle:
        cache = idle.attach(SPEC)
        store(cache, chat(1))
        hit, session = cache.acquire(chat(1)), idle._link.session
        assert not phoenix.terminate()
        assert not phoenix.memory_path.exists()
        phoenix.start()
        wait_until(lambda: idle._link.session is not session, what="the idle client has found the new daemon")
        assert hit.wait() == verified(hit, chat(1)) == 64
        assert read(cache, chat(1)) == 0
        phoenix.wait_empty_handed()


def test_a_second_daemon_cannot_touch_the_slab_of_the_first(phoenix: Phoenix) -> None:
    """COR: an upgrade that starts too early, at another address; it says so in one line."""
    other = Phoenix(memory_path=phoenix.memory_path)
    with phoenix.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(1))
        with pytest.raises(AssertionError, match="in use by another daemon"):
            other.start()
        assert len(other.log.splitlines()) == 1
        shutil.rmtree(other.folder)
        assert read(cache, chat(1)) == 64
        assert client.status()["client"]["reconnects"] == 0


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEK: no memory for the first extent."""
    path = tmp_path / "memory"

    def refuse(*_: object) -> None:
        raise TierUnavailable("no memory")

    monkeypatch.setattr(Slab, "allocate_extent", refuse)
    config = config_from({"address": f"ipc://{tmp_path}/kv", "memory": {"capacity": "16MiB", "path": str(path)}})
    with pytest.raises(TierUnavailable, match="no memory"):
        daemon_module.Daemon(config)
    assert not path.exists()


def test_no_session_id_is_used_twice_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TTL, COR: what a client still sends to its old session must not end another's lease."""
    now, path = 1_800_000_000 * 10**9, tmp_path / "slab-1"
    monkeypatch.setattr(time, "time_ns", lambda: now)
    assert daemon_module._epoch_after(None) == daemon_module._epoch_after(path) == now
    for before, least in ((now - 3600 * 10**9, now), (now + 3600 * 10**9, now + 3600 * 10**9 + 1), (2**64 - 1, now)):
        path.write_bytes(bytes(EPOCH_OFFSET) + before.to_bytes(8, "little"))
        assert least <= daemon_module._epoch_after(path) < 2**62


def test_a_lock_that_is_gone_already_is_let_go_in_peace() -> None:
    """RST: somebody closed all descriptors of the process."""
    fd = os.memfd_create("sessions")
    os.close(fd)
    let_session_go(fd, 1)


# --- at random

TRAFFIC = """
import random
rng = random.Random(SEED)
held, done = [], 0
def work():
    number, length = rng.randrange(30), rng.choice((16, 40, 64, 300))
    tokens = chat(number, length)
    match rng.randrange(8):
        case 0 | 1 | 2:
            hit = cache.acquire(tokens, wait=rng.random() < 0.7)
            if hit.wait():
                held.append((number, length, [(block.start, block.num_tokens, block.array) for block in hit.blocks()]))
            if rng.random() < 0.5:
                hit.release()
        case 3 | 4:
            store(cache, tokens, by_array=rng.random() < 0.5)
        case 5:
            reservation = cache.reserve(tokens)
            arrays = [(block.start, block.num_tokens, block.array) for block in reservation.blocks()]
            for start, count, array in arrays:
                array[...] = kv_of(SPEC, tokens, start, count)
            rng.choice((reservation.commit, reservation.abort))()
            held.append((number, length, arrays))
        case 6:
            if rng.random() < 0.1:
                cache.clear()
            time.sleep(0.001)
        case 7:
            del held[: rng.randrange(4)]
def compare():
    for number, length, arrays in held:
        for start, count, array in arrays:
            assert np.array_equal(array, kv_of(SPEC, chat(number, length), start, count)), "an array changed"
say('ready')
stop = threading.Thread(target=hear, daemon=True)
stop.start()
while stop.is_alive():
    work()
    done += 1
    if done % 10 == 0 or len(held) > 30:
        compare()
        del held[:-20]
compare()
held.clear()
say(done); hear()
"""


@pytest.mark.parametrize("seed", [1])
def test_random_deaths_under_traffic(phoenix: Phoenix, seed: int) -> None:
    """RST, COR, LEK: the daemon dies ten times, a client once; no array ever shows anything but its own block."""
    rng = random.Random(seed)
    with ExitStack() as stack:
        others = [stack.enter_context(Other(phoenix, f"SEED = {seed * 10 + at}\n" + TRAFFIC)) for at in range(3)]
        assert [other.hear() for other in others] == ["ready"] * 3
        for life in range(10):
            time.sleep(rng.random() * 0.3)
            phoenix.rise(rng.choice(("kill", "kill", "terminate")))
            if life == 5:
                others.pop().kill()
        for other in others:
            other.say("stop")
        assert all(int(other.hear()) > 50 for other in others)
        phoenix.wait_accounted()
        facts = phoenix.wait_empty_handed()
        counts = facts["memory"]["slots"][str(SPEC.slot_nbytes)]
        assert counts["free"] + counts["cached"] > 0 == counts["reserved"]
