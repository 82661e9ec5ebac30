"""Threads that carry out work the loop must not wait for, and the way back: completions, handed over one by one.

A job spends its time in calls that release the GIL (xxhash, fallocate, madvise, copies), with a few microseconds of
Python between them: a thread that computes in Python delays the loop by a switch interval at a time.
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
        self.is_closing = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def submit(self, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Changes state. Run `job` on a thread. `run_completions` calls `then` with its result, or raises its error."""
        self._pool.submit(job).add_done_callback(partial(self._post_result, then))

    def run_completions(self) -> None:
        """Changes state. Called by the owner of all state only."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self._completions:
            self._completions.popleft()()

    def close(self) -> None:
        """Changes state. Waits for the jobs that run now; those that have not begun never will.

        A long job looks at `is_closing` between its parts.
        """
        self.is_closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._completions.clear()
        os.close(self.fd)

    def post(self, completion: Callable[[], None]) -> None:
        """Changes state. Have the owner of all state call this. For jobs that report more than once."""
        self._completions.append(completion)
        os.eventfd_write(self.fd, 1)

    def _post_result(self, then: Callable[[T], None], future: Future[T]) -> None:
        if not future.cancelled():
            self.post(lambda: then(future.result()))
