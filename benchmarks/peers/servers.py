"""A system's own processes, as its adapter starts and stops them. They stay in the worker's process group, so that
whoever kills a worker that hangs kills them too."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

START_S_MAX = 90.0
STOP_S_MAX = 10.0


class ServerFailed(Exception):
    """A process of the system did not come up."""


class Server:
    """One process with a log."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log, self._program = log, Path(command[0]).name
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until(self, answers: Callable[[], bool]) -> None:
        """Query. ServerFailed, with its last words, when it ends or takes too long."""
        give_up_at = time.monotonic() + START_S_MAX
        while not answers():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                raise ServerFailed(f"{self._program} did not come up: {last_words(self._log)}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Changes state. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def last_words(log: Path) -> str:
    """Query. The last line that is not blank."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].strip() if lines else "it wrote nothing"


def free_ports(count: int) -> list[int]:
    """Query. Ports of the loopback that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def listens(port: int) -> bool:
    """Query. Whether somebody accepts connections on the loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
