"""Real processes for the tests of the real edges: a `kvstore serve` in private folders, a second process with a client,
and KV whose every value follows from the tokens before it, so that any byte of another block is seen.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

import kvstore
from tests.sources import ROOT

KVSTORE = Path(sys.executable).with_name("kvstore")
WAIT_S_MAX = 10.0  # far above what anything here takes: only a hang reaches it

SPEC = kvstore.KVSpec(model="tiny", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=16, block_tokens=16)
BIG = kvstore.KVSpec(model="big", dtype="bfloat16", num_layers=4, num_kv_heads=4, head_dim=64, block_tokens=64)


def wait_until(is_so: Callable[[], Any], seconds: float = WAIT_S_MAX, what: str = "") -> None:
    """Query. Returns once `is_so` holds. What another process does can only be waited for."""
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"not within {seconds} s: {what or textwrap.dedent(str(is_so))}"
        time.sleep(0.002)


# KV that says what it is


def kv_of(spec: kvstore.KVSpec, tokens: Any, start: int, count: int, salt: int = 0) -> np.ndarray[Any, Any]:
    """Query. The block's array for tokens [start, start + count): a function of the spec, all tokens so far, `salt`."""
    ids = np.asarray(tokens, np.uint64)[: start + count]
    weights = np.arange(1, len(ids) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    seed = np.uint64(salt) + np.frombuffer(spec.fingerprint, np.uint64)[0]
    marks = (np.cumsum((ids + np.uint64(1)) * weights) + seed)[start:]
    shape = spec.array_shape(count)
    if spec.is_opaque:
        values = marks[:, None] + np.arange(spec.token_nbytes, dtype=np.uint64) * np.uint64(0x100000001B3)
    else:
        places = np.arange(np.prod(shape) // count, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
        places = places.reshape(*shape[:3], 1, shape[4])
        values = places + marks[None, None, None, :, None]
    values ^= values >> np.uint64(29)
    if spec.numpy_dtype.kind == "f":  # a signalling NaN may not survive a copy as a number: keep to integers
        return (values % np.uint64(2048)).astype(spec.numpy_dtype).reshape(shape)
    return values.astype(f"u{spec.numpy_dtype.itemsize}").view(spec.numpy_dtype).reshape(shape)


def store(cache: kvstore.Cache, tokens: Any, *, salt: int = 0, by_array: bool = False, **how: Any) -> bool:
    """Changes state. Put the KV of `tokens`; whether the daemon confirmed a new block."""
    with cache.reserve(tokens, **how) as reservation:
        for block in reservation.blocks():
            source = kv_of(cache.spec, tokens, block.start, block.num_tokens, salt)
            if by_array:
                block.array[...] = source
            else:
                block.write(source)
        return reservation.commit()


def verified(hit: kvstore.Hit, tokens: Any, salt: int = 0) -> int:
    """Query. Tokens of a hit, once every byte of them has been compared."""
    at, spec = 0, hit.prompt.spec if hit.num_tokens else None
    for block in hit.blocks():
        assert spec is not None
        assert block.start == at
        expected = kv_of(spec, tokens, block.start, block.num_tokens, salt)
        assert block.array.shape == spec.array_shape(block.num_tokens)
        assert np.array_equal(block.array, expected), f"the block at token {block.start} is not this prompt's"
        at += block.num_tokens
    return at


def read(cache: kvstore.Cache, tokens: Any, *, salt: int = 0, **how: Any) -> int:
    """Changes state. Tokens that a hit gives, every byte of them compared."""
    with cache.acquire(tokens, **how) as hit:
        assert hit.wait() == verified(hit, tokens, salt)
        return hit.verified_tokens


def chat(number: int, num_tokens: int = 64) -> list[int]:
    """Query. A prompt that shares no first token with any other number's."""
    return [1000 + number, *(int(each) for each in np.random.default_rng(number).integers(0, 1000, num_tokens - 1))]


def embedded(capacity: str = "16MiB", **memory: Any) -> kvstore.Client:
    """Changes state. A store in this process whose memory is all there."""
    client = kvstore.open({"memory": {"capacity": capacity, **memory}})
    wait_until(lambda: all_extents_ready(client.status()["daemon"]))
    return client


def all_extents_ready(facts: dict[str, Any]) -> bool:
    return facts["memory"]["extents_ready"] == facts["memory"]["extents"]


def assert_balanced(facts: dict[str, Any]) -> None:
    """Query. free + cached + reserved = total, in slots of each class and in bytes."""
    memory = facts["memory"]
    extents = 0
    for slot_nbytes, counts in memory["slots"].items():
        assert min(counts.values()) >= 0
        assigned, rest = divmod(sum(counts.values()), memory["extent_nbytes"] // int(slot_nbytes))
        assert not rest, "slots of a class are not whole extents"
        extents += assigned
    assert extents + memory["extents_unassigned"] == memory["extents_ready"]
    assert memory["cached_nbytes"] + memory["reserved_nbytes"] <= memory["capacity_nbytes"]


def holds(facts: dict[str, Any]) -> tuple[int, int, int]:
    """Query. (leases, reservations, reserved bytes) of all sessions."""
    leases = sum(each["leases"] for each in facts["sessions"])
    return leases, sum(each["reservations"] for each in facts["sessions"]), facts["memory"]["reserved_nbytes"]


# Processes


class Daemon:
    """A real `kvstore serve` on a private socket and slab. Leaving the block ends it and removes every trace."""

    def __init__(self, *flags: str, capacity: str = "16MiB", memory_path: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvt-"))  # short: a socket path has 107 bytes
        self.memory_path = memory_path or Path(f"/dev/shm/kvstore-test-{uuid.uuid4().hex[:12]}")
        self.address = f"ipc://{self.folder}/kv.sock"
        self.flags = ["--address", self.address, "--memory.path", str(self.memory_path), *flags]
        self.flags += ["--memory.capacity", capacity]
        self._log = self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self.__exit__)
            self.start()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.memory_path, ignore_errors=True)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def slabs(self) -> list[Path]:
        return sorted(self.memory_path.glob("slab-*"))

    def start(self, command: list[str] | None = None) -> None:
        """Changes state. Returns once clients can connect."""
        self._log.write_text("")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*(command or [str(KVSTORE)]), "serve", *self.flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(lambda: "kvstore: slab " in self.log or self.process.poll() is not None, what="the daemon starts")
        assert self.process.poll() is None, self.log

    def kill(self) -> None:
        """Changes state. SIGKILL."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """Changes state. SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(WAIT_S_MAX)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Changes state. SIGSTOP for the length of the block."""
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: " (kvstore) T " in Path(f"/proc/{self.process.pid}/stat").read_text())
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def connect(self, deadline_ms: float = 2000) -> kvstore.Client:
        return kvstore.connect(self.address, deadline_ms)

    def status(self) -> dict[str, Any]:
        """Query. What the daemon says, without the session that asks."""
        with self.connect() as client:
            full = client.status()
        facts: dict[str, Any] = full["daemon"]
        facts["sessions"] = [each for each in facts["sessions"] if each["id"] != full["client"]["session"]]
        return facts

    def wait_ready(self) -> Self:
        """Query. Returns once all memory is there."""
        wait_until(lambda: all_extents_ready(self.status()))
        return self


PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
import kvstore
from tests.daemons import *
client = kvstore.connect(sys.argv[1], 2000)
cache = client.attach(SPEC)
say = lambda *words: print(*words, flush=True)
hear = lambda: sys.stdin.readline().strip()
"""


class Other:
    """A second process that runs `snippet` with a client of the daemon; lines go both ways."""

    def __init__(self, daemon: Daemon, snippet: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(snippet), daemon.address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._heard = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def hear(self, seconds: float = WAIT_S_MAX) -> str:
        """Query. The next line it says."""
        assert self.process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the other process says nothing"
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, f"the other process ended: {self.process.wait()}"
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def say(self, line: str) -> None:
        """Changes state."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    def kill(self) -> None:
        """Changes state. SIGKILL."""
        self.process.kill()
        self.process.wait()


def run_kvstore(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Query. One run of the command to its end."""
    return subprocess.run([str(KVSTORE), *words], capture_output=True, text=True, timeout=WAIT_S_MAX, **how)
