"""`make sim`: many worlds on all cores, and one line about them. A failure says its seed and its shortest trace."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.faults import FAULT_KINDS, OUTCOMES
from tests.sim.shrink import Failure, run_world, shrink
from tests.sim.world import Plan, World

STEPS_PER_WORLD = 1000
JUDGED_STEPS_MIN = 100_000
FAULTS_PER_MILLION_MIN = 1000
HITS_MIN, HITS_MAX = 0.2, 0.8
SHRINK_S = 120.0
TRACE_MAX = 200


@dataclass
class Tally:
    """What happened in some worlds."""

    seeds: list[int] = field(default_factory=list)
    num_steps: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    guards: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None

    def add(self, other: Tally) -> None:
        """Changes state."""
        self.seeds += other.seeds
        self.num_steps += other.num_steps
        for mine, theirs in zip(self._counters, other._counters, strict=True):
            mine.update(theirs)
        self.failure = self.failure or other.failure

    @property
    def _counters(self) -> list[Counter[str]]:
        return [self.kinds, self.faults, self.seen, self.misses, self.guards]

    @property
    def hit_ratio(self) -> float:
        """Query."""
        return self.seen["hits"] / max(1, self.seen["lookups"])

    def faults_of_judgement(self) -> list[str]:
        """Query. What is not as it must be in a run as long as this."""
        if self.num_steps < JUDGED_STEPS_MIN:
            return []
        least = FAULTS_PER_MILLION_MIN * self.num_steps / 1e6
        reasons = [f"only {self.faults[kind]} of {kind!r}" for kind in FAULT_KINDS if self.faults[kind] < least]
        reasons += [f"{what!r} never happened" for what in OUTCOMES if not self.seen[what]]
        if not HITS_MIN <= self.hit_ratio <= HITS_MAX:
            reasons.append(f"{self.hit_ratio:.0%} hits")
        return reasons

    def line(self) -> str:
        """Query."""
        parts = [
            f"seeds {min(self.seeds)}-{max(self.seeds)} ({_listed(self.kinds)})",
            f"steps {self.num_steps:,}",
            f"faults {sum(self.faults.values()):,}: {_listed(self.faults)}",
            f"hits {self.seen['hits']:,} of {self.seen['lookups']:,} ({self.hit_ratio:.0%})",
            f"misses: {_listed(self.misses)}",
            f"guards: {_listed(self.guards)}",
        ]
        return "sim: " + "; ".join(parts)


def plan_of(seed: int) -> Plan:
    """Query. Of eight worlds one is a twin, in which nothing goes wrong, in one hashes collide all the time, and in
    three there are engines of several ranks."""
    return Plan(seed, faults=seed % 8 != 0, hash_bits=8 if seed % 8 == 1 else 128, ranks=seed % 8 in (3, 5, 7))


def tally_of(plan: Plan, num_steps: int) -> Tally:
    """Changes state. One world."""
    tally = Tally([plan.seed])

    def use(world: World) -> None:
        if world.node.daemon is not None:
            world.note_guards()
        others = "with ranks" if plan.ranks else "with faults"
        kind = "twins" if world.is_twin else "with 8-bit hashes" if plan.hash_bits == 8 else others
        tally.kinds[kind] += 1
        tally.num_steps = world.num_steps
        for mine, theirs in (
            (tally.faults, world.machine.faults),
            (tally.seen, world.seen),
            (tally.misses, world.misses),
            (tally.guards, world.guards),
        ):
            mine.update({str(name): count for name, count in theirs.items() if count})

    tally.failure = run_world(plan, num_steps, use)
    return tally


def tallies(seed: int, num_steps: int, num_processes: int) -> Iterator[Tally]:
    """Changes state. One after another until there are as many steps, or a failure."""
    left, running = num_steps, set[Future[Tally]]()
    with ProcessPoolExecutor(num_processes) as pool:
        while left > 0 or running:
            while left > len(running) * STEPS_PER_WORLD and len(running) < 2 * num_processes:
                running.add(pool.submit(tally_of, plan_of(seed), STEPS_PER_WORLD))
                seed += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                tally = future.result()
                left -= tally.num_steps
                yield tally
                if tally.failure is not None:
                    pool.shutdown(cancel_futures=True)
                    return


def explain(failure: Failure) -> str:
    """Query. What an engineer needs."""
    runs = [(name, len(list(run))) for name, run in groupby(turn.name for turn in failure.turns)]
    names = " ".join(name if count == 1 else f"{name}*{count}" for name, count in runs[-TRACE_MAX:])
    return (
        f"sim: FAILED {failure.what}\n"
        f"  world {failure.plan}, step {failure.num_steps}; again: make sim WORLD={failure.plan.seed}\n"
        f"  {len(failure.turns)} turns lead there: {names}"
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]) if count)


def main() -> int:
    """Changes state. The exit code."""
    parser = argparse.ArgumentParser(prog="make sim")
    parser.add_argument("--steps", type=int, default=JUDGED_STEPS_MIN)
    parser.add_argument("--seed", type=int, default=None, help="of the first world; default: some")
    parser.add_argument("--world", type=int, default=None, help="this one alone")
    given = parser.parse_args()
    seed = int.from_bytes(os.urandom(4), "little") if given.seed is None else given.seed
    total = Tally()
    if given.world is not None:
        total.add(tally_of(plan_of(given.world), STEPS_PER_WORLD))
    else:
        _run(total, seed, given.steps)
    if total.failure is not None:
        print(explain(shrink(total.failure, SHRINK_S)))
        return 1
    print(total.line())
    reasons = total.faults_of_judgement()
    for reason in reasons:
        print(f"sim: not a judgement: {reason}", file=sys.stderr)
    return bool(reasons)


def _run(total: Tally, seed: int, num_steps: int) -> None:
    columns = (TextColumn("sim"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("steps", total=num_steps)
        for tally in tallies(seed, num_steps, os.cpu_count() or 1):
            total.add(tally)
            progress.update(task, completed=min(num_steps, total.num_steps))


if __name__ == "__main__":
    sys.exit(main())
