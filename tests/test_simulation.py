"""The node in simulation (tests/sim): fixed seeds, fresh ones, the twin without faults, and that a seed is a whole run.

`make sim STEPS=1000000` is the same for longer; tests/test_mutants.py proves that it can fail.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.sim.faults import FAULT_KINDS, OUTCOMES
from tests.sim.report import STEPS_PER_WORLD, Tally, explain, plan_of, tally_of
from tests.sim.shrink import Failure, run_world, shrink
from tests.sim.world import Plan, World

FIXED = range(12)
NUM_FRESH = 2


def tallies_of(plans: Iterable[Plan]) -> list[Tally]:
    """Changes state. A world of each, on all cores."""
    with ProcessPoolExecutor() as pool:
        return list(pool.map(partial(tally_of, num_steps=STEPS_PER_WORLD), plans))


def test_fixed_seeds_neither_lie_nor_leak() -> None:
    """COR, LEK, RST, DSK, TTL, HNG, TPP: whatever happens to processes, ranks, daemon and disks, what is read is right,
    each call ends in time, nothing stays held, what was not lost is found, and a ticket tells all who redeem it the
    same. Every fault and every outcome happens."""
    total = Tally()
    for tally in tallies_of(map(plan_of, FIXED)):
        total.add(tally)
    assert total.failure is None, explain(shrink(total.failure, 20.0))
    assert not [kind for kind in FAULT_KINDS if not total.faults[kind]], total.faults
    assert not [what for what in OUTCOMES if not total.seen[what]], total.seen
    assert 0.2 <= total.hit_ratio <= 0.8


def test_fresh_seeds() -> None:
    """COR, LEK, RST, DSK, TTL, HNG, TPP: as the fixed ones; the first seed is told, so a failure can be had again."""
    first = int.from_bytes(os.urandom(4), "little")
    for tally in tallies_of(map(plan_of, range(first, first + NUM_FRESH))):
        assert tally.failure is None, explain(shrink(tally.failure, 20.0))


def test_the_twin_hits_what_the_model_predicts() -> None:
    """HSH, IDN: where nothing goes wrong, each hit is exactly the longest common token prefix with anything stored,
    extra keys counted; over restarts in which memory is lost, too."""
    for tally in tallies_of(Plan(seed, faults=False) for seed in range(3)):
        assert tally.failure is None, explain(tally.failure)
        assert tally.seen["hits"] > tally.seen["lookups"] / 3
        assert set(tally.misses) == {"not cached"}
        assert not tally.faults["power lost"] + tally.faults["process killed"]


def test_a_seed_is_a_whole_run() -> None:
    """HSH: also in another process, which hashes strings in another way: a failure seen anywhere can be had again."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        there = pool.submit(tally_of, plan_of(7), 300).result()
    assert there.failure is None
    assert there == tally_of(plan_of(7), 300)


def test_a_world_leaves_nothing_behind() -> None:
    """LEK: conftest looks for slabs of daemons only."""
    assert run_world(plan_of(2), 100) is None
    assert not list(Path("/dev/shm").glob(f"sim-kvstore-{os.getpid()}-*"))


def test_a_failure_is_shrunk_and_says_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_check_room", lambda world: _no_crash(world))
    failure = run_world(Plan(3), STEPS_PER_WORLD)
    assert failure is not None
    short = shrink(failure, 2.0)
    assert "process_dies" in [turn.name for turn in short.turns]
    assert len(short.turns) < len(failure.turns)
    assert "nobody may die" in explain(short)
    assert "make sim WORLD=3" in explain(short)


def _no_crash(world: World) -> None:
    assert not world.machine.faults["process killed"], "nobody may die"


def test_a_run_in_which_too_little_happens_is_no_judgement() -> None:
    """What `make sim` asks of a long run: each fault often enough, hits in bounds, each outcome."""
    tally = Tally(num_steps=1_000_000)
    tally.seen.update({"lookups": 100, "hits": 90} | {what: 1 for what in OUTCOMES if what != "hits"})
    tally.faults.update(dict.fromkeys(FAULT_KINDS, 1000) | {"power lost": 999})
    assert tally.faults_of_judgement() == ["only 999 of 'power lost'", "90% hits"]
    tally.num_steps = 99_999
    assert not tally.faults_of_judgement()


def test_the_first_failure_of_many_worlds_is_kept() -> None:
    first, second = (Failure(Plan(seed), "it broke", 1, ()) for seed in (1, 2))
    total = Tally()
    for failure in (None, first, second):
        total.add(Tally(failure=failure))
    assert total.failure is first
