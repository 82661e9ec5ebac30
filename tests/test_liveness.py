"""What the daemon's view of living and dead processes rests on: record locks and pidfds of a real kernel. Record locks
belong to a process, so a second process is needed to see them."""

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.errors import DaemonUnavailable
from kvstore.service.liveness import SessionsFile, Watched, hold_session, let_session_go
from tests.sources import ROOT


class Holder:
    """A forked process that runs `body` and lives until `end`."""

    def __init__(self, body: Callable[[], str]) -> None:
        read_fd, write_fd = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.write(write_fd, body().encode())
            os.close(write_fd)
            time.sleep(60)
            os._exit(1)
        os.close(write_fd)
        with open(read_fd) as said:
            self.said = said.read()

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


@pytest.fixture
def sessions(path: Path) -> Iterator[SessionsFile]:
    file = SessionsFile(path, 16)
    yield file
    file.close()


def hold(path: Path, number: int) -> str:
    try:
        return str(hold_session(path, number) > 0)
    except DaemonUnavailable:
        return "False"


def hold_and_fork(path: Path) -> str:
    assert hold_session(path, 3)
    child = os.fork()
    if not child:
        os.closerange(0, 100)  # the pipe too: whoever reads it must not wait for us
        time.sleep(60)
        os._exit(1)
    return str(child)


def hold_and_fork_a_child_that_closes_all(path: Path) -> str:
    assert hold_session(path, 3)
    child = os.fork()
    if not child:
        os.closerange(0, 100)
        os._exit(0)
    os.waitpid(child, 0)
    return "done"


def hold_and_close_another_descriptor(path: Path) -> str:
    assert hold_session(path, 3)
    os.close(os.open(path, os.O_RDONLY))
    return "done"


def hold_two_and_let_one_go(path: Path) -> str:
    assert hold_session(path, 3)
    assert hold_session(path, 4)
    let_session_go(hold_session(path, 3), 3)
    return "done"


def test_a_killed_process_holds_nothing(path: Path, sessions: SessionsFile) -> None:
    """LEK."""
    assert not sessions.is_held(3)
    holder = Holder(lambda: hold(path, 3))
    assert holder.said == "True"
    assert [sessions.is_held(number) for number in (2, 3, 4)] == [False, True, False]
    holder.end()
    assert not sessions.is_held(3)


def test_a_child_that_lives_on_holds_nothing(path: Path, sessions: SessionsFile) -> None:
    """LEK: flock would survive in the child."""
    holder = Holder(lambda: hold_and_fork(path))
    child = int(holder.said)
    assert sessions.is_held(3)
    holder.end()
    assert not sessions.is_held(3)
    os.kill(child, 9)


def test_a_child_that_closes_its_descriptors_costs_the_parent_nothing(path: Path, sessions: SessionsFile) -> None:
    """LEK."""
    holder = Holder(lambda: hold_and_fork_a_child_that_closes_all(path))
    assert holder.said == "done"
    assert sessions.is_held(3)
    holder.end()


def test_closing_another_descriptor_of_the_file_loses_the_lock(path: Path, sessions: SessionsFile) -> None:
    """LEK. Why a client opens the file once and never closes it; should a kernel ever change this, nothing breaks."""
    holder = Holder(lambda: hold_and_close_another_descriptor(path))
    assert holder.said == "done"
    assert not sessions.is_held(3)
    holder.end()


def test_sessions_of_one_process_are_let_go_one_by_one(path: Path, sessions: SessionsFile) -> None:
    """LEK."""
    holder = Holder(lambda: hold_two_and_let_one_go(path))
    assert holder.said == "done"
    assert [sessions.is_held(number) for number in (3, 4)] == [False, True]
    holder.end()


def test_two_processes_cannot_hold_one_session(path: Path, sessions: SessionsFile) -> None:
    """IDN."""
    holder = Holder(lambda: hold(path, 3))
    assert holder.said == "True"
    second = Holder(lambda: hold(path, 3))
    assert second.said == "False"
    holder.end()
    second.end()


def test_locks_are_seen_by_the_daemon_that_starts_next(path: Path, sessions: SessionsFile) -> None:
    """RST: a new daemon opens the same inode."""
    holder = Holder(lambda: hold(path, 3))
    assert holder.said == "True"
    inode = path.stat().st_ino
    later = SessionsFile(path, 16)
    assert later.is_held(3)
    later.close()
    assert path.stat().st_ino == inode
    holder.end()


def test_a_process_opens_the_file_once(path: Path, sessions: SessionsFile) -> None:
    """LEK."""
    assert hold_session(path, 1)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(16):
        let_session_go(hold_session(path, number), number)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_session_is_let_go_though_its_file_is_gone(path: Path, sessions: SessionsFile) -> None:
    """RST: a daemon that ends takes its folder away; the next one may have made a file of the same name."""
    fd = hold_session(path, 3)
    path.unlink()
    let_session_go(fd, 3)
    with pytest.raises(DaemonUnavailable, match="No such file"):
        hold_session(path, 3)


def test_a_watched_process_tells_of_its_death() -> None:
    """LEK."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = Watched(process.pid)
    assert watched.pidfd is not None
    assert not select.select([watched.pidfd], [], [], 0)[0]
    process.kill()
    assert select.select([watched.pidfd], [], [], 10)[0], "no word of a death"
    process.communicate()
    watched.close()


def test_a_process_that_is_gone_cannot_be_watched() -> None:
    """HNG."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert Watched(process.pid).pidfd is None
    Watched(None).close()


def test_without_descriptors_left_a_process_is_not_watched() -> None:
    """RST: too many clients must not take the daemon down; the lock alone tells of their death."""
    body = """
import os, resource
from kvstore.service.liveness import Watched
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
assert Watched(os.getpid()).pidfd is None
"""
    subprocess.run([sys.executable, "-c", body], cwd=ROOT, check=True)


def test_where_descriptors_are_scarce_a_process_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC, RST: libzmq aborts a process that has none left for a connection."""
    number = os.dup(0)
    os.close(number)
    with closing(Watched(os.getpid())) as watched:
        assert watched.pidfd == number
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * number, 2 * number))
    with closing(Watched(os.getpid())) as watched:
        assert watched.pidfd is None
    assert os.dup(0) == number, "it was closed again"
    os.close(number)
