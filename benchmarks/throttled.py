"""`kvstore serve` on a drive that is as slow as a file says: for benchmarks that need one which fades and recovers.

    python -m benchmarks.throttled RATE_FILE serve --address ...

RATE_FILE holds bytes per second, and is read before every access; while it is empty or missing, nothing is slowed. All
threads share the rate, first come, first served, as on a drive that does one thing at a time. Whoever writes the file
replaces it (`set_rate`), so that no half of a number is ever read.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from kvstore import cli
from kvstore.media.disk import Disk
from kvstore.service import daemon

NAP_S_MAX = 0.05  # so soon those who wait see that the rate has changed


def command(rate_file: Path) -> tuple[str, ...]:
    """Query. What stands for `kvstore` on a command line."""
    return sys.executable, "-m", "benchmarks.throttled", str(rate_file)


def set_rate(rate_file: Path, nbytes_per_s: float | None) -> None:
    """Changes state. None: not slowed."""
    new = rate_file.with_suffix(".new")
    new.write_text("" if nbytes_per_s is None else str(nbytes_per_s), encoding="ascii")
    new.replace(rate_file)


def rate_of(rate_file: Path) -> float | None:
    """Query. None: not slowed. ValueError when the file holds anything but a positive number."""
    try:
        text = rate_file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    if not text:
        return None
    rate = float(text)
    if not rate > 0:
        raise ValueError(f"{rate_file}: {text!r} is no rate; write bytes per second, or nothing")
    return rate


class Turns:
    """One queue for all threads: bytes are served in the order they were asked for, at the rate of the moment."""

    def __init__(
        self,
        rate: Callable[[], float | None],
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`rate`: bytes per second now; None: as fast as can be."""
        self._rate, self._now_s, self._sleep = rate, now_s, sleep
        self._device = threading.Lock()  # held by whoever is served

    def take(self, nbytes: int) -> None:
        """Changes state. Returns when the device would be done with so many bytes."""
        with self._device:
            left, seen_s = float(nbytes), self._now_s()
            while left >= 1 and (rate := self._rate()) is not None:
                self._sleep(min(left / rate, NAP_S_MAX))
                now_s = self._now_s()
                left, seen_s = left - rate * (now_s - seen_s), now_s


def throttled(turns: Turns) -> type[Disk]:
    """Query. The SSD tier's medium, with every access to bytes on its slab waiting for its turn."""

    class ThrottledDisk(Disk):
        def read_head(self, slot: int, slot_nbytes: int, into: memoryview) -> None:  # which whole slots go through too
            turns.take(into.nbytes)
            super().read_head(slot, slot_nbytes, into)

        def write(self, slot: int, slot_nbytes: int, data: memoryview) -> None:
            turns.take(data.nbytes)
            super().write(slot, slot_nbytes, data)

    return ThrottledDisk


def main(arguments: Sequence[str]) -> None:
    """Changes state. Run the `kvstore` command with a slowed medium."""
    if not arguments:
        sys.exit("usage: python -m benchmarks.throttled RATE_FILE serve ...")
    rate_file = Path(os.path.abspath(arguments[0]))
    sys.argv = ["kvstore", *arguments[1:]]
    with mock.patch.object(daemon, "Disk", throttled(Turns(lambda: rate_of(rate_file)))):
        cli.main()


if __name__ == "__main__":
    main(sys.argv[1:])
