"""Block hit ratio of a node on request traces: the product's own `Store`, asked for every request of a trace in turn.

    .venv/bin/python -m benchmarks.hit_rate --trace conversation --capacity 0.01,0.02,0.05,0.1,0.2 --json

`results` is {policy: {capacity: percent}}, `second_half` the same of the later half of the requests alone, with a cache
that the first half has filled. A capacity is a share of the distinct blocks of the trace. replay.py says how it counts.

The three traces that an independent replay has counted (a flat LRU in plain Python, touched tail first, without a tree,
pins or slots) must give the same ratios.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.replay import NAMES, Replay, Trace, TraceInvalid, read_trace
from benchmarks.report import Bar, at_most, finish, parser

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
POLICIES = ("lru",)
INDEPENDENT_LRU = {
    "conversation": (5.44, 8.01, 20.22, 28.82, 35.85),
    "synthetic": (3.70, 7.75, 15.50, 25.73, 39.52),
    "agentic_sample": (29.93, 50.31, 78.71, 92.44, 95.62),
}
POINTS_OFF_MAX = 0.05
Results = dict[str, Any]


class Cell(NamedTuple):
    """One replay. In percent of the blocks read."""

    share: float
    hits: float
    hits_of_second_half: float
    us_per_request: float


def replay(trace: Trace, share: float, num_unique: int, console: Console) -> Cell:
    """Query."""
    node, hits, began = Replay(max(1, int(share * num_unique))), [], time.perf_counter()
    for request in track(trace.requests, f"{trace.name} {share:.0%}", console=console, transient=True):
        hits.append(node.ask(request))
    took_us = 1e6 * (time.perf_counter() - began)
    reads, half = [len(request.ids) for request in trace.requests], len(hits) // 2
    later = 100 * sum(hits[half:]) / sum(reads[half:])
    return Cell(share, 100 * sum(hits) / sum(reads), later, took_us / len(hits))


def measure(trace: Trace, policies: Sequence[str], shares: Sequence[float], console: Console) -> Results:
    """Query."""
    num_unique = trace.num_unique
    cells = {policy: [replay(trace, share, num_unique, console) for share in shares] for policy in policies}
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "block_reads": trace.num_reads,
        "unique_blocks": num_unique,
        "results": {policy: {_key(cell.share): round(cell.hits, 2) for cell in row} for policy, row in cells.items()},
        "second_half": {
            policy: {_key(cell.share): round(cell.hits_of_second_half, 2) for cell in row}
            for policy, row in cells.items()
        },
        "us_per_request": {
            policy: {_key(cell.share): round(cell.us_per_request, 1) for cell in row} for policy, row in cells.items()
        },
    }


def _key(share: float) -> str:
    return f"{share:g}"


def bars(results: Results) -> list[Bar]:
    """Query. LRU is what others count, where others have counted."""
    counted = dict(zip(map(_key, SHARES), INDEPENDENT_LRU.get(results["trace"], ()), strict=False))
    found = results["results"].get("lru", {})
    off = [abs(found[key] - counted[key]) for key in found.keys() & counted.keys()]
    return [at_most("lru_points_off", round(max(off), 3), POINTS_OFF_MAX)] if off else []


def show(results: Results, console: Console) -> None:
    """Changes state: prints a table."""
    table = Table(title=f"{results['trace']}: hits in % of blocks read (later half)", title_justify="left")
    table.add_column("policy")
    for key in next(iter(results["results"].values())):
        table.add_column(f"{100 * float(key):g} %", justify="right")
    for policy, row in results["results"].items():
        later = results["second_half"][policy]
        table.add_row(policy, *(f"{value:.2f} ({later[key]:.2f})" for key, value in row.items()))
    console.print(table)


def shares_in(text: str) -> list[float]:
    """Query. "0.01,0.02" -> shares of the distinct blocks. ValueError."""
    shares = [float(each) for each in text.split(",")]
    if not all(0 < share <= 1 for share in shares):
        raise ValueError("a capacity is a share above 0, at most 1")
    return shares


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--trace", default="conversation", help=f"{', '.join(NAMES)}, or a file (%(default)s)")
    options.add_argument(
        "--capacity", default=",".join(map(_key, SHARES)), help="shares of distinct blocks (%(default)s)"
    )
    options.add_argument("--policy", default=",".join(POLICIES), help="some of: %(default)s")
    given = options.parse_args()
    policies = given.policy.split(",")
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        options.error(f"no policy {unknown[0]!r}: there are {', '.join(POLICIES)}")
    try:
        shares = shares_in(given.capacity)
    except ValueError as exc:
        options.error(f"--capacity {given.capacity}: {exc}")
    console = Console(stderr=True, highlight=False)
    results = measure(read_trace(given.trace), policies, shares, console)
    show(results, console)
    return finish("hit_rate", results, bars(results), as_json=given.json)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TraceInvalid as failure:
        sys.exit(f"hit_rate: {failure}")
    except KeyboardInterrupt:
        sys.exit("hit_rate: interrupted")
