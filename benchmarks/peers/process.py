"""Our side of a worker: start it in its own environment, ask it with a bound, and leave nothing of it behind."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.servers import last_words
from benchmarks.peers.system import Place, Prompt

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "kvstore-peers-"
START_S_MAX = 120.0
ANSWER_S_MAX = 60.0
CLOSE_S_MAX = 30.0
REPLY_NBYTES_MAX = 1 << 20


class WorkerFailed(Exception):
    """A worker did not start, died, hung, or its system refused."""


class SystemRefused(WorkerFailed):
    """The system answered with an error of its own; its worker lives."""


@dataclass(frozen=True)
class Peer:
    """A system as it takes part. `damage`: what of a stored block can be damaged ("payload", "header")."""

    name: str
    adapter: str  # module:class
    title: str
    installed: str = ""  # the environment it runs in; "" is this one
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    damage: tuple[str, ...] = ("payload",)


class Worker:
    """A running worker. Leaving the block ends it, its system and their files, whatever happened."""

    def __init__(self, peer: Peer, python: Path, scratch: Path, environment: Mapping[str, str] | None = None) -> None:
        """Changes state. `scratch`: on the drive to be measured. WorkerFailed when it is not ready in time."""
        self.peer = peer
        disk = Path(tempfile.mkdtemp(prefix=PREFIX, dir=scratch))
        self._place = Place(disk.name, disk, SHARED_MEMORY / f"{disk.name}.d")
        self._place.shared.mkdir()
        self._log = disk / "worker.log"
        self._unread = b""
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._process = self._start(python, {**peer.environment, **(environment or {})})
            self._receive(START_S_MAX)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ask(self, do: str, prompt: Prompt | None = None, seconds_max: float = ANSWER_S_MAX, **how: Any) -> Any:
        """Changes state. The reply to one command. WorkerFailed; SystemRefused."""
        assert self._process is not None and self._process.stdin is not None
        if prompt is not None:
            how["prompt"] = [prompt.number, prompt.num_blocks, prompt.block_nbytes]
        try:
            self._process.stdin.write(json.dumps({"do": do, **how}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise self._death() from exc
        reply = self._receive(seconds_max)
        if "refused" in reply:
            raise SystemRefused(reply["refused"])
        return reply

    def close(self) -> None:
        """Changes state. Idempotent. The end of its input asks it to close; after a while it is killed."""
        if self._process is not None:
            self._end(self._process)
            self._process = None
        for path in (self._place.disk, self._place.shared):
            shutil.rmtree(path, ignore_errors=True)
        for segment in SHARED_MEMORY.glob(f"*{self._place.name}"):  # its server was killed
            segment.unlink(missing_ok=True)

    def _start(self, python: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        place = self._place
        command = [str(python), "-m", "benchmarks.peers.worker", "--adapter", self.peer.adapter]
        command += ["--options", json.dumps(dict(self.peer.options)), "--name", place.name]
        command += ["--disk", str(place.disk), "--shared", str(place.shared)]
        with self._log.open("ab") as log:
            # A group of its own: Ctrl-C reaches only us, who then end it in order, and killing it kills its servers.
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=place.disk,  # what a system leaves in its working directory goes with it
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                start_new_session=True,
            )

    def _receive(self, seconds_max: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        give_up_at = time.monotonic() + seconds_max
        while b"\n" not in self._unread:
            wait_s = give_up_at - time.monotonic()
            if wait_s <= 0 or not select.select([self._process.stdout], [], [], wait_s)[0]:
                raise WorkerFailed(f"no answer within {seconds_max:g} s")
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                raise self._death()
            self._unread += data
            assert len(self._unread) <= REPLY_NBYTES_MAX
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _death(self) -> WorkerFailed:
        return WorkerFailed(f"it died: {last_words(self._log)}")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            _wait_unreaped(process.pid, CLOSE_S_MAX)
        finally:
            # Before it is reaped, so that the number is still its own: whatever of its group is left ends now.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def _wait_unreaped(pid: int, seconds_max: float) -> None:
    give_up_at = time.monotonic() + seconds_max
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > give_up_at:
            return
        time.sleep(0.01)
