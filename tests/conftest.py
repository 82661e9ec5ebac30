"""What holds for the whole test session: how Hypothesis chooses examples, and that nothing is left behind.

Hypothesis: `make test` runs the profile `fixed`, whose examples are a function of the test's own code, so that a red
run is red again on every machine, and a green change cannot turn red by luck. New examples are looked for on purpose
and at leisure: `make fuzz` runs the profile `fresh` (random examples, ten times as many, failures kept in .hypothesis
and tried first next time). What it finds becomes an `@example` or a seed in a test.
"""

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from kvstore import Cache, Client
from tests.daemons import SPEC, Daemon, embedded

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a local folder: no test asks the network for it

settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.register_profile(
    "fresh", deadline=None, max_examples=1000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")  # --hypothesis-profile, where given, is applied later and wins

RUN_MARK = "KVSTORE_TEST_RUN"  # in the environment of every process that a test starts, however often it forks
SETTLE_S_MAX = 10.0  # a daemon that was just told to stop may take this long to be gone
OWN_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # live as long as pytest, by design


def shared_memory_names() -> set[Path]:
    return set(Path("/dev/shm").glob("kvstore-*"))


def is_ours(process: psutil.Process, run: str) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        started_here = process.environ().get(RUN_MARK) == run or psutil.Process() in process.parents()
        return started_here and not any(helper in " ".join(process.cmdline()) for helper in OWN_HELPERS)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def in_use(path: Path) -> bool:
    """Query. Whether a living process maps or holds something there: then it is another session's, not a leak."""
    needle = str(path)
    for process in psutil.process_iter():
        proc = Path("/proc") / str(process.pid)
        try:
            if needle in (proc / "maps").read_text():
                return True
            if any(needle in os.readlink(descriptor) for descriptor in (proc / "fd").iterdir()):
                return True
        except OSError:  # it ended meanwhile, or is not ours to look at
            continue
    return False


def end(process: psutil.Process) -> str:
    """Changes state. Kill it and say what it was."""
    try:
        what = f"process {process.pid}: {' '.join(process.cmdline())}"
        process.kill()
    except psutil.NoSuchProcess:
        what = f"process {process.pid}, which ended late"
    return what


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """LEK. Fails the session that leaves a process or a slab; ends the processes, so that the next run is clean."""
    before, run = shared_memory_names(), uuid.uuid4().hex
    os.environ[RUN_MARK] = run
    yield
    deadline = time.monotonic() + SETTLE_S_MAX
    while True:
        processes = [process for process in psutil.process_iter() if is_ours(process, run)]
        slabs = sorted(path for path in shared_memory_names() - before if not in_use(path))
        if not (processes or slabs) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    left = [str(path) for path in slabs] + [end(process) for process in processes]
    assert not left, f"tests left behind: {left}"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A real daemon for the tests of a file that leave it as it was."""
    with Daemon() as daemon:
        yield daemon.wait_ready()


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon.wait_ready()


@pytest.fixture
def client() -> Iterator[Client]:
    with embedded() as client:
        yield client


@pytest.fixture
def cache(client: Client) -> Cache:
    return client.attach(SPEC)
