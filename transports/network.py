"""The seam between shells and whatever carries their frames: ZeroMQ in production, a simulation in tests."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

PeerId = bytes


class Incoming(NamedTuple):
    """One frame from a peer, empty where it sent something else.

    `sender_pid()` is the sender's process where the transport can vouch for it, else None.
    """

    peer: PeerId
    frame: bytes | memoryview
    sender_pid: Callable[[], int | None]


class Listener(Protocol):
    """The daemon's end: many peers, one frame per message."""

    @property
    def fd(self) -> int:
        """A descriptor that turns readable when `receive` may have something (edge-triggered: drain it)."""

    def receive(self) -> Incoming | None:
        """Changes state. The next frame, or None when there is none right now. Never blocks."""

    def send(self, peer: PeerId, frame: bytes | memoryview) -> bool:
        """Changes state. Queue a frame; False when the peer is gone or its queue is full (the frame is dropped)."""

    def close(self) -> None: ...


class Endpoint(Protocol):
    """A client's end: one peer. Not thread safe; the client holds a lock."""

    def send(self, frame: bytes) -> None:
        """Changes state. Queue a frame. PeerLost when nobody is connected or the queue is full; never blocks."""

    def receive(self, timeout_ms: float) -> bytes | None:
        """Changes state. The next frame, or None after `timeout_ms`."""

    def close(self) -> None: ...
