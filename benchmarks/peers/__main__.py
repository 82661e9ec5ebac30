"""Our store against its rivals, in turns A B C D A B C D ... on the same blocks, in one run on one machine.

A round of a system is: store 32 blocks, look them up, get them back into the caller's memory, compare every byte.
Each system is driven from a process of its own, through its own client, over memory where a block lies in one piece.
Ratios are taken round by round; more than 1 means that ours is faster.

Where the systems differ, the rival has the better part: systems with a name per block are spared the hashing of tokens;
what LMCache's look-up does is not part of its retrieve, while ours looks up again as it retrieves.

After the rounds, a few bytes of one stored block are flipped where the system keeps them, and its readers ask again.
A block read from our memory tier is checked by its header, not summed: a payload damaged in memory is served.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.daemon import terminated_like_interrupted
from benchmarks.peers.catalog import DEFAULT, OURS, PEERS
from benchmarks.peers.environments import SetUpFailed, python_of, set_up, variables_of
from benchmarks.peers.process import ROOT, Peer, Worker, WorkerFailed
from benchmarks.peers.rounds import BATCH, LOOK_UP_BLOCKS, Figure, Record, Turns
from benchmarks.peers.tables import SIDES, show
from benchmarks.report import Bar, Spread, at_least, finish, holds, parser, ratios, spread

BLOCK_KIBS = (512, 2048)
DAMAGE_KIB = 2048
TABLE_WIDTH = 140
SCRATCH = ROOT / "results"  # not the system's folder for temporary files, which may be no drive at all
# These keep their bytes in the caller's own process, or in the page cache: no service between processes, so a ratio to
# one is shown and not promised.
IN_PROCESS = ("mooncake", "files", "files-shm")
# What of ours, once damaged, must be a miss. A payload in memory is not summed when it is read.
MUST_MISS = {"ours": ("header",), "ours-ssd": ("payload", "header")}


def run(peers: Sequence[Peer], lacking: Mapping[str, str], rounds: int) -> dict[str, Record]:
    """Changes state: runs all systems, from start to end. `lacking`: environments that could not be made, and why."""
    records = {peer.name: Record(failure=lacking.get(peer.installed, "")) for peer in peers}
    with contextlib.ExitStack() as running:
        candidates = [peer for peer in peers if peer.installed not in lacking]
        started = [_started(peer, records[peer.name], running) for peer in candidates]
        turns = Turns([worker for worker in started if worker is not None], records)
        for kib in BLOCK_KIBS:
            turns.copy(kib << 10, BATCH, rounds)
        turns.look_up(LOOK_UP_BLOCKS, rounds)
        turns.damage(DAMAGE_KIB << 10)
    return records


def _started(peer: Peer, record: Record, running: contextlib.ExitStack) -> Worker | None:
    try:
        SCRATCH.mkdir(exist_ok=True)
        python, variables = python_of(peer.installed), variables_of(peer.installed)
        return running.enter_context(Worker(peer, python, SCRATCH, variables))
    except (SetUpFailed, WorkerFailed) as failure:
        record.failure = str(failure)
        print(f"{peer.name}: {failure}", file=sys.stderr)
        return None


def set_up_all(peers: Iterable[Peer]) -> dict[str, str]:
    """Changes state. The environments that could not be made, and why: their systems are rows without figures."""
    lacking = {}
    for name in sorted({peer.installed for peer in peers}):
        try:
            set_up(name)
        except SetUpFailed as failure:
            lacking[name] = str(failure)
            print(f"{name}: {failure}", file=sys.stderr)
    return lacking


def figures(record: Record, batch: int = BATCH) -> dict[str, Any]:
    """Query. One system's medians with their range."""
    found: dict[str, Any] = {"failure": record.failure, "bytes_verified": record.verified}
    found["late_rounds"], found["damaged"] = record.late_rounds, record.damage
    for (at, what), seconds in record.seconds.items():
        place = found.setdefault(at, {})
        if what in SIDES:
            nbytes = batch * (int(at.removeprefix("kib")) << 10)
            _put(place, f"{what}_gbps", spread(nbytes / each / 1e9 for each in seconds))
        else:
            _put(place, f"{what}_ms", spread(1e3 * each for each in seconds))
    return found


def compared(ours: Record, peer: Record) -> dict[str, Any]:
    """Query. How many times faster ours is, round by round."""
    found: dict[str, Any] = {}
    for figure in ours.seconds:
        ratio = _ratio(ours, peer, figure)
        if ratio is not None:
            _put(found.setdefault(figure[0], {}), f"{figure[1]}_ratio", ratio)
    return found


def _ratio(ours: Record, peer: Record, figure: Figure) -> Spread | None:
    """Over the rounds that both have: one that failed on the way has fewer."""
    pairs = list(zip(peer.seconds.get(figure, []), ours.seconds.get(figure, []), strict=False))
    return spread(ratios(*zip(*pairs, strict=True))) if pairs else None


def _put(place: dict[str, Any], name: str, found: Spread) -> None:
    place[name], place[f"{name}_range"] = round(found.median, 4), [round(found.low, 4), round(found.high, 4)]


def bars(records: dict[str, Record], against: dict[str, Any]) -> list[Bar]:
    """Query. Every byte of ours was right, damage to it was seen, and it is faster than every service that ran."""
    found = [bar for name in MUST_MISS if name in records for bar in _honest(name, records[name])]
    for rival, places in against.items():
        if rival in MUST_MISS or rival in IN_PROCESS:
            continue
        for at, values in places.items():
            found += [at_least(f"{rival}.{at}.{side}", values[f"{side}_ratio"], 1.0) for side in _sides(values)]
    return found


def _honest(name: str, record: Record) -> list[Bar]:
    missed = [holds(f"{name}.{kind}_damage_missed", record.damage.get(kind) == "a miss") for kind in MUST_MISS[name]]
    return [holds(f"{name}.bytes_verified", record.verified and not record.failure), *missed]


def _sides(values: dict[str, Any]) -> list[str]:
    return [side for side in SIDES if f"{side}_ratio" in values]


def chosen(names: str) -> list[Peer]:
    """Query. ArgumentTypeError on a name that is none."""
    known = {peer.name: peer for peer in PEERS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15, help="counted rounds for each block size")
    options.add_argument("--systems", type=chosen, default=",".join(DEFAULT), help="default: %(default)s")
    options.add_argument("--set-up", action="store_true", help="make the rivals' environments that are missing first")
    given = options.parse_args()
    with terminated_like_interrupted():
        lacking = set_up_all(given.systems) if given.set_up else {}
        records = run(given.systems, lacking, given.rounds)
    against = {
        name: compared(records[OURS], each) for name, each in records.items() if OURS in records and name != OURS
    }
    results = {
        "rounds": given.rounds,
        "batch": BATCH,
        "block_kibs": list(BLOCK_KIBS),
        "look_up_blocks": LOOK_UP_BLOCKS,
        "systems": {name: figures(each) for name, each in records.items()},
        "ours_against": against,
    }
    people = Console(stderr=given.json, highlight=False)
    people.width = max(people.width, TABLE_WIDTH)  # a log has no width of its own
    show(people, given.systems, results)
    return finish("peers", results, bars(records, against), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
