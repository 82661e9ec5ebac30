"""A store in the caller's own process: an Endpoint whose other end is a function call."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

from kvstore.clock import MonotonicClock
from kvstore.config import Config
from kvstore.media.folder import require_memory
from kvstore.media.memory import Slab
from kvstore.service.daemon import require_capacity
from kvstore.service.service import Service, geometry_for
from transports.messages import Reply, decode, encode


class EmbeddedEndpoint:
    """Answers each frame before `send` returns. Its slab is anonymous memory, gone with the process."""

    def __init__(self, config: Config) -> None:
        """Changes state. ConfigInvalid without memory.capacity, TierUnavailable when it does not fit."""
        require_capacity(config)
        require_memory(geometry_for(config.memory.capacity).file_nbytes, None)
        clock = MonotonicClock()
        epoch = time.time_ns()
        fd = os.memfd_create("kvstore-slab", os.MFD_CLOEXEC)
        slab = Slab.create(fd, geometry_for(config.memory.capacity), epoch)
        self._service = Service(config, slab, epoch, Path(f"/proc/self/fd/{fd}"), None, clock)
        self._replies: deque[bytes] = deque()

    def send(self, frame: bytes) -> None:
        self._service.run_completions()
        self._service.dispatch(decode(frame), self._keep)
        self._service.run_completions()

    def receive(self, timeout_ms: float) -> bytes | None:
        return self._replies.popleft() if self._replies else None

    def close(self) -> None:
        self._service.close()

    def _keep(self, reply: Reply) -> None:
        self._replies.append(encode(reply))
