"""The SSD part of copy_rate: nobody writes where somebody else does, and a small run measures what it says."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

import kvstore
from benchmarks import disk_rate
from benchmarks.copy_rate import spec_of
from benchmarks.disk_rate import Plan
from kvstore.core.slots import EXTENT_NBYTES_MAX, extent_nbytes_for
from kvstore.media.slabfile import DATA_OFFSET

MIB = 1 << 20
SMALL = kvstore.KVSpec(model="small", dtype="float16", num_layers=4, num_kv_heads=8, head_dim=64, block_tokens=16)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder where files can be opened around the page cache."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("no O_DIRECT in the folder for temporary files")
    return tmp_path / "base"


@pytest.mark.parametrize("block_kib", [2048, 736])
@pytest.mark.parametrize("rounds", [1, 6])
def test_the_raw_side_has_the_upper_half_of_the_file(block_kib: int, rounds: int) -> None:
    plan = Plan(spec_of(block_kib), rounds)
    offsets = [plan.raw_offset(slot) - DATA_OFFSET for slot in range(rounds * plan.slots_per_round)]
    assert offsets[0] == plan.capacity_nbytes // 2
    assert offsets[-1] + plan.slot_nbytes <= plan.capacity_nbytes
    assert all(b - a >= plan.slot_nbytes for a, b in itertools.pairwise(offsets))
    ends = [(at // EXTENT_NBYTES_MAX, (at + plan.slot_nbytes - 1) // EXTENT_NBYTES_MAX) for at in offsets]
    assert all(first == last for first, last in ends), "a slot lies across extents"


@pytest.mark.parametrize("round_nbytes", [MIB, 1 << 30])
def test_the_file_is_cut_as_the_plan_thinks(round_nbytes: int) -> None:
    plan = Plan(SMALL, 2, round_nbytes=round_nbytes)
    assert extent_nbytes_for(plan.capacity_nbytes) == EXTENT_NBYTES_MAX
    assert plan.num_rounds * plan.slots_per_round <= plan.half_extents * plan.per_extent


def test_chains_and_what_is_borrowed_share_no_token() -> None:
    plan = Plan(SMALL, 2, round_nbytes=32 * MIB)
    chains = [*plan.chains(0), *plan.chains(1)]
    assert chains == list(range(2 * plan.chains_per_round))
    tokens = np.concatenate([plan.tokens(chain, plan.batch) for chain in chains] + [plan.tokens(len(chains), 1000)])
    assert len(np.unique(tokens)) == len(tokens)


def test_a_small_run_measures_both_sides_and_leaves_nothing(base: Path) -> None:
    results = disk_rate.measure(SMALL, 1, base, round_nbytes=16 * MIB)
    for verb in ("read", "write"):
        for name in (f"disk_{verb}_gbps", f"disk_raw_{verb}_gbps", f"disk_{verb}_ratio"):
            low, high = results[f"{name}_range"]
            assert 0 < low == results[name] == high
    assert {bar.name for bar in disk_rate.bars(results, "at.")} == {"at.disk_read_ratio", "at.disk_write_ratio"}
    assert not base.exists()


def test_a_file_system_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has room for"):
        disk_rate.require_room(tmp_path, 1 << 60)
