"""The ZeroMQ shell over real ipc sockets: who may bind, what arrives, and what a peer cannot do."""

import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from tests.daemons import wait_until
from transports.errors import AddressInUse, AddressInvalid, PeerLost
from transports.messages import MESSAGE_NBYTES_MAX
from transports.network import Incoming
from transports.zeromq import IPC_PATH_NBYTES_MAX, QUEUE_MESSAGES_MAX, ZmqEndpoint, ZmqListener, ipc_path


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


def test_frames_of_another_shape_are_not_delivered(folder: Path) -> None:
    """SEC."""
    address = f"ipc://{folder}/s"
    with closing(ZmqListener(address)) as listener, closing(dealer(address)) as rude:
        rude.send_multipart([b"two", b"parts"])
        rude.send_multipart([b"", b"delimiter"])
        rude.send_multipart([b"x"] * 1000)
        rude.send(b"one")
        assert receive(listener).frame == b"one"
        assert listener.receive() is None


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
