"""Time as a value: shells ask a Clock, cores are told `now_ms`."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> float:
        """Query. Milliseconds since an arbitrary start; never goes back."""


class MonotonicClock:
    def now_ms(self) -> float:
        return time.monotonic_ns() / 1e6


class SimClock:
    """Stands still until told otherwise."""

    def __init__(self, now_ms: float = 0.0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> float:
        return self._now_ms

    def advance(self, by_ms: float) -> None:
        """Changes state."""
        assert by_ms >= 0
        self._now_ms += by_ms
