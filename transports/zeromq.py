"""ZeroMQ ipc sockets behind the Network protocol. The only file that imports zmq.

Frames: ROUTER side `[routing id, body]`, DEALER side `[body]`. A socket file is guarded by a lock file beside it,
because libzmq takes over a path that another process is serving without a word.

What a peer can make the listener hold is bounded, per connection: frames by MESSAGE_NBYTES_MAX before they are read,
and their number both ways. Not bounded: the parts of one message, each within that size (libzmq counts whole messages).
Peers are of our own user, and the memory is free again when the connection ends.
"""

import fcntl
import logging
import math
import os
import resource
import select
import stat
import struct
import time
from functools import partial
from pathlib import Path

import zmq

from transports.errors import AddressInUse, AddressInvalid, PeerLost
from transports.messages import MESSAGE_NBYTES_MAX
from transports.network import Incoming, PeerId

log = logging.getLogger("kvstore")
QUEUE_MESSAGES_MAX = 1000  # of a client
RECEIVE_MESSAGES_MAX = 16  # of a listener, from one peer: each may have MESSAGE_NBYTES_MAX
SEND_MESSAGES_MAX = 256  # of a listener, to one peer who reads slowly
HANDSHAKE_MS = 5000
FULL_SHARE, ROOM_SHARE = 3 / 4, 5 / 8  # of the descriptors a process may have; watched processes take up to a half
RENEW_S = 2.0  # a client whom libzmq does not connect for so long begins anew
GOODBYE_MS = 100  # a closed endpoint waits so long for its last frames to leave
IPC_PATH_NBYTES_MAX = 107  # sun_path of a Unix socket, without its terminating zero


def ipc_path(address: str) -> Path:
    """Query. The socket file of an `ipc:///absolute/path` address; AddressInvalid on anything else."""
    scheme, _, path = address.partition("://")
    if scheme != "ipc" or not path.startswith("/"):
        raise AddressInvalid(f"address {address!r}: only ipc:///absolute/path is supported")
    if not path.isprintable():  # what is no UTF-8, zero bytes: neither libzmq nor a frame can carry it
        raise AddressInvalid(f"address {address!r}: a socket path must be printable text")
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
        self._address, self._path = address, path
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, MESSAGE_NBYTES_MAX)
        self._socket.set(zmq.SNDHWM, SEND_MESSAGES_MAX)
        self._socket.set(zmq.RCVHWM, RECEIVE_MESSAGES_MAX)
        self._socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._door = _Door(self._socket)
        self._peer = b""
        self._is_inside = False  # of a message of several parts
        self._times_full = 0
        try:
            self._bind()
        except zmq.ZMQError as exc:
            self._door.close()
            self._context.destroy(linger=0)
            os.close(self._lock_fd)
            raise AddressInvalid(f"address {address!r}: {exc.strerror or exc}") from exc
        self._epoll = select.epoll()
        for fd in (self._socket.get(zmq.FD), self._door.fd):
            self._epoll.register(int(fd), select.EPOLLIN)

    def _bind(self) -> None:
        previous = os.umask(0o177)
        try:
            self._socket.bind(self._address)
        finally:
            os.umask(previous)

    @property
    def fd(self) -> int:
        return self._epoll.fileno()

    def receive(self) -> Incoming | None:
        """Changes state. Frames of any other shape than [id, body] come as empty ones, one for each part."""
        self._mind_the_door()
        try:
            if not self._is_inside:
                self._peer = self._socket.recv(zmq.NOBLOCK)
            part = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        is_whole = not (part.more or self._is_inside)
        self._is_inside = part.more
        return Incoming(self._peer, part.buffer if is_whole else b"", partial(_sender_pid, part))

    def _mind_the_door(self) -> None:
        if self._door.is_too_full():
            self._socket.unbind(self._address)
            self._times_full += 1
            if self._times_full.bit_count() == 1:  # 1, 2, 4, ...: who floods the socket must not flood the log
                log.error("out of descriptors: all connections are closed, clients come again n=%d", self._times_full)
        elif self._door.has_room_again():
            self._bind()

    def send(self, peer: PeerId, frame: bytes | memoryview) -> bool:
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
        self._epoll.close()
        self._door.close()
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


def _descriptors_max() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if limit != resource.RLIM_INFINITY else 1 << 31


class _Door:
    """Whether more connections may come in. libzmq aborts the process when it has no descriptor for one that does.

    So the socket is unbound before, which closes all connections: those of clients come again. A new descriptor has
    the lowest number that is free: it says how many are in use.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED)
        self.fd = int(self._monitor.get(zmq.FD))
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._limit = _descriptors_max()
        self._is_open, self._is_shut = True, False  # neither: while libzmq still closes it
        self._take_events()  # none, but libzmq tells of new ones only who has looked

    def is_too_full(self) -> bool:
        """Changes state. True once, when the socket is to be unbound."""
        was_open = self._is_open
        while self._poll.poll(0):
            self._take_events()
        return was_open and not self._is_open

    def has_room_again(self) -> bool:
        """Changes state. True once, when the socket is to be bound again."""
        if not self._is_shut:
            return False
        number = os.dup(self.fd)
        os.close(number)
        self._is_open = number < self._limit * ROOM_SHARE
        self._is_shut = not self._is_open
        return self._is_open

    def close(self) -> None:
        """Changes state."""
        self._monitor.close(linger=0)

    def _take_events(self) -> None:
        while self._monitor.poll(0):
            kind, number = struct.unpack("=Hi", self._monitor.recv_multipart()[0])
            if kind == zmq.EVENT_ACCEPTED and number >= self._limit * FULL_SHARE:
                self._is_open = False
            elif kind == zmq.EVENT_CLOSED and not self._is_open:
                self._is_shut = True


class ZmqEndpoint:
    """A DEALER connected to a daemon. A frame is queued only while someone is connected (ZMQ_IMMEDIATE)."""

    def __init__(self, address: str) -> None:
        ipc_path(address)
        self._address = address
        self._context = zmq.Context()
        self._socket = self._connected()
        self._lost_s: float | None = None  # since when nobody is there

    def _connected(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.MAXMSGSIZE, MESSAGE_NBYTES_MAX)
        socket.set(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
        socket.set(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        socket.set(zmq.RECONNECT_IVL, 20)
        socket.set(zmq.RECONNECT_IVL_MAX, 250)
        self._timeout_ms = 0
        socket.set(zmq.RCVTIMEO, self._timeout_ms)
        socket.connect(self._address)
        return socket

    def send(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again as exc:
            self._mind_the_loss()
            raise PeerLost("nobody is connected, or the queue is full") from exc
        self._lost_s = None

    def _mind_the_loss(self) -> None:
        """libzmq comes again by itself, but not where it was sent what is no ZMTP: then only a new socket does."""
        now_s = time.monotonic()
        if self._lost_s is None:
            self._lost_s = now_s
        elif now_s - self._lost_s > RENEW_S:
            self._socket.close(linger=0)
            self._socket, self._lost_s = self._connected(), None

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
