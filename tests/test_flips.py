"""Bits that flip in RAM, on the SSD and on the wire; and clocks, daemons and clients that do what they should not.

Real daemons, real files. Whatever is flipped, a reader sees a miss or the right bytes, and storing again heals it.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvstore import Cache, Client, KVSpec
from kvstore.core import layout
from kvstore.core.layout import HEADER_NBYTES, NBYTES_OFFSET, RECT_NBYTES, RECTS_OFFSET, STATE_OFFSET, TOKENS_OFFSET
from kvstore.service import daemon as daemon_module
from kvstore.service import link as link_module
from kvstore.service.hit import Hit
from kvstore.service.prompt import Prompt
from radix import HashKind
from tests.daemons import SPEC, Daemon, Other, assert_balanced, chat, holds, kv_of, read, run_kvstore, store, wait_until
from tests.test_failures_cor import Patchy, only_on_ssd
from tests.test_prompt import vars_of
from tests.test_ssd_edges import config_of, get, opened, tokens_of
from transports import messages as wire
from transports.network import Endpoint
from transports.zeromq import ZmqEndpoint

LENGTH = 40  # two whole blocks and a short one
FIELDS = {
    **{name: range(at, at + kind.itemsize) for name, (kind, at) in (layout._identity_dtype(16).fields or {}).items()},
    "lengths": range(NBYTES_OFFSET, NBYTES_OFFSET + 8),
    "sum of the identity": range(NBYTES_OFFSET + 8, STATE_OFFSET),
    "generation": range(STATE_OFFSET, STATE_OFFSET + 8),
    "number of rectangles": range(STATE_OFFSET + 8, STATE_OFFSET + 12),
    "state": range(STATE_OFFSET + 12, layout.STATE_SUM_OFFSET),
    "sum of the state": range(layout.STATE_SUM_OFFSET, RECTS_OFFSET),
    "rectangle": range(RECTS_OFFSET, RECTS_OFFSET + RECT_NBYTES),
}
UNUSED = [range(TOKENS_OFFSET + 4 * 16, NBYTES_OFFSET), range(RECTS_OFFSET + RECT_NBYTES, HEADER_NBYTES)]
PATCHED = """
import random, sys, time
from pathlib import Path
import kvstore.service.daemon as daemon
from kvstore.cli import main
from kvstore.core import store, writes
Path("/proc/self/comm").write_text("kvstore")
{}
main()
"""


def patched(what: str) -> list[str]:
    """Query. A command that runs a daemon in which something is another."""
    return [sys.executable, "-c", PATCHED.format(what)]


@contextmanager
def started(*flags: str, capacity: str = "16MiB", patch: str = "") -> Iterator[Daemon]:
    daemon = Daemon(*flags, capacity=capacity)
    with ExitStack() as undo:
        undo.push(daemon)
        daemon.start(patched(patch) if patch else None)
        yield daemon.wait_ready()


def flip(path: Path, at: int, bit: int) -> None:
    """Changes state. One bit of a file."""
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << bit]), at)
    os.close(fd)


def some_of(field: range, rng: random.Random) -> list[int]:
    """Query. Up to eight bytes, the first and the last among them."""
    return sorted({field[0], field[-1], *rng.sample(field, min(6, len(field)))})


def slab_of(hit: Hit) -> Path:
    return Path(hit.hold.session.welcome.slab_path)


def flip_block(cache: Cache, tokens: list[int], block: int, at: int, bit: int) -> None:
    """Changes state. One bit of a slot in RAM."""
    with cache.acquire(tokens) as hit:
        flip(slab_of(hit), hit.offsets[block] + at, bit)


# --- RAM


def test_the_fields_are_all_of_the_header() -> None:
    """COR: one that is added is covered by itself, or this fails."""
    parts = sorted([*FIELDS.values(), *UNUSED], key=lambda part: part.start)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == HEADER_NBYTES


@pytest.mark.parametrize("field", FIELDS)
def test_any_flipped_bit_of_a_header_in_ram_is_a_miss_or_right(daemon: Daemon, field: str) -> None:
    """COR: the ends of each field and bytes between them, one bit of each."""
    rng = random.Random(field)
    names = field in (layout._identity_dtype(16).names or ())
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        for at in some_of(FIELDS[field], rng):
            tokens = chat(rng.randrange(1 << 20), LENGTH)
            assert store(cache, tokens)
            flip_block(cache, tokens, 1, at, rng.randrange(8))
            assert read(cache, tokens) == (16 if names else LENGTH)
            assert store(cache, tokens) == names, "what is there need not be stored"
            assert read(cache, tokens) == LENGTH
            assert read(cache, tokens[:25]) == (25 if names else 16), "no part of what cannot be parsed"
        assert client.status()["client"]["reconnects"] == 0
    assert_balanced(daemon.status())


def test_flipped_bits_that_mean_nothing_cost_nothing(daemon: Daemon) -> None:
    """COR, their twin."""
    rng = random.Random(1)
    with daemon.connect() as client:
        cache, tokens = client.attach(SPEC), chat(2_000_000, LENGTH)
        assert store(cache, tokens)
        for _ in range(50):
            flip_block(cache, tokens, 1, rng.choice(rng.choice(UNUSED)), rng.randrange(8))
        assert read(cache, tokens) == LENGTH


# --- the SSD


def ssd(capacity: str = "64MiB") -> tuple[str, ...]:
    return ("--disk.capacity", capacity, "--disk.write_budget", "unlimited", "--memory.keep", "false")


def is_idle(client: Client) -> bool:
    facts = client.status()["daemon"]
    disk = facts["disk"] if facts else {"ready": False}
    return bool(disk["ready"] and disk.get("idle") and not disk["queued_nbytes"])


@contextmanager
def daemon_on(folder: Path, capacity: str = "16MiB", patch: str = "", *flags: str) -> Iterator[Daemon]:
    with started("--disk.path", str(folder), *ssd(), *flags, capacity=capacity, patch=patch) as daemon:
        with daemon.connect() as client:
            wait_until(lambda: is_idle(client))
            wait_until(lambda: client.status()["daemon"]["disk"]["extents_unassigned"])
        yield daemon


def stored_on_ssd(client: Client, cache: Cache, prompts: list[list[int]]) -> None:
    """Changes state. A little at a time, so that nothing is dropped."""
    for number, tokens in enumerate(prompts):
        store(cache, tokens)
        if number % (1000 // len(tokens)) == 0:  # a fifth of what memory holds
            wait_until(lambda: is_idle(client))
    wait_until(lambda: is_idle(client))
    assert not any(client.status()["daemon"]["stats"]["writes_dropped"].values())


def flip_on_ssd(folder: Path, prompts: list[list[int]], places: list[int], rng: random.Random) -> None:
    """Changes state. In the middle block of each prompt, a bit at its place."""
    slab = (folder / "slab").read_bytes()
    for tokens, at in zip(prompts, places, strict=True):
        begins = slab.index(Prompt(SPEC, HashKind.XXH3, tokens, ()).identities(1)[0][0])
        flip(folder / "slab", begins + at, rng.randrange(8))


def places_on_ssd() -> list[int]:
    """Query. Two bytes of each field, and of the payload."""
    parts = [*FIELDS.values(), range(HEADER_NBYTES, HEADER_NBYTES + SPEC.block_nbytes)]
    return sorted({at for part in parts for at in (part[0], part[-1])})


@pytest.mark.parametrize("running", [False, True], ids=["while it is down", "while it runs"])
def test_any_flipped_bit_on_the_ssd_is_a_miss_that_storing_heals(tmp_path: Path, running: bool) -> None:
    """COR, DSK: read after memory was lost; and again after it was lost once more."""
    rng, places = random.Random(2), places_on_ssd()
    prompts = [chat(number, LENGTH) for number in range(len(places))]
    others = [chat(10_000 + number, 160) for number in range(40)]  # more than memory holds
    with daemon_on(tmp_path, "4MiB", "writes.GROUP_MS = 10.0") as daemon:
        with daemon.connect() as client:
            cache = client.attach(SPEC)
            stored_on_ssd(client, cache, prompts)
            if running:
                flip_on_ssd(tmp_path, prompts, places, rng)
                stored_on_ssd(client, cache, others)
        if not running:
            assert daemon.terminate() == 0
            flip_on_ssd(tmp_path, prompts, places, rng)
            daemon.start()
        with daemon.connect() as client:
            cache = client.attach(SPEC)
            wait_until(lambda: is_idle(client))
            assert [read(cache, tokens) for tokens in prompts] == [16] * len(prompts)
            assert client.status()["daemon"]["stats"]["load_failures"] == {"corrupt": len(prompts)}
            stored_on_ssd(client, cache, prompts)
            assert [read(cache, tokens) for tokens in prompts] == [LENGTH] * len(prompts)
        assert daemon.terminate() == 0
        daemon.start()
        with daemon.connect() as client:
            cache = client.attach(SPEC)
            wait_until(lambda: is_idle(client))
            assert [read(cache, tokens) for tokens in prompts] == [LENGTH] * len(prompts)
            assert client.status()["daemon"]["stats"]["blocks_loaded"] == 3 * len(prompts)


SLOW_GROUPS = "writes.GROUP_MS = 400.0"  # long enough to flip a bit before the block is written


@pytest.mark.parametrize(("verify", "by_array"), [("false", False), ("false", True), ("true", False)])
def test_a_payload_flipped_in_ram_never_reaches_the_ssd(tmp_path: Path, verify: str, by_array: bool) -> None:
    """COR: seen by the reader with memory.verify, else by the mover that would write it; the log names the hop."""
    tokens = chat(1, LENGTH)
    with daemon_on(tmp_path, "16MiB", SLOW_GROUPS, "--memory.verify", verify) as daemon, daemon.connect() as client:
        cache = client.attach(SPEC)

        def stats() -> dict[str, object]:
            found: dict[str, object] = client.status()["daemon"]["stats"]
            return found

        assert store(cache, tokens, by_array=by_array)
        wait_until(lambda: not by_array or stats()["blocks_summed"] == 3)
        assert stats()["blocks_written"] == 0
        flip_block(cache, tokens, 1, HEADER_NBYTES + 1000, 3)
        if verify == "true":
            assert read(cache, tokens) == 16
            assert stats()["discards"] == {"payload": 1}
        wait_until(lambda: is_idle(client))
        wait_until(lambda: stats()["discards"] == {"payload": 1})
        lines = [line for line in daemon.log.splitlines() if "payload does not match its checksum: not written" in line]
        assert len(lines) == (1 if verify == "false" else 0)
        assert all("slab slot " in line for line in lines)
        assert client.status()["daemon"]["disk"]["blocks"] == (1 if verify == "false" else 0), (
            "its chain is queued anew"
        )
        assert read(cache, tokens) == 16, "nor is it served from memory any more"
        assert "wrong and not served: 1 damaged" in run_kvstore("status", "--address", daemon.address).stdout
        assert store(cache, tokens)
        wait_until(lambda: client.status()["daemon"]["disk"]["blocks"] == 3)
        assert daemon.terminate() == 0
        daemon.start()
        with daemon.connect() as client:
            wait_until(lambda: is_idle(client))
            assert read(client.attach(SPEC), tokens) == LENGTH


# --- the wire


class Noisy:
    """An endpoint on a line that flips bits of the frame it is told to, in either direction."""

    def __init__(self, inner: Endpoint, rng: random.Random) -> None:
        self._inner, self._rng = inner, rng
        self.countdown, self.num_flipped = -1, 0

    def send(self, frame: bytes) -> None:
        self._inner.send(self._noisy(frame))

    def receive(self, timeout_ms: float) -> bytes | None:
        frame = self._inner.receive(timeout_ms)
        return None if frame is None else self._noisy(frame)

    def close(self) -> None:
        self._inner.close()

    def _noisy(self, frame: bytes) -> bytes:
        self.countdown -= 1
        if self.countdown != -1:
            return frame
        self.num_flipped += 1
        changed = bytearray(frame)
        for _ in range(self._rng.choice((1, 1, 1, 2, 5))):
            changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)


FLIPS = 100


def test_bits_that_flip_on_the_wire_are_misses(own_daemon: Daemon) -> None:
    """COR, SEC: a frame that is not what was sent is as good as lost; who is not on that line is served."""
    rng, total = random.Random(0), 0
    prompts = [chat(rng.randrange(12), rng.randrange(1, 120)) for _ in range(40)]
    line, other = Noisy(ZmqEndpoint(own_daemon.address), rng), KVSpec(**(vars_of(SPEC) | {"block_tokens": 32}))
    with own_daemon.connect() as calm, Client(line, deadline_ms=15.0) as client:
        quiet, caches = calm.attach(SPEC), [client.attach(SPEC), client.attach(other)]
        while line.num_flipped < FLIPS:
            line.countdown = rng.randrange(6)
            cache, tokens = rng.choice(caches), rng.choice(prompts)
            total += read(cache, tokens)
            store(cache, tokens, by_array=rng.random() < 0.5)
            wait_until(lambda: client._link.usable, what="its keeper has spoken to the daemon")
            assert read(quiet, tokens) == len(tokens) or store(quiet, tokens) or read(quiet, tokens) == len(tokens)
        assert total > FLIPS
        assert own_daemon.process.poll() is None
        assert "Traceback" not in own_daemon.log
        assert calm.status()["client"]["reconnects"] == calm.status()["client"]["deadlines_missed"] == 0
    wait_until(lambda: not own_daemon.status()["sessions"], what="nobody is left of it")
    assert_balanced(own_daemon.status())


def test_a_reservation_of_slots_that_the_daemon_did_not_reserve_is_empty(
    client: Client, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COR: the answer named another block's slot: to write there would put our bytes under its header."""
    assert store(cache, chat(1))
    with cache.acquire(chat(1)) as hit:
        taken = hit._slots
    true_ask = link_module.Link.ask

    def changed(change: Callable[[wire.Reserved], wire.Reserved]) -> Callable[..., Any]:
        def ask(*given: Any, **how: Any) -> Any:
            reply = true_ask(*given, **how)
            return change(reply) if isinstance(reply, wire.Reserved) else reply

        return ask

    changes: list[Callable[[wire.Reserved], wire.Reserved]] = [
        lambda reply: replace(reply, slots=taken),
        lambda reply: replace(reply, slots=taken[:4] + reply.slots[4:]),
        lambda reply: replace(reply, slots=reply.slots[:-4] + bytes([reply.slots[-4] ^ 16]) + reply.slots[-3:]),
        lambda reply: replace(reply, generation=reply.generation ^ 1),
        lambda reply: replace(reply, slots=b"\xff\xff\xff\xff" + reply.slots[4:]),
        lambda reply: replace(reply, start=reply.start ^ 1),
        lambda reply: replace(reply, start=reply.start ^ 16),
        lambda reply: replace(reply, start=reply.start ^ 1 << 40),
    ]
    for number, change in enumerate(changes):
        with monkeypatch.context() as patch:
            patch.setattr(link_module.Link, "ask", changed(change))
            assert not store(cache, chat(10 + number)), number
        assert read(cache, chat(1)) == 64
        assert read(cache, chat(10 + number)) == 0
        assert store(cache, chat(10 + number))
        assert read(cache, chat(10 + number)) == 64
    assert holds(client.status()["daemon"]) == (0, 0, 0)


def test_an_answer_that_counts_what_has_not_come_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COR: half of each block is there, its header among it; the slab's own table says that it is on its way."""
    monkeypatch.setattr(daemon_module, "Disk", Patchy)
    monkeypatch.setattr(Patchy, "numbers", {})
    only_on_ssd(tmp_path, 7)
    monkeypatch.setattr(Patchy, "gate", threading.Event())
    true_ask = link_module.Link.ask

    def ask(*given: Any, **how: Any) -> Any:
        reply = true_ask(*given, **how)
        return replace(reply, ready=4) if isinstance(reply, wire.Acquired) else reply

    with opened(config_of(tmp_path)) as (_, cache):
        monkeypatch.setattr(link_module.Link, "ask", ask)
        with cache.acquire(tokens_of(7)) as hit:
            wait_until(lambda: hit.hold.session.slab.read(hit.offsets[0], 8) == layout.MAGIC)
            assert hit.wait() == 0
        Patchy.gate.set()
        wait_until(lambda: get(cache, 7) == 64)


# --- two daemons, wrong clocks, late writers


def test_a_second_daemon_on_the_same_data_is_refused_in_one_line(tmp_path: Path) -> None:
    """DSK, CFG: another address and other memory, but the same folder on the SSD; and the same memory, another SSD."""
    with daemon_on(tmp_path / "one") as daemon, daemon.connect() as client:
        cache = client.attach(SPEC)
        assert store(cache, chat(1))
        other = tmp_path / "other"
        for memory, disk in ((other, tmp_path / "one"), (daemon.memory_path, other)):
            flags = ["--memory.capacity", "16MiB", "--memory.path", str(memory), "--disk.path", str(disk)]
            ran = run_kvstore("serve", "--address", f"ipc://{tmp_path}/2", *flags, "--disk.capacity", "64MiB")
            assert ran.returncode == 1
            assert "in use by another daemon" in ran.stderr
            assert len(ran.stderr.splitlines()) == 1
        assert read(cache, chat(1)) == 64
        assert client.status()["client"]["reconnects"] == 0


JUMPING = """
rng, now, now_ns, hour = random.Random(), time.time, time.time_ns, 3600
time.time = lambda: now() + rng.choice((-hour, 0, hour))
time.time_ns = lambda: now_ns() + rng.choice((-hour, 0, hour)) * 10**9
"""


def test_a_wall_clock_that_jumps_by_hours_changes_nothing(tmp_path: Path) -> None:
    """TTL, RST: in the daemon at every look, across restarts, with and without its memory; what is held is held on."""
    with started("--disk.path", str(tmp_path), *ssd()[:-2], patch=JUMPING) as daemon, daemon.connect() as client:
        cache, tokens = client.attach(SPEC), chat(1)
        wait_until(lambda: is_idle(client))
        store(cache, tokens)
        hit = cache.acquire(tokens)
        array = next(hit.blocks()).array
        sessions = {client.status()["client"]["session"]}
        for life in range(1, 5):
            wait_until(lambda: is_idle(client))
            daemon.kill()
            if life == 3:
                for slab in daemon.slabs:
                    slab.unlink()
            daemon.start(patched(JUMPING))
            wait_until(lambda: is_idle(client))
            wait_until(lambda: read(cache, tokens) == 64, what="it is found again, also where its slab was taken away")
            assert client.status()["client"]["reconnects"] == life
            assert bool(client.status()["daemon"]["memory"]["blocks_taken_over"]) == (life != 3)
            assert store(cache, chat(100 + life))
            assert [read(cache, chat(100 + each)) for each in range(1, life + 1)] == [64] * life
            assert np.array_equal(array, kv_of(SPEC, tokens, 0, 16))
            sessions.add(client.status()["client"]["session"])
        assert len(sessions) == 5, "no session id is used twice"
        del array
        hit.release()


LATE = "daemon.SWEEP_MS, daemon.CONFIRM_MS, store.QUARANTINE_MS = 20.0, 100.0, {}\n"
UNWATCHED = """
import os
def refuse(*_):
    raise ProcessLookupError(3, "pids of that namespace mean nothing here")
os.pidfd_open = refuse
"""

LATE_WRITER = """
reservation = cache.reserve(chat(7, 160))
arrays = [block.array for block in reservation.blocks()]
session = client._link.session
os.close(os.open(session.welcome.sessions_path, os.O_RDWR))
say(*(block.offset for block in reservation.blocks())); hear()
for number in range(10**9):
    for array in arrays:
        array[...] = number
    if number == 0:
        say("writing")
"""


def test_slots_of_a_session_that_ended_are_nobodys_while_its_process_may_write(tmp_path: Path) -> None:
    """COR, LEK: a process that cannot be watched and lost its lock writes on, as a device might; quarantine holds."""
    # Long enough for all that is tried below. It ends by its time: tests/test_store.py.
    with started(patch=UNWATCHED + LATE.format(60_000.0)) as daemon, Other(daemon, LATE_WRITER) as late:
        offsets = set(map(int, late.hear().split()))
        late.say("go on")
        assert late.hear() == "writing"
        wait_until(lambda: "quarantine=True" in daemon.log)
        with daemon.connect() as client:
            cache = client.attach(SPEC)
            given: set[int] = set()
            for number in range(60):  # three times what memory holds
                tokens = chat(100 + number, 480)
                assert store(cache, tokens)
                with cache.acquire(tokens) as hit:
                    given.update(hit.offsets)
                assert read(cache, tokens) == 480
            assert len(offsets) == 10
            assert offsets.isdisjoint(given)
            assert daemon.status()["memory"]["reserved_nbytes"] == 10 * SPEC.slot_nbytes
            assert daemon.status()["memory"]["blocks_evicted"] > 0
            late.kill()
