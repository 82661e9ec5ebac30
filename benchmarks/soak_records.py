"""What the clients of a soak write down so that it outlives their SIGKILL, and the figures that follow from it.

Each life of a client has three files in shared memory; nothing in them is buffered in the process:

    counts      one i64 per Count, each overwritten in place
    calls       CALL per call that has ended: began_ns, ended_ns, due_ns
    wakes       WAKE per wake-up of its control thread that came late: due_ns, woke_ns

Times are CLOCK_MONOTONIC, which all processes share. The control thread does nothing but sleep, WAKE_MS at a time, in
the process of the client. What keeps it from waking (a SIGSTOP, no processor, another thread with the GIL) keeps the
answer of a call from its caller just as well, so a call's lateness counts only beyond the longest lateness of the
control thread between WAKE_MS before the call was due and its end. A call that ended after the control thread was last
seen awake is not judged: its process was killed before it could show whether it had been stopped.
"""

import os
from collections.abc import Sequence
from enum import IntEnum, auto
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

WAKE_MS = 5.0
LATE_WAKE_MS = 0.5  # what is shorter is not written down, and counts as nothing
CALL = np.dtype([("began_ns", "<i8"), ("ended_ns", "<i8"), ("due_ns", "<i8")])
WAKE = np.dtype([("due_ns", "<i8"), ("woke_ns", "<i8")])
Times = npt.NDArray[np.void]
Lateness = npt.NDArray[np.float64]


class Count(IntEnum):
    """What a client counts, and what shows from outside that it hangs."""

    OPERATIONS = 0
    HITS = auto()
    HIT_TOKENS = auto()
    BLOCKS_STORED = auto()
    BYTES_READ = auto()
    WRONG_BYTES = auto()
    WRONG_ANSWERS = auto()  # a hit in a forked child or of a closed client, blocks out of order
    SILENT_CHILDREN = auto()  # forked children that did not end
    FORKS = auto()
    RECONNECTS = auto()
    BEGAN_NS = auto()  # of the call that runs now; 0: none does
    AWAKE_NS = auto()  # the control thread was awake then


class Counts:
    """The counts of one client's life, on file."""

    def __init__(self, path: Path) -> None:
        """Changes state. Make the file."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._values = [0] * len(Count)

    def set(self, count: Count, value: int) -> None:
        """Changes state."""
        self._values[count] = value
        os.pwrite(self._fd, value.to_bytes(8, "little"), 8 * count)

    def add(self, count: Count, value: int = 1) -> None:
        """Changes state."""
        self.set(count, self._values[count] + value)


def counts_in(path: Path) -> dict[Count, int]:
    """Query. What a client has counted so far; zeros before it has begun."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    values = np.frombuffer(data.ljust(8 * len(Count), b"\0"), "<i8").tolist()
    return dict(zip(Count, values, strict=True))


def times_in(path: Path, dtype: np.dtype[np.void]) -> Times:
    """Query. All whole records of a file of calls or wakes."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return np.zeros(0, dtype)
    return np.frombuffer(data[: len(data) - len(data) % dtype.itemsize], dtype)


def lateness_ms(calls: Times, wakes: Times, awake_ns: int) -> Lateness:
    """Query. Of each call that can be judged: how late it was beyond what its control thread shows; 0 if it was not."""
    judged = calls[calls["ended_ns"] <= awake_ns]
    late: Lateness = np.maximum(0, judged["ended_ns"] - judged["due_ns"]) / 1e6
    for at in np.flatnonzero(late):
        call = judged[at]
        around = wakes["due_ns"] <= call["ended_ns"]
        around &= wakes["woke_ns"] >= call["due_ns"] - int(WAKE_MS * 1e6)
        near = wakes[around]
        late[at] -= (near["woke_ns"] - near["due_ns"]).max(initial=0) / 1e6
    return late.clip(min=0.0)


def reached_deadline(calls: Times, awake_ns: int) -> npt.NDArray[np.bool_]:
    """Query. Of each call that can be judged: whether it may wait, and was still running when it was due."""
    judged = calls[calls["ended_ns"] <= awake_ns]
    found: npt.NDArray[np.bool_] = judged["ended_ns"] > judged["due_ns"]
    return found & (judged["due_ns"] > judged["began_ns"])


def percentile_ms(late: Lateness, percent: float) -> float:
    """Query. The value of a sample, never one between two; 0 without any."""
    return float(np.percentile(late, percent, method="higher")) if len(late) else 0.0


class Trend(NamedTuple):
    """Least squares over several lives: one slope for all, a level of its own for each."""

    slope: float  # per second
    error: float  # standard error of the slope; inf: too little was seen
    num_samples: int
    seconds: float  # seen, over all lives


def trend(lives: Sequence[Sequence[tuple[float, float]]]) -> Trend:
    """Query. `lives`: (seconds, value) samples each. Of lives with fewer than three, nothing is learnt."""
    columns = [np.array(life, np.float64).T for life in lives if len(life) >= 3]
    if not columns:
        return Trend(0.0, float("inf"), 0, 0.0)
    seconds = sum(float(at[-1] - at[0]) for at, _ in columns)
    at = np.concatenate([at - at.mean() for at, _ in columns])
    values = np.concatenate([each - each.mean() for _, each in columns])
    spread = float(at @ at)
    slope = float(at @ values) / spread
    rest = values - slope * at
    free = len(at) - len(columns) - 1
    error = (float(rest @ rest) / free / spread) ** 0.5 if free > 0 else float("inf")
    return Trend(slope, error, len(at), seconds)
