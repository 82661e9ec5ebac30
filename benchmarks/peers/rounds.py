"""Runs workers in turns over the same blocks, and keeps what each took. A worker that fails leaves the turns."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.peers import damage
from benchmarks.peers.process import SystemRefused, Worker, WorkerFailed
from benchmarks.peers.system import BLOCK_TOKENS, Prompt

BATCH = 32
WARM_UP = 3
LOOK_UP_BLOCKS = 2000
LOOK_UP_NBYTES = 8 << 10  # small blocks: a look-up does not read them, and every system has to hold them at once
DAMAGE_BLOCKS = 8
DAMAGED_PLACE = 5
LATE_S_MAX = 2.0
Figure = tuple[str, str]  # ("kib512", "store")


@dataclass
class Record:
    """What is known of one system. `failure`: why it did not start, or left the turns."""

    failure: str = ""
    seconds: dict[Figure, list[float]] = field(default_factory=dict)  # one for each counted round
    wrong_blocks: int = 0  # among all that came back, warm-up included
    checked_blocks: int = 0
    late_rounds: int = 0  # rounds in which a look-up did not see all blocks at once
    damage: dict[str, str] = field(default_factory=dict)

    @property
    def verified(self) -> bool:
        """Query. Whether blocks came back, and all of them right."""
        return self.checked_blocks > 0 and not self.wrong_blocks

    def add(self, figure: Figure, seconds: float) -> None:
        """Changes state."""
        self.seconds.setdefault(figure, []).append(seconds)


class Turns:
    """The workers that are still in, and the records of all."""

    def __init__(self, workers: Sequence[Worker], records: dict[str, Record]) -> None:
        self._workers = list(workers)
        self._records = records
        self._numbers: Iterator[int] = iter(range(1, 20_000))

    def copy(self, block_nbytes: int, batch: int, rounds: int, warm_up: int = WARM_UP) -> None:
        """Changes state. Store a batch, look it up, get it back, forget it; every byte compared."""
        at = f"kib{block_nbytes >> 10}"
        self._each(lambda worker, _: worker.ask("attach", num_blocks=batch, block_nbytes=block_nbytes))
        for count in range(-warm_up, rounds):
            prompt = Prompt(next(self._numbers), batch, block_nbytes)
            self._each(partial(_copy_turn, at=at, prompt=prompt, counts=count >= 0))

    def look_up(self, num_blocks: int, rounds: int, warm_up: int = WARM_UP) -> None:
        """Changes state. Look up one long prefix again and again."""
        prompt = Prompt(next(self._numbers), num_blocks, LOOK_UP_NBYTES)
        self._each(lambda worker, _: worker.ask("attach", num_blocks=num_blocks, block_nbytes=LOOK_UP_NBYTES))
        self._each(lambda worker, _: _store(worker, prompt))
        for count in range(-warm_up, rounds):
            self._each(partial(_look_up_turn, prompt=prompt, counts=count >= 0))
        self._each(lambda worker, _: worker.ask("forget"))

    def damage(self, block_nbytes: int) -> None:
        """Changes state. Flip stored bytes, and see what comes back. Last, since a system may not survive it."""
        for kind in ("payload", "header"):
            prompt = Prompt(next(self._numbers), DAMAGE_BLOCKS, block_nbytes)
            self._each(partial(_damage_turn, kind=kind, prompt=prompt))

    def _each(self, turn: Callable[[Worker, Record], object]) -> None:
        for worker in list(self._workers):
            record = self._records[worker.peer.name]
            try:
                turn(worker, record)
            except WorkerFailed as failure:
                record.failure = str(failure)
                print(f"{worker.peer.name}: {failure}", file=sys.stderr)
                self._workers.remove(worker)
                worker.close()


def _copy_turn(worker: Worker, record: Record, at: str, prompt: Prompt, counts: bool) -> None:
    store_s = _store(worker, prompt)
    found = worker.ask("look_up", prompt)
    if found["found"] < prompt.num_blocks:
        record.late_rounds += 1
        _wait_visible(worker, prompt)
    read = worker.ask("retrieve", prompt)
    worker.ask("forget")
    record.checked_blocks += read["served"]
    record.wrong_blocks += len(read["wrong"])
    if read["served"] < prompt.num_blocks:
        raise WorkerFailed(f"gave back {read['served']} of {prompt.num_blocks} blocks")
    if counts:
        for what, seconds in (("store", store_s), ("look_up", found["seconds"]), ("retrieve", read["seconds"])):
            record.add((at, what), seconds)


def _look_up_turn(worker: Worker, record: Record, prompt: Prompt, counts: bool) -> None:
    found = worker.ask("look_up", prompt)
    if found["found"] != prompt.num_blocks:
        raise WorkerFailed(f"found {found['found']} of {prompt.num_blocks} blocks")
    if counts:
        record.add(("long", "look_up"), found["seconds"])


def _store(worker: Worker, prompt: Prompt) -> float:
    seconds: float = worker.ask("store", prompt)["seconds"]
    worker.ask("settle")
    return seconds


def _wait_visible(worker: Worker, prompt: Prompt) -> None:
    give_up_at = time.monotonic() + LATE_S_MAX
    while (found := worker.ask("look_up", prompt)["found"]) < prompt.num_blocks:
        if time.monotonic() > give_up_at:
            raise WorkerFailed(f"found {found} of {prompt.num_blocks} blocks {LATE_S_MAX:g} s after they were stored")
        time.sleep(0.01)


def _damage_turn(worker: Worker, record: Record, kind: str, prompt: Prompt) -> None:
    if kind not in worker.peer.damage:
        return
    worker.ask("attach", num_blocks=prompt.num_blocks, block_nbytes=prompt.block_nbytes)
    _store(worker, prompt)
    record.damage[kind] = "it died"  # unless it answers
    record.damage[kind] = _damaged(worker, kind, prompt)
    worker.ask("forget")


def _damaged(worker: Worker, kind: str, prompt: Prompt) -> str:
    places = worker.ask("locate")
    try:
        found = damage.flip(map(Path, places["files"]), places["holders"], damage.needle_of(_stored(kind, prompt)))
    except PermissionError:
        return "not reachable"
    if not found:
        return "not found"
    try:
        return _verdict(worker, prompt)
    except SystemRefused:
        return "an error"


def _stored(kind: str, prompt: Prompt) -> bytes:
    """What follows from one block: its bytes, or the token ids that its header carries."""
    if kind == "payload":
        return prompt.block(DAMAGED_PLACE)
    return prompt.token_bytes[4 * BLOCK_TOKENS * DAMAGED_PLACE :][: 4 * BLOCK_TOKENS]


def _verdict(worker: Worker, prompt: Prompt) -> str:
    worker.ask("look_up", prompt)
    read = worker.ask("retrieve", prompt)
    if read["wrong"]:
        return "wrong bytes"
    return "a miss" if read["served"] < prompt.num_blocks else "right bytes"
