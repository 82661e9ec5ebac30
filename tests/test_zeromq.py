"""The ZeroMQ shell over real ipc sockets: who may bind, what arrives, and what a peer cannot do."""

import os
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from tests.daemons import wait_until
from transports import zeromq
from transports.errors import AddressInUse, AddressInvalid, PeerLost
from transports.messages import MESSAGE_NBYTES_MAX
from transports.network import Incoming
from transports.zeromq import (
    IPC_PATH_NBYTES_MAX,
    QUEUE_MESSAGES_MAX,
    RECEIVE_MESSAGES_MAX,
    ZmqEndpoint,
    ZmqListener,
    ipc_path,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        yield Path(name)


def receive(listener: ZmqListener) -> Incoming:
    found: list[Incoming] = []
    wait_until(lambda: found.append(got) or True if (got := listener.receive()) else False)
    return found[0]


def sends(endpoint: ZmqEndpoint, frame: bytes) -> bool:
    try:
        endpoint.send(frame)
    except PeerLost:
        return False
    return True


def send(endpoint: ZmqEndpoint, frame: bytes) -> None:
    """Changes state. Once somebody is connected."""
    wait_until(lambda: sends(endpoint, frame))


def dealer(address: str) -> "zmq.Socket[bytes]":
    """A peer of the protocol that keeps none of its rules."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.connect(address)
    return socket


@pytest.mark.parametrize(
    "address", ["", "ipc://", "ipc://relative", "ipc:/x", "tcp://127.0.0.1:5555", "inproc://x", "/run/x.sock"]
)
def test_only_ipc_with_an_absolute_path_is_an_address(address: str) -> None:
    """SEC: nothing listens on a network by accident."""
    with pytest.raises(AddressInvalid, match="only ipc:///absolute/path"):
        ZmqListener(address)
    with pytest.raises(AddressInvalid):
        ZmqEndpoint(address)


def test_the_longest_path_works_and_a_longer_one_is_refused(folder: Path) -> None:
    """CFG."""
    longest = str(folder / "x").ljust(IPC_PATH_NBYTES_MAX, "x")
    with closing(ZmqListener(f"ipc://{longest}")), closing(ZmqEndpoint(f"ipc://{longest}")) as endpoint:
        send(endpoint, b"question")
    with pytest.raises(AddressInvalid, match="at most 107 bytes"):
        ipc_path(f"ipc://{longest}x")


@pytest.mark.parametrize("odd", ["\udcff", "\0", "\n"])
def test_a_path_that_is_no_text_is_refused(folder: Path, odd: str) -> None:
    """CFG: a name of a file that is no UTF-8 would break the first frame that tells it."""
    for kind in (ZmqListener, ZmqEndpoint):
        with pytest.raises(AddressInvalid, match="printable text"):
            kind(f"ipc://{folder}/{odd}")
    assert not list(folder.iterdir())


def test_frames_go_both_ways_and_name_the_sender(folder: Path) -> None:
    """SEC: the pid is the kernel's word."""
    address = f"ipc://{folder}/s"
    with closing(ZmqListener(address)) as listener, closing(ZmqEndpoint(address)) as endpoint:
        send(endpoint, b"question")
        incoming = receive(listener)
        assert incoming.frame == b"question"
        assert incoming.sender_pid() == os.getpid()
        assert listener.receive() is None
        assert endpoint.receive(0.0) is None
        assert listener.send(incoming.peer, b"answer")
        assert endpoint.receive(5000) == b"answer"


def test_a_reply_to_a_peer_that_is_gone_is_dropped(folder: Path) -> None:
    """HNG."""
    address = f"ipc://{folder}/s"
    with closing(ZmqListener(address)) as listener:
        with closing(ZmqEndpoint(address)) as endpoint:
            send(endpoint, b"question")
            peer = receive(listener).peer
        wait_until(lambda: listener.receive() is None and not listener.send(peer, b"late"))
        assert not listener.send(b"nobody", b"never")


def test_a_peer_that_does_not_read_is_dropped_and_not_waited_for(folder: Path) -> None:
    """LEK: L#2017, what is queued for a slow reader is bounded."""
    address = f"ipc://{folder}/s"
    with closing(ZmqListener(address)) as listener, closing(ZmqEndpoint(address)) as endpoint:
        send(endpoint, b"question")
        peer = receive(listener).peer
        sent = 0
        while listener.send(peer, bytes(4096)):
            sent += 1
            assert sent < 10 * QUEUE_MESSAGES_MAX


def test_two_listeners_cannot_share_a_path(folder: Path) -> None:
    """CFG: libzmq alone would take the path over without a word."""
    address = f"ipc://{folder}/s"
    with closing(ZmqListener(address)) as listener, closing(ZmqEndpoint(address)) as endpoint:
        with pytest.raises(AddressInUse, match=f"served by another daemon \\(pid {os.getpid()}\\)"):
            ZmqListener(address)
        send(endpoint, b"still served")
        assert receive(listener).frame == b"still served"


def test_a_path_that_a_dead_listener_left_is_taken_over(folder: Path) -> None:
    """RST."""
    address = f"ipc://{folder}/s"
    child = os.fork()
    if not child:
        ZmqListener(address)
        time.sleep(60)
        os._exit(1)
    wait_until((folder / "s").exists)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with closing(ZmqListener(address)), closing(ZmqEndpoint(address)) as endpoint:
        send(endpoint, b"question")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_path_that_is_something_else_is_left_alone(folder: Path, kind: str) -> None:
    """CFG."""
    path = folder / "s"
    if kind == "file":
        path.write_text("precious")
    else:
        path.mkdir()
    with pytest.raises(AddressInvalid, match="exists and is not a socket"):
        ZmqListener(f"ipc://{path}")
    assert path.is_dir() if kind == "folder" else path.read_text() == "precious"


def test_socket_and_folder_are_private_and_the_socket_goes(folder: Path) -> None:
    """SEC."""
    path = folder / "new" / "s"
    with closing(ZmqListener(f"ipc://{path}")):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((path.parent / "s.lock").stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["s.lock"]


def test_nobody_connected_is_told_at_once(folder: Path) -> None:
    """HNG: a frame for nobody is not kept for later."""
    with closing(ZmqEndpoint(f"ipc://{folder}/s")) as endpoint:
        began = time.monotonic()
        with pytest.raises(PeerLost):
            endpoint.send(b"question")
        assert time.monotonic() - began < 0.1


def test_messages_of_another_shape_come_as_empty_frames(folder: Path) -> None:
    """SEC, HNG: one for each part, so that whoever counts or stops to do something else can, also amid them."""
    address = f"ipc://{folder}/s"
    with closing(ZmqListener(address)) as listener, closing(dealer(address)) as rude:
        rude.send_multipart([b"two", b"parts"])
        rude.send_multipart([b"", b"delimiter"])
        rude.send_multipart([b"x"] * 1000)
        rude.send(b"one")
        arrived = [receive(listener) for _ in range(1005)]
        assert [each.frame for each in arrived] == [b""] * 1004 + [b"one"]
        assert len({each.peer for each in arrived}) == 1
        assert arrived[0].sender_pid() == os.getpid()
        assert listener.receive() is None


def test_what_a_peer_has_sent_and_nobody_read_is_bounded(folder: Path) -> None:
    """SEC, LEK: a frame may be large, so there are few of them."""
    address = f"ipc://{folder}/s"
    with closing(ZmqListener(address)) as listener, closing(dealer(address)) as rude:
        rude.set(zmq.SNDTIMEO, 100)
        rude.set(zmq.SNDHWM, 1)
        rude.send(b"first")
        assert receive(listener).frame == b"first"
        before = psutil.Process().memory_info().rss
        frame, sent = bytes(MESSAGE_NBYTES_MAX // 8), 0
        with suppress(zmq.Again):
            while sent < 20 * RECEIVE_MESSAGES_MAX:
                rude.send(frame, copy=False)
                sent += 1
        assert sent < 3 * RECEIVE_MESSAGES_MAX
        assert psutil.Process().memory_info().rss - before < 3 * RECEIVE_MESSAGES_MAX * len(frame)
        assert all(len(receive(listener).frame) == len(frame) for _ in range(sent))


def test_every_socket_bounds_what_it_reads(folder: Path) -> None:
    """SEC: on both sides; libzmq's own answer is no bound."""
    address = f"ipc://{folder}/s"
    with closing(ZmqListener(address)) as listener, closing(ZmqEndpoint(address)) as endpoint:
        for one in (listener._socket, endpoint._socket):
            assert one.get(zmq.MAXMSGSIZE) == MESSAGE_NBYTES_MAX
            assert 0 < int(one.get(zmq.RCVHWM)) <= QUEUE_MESSAGES_MAX
            assert 0 < int(one.get(zmq.SNDHWM)) <= QUEUE_MESSAGES_MAX


def test_an_answer_above_the_bound_costs_a_client_no_memory(folder: Path) -> None:
    """SEC, RST: whoever listens there may be no daemon of ours. libzmq gives such an address up for good; we do not."""
    address = f"ipc://{folder}/s"
    context = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        router.set(zmq.LINGER, 0)
        router.bind(address)
        with closing(ZmqEndpoint(address)) as endpoint:
            send(endpoint, b"question")
            peer, _ = router.recv_multipart()
            answer, before = bytes(MESSAGE_NBYTES_MAX + 1), psutil.Process().memory_info().rss
            router.send_multipart([peer, answer], copy=False)
            wait_until(lambda: not sends(endpoint, b"more"))
            assert endpoint.receive(0) is None
            assert psutil.Process().memory_info().rss - before < MESSAGE_NBYTES_MAX // 2
            send(endpoint, b"again")
            assert router.recv_multipart()[-1] in (b"more", b"again")
    finally:
        context.destroy(linger=0)


def test_more_connections_than_descriptors_are_closed_and_clients_come_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SEC, RST: libzmq would abort the process."""
    address, used = f"ipc://{folder}/s", max(int(number) for number in os.listdir("/proc/self/fd"))
    monkeypatch.setattr(zeromq, "_descriptors_max", lambda: 2 * (used + 50))
    with ExitStack() as held:
        listener = held.enter_context(closing(ZmqListener(address)))
        client = held.enter_context(closing(ZmqEndpoint(address)))
        for _ in range(3):
            with ExitStack() as flood, suppress(ConnectionError, FileNotFoundError):
                while True:
                    raw = flood.enter_context(socket.socket(socket.AF_UNIX))
                    raw.connect(str(folder / "s"))  # blocks where the backlog is full; a timeout would be EAGAIN
                    listener.receive()
            wait_until(lambda: sends(client, b"question") is not None and listener.receive())
    said = [record.getMessage()[-3:] for record in caplog.records if "descriptors" in record.message]
    assert said in (["n=1", "n=2"], ["n=1", "n=2", "n=4"]), "not each time"


def test_a_frame_above_the_bound_costs_its_sender_the_connection(folder: Path) -> None:
    """SEC: it is never held in memory, and others are served on."""
    address = f"ipc://{folder}/s"
    with (
        closing(ZmqListener(address)) as listener,
        closing(dealer(address)) as rude,
        closing(ZmqEndpoint(address)) as polite,
    ):
        send(polite, b"first")
        assert receive(listener).frame == b"first"
        rude.send(bytes(MESSAGE_NBYTES_MAX + 1))
        polite.send(bytes(MESSAGE_NBYTES_MAX))
        assert len(receive(listener).frame) == MESSAGE_NBYTES_MAX
        polite.send(b"next")
        assert receive(listener).frame == b"next"
        assert listener.receive() is None


def test_an_endpoint_finds_the_listener_that_comes_back(folder: Path) -> None:
    """RST."""
    address = f"ipc://{folder}/s"
    with closing(ZmqEndpoint(address)) as endpoint:
        for _ in range(2):
            with closing(ZmqListener(address)) as listener:
                send(endpoint, b"question")
                assert listener.send(receive(listener).peer, b"answer")
                assert endpoint.receive(5000) == b"answer"
            wait_until(lambda: not sends(endpoint, b"into the void"))
