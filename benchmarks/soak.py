"""Real processes, real kills: what a storm of SIGKILLs costs in wrong bytes, lost memory, silence and late answers.

A real daemon with a small RAM tier and a small SSD tier, and clients that store and read KV of which every byte is a
function of spec and tokens (benchmarks/soak_client.py). Daemon and clients are killed, stopped for a while, told to
end in order and started again at moments that follow from the seed; now and then the slab is taken away between two
lives of the daemon, and its SSD tier changes between write-through and write-back. What clients count survives their
own SIGKILL (benchmarks/soak_records.py).

    operations, kills           what has happened; kills_daemon, kills_client, stops (SIGSTOP), daemon_lives,
                                cold_starts
    wrong_bytes                 bytes of any array that differ from what the tokens say, also while it was kept beyond
                                its lease, its client, or the daemon; wrong_answers: a hit in a forked child or of a
                                closed client, blocks out of order
    leaked_bytes                at the end, with all clients gone and quarantine over: what the daemon still has in
                                reservations, or under sessions that do not live; what its slots and extents do not add
                                up to, at any moment of the run; after its end what the SSD's index holds and its status
                                did not say; after `kvstore clean` what is left of slab and socket. `leaks` has each
    bad_blocks                  blocks of the SSD tier that `kvstore check` finds wrong at the end
    unanswered                  calls that returned more than SILENCE_S after they were due, or not at all; a daemon
                                that runs and gives no answer for DAEMON_SILENCE_S or does not end when told to
    late_p999_ms                99.9th percentile, over all calls, of how late they returned beyond their deadline, less
                                what the control thread of the same process shows: see benchmarks/soak_records.py, also
                                for clients that were stopped. late_max_ms: the latest; calls_at_deadline: how many were
                                still running when they were due, late_p999_ms_at_deadline: the percentile over those
    rss_slope_bytes_per_s       growth of the daemon's own memory (RssAnon: no slab, no files) by least squares over all
                                of its lives at once, each with a level of its own, while clients work and from half of
                                a long life on (15 s in a run of 60 s, 45 s in a long one). The bar: |slope| <= max(3
                                standard errors (rss_noise_bytes_per_s), RSS_SLOPE_MIN), since a young daemon still
                                grows: runs in its trees part, until each block is one of its own
    crashes                     daemons that ended though nobody told them to, clients that ended by an exception
"""

import contextlib
import io
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import kvstore
from benchmarks import soak_client
from benchmarks.daemon import STOP_S_MAX, Daemon, DaemonFailed, shared_memory, terminated_like_interrupted
from benchmarks.report import Bar, at_least, at_most, finish, holds, parser
from benchmarks.soak_records import (
    CALL,
    WAKE,
    Count,
    Trend,
    counts_in,
    lateness_ms,
    percentile_ms,
    reached_deadline,
    times_in,
    trend,
)
from kvstore import cli
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.media.check import verify
from kvstore.media.disk import Disk

SECONDS, OPERATIONS_MIN, KILLS_MIN = 60.0, 1000, 20
CLIENTS = 4
MEMORY, DISK = "16MiB", "48MiB"
DEADLINES_MS = 50.0, 100.0, 200.0
TICK_S = 0.01
LONG_LIFE_S_MAX, LONG_EVERY = 90.0, 40  # of the daemon: only then its memory shows a trend
S_PER_KILL_MAX = 6.0  # a run that waits for kills gives up after so long for each
SILENCE_S = 2.0
HANG_S = 5.0  # of a call in a client that could run, seen from outside
LEAVE_S_MAX = 5.0  # a client that was told to end
DAEMON_SILENCE_S = 10.0
QUARANTINE_S_MAX = 25.0  # reservations of the dead end 10 s after a restart
SAMPLE_S = 0.25
RSS_SLOPE_MIN = 128 << 10  # bytes/s; seen without a leak: 66 KB/s 12 to 30 s after a start, 5 KB/s after 4 minutes
LOG_LINES = 30


# --- what is to happen


class Fate(NamedTuple):
    """The life of one process, in seconds from its start."""

    life_s: float
    orderly: bool  # SIGTERM at its end, not SIGKILL
    stop_at_s: float
    stop_s: float  # 0: it is never stopped
    pause_s: float  # from its end to the next one's start
    variant: float  # in [0, 1): for what else is to be chosen


def daemon_fate(seed: int, number: int, long_life_s: float) -> Fate:
    """Query. Most lives are short, some too short to come up; every LONG_EVERY-th, from the first on, is long."""
    chance = random.Random(f"{seed}/daemon/{number}")
    life_s = long_life_s if number % LONG_EVERY == 0 else chance.uniform(0.2, 3.0)
    stop_s = chance.uniform(0.05, 1.5) if chance.random() < 0.4 else 0.0
    orderly = chance.random() < 0.2
    return Fate(life_s, orderly, chance.uniform(0, life_s), stop_s, chance.choice((0.0, 0.1, 0.5)), chance.random())


def client_fate(seed: int, slot: int, number: int) -> Fate:
    """Query."""
    chance = random.Random(f"{seed}/client/{slot}/{number}")
    life_s = chance.uniform(0.3, 9.0)
    stop_s = chance.uniform(0.02, 1.0) if chance.random() < 0.4 else 0.0
    return Fate(life_s, chance.random() < 0.2, chance.uniform(0, life_s), stop_s, 0.0, chance.random())


class Ending(NamedTuple):
    """How a process has ended."""

    exit_code: int
    told: bool  # to end, by us
    killed: bool  # by us, and not because it hung
    hung: bool  # it did not end when told to

    @property
    def is_crash(self) -> bool:
        """A SIGTERM that comes before a process is up ends it as it ends any other."""
        return not self.killed and not self.hung and self.exit_code not in (0, self.told and -signal.SIGTERM)


class Victim:
    """A process and its fate."""

    def __init__(self, pid: int, exit_code: Callable[[], int | None], fate: Fate, leave_s_max: float) -> None:
        self.pid, self.fate = pid, fate
        self.born_s = self.awake_since_s = time.monotonic()
        self.num_stops = 0
        self.is_stopped = False
        self.told_s: float | None = None  # when it was told to end
        self._exit_code = exit_code
        self._leave_s_max = leave_s_max
        self._killed = self._hung = False

    def step(self, now_s: float) -> Ending | None:
        """Changes state. What is due now; how it has ended, once it has."""
        exit_code = self._exit_code()
        if exit_code is not None:
            killed = self._killed and exit_code == -signal.SIGKILL
            return Ending(exit_code, self.told_s is not None, killed, self._hung)
        age_s, fate = now_s - self.born_s, self.fate
        if self.told_s is not None:
            self._see_off(now_s)
        elif age_s >= fate.life_s:
            self.end(now_s)
        elif self.is_stopped and age_s >= fate.stop_at_s + fate.stop_s:
            self.go_on(now_s)
        elif not self.num_stops and fate.stop_s and age_s >= fate.stop_at_s:
            self.is_stopped, self.num_stops = True, 1
            self._send(signal.SIGSTOP)
        return None

    def end(self, now_s: float) -> None:
        """Changes state. A SIGKILL comes to a stopped process, too."""
        self.told_s = now_s
        if self.fate.orderly:
            self.go_on(now_s)
            self._send(signal.SIGTERM)
        else:
            self._killed = True
            self._send(signal.SIGKILL)

    def go_on(self, now_s: float) -> None:
        """Changes state. Idempotent."""
        if self.is_stopped:
            self.is_stopped, self.awake_since_s = False, now_s
            self._send(signal.SIGCONT)

    def give_up(self) -> None:
        """Changes state. It hangs: its threads say where, then it is killed."""
        self._hung = True
        self.told_s = self.told_s or time.monotonic()
        self._send(signal.SIGUSR1)  # a client's faulthandler; it ends a daemon
        time.sleep(0.1)
        self._send(signal.SIGKILL)

    def _see_off(self, now_s: float) -> None:
        assert self.told_s is not None
        if not self._hung and not self._killed and now_s - self.told_s > self._leave_s_max:
            self.give_up()

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


# --- what is seen


class Watch:
    """A client that lives through the whole run, and looks at the daemon all the time."""

    def __init__(self, address: str, warm_s: float) -> None:
        """Changes state. `look` does the looking, on a thread of the caller's. `warm_s`: from when on memory counts."""
        self._address = address
        self._warm_s = warm_s
        self._client: kvstore.Client | None = None
        self._answered_s = time.monotonic()
        self.rss: dict[int, list[tuple[float, float]]] = {}  # life -> (seconds, bytes)
        self.stats: dict[int, Counter[str]] = {}  # life -> what that daemon has counted so far
        self.unaccounted_nbytes = 0
        self.num_silences = 0

    def look(self, life: int, victim: Victim | None) -> dict[str, Any] | None:
        """Changes state. What the daemon says, if it answers."""
        now_s = time.monotonic()
        if victim is not None and not victim.is_stopped and now_s - victim.born_s > self._warm_s:
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                self.rss.setdefault(life, []).append((now_s, float(anon_nbytes(victim.pid))))
        facts = self._ask()
        if facts is not None:
            self._answered_s = time.monotonic()
            self.unaccounted_nbytes = max(self.unaccounted_nbytes, unaccounted_nbytes(facts))
            if victim is not None and facts["pid"] == victim.pid:
                self.stats[life] = activity(facts)
        elif victim is not None and self._silence_s(victim) > DAEMON_SILENCE_S:
            self.num_silences += 1
            self._answered_s = time.monotonic()
        return facts

    def _silence_s(self, victim: Victim) -> float:
        if victim.is_stopped or victim.told_s is not None:
            return 0.0
        return time.monotonic() - max(self._answered_s, victim.awake_since_s)

    @property
    def session(self) -> int:
        """Query. Of this client itself."""
        return int(self._client.status()["client"]["session"]) if self._client is not None else 0

    def close(self) -> None:
        """Changes state."""
        if self._client is not None:
            self._client.close()

    def _ask(self) -> dict[str, Any] | None:
        try:
            self._client = self._client or kvstore.connect(self._address, deadline_ms=500)
        except kvstore.KVStoreError:
            return None
        facts: dict[str, Any] | None = self._client.status()["daemon"]
        return facts


def anon_nbytes(pid: int) -> int:
    """Query. Memory of a process that is neither shared nor a file's; ValueError for one that is gone."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"process {pid} has no memory any more")


def unaccounted_nbytes(facts: dict[str, Any]) -> int:
    """Query. By how much free + cached + reserved slots miss the extents there are, in both tiers."""
    memory, disk = facts["memory"], facts["disk"]
    extent_nbytes: int = memory["extent_nbytes"]
    wrong: int
    wrong, assigned = _slots_astray(memory["slots"], extent_nbytes)
    wrong += abs(memory["extents_ready"] - assigned - memory["extents_unassigned"]) * extent_nbytes
    if disk is not None and disk["ready"]:
        extent_nbytes = disk["capacity_nbytes"] // disk["extents"]
        astray, assigned = _slots_astray(disk["slots"], extent_nbytes)
        used = assigned + disk["extents_unassigned"] + disk["extents_lost"]  # others wait for space on the drive
        wrong += astray + max(0, used - disk["extents"]) * extent_nbytes
    return wrong


def _slots_astray(slots: dict[str, dict[str, int]], extent_nbytes: int) -> tuple[int, int]:
    """Bytes of slots that are in no whole extent, or less than none; and how many extents the others make."""
    astray = extents = 0
    for slot_nbytes, counts in slots.items():
        whole, rest = divmod(sum(counts.values()), extent_nbytes // int(slot_nbytes))
        extents += whole
        astray += (rest + sum(max(0, -count) for count in counts.values())) * int(slot_nbytes)
    return astray, extents


def activity(facts: dict[str, Any]) -> Counter[str]:
    """Query. What shows that both tiers were busy."""
    stats, disk = facts["stats"], facts["disk"]
    found = Counter({name: stats[name] for name in ("blocks_stored", "blocks_written", "blocks_loaded")})
    found["blocks_evicted"] = facts["memory"]["blocks_evicted"]
    found["blocks_taken_over"] = facts["memory"]["blocks_taken_over"]
    found["disk_blocks_evicted"] = disk["blocks_evicted"] if disk and disk["ready"] else 0
    return found


# --- the storm


@dataclass
class Tally:
    """What has happened so far."""

    events: Counter[str] = field(default_factory=Counter)
    counts: Counter[Count] = field(default_factory=Counter)  # of clients that have ended
    late_ms: list[np.ndarray[Any, np.dtype[np.float64]]] = field(default_factory=list)  # of each client's calls
    at_deadline_ms: list[np.ndarray[Any, np.dtype[np.float64]]] = field(default_factory=list)
    unanswered: int = 0
    words: list[str] = field(default_factory=list)  # of those who crashed, hung or read wrong bytes

    @property
    def kills(self) -> int:
        return self.events["kills_daemon"] + self.events["kills_client"]

    def say(self, text: str) -> None:
        """Changes state. For people, at once: a soak is long."""
        self.words.append(text)
        print(f"soak: {text}", file=sys.stderr, flush=True)


class Client(NamedTuple):
    """A living client."""

    plan: soak_client.Plan
    victim: Victim
    close: Callable[[], None]  # what the process object of an ended process holds


class Storm:
    """Daemon, clients and what happens to them. One thread calls `step`."""

    def __init__(
        self,
        seed: int,
        long_life_s: float,
        num_clients: int,
        daemon: Daemon,
        records: Path,
        context: ForkServerContext,
    ) -> None:
        self.tally = Tally()
        self.life = -1  # number of the daemon's
        self.victim: Victim | None = None  # the daemon
        self._seed, self._long_life_s = seed, long_life_s
        self._daemon = daemon
        self._records = records
        self._context = context
        self._next_start_s = 0.0
        self._clients: list[Client | None] = [None] * num_clients
        self._numbers = [0] * num_clients

    def begin(self) -> None:
        """Changes state. The first daemon's life is counted from when it answers."""
        self._start_daemon()
        self._daemon.wait_until_up()
        assert self.victim is not None
        self.victim.born_s = time.monotonic()

    @property
    def operations(self) -> int:
        """Query. So far, by the living, too."""
        living = [counts_in(each.plan.file("counts"))[Count.OPERATIONS] for each in self._clients if each is not None]
        return self.tally.counts[Count.OPERATIONS] + sum(living)

    def step(self) -> None:
        """Changes state. Whatever is due now."""
        self._step_daemon(time.monotonic())
        for slot in range(len(self._clients)):
            self._step_client(slot, time.monotonic())

    def calm(self) -> None:
        """Changes state. All clients die, and a daemon stays: returns once it runs."""
        for each in self._clients:
            if each is not None:
                self._kill(each)
        self._clients = [None] * len(self._clients)
        while self.victim is None or self.victim.told_s is not None:
            self._step_daemon(time.monotonic())
            time.sleep(TICK_S)
        self.victim.go_on(time.monotonic())

    def close(self) -> None:
        """Changes state. No process of ours is left but the daemon, which can be told to end. Idempotent."""
        for each in self._clients:
            if each is not None:
                self._kill(each)
        self._clients = [None] * len(self._clients)
        if self.victim is not None:
            self.victim.go_on(time.monotonic())

    def _step_daemon(self, now_s: float) -> None:
        if self.victim is None:
            if now_s >= self._next_start_s:
                self._start_daemon()
            return
        ending = self.victim.step(now_s)
        if ending is None:
            return
        fate, self.victim = self.victim.fate, None
        self._next_start_s = now_s + fate.pause_s
        self.tally.events["kills_daemon"] += ending.killed
        if ending.hung:
            self.tally.unanswered += 1
            self.tally.say(f"daemon {self.life} did not end within {STOP_S_MAX} s")
        elif ending.is_crash:
            self.tally.events["crashes"] += 1
            self.tally.say(f"daemon {self.life} ended with {ending.exit_code}:\n{self._daemon.last_words(LOG_LINES)}")
        if fate.variant < 0.2:
            self._take_slab_away()

    def _start_daemon(self) -> None:
        self.life += 1
        fate = daemon_fate(self._seed, self.life, self._long_life_s)
        self._daemon.spawn("--disk.write", "back" if fate.variant > 0.7 else "through")
        daemon, self.victim = self._daemon, Victim(self._daemon.pid, lambda: daemon.exit_code, fate, STOP_S_MAX)
        self.tally.events["stops"] += bool(fate.stop_s)
        self.tally.events["daemon_lives"] += 1

    def _take_slab_away(self) -> None:
        for path in self._daemon.slab_folder.glob("slab-*"):
            path.unlink()
        self.tally.events["cold_starts"] += 1

    def _step_client(self, slot: int, now_s: float) -> None:
        client = self._clients[slot]
        if client is None:
            client = self._clients[slot] = self._start_client(slot)
        ending = client.victim.step(now_s)
        if ending is not None:
            self._clients[slot] = None
            self._bury(client, ending)
        elif not client.victim.is_stopped and client.victim.told_s is None:
            began_s = counts_in(client.plan.file("counts"))[Count.BEGAN_NS] / 1e9
            if began_s and now_s - max(began_s, client.victim.awake_since_s) > HANG_S:
                client.victim.give_up()

    def _start_client(self, slot: int) -> Client:
        number = self._numbers[slot]
        self._numbers[slot] += 1
        chance = random.Random(f"{self._seed}/plan/{slot}/{number}")
        records = self._records / f"{slot}-{number}"
        deadline_ms = chance.choice(DEADLINES_MS)
        plan = soak_client.Plan(self._daemon.address, records, chance.getrandbits(32), self._seed, deadline_ms)
        process = self._context.Process(target=soak_client.run, args=(plan,), name=f"soak-{slot}", daemon=True)
        process.start()
        assert process.pid is not None
        fate = client_fate(self._seed, slot, number)
        self.tally.events["stops"] += bool(fate.stop_s)
        victim = Victim(process.pid, lambda: process.exitcode, fate, LEAVE_S_MAX)
        return Client(plan, victim, process.close)

    def _kill(self, client: Client) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(client.victim.pid, signal.SIGKILL)
        while (ending := client.victim.step(-1.0)) is None:  # before its birth nothing is due
            time.sleep(0.001)
        self._bury(client, ending._replace(killed=True), of_the_storm=False)

    def _bury(self, client: Client, ending: Ending, *, of_the_storm: bool = True) -> None:
        """What it has left in its files counts as if it lived."""
        client.close()
        counts = counts_in(client.plan.file("counts"))
        self.tally.counts.update(counts)
        self.tally.events["kills_client"] += ending.killed and of_the_storm
        self.tally.unanswered += counts[Count.SILENT_CHILDREN] + ending.hung
        self.tally.events["crashes"] += ending.is_crash
        self._judge(client.plan, counts[Count.AWAKE_NS])
        if ending.hung or ending.is_crash or counts[Count.WRONG_BYTES] or counts[Count.WRONG_ANSWERS]:
            log = client.plan.file("log").read_text(encoding="utf-8", errors="replace").splitlines()
            self.tally.say("\n".join([f"client {client.plan.records.name}: {ending}", *log[-3 * LOG_LINES :]]))
        for kind in ("counts", "calls", "wakes", "log"):
            client.plan.file(kind).unlink(missing_ok=True)

    def _judge(self, plan: soak_client.Plan, awake_ns: int) -> None:
        calls, wakes = times_in(plan.file("calls"), CALL), times_in(plan.file("wakes"), WAKE)
        late_ms = lateness_ms(calls, wakes, awake_ns)
        silent = int((late_ms > 1000 * SILENCE_S).sum())
        if silent:
            self.tally.say(f"client {plan.records.name}: {silent} calls were later than {SILENCE_S} s")
        self.tally.unanswered += silent
        self.tally.late_ms.append(late_ms)
        self.tally.at_deadline_ms.append(late_ms[reached_deadline(calls, awake_ns)])


# --- the end of it


def settle(watch: Watch, storm: Storm) -> dict[str, Any]:
    """Changes state. What the daemon says once nobody is left and all that was on its way has come; or at last."""
    until_s = time.monotonic() + QUARANTINE_S_MAX
    facts = None
    while time.monotonic() < until_s:
        facts = watch.look(storm.life, None) or facts  # what it does now is not what the run was about
        if facts is not None and _is_settled(facts, watch.session):
            break
        time.sleep(SAMPLE_S)
    if facts is None:
        raise DaemonFailed("the last daemon does not answer")
    return facts


def _is_settled(facts: dict[str, Any], own_session: int) -> bool:
    memory, disk = facts["memory"], facts["disk"]
    others = [each for each in facts["sessions"] if each["id"] != own_session]
    if others or memory["reserved_nbytes"] or memory["sessions_unaccounted"] or not disk["ready"]:
        return False
    # Write-back holds some back for as long as there is room: it is written when the daemon ends.
    return bool(disk["idle"] or disk["write"] == "back") and not disk["loading_nbytes"]


def held_nbytes(facts: dict[str, Any], own_session: int) -> int:
    """Query. What sessions that do not live hold; one that holds nothing counts for what it is."""
    dead = [each for each in facts["sessions"] if each["id"] != own_session]
    return sum(each["held_nbytes"] + each["leases"] + each["reservations"] + 1 for each in dead)


def on_disk(folder: Path) -> tuple[int, int]:
    """Changes state. (bytes of all slots that have a row, blocks that are wrong), while no daemon has the tier."""
    with contextlib.closing(Disk.open([folder], None)) as disk:
        slots = disk.rows()["slot"]
        nbytes = int(disk.classes()[slots // SLOTS_PER_EXTENT_MAX].sum())
        report = verify(disk, lambda done, total: None, fix=False)
    return nbytes, sum(report.bad.values())


def left_nbytes(daemon: Daemon) -> int:
    """Changes state. What remains of slab and socket after the daemon's end and `kvstore clean`.

    That command looks at all daemons of the user; here it is shown ours alone.
    """
    ours = mock.patch.object(cli, "all_folders", lambda: [daemon.slab_folder])
    with ours, contextlib.redirect_stdout(io.StringIO()):
        cli.clean()
    left = [Path(daemon.address.removeprefix("ipc://")), daemon.slab_folder, *daemon.slab_folder.rglob("*")]
    return sum(max(1, path.lstat().st_size) for path in left if os.path.lexists(path))


def _stop_in_order(daemon: Daemon, tally: Tally) -> None:
    try:
        exit_code = daemon.stop()
    except DaemonFailed as exc:
        tally.unanswered += 1
        tally.say(str(exc))
        return
    if exit_code != 0:
        tally.events["crashes"] += 1
        tally.say(f"the last daemon ended with {exit_code}:\n{daemon.last_words(LOG_LINES)}")


def leaks_of(watch: Watch, storm: Storm, daemon: Daemon, folder: Path) -> tuple[dict[str, int], int]:
    """Changes state. Bytes by where they leak, and how many blocks of the SSD tier are wrong. The daemon ends."""
    facts = settle(watch, storm)
    leaks = {"reserved": facts["memory"]["reserved_nbytes"], "sessions": held_nbytes(facts, watch.session)}
    leaks["unaccounted"] = watch.unaccounted_nbytes
    watch.close()
    _stop_in_order(daemon, storm.tally)
    nbytes, num_bad = on_disk(folder)
    known_nbytes, waiting_nbytes = facts["disk"]["cached_nbytes"], facts["disk"]["queued_nbytes"]
    leaks["ssd"] = max(0, nbytes - known_nbytes - waiting_nbytes, known_nbytes - nbytes)
    leaks["left"] = left_nbytes(daemon)
    return leaks, num_bad


# --- the run


@dataclass(frozen=True)
class Length:
    """How long a storm lasts: until so many kills, if they are given, else so many seconds."""

    seconds: float = SECONDS
    kills: int | None = None

    @property
    def seconds_max(self) -> float:
        return self.seconds if self.kills is None else max(SECONDS, S_PER_KILL_MAX * self.kills)

    @property
    def long_life_s(self) -> float:
        """Query. Of a daemon whose memory is looked at."""
        return min(LONG_LIFE_S_MAX, self.seconds_max / 2)

    def is_over(self, spent_s: float, kills: int) -> bool:
        """Query."""
        return spent_s >= self.seconds_max or (self.kills is not None and kills >= self.kills)

    def share_done(self, spent_s: float, kills: int) -> float:
        """Query. For a progress bar."""
        return spent_s / self.seconds if self.kills is None else kills / max(1, self.kills)


def measure(length: Length, seed: int, num_clients: int, base: Path, command: Sequence[str] = ()) -> dict[str, Any]:
    """Changes state: makes folders in `base` and in shared memory, for as long as it takes. `command`: as Daemon's."""
    with contextlib.ExitStack() as held:
        folder = held.enter_context(_folder_in(base))
        records = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-soak-", dir=shared_memory())))
        options = ["--disk.path", str(folder / "ssd"), "--disk.capacity", DISK, "--disk.write_budget", "unlimited"]
        daemon = Daemon(MEMORY, *options, command=command)
        held.callback(daemon.close)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.soak_client"])
        storm = Storm(seed, length.long_life_s, num_clients, daemon, records, context)
        held.callback(storm.close)
        watch = Watch(daemon.address, length.long_life_s / 2)
        held.callback(watch.close)
        storm.begin()
        began_s = time.monotonic()
        with _watching(watch, storm):
            _rage(storm, length)
            spent_s = time.monotonic() - began_s
            storm.calm()
        leaks, num_bad = leaks_of(watch, storm, daemon, folder / "ssd")
        return {"seed": seed, "seconds": spent_s} | figures(storm.tally, watch, leaks, num_bad)


def _rage(storm: Storm, length: Length) -> None:
    console = Console(stderr=True)
    columns = TextColumn("soak"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        began_s = time.monotonic()
        while not length.is_over(spent_s := time.monotonic() - began_s, storm.tally.kills):
            storm.step()
            if not progress.disable:
                text = f"{storm.tally.kills} kills, {storm.operations:,} operations"
                progress.update(task, completed=length.share_done(spent_s, storm.tally.kills), description=text)
            time.sleep(TICK_S)


@contextlib.contextmanager
def _watching(watch: Watch, storm: Storm) -> Iterator[None]:
    """Looks on a thread of its own: a silent daemon must not hold up the storm."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_S):
            watch.look(storm.life, storm.victim)

    thread = threading.Thread(target=look, name="watch")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _folder_in(base: Path) -> Iterator[Path]:
    """Gone afterwards, and `base` with it if it is empty then."""
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            base.rmdir()


def figures(tally: Tally, watch: Watch, leaks: dict[str, int], num_bad: int) -> dict[str, Any]:
    """Query. All that is reported."""
    late_ms, at_deadline_ms = (np.concatenate([np.zeros(0), *each]) for each in (tally.late_ms, tally.at_deadline_ms))
    rss = trend(list(watch.rss.values()))
    busy: Counter[str] = sum(watch.stats.values(), Counter())
    return {
        "operations": tally.counts[Count.OPERATIONS],
        "kills": tally.kills,
        **{name: tally.events[name] for name in ("kills_daemon", "kills_client", "stops")},
        **{name: tally.events[name] for name in ("daemon_lives", "cold_starts", "crashes")},
        **{count.name.lower(): tally.counts[count] for count in (Count.HITS, Count.HIT_TOKENS, Count.BYTES_READ)},
        **{count.name.lower(): tally.counts[count] for count in (Count.FORKS, Count.RECONNECTS)},
        "wrong_bytes": tally.counts[Count.WRONG_BYTES],
        "wrong_answers": tally.counts[Count.WRONG_ANSWERS],
        "leaked_bytes": sum(leaks.values()),
        "leaks": leaks,
        "bad_blocks": num_bad,
        "unanswered": tally.unanswered + watch.num_silences,
        "calls": len(late_ms),
        "calls_at_deadline": len(at_deadline_ms),
        "late_p999_ms": percentile_ms(late_ms, 99.9),
        "late_p999_ms_at_deadline": percentile_ms(at_deadline_ms, 99.9),
        "late_max_ms": float(late_ms.max(initial=0.0)),
        **_rss_figures(rss),
        **busy,
    }


def _rss_figures(rss: Trend) -> dict[str, Any]:
    """JSON knows no infinity: what was not seen is None."""
    seen = np.isfinite(rss.error)
    return {
        "rss_slope_bytes_per_s": rss.slope,
        "rss_noise_bytes_per_s": rss.error if seen else None,
        "rss_seconds": rss.seconds,
    }


def bars(results: dict[str, Any], operations_min: int, kills_min: int) -> list[Bar]:
    """Query."""
    noise = results["rss_noise_bytes_per_s"]
    slope_max = max(3 * (noise or 0.0), float(RSS_SLOPE_MIN))
    zero = ("wrong_bytes", "wrong_answers", "leaked_bytes", "bad_blocks", "unanswered", "crashes")
    return [
        at_least("operations", results["operations"], operations_min),
        at_least("kills", results["kills"], kills_min),
        *(at_most(name, results[name], 0) for name in zero),
        at_most("late_p999_ms", results["late_p999_ms"], 50.0),
        at_most("abs(rss_slope_bytes_per_s)", abs(results["rss_slope_bytes_per_s"]), slope_max),
        holds("rss_was_seen", noise is not None),
        *(
            at_least(name, results.get(name, 0), 1)
            for name in ("hits", "forks", "blocks_evicted", "blocks_loaded", "blocks_written")
        ),
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=SECONDS, help="of the storm (%(default)s)")
    options.add_argument("--kills", type=int, help="go on until so many, instead of --seconds")
    options.add_argument("--seed", type=int, default=1, help="of all that happens (%(default)s)")
    options.add_argument("--clients", type=int, default=CLIENTS, help="at a time (%(default)s)")
    options.add_argument("--folder", type=Path, default=Path(".bench"), help="on the SSD to use (%(default)s)")
    given = options.parse_args()
    length = Length(given.seconds, given.kills)
    share = min(1.0, length.seconds_max / SECONDS)
    logging.getLogger("kvstore").addHandler(logging.NullHandler())  # that a killed daemon is gone is no news here
    try:
        with terminated_like_interrupted():
            results = measure(length, given.seed, given.clients, given.folder)
    except DaemonFailed as exc:
        sys.exit(f"soak: {exc}")
    kills_min = given.kills or int(KILLS_MIN * share)
    return finish("soak", results, bars(results, int(OPERATIONS_MIN * share), kills_min), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
