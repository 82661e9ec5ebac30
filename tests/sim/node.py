"""The node: one daemon after another on one slab and one set of disks, each turn of its loop a step of its own."""

from __future__ import annotations

import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvstore.config import Config, DiskConfig, MemoryConfig
from kvstore.core.store import SESSIONS_MAX
from kvstore.errors import TierUnavailable
from kvstore.media.disk import Disk, DiskGeometry
from kvstore.media.index import IndexDamaged
from kvstore.media.memory import Geometry, Slab
from kvstore.media.paths import DiskPath
from kvstore.media.slabfile import SlabFile, Superblock
from kvstore.service.daemon import Daemon, _old_slab
from kvstore.service.liveness import SessionsFile
from kvstore.service.offenders import Offenders
from kvstore.service.service import Service
from tests.sim.engines import Ledger
from tests.sim.locks import SimLocks
from tests.sim.machine import Machine, NoGc, Rows, SimFile, SimIndex, SimMovers, SimOs
from transports import messages as wire
from transports.errors import PeerLost
from transports.messages import decode
from transports.network import Incoming

if TYPE_CHECKING:
    from tests.sim.process import Process

FIRST_PIDFD = 1_000_000
EPOCH = 10**18
EPOCH_STEP = 10**9


_pidfds = itertools.count()


class SimFolder:
    """A folder of the SSD tier: what is on it outlives every daemon."""

    def __init__(self, machine: Machine, number: int, num_paths: int, num_extents: int, extent_nbytes: int) -> None:
        self.path = Path(f"/sim/{number}")
        self.slab_path = self.path / "slab"
        self.superblock = Superblock(b"simulated set id", number, num_paths, extent_nbytes, num_extents)
        self.file = SimFile(machine)
        self.file.nbytes = self.superblock.file_nbytes
        self.rows = Rows(self.superblock.identity)

    def release(self) -> None: ...


class SimPath(DiskPath):
    """A DiskPath whose index is simulated."""

    def __init__(self, machine: Machine, folder: SimFolder) -> None:
        self.folder = folder  # type: ignore[assignment]
        self.slab = SlabFile(folder, folder.superblock, folder.superblock)  # type: ignore[arg-type]
        self.index_folder, self.map_nbytes, self.stale = folder.path / "index", 0, set()
        self.index = SimIndex(machine, folder.file, folder.rows)  # type: ignore[assignment]
        self.needs_rebuild = not self.index.slab
        self._machine = machine

    def replayed(self) -> None: ...

    def replace_index(self, reason: IndexDamaged) -> None:
        self.stale.clear()
        folder: Any = self.folder
        folder.rows = Rows()
        self.index = SimIndex(self._machine, folder.file, folder.rows)  # type: ignore[assignment]
        self.needs_rebuild = True


class SimListener:
    """The daemon's end of all connections. `allowance`: how many frames it hands over in this turn."""

    def __init__(self, node: Node) -> None:
        self.allowance = 0
        self.answered: Counter[tuple[bytes, int]] = Counter()  # by the message that is being served
        self.current: Process | None = None
        self.reply: wire.Reply | None = None  # to the message that is being served, if it has one by now
        self._node = node

    fd = -1

    def receive(self) -> Incoming | None:
        senders = [each for each in self._node.endpoints if each.outgoing]
        if not senders or not self.allowance:
            return None
        self.allowance -= 1
        sender = self._node.machine.rng.choice(senders)
        self.current = process = sender.process
        pid = process.pid if process.pid_visible else None
        return Incoming(sender.number.to_bytes(4, "little"), sender.outgoing.popleft(), lambda: pid)

    def send(self, peer: bytes, frame: bytes) -> bool:
        reply: Any = decode(frame)
        self.answered[peer, reply.request_id] += 1
        if not isinstance(reply, wire.Loaded):  # which may be somebody else's
            self.reply = reply
        return self._node.deliver(int.from_bytes(peer, "little"), frame)

    def close(self) -> None: ...


class SimWatched:
    """A pidfd, if there is one: a number of its own."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid
        self.pidfd = None if pid is None else FIRST_PIDFD + next(_pidfds)

    def close(self) -> None: ...


class Planned(Exception):
    """A bug that a handler is made to have."""


def _raise(*_: object) -> None:
    raise Planned


class SimDaemon(Daemon):
    """A Daemon that did not open anything itself."""

    def __init__(self, node: Node, slab: Slab, path: Path, epoch: int, disk: Disk) -> None:
        self._clock = node.machine.clock
        self._offenders = Offenders()
        self._watched: dict[int, Any] = {}
        self._pidfds, self._born_ms = set(), {}
        self._next_sweep_ms = self._clock.now_ms()
        self.listener = self._listener = SimListener(node)
        self._poll: Any = mock.Mock()
        self._sessions_file = file = node.sessions_file
        self.ledger = Ledger()
        self.raises_next = False
        self._node = node
        node.locks.runs(None)
        file.admit_from(epoch)
        strangers = [number for number in range(SESSIONS_MAX) if slab.epoch != epoch and file.is_held(number)]
        self.service = Service(
            *(node.config, slab, epoch, path, path.with_name("sessions"), self._clock, disk),
            self._watch,
            file.is_held,
            strangers,
            readers=file,
        )
        slab.epoch = epoch

    @property
    def movers(self) -> SimMovers:
        movers: Any = self.service.movers
        assert isinstance(movers, SimMovers)
        return movers

    def turn(self, messages: int, *, completions: bool, deaths: bool) -> None:
        """Changes state. One turn of the loop, in which it sees so much of what is ready."""
        self._node.locks.runs(None)
        self.listener.allowance = messages
        ready = {self.movers.fd} if completions else set()
        if deaths:
            dead = {each.pid for each in self._node.everybody if each.is_dead}
            ready |= {watched.pidfd for watched in self._watched.values() if watched.pid in dead}
        try:
            self._turn(ready, self._clock.now_ms())
        except Planned:
            self._node.kill()

    def _serve(self, incoming: Incoming) -> None:
        """HNG: a request has its answer before anything else happens, whatever becomes of the daemon."""
        message: Any = decode(incoming.frame)
        is_request = isinstance(message, wire.Request) and not isinstance(message, wire.Wait)
        if self.raises_next and is_request:
            self._node.machine.faults["handler raised"] += 1
            service: Any = self.service
            service._answer = _raise
        self.listener.answered.clear()
        self.listener.reply = None
        try:
            super()._serve(incoming)
        finally:
            count = self.listener.answered[incoming.peer, message.request_id] if is_request else 1
            assert count == 1, f"{type(message).__name__} was answered {count} times"
        self.ledger.note(message, self.listener.reply, self._clock.now_ms())

    def _end(self, session_id: int, *, quarantine: bool) -> None:
        super()._end(session_id, quarantine=quarantine)
        self.ledger.note_end(session_id)

    def _watch(self, session: Any, pid: int | None) -> None:
        assert self.listener.current is not None
        self._node.owner[session.id] = self.listener.current
        super()._watch(session, pid)


class Node:
    """What outlives a daemon, and the daemon while there is one."""

    def __init__(
        self,
        machine: Machine,
        folder: Path,
        config: Config,
        memory: Geometry,
        disk: Geometry,
        num_paths: int,
        note_completion: Callable[[], None],
    ) -> None:
        self.machine = machine
        self.config = config
        self.daemon: SimDaemon | None = None
        self.everybody: list[Process] = []  # alive, or dead and not yet known to be
        self.endpoints: list[SimEndpoint] = []
        self.owner: dict[int, Process] = {}  # of sessions
        self.locks = SimLocks(machine)
        self.sessions_file: SessionsFile
        self.drops_replies = 0  # so many of the next ones
        self._folder = folder
        self._memory = memory
        self._note = note_completion
        self._epoch = EPOCH
        self._last_endpoint = 0
        self._slab_path: Path | None = None
        self._slab: Slab | None = None
        self._os = SimOs(machine)
        self._geometry = DiskGeometry(*disk)
        self.folders = [
            SimFolder(machine, n, num_paths, -(-(disk.num_extents - n) // num_paths), disk.extent_nbytes)
            for n in range(num_paths)
        ]
        self._os.files = {folder.slab_path: folder.file for folder in self.folders}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Changes state. While the block runs, product code stands on this machine."""
        with ExitStack() as stack:

            def put(name: str, thing: object) -> None:
                stack.enter_context(mock.patch(f"kvstore.{name}", thing))

            put("service.service.Movers", partial(SimMovers, self.machine, self._note))
            put("service.service.gc", NoGc)
            put("service.service.trim_heap", lambda: None)
            put("service.daemon.gc", NoGc)
            put("service.daemon.Watched", SimWatched)
            put("service.link.time.sleep", lambda seconds: self._sleep(1000 * seconds))
            put("media.slabfile.os", self._os)
            self.sessions_file = stack.enter_context(self.locks.installed())
            yield

    def connect(self, process: Process) -> SimEndpoint:
        """Changes state."""
        self._last_endpoint += 1
        self.endpoints = [each for each in self.endpoints if each.outgoing or not each.is_dead]
        self.endpoints.append(SimEndpoint(self, process, self._last_endpoint))
        return self.endpoints[-1]

    # The daemon's life

    def start(self) -> None:
        """Changes state. A daemon, going on with the slab that is there if there is one."""
        assert self.daemon is None
        self._epoch += EPOCH_STEP
        path, slab = self._slab_path, None
        if path is not None:
            try:
                slab = _old_slab(path, self._memory, self._epoch)
            except (TierUnavailable, OSError):
                self.lose_memory()
        if slab is None:
            path = self._folder / f"slab-{self._epoch}"
            self._slab_path = path
            slab = Slab.create(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), self._memory, self._epoch)
        self._slab = slab
        self.daemon = SimDaemon(self, slab, path, self._epoch, self._open_disk())

    @property
    def slab_path(self) -> Path | None:
        """Query. Of the slab that is used now, or will be gone on with."""
        return self._slab_path

    def kill(self) -> None:
        """Changes state. SIGKILL: what it was at is left as it is."""
        daemon = self.daemon
        assert daemon is not None
        self.daemon = None
        daemon.movers.die()
        daemon.service.slab.close()
        self.locks.dies(None)
        self.owner.clear()
        for process in self.everybody:
            if process.is_watched_only:
                process.give_up(self.machine.clock.now_ms())
        for endpoint in self.endpoints:
            endpoint.disconnect(self.machine.rng)

    def lose_memory(self) -> None:
        """Changes state. The slab is gone; those who have it mapped see that a new daemon has another one."""
        assert self.daemon is None
        if self._slab_path is not None and self._slab is not None:
            self._slab.epoch = self._epoch
            self._slab_path.unlink()
        self._slab_path = self._slab = None

    def deliver(self, number: int, frame: bytes) -> bool:
        """Changes state. A reply; whether somebody is there to take it."""
        if self.drops_replies:
            self.drops_replies -= 1
            self.machine.faults["reply lost"] += 1
            return False
        for endpoint in self.endpoints:
            if endpoint.number == number and not endpoint.is_dead:
                endpoint.incoming.append((frame, self.machine.clock.now_ms()))
                return True
        return False

    def _open_disk(self) -> Disk:
        """The paths that can be opened; where none can, the operator puts new drives in, with what the old ones had."""
        paths: dict[int, DiskPath] = {}
        while not paths:
            for number, folder in enumerate(self.folders):
                try:
                    paths[number] = SimPath(self.machine, folder)
                except OSError:
                    self.machine.faults["path does not open"] += 1
            for folder in self.folders:
                folder.file.is_dead &= bool(paths)
        return Disk([folder.path for folder in self.folders], self._geometry, paths)

    def _sleep(self, ms: float) -> None:
        until_ms = self.machine.clock.now_ms() + ms
        self.machine.pause(lambda: self.machine.clock.now_ms() >= until_ms)


class SimEndpoint:
    """A process's end of its connection. ZeroMQ connects again by itself; who sends meanwhile finds nobody there."""

    def __init__(self, node: Node, process: Process, number: int) -> None:
        self.process, self.number = process, number
        self.outgoing: deque[bytes] = deque()
        self.incoming: deque[tuple[bytes, float]] = deque()  # and when it came
        self.num_sent = 0
        self.late_ms = 0.0  # by which the process went on later than it could have
        self.is_dead = False
        self._node = node

    def send(self, frame: bytes) -> None:
        if self._node.daemon is None or self.is_dead:
            raise PeerLost("nobody is there")
        self.num_sent += 1
        self.outgoing.append(frame)

    def receive(self, timeout_ms: float) -> bytes | None:
        clock = self._node.machine.clock
        until_ms = clock.now_ms() + timeout_ms
        if not self.incoming and timeout_ms > 0:
            self._node.machine.pause(lambda: bool(self.incoming) or clock.now_ms() >= until_ms)
            came_ms = min(until_ms, self.incoming[0][1] if self.incoming else until_ms)
            self.late_ms += max(0.0, clock.now_ms() - came_ms)
        return self.incoming.popleft()[0] if self.incoming else None

    def disconnect(self, rng: Any) -> None:
        """Changes state. The daemon is gone: with what it had not read, and perhaps with what it had answered."""
        self.outgoing.clear()
        if rng.random() < 0.5:
            self.incoming.clear()

    def close(self) -> None:
        self.is_dead = True


def config_for(session_share: float, checksums: bool, verify: bool, write: str, budget: int | None) -> Config:
    """Query. What the store's options are; sizes are the machine's."""
    kind: Any = write
    return Config(
        memory=MemoryConfig(capacity=1 << 30, session_share=session_share, checksums=checksums, verify=verify),
        disk=DiskConfig(path=("/sim/0",), capacity=1 << 30, write=kind, write_budget=budget),
    )
