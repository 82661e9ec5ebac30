"""An engine's process: what it does with the connector API, and what it must be given.

What it reads is compared byte for byte, then and for as long as it holds an array. Each call must end by its deadline.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.core.layout import Shard
from kvstore.core.store import QUARANTINE_MS
from kvstore.errors import KVStoreError, SpecMismatch
from kvstore.service.client import Cache, Client
from kvstore.service.hit import Block, Hit, part_of
from kvstore.service.link import Link, Session
from kvstore.service.reservation import Reservation, WritableBlock
from kvstore.service.ticket import decode_ticket
from kvstore.spec import KVSpec
from tests.sim.engines import Rank, Told
from tests.sim.machine import Task
from tests.sim.texts import Text
from transports import messages as wire

if TYPE_CHECKING:
    from tests.sim.world import World

VIEWS_MAX, HITS_MAX, FILLINGS_MAX = 6, 4, 2
LATE_MS = 1.0  # rounding


class SimLink(Link):
    """A Link whose keeper is called by the world."""

    num_discards = 0

    def _start_keeper(self) -> None: ...

    def notify(self, message: wire.Message) -> None:
        self.num_discards += isinstance(message, wire.Discard)
        super().notify(message)


@dataclass
class View:
    """An array that the process holds: it must show these tokens for as long."""

    array: Any
    text: Text
    start: int
    num_tokens: int
    shard: Shard | None  # of a rank

    @property
    def is_right(self) -> bool:
        """Query."""
        return self.text.shows(self.array, self.start, self.num_tokens, self.shard)


@dataclass
class HeldHit:
    hit: Hit
    text: Text

    @property
    def is_right(self) -> bool:
        """Query. Whether the slots of what was verified still hold it, arrays or not; of a rank's hit, its part."""
        hit, spec = self.hit, self.text.spec
        for number, (offset, stored) in enumerate(zip(hit.offsets, hit.stored_tokens, strict=False)):
            start = number * spec.block_tokens
            count = min(stored, hit.verified_tokens - start)
            payload = hit.hold.session.slab.payload(offset, spec.payload_nbytes(stored))
            array = payload.view(spec.numpy_dtype).reshape(spec.array_shape(stored))
            own = array[: spec.payload_nbytes(count)] if spec.is_opaque else part_of(array, hit.shard)[:, :, :, :count]
            if not self.text.shows(own, start, count, hit.shard):
                return False
        return True


@dataclass
class Filling:
    """A reservation. `arrays`: of its blocks that are filled through them; `half`: the one in the midst of that."""

    reservation: Reservation
    text: Text
    shard: Shard | None
    arrays: list[View] = field(default_factory=list)
    num_filled: int = 0
    half: tuple[Any, Any, str, int] | None = None  # target, source, slab, slot


class Process:
    """One process with one client, or none while there is no daemon."""

    def __init__(self, world: World, pid: int, rng: Random, rank: Rank | None = None) -> None:
        self.pid = pid
        self.rank = rank
        self.pid_visible = rng.random() < 0.5
        self.deadline_ms = rng.choice((20.0, 100.0, 400.0))
        self.specs: list[KVSpec] = rng.sample(world.specs, rng.randint(1, len(world.specs)))
        self.is_dead = self.is_stalled = False
        self.ends_ms = float("inf")  # its session was taken for dead: it may go on until then
        self.is_watched_only = False  # it has lost its lock: the daemon that watches it protects it, and no other
        self.endpoint = world.node.connect(self)
        self.link: SimLink | None = None
        self._old_sessions: list[Session] = []
        self.task: Task | None = None
        self.hits: list[HeldHit] = []
        self.fillings: list[Filling] = []
        self.views: list[View] = []
        self._world = world
        self._machine = world.machine
        self._client: Client | None = None
        self._caches: dict[KVSpec, Cache] = {}
        self._rank_cache: Cache | None = None
        self._rng = rng
        self._late_ms = 0.0

    # Running

    @property
    def can_act(self) -> bool:
        """Query."""
        return not (self.is_dead or self.is_stalled) and (self.task is None or self.task.is_ready)

    def begin(self, rng: Random, act: Callable[[], None] | None = None) -> None:
        """Changes state. The next thing the process does."""
        self._rng = rng
        self.task = Task(act or self._choose())

    def go_on(self) -> None:
        """Changes state."""
        task = self.task
        assert task is not None
        self._world.node.locks.runs(self)
        task.go_on()
        if task.dead:
            self.task = None
            self._world.num_steps += 1

    def die(self) -> None:
        """Changes state. SIGKILL: nothing of it runs any more, and its device stops when it stops."""
        self.is_dead = self.endpoint.is_dead = True
        self._world.node.locks.dies(self)
        if self.link is not None:
            self.link._pid = -1  # so that no finaliser here does what the kernel would not
        self.views.clear()
        if self.task is not None:
            self.task.kill()
            self.task = None
        for filling in self.fillings:
            filling.reservation._is_over = True
        self.hits.clear()

    def give_up(self, now_ms: float) -> None:
        """Changes state. The daemon takes it for dead; by the end of the quarantine it is."""
        self.ends_ms = min(self.ends_ms, now_ms + QUARANTINE_MS)

    def _choose(self) -> Callable[[], None]:
        if self._client is None:
            return self._connect
        assert self.link is not None
        if self.link._breaker.is_open:
            tried = [self._keep, self._keep, self._acquire, self._reserve, self._match]
            return self._rng.choice(tried + [self._redeem] * bool(self._world.engines))
        if self._world.engines and self._rng.random() < 0.6:
            return partial(self._rng.choice(RANK_ACTS if self._rank_cache is not None else SCHEDULER_ACTS), self)
        (act,) = self._rng.choices(ACTS, cum_weights=ACT_WEIGHTS)
        return partial(act, self)

    def _pause(self) -> None:
        began_ms = self._machine.clock.now_ms()
        self._machine.pause()
        self._late_ms += self._machine.clock.now_ms() - began_ms

    def _timed(self, what: str, within_ms: float, call: Callable[[], Any]) -> Any:
        """HNG: a call ends by its deadline, whatever the daemon does; what the scheduler was late is not its fault."""
        began_ms, self.endpoint.late_ms, self._late_ms = self._machine.clock.now_ms(), 0.0, 0.0
        result = call()
        took_ms = self._machine.clock.now_ms() - began_ms - self.endpoint.late_ms - self._late_ms
        assert took_ms <= within_ms + LATE_MS, f"{what} took {took_ms:.0f} ms of {within_ms:.0f}"
        return result

    # What it does

    @property
    def is_given_up(self) -> bool:
        """Query. Whether the daemon takes it for dead, so that nothing protects what it looks at."""
        return self.ends_ms < float("inf")

    def holds_in(self, session_id: int) -> set[int]:
        """Query. Leases and reservations that it has in this session, as far as it can be sure of them now."""
        if self.link is None or self.task is not None or self.is_dead or self.is_given_up:
            return set()
        session = self.link.session
        if session.id != session_id or self.link._breaker.is_open:
            return set()
        own = {number: held for number, held in session.in_use.items() if not held.share or number in session.carried}
        return {number for number, held in own.items() if held.slots and not held.is_lost}

    @property
    def shares_read(self) -> set[int]:
        """Query. Of leases that it reads, which are not its own; or that it has read, and has yet to say so."""
        link = self.link
        if link is None:
            return set()
        sessions = [link.session, *self._old_sessions]
        read = {held.share for each in sessions for number, held in each.in_use.items() if number not in each.carried}
        return read.union(share for _, share in link.session.ended_readings) - {0}

    @property
    def has_caches(self) -> bool:
        """Query. Whether it is attached."""
        return bool(self._caches)

    def come_back(self) -> None:
        """Changes state. It does what it takes to be served again."""
        if self._client is None:
            self._connect()
        else:
            self._keep()

    def lets_all_go(self) -> None:
        """Changes state. It holds nothing any more, and has said so."""
        while self.hits:
            self.hits.pop().hit.release()
        while self.fillings:
            self.fillings.pop().reservation.abort()
        self.views.clear()
        self.come_back()

    def read(self, text: Text) -> int:
        """Changes state. The tokens that a hit gives, every byte compared."""
        with self._caches[text.spec].acquire(text.token_ids, text.keys) as hit:
            verified = self._look(hit, text, self.deadline_ms)
        self.views.clear()
        return verified

    def store_and_read(self, text: Text) -> int:
        """Changes state."""
        with self._caches[text.spec].reserve(text.token_ids) as reservation:
            for block in reservation.blocks():
                block.write(text.array(block.start, block.num_tokens))
            reservation.commit()
        return self.read(text)

    def _connect(self) -> None:
        client: Any = Client.__new__(Client)
        try:
            client._link = self.link = SimLink(self.endpoint, self._machine.clock, self.deadline_ms)
            self._caches = {spec: client.attach(spec) for spec in self.specs}
            self._join_group(client)
        except KVStoreError:
            self._world.seen["connect refused"] += 1
            self._part()
            return
        self._client = client

    def _join_group(self, client: Client) -> None:
        """TPP: refused while ranks of another shape have the engine's name; then it stores nothing of its own."""
        if self.rank is not None:
            engine, number = self.rank
            try:
                self._rank_cache = client.attach(engine.spec, group=engine.group_of(number))
            except SpecMismatch:
                others = [each for each in self._world.engines if each.name == engine.name and each is not engine]
                assert others, "a rank is refused that fits"
                self._world.seen["ranks refused"] += 1

    def _keep(self) -> None:
        assert self.link is not None
        before, session = self.link.num_reconnects, self.link.session
        self.link._keep_once()
        self._world.seen["reconnected"] += self.link.num_reconnects - before
        if self.link.session is not session:
            self._old_sessions.append(session)

    def _goodbye(self) -> None:
        """Close; arrays that live on keep the session."""
        if self._rng.random() < 0.9 or self._client is None:
            return
        self._part()

    def _part(self) -> None:
        link = self.link
        if link is not None:
            link.close()
            self.hits.clear()
            self.fillings.clear()
            self.views.clear()
            link._keep_once()
            assert link._gone, "a client that holds nothing more has not parted"
        self._client, self._caches, self._rank_cache, self.link = None, {}, None, None
        self._old_sessions.clear()
        self.endpoint = self._world.node.connect(self)

    def _some_text(self) -> tuple[Cache, Text]:
        spec = self._rng.choice(self.specs)
        return self._caches[spec], self._world.some_text(spec, self._rng)

    def _match(self) -> None:
        cache, text = self._some_text()
        found = self._timed("match", self.deadline_ms, lambda: cache.match(text.token_ids, text.keys))
        assert 0 <= found <= text.num_tokens
        if self._world.is_twin:
            assert found == self._world.predicted(text), "the twin finds what was stored"

    def _acquire(self) -> None:
        assert self.link is not None
        cache, text = self._some_text()
        usable, discards = self.link.usable, self.link.num_discards
        hit: Hit
        if self._rng.random() < 0.7:
            hit = self._timed("acquire", self.deadline_ms, lambda: cache.acquire(text.token_ids, text.keys))
        else:
            hit = self._timed("acquire", self.deadline_ms, lambda: cache.acquire(text.token_ids, text.keys, wait=False))
            for _ in range(self._rng.randint(0, 3)):
                self._pause()
                hit.ready()
        planned = hit.num_tokens
        within_ms = self.deadline_ms if self._world.is_twin else self._rng.choice((1.0, self.deadline_ms))
        verified = self._look(hit, text, within_ms)
        self._world.note_lookup(text, verified, self._reason(usable, planned, discards))
        if verified and len(self.hits) < HITS_MAX and self._rng.random() < 0.5:
            self.hits.append(HeldHit(hit, text))
        else:
            hit.release()

    def _reason(self, usable: bool, planned: int, discards: int) -> str:
        """Why it was a miss, if it was one."""
        assert self.link is not None
        if not usable:
            return "no daemon"
        if self.link._breaker.is_open:
            return "no answer"
        if self.link.num_discards > discards:
            return "damaged"
        return "not loaded" if planned else "not cached"

    def _look(self, hit: Hit, text: Text, within_ms: float, shard: Shard | None = None) -> int:
        """COR: every block of a hit is the prompt's, byte for byte; some are looked at for longer than the lease."""
        at = 0
        if self._rng.random() < 0.5:
            self._timed("wait", max(within_ms, self.deadline_ms), lambda: hit.wait(within_ms))
        blocks = iter(hit.blocks(within_ms))
        while (block := next(blocks, None)) is not None:
            array = block.array
            assert block.start == at, "blocks are given in order"
            is_right = text.shows(array, at, block.num_tokens, shard) or self.is_given_up
            assert is_right, f"wrong bytes from token {at} of {text.token_ids}"
            at += block.num_tokens
            self._keep_view(View(array, text, block.start, block.num_tokens, shard), block)
            del array
        assert at == hit.verified_tokens <= text.num_tokens
        return at

    def _keep_view(self, view: View, block: Block | WritableBlock) -> None:
        if len(self.views) < VIEWS_MAX and self._rng.random() < 0.3:
            self.views.append(view)

    def _release(self) -> None:
        """The lease ends; arrays live on for a while."""
        if self.hits:
            self.hits.pop(self._rng.randrange(len(self.hits))).hit.release()
        elif self.views:
            self.views.pop(self._rng.randrange(len(self.views)))

    def _drop_views(self) -> None:
        if self.views:
            self.views.pop(self._rng.randrange(len(self.views)))

    def _prefetch(self) -> None:
        cache, text = self._some_text()
        cache.prefetch(text.token_ids, text.keys)

    def _report(self) -> None:
        cache = self._rng.choice(list(self._caches.values()))
        if not self._world.is_twin:
            cache.report(prefill_tokens=1000, prefill_ms=self._rng.choice((0.1, 1e3, 1e6)))

    def _clear(self) -> None:
        if self._rng.random() < 0.06 and not self._world.is_twin:
            self._rng.choice(list(self._caches.values())).clear()
            self._world.seen["cleared"] += 1

    def _status(self) -> None:
        if self._rng.random() < 0.1:
            assert self._client is not None
            self._timed("status", self.deadline_ms, self._client.status)

    def _reserve(self) -> None:
        if len(self.fillings) >= FILLINGS_MAX:
            return
        cache, text = self._some_text()
        start = self._rng.randint(0, text.num_tokens) if self._rng.random() < 0.1 else 0
        reservation: Reservation = self._timed(
            "reserve", self.deadline_ms, lambda: cache.reserve(text.token_ids, start, text.keys)
        )
        if not reservation.num_blocks:
            self._world.seen["nothing reserved"] += 1
            return
        self._world.seen["reserved"] += 1
        self.fillings.append(Filling(reservation, text, None))
        if self._rng.random() < 0.8:
            self._fill()

    def _reserve_part(self) -> None:
        """A rank is told what its engine stores. Now and then it is told too late, or of something else than the others
        are, or of the front of it, or has its part stored already."""
        if len(self.fillings) >= FILLINGS_MAX or self._rank_cache is None or self.rank is None:
            return
        engine, cache = self.rank.engine, self._rank_cache
        if engine.text is None or self._rng.random() < 0.15:
            engine.text = self._world.some_text(engine.spec, self._rng)
        text = engine.text
        if self._rng.random() < 0.1:
            other = self._world.front_of(text, self._rng), self._world.some_text(engine.spec, self._rng)
            text = self._rng.choice(other)
        reservation: Reservation = self._timed(
            "reserve", self.deadline_ms, lambda: cache.reserve(text.token_ids, 0, text.keys)
        )
        if not reservation.num_blocks:
            self._world.seen["no part reserved"] += 1
            return
        self._world.seen["parts reserved"] += 1
        self.fillings.append(Filling(reservation, text, self.rank.shard))
        if self._rng.random() < 0.8:
            self._fill()

    def _fail_others(self) -> None:
        """A rank does not do its part: it aborts, forgets about it, or leaves; or it goes on as if it had not."""
        if self.fillings:
            filling = self.fillings.pop(self._rng.randrange(len(self.fillings)))
            if self._rng.random() < 0.5:
                filling.reservation.abort()
                assert not filling.reservation.commit(), "committed after it was aborted"
            self._world.seen["parts given up"] += filling.shard is not None
        elif self._rng.random() < 0.2:
            self._part()

    def _decide(self) -> None:
        """A scheduler leases blocks for others to read, and may be done with them before they are."""
        assert self.link is not None
        cache, text = self._some_text()
        engines = [engine for engine in self._world.engines if engine.spec in self._caches and engine.text is not None]
        if engines and self._rng.random() < 0.8:
            engine = self._rng.choice(engines)
            assert engine.text is not None
            cache, text = self._caches[engine.spec], engine.text
        hit: Hit = self._timed(
            "acquire", self.deadline_ms, lambda: cache.acquire(text.token_ids, text.keys, shared=True)
        )
        ticket = hit.ticket
        if ticket:
            self._world.told.append(self._told(ticket, hit, text))
            self._world.seen["tickets"] += 1
        if self._rng.random() < 0.5:
            self._look(hit, text, self.deadline_ms)
        if ticket and len(self.hits) < HITS_MAX and self._rng.random() < 0.6:
            self.hits.append(HeldHit(hit, text))
        else:
            hit.release()

    def _told(self, ticket: bytes, hit: Hit, text: Text) -> Told:
        known, leased = decode_ticket(ticket), weakref.ref(hit)
        assert known is not None, "a ticket that cannot be read"

        def is_leased() -> bool:
            hit = leased()
            return not (hit is None or hit.is_over or self.is_dead or self.is_given_up)

        is_ready = known.ready * text.spec.block_tokens >= hit.num_tokens
        return Told(ticket, text, hit.num_tokens, known.epoch, known.share, is_ready, is_leased)

    def _redeem(self) -> None:
        """TPP: all who read on a ticket are told of as many tokens, or of none once it is too late; and all of that
        is there to be read."""
        assert self.link is not None
        if not self._world.told:
            return
        own = self.rank.engine.spec if self.rank is not None else None
        told = self._rng.choice([each for each in self._world.told if each.text.spec == own] or self._world.told)
        cache, shard = self._caches.get(told.text.spec), None
        if self.rank is not None and own == told.text.spec and self._rng.random() < 0.8:
            cache, shard = self._rank_cache, self.rank.shard
        if cache is None:
            return
        was_due, was_over = self._is_due(told, cache), self._is_over(told)
        hit = cache.redeem(told.ticket)
        assert hit.num_tokens in (0, told.num_tokens), "ranks are told of different lengths"
        assert hit.num_tokens or not (was_due and self._is_due(told, cache)), (
            "a ticket is refused while its lease lives"
        )
        if hit.num_tokens:
            assert not was_over, "a ticket of a dead daemon"
            assert told.epoch == self.link.session.welcome.epoch, "a ticket of another daemon"
            self._world.seen["redeemed"] += 1
            self._world.seen["redeemed by a rank"] += shard is not None
            self._world.seen["redeemed too late"] += not told.is_leased()
        planned, discards = hit.num_tokens, self.link.num_discards
        verified = self._look(hit, told.text, self._rng.choice((1.0, self.deadline_ms)), shard)
        self._world.seen["damage seen on a ticket"] += self.link.num_discards > discards
        may_differ = self.is_given_up or self._world.is_damaged or not told.is_ready
        assert verified == planned or may_differ, "ranks read different lengths"
        if hit.num_tokens and len(self.hits) < HITS_MAX and self._rng.random() < 0.5:
            self.hits.append(HeldHit(hit, told.text))
        else:
            hit.release()

    def _is_due(self, told: Told, cache: Cache) -> bool:
        """Whether it must be given what it was told of: the lease lives, and so does the daemon that gave it."""
        assert self.link is not None
        daemon, session = self._world.node.daemon, self.link.session
        epoch = daemon.service.epoch if daemon is not None else 0
        return told.epoch == epoch == session.welcome.epoch and cache._key in session.attached and told.is_leased()

    def _is_over(self, told: Told) -> bool:
        """Whether nobody may begin to read any more: the daemon that gave it is dead."""
        locks, daemon = self._world.node.locks, self._world.node.daemon
        is_dead = daemon is None or daemon.service.epoch != told.epoch
        return is_dead and told.share not in locks.shares_of(self)

    def _fill(self) -> None:
        """Some blocks of a reservation, whole or in pieces, and most often all of it up to the commit."""
        if not self.fillings:
            return
        filling = self._rng.choice(self.fillings)
        blocks = list(filling.reservation.blocks())[filling.num_filled :]
        for block in blocks[: self._rng.choice((1, 4, 100))]:
            if self._rng.random() < 0.5:
                block.write(filling.text.array(block.start, block.num_tokens, filling.shard))
            else:
                self._fill_by_array(filling, block)
            filling.num_filled += 1
            if self._rng.random() < 0.1:
                self._pause()
        if filling.num_filled == filling.reservation.num_blocks or self._rng.random() < 0.1:
            self._commit(filling)

    def _fill_by_array(self, filling: Filling, block: WritableBlock) -> None:
        """As a device does: it may be in the midst of it when its process dies."""
        target, source = block.array, filling.text.array(block.start, block.num_tokens, filling.shard)
        view = View(target, filling.text, block.start, block.num_tokens, filling.shard)
        if target.flags.c_contiguous:  # a rank's is not
            target, source = target.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8)
        half = len(source) // 2
        target[:half] = source[:half]
        number = (block.start - filling.reservation.start) // filling.text.spec.block_tokens
        hold = filling.reservation.hold
        slots = np.frombuffer(hold._holding.slots, np.uint32)
        filling.half = target, source, hold.session.welcome.slab_path, int(slots[number])
        self._pause()
        target[half:] = source[half:]
        filling.half = None
        if self._rng.random() < 0.3:
            filling.arrays.append(view)

    def _commit(self, filling: Filling) -> None:
        self.fillings.remove(filling)
        reservation, text = filling.reservation, filling.text
        if self._rng.random() < 0.05:
            reservation.abort()
            self._world.seen["aborted"] += 1
            return
        cached = self._timed("commit", self.deadline_ms, reservation.commit)
        self._world.seen["committed" if cached else "not committed"] += 1
        if filling.shard is not None:
            self._world.seen["parts committed"] += cached
        elif cached:
            end = reservation.start + filling.num_filled * text.spec.block_tokens
            self._world.stored.append((text, min(end, text.num_tokens)))
        else:
            assert not self._world.is_twin, "the twin commits"
        self.views += filling.arrays[: VIEWS_MAX - len(self.views)]

    def _fork(self) -> None:
        """LEK, COR: a child's calls are misses, and all its finalisers disturb nobody."""
        assert self.link is not None
        if self._rng.random() > 0.2 or self._world.is_twin:
            return
        self._machine.faults["process forked"] += 1
        link, num_sent = _forked(self.link), self.endpoint.num_sent
        caches = [copy.copy(cache) for cache in self._caches.values()]
        for cache in caches:
            cache._link = link
            text = self._world.some_text(cache.spec, self._rng)
            with cache.acquire(text.token_ids, text.keys) as hit:
                assert not hit.num_tokens + hit.wait(), "a forked child has a hit"
            assert not cache.reserve(text.token_ids, 0, text.keys).num_blocks, "a forked child reserves"
        link.close()
        assert self.endpoint.num_sent == num_sent, "a forked child spoke for its parent"


def _forked(link: SimLink) -> SimLink:
    """The link as a child has it: a copy of all that is private memory."""
    child = copy.copy(link)
    session = link.session
    child.session = dataclasses.replace(
        session,
        in_use=dict(session.in_use),
        lingering=set(),
        ended_leases=deque(session.ended_leases),
        ended_reservations=deque(session.ended_reservations),
    )
    child._pid, child._wake = -2, SimpleQueue()
    child._exchange, child._breaker = copy.deepcopy(link._exchange), copy.copy(link._breaker)
    return child


ACTS: list[Callable[[Process], None]] = [
    Process._acquire,
    Process._release,
    Process._drop_views,
    Process._reserve,
    Process._fill,
    Process._match,
    Process._prefetch,
    Process._report,
    Process._keep,
    Process._clear,
    Process._status,
    Process._goodbye,
    Process._fork,
]
RANK_ACTS = [Process._reserve_part] * 3 + [Process._fill, Process._redeem, Process._decide, Process._fail_others]
SCHEDULER_ACTS = [Process._decide, Process._redeem]
_WEIGHTS = (40, 14, 8, 26, 10, 4, 3, 2, 8, 2, 2, 1, 3)
ACT_WEIGHTS = [sum(_WEIGHTS[: at + 1]) for at in range(len(_WEIGHTS))]
assert len(ACTS) == len(_WEIGHTS)
