"""The `kvstore` command as an operator meets it: what it says, how it ends, and what it leaves."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore import cli
from kvstore.config import option_names
from kvstore.media import folder as folder_module
from tests.daemons import KVSTORE, SPEC, Daemon, Other, chat, read, run_kvstore, store, wait_until

ONE_LINE = re.compile(r"kvstore: [^\n]+\n")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command in this process: a second each is too much for as many ways to fail."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)

    def run(*words: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["kvstore", *words])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as exc:
            code = int(exc.code or 0)
        return Ran(code, *capsys.readouterr())

    return run


class Place(NamedTuple):
    """Where a start that fails could leave something."""

    folder: Path
    memory: Path

    @property
    def flags(self) -> list[str]:
        """A start that would succeed."""
        address = f"ipc://{self.folder}/run/kv.sock"
        return ["--address", address, "--memory.path", str(self.memory), "--memory.capacity", "16MiB"]

    def but(self, **changed: str) -> list[str]:
        flags = self.flags
        for name, value in changed.items():
            flag = f"--memory.{name}" if name != "address" else "--address"
            at = flags.index(flag)
            flags[at + 1 : at + 2] = [value]
        return flags

    def left(self) -> list[str]:
        """Query. All but the lock file beside the socket, which must outlive whoever holds it."""
        found = [str(self.memory)] if self.memory.exists() else []
        run = self.folder / "run"
        return found + [str(path) for path in (run.iterdir() if run.exists() else ()) if path.suffix != ".lock"]


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place(Path(tempfile.mkdtemp(prefix="kvt-")), Path(f"/dev/shm/kvstore-test-{uuid.uuid4().hex[:12]}"))
    yield place
    shutil.rmtree(place.folder)
    shutil.rmtree(place.memory, ignore_errors=True)


def refused(ran: Ran, code: int = 1) -> str:
    """Query. The one line that a failed command says."""
    assert ran.code == code, ran
    assert ran.out == ""
    assert ONE_LINE.fullmatch(ran.err), ran.err
    return ran.err


# What cannot be started

FILES = {
    '[memory]\ncapcity = "1GiB"\n': "unknown key memory.capcity; did you mean memory.capacity?",
    'adress = "ipc:///x"\n': "unknown key adress; did you mean address?",
    "[disk]\npath = '/x'\n": "disk.capacity is not set",
    'memory = "2GiB"\n': "memory is a section",
    "[memory]\ncapacity = \n": "Invalid value",
    "[memory]\ncapacity = 1.5\n": "memory.capacity=1.5: Expected `int`, got `float`",
    '[memory]\nchecksums = "no"\n': "memory.checksums='no': Expected `bool`, got `str`",
    "[memory]\nsession_share = 2.0\n": "memory.session_share",
    "[memory]\nsession_share = nan\n": "memory.session_share",
    "\udcff": "can't decode",
}


@pytest.mark.parametrize(("text", "reason"), FILES.items())
@pytest.mark.parametrize("with_flags", [True, False])
def test_a_config_file_that_is_wrong_stops_the_start(
    run: Callable[..., Ran], place: Place, text: str, reason: str, with_flags: bool
) -> None:
    """CFG: L#447, L#1244. It names path, value and reason, whatever flags are given beside it."""
    path = place.folder / "kvstore.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    flags = ["--address", f"ipc://{place.folder}/run/kv.sock", *(["--memory.path", str(place.memory)] * with_flags)]
    line = refused(run("serve", "--config", str(path), *flags))
    assert reason in line
    assert place.left() == []


def test_a_config_file_that_cannot_be_read_stops_the_start(run: Callable[..., Ran], place: Place) -> None:
    """CFG: L#1244."""
    for path, reason in ((place.folder / "absent.toml", "No such file"), (place.folder, "Is a directory")):
        line = refused(run("serve", "--config", str(path), *place.flags))
        assert str(path) in line
        assert reason in line
    assert place.left() == []


FLAGS = [
    ({"capacity": "12parsecs"}, "memory.capacity: '12parsecs' is not a size"),
    ({"capacity": "3MiB"}, "memory.capacity 3145728 bytes is below 4MiB"),
    ({"capacity": "0"}, "memory.capacity is not set"),
    ({"capacity": "900TiB"}, "is too large: only"),
    ({"address": "tcp://127.0.0.1:5555"}, "only ipc:///absolute/path is supported"),
    ({"address": "ipc://relative/path"}, "only ipc:///absolute/path is supported"),
    ({"address": "ipc:///" + "x" * 107}, "at most 107 bytes"),
    ({"address": "ipc:///dev/null/kv.sock"}, "address 'ipc:///dev/null/kv.sock': File exists"),
    ({"path": "/dev/null/slab"}, "memory.path=/dev/null/slab: Not a directory"),
    ({"path": "/proc/slab"}, "memory.path=/proc/slab"),
]


@pytest.mark.parametrize(("changed", "reason"), FLAGS)
def test_a_flag_that_cannot_be_stops_the_start(
    run: Callable[..., Ran], place: Place, changed: dict[str, str], reason: str
) -> None:
    """CFG, SEC."""
    assert reason in refused(run("serve", *place.but(**changed)))
    assert place.left() == []


@pytest.mark.parametrize(
    ("words", "reason", "code"),
    [
        (["--memory.capcity", "1GiB"], "No such option: --memory.capcity", 2),
        (["--memory.session_share", "lots"], "'--memory.session_share': Input should be a valid number", 2),
        (["--memory.session_share", "0"], "memory.session_share", 1),
        (["--memory.session_share", "nan"], "memory.session_share", 1),
        (["--memory.checksums", "maybe"], "memory.checksums: 'maybe' is neither true nor false", 1),
        (["surplus"], "surplus", 2),
    ],
)
def test_a_word_that_is_not_understood_stops_the_start(
    run: Callable[..., Ran], place: Place, words: list[str], reason: str, code: int
) -> None:
    """CFG."""
    assert reason in refused(run("serve", *place.flags, *words), code)
    assert place.left() == []


def test_without_a_capacity_nothing_starts(run: Callable[..., Ran], place: Place) -> None:
    """DSK: L#4664, no tier without a bound."""
    line = refused(run("serve", *place.flags[:4]))
    assert "memory.capacity is not set: say how much host memory blocks may take, e.g. 8GiB" in line
    assert place.left() == []


def test_a_living_daemon_is_not_disturbed(run: Callable[..., Ran], place: Place, daemon: Daemon) -> None:
    """CFG: neither its socket nor its slab can be taken."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(1))
        line = refused(run("serve", *place.but(address=daemon.address)))
        assert f"is served by another daemon (pid {daemon.process.pid})" in line
        line = refused(run("serve", *place.but(path=str(daemon.memory_path))))
        assert f"memory.path={daemon.memory_path}: in use by another daemon" in line
        assert place.left() == []
        assert read(cache, chat(1)) == 64
        assert client.status()["client"]["reconnects"] == 0
    assert len(daemon.slabs) == 1


def test_a_path_that_is_no_socket_is_left_alone(run: Callable[..., Ran], place: Place) -> None:
    """CFG."""
    path = place.folder / "kv.sock"
    path.write_text("precious")
    assert "exists and is not a socket" in refused(run("serve", *place.but(address=f"ipc://{path}")))
    assert path.read_text() == "precious"
    assert place.left() == []


def test_a_folder_that_others_can_enter_is_refused_untouched(run: Callable[..., Ran], place: Place) -> None:
    """SEC: the slab holds prompts in clear."""
    place.memory.mkdir()
    (place.memory / "theirs").touch()
    place.memory.chmod(0o755)
    assert "must belong to this user with mode 0700" in refused(run("serve", *place.flags))
    assert [path.name for path in place.memory.iterdir()] == ["theirs"]
    if not os.geteuid():
        place.memory.chmod(0o700)
        os.chown(place.memory, 12345, 12345)
        assert "must belong to this user" in refused(run("serve", *place.flags))
        assert [path.name for path in place.memory.iterdir()] == ["theirs"]


@pytest.mark.parametrize("capacity", ["64MiB", "16MiB"])
def test_a_slab_larger_than_its_tmpfs_is_refused(run: Callable[..., Ran], place: Place, capacity: str) -> None:
    """CFG: its tables counted; the tmpfs has 16 MiB."""
    place.memory.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(place.memory)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        line = refused(run("serve", *place.but(capacity=capacity)))
        assert f"is too large: only 16MiB is free in {place.memory} (enlarge that tmpfs)" in line
        assert list(place.memory.iterdir()) == []
    finally:
        subprocess.run(["umount", str(place.memory)], check=True)


def test_a_slab_larger_than_the_cgroup_is_refused(
    run: Callable[..., Ran], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CFG."""
    monkeypatch.setattr(folder_module, "_cgroup_left_nbytes", lambda: [10 << 20])
    assert "is too large: only 10MiB is left in this cgroup" in refused(run("serve", *place.flags))
    assert place.left() == []


def test_the_installed_command_fails_in_one_line(place: Place) -> None:
    """CFG: the real process, once."""
    ran = run_kvstore("serve", *place.but(capacity="900TiB"))
    assert ran.returncode == 1
    assert ONE_LINE.fullmatch(ran.stderr)
    assert ran.stdout == ""
    assert place.left() == []


# What is asked of it


def test_every_option_has_a_flag(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """CFG: M#3022. And every flag but --config sets an option."""
    monkeypatch.setenv("COLUMNS", "200")
    ran = run("serve", "--help")
    assert ran.code == 0
    flags = set(re.findall(r"--([a-z_.]+)", ran.out)) - {"config", "help"}
    assert flags == set(option_names())


def test_without_words_it_helps(run: Callable[..., Ran]) -> None:
    """CFG."""
    for words in ([], ["--help"]):
        ran = run(*words)
        assert ran.code == 0
        assert {"serve", "status", "clean"} <= set(ran.out.split())
    assert "nonsense" in refused(run("nonsense"), 2)


def test_nobody_there_is_one_line(run: Callable[..., Ran]) -> None:
    """CFG."""
    line = refused(run("status", "--address", f"ipc:///tmp/kvt-{os.getpid()}-nobody"))
    assert "is `kvstore serve` running?" in line
    assert "only ipc:///absolute/path" in refused(run("status", "--address", "tcp://localhost:1"))


def test_status_is_one_json_object_or_a_page(run: Callable[..., Ran], daemon: Daemon) -> None:
    """OBS."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(5))
        read(cache, chat(5))
        ran = run("status", "--address", daemon.address, "--json")
        assert (ran.code, ran.err, ran.out.count("\n")) == (0, "", 1)
        facts = json.loads(ran.out)
        assert facts["address"] == daemon.address
        assert facts["pid"] == daemon.process.pid
        assert facts["memory"]["capacity_nbytes"] == 16 << 20
        assert facts["memory"]["cached_nbytes"] >= 4 * SPEC.slot_nbytes
        assert [spec["model"] for spec in facts["specs"]] == ["tiny"]
        ran = run("status", "--address", daemon.address)
        assert (ran.code, ran.err) == (0, "")
        for word in ("16 MiB", "tiny", "hit ratio", str(daemon.process.pid), daemon.address):
            assert word in ran.out


# A life


def test_serve_says_its_sizes_and_ends_without_a_trace() -> None:
    """CFG, LEK: L#1787, the effective values are printed."""
    for ending in (signal.SIGTERM, signal.SIGINT):
        flags = ("--memory.session_share", "0.25", "--memory.checksums", "false", "--memory.keep", "false")
        with Daemon(*flags, capacity="33MiB") as daemon:
            said = daemon.log
            assert f"kvstore: listening on {daemon.address}\n" in said
            assert "kvstore: memory 32 MiB in 4 extents of 8 MiB, checksums off, at most 8 MiB per session\n" in said
            assert f"kvstore: slab {daemon.slabs[0]}\n" in said
            with daemon.connect() as client:
                store(client.attach(SPEC), chat(1))
                daemon.process.send_signal(ending)
                assert daemon.process.wait(10) == 0
            assert not daemon.memory_path.exists()
            assert sorted(path.name for path in daemon.folder.iterdir()) == ["kv.sock.lock", "log"]
            assert "Traceback" not in daemon.log


def test_a_file_and_flags_make_one_configuration(place: Place) -> None:
    """CFG: flags win."""
    file = place.folder / "kvstore.toml"
    file.write_text('address = "ipc:///nowhere/at/all"\n[memory]\ncapacity = "1TiB"\nsession_share = 1.0\n')
    with Daemon("--config", str(file)) as daemon:
        assert "memory 16 MiB in 4 extents of 4 MiB, checksums on, at most 16 MiB per session" in daemon.log


def test_a_relative_folder_is_the_daemons_own(place: Place) -> None:
    """CFG: a client elsewhere must find it all the same."""
    place.memory.mkdir(mode=0o700)
    address = f"ipc://{place.folder}/kv.sock"
    flags = ["--address", address, "--memory.path", "slab", "--memory.capacity", "4MiB", "--memory.keep", "false"]
    process = subprocess.Popen(
        [str(KVSTORE), "serve", *flags], cwd=place.memory, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        wait_until((place.folder / "kv.sock").exists)
        ran = run_kvstore("status", "--address", address, "--json", cwd="/")
        assert ran.returncode == 0, ran.stderr
    finally:
        process.terminate()
        assert process.wait(10) == 0
    assert list(place.memory.iterdir()) == []


def test_the_next_daemon_goes_on_with_a_slab_of_its_size_and_no_other() -> None:
    """RST, LEK."""
    with Daemon(capacity="16MiB") as daemon:
        left = daemon.slabs
        daemon.kill()
        daemon.start()
        assert daemon.slabs == left
        assert daemon.terminate() == 0
        assert daemon.slabs == left
        left[0].write_bytes(b"not a slab")
        daemon.start()
        assert len(daemon.slabs) == 1
        assert daemon.slabs != left
        assert "starting with an empty one" in daemon.log


def test_clean_takes_what_nobody_uses(run: Callable[..., Ran], place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEK: neither a living daemon's slab nor one that a living client still maps."""
    monkeypatch.setattr(folder_module, "SHM", place.memory)
    names = [f"kvstore-{os.geteuid()}-{number:012x}" for number in range(4)]
    foreign = place.memory / f"kvstore-{os.geteuid()}-a-file"
    dead, alive, mapped = (place.memory / name for name in names[:3])
    assert run("clean") == (0, "", "")
    with Daemon(memory_path=dead) as one, Daemon(memory_path=alive) as two, Daemon(memory_path=mapped) as three:
        foreign.write_text("not a folder")
        with Other(three, "say('connected'); hear()") as other:
            assert other.hear() == "connected"
            one.kill()
            three.kill()
            ran = run("clean")
            assert (ran.code, ran.err) == (0, "")
            said = dict(line.split(": ", 1) for line in ran.out.splitlines())
            assert said[str(dead)] == "removed"
            assert said[str(alive)].startswith("left alone (memory.path=")
            assert said[str(mapped)] == "left alone (1 sessions are alive)"
            assert said[str(foreign)].startswith("left alone")
            assert [path.exists() for path in (dead, alive, mapped, foreign)] == [False, True, True, True]
        assert f"{mapped}: removed" in run("clean").out
        with two.connect() as client:
            assert store(client.attach(SPEC), chat(1))
