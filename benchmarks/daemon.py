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

    `kill` and `start` again play a crash, `stop` and `start` an upgrade. Leaving the block ends the process and removes
    the folder, whatever happened.
    """

    def __init__(self, capacity: str, *options: str, command: Sequence[str] = ()) -> None:
        """`command`: what stands for `kvstore`, with its own first arguments."""
        self._command = command
        self._options = ("--memory.capacity", capacity, *options)
        self._folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=shared_memory()))
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

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process is not None
        return self._process.poll()

    @property
    def slab_folder(self) -> Path:
        return self._folder / "slab"

    def start(self) -> None:
        """Changes state. Returns once the daemon answers; DaemonFailed with its last words if it does not."""
        self.spawn()
        self.wait_until_up()

    def wait_until_up(self) -> None:
        """Query. As `start`, of a process that was spawned."""
        give_up_at = time.monotonic() + START_S_MAX
        while not self._answers():
            if self.exit_code is not None or time.monotonic() > give_up_at:
                raise DaemonFailed(f"kvstore serve did not come up: {self.last_words()}")
            time.sleep(0.05)

    def spawn(self, *options: str) -> None:
        """Changes state. Start the process and do not wait for it. `options`: for this life only."""
        kvstore_command = self._command or (_console_script(),)
        command = [*kvstore_command, "serve", "--address", self.address, "--memory.path", str(self.slab_folder)]
        with self._log.open("ab") as log:
            # a session of its own: Ctrl-C reaches the benchmark, which then ends the daemon in order
            self._process = subprocess.Popen(
                [*command, *self._options, *options],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def stop(self) -> int:
        """Changes state. SIGTERM: it puts everything in order. The exit code; DaemonFailed when it does not end."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DaemonFailed(f"kvstore serve did not stop within {STOP_S_MAX:.0f} s: {self.last_words()}") from None

    def kill(self) -> None:
        """Changes state. SIGKILL: the process has no chance to put anything in order."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Changes state. Idempotent."""
        with contextlib.suppress(DaemonFailed):  # it is gone in any case
            if self._process is not None and self._process.poll() is None:
                self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            kvstore.connect(self.address, deadline_ms=200).close()
        except kvstore.DaemonUnavailable:
            return False
        return True

    def last_words(self, count: int = 1) -> str:
        """Query. The last lines of its log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join(lines[-count:]) or "it wrote nothing"


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


def shared_memory() -> str | None:
    """Query. Where files take memory and no disk; None: this machine has no such place that we know of."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
