"""Each guard is needed: with it off, the simulation sees it. `make mutants` says after how many steps, and by what."""

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from kvstore.core.stats import Guard
from tests.sim.mutants import MUTANTS, hunt, line
from tests.sim.shrink import Failure


@pytest.fixture(scope="module")
def hunts() -> Iterator[list[Future[tuple[int, Failure | None]]]]:
    """All of them, on two cores. Not forked: threads of earlier tests may hold locks."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield [pool.submit(hunt, index) for index in range(len(MUTANTS))]


@pytest.mark.parametrize("index", range(len(MUTANTS)), ids=[mutant.what for mutant in MUTANTS])
def test_each_guard_is_needed(hunts: list[Future[tuple[int, Failure | None]]], index: int) -> None:
    """COR, LEK, HNG, RST, IDN: a guard that can be left out without anybody noticing protects nothing."""
    num_steps, failure = hunts[index].result()
    assert failure is not None, line(MUTANTS[index], num_steps, failure)


def test_no_guard_is_without_a_mutant() -> None:
    """OBS: what is counted as a guard is proved to be one."""
    assert set(Guard) <= {mutant.guard for mutant in MUTANTS}
