"""A real daemon, and peers that send and hold as much as they can: what that costs it has a bound, and whoever behaves
is served meanwhile, within his deadline."""

import random
import resource
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from kvstore import KVSpec
from kvstore.core.store import SESSIONS_MAX
from kvstore.service.daemon import MESSAGES_MS_MAX
from kvstore.service.offenders import MALFORMED_MAX
from kvstore.spec import encode_spec
from tests.daemons import SPEC, Daemon, chat, read, store, wait_until
from tests.test_daemon import Rude, works
from transports import messages as wire

MIB = 1 << 20


def rss(daemon: Daemon) -> int:
    """Query."""
    return int(psutil.Process(daemon.process.pid).memory_info().rss)


@contextmanager
def flood(rude: Rude, send: Callable[[], None]) -> Iterator[list[int]]:
    """Changes state. `send` again and again for the length of the block; how often, so far."""
    stop, count = threading.Event(), [0]
    rude.socket.set(zmq.SNDTIMEO, 100)

    def run() -> None:
        while not stop.is_set():
            with suppress(zmq.Again):
                send()
                count[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("kind", ["rubbish", "many parts", "huge"])
def test_a_flood_keeps_nobody_from_being_served(own_daemon: Daemon, kind: str) -> None:
    """SEC, HNG: each of the honest client's questions is answered in time; the loop never forgets the rest of its
    work over it, nor does memory fill with what is not read yet."""
    choose = random.Random(1)
    pieces = [choose.randbytes(choose.choice((1, 20, 300, 5000))) for _ in range(64)]
    huge = bytes(wire.MESSAGE_NBYTES_MAX)
    with own_daemon.connect(deadline_ms=1000) as client, closing(Rude(own_daemon)) as rude:
        cache, before = client.attach(SPEC), rss(own_daemon)
        rude.socket.set(zmq.SNDHWM, 16)
        send = {
            "rubbish": lambda: rude.send(choose.choice(pieces)),
            "many parts": lambda: rude.send(b"two", b"parts", b"and", b"more"),
            "huge": lambda: rude.socket.send(huge, copy=False),
        }[kind]
        client.status()
        with flood(rude, send) as count:
            most = 0
            wait_until(lambda: count[0] >= MALFORMED_MAX)
            for number in range(60):
                assert store(cache, chat(number))
                assert read(cache, chat(number)) == 64
                most = max(most, rss(own_daemon) - before)
            facts = client.status()["daemon"]
        assert most < 400 * MIB
        assert facts["longest_turn_ms"] < 20 * MESSAGES_MS_MAX  # an idle machine: 2; it was 350 with parts
        works(own_daemon, client, cache, 100)
        assert own_daemon.log.count("dropped a message") == 1
        assert own_daemon.log.count("nothing of that connection is read any more") == 1


def test_new_connections_and_good_words_between_flood_no_log(own_daemon: Daemon) -> None:
    """SEC, OBS: a peer that begins anew, or that is forgiven again and again, makes one line a second at most."""
    with own_daemon.connect() as client:
        cache = client.attach(SPEC)
        for _ in range(20):
            with closing(Rude(own_daemon)) as rude:
                for _ in range(MALFORMED_MAX):
                    rude.send(b"rubbish")
                for _ in range(MALFORMED_MAX):
                    rude.send(wire.encode(wire.Goodbye(1)))
        with closing(Rude(own_daemon)) as rude:
            for _ in range(2000):
                rude.send(b"rubbish")
                rude.send(wire.encode(wire.Goodbye(1)))
            assert isinstance(rude.ask(wire.GetStatus(1)), wire.State), "it was never dropped"
        works(own_daemon, client, cache, 1)
        assert 1 <= own_daemon.log.count("dropped a message") < 10
        assert own_daemon.log.count("\n") < 40


def test_a_peer_that_reads_nothing_holds_a_bounded_number_of_answers(own_daemon: Daemon) -> None:
    """SEC, LEK: also of the largest that it can make the daemon give; said once a second at most, not per answer."""
    fields = msgspec.structs.asdict(SPEC)
    with own_daemon.connect() as client, closing(Rude(own_daemon)) as rude:
        cache = client.attach(SPEC)
        rude.socket.set(zmq.RCVHWM, 10)
        session = rude.hello().session
        for number in range(64):
            spec = KVSpec(**(fields | {"model": "\N{GRINNING FACE}" * 1000 + str(number)}))
            rude.ask(wire.Attach(2, session, encode_spec(spec)))
        before = rss(own_daemon)
        for number in range(2000):
            rude.send(wire.encode(wire.GetStatus(number)))
        wait_until(lambda: "reply dropped" in own_daemon.log)
        works(own_daemon, client, cache, 1)
        assert rss(own_daemon) - before < 400 * MIB
        assert own_daemon.log.count("reply dropped") < 20


def test_more_connections_than_descriptors_end_no_daemon() -> None:
    """SEC, RST: libzmq aborts the process there; all are closed instead, and clients come again."""
    limit = 4 * SESSIONS_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not shutil.which("prlimit") or (hard != resource.RLIM_INFINITY and hard < limit + 1000):
        pytest.skip("prlimit is not installed, or this process may have too few descriptors itself")
    with Daemon() as daemon, ExitStack() as undo:
        daemon.terminate()
        serve = str(Path(sys.executable).with_name("kvstore"))
        daemon.start(["prlimit", f"--nofile=64:{limit}", serve])
        assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (limit, limit), "it takes what it may"
        if soft != resource.RLIM_INFINITY and soft < limit + 1000:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit + 1000, hard))
            undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with daemon.connect(deadline_ms=200) as client:
            cache = client.attach(SPEC)
            assert store(cache, chat(1))
            with ExitStack() as held, suppress(ConnectionError, FileNotFoundError):
                for _ in range(limit + 500):
                    raw = held.enter_context(socket.socket(socket.AF_UNIX))
                    raw.connect(daemon.address.removeprefix("ipc://"))
            wait_until(lambda: "out of descriptors" in daemon.log)
            wait_until(lambda: read(cache, chat(1)) == 64)
            assert daemon.process.poll() is None
            assert client.status()["client"]["reconnects"] == 0, "its session went on"
            with daemon.connect() as other:
                assert read(other.attach(SPEC), chat(1)) == 64
