"""Crashes and restarts: failures that users of such systems reported, each replayed in miniature.

docs/failures.md says which report each test stands for.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from connectors.reference import ReferenceConnector
from kvstore.media.disk import Disk
from kvstore.service import daemon as daemon_module
from tests.daemons import SPEC, Other, assert_balanced, chat, holds, kv_of, read, store, wait_until
from tests.test_hit import damage
from tests.test_ssd_edges import config_of, daemon_of, opened
from tests.test_warm_restart import QUICK, Phoenix

# --- who dies, and at which moment

SLOW_READS = """
import time
from kvstore.media.disk import Disk
read = Disk.read
def slow(self, *args):
    time.sleep(0.02)
    read(self, *args)
Disk.read = slow
"""


class OnSsd(Phoenix):
    """A daemon with an SSD that is slow to read."""

    def start(self, command: list[str] | None = None) -> None:
        super().start(command or [sys.executable, "-c", SLOW_READS + QUICK])

    def wait_written(self) -> None:
        """Query. Returns once all that was stored lies on the SSD, too."""
        wait_until(lambda: (self.status()["disk"] or {}).get("idle"), what="the SSD tier is there, and idle")


VICTIMS = ("engine", "daemon", "both")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnSsd]:
    """With a chain for each case that lies on the SSD and not in memory any more."""
    folder = tmp_path_factory.mktemp("ssd")
    flags = ["--disk.path", str(folder), "--disk.capacity", "32MiB", "--disk.write_budget", "unlimited"]
    with OnSsd(*flags, capacity="4MiB") as daemon, daemon.wait_ready().connect() as client:
        cache, garbage = client.attach(SPEC), np.full(SPEC.array_shape(16), -1.0, np.float32)
        assert all(store(cache, chat(number)) for number in range(9))
        for number in range(100, 106):
            daemon.wait_written()
            with cache.reserve(chat(number, 1024)) as reservation:
                for block in reservation.blocks():
                    block.write(garbage)
                assert reservation.commit()
        daemon.wait_written()
        client.close()
        yield daemon


# What an engine does up to the moment, and what it does when it is still there afterwards. It ends with nothing held.
MOMENTS = {
    "holding a hit": """
hit = cache.acquire(MINE)
arrays = [block.array for block in hit.blocks()]
say(hit.num_tokens); hear()
assert verified(hit, MINE) == 64
hit.release()
assert all(np.array_equal(array, kv_of(SPEC, MINE, 16 * at, 16)) for at, array in enumerate(arrays))
del arrays
""",
    "filling a block": """
reservation = cache.reserve(NEW)
blocks = list(reservation.blocks())
blocks[0].write(kv_of(SPEC, NEW, 0, 16))
blocks[1].array[0] = 1
say(len(blocks)); hear()
for block in blocks:
    block.write(kv_of(SPEC, NEW, block.start, 16))
assert reservation.commit() in (False, True)
assert read(cache, NEW) in (0, 64)
del block, blocks, reservation
""",
    "loading": """
hit = cache.acquire(OLD, wait=True)
say(hit.num_tokens); hear()
assert hit.wait() == verified(hit, OLD) <= 64
hit.release()
""",
}
AFTERWARDS = """
until = time.monotonic() + 10
while not client.status()["available"]:
    assert time.monotonic() < until
while not read(cache, chat(99)):  # no room until all who lived through it are accounted for
    assert time.monotonic() < until
    store(cache, chat(99))
say("fine"); hear()
"""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_whoever_dies_whenever_nothing_wrong_is_shown_and_nothing_is_lost(
    served: OnSsd, victim: str, moment: str
) -> None:
    """RST, COR, LEK: three victims at three moments. All that was sealed is found again, from memory or the SSD."""
    number = 3 * VICTIMS.index(victim) + list(MOMENTS).index(moment)
    old, mine, new = chat(number), chat(number + 10), chat(number + 20)
    with served.connect() as client:
        cache = client.attach(SPEC)
        assert store(cache, mine)
        served.wait_written()
        assert cache.match(old) == 64
    names = f"OLD, MINE, NEW = {old}, {mine}, {new}\n"
    with Other(served, names + MOMENTS[moment] + AFTERWARDS) as engine:
        assert int(engine.hear()) in (4, 64)
        if victim != "daemon":
            engine.kill()
        if victim == "engine":
            wait_until(lambda: holds(served.status())[:2] == (0, 0), seconds=1.0, what="all it held is given back")
        else:
            served.kill()
            served.start()
        if victim == "daemon":
            engine.say("go on")
            engine.hear()  # fine
    served.wait_accounted()
    facts = served.wait_empty_handed()
    assert facts["sessions"] == []
    wait_until(lambda: (served.status()["disk"] or {}).get("ready"))
    with served.connect() as client:
        cache = client.attach(SPEC)
        assert [read(cache, tokens) for tokens in (old, mine)] == [64, 64]
        found = read(cache, new)
        assert found == 0 or (victim, moment) == ("daemon", "filling a block")
        assert not any(client.status()["daemon"]["stats"]["load_failures"].values())


# --- a connector in a world that fails

PAGES_SPEC = SPEC


class Pages:
    """An engine's KV of one sequence, every value a function of the tokens before it."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.loaded: list[tuple[int, npt.NDArray[Any]]] = []

    def read(self, start: int, num_tokens: int) -> npt.NDArray[Any]:
        return kv_of(SPEC, self.tokens, start, num_tokens)

    def write(self, start: int, kv: npt.NDArray[Any]) -> None:
        self.loaded.append((start, kv.copy()))

    def check(self, loaded: int) -> None:
        at = 0
        for start, kv in self.loaded:
            assert start == at
            assert np.array_equal(kv, kv_of(SPEC, self.tokens, start, kv.shape[3]))
            at += kv.shape[3]
        assert at == loaded


class Flaky(Disk):
    """A medium of which one access in `one_in` fails; none where that is 0."""

    one_in: ClassVar[int] = 0
    chance: ClassVar[random.Random] = random.Random(0)

    def _maybe(self) -> None:
        if self.one_in and not self.chance.randrange(self.one_in):
            raise kvstore.TierUnavailable("disk.path=here: Input/output error (EIO)")

    def read(self, slot: int, slot_nbytes: int, into: memoryview) -> None:
        self._maybe()
        super().read(slot, slot_nbytes, into)

    def write(self, slot: int, slot_nbytes: int, data: memoryview) -> None:
        self._maybe()
        super().write(slot, slot_nbytes, data)

    def commit(self, *args: Any) -> None:
        self._maybe()
        super().commit(*args)


def turns_of(seed: int) -> Iterator[tuple[random.Random, list[int]]]:
    choose = random.Random(seed)
    for _ in range(300):
        tokens = chat(choose.randrange(40), 160)
        if choose.random() < 0.3:
            tokens = tokens[: choose.randrange(160)] + chat(choose.randrange(40), 8)
        yield choose, tokens


@pytest.mark.parametrize("one_in", [0, 7])
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_fails_nothing_comes_up_in_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, one_in: int
) -> None:
    """RST, DSK: EIO at random, headers damaged, blocks cleared, a store that is closed in the midst of it; an engine
    whose scheduler asks in any order sees shorter loads and dropped saves. The twin without faults finds what it put.
    """
    monkeypatch.setattr(daemon_module, "Disk", Flaky)
    monkeypatch.setattr(Flaky, "one_in", one_in)
    monkeypatch.setattr(Flaky, "chance", random.Random(seed))
    loaded = saved = 0
    with opened(config_of(tmp_path)) as (client, _):
        connector, cache = ReferenceConnector(client, SPEC), client.attach(SPEC)
        for choose, tokens in turns_of(seed):
            pages, what = Pages(tokens), choose.randrange(12)
            if what < 5:
                count = connector.load(tokens, pages)
                pages.check(count)
                loaded += count
            elif what < 10:
                saved += connector.save(tokens, pages, start=choose.choice((0, 0, 16, 1000)))
                if not one_in and choose.random() < 0.2:
                    connector.save(tokens, pages)
                    count = connector.load([*tokens, 1], again := Pages(tokens))
                    again.check(count)
                    assert count == len(tokens)
            elif one_in and what == 10:
                with cache.acquire(tokens) as hit:
                    if hit.num_tokens:
                        damage(hit, choose.randrange(len(hit.offsets)), choose.choice((0, 20, 50, 70)))
            else:
                cache.prefetch(tokens)
                connector.report(len(tokens), float(len(tokens)), 1.0)
        assert loaded > 0
        assert saved > 0
        facts = daemon_of(client)
        assert holds(facts) == (0, 0, 0)
        assert_balanced(facts)
        assert bool(facts["disk"]["failures"]) == bool(one_in)
        client.close()
        for _, tokens in turns_of(seed + 100):
            assert connector.load(tokens, Pages(tokens)) == 0
            assert not connector.save(tokens, Pages(tokens))
