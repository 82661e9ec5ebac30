"""`make mutants`: each guard switched off in turn, until the simulation sees it. The switches are here, nowhere else.

What must be seen is a wrong byte, something left behind, a silence; or that a later guard has something to do though
nobody did what it guards against. A guard behind which there is another one is named with it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import kvstore.core.store
from kvstore.core.filling import Filling
from kvstore.core.groups import Groups
from kvstore.core.layout import HEADER_NBYTES, Shard, parse_header
from kvstore.core.leases import Part, Reservation, Session
from kvstore.core.loads import Loads
from kvstore.core.lower import LowerTier
from kvstore.core.shares import Shares
from kvstore.core.stats import Guard
from kvstore.core.store import Store
from kvstore.core.takeover import Takeover
from kvstore.core.tier import Tier
from kvstore.core.watch import Watch
from kvstore.media.disk import Disk
from kvstore.service import link, liveness
from kvstore.service.daemon import CONFIRM_MS, Daemon
from kvstore.service.disk_moves import DiskMoves
from kvstore.service.hit import Hit
from kvstore.service.liveness import SessionsFile
from kvstore.service.service import Service
from radix import block_symbols_of
from radix.node import Node
from tests.sim.shrink import Failure, run_world
from tests.sim.world import Plan, World
from transports import messages as wire

STEPS_PER_WORLD = 1000
WORLDS_MAX = 60
NO_DAMAGE = frozenset({"disk_bit_flips", "header_bit_flips", "payload_bit_flips", "index_is_damaged"})
NOT_THE_INDEX = frozenset({"header_bit_flips", "index_is_damaged"})
WRITING = frozenset({"process_dies_writing", "seconds_pass"})
UNLOCKING = frozenset({"lock_is_lost", "seconds_pass"})
RESTARTING = frozenset({"daemon_is_replaced", "process_stalls", "process_wakes"})


@dataclass(frozen=True)
class Mutant:
    """A guard and its switch. `behind`: what else stands between the fault and a wrong answer."""

    guard: str
    what: str
    off: Callable[[], Any]
    behind: str = ""
    hash_bits: int = 128
    faults: bool = True
    first_seed: int = 0  # near where it is seen: a hunt is long, and a test short
    without: frozenset[str] = NO_DAMAGE
    often: frozenset[str] = frozenset()
    ranks: bool = False


def _patched(target: object, name: str, thing: object) -> Any:
    return mock.patch.object(target, name, thing)


def _checksum_off() -> Any:
    return mock.patch("kvstore.service.disk_moves.is_whole", lambda *_: True)


@contextmanager
def _tokens_off() -> Iterator[None]:
    """A reader takes any whole header for that of the block it asked for."""

    def stored_tokens(hit: Hit, number: int, num_tokens: int) -> int | None:
        header = parse_header(hit.hold.session.slab.read(hit.offsets[number], HEADER_NBYTES))
        tokens = len(header.identity.tokens) // 4 if header is not None else 0
        return tokens if tokens >= num_tokens else None

    with ExitStack() as stack:
        stack.enter_context(_patched(Hit, "_tokens_in", stored_tokens))
        stack.enter_context(_patched(Hit, "_verify_whole_blocks", lambda *_: None))
        yield


@contextmanager
def _context_off() -> Iterator[None]:
    """A reader compares a block's own tokens, and not what came before them."""
    with mock.patch("kvstore.service.prompt.context_digests", lambda tokens, *_: [0] * len(tokens)):
        yield


def _seal_off() -> Any:
    """All that was reserved gets its name, whole or not."""
    real = Store.commit

    def commit(store: Store, session_id: int, number: int, summed: bytes, **more: Any) -> int:
        part = store.session(session_id).reservations.get(number)
        summed = summed.ljust(len(part.reservation.slots), b"\1") if part else summed
        return real(store, session_id, number, summed, **more)

    return _patched(Store, "commit", commit)


@contextmanager
def _row_off() -> Iterator[None]:
    """A slot of the tier below is free at once, with its row still there."""
    real = LowerTier.start

    def start(lower: LowerTier, *args: Any) -> None:
        real(lower, *args)
        lower.tier.parking = False

    with _patched(LowerTier, "start", start):
        yield


def _pin_off() -> Any:
    return _patched(Node, "is_victim", property(lambda node: not (node.order or node.detached or node.parent is None)))


def _bytes_off() -> Any:
    return _patched(Disk, "sync", lambda disk: None)


def _order_off() -> Any:
    """A row for every block of a group, written or not."""
    real = DiskMoves._commit_ready

    def commit_ready(moves: DiskMoves) -> None:
        with mock.patch("kvstore.service.disk_moves._failed", lambda run: frozenset()):
            real(moves)

    return _patched(DiskMoves, "_commit_ready", commit_ready)


def _session_off() -> Any:
    """A session is forgotten, and not what it holds."""
    return _patched(Store, "close_session", lambda store, session_id, *_, **__: store._sessions.pop(session_id, None))


def _quarantine_off() -> Any:
    return _patched(kvstore.core.store, "QUARANTINE_MS", 0.0)


def _restart_off() -> Any:
    """A new daemon takes whatever is free, though others may look at it."""
    real = Takeover.__init__

    def init(takeover: Takeover, memory: Any, legacies: Any, strangers: Any) -> None:
        real(takeover, memory, legacies, strangers)
        memory.parking = False

    return _patched(Takeover, "__init__", init)


def _generation_off() -> Any:
    """A command for a session of an earlier life is taken for one of the session that holds most."""
    real = Store.session

    def session(store: Store, session_id: int) -> Session:
        busiest = max(store.sessions, key=lambda each: each.held_nbytes, default=None)
        return busiest if busiest is not None and session_id not in store._sessions else real(store, session_id)

    return _patched(Store, "session", session)


def _deadline_off() -> Any:
    """Who waits is told when there is something to tell."""
    real = Watch._told

    def told(watch: Watch, wait: Any, now_ms: float) -> Any:
        return real(watch, wait, float("-inf"))

    return _patched(Watch, "_told", told)


def _reply_off() -> Any:
    """A handler that fails leaves no answer."""

    def dispatch(service: Service, message: Any, send: Callable[[Any], None], sender_pid: Any = lambda: None) -> None:
        service.store.on_time(service._clock.now_ms())
        reply = service._answer(message, send, sender_pid) if isinstance(message, wire.Request) else None
        if reply is None:
            service._notice(message)
        else:
            send(reply)
        service._follow_up()

    return _patched(Service, "dispatch", dispatch)


def _no(_: object) -> None: ...


def _keys_off() -> Any:
    def without_keys(tokens: bytes, _: int, digest: bytes) -> bytes:
        return block_symbols_of(tokens, len(tokens), digest)

    return mock.patch("kvstore.core.store.block_symbols_of", without_keys)


def _unpin_off() -> Any:
    def end_part(_: Filling, session: Session, number: int) -> Any:
        part = session.pop_part(number)
        assert part is not None
        return part.reservation.slots

    return _patched(Filling, "end_part", end_part)


def _release_off() -> Any:
    return _patched(Store, "_end_lease", lambda store, session, number: session.pop_lease(number))


def _forgetful(*kinds: str) -> Any:
    """A client that says of nothing but these that it has ended."""

    def end(session: link.Session, number: int, *ended: str) -> None:
        session.in_use.pop(number, None)
        session.ended_reservations += [number] * (link.RESERVATION in ended and link.RESERVATION in kinds)
        session.ended_leases += [number] * (link.LEASE in ended and link.LEASE in kinds)

    return _patched(link.Session, "end", end)


def _carry_off() -> Any:
    """The old session's lock goes before the new daemon knows what is held."""
    real = link.Link._carry_over

    def carry_over(own: link.Link, session: link.Session, welcome: wire.Welcome) -> None:
        session.let_go()
        real(own, session, welcome)

    return _patched(link.Link, "_carry_over", carry_over)


def _delete_off() -> Any:
    return _patched(Tier, "park_again", lambda tier, slots: tier.unpark(slots))


def _forget_off() -> Any:
    """A load that failed is forgotten in memory alone."""
    real, remove = Loads.loaded, Tier.remove

    def loaded(loads: Loads, *args: Any) -> None:
        def remove_there(tier: Tier, pin: Any, index: int) -> None:
            if tier is loads._memory:
                remove(tier, pin, index)

        with _patched(Tier, "remove", remove_there):
            real(loads, *args)

    return _patched(Loads, "loaded", loaded)


def _told_off() -> Any:
    """Nobody looks again at who waits when a block has come."""
    return _patched(Watch, "_num_changes", property(lambda watch: watch._changes))


def _watching_off() -> Any:
    """Whoever has lost his lock is dead, though his process is seen to live."""

    def is_gone(daemon: Daemon, session: Session, _: Any, now_ms: float) -> bool:
        is_new = now_ms - daemon._born_ms[session.id] <= CONFIRM_MS
        return not (is_new or daemon._sessions_file.is_held(session.number))

    return _patched(Daemon, "_is_gone", is_gone)


def _holders_off() -> Any:
    """What several hold is free once one of them lets it go."""
    real = Tier.let_go

    def let_go(tier: Tier, slots: Any) -> None:
        tier._kept -= Counter({slot: tier._kept[slot] - 1 for slot in slots})
        real(tier, slots)

    return _patched(Tier, "let_go", let_go)


def _parts_off() -> Any:
    """What one rank has filled is a block, whatever the others have."""

    def filled(reservation: Reservation) -> Any:
        return [(shard, part) for shard, part in reservation.shards.items() if part is not None] or None

    return _patched(Reservation, "filled", property(filled))


def _unfilled_off() -> Any:
    """What some ranks have filled of a block is a block."""
    real = Store.commit

    def commit(store: Store, session_id: int, number: int, summed: bytes, **more: Any) -> int:
        part = store.session(session_id).reservations.get(number)
        is_joint = part is not None and part.reservation.group is not None
        return real(
            store, session_id, number, summed.ljust(len(part.reservation.slots)) if is_joint else summed, **more
        )

    return _patched(Store, "commit", commit)


def _own_part_off() -> Any:
    """A rank fills its part beside another one that has the same."""
    real = Filling._join

    def join(
        filling: Filling, session: Session, number: int, reservation: Reservation, shard: Shard, *more: int
    ) -> Any:
        reservation.shards.pop(shard, None)
        return real(filling, session, number, reservation, shard, *more)

    return _patched(Filling, "_join", join)


def _abort_off() -> Any:
    """A rank that gives up has given up for itself."""
    real = Filling.end_part

    def end_part(filling: Filling, session: Session, number: int) -> Any:
        if session.reservations[number].reservation.group is None:
            return real(filling, session, number)
        part = session.pop_part(number)
        assert part is not None
        return part.reservation.slots

    return _patched(Filling, "end_part", end_part)


def _ask_off() -> Any:
    """Whoever has a ticket reads."""
    return mock.patch.multiple(link, start_reading=lambda *_: True, stop_reading=lambda *_: None)


def _alive_off() -> Any:
    """A reader's lock is enough, whether there is a daemon or not."""
    real = liveness._is_locked

    def is_locked(fd: int, number: int, ask: int = fcntl.F_GETLK) -> bool:
        return ask != fcntl.F_GETLK or real(fd, number)

    return _patched(liveness, "_is_locked", is_locked)


def _dismissed_off() -> Any:
    """A lease that nobody reads may be read again."""
    real = SessionsFile.dismiss

    def dismiss(file: SessionsFile, share: int) -> bool:
        is_dismissed = real(file, share)
        file.admit(share)
        return is_dismissed

    return _patched(SessionsFile, "dismiss", dismiss)


def _carried_off() -> Any:
    """A process tells a new daemon of its own leases only."""
    real = link.Session.holds

    def holds(session: link.Session) -> Any:
        shared = {number for number, held in session.in_use.items() if held.share}
        return [(number, slots) for number, slots in real(session) if number not in shared]

    return _patched(link.Session, "holds", holds)


def _readers_off() -> Any:
    """A lease that has ended for its owner has ended, whoever reads."""

    def is_dismissed(shares: Shares, share: int) -> bool:
        assert shares._readers is not None
        shares._readers.dismiss(share)
        del shares._leases[share]
        return True

    return _patched(Shares, "_is_dismissed", is_dismissed)


def _beside_off() -> Any:
    """Slots that one rank lets go are free, though others may still write there."""

    def add_part(filling: Filling, session: Session, number: int, reservation: Reservation, shard: Shard) -> None:
        reservation.shards[shard] = None
        session.add_part(number, Part(reservation, shard))
        if reservation.group is not None and len(reservation.shards) == 1:
            for slot in reservation.slots:
                filling._memory.keep(slot)

    return _patched(Filling, "_add_part", add_part)


MUTANTS = (
    Mutant(Guard.CHECKSUM, "no sum is compared", _checksum_off, without=frozenset()),
    Mutant(Guard.TOKENS, "a reader compares no tokens", _tokens_off, hash_bits=8),
    Mutant(Guard.TOKENS, "a reader compares a block's own tokens only", _context_off, hash_bits=8, first_seed=6),
    Mutant(Guard.SEAL, "what was not filled is sealed", _seal_off, "checksum, tokens"),
    Mutant(Guard.ROW, "a slot is reused before its row is gone", _row_off, "checksum, tokens", first_seed=3),
    Mutant(Guard.PIN, "what is in use is evicted", _pin_off),
    Mutant(Guard.BYTES, "rows are written before their bytes are durable", _bytes_off, "checksum", first_seed=10),
    Mutant(Guard.BYTES, "a block that was not written gets a row", _order_off, "checksum", first_seed=3),
    Mutant(Guard.SESSION, "the dead keep what they held", _session_off),
    Mutant(Guard.SESSION, "no quarantine", _quarantine_off, often=WRITING, first_seed=4),
    Mutant(Guard.RESTART, "slots are reused before all say what they hold", _restart_off, "tokens", first_seed=35),
    Mutant(Guard.GENERATION, "commands of an earlier life are obeyed", _generation_off, often=RESTARTING, first_seed=8),
    Mutant(Guard.DEADLINE, "a wait has no end", _deadline_off, "the client's own deadline", first_seed=34),
    Mutant(Guard.DEADLINE, "a handler that fails does not answer", _reply_off, "the client's own deadline"),
    Mutant("(model)", "a cache that finds nothing", lambda: _patched(Store, "find", lambda *_: 0)),
    Mutant("(model)", "a cache that gives nothing", lambda: _patched(Store, "_lease", lambda *_: None), faults=False),
    Mutant("(model)", "extra keys are left out of what a block says", _keys_off),
    Mutant("(model)", "a lock goes before what it stands for is carried over", _carry_off, often=RESTARTING),
    Mutant("(model)", "what several hold is free once one lets it go", _holders_off, often=RESTARTING, first_seed=26),
    Mutant("(model)", "who has lost his lock is dead though he is watched", _watching_off, often=UNLOCKING),
    Mutant("(model)", "a group that failed frees slots that have rows", _delete_off, "checksum", first_seed=3),
    Mutant("(model)", "a block that does not load is not forgotten below", _forget_off, without=frozenset()),
    Mutant(
        "(model)", "blocks leave the tree and the table does not say so", lambda: _patched(Tier, "_fail_detached", _no)
    ),
    Mutant("(model)", "who waits is not told what has come", _told_off, first_seed=3),
    Mutant("(ranks)", "what one rank has filled is sealed", _parts_off, ranks=True),
    Mutant("(ranks)", "what a rank has left out is sealed with the others'", _unfilled_off, ranks=True, first_seed=8),
    Mutant("(ranks)", "slots are free while another rank may write there", _beside_off, ranks=True),
    Mutant("(ranks)", "parts overlap", lambda: _patched(Groups, "_require_fits", lambda *_: None), ranks=True),
    Mutant("(ranks)", "two ranks fill the same part", _own_part_off, ranks=True),
    Mutant("(ranks)", "a rank that aborts takes nothing of the others' along", _abort_off, ranks=True),
    Mutant(
        *("(ranks)", "a rank that is gone takes nothing of the others' along"),
        lambda: _patched(Groups, "leave", lambda *_: []),
        ranks=True,
    ),
    Mutant(
        *("(ranks)", "a part that never comes is waited for for ever"),
        lambda: _patched(Groups, "overdue", lambda *_: []),
        ranks=True,
    ),
    Mutant(
        *("(ranks)", "a rank that verifies compares no sum"),
        lambda: mock.patch("kvstore.service.hit.are_right", lambda *_: True),
        ranks=True,
        first_seed=2,
        without=NOT_THE_INDEX,
    ),
    Mutant("(tickets)", "a lease ends though others read under it", _readers_off, ranks=True),
    Mutant("(tickets)", "whoever has a ticket reads", _ask_off, ranks=True),
    Mutant("(tickets)", "a ticket is read on when its daemon is dead", _alive_off, ranks=True, often=RESTARTING),
    Mutant("(tickets)", "a lease that nobody reads may be read again", _dismissed_off, ranks=True),
    Mutant(
        *("(tickets)", "a ticket is out before it may be read on"),
        lambda: _patched(SessionsFile, "admit", lambda *_: None),
        ranks=True,
    ),
    Mutant(
        *("(tickets)", "a reader that is done keeps its lock"),
        lambda: mock.patch("kvstore.service.link.stop_reading", lambda *_: None),
        ranks=True,
        first_seed=3,
    ),
    Mutant(
        *("(tickets)", "what is read on a ticket is not carried over"),
        _carried_off,
        ranks=True,
        often=RESTARTING,
        first_seed=2,
    ),
    Mutant("(leak)", "a client does not say that a reservation has ended", partial(_forgetful, link.LEASE)),
    Mutant("(leak)", "a client does not say that a lease has ended", partial(_forgetful, link.RESERVATION)),
    Mutant(
        *("(leak)", "what was a reservation before a restart is never let go"),
        partial(_forgetful, link.LEASE, link.RESERVATION),
        often=RESTARTING,
    ),
    Mutant("(leak)", "the parent of an aborted reservation stays pinned", _unpin_off),
    Mutant("(leak)", "a lease that ends is not unpinned", _release_off),
)


def hunt(index: int, seed: int = 0) -> tuple[int, Failure | None]:
    """Changes state. Worlds with a guard off until one of them fails: steps until then, and the failure."""
    mutant, num_steps = MUTANTS[index], [0]
    first = seed + mutant.first_seed

    def use(world: World) -> None:
        num_steps[0] += world.num_steps

    for number in range(first, first + WORLDS_MAX):
        with mutant.off():
            plan = Plan(number, mutant.faults, mutant.hash_bits, mutant.ranks, mutant.without, mutant.often)
            failure = run_world(plan, STEPS_PER_WORLD, use)
        if failure is not None:
            return num_steps[0], failure
    return num_steps[0], None


def line(mutant: Mutant, num_steps: int, failure: Failure | None) -> str:
    """Query."""
    verdict = f"caught after {num_steps:,} steps: {failure.what}" if failure else f"NOT CAUGHT in {num_steps:,} steps"
    behind = f" (behind it: {mutant.behind})" if mutant.behind else ""
    return f"{mutant.guard:10} off: {mutant.what}{behind} -> {verdict}"


def main() -> int:
    """Changes state. The exit code."""
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the first world")
    seed, num_missed = parser.parse_args().seed, 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [pool.submit(hunt, index, seed) for index in range(len(MUTANTS))]
        for mutant, future in zip(MUTANTS, found, strict=True):
            num_steps, failure = future.result()
            num_missed += failure is None
            print(line(mutant, num_steps, failure), flush=True)
    unproved = set(Guard) - {mutant.guard for mutant in MUTANTS}
    print(f"mutants: {len(MUTANTS) - num_missed} of {len(MUTANTS)} caught; guards without one: {unproved or 'none'}")
    return bool(num_missed or unproved)


if __name__ == "__main__":
    sys.exit(main())
