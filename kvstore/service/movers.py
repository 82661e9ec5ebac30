"""Threads that carry out work the loop must not wait for, and the way back: completions, handed over one by one.

A job may call only what releases the GIL (xxhash, fallocate, madvise, copies): a thread that runs Python code delays
the loop by its whole switch interval.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Movers:
    """A few threads, one queue in, one queue of completions out. `fd` turns readable when completions wait."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvstore-mover")
        self._completions: deque[Callable[[], None]] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def submit(self, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Changes state. Run `job` on a thread;

        later `run_completions` calls `then` with its result, or raises its error.
        """
        self._pool.submit(job).add_done_callback(partial(self._post, then))

    def run_completions(self) -> None:
        """Changes state. Called by the owner of all state only."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self._completions:
            self._completions.popleft()()

    def close(self) -> None:
        """Changes state. Waits for the jobs that run now; those that have not begun never will."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._completions.clear()
        os.close(self.fd)

    def _post(self, then: Callable[[T], None], future: Future[T]) -> None:
        if not future.cancelled():
            self._completions.append(lambda: then(future.result()))
            os.eventfd_write(self.fd, 1)
