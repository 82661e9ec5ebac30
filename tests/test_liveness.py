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
from kvstore.service.liveness import (
    LocalReaders,
    SessionsFile,
    Watched,
    hold_session,
    let_session_go,
    start_reading,
    stop_reading,
)
from tests.daemons import wait_until
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


# --- who reads on

EPOCH = 1_800_000_000_000_000_000  # as large as real ones: nanoseconds
SHARE = EPOCH + 1
Do = Callable[[str], str]


class Peer:
    """A forked process that does what it is told, one word after the other, until `end`."""

    def __init__(self, make: Callable[[Path, int], Do], path: Path, number: int) -> None:
        """`make`: called in the process itself, since locks are its own."""
        told_fd, tell_fd = os.pipe()
        said_fd, say_fd = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(tell_fd)
            do = make(path, number)
            with open(told_fd) as told:
                for word in told:
                    os.write(say_fd, f"{do(word.strip())}\n".encode())
            os._exit(0)
        os.close(told_fd)
        os.close(say_fd)
        self._told = open(tell_fd, "w", buffering=1)  # noqa: SIM115
        self._said = open(said_fd)  # noqa: SIM115

    def ask(self, word: str) -> str:
        self._told.write(f"{word}\n")
        return self._said.readline().strip()

    def end(self) -> None:
        """Changes state. SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._told.close()
        self._said.close()


def sleeping_child() -> str:
    child = os.fork()
    if not child:
        os.closerange(3, 100)  # the pipes: who reads them must not wait for us
        time.sleep(60)
        os._exit(1)
    return str(child)


def reader_of(path: Path, number: int) -> Do:
    """A client's process: its session, and readings under shares of the daemon of EPOCH."""

    def do(word: str) -> str:
        verb, share = word.split()
        fd = hold_session(path, number)
        match verb:
            case "read":
                return str(start_reading(fd, EPOCH, int(share)))
            case "stop":
                stop_reading(fd, int(share))
            case "fork":
                return sleeping_child()
            case "close":
                os.close(os.open(path, os.O_RDONLY))
        return "done"

    return do


def daemon_of(path: Path, epoch: int) -> Do:
    """A daemon's process, which has admitted nobody yet."""
    file = SessionsFile(path, 16)
    file.admit_from(epoch)

    def do(word: str) -> str:
        verb, share = word.split()
        if verb == "admit":
            file.admit(int(share))
            return "done"
        return str(file.dismiss(int(share)))

    return do


MakePeer = Callable[[Callable[[Path, int], Do], Path, int], Peer]


@pytest.fixture
def peers(path: Path, sessions: SessionsFile) -> Iterator[MakePeer]:
    """Makes peers, and ends those that have not ended. The test is the daemon of EPOCH."""
    sessions.admit_from(EPOCH)
    made: list[Peer] = []

    def make(do: Callable[[Path, int], Do], path: Path, number: int) -> Peer:
        made.append(Peer(do, path, number))
        return made[-1]

    yield make
    for peer in made:
        if not peer._told.closed:
            peer.end()


def test_nobody_reads_before_he_is_admitted(path: Path, sessions: SessionsFile, peers: MakePeer) -> None:
    """COR."""
    reader = peers(reader_of, path, 3)
    assert reader.ask(f"read {SHARE}") == "False"
    sessions.admit(SHARE)
    assert [reader.ask(f"read {share}") for share in (EPOCH, SHARE - 1, SHARE + 1, SHARE)] == [*["False"] * 3, "True"]


def test_who_reads_is_not_dismissed_and_who_was_dismissed_does_not_read(
    path: Path, sessions: SessionsFile, peers: MakePeer
) -> None:
    """COR, LEK."""
    reader = peers(reader_of, path, 3)
    sessions.admit(SHARE)
    assert reader.ask(f"read {SHARE}") == "True"
    assert not sessions.dismiss(SHARE)
    assert not sessions.dismiss(SHARE)
    assert reader.ask(f"stop {SHARE}") == "done"
    assert sessions.dismiss(SHARE)
    assert reader.ask(f"read {SHARE}") == "False"


def test_who_came_too_late_keeps_nothing_from_its_end(path: Path, sessions: SessionsFile, peers: MakePeer) -> None:
    """LEK: a reading that may not begin leaves no lock."""
    reader = peers(reader_of, path, 3)
    sessions.admit(SHARE)
    assert sessions.dismiss(SHARE)
    assert reader.ask(f"read {SHARE}") == "False"
    sessions.admit(SHARE + 1)
    assert reader.ask(f"read {SHARE + 1}") == "True"
    assert not sessions.dismiss(SHARE + 1)


def test_many_processes_read_under_one_number(path: Path, sessions: SessionsFile, peers: MakePeer) -> None:
    """COR: it ends with the last of them."""
    readers = [peers(reader_of, path, number) for number in range(3, 6)]
    sessions.admit(SHARE)
    assert [reader.ask(f"read {SHARE}") for reader in readers] == ["True"] * 3
    for reader in readers:
        assert not sessions.dismiss(SHARE)
        reader.ask(f"stop {SHARE}")
    assert sessions.dismiss(SHARE)


def test_readers_of_one_process_are_counted(path: Path, sessions: SessionsFile, peers: MakePeer) -> None:
    """COR: the kernel has one lock for them all."""
    reader = peers(reader_of, path, 3)
    sessions.admit(SHARE)
    sessions.admit(SHARE + 1)
    assert [reader.ask(f"read {share}") for share in (SHARE, SHARE, SHARE, SHARE + 1)] == ["True"] * 4
    for _ in range(3):
        assert not sessions.dismiss(SHARE)
        reader.ask(f"stop {SHARE}")
    assert sessions.dismiss(SHARE)
    assert reader.ask(f"read {SHARE}") == "False"
    assert not sessions.dismiss(SHARE + 1)


def test_a_killed_reader_reads_no_more(path: Path, sessions: SessionsFile, peers: MakePeer) -> None:
    """LEK."""
    readers = [peers(reader_of, path, number) for number in (3, 4)]
    sessions.admit(SHARE)
    assert [reader.ask(f"read {SHARE}") for reader in readers] == ["True"] * 2
    readers[0].end()
    assert not sessions.dismiss(SHARE)
    readers[1].end()
    assert sessions.dismiss(SHARE)


def test_a_child_of_a_killed_reader_reads_nothing(path: Path, sessions: SessionsFile, peers: MakePeer) -> None:
    """LEK: forked before, or while, its parent reads."""
    for verbs in (("fork", "read"), ("read", "fork")):
        reader, share = peers(reader_of, path, 3), SHARE + verbs.index("read")
        sessions.admit(share)
        said = {verb: reader.ask(f"{verb} {share}") for verb in verbs}
        assert said["read"] == "True"
        assert not sessions.dismiss(share), "a child costs its parent nothing"
        reader.end()
        wait_until(lambda share=share: sessions.dismiss(share), what="the child closes what it inherited")
        os.kill(int(said["fork"]), signal.SIGKILL)


def test_a_forked_reader_counts_anew(path: Path, sessions: SessionsFile, peers: MakePeer) -> None:
    """COR: what its parent reads is not read by it, though the numbers are the same."""
    sessions.admit(SHARE)
    first = peers(lambda path, _: lambda _: forks_and_reads(path), path, 4)
    assert first.ask("now") == "True True"
    assert not sessions.dismiss(SHARE), "the child reads, its parent stopped"
    first.end()


def forks_and_reads(path: Path) -> str:
    """A process that reads, and whose child reads, too; then only the child does, for as long as its parent lives."""
    fd = hold_session(path, 4)
    mine = start_reading(fd, EPOCH, SHARE)
    said_fd, say_fd = os.pipe()
    parent = os.getpid()
    if not os.fork():
        os.write(say_fd, str(start_reading(fd, EPOCH, SHARE)).encode())
        os.close(say_fd)
        while os.getppid() == parent:
            time.sleep(0.01)
        os._exit(0)
    os.close(say_fd)
    with open(said_fd) as said:
        theirs = said.read(4)
    stop_reading(fd, SHARE)
    return f"{mine} {theirs}"


def test_who_reads_may_close_another_descriptor(path: Path, sessions: SessionsFile, peers: MakePeer) -> None:
    """COR: no other code of a process can lose its readings."""
    reader = peers(reader_of, path, 3)
    sessions.admit(SHARE)
    assert reader.ask(f"read {SHARE}") == "True"
    reader.ask(f"close {SHARE}")
    assert not sessions.dismiss(SHARE)


def test_sessions_and_readings_share_a_file_and_nothing_else(
    path: Path, sessions: SessionsFile, peers: MakePeer
) -> None:
    """IDN."""
    reader = peers(reader_of, path, 3)
    sessions.admit(SHARE)
    assert reader.ask(f"read {SHARE}") == "True"
    assert [sessions.is_held(number) for number in (2, 3, 4)] == [False, True, False]
    reader.ask(f"stop {SHARE}")
    assert sessions.is_held(3)


def test_nobody_begins_to_read_of_a_daemon_that_is_dead(path: Path) -> None:
    """COR, RST: whoever it had admitted or not: its word counts no more."""
    daemon, reader, late = (Peer(daemon_of, path, EPOCH), Peer(reader_of, path, 3), Peer(reader_of, path, 4))
    daemon.ask(f"admit {SHARE}")
    assert reader.ask(f"read {SHARE}") == "True"
    daemon.end()
    assert [late.ask(f"read {share}") for share in (SHARE, SHARE + 1)] == ["False"] * 2
    for peer in (reader, late):
        peer.end()


def test_the_next_daemon_comes_while_readers_of_the_old_one_live(path: Path) -> None:
    """RST: they hold nothing of its numbers, and a ticket of the old one opens nothing."""
    daemon, reader, late = (Peer(daemon_of, path, EPOCH), Peer(reader_of, path, 3), Peer(reader_of, path, 4))
    daemon.ask(f"admit {SHARE}")
    assert reader.ask(f"read {SHARE}") == "True"
    daemon.end()
    newest = SHARE + 1000
    with closing(SessionsFile(path, 16)) as file:
        file.admit_from(newest)
        file.admit(newest + 1)
        assert late.ask(f"read {SHARE}") == "False"
        assert file.dismiss(newest + 1)
        assert file.is_held(3), "it is a stranger to the new one, until it has said what it holds"
    for peer in (reader, late):
        peer.end()


def test_a_daemon_stops_in_the_midst_of_readings(path: Path) -> None:
    """COR: the reading itself goes on; a daemon that hangs lives."""
    daemon, reader = Peer(daemon_of, path, EPOCH), Peer(reader_of, path, 3)
    daemon.ask(f"admit {SHARE}")
    daemon.ask(f"admit {SHARE + 1}")
    assert reader.ask(f"read {SHARE}") == "True"
    os.kill(daemon.pid, signal.SIGSTOP)
    assert reader.ask(f"read {SHARE + 1}") == "True", "it lives: what it admitted is good"
    assert reader.ask(f"read {SHARE + 2}") == "False"
    for peer in (daemon, reader):
        peer.end()


def test_a_reading_opens_no_descriptor_a_time(path: Path) -> None:
    """LEK."""
    daemon, fd = Peer(daemon_of, path, EPOCH), 0
    for share in range(SHARE, SHARE + 20):
        daemon.ask(f"admit {share}")
        fd = fd or hold_session(path, 1)
        assert start_reading(fd, EPOCH, share)
        if share == SHARE:
            before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == before
    assert [daemon.ask(f"dismiss {share}") for share in (SHARE, SHARE + 19)] == ["False"] * 2
    for share in range(SHARE, SHARE + 20):
        stop_reading(fd, share)
    assert [daemon.ask(f"dismiss {share}") for share in (SHARE, SHARE + 19)] == ["True"] * 2
    assert not start_reading(fd, EPOCH, SHARE)
    let_session_go(fd, 1)
    daemon.end()


def test_a_store_in_this_process_has_readers_in_it() -> None:
    """COR: the same without a kernel."""
    readers = LocalReaders()
    assert not start_reading(None, EPOCH, SHARE)
    readers.admit(SHARE)
    assert [start_reading(None, EPOCH, SHARE) for _ in range(2)] == [True] * 2
    assert not start_reading(None, EPOCH, SHARE + 1)
    stop_reading(None, SHARE)
    assert not readers.dismiss(SHARE)
    stop_reading(None, SHARE)
    assert readers.dismiss(SHARE)
    assert not start_reading(None, EPOCH, SHARE)
    readers.close()


def test_a_store_that_is_closed_has_readers_no_more() -> None:
    """LEK: other stores of the process have."""
    one, other = LocalReaders(), LocalReaders()
    one.admit(SHARE)
    other.admit(SHARE + 1)
    one.close()
    assert not start_reading(None, EPOCH, SHARE)
    assert start_reading(None, EPOCH, SHARE + 1)
    assert not other.dismiss(SHARE + 1)
    stop_reading(None, SHARE + 1)
    assert other.dismiss(SHARE + 1)


def test_a_forked_child_reads_nothing_of_its_parents_store() -> None:
    """COR: its memory is another one."""
    readers = LocalReaders()
    readers.admit(SHARE)
    assert start_reading(None, EPOCH, SHARE)
    child = Holder(lambda: str(start_reading(None, EPOCH, SHARE)))
    assert child.said == "False"
    child.end()
    stop_reading(None, SHARE)
    assert readers.dismiss(SHARE)
