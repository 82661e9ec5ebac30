"""How every benchmark reports: medians over paired rounds with their spread, the bars it must meet, one JSON line.

    results = {"speedup": spread(ratios).median, ...}
    return finish("multi_turn", results, [at_least("speedup", results["speedup"], 5)], as_json=options.json)

With --json the last line on stdout is one JSON object; what people read goes to stderr. The exit code is 1 when a bar
is missed, and stderr says which.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table


class Spread(NamedTuple):
    """A figure over paired rounds. The range is not trimmed: on a shared machine it is part of the answer."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.median)} [{_short(self.low)} - {_short(self.high)}]"


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise about one figure, and whether this run kept it."""

    name: str
    value: float | bool
    relation: str
    bound: float | bool
    met: bool

    def __str__(self) -> str:
        return f"{self.name} = {_short(self.value)}, must be {self.relation} {_short(self.bound)}"


def at_least(name: str, value: float, bound: float) -> Bar:
    return Bar(name, value, ">=", bound, value >= bound)


def at_most(name: str, value: float, bound: float) -> Bar:
    return Bar(name, value, "<=", bound, value <= bound)


def holds(name: str, value: bool) -> Bar:
    return Bar(name, value, "==", True, value is True)


def spread(values: Iterable[float]) -> Spread:
    """Query. Median and range of one figure's rounds; ValueError without any."""
    rounds = list(values)
    if not rounds:
        raise ValueError("no rounds were measured")
    return Spread(statistics.median(rounds), min(rounds), max(rounds))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Query. Round by round, so that a disturbance which hits both sides of a round cancels."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def machine() -> dict[str, Any]:
    """Query. Where a figure was measured: figures of two machines are not compared."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
    }


def parser(text: str | None) -> argparse.ArgumentParser:
    """Query. The options that all benchmarks share; `text` is the module's docstring."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return made


def finish(name: str, results: Mapping[str, Any], bars: Sequence[Bar], *, as_json: bool) -> int:
    """Changes state: prints. The exit code: 0, or 1 when a bar is missed."""
    missed = [bar for bar in bars if not bar.met]
    people = Console(stderr=as_json, highlight=False, soft_wrap=True)
    people.print(_table(name, results))
    for bar in bars:
        people.print(f"{'[green]met   [/]' if bar.met else '[red]MISSED[/]'} {bar}")
    for bar in missed:
        print(f"{name}: bar missed: {bar}", file=sys.stderr)
    if as_json:
        line = {"benchmark": name, **results, "missed": [bar.name for bar in missed], "machine": machine()}
        print(json.dumps(line), flush=True)
    return 1 if missed else 0


def _table(name: str, results: Mapping[str, Any]) -> Table:
    table = Table(title=name, title_justify="left", show_header=False)
    for key, value in results.items():
        if not isinstance(value, Mapping | list):
            table.add_row(key, _short(value))
    return table


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
