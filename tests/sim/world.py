"""All of it together: one thing happens at a time, chosen by the seed, and after every step the laws are asserted."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import xxhash

import radix.hashing
from kvstore.core.groups import PARTS_MS
from kvstore.core.layout import Rect
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.core.stats import Guard
from kvstore.core.store import QUARANTINE_MS, Query
from kvstore.core.tier import ARRIVING, FAILED, FREE, RESERVED, SEALED
from kvstore.media.memory import Geometry
from kvstore.service.daemon import CONFIRM_MS
from kvstore.service.prompt import Prompt
from kvstore.spec import KVSpec
from radix import common_tokens
from radix.check import _check_children
from tests.sim.engines import TICKETS_MAX, Rank, Told, some_engines
from tests.sim.machine import Machine
from tests.sim.node import Node, config_for
from tests.sim.process import Process
from tests.sim.texts import SPECS, Bytes, Text, collided, hash_kind, some_text

EXTENT_NBYTES = 64 << 10
TEXTS_MAX = 200  # remembered per world
CHECK_ALL_STEPS = 16
# A rebuilt index names blocks whose header is whole; what of the payload was not synced, the sum must find.
DAMAGE = ("bit flipped on disk", "bit flipped in a header", "bit flipped in a payload", "index damaged")
FIRST_PID = 1_000_000
PIECES = {
    "core.writes.GROUP_NBYTES": 24 << 10,
    "core.writes.DELETES_MAX": 3,
    "core.tier.EVICTIONS_PER_TURN_MAX": 2,
    "service.link.CARRY_NBYTES": 16,
    "service.link.LEASES_PER_NOTICE": 2,
    "service.hit.SUMMED_NBYTES": 1000,
    "media.rebuild.SLOTS_PER_COMMIT": 2,
}


class Turn(NamedTuple):
    """One thing that happens: its name, and the seed of all that is left to chance in it."""

    name: str
    seed: int


class Plan(NamedTuple):
    """Which world. `faults` False: the twin, in which nothing goes wrong and every block stored is found again.

    `hash_bits`: so many of a block hash's bits tell blocks apart. `ranks`: there are engines of several processes.
    `without`: faults that do not happen; `often`: what
    happens ten times as often.
    """

    seed: int
    faults: bool = True
    hash_bits: int = 128
    ranks: bool = False
    without: frozenset[str] = frozenset()
    often: frozenset[str] = frozenset()


@dataclass(eq=False)
class LateWrite:
    """What a device still writes for a process that is no more; `before_ms`: from then on it cannot land any more."""

    target: Bytes
    source: Bytes
    slab: str
    slot: int
    before_ms: float


class World:
    """Build it, `run` it, `close` it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.is_twin = not plan.faults
        rng = Random(plan.seed)
        self.machine = Machine(rng.uniform(0, 1e9))
        self.machine.rng = rng
        self.seen: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.guards: Counter[str] = Counter()  # of daemons that are no more
        self.num_steps = 0
        self.turns: list[Turn] = []  # taken so far
        self.specs = list(SPECS)
        self.alphabet = rng.choice((2, 3, 50))
        self.engines = some_engines(Random(plan.seed)) if plan.ranks else []
        self.told: deque[Told] = deque(maxlen=TICKETS_MAX)
        self.texts: dict[KVSpec, list[Text]] = {spec: [] for spec in SPECS}
        self.named: dict[bytes, tuple[Text, int]] = {}  # block hash -> a prompt with that block, its number
        self.stored: list[tuple[Text, int]] = []  # and how many tokens of it; the twin's model
        self.late: list[LateWrite] = []
        self.damaged: set[bytes] = set()  # hashes of blocks of which a bit was flipped in memory
        self._last_pid = FIRST_PID
        self._checked = -1
        self._exits = ExitStack()
        folder = Path(tempfile.mkdtemp(prefix=f"sim-kvstore-{os.getpid()}-", dir="/dev/shm"))
        self._exits.callback(shutil.rmtree, folder)
        self.node = self._make_node(rng, folder)
        self.flips_headers = rng.random() < 0.4
        with ExitStack() as undo:
            undo.callback(self._exits.close)  # what is patched must not outlive a world that never was
            self._begin(rng)
            undo.pop_all()

    def _begin(self, rng: Random) -> None:
        self._exits.enter_context(self.node.installed())
        if self.plan.hash_bits < 128:
            self._exits.enter_context(_short_hashes(self.plan.hash_bits))
        self._exits.enter_context(mock.patch("radix.check._check_children", self._check_children))
        if Random(self.plan.seed).random() < 0.5:
            self._exits.enter_context(_small_pieces())
        self.node.start()
        for _ in range(rng.randint(2, 4) + sum(len(engine.parts) for engine in self.engines)):
            self.new_process()

    def _make_node(self, rng: Random, folder: Path) -> Node:
        twin = self.is_twin
        share = 1.0 if twin else rng.choice((0.3, 0.5, 0.5, 1.0))
        budget = None if twin else rng.choice((None, None, None, 200 << 10))
        checksums, verify = rng.random() < 0.9, rng.random() < 0.5
        config = config_for(share, checksums, checksums and verify, "through" if rng.random() < 0.7 else "back", budget)
        memory = Geometry(8, 1 << 20) if twin else Geometry(rng.randint(3, 6), EXTENT_NBYTES)
        size = memory.extent_nbytes if twin or rng.random() < 0.8 else 16 << 10
        disk = Geometry(16 if twin else rng.randint(4, 10), size)
        return Node(self.machine, folder, config, memory, disk, rng.choice((1, 1, 2)), self._note_completion)

    def close(self) -> None:
        """Changes state."""
        with self._exits:
            for process in self.node.everybody:
                process.die()
            if self.node.daemon is not None:
                self.node.kill()
            self.node.lose_memory()

    # Running

    def run(self, num_steps: int, happenings: Happenings) -> None:
        """Changes state. That many steps, then `heal`. Whatever is raised, `turns` leads there again."""
        rng, weights = Random(self.plan.seed ^ 0x5EED), happenings.weights_of(self.plan)
        while self.num_steps < num_steps:
            (name,) = rng.choices(happenings.names, cum_weights=weights)
            self.take(Turn(name, rng.getrandbits(32)), happenings)
        self.take(Turn("heal", 0), happenings)

    def take(self, turn: Turn, happenings: Happenings) -> None:
        """Changes state."""
        self.turns.append(turn)
        self.machine.rng = Random(turn.seed)
        happenings.by_name[turn.name](self)
        if self.num_steps != self._checked:
            self._checked = self.num_steps
            self.check(all_of_it=self.num_steps % CHECK_ALL_STEPS == 0)

    @property
    def rng(self) -> Random:
        """Query. Of the turn that is being taken."""
        return self.machine.rng

    @property
    def now_ms(self) -> float:
        """Query."""
        return self.machine.clock.now_ms()

    def _note_completion(self) -> None:
        self.num_steps += 1

    # What processes ask of the world

    def new_process(self) -> None:
        """Changes state."""
        self._last_pid += 1
        self.node.everybody.append(Process(self, self._last_pid, Random(self.rng.getrandbits(32)), self._vacancy()))

    def _vacancy(self) -> Rank | None:
        """Query. The first place in an engine that no living process has."""
        taken = {process.rank for process in self.node.everybody if not process.is_dead}
        places = [Rank(engine, number) for engine in self.engines for number in range(len(engine.parts))]
        return next((place for place in places if place not in taken), None)

    def some_text(self, spec: KVSpec, rng: Random) -> Text:
        """Changes state. A prompt."""
        known = self.texts[spec]
        text = some_text(spec, known, rng, alphabet=self.alphabet)
        if self.plan.hash_bits < 128 and rng.random() < 0.2 and text.num_blocks > 1 and not text.keys:
            text = collided(text, rng)
        if not known or known[-1] is not text:
            known.append(text)
            del known[:-TEXTS_MAX]
            if self.plan.hash_bits == 128:
                self._name(text)
        return text

    def front_of(self, text: Text, rng: Random) -> Text:
        """Changes state. A prompt that ends earlier."""
        front = Text(text.spec, text.token_ids[: rng.randint(1, text.num_tokens)], text.keys)
        self._name(front)
        return front

    @property
    def is_damaged(self) -> bool:
        """Query. Whether anything was done that makes a reader find wrong bytes, or headers."""
        return any(self.machine.faults[fault] for fault in DAMAGE)

    def _name(self, text: Text) -> None:
        prompt = prompt_of(text)
        for block in range(prompt.num_blocks):
            self.named[prompt.block_hash(block)] = text, block

    def predicted(self, text: Text) -> int:
        """Query. The twin's model of a hit: the longest common token prefix with anything stored."""
        longest = max((text.common(other, num_tokens) for other, num_tokens in self.stored), default=0)
        return longest - longest % text.spec.grain_tokens

    def note_lookup(self, text: Text, verified: int, reason: str) -> None:
        """Changes state. What became of a lookup."""
        if self.is_twin:
            assert verified == self.predicted(text), f"hit {verified} of {self.predicted(text)} tokens"
        self.seen["lookups"] += 1
        if verified:
            self.seen["hits"] += 1
            self.seen["partial hits"] += verified % text.spec.block_tokens > 0
        else:
            self.misses[reason] += 1

    # The laws

    def check(self, *, all_of_it: bool) -> None:
        """Query."""
        for process in self.node.everybody:
            if not (process.is_dead or process.is_given_up):
                assert all(view.is_right for view in process.views), "an array shows another block's bytes"
        if self.node.daemon is None:
            return
        self._check_room()
        self._check_closure()
        self._check_sessions()
        self._check_answers()
        self._check_guards()
        self._check_joint()
        self._check_late()
        if all_of_it:
            self.node.daemon.service.store.check()
            self._check_pins()
            self._check_sealed()
            self._check_held()
            self._check_rows()

    def _check_room(self) -> None:
        """DSK, LEK: `free + cached + reserved = total`, told from the table alone, in each tier."""
        service = self.service
        tables, store = service.slab.tables, service.store
        _check_counts(store.memory, tables.extents, tables.slots["state"])
        if store.lower is not None:
            _check_counts(store.lower.tier, store.lower.tier.pool._class_of, store.lower.tier._state)

    def _check_closure(self) -> None:
        """COR: what can be found has all that it goes on from, in each tier, and is there or on its way."""
        lower = self.service.store.lower
        for tier in (self.service.store.memory, *([lower.tier] if lower is not None else [])):
            below = list(tier.tree._roots.values())
            while below:
                node = below.pop()
                assert all(child.parent is node and not child.detached for child in node.order), (
                    "a block without parent"
                )
                states = tier._state[np.frombuffer(node.slots, "<u4")]
                assert ((states == SEALED) | (states == ARRIVING)).all(), "a block that is neither there nor on its way"
                below += node.order

    def _check_pins(self) -> None:
        """LEK: what is pinned is so by a lease, a reservation or a move that has not ended."""
        store = self.service.store
        pins = [pin for session in store.sessions for lease in session.leases.values() for pin in lease.pins]
        pins += [each.parent for each in store.filling.open_reservations()]
        pins += [pin for lease in store.shares.read_on for pin in lease.pins]
        moving = store.lower.pins[0] if store.lower is not None else []  # those below: in store.check
        store.memory.tree.check([*pins, *store.filling.sums.pins, *moving])

    def _check_sessions(self) -> None:
        """LEK: no lease, no reservation without an owner that lives, or whose death the daemon has yet to see; and
        COR: none is ended but by its owner."""
        daemon = self.node.daemon
        assert daemon is not None
        for session in self.service.store.sessions:
            owner = self.node.owner.get(session.id)
            assert owner in self.node.everybody, "a session of nobody"
            held = owner.holds_in(session.id)
            assert held <= session.leases.keys() | session.reservations.keys(), "somebody's lease was ended by another"
        known = {session.id for session in self.service.store.sessions}
        for process in filter(self.is_known, self.node.everybody):
            number = process.link.session.id
            assert number in known or not process.holds_in(number), "somebody's session was ended by another"
            self._check_readings(process)

    def _check_readings(self, process: Process) -> None:
        """TPP, LEK: what a process reads lives, and it keeps nobody from ending what it does not read any more."""
        if process.task is None and not process.is_given_up:
            locked = {share for share in self.node.locks.shares_of(process) if share > self.service.epoch}
            assert locked <= process.shares_read, "a reader that is done keeps its lock"
            assert locked <= self.service.store.shares._leases.keys(), "a lease has ended that somebody reads"

    def is_known(self, process: Process) -> bool:
        """Query. Whether it has said hello to this daemon, and what it holds."""
        link, daemon = process.link, self.node.daemon
        return link is not None and daemon is not None and link.session.welcome.epoch == daemon.service.epoch

    def _check_answers(self) -> None:
        """HNG: who waits is told at the time given at the latest, once the loop has looked at the clock; and at once
        where there is something to tell."""
        watch, seen_ms = self.service.store.watch, self.service.store.now_ms
        waits = watch._waits.values()
        assert all(wait.until_ms > seen_ms for wait in waits), "a wait was not answered in time"
        assert all(watch._told(wait, float("-inf")) is None for wait in waits), "a wait that has its answer goes on"

    def _check_children(self, tree: Any, node: Any) -> None:
        """The order of siblings is by what their headers and rows say (see radix.PrefixTree): not where a header may
        be damaged, nor while rows cannot be read."""
        whole = self.node.daemon is None or len(list(self.working_paths())) == len(self.node.folders)
        if whole and not self.flips_headers:
            _check_children(tree, node)

    def _check_sealed(self) -> None:
        """COR: what has a name in memory has that block's bytes."""
        if self.plan.hash_bits < 128:
            return
        tables, slab = self.service.slab.tables, self.service.slab
        for slot in np.flatnonzero(tables.slots["state"] == SEALED).tolist():
            header = slab.header(slot)
            if header is None:
                assert self.damaged, f"slot {slot} is sealed and has no header"
                continue
            self.seen["blocks of several ranks"] += len(header.rects) > 1
            self.node.daemon.ledger.check_block(header.identity.number, header.generation)
            self._check_bytes(header, slab.payload(slab.offset(slot, self._class_of(slot)), header.payload_nbytes))

    def _check_bytes(self, header: Any, payload: Bytes) -> None:
        text, _ = self.named.get(header.identity.block_hash, (None, 0))
        is_summed = text is not None and all(_is_right(text.spec, rect, payload) for rect in header.rects)
        if header.identity.block_hash in self.damaged and not (is_summed and header.rects):
            return
        named = self.named.get(header.identity.block_hash)
        assert named is not None, "a block that nobody has made"
        text, block = named
        start = block * text.spec.block_tokens
        num_tokens = min(text.num_tokens - start, len(header.identity.tokens) // 4)
        assert text.begins(payload, start, num_tokens), "sealed with another block's bytes"
        assert is_summed, "a wrong sum"

    def _check_held(self) -> None:
        """COR, TPP: what a hit has given stays so until it is let go, whoever leased it: nothing else comes there."""
        for process in self.node.everybody:
            if not (process.is_dead or process.is_given_up):
                assert all(held.is_right for held in process.hits), "what is leased has become another block"

    def _check_joint(self) -> None:
        """TPP, LEK: what ranks fill together is open until all parts are in, or one of them gives it up for all."""
        daemon = self.node.daemon
        assert daemon is not None
        store = daemon.service.store
        generations = {each.generation for each in store.filling.groups.open_reservations()}
        daemon.ledger.check_open(generations, store.now_ms)
        self.seen["read on"] += len(store.shares.read_on)

    def _check_late(self) -> None:
        """COR: where a device may still write there is no block, and no room for one."""
        states = self.service.slab.tables.slots["state"]
        slots = [write.slot for write in self.late if write.slab == str(self.node.slab_path)]
        assert not np.isin(states[slots], (FREE, SEALED)).any(), "a device may write to what is free, or a block"

    def _check_guards(self) -> None:
        """COR: a guard whose own fault was not injected has nothing to do, or one before it has failed."""
        guards = self.service.store.stats.guards
        if not self.is_damaged:
            assert not guards[Guard.CHECKSUM], "damage that nobody has done"
        if self.plan.hash_bits == 128:
            assert not guards[Guard.TOKENS], "a block under another's name"

    def _check_rows(self) -> None:
        """RST: what the tier below offers has its row; DSK: and lies within what it was given."""
        lower = self.service.store.lower
        if lower is None:
            return
        rows, states = self._rows, lower.tier._state
        assert set(np.flatnonzero(states == SEALED).tolist()) <= rows, "offered before it is durable"
        assert not (states[sorted(rows)] == FREE).any(), "free to be written to while a row names what was there"

    @property
    def _rows(self) -> set[int]:
        """Slots of the tier below that have a row which counts."""
        rows = {slot for number in self.working_paths() for slot in self.node.folders[number].rows.rows}
        return rows - {slot for number in self.working_paths() for slot in self.service.disk._working[number].stale}

    def working_paths(self) -> Iterable[int]:
        """Query."""
        disk = self.service.disk
        return disk._working if disk is not None else ()

    @property
    def service(self) -> Any:
        daemon = self.node.daemon
        assert daemon is not None
        return daemon.service

    def _class_of(self, slot: int) -> int:
        return int(self.service.slab.tables.extents[slot // SLOTS_PER_EXTENT_MAX])

    # What happens when nothing goes wrong

    def process_acts(self) -> None:
        """A client operation goes on, or the next one begins."""
        able = [process for process in self.node.everybody if process.can_act]
        if not able:
            return
        process = self.rng.choice(able)
        if process.task is None:
            process.begin(Random(self.rng.getrandbits(32)))
        process.go_on()
        if self.is_twin:
            self.finish(process)

    def finish(self, process: Process) -> None:
        """Changes state. Everything that the operation of this process needs happens, in some order."""
        for _ in range(10_000):
            if process.task is None:
                return
            self.rng.choice((self.daemon_serves, self.movers_work, self.daemon_turns))()
            if process.can_act:
                process.go_on()
            elif self.is_quiet:
                self.machine.clock.advance(1.0)
        raise AssertionError("an operation does not end")

    @property
    def is_quiet(self) -> bool:
        """Query. Whether nothing goes on but by time."""
        daemon = self.node.daemon
        waiting = any(endpoint.outgoing for endpoint in self.node.endpoints)
        return daemon is None or (daemon.movers.is_idle and not waiting)

    def daemon_serves(self) -> None:
        """Some messages arrive."""
        if self.node.daemon is not None:
            self.node.daemon.turn(self.rng.choice((1, 1, 3)), completions=False, deaths=False)

    def daemon_turns(self) -> None:
        """Completions are taken, and deaths are seen; both may have waited for long."""
        if self.node.daemon is not None:
            self.node.daemon.turn(0, completions=True, deaths=self.rng.random() < 0.5)
            self._bury()

    def _bury(self) -> None:
        """Forget the dead of whom the daemon holds nothing any more."""
        daemon = self.node.daemon
        if daemon is None:
            return
        owners = {id(self.node.owner.get(session.id)) for session in daemon.service.store.sessions}
        speaking = {id(endpoint.process) for endpoint in self.node.endpoints if endpoint.outgoing}
        self.node.everybody = [
            each for each in self.node.everybody if not each.is_dead or id(each) in owners | speaking
        ]

    def movers_work(self) -> None:
        """Some steps of what is under way on the movers, in any order."""
        for _ in range(self.rng.choice((1, 2, 6, 12))):
            tasks = self.node.daemon.movers.tasks if self.node.daemon is not None else []
            if not tasks:
                return
            assert self.node.daemon is not None
            self.node.daemon.movers.go_on(self.rng.choice(tasks))

    def time_passes(self) -> None:
        """A little."""
        self.advance(self.rng.choice((0.1, 1.0, 10.0, 50.0)))

    def seconds_pass(self) -> None:
        """Long enough for a sweep."""
        self.advance(self.rng.choice((300.0, 1000.0, 3000.0)))

    def advance(self, by_ms: float) -> None:
        """Changes state. TTL: what could still land has landed or never will; processes that were given up end."""
        until_ms = self.now_ms + by_ms
        for write in [each for each in self.late if each.before_ms <= until_ms]:
            self.land(write)
        self.machine.clock.advance(by_ms)
        for process in self.node.everybody:
            if not process.is_dead and process.ends_ms <= until_ms:
                process.die()

    def land(self, write: LateWrite) -> None:
        """Changes state. A device writes what a process told it to, though that is dead."""
        self.late.remove(write)
        write.target[:] = write.source
        self.machine.faults["late device write"] += 1

    def memory_is_needed(self, share: int = 2) -> None:
        """Half of what may go goes: in the twin, where memory is large, for the disk to be read."""
        if self.node.daemon is None:
            return
        memory = self.service.store.memory
        for slot_nbytes in memory.pool.classes:
            wanted = memory.pool.num_free(slot_nbytes) + memory.tree.num_evictable(slot_nbytes) // share
            slots = memory.reserve(slot_nbytes, wanted)
            if slots is not None:
                memory.give_back(slots)

    # The end

    def heal(self) -> None:
        """Changes state. Faults stop. Everybody goes on; nothing stays held; all that was not lost is hit again."""
        self._faults_end()
        self._everybody_goes_on()
        self._nobody_is_waited_for()
        self._everybody_parts()
        self._come_to_rest()
        self.check(all_of_it=True)
        store = self.service.store
        assert not store.sessions, "sessions without a process"
        assert not store.memory.parking, "still parking for sessions that are gone"
        self._check_nothing_is_held()
        self._finds_what_is_cached()
        self._stores_again()

    def _faults_end(self) -> None:
        for folder in self.node.folders:
            folder.file.disaster.end()
            folder.file.is_dead = False
        self.node.drops_replies = 0
        if self.node.daemon is None or not self._has_whole_disk():
            self._replace_daemon()
        assert self.node.daemon is not None
        self.node.daemon.raises_next = False
        for process in self.node.everybody:
            process.is_stalled = False

    def _has_whole_disk(self) -> bool:
        """Whether the tier below is all there, or may yet be: an operator would start the daemon again else."""
        is_reading = not self.node.daemon.movers.is_idle if self.node.daemon is not None else False
        whole = len(list(self.working_paths())) == len(self.node.folders)
        return whole and (is_reading or self.service.store.lower is not None)

    def _replace_daemon(self) -> None:
        if self.node.daemon is not None:
            self.note_guards()
            self.node.kill()
        self.node.start()

    def note_guards(self) -> None:
        """Changes state. What the daemon counted, before it goes."""
        stats = self.service.store.stats
        self.guards.update(stats.guards)
        self.seen["parts already"] += stats.parts_already
        self.seen["parts never came"] += stats.reservations_unfilled

    def _everybody_goes_on(self) -> None:
        """Each process that lives ends what it is at, is connected again in time, and is served."""
        for process in [each for each in self.node.everybody if not each.is_dead]:
            if process.is_given_up:
                process.die()
                continue
            self._until_served(process)
            self._holds_nothing(process)

    def _holds_nothing(self, process: Process) -> None:
        """LEK: of a process that lives and has let all go the daemon holds nothing either."""
        process.begin(Random(0), process.lets_all_go)
        self._until_served(process)
        while process.endpoint.outgoing:
            self.daemon_serves()
        owner = self.node.owner
        held = [each for each in self.service.store.sessions if owner[each.id] is process and each.holds_anything]
        assert not held, "what was let go is held"

    def _nobody_is_waited_for(self) -> None:
        """LEK, TPP: where all have let go, what waited for parts or readers is free again, though they live."""
        self.advance(PARTS_MS + 1.0)
        self.daemon_turns()
        store = self.service.store
        assert not store.filling.open_reservations(), "a part that nobody fills is waited for"
        assert not store.shares._leases, "leases that nobody reads are shared"

    def _until_served(self, process: Process) -> None:
        """Changes state. Everything goes on until this process has ended what it is at, and is connected."""
        for _ in range(4000):
            if process.task is None and _is_connected(process):
                return
            if process.task is None:
                process.begin(Random(self.rng.getrandbits(32)), process.come_back)
            if process.can_act:
                process.go_on()
            self.daemon_serves()
            self.movers_work()
            self.daemon_turns()
            self.advance(1.0)
        raise AssertionError("a process is not served again")

    def _everybody_parts(self) -> None:
        for process in self.node.everybody:
            process.die()

    def _come_to_rest(self) -> None:
        """Changes state. All that is under way ends, and what waits to be written is written."""
        self.advance(QUARANTINE_MS + CONFIRM_MS)
        for _ in range(5000):
            if not self._has_whole_disk():
                self._replace_daemon()
            self._all_goes_on()
            if self._is_at_rest and not self.service.store.sessions:
                self.advance(QUARANTINE_MS)
                self.daemon_turns()
                return
        raise AssertionError("it does not come to rest")

    def _all_goes_on(self) -> None:
        daemon = self.node.daemon
        assert daemon is not None
        daemon.turn(100, completions=True, deaths=True)
        self.movers_work()
        self.advance(100.0)
        self._bury()
        lower = daemon.service.store.lower
        group = lower.writes.start_group(self.now_ms, flush=True) if lower is not None else None
        if group is not None:
            daemon.service._disk().write(group)

    @property
    def _is_at_rest(self) -> bool:
        store = self.service.store
        if store.lower is None or store._quarantine or store.filling.sums.pins or not self.node.daemon.movers.is_idle:
            return False
        if store.shares.read_on:
            return False
        return store.lower.writes.is_idle and not store.lower.loads.pins and not store.lower.tier.has_parked

    def _check_nothing_is_held(self) -> None:
        states = self.service.slab.tables.slots["state"]
        assert not np.isin(states, (RESERVED, ARRIVING, FAILED)).any(), "slots are held for nobody"
        lower = self.service.store.lower
        store = self.service.store
        assert not store.memory.tree._detached
        assert not store.memory._kept, "slots are kept for nobody"
        assert not store.filling.open_reservations()
        assert not store.shares._leases, "leases that nobody reads are shared"
        assert not store.filling.groups.all, "groups without a rank"
        assert not lower.tier.tree._detached
        assert lower.pins == ([], [])
        assert not lower.loads.queued_nbytes + lower.writes.queued_nbytes + lower.writes.writing_nbytes
        assert not lower.loads.arriving_from
        assert not lower.writes.writing_from
        used = set(np.flatnonzero(lower.tier._state).tolist())
        assert used == self._rows, "usage is what the disk says"

    def _finds_what_is_cached(self) -> None:
        """Not only unharmed: found, and given. What lies in slab and files says what must be hit."""
        if self.plan.hash_bits < 128:
            return
        below, on_disk = self._names_in_memory(), self._names_on_disk()
        for spec in self.specs:
            entry = self.service.store.attach(spec)
            self.service.store.report(entry.spec_id, 1000, 1e15, None)  # a load pays, however slow
        self.new_process()
        reader = self.node.everybody[-1]
        reader.specs, reader.deadline_ms = list(self.specs), 1e6
        self._until_served(reader)
        texts = [text for texts in self.texts.values() for text in texts[-12:]]
        for text in texts:
            prompt = prompt_of(text)
            found, lies = self._found(text), max(_tokens_in(names, text, prompt) for names in (below, on_disk))
            assert found == lies or self.flips_headers, f"found {found} of {lies} tokens that lie there"
        for text in texts:
            self._reads(reader, text)
        reader.die()
        self._come_to_rest()

    def _found(self, text: Text) -> int:
        entry, prompt = self.service.store.attach(text.spec), prompt_of(text)
        found: int = self.service.store.find(entry.spec_id, Query(prompt.hashes, prompt.tokens, prompt.key_facts))
        return found

    def _reads(self, reader: Process, text: Text) -> None:
        guards, room_nbytes = self.service.store.stats.guards, self.service.store._session_nbytes_max
        room = room_nbytes // text.spec.slot_nbytes * text.spec.block_tokens
        for _ in range(2 * text.num_blocks + 1):  # each block may be damaged in both tiers
            while not self._is_at_rest:  # what waits to be written is not evicted to make room
                self._all_goes_on()
            wanted, fired = self._found(text), guards[Guard.CHECKSUM]
            verified = self._result_of(reader, partial(reader.read, text))
            while reader.endpoint.outgoing:  # what it found damaged
                self.daemon_serves()
            self.seen["read after all"] += verified > 0
            if verified == wanted or room < wanted:
                return
            assert guards[Guard.CHECKSUM] > fired, f"given {verified} of {wanted} tokens that lie there"
        raise AssertionError("what was found damaged is offered again")

    def _result_of(self, process: Process, call: Callable[[], int]) -> int:
        results: list[int] = []
        process.begin(Random(1), lambda: results.append(call()))
        process.go_on()
        self.finish(process)
        return results[0]

    def _names_in_memory(self) -> dict[bytes, dict[bytes, bytes]]:
        """Parent -> block hash -> symbols."""
        names: dict[bytes, dict[bytes, bytes]] = {}
        for slot in np.flatnonzero(self.service.slab.tables.slots["state"] == SEALED).tolist():
            header = self.service.slab.header(slot)
            if header is not None:
                identity = header.identity
                names.setdefault(identity.parent, {})[identity.block_hash] = self.service._symbols_of(slot)
        return names

    def _names_on_disk(self) -> dict[bytes, dict[bytes, bytes]]:
        names: dict[bytes, dict[bytes, bytes]] = {}
        lower = self.service.store.lower
        sealed = set(np.flatnonzero(lower.tier._state == SEALED).tolist())
        for number in self.working_paths():
            for slot, row in self.node.folders[number].rows.rows.items():
                if slot in sealed:
                    names.setdefault(row.parent, {})[row.block_hash] = row.symbols
        return names

    def _stores_again(self) -> None:
        """A full node takes new blocks of every spec, and gives them back."""
        self.new_process()
        writer = self.node.everybody[-1]
        writer.specs, writer.deadline_ms = list(self.specs), 1e6
        self._until_served(writer)
        for number, spec in enumerate(self.specs):
            text = Text(spec, tuple(range(10**6 + 1000 * number, 10**6 + 1000 * number + spec.block_tokens)), ())
            if self.plan.hash_bits == 128:
                self._name(text)
            verified = self._result_of(writer, partial(writer.store_and_read, text))
            is_other = self.plan.hash_bits < 128  # another block may have this name
            assert verified == text.num_tokens or is_other, "a healed node takes no new block"
        self.check(all_of_it=True)


class Happenings:
    """What can happen, and how often."""

    def __init__(
        self, normal: dict[str, int], twin: dict[str, int], faults: dict[str, float], ranks: dict[str, float]
    ) -> None:
        """`twin`, `ranks`: only in worlds of that kind; `faults`: not in twins."""
        self._normal, self._twin, self._faults, self._ranks = normal, twin, faults, ranks
        self.names: list[str] = [*normal, *twin, *faults, *ranks]
        self.by_name: dict[str, Callable[[World], None]] = {}

    def weights_of(self, plan: Plan) -> list[float]:
        """Query. Cumulative, in the order of `names`."""
        twin = dict.fromkeys(self._twin, 0) if plan.faults else self._twin
        faults = {name: weight * plan.faults for name, weight in self._faults.items()}
        ranks = {name: weight * plan.ranks for name, weight in self._ranks.items()}
        all_of_it = self._normal | twin | faults | ranks | dict.fromkeys(plan.without, 0)
        weights = [all_of_it[name] * (10 if name in plan.often else 1) for name in self.names]
        return [sum(weights[: at + 1]) for at in range(len(weights))]


def prompt_of(text: Text) -> Prompt:
    """Query. As a client names it."""
    return Prompt(text.spec, hash_kind(text.spec), text.token_ids, text.keys)


def _is_right(spec: KVSpec, rect: Rect, payload: Bytes) -> bool:
    """Whether a rectangle of a payload sums to what is said of it; told without the product's own arithmetic."""
    num_tokens = payload.size // spec.payload_nbytes(1)
    array = payload.view(spec.numpy_dtype).reshape(spec.array_shape(num_tokens))
    if not spec.is_opaque:
        array = array[slice(*rect.shard.layers), :, slice(*rect.shard.heads)]
    return xxhash.xxh3_64_intdigest(array.tobytes()) == rect.sum


def _is_connected(process: Process) -> bool:
    link = process.link
    return link is not None and process.has_caches and link.usable


def _check_counts(tier: Any, classes: Any, states: Any) -> None:
    per_extent = states.reshape(-1, SLOTS_PER_EXTENT_MAX)
    for slot_nbytes in tier.pool.classes:
        extents = np.flatnonzero(classes == slot_nbytes)
        count = tier.pool.extent_nbytes // slot_nbytes
        found = np.bincount(per_extent[extents, :count].reshape(-1), minlength=5).tolist()
        gone = int((per_extent[[each for each in extents if each in tier.pool._withdrawn], :count] == FREE).sum())
        counts = found[FREE] - gone, found[SEALED] + found[ARRIVING] + found[FAILED], found[RESERVED]
        assert counts == tier.counts(slot_nbytes), f"{counts} is not {tier.counts(slot_nbytes)}"
        assert sum(counts) + gone == len(extents) * count, "slots beyond the capacity"


def _tokens_in(names: dict[bytes, dict[bytes, bytes]], text: Text, prompt: Prompt) -> int:
    block = 0
    while block < prompt.num_blocks and prompt.block_hash(block) in names.get(prompt.parent_hash(block), {}):
        block += 1
    if block == prompt.num_blocks:
        return text.num_tokens
    others = names.get(prompt.parent_hash(block), {}).values()
    partial = max((common_tokens(other, prompt.symbols(block)) for other in others), default=0)
    return block * text.spec.block_tokens + partial - partial % text.spec.grain_tokens


def _short_hashes(bits: int) -> Any:
    """Block hashes of which only the first bits differ: collisions are then daily life."""

    def short(digest: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        return lambda message: bytes((digest(message)[0] & (1 << bits) - 1, *bytes(15)))

    digests = {kind: short(digest) for kind, digest in radix.hashing._DIGESTS.items()}
    return mock.patch.dict(radix.hashing._DIGESTS, digests)


@contextmanager
def _small_pieces() -> Iterator[None]:
    """What is done in pieces because it may be much is so for little, too."""
    with ExitStack() as stack:
        for name, much in PIECES.items():
            stack.enter_context(mock.patch(f"kvstore.{name}", much))
        yield


def collect() -> None:
    """Changes state. What worlds left behind."""
    gc.unfreeze()
    gc.collect()
