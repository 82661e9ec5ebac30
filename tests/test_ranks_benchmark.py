"""The benchmark of ranks at its smallest: what it moves is compared, and what is wrong is said."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import kvstore
from benchmarks import ranks
from benchmarks.daemon import Daemon

TINY = kvstore.KVSpec(model="tiny", dtype="bfloat16", num_layers=2, num_kv_heads=8, head_dim=8, block_tokens=16)


def test_parts_of_all_ranks_are_the_whole_block():
    for num_ranks in (ranks.NUM_RANKS, ranks.NUM_WAITING):
        plan = ranks.Plan("", TINY, num_ranks, 4)
        block = ranks.kv_of(TINY, 0)
        parts = [plan.part(block, index) for index in range(num_ranks)]
        assert np.array_equal(np.concatenate(parts, axis=2), block)
        for index in range(num_ranks):
            plan.group(index).validate(TINY)


@pytest.mark.parametrize("batch", [1, 3, ranks.BATCH])
def test_slots_never_hold_what_they_are_to_get(batch):
    """A round's blocks lie where the last one's did, so they must be others."""
    plan = ranks.Plan("", TINY, 4, batch, pool_nbytes=0)
    for number in range(2 * plan.pool_blocks):
        before, now = plan.places(number), plan.places(number + 1)
        assert all(one != other for one, other in zip(before, now, strict=True))
        assert not set(plan.tokens(number).tolist()) & set(plan.tokens(number + 1).tolist())


def test_a_run_measures_what_it_says():
    found = ranks.measure(2, 2, 4, TINY, "64MiB", 1 << 20)
    assert (found["blocks"], found["rounds"], found["handovers"]) == (4, 2, 2)
    for name in ("put_ratio", "get_ratio", "acquire_p50_us", "redeem_p50_us", "handover_p50_us", "write_us"):
        assert found[name] > 0
    assert [bar.name for bar in ranks.bars(found)] == ["put_ratio", "get_ratio"]


def test_a_rank_that_ends_is_said():
    with Daemon("64MiB") as daemon:
        plan = ranks.Plan(daemon.address, TINY, 2, 4, pool_nbytes=0)
        with ranks.Ranks(plan) as processes:
            os.kill(processes.pids[1], signal.SIGKILL)
            with pytest.raises(ranks.RanksFailed, match="a rank has ended"):
                processes.together(ranks.Fill(0))


@pytest.mark.parametrize("option", [["--blocks", "0"], ["--blocks", "1000"], ["--rounds", "0"]])
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, option):
    monkeypatch.setattr("sys.argv", ["ranks", *option])
    with pytest.raises(SystemExit, match="2"):
        ranks.main()
    assert "1 to 128 blocks" in capsys.readouterr().err
