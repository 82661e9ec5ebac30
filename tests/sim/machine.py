"""What the real code stands on, simulated: tasks instead of threads, files that lose what was not synced."""

from __future__ import annotations

import errno
import mmap
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from kvstore.clock import SimClock
from kvstore.media.index import ROW, BlockRow, IndexDamaged
from kvstore.service.movers import Lane

T = TypeVar("T")
PAGE_NBYTES = 4096
SECTOR_NBYTES = 512
LATE_MS = 10.0


class Machine:
    """Time, tasks, and what is common to all that runs on them. `rng`: of the turn that is being taken."""

    def __init__(self, start_ms: float) -> None:
        self.clock = SimClock(start_ms)
        self.rng = Random(0)
        self.faults: Counter[str] = Counter()  # that took effect
        self.hub = getcurrent()

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Changes state. Let others go on. The task is taken up again once `until` holds; outside of one, nothing."""
        task = getcurrent()
        if isinstance(task, Task):
            task.until = until
            self.hub.switch()


class Task(greenlet):
    """Code that may be interrupted wherever it pauses."""

    def __init__(self, body: Callable[[], object]) -> None:
        super().__init__(body)
        self.until: Callable[[], bool] | None = None

    @property
    def is_ready(self) -> bool:
        """Query."""
        return not self.dead and (self.until is None or self.until())

    def go_on(self) -> None:
        """Changes state. Until it pauses again, or ends."""
        self.until = None
        self.switch()

    def kill(self) -> None:
        """Changes state. It runs no further than through its `finally`s."""
        if not self.dead:
            self.throw(GreenletExit)


# Threads


class SimMovers:
    """As Movers: jobs as tasks, as many of a lane at once as it has threads."""

    def __init__(self, machine: Machine, note: Callable[[], None]) -> None:
        """`note`: told of each completion."""
        self.is_closing = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.completions: deque[Callable[[], None]] = deque()
        self._machine = machine
        self._note = note
        self._waiting: dict[Lane, deque[Callable[[], None]]] = {lane: deque() for lane in Lane}
        self._running: dict[Lane, list[Task]] = {lane: [] for lane in Lane}  # in the order in which they began
        self._posted_ms = 0.0  # the first of the completions

    @property
    def tasks(self) -> list[Task]:
        """Query. That could go on now."""
        return [task for tasks in self._running.values() for task in tasks if task.is_ready]

    @property
    def is_idle(self) -> bool:
        """Query."""
        return not (any(self._running.values()) or self.completions)

    def submit(self, job: Callable[[], T], then: Callable[[T], None], lane: Lane = Lane.JOBS) -> None:
        self._waiting[lane].append(partial(self._run, job, then))
        self._begin(lane)

    def post(self, completion: Callable[[], None]) -> None:
        if not self.completions:
            self._posted_ms = self._machine.clock.now_ms()
        self.completions.append(completion)
        self._note()

    def run_completions(self) -> None:
        if self.completions and self._machine.clock.now_ms() >= self._posted_ms + LATE_MS:
            self._machine.faults["completions late"] += 1
        for _ in range(len(self.completions)):
            self.completions.popleft()()

    def go_on(self, task: Task) -> None:
        """Changes state."""
        task.go_on()
        for lane, tasks in self._running.items():
            if task.dead and task in tasks:
                self._machine.faults["completions out of order"] += task is not tasks[0]
                tasks.remove(task)
                self._begin(lane)

    def die(self) -> None:
        """Changes state. With their process."""
        self.is_closing = True
        for waiting in self._waiting.values():
            waiting.clear()
        for tasks in self._running.values():
            for task in tasks:
                task.kill()
            tasks.clear()
        self.completions.clear()
        os.close(self.fd)

    def _begin(self, lane: Lane) -> None:
        running, waiting = self._running[lane], self._waiting[lane]
        while waiting and len(running) < lane.num_threads:
            running.append(Task(waiting.popleft()))

    def _run(self, job: Callable[[], T], then: Callable[[T], None]) -> None:
        result = job()
        self.post(lambda: then(result))


class NoGc:
    """The collector is the simulation's own business: a frozen world would never be freed."""

    disable = enable = freeze = staticmethod(lambda: None)
    isenabled = staticmethod(lambda: False)


# The disk


class Disaster:
    """When the next calls of a kind fail: the n-th from now."""

    def __init__(self) -> None:
        self._in: dict[str, int] = {}

    def plan(self, what: str, calls: int) -> None:
        """Changes state."""
        self._in[what] = calls

    def strikes(self, what: str) -> bool:
        """Changes state. Whether this call is the one."""
        left = self._in.get(what, 0)
        if left:
            self._in[what] = left - 1
        return left == 1

    def end(self) -> None:
        """Changes state."""
        self._in.clear()


class SimFile:
    """A slab file's pages. What is not synced survives the death of a process, but not a loss of power, in full."""

    def __init__(self, machine: Machine) -> None:
        self.nbytes = 0
        self.disaster = Disaster()
        self.is_dead = False  # the device answers nothing but errors
        self._machine = machine
        self._pages: dict[int, bytes] = {}
        self._durable: dict[int, bytes] = {}  # of pages written since the last sync: what was there; in that order

    def read(self, offset: int, nbytes: int) -> bytes:
        """Query."""
        if nbytes == PAGE_NBYTES and not offset % PAGE_NBYTES:
            return self._pages.get(offset // PAGE_NBYTES, bytes(PAGE_NBYTES))
        first, last = offset // PAGE_NBYTES, (offset + nbytes - 1) // PAGE_NBYTES
        data = b"".join(self._pages.get(page, bytes(PAGE_NBYTES)) for page in range(first, last + 1))
        return data[offset - first * PAGE_NBYTES :][:nbytes]

    def write(self, offset: int, data: bytes) -> None:
        """Changes state."""
        while data:
            page, at = divmod(offset, PAGE_NBYTES)
            piece = data[: PAGE_NBYTES - at]
            old = self._pages.get(page, bytes(PAGE_NBYTES))
            self._durable.setdefault(page, old)
            self._pages[page] = old[:at] + piece + old[at + len(piece) :]
            offset, data = offset + len(piece), data[len(piece) :]

    def flip(self, offset: int, bit: int) -> None:
        """Changes state. On the medium, whatever was synced."""
        page, at = divmod(offset, PAGE_NBYTES)
        for pages in (self._pages, self._durable):
            if page in pages:
                data = bytearray(pages[page])
                data[at] ^= 1 << bit
                pages[page] = bytes(data)

    def sync(self) -> None:
        """Changes state. What was written before this is durable after it."""
        written = {page: self._pages[page] for page in self._durable}
        self._machine.pause()
        for page, data in written.items():
            if self._pages[page] is data:
                del self._durable[page]
            else:
                self._durable[page] = data

    def lose_power(self, rng: Random) -> None:
        """Changes state. Of each unsynced page its old content, its new one, or some sectors of each remains."""
        faults, was_lost = self._machine.faults, False
        for page, old in self._durable.items():
            new = self._pages[page]
            fate = rng.choice(("lost", "kept", "torn"))
            if fate == "lost":
                self._pages[page] = old
            elif fate == "torn":
                self._pages[page] = _torn(old, new, rng)
            faults[f"unsynced write {fate}"] += 1
            faults["unsynced writes reordered"] += was_lost and fate == "kept"
            was_lost |= fate == "lost"
        self._durable.clear()


def _torn(old: bytes, new: bytes, rng: Random) -> bytes:
    sources = (old, new)
    return b"".join(sources[rng.randrange(2)][at : at + SECTOR_NBYTES] for at in range(0, PAGE_NBYTES, SECTOR_NBYTES))


class SimOs:
    """`os` for kvstore.media.slabfile: descriptors of SimFiles by path."""

    def __init__(self, machine: Machine) -> None:
        self.files: dict[Path, SimFile] = {}
        self._machine = machine
        self._open: dict[int, SimFile] = {}
        self._last = 1000

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("O_"), f"os.{name} is not simulated"
        return getattr(os, name)

    def open(self, path: Path, flags: int) -> int:
        self._last += 1
        self._open[self._last] = self.files[path]
        return self._last

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)

    def fstat(self, fd: int) -> os.stat_result:
        return os.stat_result((0,) * 6 + (self._open[fd].nbytes,) + (0,) * 3)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        self._open[fd].nbytes = nbytes

    def posix_fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._machine.pause()
        self._fail(self._open[fd], "disk full", errno.ENOSPC)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        return self._open[fd].read(offset, nbytes)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self._open[fd].write(offset, data)
        return len(data)

    def preadv(self, fd: int, buffers: Sequence[memoryview | mmap.mmap], offset: int) -> int:
        file = self._open[fd]

        def move(view: memoryview, first: int, end: int) -> None:
            view[first:end] = file.read(offset + first, end - first)

        return self._transfer(file, buffers, "read", move)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | mmap.mmap], offset: int) -> int:
        file = self._open[fd]

        def move(view: memoryview, first: int, end: int) -> None:
            file.write(offset + first, view[first:end].tobytes())

        return self._transfer(file, buffers, "write", move)

    def _transfer(
        self,
        file: SimFile,
        buffers: Sequence[memoryview | mmap.mmap],
        verb: str,
        move: Callable[[memoryview, int, int], None],
    ) -> int:
        """In two pieces: between them anything may happen."""
        (buffer,) = buffers
        self._fail(file, f"{verb} fails", errno.EIO)
        with memoryview(buffer) as view:
            nbytes = self._short(file, f"short {verb}", view.nbytes)
            move(view, 0, nbytes // 2)
            self._machine.pause()
            move(view, nbytes // 2, nbytes)
        return nbytes

    def fdatasync(self, fd: int) -> None:
        file = self._open[fd]
        self._fail(file, "sync fails", errno.EIO)
        file.sync()

    def _fail(self, file: SimFile, what: str, code: int) -> None:
        if file.is_dead or file.disaster.strikes(what):
            self._machine.faults["path gone" if file.is_dead else what] += 1
            raise OSError(code, os.strerror(code))

    def _short(self, file: SimFile, what: str, nbytes: int) -> int:
        if not file.disaster.strikes(what):
            return nbytes
        self._machine.faults[what] += 1
        return nbytes // 2 // SECTOR_NBYTES * SECTOR_NBYTES


class Rows:
    """What an index holds on its medium."""

    def __init__(self, slab: bytes = b"") -> None:
        self.rows: dict[int, BlockRow] = {}
        self.facts: dict[str, int] = {}
        self.slab = slab


class SimIndex:
    """As kvstore.media.index.Index: transactions are whole and durable, or have not been; which, a death decides."""

    def __init__(self, machine: Machine, file: SimFile, held: Rows) -> None:
        self.held = held
        self._machine = machine
        self._file = file

    @property
    def slab(self) -> bytes:
        return self.held.slab

    @slab.setter
    def slab(self, identity: bytes) -> None:
        self.held.slab = identity

    def commit(self, puts: Sequence[BlockRow], deletes: Iterable[int], facts: Mapping[str, int]) -> None:
        self._machine.pause()
        if self._file.is_dead or self._file.disaster.strikes("commit fails"):
            self._machine.faults["commit fails"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._file.disaster.strikes("index full"):
            self._machine.faults["index full"] += 1
            raise OSError(errno.ENOSPC, "the index is full")
        for slot in deletes:
            self.held.rows.pop(slot, None)
        self.held.rows |= {row.slot: row for row in puts}
        self.held.facts |= facts
        self._machine.pause()

    def rows(self) -> Iterator[np.ndarray[Any, Any]]:
        if self._file.disaster.strikes("index damaged"):
            self._machine.faults["index damaged"] += 1
            raise IndexDamaged("as planned")
        packed = np.zeros(len(self.held.rows), ROW)
        for at, row in enumerate(self.held.rows.values()):
            packed[at] = (row.slot, row.number, row.last_used, row.block_hash, row.parent, row.is_short, bytes(7))
        yield packed

    def symbols(self, slot: int) -> bytes:
        row = self.held.rows.get(slot)
        return row.symbols if row is not None else b""

    def facts(self) -> dict[str, int]:
        return dict(self.held.facts)

    def close(self) -> None: ...
