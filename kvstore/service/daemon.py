"""The daemon process: one loop that owns all state, woken by clients, movers, deaths, time and signals."""

from __future__ import annotations

import gc
import logging
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from kvstore.clock import Clock, MonotonicClock
from kvstore.config import CAPACITY_NBYTES_MIN, Config
from kvstore.core.leases import Session
from kvstore.core.store import SESSIONS_MAX
from kvstore.errors import ConfigInvalid, TierUnavailable
from kvstore.media.disk import Disk
from kvstore.media.folder import SlabFolder, default_folder, require_memory
from kvstore.media.legacy import are_sound
from kvstore.media.memory import EPOCH_OFFSET, Geometry, Slab
from kvstore.service.liveness import SessionsFile, Watched
from kvstore.service.offenders import MALFORMED_MAX, Offenders
from kvstore.service.service import Service, geometry_for
from transports.errors import AddressInUse, AddressInvalid, RemoteProtocolError
from transports.messages import Reply, decode, encode
from transports.network import Incoming, Listener
from transports.zeromq import ZmqListener

log = logging.getLogger("kvstore")
SWEEP_MS = 1000.0
STRANGERS_MS = 50.0  # while next to nothing may be reused because of them
CONFIRM_MS = 5000.0  # a new session must hold its byte by then
SECOND_NS, YEAR_NS = 10**9, 366 * 86400 * 10**9
DESCRIPTORS_MAX = 65536
MESSAGES_PER_TURN_MAX, MESSAGES_MS_MAX = 256, 5.0  # then completions and deaths have their turn


class Daemon:
    """Everything a `kvstore serve` process holds. `close` gives it all back."""

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        """Changes state. ConfigInvalid or TierUnavailable, one line for the operator, and nothing is left behind."""
        require_capacity(config)
        self._clock = clock or MonotonicClock()
        self._offenders = Offenders()
        self._watched: dict[int, Watched] = {}
        self._pidfds: set[int] = set()
        self._born_ms: dict[int, float] = {}
        self._next_sweep_ms = self._clock.now_ms()
        with ExitStack() as held:  # closed in reverse order, here if anything below fails, else by close()
            self._listener: Listener = _listen(config.address)
            held.callback(self._listener.close)
            self._open_slab(config, held)
            self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            held.callback(os.close, self._stop_fd)
            self._held = held.pop_all()
        self._poll = select.poll()
        for fd in (self._listener.fd, self.service.movers.fd, self._stop_fd):
            self._poll.register(fd, select.POLLIN)

    def _open_slab(self, config: Config, held: ExitStack) -> None:
        path = config.memory.path
        folder = SlabFolder(Path(path).absolute() if path else default_folder(config.address))
        held.callback(folder.leave if config.memory.keep else partial(_give_up, folder))
        try:
            self._make_service(config, folder, held)
        except OSError as exc:
            raise TierUnavailable(f"memory.path={folder.path}: {exc.strerror or exc}") from exc

    def _make_service(self, config: Config, folder: SlabFolder, held: ExitStack) -> None:
        self._sessions_file = SessionsFile(folder.sessions_path, SESSIONS_MAX)
        held.callback(self._sessions_file.close)
        epoch = _epoch_after(folder.old_slab())
        disk = open_disk(config, held)
        with ExitStack() as undo:
            slab, self.slab_path = _take_slab(folder, geometry_for(config.memory.capacity), epoch, undo)
            self._serve_slab(config, slab, epoch, folder, disk, held)
            undo.pop_all()

    def _serve_slab(
        self, config: Config, slab: Slab, epoch: int, folder: SlabFolder, disk: Disk | None, held: ExitStack
    ) -> None:
        """Sessions of an earlier daemon matter only where its slab lives on: to any other they hold nothing."""
        is_new = slab.epoch == epoch
        self._sessions_file.admit_from(epoch)
        self.service = Service(
            config,
            slab,
            epoch,
            self.slab_path,
            folder.sessions_path,
            self._clock,
            disk,
            self._watch,
            self._sessions_file.is_held,
            [number for number in range(SESSIONS_MAX) if not is_new and self._sessions_file.is_held(number)],
            self._sessions_file,
        )
        held.callback(self.service.close)
        slab.epoch = epoch  # last: from now on clients of the earlier daemon see that there is a new one

    def run(self) -> None:
        """Changes state. Serve until `stop`."""
        while True:
            ready = {fd for fd, _ in self._poll.poll(self._wait_ms())}
            if self._stop_fd in ready:
                return
            began_ms = self._clock.now_ms()
            is_whole = False
            try:
                self._turn(ready, began_ms)
                is_whole = True
            finally:
                self.service.is_sound &= is_whole  # else a bug of ours: `close` makes nothing more of this state
            self.service.note_turn(self._clock.now_ms() - began_ms)

    def _turn(self, ready: set[int], now_ms: float) -> None:
        due_ms = self.service.next_deadline_ms()
        if self.service.movers.fd in ready or (due_ms is not None and now_ms >= due_ms):
            self.service.run_completions()
        if not ready.isdisjoint(self._pidfds):
            self._bury(ready)
        if now_ms >= self._next_sweep_ms:
            self._sweep(now_ms)
            self._next_sweep_ms = now_ms + (STRANGERS_MS if self.service.store.strangers else SWEEP_MS)
        self._serve_messages()  # last: completions would take back the wake-up, and their answers the listener's signal

    def stop(self) -> None:
        """Changes state. Safe in a signal handler and from other threads."""
        os.eventfd_write(self._stop_fd, 1)

    def close(self) -> None:
        """Changes state. Clients see a daemon that is gone; the arrays they hold stay readable."""
        for watched in self._watched.values():
            watched.close()
        self._held.close()

    def _wait_ms(self) -> float:
        due_ms = self._next_sweep_ms
        deadline_ms = self.service.next_deadline_ms()
        if deadline_ms is not None:
            due_ms = min(due_ms, deadline_ms)
        return max(0.0, due_ms - self._clock.now_ms())

    def _serve_messages(self) -> None:
        until_ms = self._clock.now_ms() + MESSAGES_MS_MAX  # a single client that asks without pause fills any number
        for _ in range(MESSAGES_PER_TURN_MAX):
            incoming = self._listener.receive()
            if incoming is None:
                return
            self._serve(incoming)
            if self._clock.now_ms() >= until_ms:
                break
        self._wake_again()

    def _serve(self, incoming: Incoming) -> None:
        if self._offenders.is_dropped(incoming.peer):
            return
        try:
            message = decode(incoming.frame)
            if isinstance(message, Reply):
                raise RemoteProtocolError(f"a client sent {type(message).__name__}")
        except RemoteProtocolError as exc:
            self._note_offence(incoming, exc)
            return
        self._offenders.speaks(incoming.peer)

        def send(reply: Reply) -> None:
            if not self._listener.send(incoming.peer, encode(reply)):
                self._say(incoming, "reply dropped: peer is gone or does not read")
            os.sched_yield()  # the transport's thread takes the answer away before the loop goes on

        self.service.dispatch(message, send, incoming.sender_pid)

    def _note_offence(self, incoming: Incoming, exc: RemoteProtocolError) -> None:
        count = self._offenders.offends(incoming.peer)
        if count == 1:
            self._say(incoming, "dropped a message", f": {exc}")
        elif count == MALFORMED_MAX:
            self._say(incoming, "a peer sends no messages", ": nothing of that connection is read any more")

    def _say(self, incoming: Incoming, what: str, more: str = "") -> None:
        if self._offenders.may_be_told(what, self._clock.now_ms()):
            log.warning("%s%s pid=%s", what, more, incoming.sender_pid())

    def _wake_again(self) -> None:
        """The listener's descriptor is edge-triggered: what is still queued would not wake the next poll."""
        os.eventfd_write(self.service.movers.fd, 1)

    # Sessions and their processes

    def _watch(self, session: Session, pid: int | None) -> None:
        watched = Watched(pid)
        self._watched[session.id] = watched
        self._born_ms[session.id] = self._clock.now_ms()
        if watched.pidfd is not None:
            self._poll.register(watched.pidfd, select.POLLIN)
            self._pidfds.add(watched.pidfd)
        log.info("session opened id=%d pid=%s", session.id, pid)

    def _bury(self, ready: set[int]) -> None:
        """Sessions whose process has ended: the kernel says so, nothing of theirs can land any more."""
        for session_id, watched in list(self._watched.items()):
            if watched.pidfd in ready:
                self._end(session_id, quarantine=False)

    def _sweep(self, now_ms: float) -> None:
        """Sessions that said goodbye, and those whose lock is gone.

        A process that we watch and that lives keeps what it holds, whatever became of its lock: it could have lost it
        by closing a descriptor of the sessions file, and still be reading.
        """
        open_sessions = {session.id: session for session in self.service.store.sessions}
        for session_id, watched in list(self._watched.items()):
            session = open_sessions.get(session_id)
            if session is None:
                self._forget(session_id)
            elif self._is_gone(session, watched, now_ms):
                self._end(session_id, quarantine=True)
        for number in self.service.store.strangers:
            if not self._sessions_file.is_held(number):
                self.service.store.account_for(number, now_ms)
        if gc.isenabled():  # it is not while an index is read: nothing may walk that growing tree
            gc.collect(1)
            gc.freeze()  # nodes hold no garbage in cycles: a full collection of a million of them would stop the loop

    def _is_gone(self, session: Session, watched: Watched, now_ms: float) -> bool:
        if now_ms - self._born_ms[session.id] <= CONFIRM_MS or self._sessions_file.is_held(session.number):
            return False
        return watched.pidfd is None or not session.holds_anything

    def _end(self, session_id: int, *, quarantine: bool) -> None:
        """A session whose process is gone. One that had said goodbye is closed already: nothing happens to it."""
        self.service.store.close_session(session_id, self._clock.now_ms(), died=True, quarantine=quarantine)
        self._forget(session_id)
        log.info("session ended id=%d quarantine=%s", session_id, quarantine)

    def _forget(self, session_id: int) -> None:
        watched = self._watched.pop(session_id)
        del self._born_ms[session_id]
        if watched.pidfd is not None:
            self._poll.unregister(watched.pidfd)
            self._pidfds.discard(watched.pidfd)
        watched.close()


def _take_slab(folder: SlabFolder, geometry: Geometry, epoch: int, undo: ExitStack) -> tuple[Slab, Path]:
    """The slab that an earlier daemon left, if it can be gone on with; else a new one, which `undo` removes."""
    path = folder.old_slab()
    if path is not None:
        try:
            return _old_slab(path, geometry, epoch), path
        except (TierUnavailable, OSError) as exc:
            log.warning("%s: starting with an empty one", exc)
    _mark_as_left(folder, epoch)
    folder.remove_old_slabs()
    require_memory(geometry.file_nbytes, folder.path)
    path = folder.slab_path(epoch)
    undo.callback(path.unlink, missing_ok=True)
    return Slab.create(folder.new_slab(epoch), geometry, epoch), path


def _old_slab(path: Path, geometry: Geometry, epoch: int) -> Slab:
    with ExitStack() as undo:
        slab = Slab.take_over(path, geometry)
        undo.callback(slab.close)
        if slab.epoch >= epoch:  # see _epoch_after
            raise TierUnavailable(f"slab {path}: damaged superblock")
        if not are_sound(slab):
            raise TierUnavailable(f"slab {path}: damaged tables")
        undo.pop_all()
    return slab


def _epoch_after(path: Path | None) -> int:
    """Above that of the daemon before, also where the clock was set back: no session id is ever used twice."""
    now = time.time_ns()
    before = 0
    if path is not None:
        with suppress(OSError), path.open("rb") as file:
            before = int.from_bytes(os.pread(file.fileno(), 8, EPOCH_OFFSET), "little")
    return max(now, before + SECOND_NS) if before < now + YEAR_NS else now


def _mark_as_left(folder: SlabFolder, epoch: int) -> None:
    """Clients that ask for nothing see by it that they have to look for another daemon."""
    for path in folder.path.glob("slab-*"):
        with suppress(OSError), path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), epoch.to_bytes(8, "little"), EPOCH_OFFSET)


def _give_up(folder: SlabFolder) -> None:
    _mark_as_left(folder, 0)
    folder.remove()


def open_disk(config: Config, held: ExitStack) -> Disk | None:
    """Changes state. The SSD tier's medium, if there is to be one. TierUnavailable: one line for the operator."""
    if not config.disk.path:
        return None
    disk = Disk.open([Path(path) for path in config.disk.path], config.disk.capacity)
    held.callback(disk.close)
    return disk


def require_capacity(config: Config) -> None:
    """Query. ConfigInvalid when memory.capacity is missing or too small to be cut into extents."""
    capacity = config.memory.capacity
    if capacity < CAPACITY_NBYTES_MIN:
        given = f"{capacity} bytes is below {CAPACITY_NBYTES_MIN >> 20}MiB" if capacity else "is not set"
        raise ConfigInvalid(f"config: memory.capacity {given}: say how much host memory blocks may take, e.g. 8GiB")


def _listen(address: str) -> Listener:
    try:
        return ZmqListener(address)
    except (AddressInvalid, AddressInUse) as exc:
        raise ConfigInvalid(str(exc)) from exc
    except OSError as exc:
        raise ConfigInvalid(f"address {address!r}: {exc.strerror or exc}") from exc


def _raise_descriptors() -> None:
    """Each client takes two: its connection, and its process that is watched."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def serve(config: Config, ready: Callable[[Daemon], None]) -> None:
    """Changes state. Run a daemon in this process until SIGTERM or SIGINT; `ready` is told once clients can connect."""
    sys.setswitchinterval(1e-4)
    _raise_descriptors()
    daemon = Daemon(config)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: daemon.stop())
        ready(daemon)
        daemon.run()
    finally:
        daemon.close()
