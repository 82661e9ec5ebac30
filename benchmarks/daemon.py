"""A real daemon beside a benchmark: `kvstore serve` as its own process, in a private folder that goes when it ends."""

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

import kvstore

START_S_MAX = 30.0
STOP_S_MAX = 10.0


class DaemonFailed(Exception):
    """The daemon did not come up, or could not be asked to stop."""


class Daemon:
    """One `kvstore serve` with a socket, a slab and a log in a folder of its own in shared memory.

    `kill` and `start` again play a crash. Leaving the block ends the process and removes the folder, whatever happened.
    """

    def __init__(self, capacity: str, *options: str, command: Sequence[str] = ()) -> None:
        """`command`: what stands for `kvstore`, with its own first arguments."""
        self._command = command
        self._options = ("--memory.capacity", capacity, *options)
        self._folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=_shared_memory()))
        self._log = self._folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"ipc://{self._folder / 'kvstore.sock'}"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.start()
            undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Changes state. Returns once the daemon answers; DaemonFailed with its last words if it does not."""
        kvstore_command = self._command or (_console_script(),)
        command = [*kvstore_command, "serve", "--address", self.address, "--memory.path", str(self._folder / "slab")]
        with self._log.open("ab") as log:
            # a session of its own: Ctrl-C reaches the benchmark, which then ends the daemon in order
            self._process = subprocess.Popen(
                [*command, *self._options], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        give_up_at = time.monotonic() + START_S_MAX
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                raise DaemonFailed(f"kvstore serve did not come up: {self._last_words()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Changes state. SIGKILL: the process has no chance to put anything in order."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Changes state. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            kvstore.connect(self.address, deadline_ms=200).close()
        except kvstore.DaemonUnavailable:
            return False
        return True

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that everything in it is cleaned up."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _console_script() -> str:
    """The installed command of this environment, as an operator would run it."""
    script = Path(sys.executable).with_name("kvstore")
    if not script.is_file():
        raise DaemonFailed(f"{script} is not installed; run: make setup")
    return str(script)


def _shared_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
