"""ZeroMQ ipc sockets behind the Network protocol. The only file that imports zmq.

Frames: ROUTER side `[routing id, body]`, DEALER side `[body]`. A socket file is guarded by a lock file beside it,
because libzmq takes over a path that another process is serving without a word.
"""

import fcntl
import math
import os
import stat
from functools import partial
from pathlib import Path

import zmq

from transports.errors import AddressInUse, AddressInvalid, PeerLost
from transports.messages import MESSAGE_NBYTES_MAX
from transports.network import Incoming, PeerId

QUEUE_MESSAGES_MAX = 1000
GOODBYE_MS = 100  # a closed endpoint waits so long for its last frames to leave
IPC_PATH_NBYTES_MAX = 107  # sun_path of a Unix socket, without its terminating zero


def ipc_path(address: str) -> Path:
    """Query. The socket file of an `ipc:///absolute/path` address; AddressInvalid on anything else."""
    scheme, _, path = address.partition("://")
    if scheme != "ipc" or not path.startswith("/"):
        raise AddressInvalid(f"address {address!r}: only ipc:///absolute/path is supported")
    if len(os.fsencode(path)) > IPC_PATH_NBYTES_MAX:
        raise AddressInvalid(f"address {address!r}: a socket path may have at most {IPC_PATH_NBYTES_MAX} bytes")
    return Path(path)


def _sender_pid(frame: zmq.Frame) -> int | None:
    """The kernel's word (SO_PEERCRED) on who sent a frame: libzmq gives it as `...:uid:gid:pid` for ipc."""
    try:
        return int(str(frame.get("Peer-Address")).rsplit(":", 1)[-1]) or None
    except (zmq.ZMQError, ValueError):
        return None


class ZmqListener:
    """A ROUTER bound to an ipc path that no other process serves."""

    def __init__(self, address: str) -> None:
        """AddressInvalid or AddressInUse, with a text for the operator; OSError when the folder cannot be made."""
        path = ipc_path(address)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = _lock_beside(path, address)
        self._path = path
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, MESSAGE_NBYTES_MAX)
        self._socket.set(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
        self._socket.set(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        previous = os.umask(0o177)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as exc:
            self._context.destroy(linger=0)
            os.close(self._lock_fd)
            raise AddressInvalid(f"address {address!r}: {exc.strerror or exc}") from exc
        finally:
            os.umask(previous)

    @property
    def fd(self) -> int:
        return int(self._socket.get(zmq.FD))

    def receive(self) -> Incoming | None:
        """Changes state. Frames of any other shape than [id, body] are dropped here."""
        while True:
            try:
                peer = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            body = self._socket.recv(zmq.NOBLOCK, copy=False)
            if not body.more:
                return Incoming(peer, body.bytes, partial(_sender_pid, body))
            while self._socket.get(zmq.RCVMORE):
                self._socket.recv(zmq.NOBLOCK)

    def send(self, peer: PeerId, frame: bytes) -> bool:
        try:
            self._socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            if exc.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self) -> None:
        """Changes state. The lock file stays: unlinking it would let two daemons lock two inodes of one name."""
        self._context.destroy(linger=0)
        self._path.unlink(missing_ok=True)
        os.close(self._lock_fd)


def _lock_beside(path: Path, address: str) -> int:
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise AddressInUse(f"address {address!r} is served by another daemon (pid {holder})") from exc
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        os.close(fd)
        raise AddressInvalid(f"address {address!r}: {path} exists and is not a socket")
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())
    return fd


class ZmqEndpoint:
    """A DEALER connected to a daemon. A frame is queued only while someone is connected (ZMQ_IMMEDIATE)."""

    def __init__(self, address: str) -> None:
        ipc_path(address)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.set(zmq.MAXMSGSIZE, MESSAGE_NBYTES_MAX)
        self._socket.set(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
        self._socket.set(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        self._socket.set(zmq.RECONNECT_IVL, 20)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 250)
        self._timeout_ms = 0
        self._socket.set(zmq.RCVTIMEO, self._timeout_ms)
        self._socket.connect(address)

    def send(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again as exc:
            raise PeerLost("nobody is connected, or the queue is full") from exc

    def receive(self, timeout_ms: float) -> bytes | None:
        wanted_ms = math.ceil(timeout_ms)
        if wanted_ms != self._timeout_ms:
            self._socket.set(zmq.RCVTIMEO, wanted_ms)
            self._timeout_ms = wanted_ms
        try:
            frame = self._socket.recv()
        except zmq.Again:
            return None
        while self._socket.get(zmq.RCVMORE):  # our protocol has one frame: whatever follows is not ours
            self._socket.recv(zmq.NOBLOCK)
        return frame

    def close(self) -> None:
        self._context.destroy(linger=GOODBYE_MS)
