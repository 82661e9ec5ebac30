"""Threads that carry out work the loop must not wait for, and the way back: completions, handed over one by one.

A job spends its time in calls that release the GIL (xxhash, fallocate, madvise, copies, disk I/O, LMDB), with a few
microseconds of Python between them: a thread that computes in Python delays the loop by a switch interval at a time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Lane(Enum):
    """Kinds of work that do not wait for each other, with the number of threads of each."""

    JOBS = "jobs", 2  # sums, memory
    READS = "reads", 4  # the queue depth of loads
    WRITES = "writes", 4
    INDEX = "index", 1  # one writer at a time is all that LMDB takes

    @property
    def num_threads(self) -> int:
        return self.value[1]


class Movers:
    """A few threads per lane, one queue of completions out. `fd` turns readable when completions wait."""

    def __init__(self) -> None:
        self._pools: dict[Lane, ThreadPoolExecutor] = {}  # made when they are first needed
        self._completions: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self.is_closing = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def submit(self, job: Callable[[], T], then: Callable[[T], None], lane: Lane = Lane.JOBS) -> None:
        """Changes state. Run `job` on a thread. `run_completions` calls `then` with its result, or raises its error."""
        if lane not in self._pools:
            self._pools[lane] = ThreadPoolExecutor(lane.num_threads, thread_name_prefix=f"kvstore-{lane.value[0]}")
        self._pools[lane].submit(job).add_done_callback(partial(self._post_result, then))

    def run_completions(self) -> None:
        """Changes state. Called by the owner of all state only."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self._is_woken = False
        for _ in range(len(self._completions)):  # what is posted meanwhile wakes the owner again
            self._completions.popleft()()

    def close(self) -> None:
        """Changes state. Waits for the jobs that run now; those that have not begun never will.

        A long job looks at `is_closing` between its parts.
        """
        self.is_closing = True
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools.values():
            pool.shutdown(wait=True)
        self._completions.clear()
        os.close(self.fd)

    def post(self, completion: Callable[[], None]) -> None:
        """Changes state. Have the owner of all state call this. For jobs that report more than once."""
        self._completions.append(completion)
        if not self._is_woken:  # one wake-up is enough for all that came since the owner last looked
            self._is_woken = True
            os.eventfd_write(self.fd, 1)

    def _post_result(self, then: Callable[[T], None], future: Future[T]) -> None:
        if not future.cancelled():
            self.post(lambda: then(future.result()))
