"""Policies between tiers, from measured rates: load or recompute, when to cut a load, how much to write a day.

How an engine is never slower, of cold = prefill of all that the load covers:

    LoadGate.choose    loads only what should come sooner than the engine would compute it
    due_ms             cuts a load that falls behind: at most 5 % of cold is lost, whatever the medium does
    LoadGate.cut       refuses loads until the medium answers again, so that it is lost once
    Plan.probe         reads a little of what was refused, in the background, so that a recovery is seen
"""

import math
from typing import NamedTuple

SLACK = 0.05  # of what recomputing costs: what a load may fall behind, and so the most that a request can lose
PAYS_BELOW = 0.8  # of what recomputing costs: near break-even, errors of both estimates cost more than there is to win
PROBE_NBYTES = 8 << 20  # large enough to show a rate; 160 ms of a device that has dropped to 50 MB/s
PROBE_SHARE_MAX = 0.2  # of a slow tier's time that probes may take
PROBE_PAUSE_MS_MIN = 50.0
PROBE_PAUSE_MS_MAX = 10_000.0
DAY_MS = 86_400_000

_READ_HALF_NBYTES = 64 << 10  # well below what a drive reads in its latency (0.1 ms at 3 GB/s: 300 kB)
_PREFILL_HALF_TOKENS = 16_384
_KEEP_MIN = 0.25  # one observation, however large, counts three quarters: two of them show a change
_MS_MIN = 1e-6  # a nanosecond: the rate that follows from less may be no number
_SPREAD_MIN = 0.5  # standard deviation over mean of the amounts, below which their slope is noise


class Rate:
    """Amount per ms. The half-life is in amount: a tiny transfer is mostly latency and says little about the rate.

    A geometric mean: one that is 60 times slower pulls as hard as one that is 60 times faster. Sums of amount and time
    would be ruled by the slow ones, which take all the time, and a recovery would not show.
    """

    def __init__(self, half_amount: float) -> None:
        self._half_amount = half_amount
        self._log: float | None = None

    def observe(self, amount: float, ms: float) -> None:
        """Changes state. What is not positive and finite is ignored."""
        if not (_is_positive(amount) and _is_positive(ms)):
            return
        seen = math.log(amount) - math.log(ms)
        keep = max(_KEEP_MIN, 0.5 ** (amount / self._half_amount))
        self._log = seen if self._log is None else keep * self._log + (1 - keep) * seen

    @property
    def value(self) -> float | None:
        """Query. None until something was observed."""
        return None if self._log is None else math.exp(self._log)


class LinearCost:
    """ms = overhead + n * ms_per_unit, by least squares over sums that decay.

    The half-life is in units: among hundreds of short prefills, the few long ones that show the slope must not fade as
    fast as short ones come. When they have faded, their slope stays and short ones move the overhead only.
    """

    def __init__(self, half_amount: float = _PREFILL_HALF_TOKENS) -> None:
        self._half_amount = half_amount
        self._weight = self._n = self._ms = self._nn = self._nms = 0.0
        self._slope: float | None = None

    def observe(self, n: float, ms: float) -> None:
        """Changes state. What is not positive and finite, or too short for any clock, is ignored."""
        if not (_is_positive(n) and _MS_MIN <= ms < math.inf):
            return
        keep = 0.5 ** (n / self._half_amount)
        self._weight = keep * self._weight + 1
        self._n = keep * self._n + n
        self._ms = keep * self._ms + ms
        self._nn = keep * self._nn + n * n
        self._nms = keep * self._nms + n * ms
        spread = self._weight * self._nn - self._n * self._n
        if spread > (_SPREAD_MIN * self._n) ** 2:
            self._slope = (self._weight * self._nms - self._n * self._ms) / spread

    @property
    def ms_per_unit(self) -> float | None:
        """Query. The marginal cost: what one unit more or less changes. None until something was observed."""
        return self._line()[1] if self._weight else None

    def ms(self, n: float) -> float | None:
        """Query. What `n` units cost in one go, overhead included. None until something was observed."""
        if not self._weight:
            return None
        overhead, slope = self._line()
        return overhead + n * slope

    def _line(self) -> tuple[float, float]:
        """Overhead and slope. A line that falls, or begins below zero, is noise: then all of it is proportional."""
        if self._slope is not None and self._slope > 0:
            overhead = (self._ms - self._slope * self._n) / self._weight
            if overhead >= 0:
                return overhead, self._slope
        return 0.0, self._ms / self._n


class Plan(NamedTuple):
    """What to do with the leading blocks that only a lower tier has."""

    num_blocks: int  # to load for the engine: all or none
    probe: bool  # load about PROBE_NBYTES of them in the background; the engine does not wait


class LoadGate:
    """Load or recompute, for one tier. An unknown cost is measured by loading: `due_ms` bounds what that can lose."""

    def __init__(self) -> None:
        self._read = Rate(_READ_HALF_NBYTES)
        self._hangs = False
        self._probed_ms = -math.inf
        self._pause_ms = PROBE_PAUSE_MS_MIN

    @property
    def read_gbps(self) -> float | None:
        """Query. 10^9 bytes a second. None until a load was measured."""
        return None if self._read.value is None else self._read.value / 1e6

    def observe(self, nbytes: int, ms: float) -> None:
        """Changes state. What a read really took: time the device was busy, not time in the queue. Probes too."""
        self._read.observe(nbytes, ms)
        self._hangs = False
        if self._read.value is not None:
            pause_ms = PROBE_NBYTES / self._read.value / PROBE_SHARE_MAX
            self._pause_ms = min(PROBE_PAUSE_MS_MAX, max(PROBE_PAUSE_MS_MIN, pause_ms))

    def cut(self) -> None:
        """Changes state. A load was cut. Without a read that ends there is no rate, so none is loaded until one does.

        What the load did read is observed before this, what is still under way when it ends.
        """
        self._hangs = True

    def choose(
        self,
        num_blocks: int,
        num_tokens: int,
        block_nbytes: int,
        queued_nbytes: int,
        prefill: LinearCost,
        now_ms: float,
    ) -> Plan:
        """Changes state (when it last probed). `num_tokens`: those of the `num_blocks` blocks.

        `queued_nbytes`: what the tier reads before the first of them.
        Minimises queue + load(n) + prefill(rest) over n. Both costs are linear in n, so one of the ends is best: 0 or
        all, and only what changes between the ends counts; the overhead of a prefill is paid at both.
        """
        if not num_blocks:
            return Plan(0, False)
        if self._pays(num_blocks, num_tokens, block_nbytes, queued_nbytes, prefill):
            return Plan(num_blocks, False)
        return Plan(0, self._probe(now_ms))

    def _pays(
        self, num_blocks: int, num_tokens: int, block_nbytes: int, queued_nbytes: int, prefill: LinearCost
    ) -> bool:
        rate, token_ms, patience_ms = self._read.value, prefill.ms_per_unit, _patience_ms(prefill, num_tokens)
        if self._hangs:
            return False
        if rate is None or token_ms is None or patience_ms is None:
            return True
        if (queued_nbytes + block_nbytes) / rate > patience_ms:
            return False  # it would be cut before its first block is there
        return (queued_nbytes + num_blocks * block_nbytes) / rate < PAYS_BELOW * num_tokens * token_ms

    def _probe(self, now_ms: float) -> bool:
        """Whether to probe now. Unanswered probes come ever more rarely: a tier that hangs is not buried in them."""
        if now_ms < self._probed_ms + self._pause_ms:
            return False
        self._probed_ms = now_ms
        self._pause_ms = min(PROBE_PAUSE_MS_MAX, 2 * self._pause_ms)
        return True


def due_ms(prefill: LinearCost, started_ms: float, tokens_loaded: int, tokens_all: int) -> float | None:
    """Query. When to cut a running load if nothing more arrives. None while the cost of a prefill is unknown.

    It is then behind the engine by SLACK of what recomputing `tokens_all` costs. What was loaded is kept and the engine
    computes the rest, so that much is all a request can lose.
    """
    token_ms, patience_ms = prefill.ms_per_unit, _patience_ms(prefill, tokens_all)
    if token_ms is None or patience_ms is None:
        return None
    return started_ms + tokens_loaded * token_ms + patience_ms


def _patience_ms(prefill: LinearCost, num_tokens: int) -> float | None:
    cold_ms = prefill.ms(num_tokens)
    return None if cold_ms is None else SLACK * cold_ms


class WriteBudget:
    """Bytes a day as a token bucket, with at most one day's worth saved up: 0 <= level <= nbytes_a_day.

    Time is wall-clock time, since the level outlives the process. A clock that jumps back refills nothing; one that
    jumps ahead refills a day's worth at most.
    """

    def __init__(self, nbytes_a_day: int | None, now_ms: float, level_nbytes: int | None = None) -> None:
        """None or 0 bytes a day: unlimited. `now_ms`, `level_nbytes`: as persisted, or now and None, a day's worth."""
        self.nbytes_a_day = nbytes_a_day or 0
        level = self.nbytes_a_day if level_nbytes is None else level_nbytes
        self._level = float(min(max(level, 0), self.nbytes_a_day))
        self._at_ms = now_ms

    @property
    def level_nbytes(self) -> int:
        """Query. What could be taken at `at_ms`, rounded down: a restart gains nothing."""
        return math.floor(self._level)

    @property
    def at_ms(self) -> int:
        """Query. When the level was last brought up to date, rounded up."""
        return math.ceil(self._at_ms)

    def take(self, nbytes: int, now_ms: float) -> bool:
        """Changes state. Spend `nbytes`, or False and nothing spent when the level is lower."""
        if not self.nbytes_a_day:
            return True
        self._refill(now_ms)
        if nbytes > self._level:
            return False
        self._level -= nbytes
        return True

    def spend(self, nbytes: int, now_ms: float) -> None:
        """Changes state. A write that happens anyway: it empties the bucket at most, and leaves no debt."""
        self._refill(now_ms)
        self._level = max(0.0, self._level - nbytes)

    def _refill(self, now_ms: float) -> None:
        elapsed_ms = max(0.0, now_ms - self._at_ms)
        self._level = min(float(self.nbytes_a_day), self._level + self.nbytes_a_day * elapsed_ms / DAY_MS)
        self._at_ms = now_ms


def _is_positive(value: float) -> bool:
    """Query. And finite: neither infinity nor NaN."""
    return 0 < value < math.inf
