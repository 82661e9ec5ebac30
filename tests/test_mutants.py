"""Each guard is needed: with it off, the simulation sees it. `make mutants` says after how many steps, and by what."""

import pytest

from kvstore.core.stats import Guard
from tests.sim.mutants import MUTANTS, hunt, line


@pytest.mark.parametrize("index", range(len(MUTANTS)), ids=[mutant.what for mutant in MUTANTS])
def test_each_guard_is_needed(index: int) -> None:
    """COR, LEK, HNG, RST, IDN: a guard that can be left out without anybody noticing protects nothing."""
    num_steps, failure = hunt(index)
    assert failure is not None, line(MUTANTS[index], num_steps, failure)


def test_no_guard_is_without_a_mutant() -> None:
    """OBS: what is counted as a guard is proved to be one."""
    assert set(Guard) <= {mutant.guard for mutant in MUTANTS}
