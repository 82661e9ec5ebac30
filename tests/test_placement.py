"""Policies between tiers: costs are learned from what was measured, a slow tier costs little, a budget holds."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.core.placement import (
    DAY_MS,
    PAYS_BELOW,
    PROBE_NBYTES,
    PROBE_PAUSE_MS_MAX,
    PROBE_SHARE_MAX,
    SLACK,
    LinearCost,
    LoadGate,
    Plan,
    Rate,
    WriteBudget,
    due_ms,
)

MIB = 1 << 20
NOTHING = [0, -1, math.nan, math.inf, -math.inf]

amounts = st.integers(1, 10**12)
times = st.floats(1e-3, 1e9)


def prefill_of(overhead_ms: float, token_ms: float) -> LinearCost:
    """A cost that was learned: the line through two points, exactly."""
    cost = LinearCost()
    for tokens in (64, 1024):
        cost.observe(tokens, overhead_ms + tokens * token_ms)
    return cost


def gate_of(bytes_per_ms: float) -> LoadGate:
    gate = LoadGate()
    gate.observe(MIB, MIB / bytes_per_ms)
    return gate


# Rate


@given(seen=st.lists(st.tuples(amounts, times), min_size=1))
def test_rate_lies_between_those_seen(seen: list[tuple[int, float]]) -> None:
    rate = Rate(half_amount=1000)
    for amount, ms in seen:
        rate.observe(amount, ms)
    rates = [amount / ms for amount, ms in seen]
    assert rate.value is not None
    assert min(rates) * (1 - 1e-9) <= rate.value <= max(rates) * (1 + 1e-9)


@pytest.mark.parametrize("bad", NOTHING)
def test_rate_ignores_what_is_no_measurement(bad: float) -> None:
    rate = Rate(half_amount=1000)
    assert rate.value is None
    rate.observe(bad, 1)
    rate.observe(1, bad)
    assert rate.value is None
    rate.observe(1000, 10)
    rate.observe(bad, 10)
    rate.observe(1000, bad)
    assert rate.value == pytest.approx(100)


@pytest.mark.parametrize("factor", [1 / 60, 60])
def test_two_observations_show_a_change_either_way(factor: float) -> None:
    rate = Rate(half_amount=1000)
    for _ in range(100):
        rate.observe(1e6, 1e6 / 50)
    for _ in range(2):
        rate.observe(1e4, 1e4 / (50 * factor))
    assert rate.value is not None
    assert 0.75 < rate.value / (50 * factor) < 1.3


def test_a_tiny_transfer_says_little_about_the_rate() -> None:
    rate = Rate(half_amount=1000)
    rate.observe(1e6, 1e4)
    rate.observe(10, 10)
    assert rate.value is not None
    assert 90 < rate.value < 100


# LinearCost


@given(
    overhead=st.floats(0, 1000),
    slope=st.floats(0.01, 10),
    lengths=st.lists(st.integers(1, 4000), min_size=2, max_size=50),
)
def test_a_line_is_found(overhead: float, slope: float, lengths: list[int]) -> None:
    assume(max(lengths) > 10 * min(lengths))
    cost = LinearCost(half_amount=1e6)
    for n in [*lengths, min(lengths), max(lengths)] * 2:
        cost.observe(n, overhead + n * slope)
    assume(_spread(lengths * 2) > 0.6)
    assert cost.ms_per_unit == pytest.approx(slope, rel=1e-6)
    assert cost.ms(500) == pytest.approx(overhead + 500 * slope, rel=1e-6)


def _spread(lengths: list[int]) -> float:
    mean = sum(lengths) / len(lengths)
    return math.sqrt(sum((n - mean) ** 2 for n in lengths) / len(lengths)) / mean


@given(seen=st.lists(st.tuples(st.integers(1, 10**6), times), min_size=1))
def test_a_cost_is_never_negative_and_never_falls(seen: list[tuple[int, float]]) -> None:
    cost = LinearCost()
    for n, ms in seen:
        cost.observe(n, ms)
    assert cost.ms_per_unit is not None and cost.ms_per_unit > 0
    costs = [cost.ms(n) for n in (1, 2, 1000, 10**6)]
    for less, more in itertools.pairwise(costs):
        assert less is not None and more is not None
        assert 0 < less <= more


@pytest.mark.parametrize("bad", NOTHING)
def test_cost_ignores_what_is_no_measurement(bad: float) -> None:
    cost = LinearCost()
    cost.observe(bad, 100)
    cost.observe(100, bad)
    assert (cost.ms_per_unit, cost.ms(100)) == (None, None)
    cost.observe(100, 200)
    cost.observe(bad, 100)
    cost.observe(100, bad)
    assert (cost.ms_per_unit, cost.ms(100)) == (2, 200)


@pytest.mark.parametrize("one_long_in", [5, 50, 500])
@pytest.mark.parametrize("seed", range(5))
def test_marginal_cost_comes_out_of_many_short_prefills_and_few_long_ones(one_long_in: int, seed: int) -> None:
    """What a chat engine reports: 30 tokens take 190 ms, 1,500 take 3,100 ms, each ± 10 %."""
    rng = random.Random(seed)
    cost = LinearCost()
    for number in range(5000):
        n = rng.randint(1300, 1700) if number % one_long_in == 0 else rng.randint(20, 40)
        cost.observe(n, (130 + 1.98 * n) * rng.uniform(0.9, 1.1))
        if number > 500:
            assert cost.ms_per_unit == pytest.approx(1.98, rel=0.25)
    assert cost.ms(30) == pytest.approx(190, rel=0.15)
    assert cost.ms(1500) == pytest.approx(3100, rel=0.2)


def test_the_slope_outlives_the_long_prefills_that_showed_it() -> None:
    cost = prefill_of(130, 2)
    rng = random.Random(1)
    for _ in range(5000):
        n = rng.randint(20, 40)
        cost.observe(n, (230 + 2 * n) * rng.uniform(0.9, 1.1))
    assert cost.ms_per_unit == pytest.approx(2, rel=0.1)
    assert cost.ms(30) == pytest.approx(290, rel=0.05)  # the overhead has risen meanwhile


def test_an_engine_that_becomes_faster_is_seen() -> None:
    cost = prefill_of(130, 2)
    rng = random.Random(1)
    for number in range(200):
        n = 1500 if number % 5 == 0 else rng.randint(20, 40)
        cost.observe(n, 20 + 0.1 * n)
    assert cost.ms_per_unit == pytest.approx(0.1, rel=0.2)


def test_prefills_of_one_length_cost_in_proportion() -> None:
    cost = LinearCost()
    for ms in (100, 90, 110):
        cost.observe(50, ms)
    assert cost.ms_per_unit == pytest.approx(2, rel=0.01)


# LoadGate


@given(
    num_blocks=st.integers(1, 50),
    block_tokens=st.integers(1, 512),
    block_nbytes=st.integers(4096, 64 * MIB),
    queued_nbytes=st.integers(0, 1 << 30),
    rate=st.floats(1e3, 1e7),
    overhead=st.floats(0, 1000),
    token_ms=st.floats(0.01, 10),
)
def test_the_better_end_is_the_best_of_all_lengths(
    num_blocks: int,
    block_tokens: int,
    block_nbytes: int,
    queued_nbytes: int,
    rate: float,
    overhead: float,
    token_ms: float,
) -> None:
    """With a load's time counted higher than measured, and but for one that would be cut before its first block."""
    prefill, gate = prefill_of(overhead, token_ms), gate_of(rate)
    slope = prefill.ms_per_unit
    assert slope is not None

    def total_ms(n: int) -> float:
        load_ms = (queued_nbytes + n * block_nbytes) / rate / PAYS_BELOW if n else 0
        return load_ms + overhead + (num_blocks - n) * block_tokens * slope

    plan = gate.choose(num_blocks, num_blocks * block_tokens, block_nbytes, queued_nbytes, prefill, 0)
    due = due_ms(prefill, 0, 0, num_blocks * block_tokens)
    assert due is not None
    if plan.num_blocks or (queued_nbytes + block_nbytes) / rate <= due:
        assert plan.num_blocks in (0, num_blocks)
        best = min(total_ms(n) for n in range(num_blocks + 1))
        assert total_ms(plan.num_blocks) == pytest.approx(best, rel=1e-6)


def test_an_unknown_cost_is_measured_by_loading() -> None:
    assert LoadGate().choose(10, 640, MIB, 0, prefill_of(100, 0.001), 0) == Plan(10, False)
    assert gate_of(1).choose(10, 640, MIB, 0, LinearCost(), 0) == Plan(10, False)
    assert LoadGate().read_gbps is None
    assert gate_of(3e6).read_gbps == pytest.approx(3)


def test_nothing_to_load_is_not_probed() -> None:
    assert gate_of(1).choose(0, 0, MIB, 0, prefill_of(100, 2), 0) == Plan(0, False)


def test_a_load_that_would_be_cut_in_the_queue_is_refused() -> None:
    """Patience is 5 % of 100 + 2 * 640 = 69 ms."""
    gate, prefill = gate_of(1e6), prefill_of(100, 2)
    assert gate.choose(10, 640, MIB, int(65e6), prefill, 0).num_blocks == 10
    assert gate.choose(10, 640, MIB, int(70e6), prefill, 0).num_blocks == 0


@given(gaps=st.lists(st.floats(0, 5000), min_size=1, max_size=100), rate=st.floats(5e3, 5e4))
def test_probes_take_a_bounded_share_of_a_slow_tier(gaps: list[float], rate: float) -> None:
    gate, prefill = gate_of(rate), prefill_of(100, 0.1)
    probed = []
    for now_ms in itertools.accumulate(gaps):
        if gate.choose(10, 640, 8 * MIB, 0, prefill, now_ms).probe:
            probed.append(now_ms)
            gate.observe(PROBE_NBYTES, PROBE_NBYTES / rate)
    assert probed[:1] == gaps[:1]  # the first refusal
    pause_ms = min(PROBE_PAUSE_MS_MAX, PROBE_NBYTES / rate / PROBE_SHARE_MAX)
    assert all(later - earlier >= pause_ms * (1 - 1e-9) for earlier, later in itertools.pairwise(probed))


def test_a_tier_that_hangs_is_cut_once_and_probed_ever_more_rarely() -> None:
    gate, prefill = gate_of(3e6), prefill_of(100, 2)
    assert gate.choose(10, 640, MIB, 0, prefill, 0) == Plan(10, False)
    gate.cut()
    plans = [gate.choose(10, 640, MIB, 0, prefill, float(second * 1000)) for second in range(600)]
    assert not any(plan.num_blocks for plan in plans)
    probed = [second for second, plan in enumerate(plans) if plan.probe]
    assert 50 < len(probed) < 70  # settles at one in 10 s, and never stops
    gate.observe(MIB, 0.4)
    assert gate.choose(10, 640, MIB, 0, prefill, 600_000) == Plan(10, False)


def test_a_hang_of_an_unmeasured_tier_is_cut_once_too() -> None:
    gate = LoadGate()
    gate.cut()
    assert gate.choose(10, 640, MIB, 0, prefill_of(100, 2), 0) == Plan(0, True)


# Patience


@given(
    gaps=st.lists(st.floats(0, 10_000), max_size=50),
    num_blocks=st.integers(1, 50),
    block_tokens=st.integers(1, 512),
    overhead=st.floats(0, 1000),
    token_ms=st.floats(0.01, 10),
)
def test_whatever_the_medium_does_a_request_loses_at_most_5_percent(
    gaps: list[float], num_blocks: int, block_tokens: int, overhead: float, token_ms: float
) -> None:
    """Blocks arrive after any gaps, or never."""
    prefill, num_tokens = prefill_of(overhead, token_ms), num_blocks * block_tokens
    cold_ms = prefill.ms(num_tokens)
    assert cold_ms is not None
    arrivals = [50.0 + ms for ms in itertools.accumulate(gaps[:num_blocks])]
    total_ms = request_ms(prefill, 50.0, arrivals, num_blocks, block_tokens)
    assert total_ms <= cold_ms * (1 + SLACK) + 1e-6


def request_ms(
    prefill: LinearCost, started_ms: float, arrivals: list[float], num_blocks: int, block_tokens: int
) -> float:
    """What the engine sees: blocks until all are there or the load is cut, then the prefill of the rest."""
    loaded, ended_ms = 0, started_ms
    while loaded < num_blocks:
        due = due_ms(prefill, started_ms, loaded * block_tokens, num_blocks * block_tokens)
        assert due is not None and due >= ended_ms
        if loaded == len(arrivals) or arrivals[loaded] > due:
            ended_ms = due
            break
        ended_ms = arrivals[loaded]
        loaded += 1
    cold_ms, slope = prefill.ms(num_blocks * block_tokens), prefill.ms_per_unit
    assert cold_ms is not None and slope is not None
    return ended_ms - started_ms + cold_ms - loaded * block_tokens * slope


def test_no_load_is_cut_while_the_prefill_cost_is_unknown() -> None:
    assert due_ms(LinearCost(), 0, 0, 640) is None


# Together: a drive that slows down and recovers


@dataclass
class Drive:
    """One reader, first come first served; what was begun is read to its end, cut or not."""

    rate: Callable[[float], float]  # bytes per ms at a time
    free_ms: float = 0.0
    done: list[tuple[float, int, float]] = field(default_factory=list)  # (when, nbytes, busy ms), not yet observed

    def read(self, nbytes: int, now_ms: float, until_ms: float = math.inf) -> float | None:
        """When it is there; None when it would not be begun before `until_ms`."""
        begins_ms = max(now_ms, self.free_ms)
        if begins_ms >= until_ms:
            return None
        busy_ms = nbytes / self.rate(begins_ms)
        self.free_ms = begins_ms + busy_ms
        self.done.append((self.free_ms, nbytes, busy_ms))
        return self.free_ms


class Node:
    """A gate, its drive and an engine that is done with one request before the next."""

    def __init__(self, drive: Drive, prefill: LinearCost, num_blocks: int, block_tokens: int, block_nbytes: int):
        self.drive, self.prefill, self.gate = drive, prefill, LoadGate()
        self.num_blocks, self.block_tokens, self.block_nbytes = num_blocks, block_tokens, block_nbytes
        cold_ms = prefill.ms(num_blocks * block_tokens)
        assert cold_ms is not None
        self.cold_ms = cold_ms

    def request(self, now_ms: float) -> tuple[Plan, float]:
        """The plan, and how long it took over all."""
        self.observe(now_ms)
        queued = sum(nbytes for _, nbytes, _ in self.drive.done)
        num_tokens = self.num_blocks * self.block_tokens
        plan = self.gate.choose(self.num_blocks, num_tokens, self.block_nbytes, queued, self.prefill, now_ms)
        if plan.probe:
            self.drive.read(PROBE_NBYTES, now_ms)
        if not plan.num_blocks:
            return plan, self.cold_ms
        arrivals = self.load(now_ms, num_tokens)
        took_ms = request_ms(self.prefill, now_ms, arrivals, self.num_blocks, self.block_tokens)
        self.observe(now_ms + took_ms)
        if len(arrivals) < self.num_blocks:
            self.gate.cut()
        return plan, took_ms

    def load(self, now_ms: float, num_tokens: int) -> list[float]:
        """When each block arrives, of those that do in time."""
        arrivals: list[float] = []
        while len(arrivals) < self.num_blocks:
            due = due_ms(self.prefill, now_ms, len(arrivals) * self.block_tokens, num_tokens)
            assert due is not None
            at_ms = self.drive.read(self.block_nbytes, now_ms, due)
            if at_ms is None or at_ms > due:
                break
            arrivals.append(at_ms)
        return arrivals

    def observe(self, now_ms: float) -> None:
        for _, nbytes, busy_ms in (each for each in self.drive.done if each[0] <= now_ms):
            self.gate.observe(nbytes, busy_ms)
        self.drive.done = [each for each in self.drive.done if each[0] > now_ms]


ENGINES = {
    "135M on a CPU": (prefill_of(130, 2.0), 23 * 64, 3e6, 1e4),  # KiB a block; bytes per ms, healthy and slow
    "1B on a GPU": (prefill_of(20, 0.1), 2048, 3e6, 5e4),
    "8B on a GPU": (prefill_of(20, 0.2), 8192, 6e6, 5e4),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_blocks", [24, 100])
def test_a_drive_that_drops_costs_5_percent_once_and_is_used_again_when_it_recovers(
    engine: str, num_blocks: int
) -> None:
    """50 MB/s (10 MB/s where even 50 beat the engine) from 60 s to 120 s; a request every 5 s."""
    prefill, block_kib, healthy, slow = ENGINES[engine]
    drive = Drive(lambda now_ms: slow if 60_000 <= now_ms < 120_000 else healthy)
    node = Node(drive, prefill, num_blocks, 64, block_kib << 10)
    ran = [(now_ms, *node.request(float(now_ms))) for now_ms in range(0, 180_000, 5000)]
    assert all(took_ms <= node.cold_ms * (1 + SLACK) + 1e-6 for _, _, took_ms in ran)
    before = [took_ms for now_ms, _, took_ms in ran if now_ms < 60_000]
    during = [took_ms for now_ms, _, took_ms in ran if 60_000 <= now_ms < 120_000]
    after = [took_ms for now_ms, _, took_ms in ran if now_ms >= 120_000]
    assert max(before) < 0.9 * node.cold_ms
    assert sum(took_ms > node.cold_ms for took_ms in during) <= 1
    assert after[3:] == pytest.approx([before[0]] * len(after[3:]))
    assert not any(plan.probe for now_ms, plan, _ in ran if now_ms < 60_000 or now_ms >= 135_000)


@given(
    rates=st.lists(st.floats(1e2, 1e7), min_size=1, max_size=20),
    gaps=st.lists(st.floats(1, 10_000), min_size=1, max_size=60),
    num_blocks=st.integers(1, 100),
    engine=st.sampled_from(sorted(ENGINES)),
)
def test_no_drive_costs_more_than_5_percent_and_each_that_heals_is_used_again(
    rates: list[float], gaps: list[float], num_blocks: int, engine: str
) -> None:
    """The drive's rate changes every 5 s, from worse to better than any; in the end it is healthy."""
    prefill, block_kib, healthy, _ = ENGINES[engine]
    drive = Drive(lambda now_ms: rates[int(now_ms / 5000)] if now_ms < len(rates) * 5000 else healthy)
    node = Node(drive, prefill, num_blocks, 64, block_kib << 10)
    now_ms = 0.0
    for gap in gaps:
        now_ms += gap
        _, took_ms = node.request(now_ms)
        assert took_ms <= node.cold_ms * (1 + SLACK) + 1e-6
        now_ms += took_ms
    now_ms = max(now_ms, len(rates) * 5000, drive.free_ms) + PROBE_PAUSE_MS_MAX
    plans = [node.request(now_ms + 5000 * number)[0] for number in range(4)]
    fresh = gate_of(healthy).choose(num_blocks, num_blocks * 64, block_kib << 10, 0, prefill, 0)
    assert plans[3].num_blocks == fresh.num_blocks


# WriteBudget


@given(
    daily=st.integers(1, 10**13),
    steps=st.lists(st.tuples(st.floats(0, DAY_MS), st.integers(0, 10**13), st.booleans()), max_size=50),
)
def test_no_more_is_taken_than_flows_in(daily: int, steps: list[tuple[float, int, bool]]) -> None:
    """Over any stretch: at most a day's worth saved up, and what came in meanwhile."""
    budget, now_ms, taken = WriteBudget(daily, 0.0), 0.0, 0
    for gap_ms, nbytes, anyway in steps:
        now_ms += gap_ms
        if anyway:
            budget.spend(nbytes, now_ms)
        elif budget.take(nbytes, now_ms):
            taken += nbytes
        assert 0 <= budget.level_nbytes <= daily
        assert taken <= daily * (1 + now_ms / DAY_MS) * (1 + 1e-9)


def test_a_day_refills_a_day_and_saves_no_more() -> None:
    budget = WriteBudget(1000, 0.0)
    assert budget.take(1000, 0.0)
    assert not budget.take(1, 0.0)
    assert not budget.take(501, DAY_MS / 2)
    assert budget.take(500, DAY_MS / 2)
    assert budget.take(1000, 100 * DAY_MS)
    assert not budget.take(1, 100 * DAY_MS)


def test_what_is_refused_costs_nothing() -> None:
    budget = WriteBudget(1000, 0.0)
    assert not budget.take(1001, 0.0)
    assert budget.level_nbytes == 1000


def test_writes_that_happen_anyway_count_but_leave_no_debt() -> None:
    budget = WriteBudget(1000, 0.0)
    budget.spend(900, 0.0)
    assert not budget.take(101, 0.0)
    budget.spend(5000, 0.0)
    assert budget.level_nbytes == 0
    assert budget.take(100, DAY_MS / 10)


def test_a_million_small_steps_refill_as_much_as_one() -> None:
    budget = WriteBudget(1000, 0.0, 0)
    for step in range(1, 100_001):
        budget.take(10**6, step * DAY_MS / 200_000)
    assert budget.level_nbytes in (499, 500)


@pytest.mark.parametrize("daily", [None, 0])
def test_no_budget_is_no_bound(daily: int | None) -> None:
    budget = WriteBudget(daily, 0.0)
    assert budget.take(10**18, 0.0)
    budget.spend(10**18, 1.0)
    assert budget.take(10**18, 1.0)
    assert budget.level_nbytes == 0


@given(daily=st.integers(1, 10**13), spent=st.integers(0, 10**13), now_ms=st.floats(0, 1e13))
def test_a_restart_gains_nothing(daily: int, spent: int, now_ms: float) -> None:
    budget = WriteBudget(daily, now_ms)
    budget.spend(spent, now_ms)
    restored = WriteBudget(daily, budget.at_ms, budget.level_nbytes)
    assert restored.level_nbytes == budget.level_nbytes
    assert not restored.take(budget.level_nbytes + 1, now_ms)
    assert restored.take(budget.level_nbytes, now_ms)


def test_a_level_kept_under_a_larger_budget_is_cut_to_the_new_one() -> None:
    assert WriteBudget(10, 0.0, 1000).level_nbytes == 10
    assert WriteBudget(10, 0.0, -5).level_nbytes == 0


def test_a_clock_that_jumps_back_refills_nothing_and_goes_on() -> None:
    budget = WriteBudget(1000, 10.0 * DAY_MS, 0)
    assert not budget.take(1, 0.0)
    assert not budget.take(101, DAY_MS / 10)
    assert budget.take(100, DAY_MS / 10)
