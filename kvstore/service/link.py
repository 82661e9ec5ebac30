"""A client's connection to its daemon: requests with deadlines, notices, the circuit breaker and the way back.

    closed breaker: a caller's thread sends and waits for its own reply, at most until its deadline
    open breaker:   every call is a miss at once; the keeper thread says hello until a daemon answers

One lock guards the socket. A finaliser may run anywhere, also under that lock, so it only notes what has ended; the
next call, or the keeper, says so.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from kvstore.clock import Clock
from kvstore.errors import DaemonUnavailable, KVStoreError, SpecMismatch, from_code
from kvstore.media.memory import Slab
from kvstore.ranks import RankGroup
from kvstore.service.liveness import hold_session, let_session_go, start_reading, stop_reading
from kvstore.spec import KVSpec, encode_spec
from radix import HashKind
from transports import messages as wire
from transports.errors import PeerLost, RemoteProtocolError
from transports.network import Endpoint
from transports.session import Breaker, Exchange

log = logging.getLogger("kvstore")
R = TypeVar("R", bound=wire.Reply)

KEEPER_PAUSE_MS = 200.0
NOTICE_MS = 5.0  # a notice waits so long for the lock, then it is lost
DEADLINE_MS_MAX = 1e7
HELLO_MS = 1000.0
LEASES_PER_NOTICE = 1024
CARRY_NBYTES = 1 << 18  # 65536 blocks: the daemon's loop is busy with them for a few milliseconds
LEASE, RESERVATION = "lease", "reservation"
AttachKey = tuple[bytes, RankGroup | None]  # the spec's fingerprint


@dataclass(slots=True)
class Holding:
    """What a lease or reservation that has not ended stands for. `slots`: u32le; none before the daemon's answer.

    `is_lost`: the answer came from a daemon whose successor was not told of it, so nothing protects those slots.
    `share`: of somebody else's lease, under which this process reads; 0 for one of its own.
    """

    slots: bytes = b""
    is_lost: bool = False
    share: int = 0


class Attached(NamedTuple):
    """A spec as a daemon knows it, in one of our sessions with it: the two go together, also across a restart."""

    session: int
    spec_id: int
    hash_kind: HashKind
    member: int  # a rank's place in its group; 0 without one


class Attachment(NamedTuple):
    """A spec that this client is attached to, and as which rank."""

    spec: KVSpec
    group: RankGroup | None

    @property
    def key(self) -> tuple[bytes, RankGroup | None]:
        return self.spec.fingerprint, self.group


@dataclass(slots=True)
class Session:
    """What a hello gave us: our part in the life of a slab. A daemon that goes on with the slab goes on with this."""

    welcome: wire.Welcome
    slab: Slab
    lock_fd: int | None  # of the sessions file; None in an embedded store
    attached: dict[AttachKey, Attached] = field(default_factory=dict)
    in_use: dict[int, Holding] = field(default_factory=dict)  # leases and reservations that have not ended
    carried: set[int] = field(default_factory=set)  # whatever these were, a restarted daemon knows them as leases
    lingering: set[object] = field(default_factory=set)  # holds that wait for their arrays: nothing else keeps them
    ended_leases: deque[int] = field(default_factory=deque)  # ended here, not yet said: bounded by in_use's history
    ended_reservations: deque[int] = field(default_factory=deque)
    ended_readings: deque[tuple[int | None, int]] = field(default_factory=deque)  # descriptor, share
    guard: threading.Lock = field(default_factory=threading.Lock)  # of the slots of what is in use
    num_populated: int = 0  # extents mapped into this process

    @property
    def id(self) -> int:
        return self.welcome.session

    def let_go(self) -> None:
        """Changes state. This process holds it no more."""
        if self.lock_fd is not None:
            let_session_go(self.lock_fd, self.id & 0xFFFF)

    def end(self, number: int, *kinds: str) -> None:
        """Changes state. Note the end of a LEASE, a RESERVATION, or whichever it is. Safe in a finaliser."""
        holding = self.in_use.pop(number, None)  # first: what `holds` finds after this is not told to anybody
        if holding is not None and holding.share:
            self.ended_readings.append((self.lock_fd, holding.share))
        if RESERVATION in kinds:
            self.ended_reservations.append(number)
        if LEASE in kinds or number in self.carried:
            self.ended_leases.append(number)

    def read_under(self, number: int, share: int) -> bool:
        """Changes state. What is in use under `number` is somebody else's lease. False where that has ended."""
        if not start_reading(self.lock_fd, self.welcome.epoch, share):
            return False
        self.in_use[number].share = share
        return True

    def stop_readings(self) -> None:
        """Changes state. Those that have ended."""
        while self.ended_readings:
            stop_reading(*self.ended_readings.popleft())

    def say_what_ended(self, send: Callable[[wire.Message], bool]) -> None:
        """Changes state. Tell of ended leases and reservations; what cannot be sent now is kept for later."""
        while self.ended_reservations and send(wire.Abort(self.id, self.ended_reservations[0])):
            self.ended_reservations.popleft()
        while self.ended_leases:
            # By index: a finaliser may append meanwhile, which iteration does not bear.
            leases = [self.ended_leases[at] for at in range(min(len(self.ended_leases), LEASES_PER_NOTICE))]
            if not send(wire.Release(self.id, leases)):
                return
            for _ in leases:
                self.ended_leases.popleft()

    def holds(self) -> list[tuple[int, bytes]]:
        """Changes state. (number, slots) of all that is in use; what has no slots by now will never get any."""
        with self.guard:
            self.carried = set(self.in_use)  # first: see `end`, which may run anywhere at any moment
            holdings = [(number, found) for number in self.carried if (found := self.in_use.get(number)) is not None]
            for _, holding in holdings:
                holding.is_lost = not holding.slots
            return [(number, holding.slots) for number, holding in holdings if holding.slots]

    def populate(self) -> None:
        """Changes state. Map the extents that are ready, so that copies need not fault them in page by page."""
        for extent in range(self.num_populated, self.slab.extents_ready):
            self.slab.populate_extent(extent)
            self.num_populated = extent + 1


def _batches(holds: list[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """What is held, in pieces that fit a message."""
    batch: list[tuple[int, bytes]] = []
    nbytes = 0
    for hold in holds:
        if batch and (len(batch) == LEASES_PER_NOTICE or nbytes + len(hold[1]) > CARRY_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(hold)
        nbytes += len(hold[1])
    if batch:
        yield batch


def _goes_on_with(welcome: wire.Welcome, before: wire.Welcome) -> bool:
    """Whether another daemon welcomes us that has taken over the slab we have mapped."""
    return welcome.epoch != before.epoch and welcome.slab_path == before.slab_path


def _carry(session_id: int, holds: list[tuple[int, bytes]], request_id: int) -> wire.Request:
    return wire.Carry(request_id, session_id, holds)


def bounded_wait_ms(wait_ms: float) -> float:
    """Query. A time that can be waited for, from any kind of number; what is none, NaN among it, is no time at all."""
    wait_ms = float(wait_ms)
    return min(wait_ms, DEADLINE_MS_MAX) if wait_ms > 0 else 0.0


class Pending(NamedTuple):
    """A request that was sent without waiting. Settled by its reply, its deadline, or a lost connection."""

    request_id: int
    due_ms: float


class Link:
    """See the module. Thread safe. In a forked child every call is a miss: the session is the parent's."""

    def __init__(self, endpoint: Endpoint, clock: Clock, deadline_ms: float) -> None:
        """Changes state. Takes over `endpoint`. DaemonUnavailable when nobody answers within the deadline."""
        self.deadline_ms = bounded_wait_ms(deadline_ms)
        self.num_deadlines_missed = 0
        self.num_reconnects = 0
        self._clock = clock
        self._endpoint = endpoint
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._exchange = Exchange()
        self._breaker = Breaker()
        self._attachments: dict[AttachKey, Attachment] = {}
        self._ids = itertools.count(1)
        self._closed = False
        self._gone = False
        self._wake: SimpleQueue[None] = SimpleQueue()  # unlike an Event it may be set in a finaliser, anywhere
        self._is_woken = False
        self._disregarded: deque[int] = deque()  # requests whose replies nobody wants any more
        try:
            self.session = self._hello(None, self._due_ms(max(self.deadline_ms, HELLO_MS)))
        except KVStoreError:
            endpoint.close()
            raise
        self._start_keeper()

    # For callers

    @property
    def usable(self) -> bool:
        """Query. Whether asking makes sense; costs next to nothing, so it comes before any hashing."""
        return not self._breaker.is_open and not self._closed and os.getpid() == self._pid

    @property
    def is_open(self) -> bool:
        """Query. Whether this process may still use the session, also while the daemon does not answer."""
        return not self._closed and self.is_own_process

    @property
    def is_own_process(self) -> bool:
        """Query. Whether this is the process that connected, and not one forked from it."""
        return os.getpid() == self._pid

    def now_ms(self) -> float:
        """Query."""
        return self._clock.now_ms()

    def due_ms(self) -> float:
        """Query. When a call that begins now must have ended."""
        return self._due_ms(None)

    def new_id(self) -> int:
        """Changes state. An id for a lease or reservation, unique in this process."""
        return next(self._ids)

    def ask(
        self,
        kind: type[R],
        make: Callable[[int], wire.Request],
        deadline_ms: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> R | None:
        """Changes state. Send a request and wait for its reply; None for everything else, by the deadline.

        `meanwhile`: work of the caller's that is done while the daemon does its own.
        """
        due_ms = self._due_ms(deadline_ms)
        if not self.usable or not self._lock_or_trip(due_ms):
            return None
        try:
            reply = self._request(make, due_ms, meanwhile)
            if reply is None and not self._gone:
                self._trip("no answer within the deadline")
            return self._expected(kind, reply)
        finally:
            self._lock.release()

    def ask_later(self, make: Callable[[int], wire.Request], deadline_ms: float | None = None) -> Pending | None:
        """Changes state. Send a request without waiting; None when it cannot be sent."""
        due_ms = self._due_ms(deadline_ms)
        if not self.usable or not self._lock_or_trip(due_ms):
            return None
        try:
            request_id = self._send_request(make)
        finally:
            self._lock.release()
        return None if request_id is None else Pending(request_id, due_ms)

    def poll(self, kind: type[R], pending: Pending, wait_ms: float = 0.0) -> tuple[bool, R | None]:
        """Changes state. (settled, reply) of a pending request, after at most `wait_ms`."""
        until_ms = min(self._due_ms(wait_ms), pending.due_ms)
        if self._gone or os.getpid() != self._pid:
            return True, None
        if not self._lock_until(until_ms):
            return self._clock.now_ms() >= pending.due_ms, None
        try:
            if self._gone or not self._exchange.waits_for(pending.request_id):
                return True, None
            reply = self._receive_until(pending.request_id, until_ms)
            if reply is None and self._clock.now_ms() < pending.due_ms:
                return False, None
            if reply is None:
                self._exchange.forget(pending.request_id)
                self._trip("no answer within the deadline")
            return True, self._expected(kind, reply)
        finally:
            self._lock.release()

    def notify(self, message: wire.Message) -> None:
        """Changes state. Send a notice if that is possible at once; else it is lost, which a notice must bear."""
        if self.usable and self._lock_until(self._due_ms(NOTICE_MS)):
            try:
                self._send(message)
            finally:
                self._lock.release()

    def flush(self) -> None:
        """Changes state. Have said what has ended, by the next call or the keeper at once. Safe in a finaliser."""
        self._wake_keeper()

    def disregard(self, pending: Pending) -> None:
        """Changes state. Nobody will ask for this reply. Safe in a finaliser."""
        self._disregarded.append(pending.request_id)

    def attach(self, attachment: Attachment) -> None:
        """Changes state. Serve this spec, now and after every reconnect. SpecMismatch or DaemonUnavailable."""
        if not self.usable:
            raise DaemonUnavailable("the daemon does not answer, or this process was forked from the client's")
        due_ms = self._due_ms(max(self.deadline_ms, HELLO_MS))
        if not self._lock_until(due_ms):
            raise DaemonUnavailable("the daemon does not answer")
        try:
            self.session.attached[attachment.key] = self._attach(self.session.id, attachment, due_ms)
            self._attachments[attachment.key] = attachment
        finally:
            self._lock.release()

    def close(self) -> None:
        """Changes state. End the session as soon as nothing of it is in use any more.

        Now if the lock can be had soon, else by the keeper: a signal handler may call this in the midst of a request.
        """
        self.abandon()
        if self.is_own_process and self._lock_until(self._due_ms(None)):
            try:
                self._part()
            finally:
                self._lock.release()

    def abandon(self) -> None:
        """Changes state. As `close`, by the keeper and without waiting: for finalisers."""
        self._closed = True
        self._wake_keeper()

    def _wake_keeper(self) -> None:
        if not self._is_woken and self.is_own_process:  # a queue copied by fork may be locked for ever
            self._is_woken = True
            self._wake.put(None)

    # Everything below runs under the lock

    def _due_ms(self, deadline_ms: float | None) -> float:
        return self._clock.now_ms() + bounded_wait_ms(self.deadline_ms if deadline_ms is None else deadline_ms)

    def _lock_or_trip(self, due_ms: float) -> bool:
        """The lock, by the deadline. Whoever has it that long waits for a silent daemon: this one is missed too."""
        if self._lock_until(due_ms):
            return True
        self._trip("no answer within the deadline")
        return False

    def _lock_until(self, due_ms: float) -> bool:
        return self._lock.acquire(timeout=max(0.0, due_ms - self._clock.now_ms()) / 1000)

    def _send(self, message: wire.Message) -> bool:
        if self._gone:  # closed by another thread while this one waited for the lock
            return False
        try:
            self._endpoint.send(wire.encode(message))
        except PeerLost:
            self._trip("nobody is connected")
            return False
        return True

    def _flush(self) -> None:
        while self._disregarded:
            self._exchange.forget(self._disregarded.popleft())
        self.session.say_what_ended(self._send)

    def _send_request(self, make: Callable[[int], wire.Request]) -> int | None:
        if self._breaker.is_open:  # it opened while we waited for the lock
            return None
        self._flush()
        request_id = self._exchange.begin()
        return request_id if self._send(make(request_id)) else None

    def _request(
        self, make: Callable[[int], wire.Request], due_ms: float, meanwhile: Callable[[], object] | None
    ) -> wire.Reply | None:
        request_id = self._send_request(make)
        if request_id is None:
            return None
        if meanwhile is not None:
            meanwhile()
        reply = self._receive_until(request_id, due_ms)
        if reply is None:
            self._exchange.forget(request_id)
            self.num_deadlines_missed += 1
        return reply

    def _receive_until(self, request_id: int, until_ms: float) -> wire.Reply | None:
        """The reply, or None when the time is over; what else arrives is kept for whoever waits for it."""
        while True:
            reply = self._exchange.take(request_id)
            if reply is not None:
                return reply
            left_ms = until_ms - self._clock.now_ms()
            frame = self._endpoint.receive(max(0.0, left_ms))
            if frame is not None:
                self._deliver(frame)
            elif left_ms <= 0:
                return None

    def _deliver(self, frame: bytes) -> None:
        try:
            message = wire.decode(frame)
        except RemoteProtocolError as exc:
            self._trip(str(exc))
            return
        if isinstance(message, wire.Reply):
            self._exchange.deliver(message)

    def _expected(self, kind: type[R], reply: wire.Reply | None) -> R | None:
        if reply is None or isinstance(reply, kind):
            return reply
        what = f"{reply.code}: {reply.text}" if isinstance(reply, wire.Failed) else type(reply).__name__
        self._trip(f"the daemon answered {what}")
        return None

    def _trip(self, reason: str) -> None:
        if not self._breaker.is_open:
            log.warning("daemon unavailable, going on without cache: %s", reason)
        self._breaker.trip(self._clock.now_ms())
        self._wake_keeper()

    def _hello(self, known: Session | None, due_ms: float) -> Session:
        """A session: `known` where the daemon says that it goes on, else a new one. KVStoreError when there is none."""
        request_id = self._exchange.begin()
        session_id, epoch = (known.id, known.welcome.epoch) if known else (0, 0)
        hello = wire.Hello(request_id, wire.VERSION_MIN, wire.VERSION_MAX, session_id, epoch)
        self._send_hello(hello, due_ms)
        reply = self._receive_until(request_id, due_ms)
        if isinstance(reply, wire.Failed):
            raise from_code(reply.code, reply.text)
        if not isinstance(reply, wire.Welcome):
            self._exchange.forget(request_id)
            raise DaemonUnavailable("the daemon does not answer")
        if known and (reply.session, reply.epoch) == (session_id, epoch):
            return known
        if known and _goes_on_with(reply, known.welcome):
            self._carry_over(known, reply)
            return known
        return self._new_session(reply, due_ms)

    def _send_hello(self, hello: wire.Hello, due_ms: float) -> None:
        while True:
            try:
                return self._endpoint.send(wire.encode(hello))
            except PeerLost as exc:
                if self._clock.now_ms() >= due_ms:
                    raise DaemonUnavailable("nobody answers there: is `kvstore serve` running?") from exc
            time.sleep(0.005)

    def _new_session(self, welcome: wire.Welcome, due_ms: float) -> Session:
        """Our part in the life of a daemon that has welcomed us. On any failure it is told that we are off again."""
        try:
            slab = Slab.open(Path(welcome.slab_path), welcome.epoch)
            lock_fd = None
            if welcome.sessions_path:
                lock_fd = hold_session(Path(welcome.sessions_path), welcome.session & 0xFFFF)
        except KVStoreError:
            self._send(wire.Goodbye(welcome.session))
            raise
        session = Session(welcome, slab, lock_fd)
        try:
            session.attached = self._attach_all(welcome.session, due_ms)
        except KVStoreError:
            session.let_go()
            self._send(wire.Goodbye(welcome.session))
            raise
        return session

    def _carry_over(self, session: Session, welcome: wire.Welcome) -> None:
        """Go on under a daemon that goes on with our slab: it must know what we hold before it may reuse anything.

        So the old session's byte goes last. On any failure the old session is as before, and is tried again later.
        Each message has its own deadline: however much is held, this ends.
        """
        old, new, fd = session.id & 0xFFFF, welcome.session & 0xFFFF, None
        try:
            fd = hold_session(Path(welcome.sessions_path), new)
            for holds in _batches(session.holds()):
                self._demand(wire.Done, partial(_carry, welcome.session, holds), self._due_ms(HELLO_MS))
            attached = self._attach_all(welcome.session, self._due_ms(HELLO_MS))
        except KVStoreError:
            if fd is not None and new != old:
                let_session_go(fd, new)
            self._send(wire.Goodbye(welcome.session))
            raise
        session.welcome, session.attached = welcome, attached
        if new != old:  # equal only if the old lock was lost
            let_session_go(fd, old)

    def _attach_all(self, session_id: int, due_ms: float) -> dict[AttachKey, Attached]:
        """All our specs. One that this daemon does not take is a miss from now on; the others go on."""
        attached = {}
        for key, attachment in self._attachments.items():
            try:
                attached[key] = self._attach(session_id, attachment, due_ms)
            except SpecMismatch as exc:
                log.warning("model %s goes without cache: %s", attachment.spec.model, exc)
        return attached

    def _attach(self, session_id: int, attachment: Attachment, due_ms: float) -> Attached:
        encoded, group = encode_spec(attachment.spec), attachment.group
        rank = (group.group_id, *group.shard) if group is not None else ()
        reply = self._demand(
            wire.Attached, lambda request_id: wire.Attach(request_id, session_id, encoded, *rank), due_ms
        )
        try:
            return Attached(session_id, reply.spec_id, HashKind(reply.hash_kind), reply.member)
        except ValueError:
            raise SpecMismatch(f"the daemon names blocks by {reply.hash_kind!r}, which this client cannot") from None

    def _demand(self, kind: type[R], make: Callable[[int], wire.Request], due_ms: float) -> R:
        """The reply to a request without which there is no session. KVStoreError if it does not come."""
        request_id = self._exchange.begin()
        if not self._send(make(request_id)):
            raise DaemonUnavailable("the daemon is gone")
        reply = self._receive_until(request_id, due_ms)
        if isinstance(reply, wire.Failed):
            raise from_code(reply.code, reply.text)
        if not isinstance(reply, kind):
            self._exchange.forget(request_id)
            raise DaemonUnavailable("the daemon does not answer")
        return reply

    def _part(self) -> None:
        """Close for good, unless arrays of ours are still in use: the session must outlive them."""
        session = self.session
        if self._gone or session.in_use:
            return
        session.stop_readings()
        self._flush()  # also to a daemon that is silent: when it goes on, it must not hold anything for us
        self._send(wire.Goodbye(session.id))
        session.let_go()
        self._endpoint.close()
        self._gone = True

    # The keeper's thread

    def _start_keeper(self) -> None:
        threading.Thread(target=self._keep, name="kvstore-keeper", daemon=True).start()

    def _keep(self) -> None:
        while not self._gone:
            with suppress(Empty):
                self._wake.get(timeout=self._pause_ms() / 1000)
            self._keep_once()

    def _keep_once(self) -> None:
        """What the keeper does each time it wakes."""
        self._is_woken = False
        if not self._breaker.is_open and not self._closed:
            self.session.populate()
        with self._lock:
            self.session.stop_readings()  # for which no daemon is needed
            self._notice_restart()
            self._tend()

    def _pause_ms(self) -> float:
        probe_ms = self._breaker.probe_due_ms()
        if probe_ms is None or self._closed:
            return KEEPER_PAUSE_MS
        return max(1.0, probe_ms - self._clock.now_ms())

    def _notice_restart(self) -> None:
        """A client that asks for nothing must still say what it holds, or the new daemon may reuse next to nothing."""
        session = self.session
        if session.slab.epoch != session.welcome.epoch and not self._breaker.is_open and not self._gone:
            self._trip("it has left the slab to another one")

    def _tend(self) -> None:
        if self._closed and not (self._breaker.is_open and self.session.in_use):
            self._part()
        elif not self._breaker.is_open:
            self._flush()
        elif self._clock.now_ms() >= (self._breaker.probe_due_ms() or 0.0):
            self._probe()

    def _probe(self) -> None:
        before = self.session.welcome
        try:
            session = self._hello(self.session, self._due_ms(max(self.deadline_ms, HELLO_MS)))
        except KVStoreError as exc:
            log.debug("probe failed: %s", exc)
            self._breaker.probe_failed(self._clock.now_ms())
            return
        log.info("daemon answers again epoch=%d session=%d", session.welcome.epoch, session.id)
        if session.welcome is not before:
            self.num_reconnects += 1
            self._exchange.forget_all()  # those replies died with the daemon that was asked
        if session is not self.session:
            session.ended_readings = self.session.ended_readings  # of what it still reads
            self.session.let_go()
            self.session = session
        self._breaker.heal()
