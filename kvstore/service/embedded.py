"""A store in the caller's own process: an Endpoint whose other end is a function call."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue

from kvstore.clock import Clock, MonotonicClock
from kvstore.config import Config
from kvstore.media.folder import require_memory
from kvstore.media.memory import Slab
from kvstore.service.daemon import open_disk, require_capacity
from kvstore.service.liveness import LocalReaders
from kvstore.service.service import Service, geometry_for
from transports.errors import PeerLost
from transports.messages import Reply, decode, encode

TURN_MS = 1000.0


def embedded_service(config: Config, clock: Clock, held: ExitStack) -> Service:
    """Changes state. A service on anonymous memory, to be driven by the caller; `held` gives it back."""
    require_capacity(config)
    require_memory(geometry_for(config.memory.capacity).file_nbytes, None)
    epoch = time.time_ns()
    disk = open_disk(config, held)
    fd = os.memfd_create("kvstore-slab", os.MFD_CLOEXEC)
    slab = Slab.create(fd, geometry_for(config.memory.capacity), epoch)
    readers = LocalReaders()
    held.callback(readers.close)
    path = Path(f"/proc/self/fd/{fd}")
    service = Service(config, slab, epoch, path, None, clock, disk, readers=readers)
    held.callback(service.close)
    return service


class EmbeddedEndpoint:
    """Answers most frames before `send` returns. Its slab is anonymous memory, gone with the process.

    A thread of its own takes the place of a daemon's loop for what the movers finish and what time brings.
    """

    def __init__(self, config: Config) -> None:
        """Changes state. ConfigInvalid without memory.capacity, TierUnavailable when it does not fit."""
        self._clock = MonotonicClock()
        self._replies: SimpleQueue[bytes] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_closing = False
        self._wakes_ms = 0.0  # when the thread looks again though nothing woke it
        with ExitStack() as held:
            self._service = embedded_service(config, self._clock, held)
            self._held = held.pop_all()
        self._thread = threading.Thread(target=self._run, name="kvstore-embedded", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._require_sound()
            message = decode(frame)
            self._service.run_completions()
            self._service.dispatch(message, self._keep)
            due_ms = self._service.next_deadline_ms()
            if due_ms is not None and due_ms < self._wakes_ms:
                self._wakes_ms = due_ms
                os.eventfd_write(self._service.movers.fd, 1)

    def receive(self, timeout_ms: float) -> bytes | None:
        try:
            return self._replies.get(timeout=timeout_ms / 1000) if timeout_ms > 0 else self._replies.get_nowait()
        except Empty:
            return None

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
        os.eventfd_write(self._service.movers.fd, 1)
        self._thread.join()
        self._held.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._service.movers.fd, select.POLLIN)
        while not self._is_closing:
            poll.poll(self._wait_ms())
            with self._lock:
                if self._is_closing or not self._service.is_sound:
                    return
                self._service.run_completions()

    def _require_sound(self) -> None:
        """PeerLost where the service was left in the midst of something: its state may contradict itself.

        As with a daemon that has ended, all that is asked from then on is a miss.
        """
        if not self._service.is_sound:
            raise PeerLost("the store in this process failed: see the error before this")

    def _wait_ms(self) -> float:
        with self._lock:
            now_ms, due_ms = self._clock.now_ms(), self._service.next_deadline_ms()
            wait_ms = TURN_MS if due_ms is None else min(TURN_MS, max(0.0, due_ms - now_ms))
            self._wakes_ms = now_ms + wait_ms
        return wait_ms

    def _keep(self, reply: Reply) -> None:
        self._replies.put(encode(reply))
