"""The daemon under everything a peer can do to it: rubbish, floods, faults of its own, deaths, and two kinds of blocks
in one slab. Whoever behaves is served on."""

import os
import random
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq

import kvstore
from kvstore import Cache, Client, KVSpec
from kvstore.clock import SimClock
from kvstore.config import config_from
from kvstore.core.store import QUARANTINE_MS, SESSIONS_MAX
from kvstore.service import daemon as daemon_module
from kvstore.service.service import Service
from kvstore.spec import encode_spec
from tests.daemons import (
    BIG,
    SPEC,
    Daemon,
    Other,
    assert_balanced,
    chat,
    holds,
    read,
    store,
    wait_until,
)
from tests.wire_harness import small_service
from transports import messages as wire

NOTHING = (0, 0, 0)


class Rude:
    """A peer that speaks ZeroMQ and keeps no other rule."""

    def __init__(self, daemon: Daemon) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(daemon.address)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def ask(self, request: wire.Request) -> wire.AnyMessage:
        """Changes state. The next reply, which is this request's unless more were asked for."""
        self.send(wire.encode(request))
        assert self.socket.poll(5000)
        return wire.decode(self.socket.recv())

    def hello(self) -> wire.Welcome:
        reply = self.ask(wire.Hello(1, wire.VERSION_MIN, wire.VERSION_MAX))
        assert isinstance(reply, wire.Welcome)
        return reply


def works(daemon: Daemon, client: Client, cache: Cache, number: int) -> None:
    """Changes state. Another client is served as if nothing had happened."""
    assert store(cache, chat(number))
    assert read(cache, chat(number)) == 64
    assert client.status()["client"]["deadlines_missed"] == 0
    assert client.status()["client"]["reconnects"] == 0
    assert daemon.process.poll() is None


# Rubbish


def test_rubbish_is_dropped_and_nobody_else_notices(daemon: Daemon) -> None:
    """SEC."""
    choose = random.Random(1)
    with daemon.connect() as client, closing(Rude(daemon)) as rude:
        cache = client.attach(SPEC)
        true = [wire.encode(wire.Hello(1, 1, 1)), wire.encode(wire.Find(2, 3, 4, bytes(64), bytes(256)))]
        for _ in range(300):
            rude.send(choose.randbytes(choose.randrange(200)))
            frame = bytearray(choose.choice(true))
            frame[choose.randrange(len(frame))] ^= 1 << choose.randrange(8)
            rude.send(bytes(frame[: choose.randrange(1, len(frame) + 1)]))
        rude.send(b"")
        rude.send(b"\x91" * 100_000)
        rude.send(b"\xdd\xff\xff\xff\xff")
        rude.send(b"\xc6\xff\xff\xff\xff")
        rude.send(b"two", b"frames")
        rude.send(wire.encode(wire.Found(5, 64)))
        rude.send(wire.encode(wire.Failed(5, "error", "text")))
        works(daemon, client, cache, 1)
        assert "Traceback" not in daemon.log


def test_a_flood_of_rubbish_is_not_read_and_floods_no_log(own_daemon: Daemon) -> None:
    """SEC, HNG: who sends it is answered no more; everybody else is, within his deadline."""
    choose, stop = random.Random(1), threading.Event()
    sizes = [choose.choice((1, 20, 300, 5000)) for _ in range(64)]
    with own_daemon.connect(deadline_ms=1000) as client, closing(Rude(own_daemon)) as rude:
        cache = client.attach(SPEC)
        rude.socket.set(zmq.SNDTIMEO, 100)

        def flood() -> None:
            while not stop.is_set():
                with suppress(zmq.Again):
                    rude.send(choose.randbytes(choose.choice(sizes)))

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            for number in range(100):
                assert store(cache, chat(number))
                assert read(cache, chat(number)) == 64
        finally:
            stop.set()
            thread.join()
        works(own_daemon, client, cache, 100)
        rude.send(wire.encode(wire.Hello(1, wire.VERSION_MIN, wire.VERSION_MAX)))
        works(own_daemon, client, cache, 101)
        assert not rude.socket.poll(100), "it was answered after all"
        assert own_daemon.log.count("dropped a message") == 1
        assert own_daemon.log.count("nothing of that connection is read any more") == 1


def test_a_pickle_is_rubbish_like_any_other(daemon: Daemon) -> None:
    """SEC: nothing in it is done."""
    trap = daemon.folder / "sprung"
    pickle = b"cposix\nsystem\n(S'touch " + str(trap).encode() + b"'\ntR."
    with daemon.connect() as client, closing(Rude(daemon)) as rude:
        cache = client.attach(SPEC)
        for frame in (pickle, wire.sealed(pickle), wire.sealed(b"\x93\x02\x01\xc4" + bytes((len(pickle),)) + pickle)):
            rude.send(frame)
        works(daemon, client, cache, 4)
    assert not trap.exists()


def test_a_peer_that_reads_no_answer_costs_a_bounded_queue(own_daemon: Daemon) -> None:
    """SEC, LEK: answers beyond the queue are dropped, and nobody else waits for it."""
    with own_daemon.connect() as client, closing(Rude(own_daemon)) as rude:
        cache = client.attach(SPEC)
        rude.socket.set(zmq.RCVHWM, 10)
        works(own_daemon, client, cache, 5)
        before = psutil.Process(own_daemon.process.pid).memory_info().rss
        for number in range(20_000):
            rude.send(wire.encode(wire.GetStatus(number)))
        works(own_daemon, client, cache, 6)
        assert psutil.Process(own_daemon.process.pid).memory_info().rss - before < 64 << 20


def test_a_frame_above_the_bound_is_not_read(daemon: Daemon) -> None:
    """SEC."""
    with daemon.connect() as client, closing(Rude(daemon)) as rude:
        cache = client.attach(SPEC)
        before = psutil.Process(daemon.process.pid).memory_info().rss
        for _ in range(4):
            rude.send(bytes(wire.MESSAGE_NBYTES_MAX + 1))
        works(daemon, client, cache, 2)
        assert psutil.Process(daemon.process.pid).memory_info().rss - before < 4 * wire.MESSAGE_NBYTES_MAX


def test_bytes_that_are_not_zeromq_close_that_connection_only(daemon: Daemon) -> None:
    """SEC."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        for rubbish in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff\0\0\0\0\0\0\0\1\x7f" + b"\x03" * 54):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(daemon.address.removeprefix("ipc://"))
                raw.send(rubbish)
        works(daemon, client, cache, 3)


UNKNOWN = 12345 << 16
REQUESTS_OF_A_STRANGER: list[wire.Request] = [
    wire.Attach(7, UNKNOWN, encode_spec(SPEC)),
    wire.Find(7, UNKNOWN, 0, bytes(16), bytes(64)),
    wire.Acquire(7, UNKNOWN, 0, 1, bytes(16), bytes(64)),
    wire.Reserve(7, UNKNOWN, 0, 1, bytes(16), 0),
    wire.Commit(7, UNKNOWN, 1, b"\1"),
    wire.Clear(7, UNKNOWN, 0),
]


@pytest.mark.parametrize("request_", REQUESTS_OF_A_STRANGER, ids=lambda request: type(request).__name__)
def test_an_unknown_session_is_told_so(daemon: Daemon, request_: wire.Request) -> None:
    """SEC, RST: one terminal reply, and the daemon goes on."""
    with closing(Rude(daemon)) as rude:
        reply = rude.ask(request_)
        assert isinstance(reply, wire.Failed)
        assert (reply.request_id, reply.code) == (7, "session-lost")
        rude.send(wire.encode(wire.Release(UNKNOWN, [1, 2])))
        rude.send(wire.encode(wire.Abort(UNKNOWN, 1)))
        rude.send(wire.encode(wire.Discard(UNKNOWN, 1, 0, "header")))
        rude.send(wire.encode(wire.Goodbye(UNKNOWN)))
        assert isinstance(rude.ask(wire.GetStatus(8)), wire.State)


def test_an_unknown_spec_is_told_so(daemon: Daemon) -> None:
    """SEC."""
    with closing(Rude(daemon)) as rude:
        session = rude.hello().session
        for request in (
            wire.Find(7, session, 999, bytes(16), bytes(64)),
            wire.Acquire(7, session, 999, 1, bytes(16), bytes(64)),
            wire.Reserve(7, session, 999, 1, bytes(16), 0),
            wire.Clear(7, session, 999),
        ):
            reply = rude.ask(request)
            assert isinstance(reply, wire.Failed)
            assert reply.code == "session-lost"
        rude.send(wire.encode(wire.Goodbye(session)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x81\xa1x" + b"\x91" * 8000 + b"\xc0",
        encode_spec(SPEC)[:-1],
        encode_spec(KVSpec(model="m", dtype="int4", num_layers=1, head_dim=1, block_tokens=1)),
        encode_spec(KVSpec(model="m", dtype="int8", num_layers=1, head_dim=1, block_tokens=10**6)),
        encode_spec(
            KVSpec(model="m", dtype="int8", num_layers=4095, num_kv_heads=4095, head_dim=1 << 32, block_tokens=1)
        ),
        msgspec.msgpack.encode({**msgspec.structs.asdict(SPEC), "num_layers": -1}),
        msgspec.msgpack.encode({**msgspec.structs.asdict(SPEC), "model": b"\xff"}),
    ],
)
def test_an_invalid_spec_is_refused_by_the_daemon_itself(daemon: Daemon, data: bytes) -> None:
    """SEC: a client's own check proves nothing."""
    with closing(Rude(daemon)) as rude:
        session = rude.hello().session
        reply = rude.ask(wire.Attach(7, session, data))
        assert isinstance(reply, wire.Failed)
        assert reply.code == "spec-mismatch"
        rude.send(wire.encode(wire.Goodbye(session)))
        assert isinstance(rude.ask(wire.GetStatus(8)), wire.State)


def test_another_protocol_version_is_one_clear_refusal(daemon: Daemon) -> None:
    """INS."""
    with closing(Rude(daemon)) as rude:
        for lowest, highest in ((wire.VERSION_MAX + 1, wire.VERSION_MAX + 5), (0, wire.VERSION_MIN - 1)):
            reply = rude.ask(wire.Hello(1, lowest, highest))
            assert isinstance(reply, wire.Failed)
            assert reply.code == "daemon-unavailable"
            assert f"the client speaks protocol {lowest}-{highest}" in reply.text
        reply = rude.ask(wire.Hello(1, 0, wire.VERSION_MAX + 9))
        assert isinstance(reply, wire.Welcome)
        rude.send(wire.encode(wire.Goodbye(reply.session)))


@pytest.fixture
def service() -> Iterator[Service]:
    with ExitStack() as held:
        yield small_service(held)


def test_a_status_is_one_message_however_many_specs(service: Service) -> None:
    """SEC: names of any length are the client's to choose."""
    name = "\N{GRINNING FACE}" * 1000
    fields = msgspec.structs.asdict(SPEC)
    for number in range(1000):
        service.store.attach(KVSpec(**(fields | {"model": f"{name}{number}"})))
    replies: list[wire.Reply] = []
    service.dispatch(wire.GetStatus(1), replies.append)
    assert isinstance(wire.decode(wire.encode(replies[0])), wire.State)
    assert service.status()["specs_served"] == 1000
    assert service.status()["specs"][-1]["model"] == f"{name}999"


# Faults of its own

FAILING = """
import sys
import kvstore.service.service as service
from kvstore.core.store import Store
from kvstore.cli import main
def clear(self, spec_id):
    raise RuntimeError("a bug of ours")
Store.clear = clear
main()
"""


def test_a_handler_that_raises_answers_and_stops_the_daemon() -> None:
    """HNG: LMCache 0.5.6. The client has its answer, goes on without cache, and finds the next daemon."""
    with Daemon() as daemon:
        daemon.terminate()
        daemon.start([sys.executable, "-c", FAILING])
        with daemon.connect(deadline_ms=5000) as client, closing(Rude(daemon)) as rude:
            cache = client.attach(SPEC)
            assert store(cache, chat(1))
            hit = cache.acquire(chat(1))
            reply = rude.ask(wire.Clear(7, rude.hello().session, 0))
            assert isinstance(reply, wire.Failed)
            assert (reply.request_id, reply.code) == (7, "error")
            assert daemon.process.wait(10) != 0
            assert "a bug of ours" in daemon.log
            assert list(daemon.memory_path.glob("slab-*")), "the next one goes on with what was sealed"
            assert read(cache, chat(1)) == 0
            assert hit.wait() == 64
            daemon.start()
            wait_until(lambda: read(cache, chat(1)) == 64, what="the next one goes on with the slab")
            hit.release()


def test_dispatch_answers_whatever_happens(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """HNG: exactly one reply; an error of ours is not swallowed."""
    session = service.store.open_session()
    assert session is not None

    def fails(*_: object, **__: object) -> None:
        raise AssertionError("broken invariant")

    for verb, request in (
        ("find", wire.Find(1, session.id, 0, b"", b"")),
        ("acquire", wire.Acquire(2, session.id, 0, 1, b"", b"")),
        ("reserve", wire.Reserve(3, session.id, 0, 1, b"", 0)),
        ("clear", wire.Clear(4, session.id, 0)),
        ("attach", wire.Attach(5, session.id, encode_spec(SPEC))),
    ):
        replies: list[wire.Reply] = []
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="broken invariant"):
            patch.setattr(service.store, verb, fails)
            service.dispatch(request, replies.append)
        assert [(type(reply), reply.request_id) for reply in replies] == [(wire.Failed, request.request_id)]


# Deaths and floods


def test_more_sessions_than_there_are_numbers_are_refused(service: Service) -> None:
    """HNG: in plain words, and a number that comes back is given again."""
    replies: list[wire.Reply] = []
    for number in range(SESSIONS_MAX + 1):
        service.dispatch(wire.Hello(number, 1, 1), replies.append)
    refused = replies[-1]
    assert isinstance(refused, wire.Failed)
    assert "as many sessions as it can" in refused.text
    welcome = replies[100]
    assert isinstance(welcome, wire.Welcome)
    service.dispatch(wire.Goodbye(welcome.session), replies.append)
    service.dispatch(wire.Hello(1, 1, 1), replies.append)
    assert isinstance(replies[-1], wire.Welcome)
    assert len({reply.session for reply in replies if isinstance(reply, wire.Welcome)}) == SESSIONS_MAX + 1


def test_a_daemon_without_descriptors_left_serves_on() -> None:
    """RST: more clients than the default limit of descriptors allows to watch."""
    if not shutil.which("prlimit"):
        pytest.skip("prlimit is not installed")
    with Daemon() as daemon:
        daemon.terminate()
        daemon.start(["prlimit", "--nofile=64:64", str(Path(sys.executable).with_name("kvstore"))])
        with daemon.connect() as client, closing(Rude(daemon)) as rude:
            cache = client.attach(SPEC)
            sessions = [rude.hello().session for _ in range(100)]
            assert len(set(sessions)) == 100
            works(daemon, client, cache, 1)
            for session in sessions:
                rude.send(wire.encode(wire.Goodbye(session)))
            wait_until(lambda: len(client.status()["daemon"]["sessions"]) == 1)


def test_a_session_that_never_took_its_lock_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEK: where no process can be watched, the lock alone tells; its slots wait out the writes that may still land."""
    clock = SimClock()
    monkeypatch.setattr(daemon_module, "Watched", lambda pid: Unwatched())
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    address = f"ipc://{folder}/s"
    config = config_from({"address": address, "memory": {"capacity": "4MiB", "path": str(folder / "slab")}})
    daemon = daemon_module.Daemon(config, clock)
    context = zmq.Context()
    try:
        peer = context.socket(zmq.DEALER)
        peer.set(zmq.LINGER, 0)
        peer.connect(address)
        peer.send(wire.encode(wire.Hello(1, 1, 1)))
        wait_until(lambda: daemon._serve_messages() is None and daemon.service.store.sessions)
        (session,) = daemon.service.store.sessions
        entry = daemon.service.store.attach(SPEC)
        daemon.service.store.reserve(session.id, entry.spec_id, 1, b"h" * 16, 0)
        clock.advance(4000)
        daemon._sweep(clock.now_ms())
        assert holds(daemon.service.status())[:2] == (0, 1), "it may still be about to take its lock"
        clock.advance(2000)
        daemon._sweep(clock.now_ms())
        assert not daemon.service.store.sessions
        assert holds(daemon.service.status()) == (0, 0, SPEC.slot_nbytes)
        clock.advance(QUARANTINE_MS - 1)
        daemon.service.store.on_time(clock.now_ms())
        assert holds(daemon.service.status()) == (0, 0, SPEC.slot_nbytes)
        clock.advance(1)
        daemon.service.store.on_time(clock.now_ms())
        assert holds(daemon.service.status()) == NOTHING
        daemon.service.store.check()
    finally:
        context.destroy(linger=0)
        daemon.close()
        shutil.rmtree(folder)


class Unwatched:
    pidfd = None

    def close(self) -> None: ...


def test_a_daemon_that_fails_to_start_in_this_process_leaves_nothing() -> None:
    """LEK."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    config = config_from({"address": f"ipc://{folder}/s", "memory": {"capacity": 1 << 50, "path": f"{folder}/slab"}})
    with pytest.raises(kvstore.TierUnavailable):
        daemon_module.Daemon(config)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert [each.name for each in folder.iterdir()] == ["s.lock"]
    shutil.rmtree(folder)


# Two kinds of blocks in one slab


def test_two_specs_share_the_slab_under_pressure(own_daemon: Daemon) -> None:
    """LEK: L#1285. Two processes, blocks of 8 KiB and of 512 KiB, four times the slab of each; every byte compared."""
    snippet = """
cache = client.attach(BIG)
hits = 0
for number in range(100):
    tokens = chat(number, 192)
    store(cache, tokens, by_array=bool(number % 2))
    hits += read(cache, tokens) == 192
    read(cache, chat(max(0, number - 3), 192))
say(hits); hear()
"""
    with Other(own_daemon, snippet) as other, own_daemon.connect() as client:
        cache = client.attach(SPEC)
        hits = 0
        for number in range(1, 101):
            tokens = chat(number, 16 * 40)
            store(cache, tokens, by_array=bool(number % 2))
            hits += read(cache, tokens) == 640
            read(cache, chat(max(1, number - 3), 640))
            if number % 10 == 0:
                assert_balanced(client.status()["daemon"])
        assert hits >= 50, "the other's pressure may take a block back at once, but most come back"
        assert int(other.hear()) >= 50
        facts = client.status()["daemon"]
        assert facts["memory"]["blocks_evicted"] > 1000
        assert facts["memory"]["extents_unassigned"] <= 1  # one may just have been drained for a store that ended
        big = client.attach(BIG)
        assert store(big, chat(1000, 192))
        assert read(big, chat(1000, 192)) == 192
        assert store(cache, chat(1000))
        assert read(cache, chat(1000)) == 64
        facts = client.status()["daemon"]
        assert all(facts["memory"]["slots"][str(spec.slot_nbytes)]["cached"] for spec in (SPEC, BIG))
        assert_balanced(facts)
    wait_until(lambda: holds(own_daemon.status()) == NOTHING)


def test_held_blocks_bound_what_others_can_store_and_nothing_breaks(own_daemon: Daemon) -> None:
    """HNG: memory.session_share; a session that holds all it may gets shorter hits, others go on."""
    with own_daemon.connect() as client, own_daemon.connect() as other:
        cache, theirs = client.attach(BIG), other.attach(BIG)
        per_session = (8 << 20) // BIG.slot_nbytes
        for number in range(per_session + 4):
            assert store(cache, chat(number))
        held = [cache.acquire(chat(number)) for number in range(per_session + 4)]
        assert sum(hit.num_tokens for hit in held) <= 64 * per_session
        assert held[-1].num_tokens == 0
        assert client.status()["daemon"]["stats"]["hits_shortened"] > 0
        for number in range(100, 130):
            assert store(theirs, chat(number))
            assert read(theirs, chat(number)) == 64
        for number, hit in enumerate(held):
            for block in hit.blocks():
                assert np.array_equal(
                    block.array[0, 0, 0, 0, :1].view(np.uint8)[:1], block.array.view(np.uint8)[0, 0, 0, 0, :1]
                )
            assert hit.wait() in (0, 64), number
            hit.release()
        assert_balanced(client.status()["daemon"])
