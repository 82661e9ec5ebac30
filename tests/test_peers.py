"""The benchmark of rivals, with the two systems that are always here. Its adapters for others cannot be tested without
them; what must hold whoever takes part is that nothing wrong passes for right, and that nobody's failure is ours."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import damage, environments
from benchmarks.peers.catalog import PEERS
from benchmarks.peers.plain_files import PlainFiles
from benchmarks.peers.process import Peer, SystemRefused, Worker, WorkerFailed
from benchmarks.peers.rounds import DAMAGED_PLACE, Record, Turns
from benchmarks.peers.servers import Server, ServerFailed
from benchmarks.peers.system import Place, Prompt, Refused, caller_memory
from tests.daemons import wait_until

HERE = "tests.test_peers"
BLOCK_NBYTES = 64 << 10
FILES = Peer("files", "benchmarks.peers.plain_files:PlainFiles", "")
OURS = Peer("ours", "benchmarks.peers.ours:Ours", "", options={"memory": "32MiB"}, damage=("payload", "header"))


class Liar(PlainFiles):
    """Gives back the blocks it has, one of them wrong."""

    def retrieve(self, prompt: Prompt) -> int:
        count = super().retrieve(prompt)
        self._memory[1][1, 100] ^= 1
        return count


class Lazy(PlainFiles):
    """Says that it copied, and did not."""

    def retrieve(self, prompt: Prompt) -> int:
        return prompt.num_blocks


class Refuser(PlainFiles):
    """Sees damage, and says so."""

    def retrieve(self, prompt: Prompt) -> int:
        count = super().retrieve(prompt)
        if prompt.wrong(self._memory[1][:count]):
            raise Refused("checksum")
        return count


class Mortal(PlainFiles):
    """Dies at its third store."""

    num_stores = 0

    def store(self, prompt: Prompt) -> None:
        self.num_stores += 1
        if self.num_stores == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().store(prompt)


class Sleeper(PlainFiles):
    """Hangs, with a process of its own."""

    def look_up(self, prompt: Prompt) -> int:
        server = Server(["sleep", "1000"], Path("sleep.log"))
        Path(self._folder.parent / "pid").write_text(str(server.pid))
        signal.pause()
        return 0


class Forgetter(PlainFiles):
    """Keeps nothing."""

    def look_up(self, prompt: Prompt) -> int:
        return 0


class Broken:
    """Cannot be made."""

    def __init__(self, place: Place) -> None:
        raise ServerFailed("no port is free")


def peer(kind: type[Any]) -> Peer:
    return Peer(kind.__name__, f"{HERE}:{kind.__name__}", "")


def started(kind: Peer) -> Worker:
    return Worker(kind, Path(sys.executable), Path(tempfile.gettempdir()))


def run(*peers: Peer, rounds: int = 2) -> dict[str, Record]:
    """Changes state. A small benchmark of these."""
    records = {each.name: Record() for each in peers}
    with ExitStack() as running:
        turns = Turns([running.enter_context(started(each)) for each in peers], records)
        turns.copy(BLOCK_NBYTES, 4, rounds, warm_up=1)
        turns.look_up(50, rounds, warm_up=1)
        turns.damage(BLOCK_NBYTES)
    return records


@pytest.fixture
def files() -> Iterator[Worker]:
    with started(FILES) as worker:
        worker.ask("attach", num_blocks=4, block_nbytes=BLOCK_NBYTES)
        yield worker


def test_ours_and_files_give_back_every_byte_and_their_damage_is_seen() -> None:
    records = run(OURS, FILES)
    for record in records.values():
        assert record.verified and not record.failure and record.checked_blocks == 12 and not record.late_rounds
        assert {figure: len(times) for figure, times in record.seconds.items()} == {
            ("kib64", "store"): 2,
            ("kib64", "look_up"): 2,
            ("kib64", "retrieve"): 2,
            ("long", "look_up"): 2,
        }
    # A read from memory checks what a block is, not the sum of its payload.
    assert records["ours"].damage == {"payload": "wrong bytes", "header": "a miss"}
    assert records["files"].damage == {"payload": "wrong bytes"}


def test_wrong_and_missing_bytes_are_reported() -> None:
    records = run(FILES, peer(Liar), peer(Lazy))
    assert records["files"].verified and not records["files"].failure
    assert not records["Liar"].verified and records["Liar"].wrong_blocks == 3
    assert not records["Lazy"].verified and records["Lazy"].wrong_blocks == records["Lazy"].checked_blocks


def test_an_error_is_told_from_wrong_bytes() -> None:
    records = run(peer(Refuser))
    assert records["Refuser"].verified and records["Refuser"].damage == {"payload": "an error"}


def test_a_worker_that_dies_is_a_row_and_the_others_go_on() -> None:
    records = run(peer(Mortal), FILES, rounds=3)
    assert "it died" in records["Mortal"].failure
    assert len(records["Mortal"].seconds["kib64", "store"]) == 1
    assert len(records["files"].seconds["kib64", "store"]) == 3 and records["files"].damage


def test_a_worker_that_forgets_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.rounds.LATE_S_MAX", 0.1)
    assert "found 0 of 4 blocks" in run(peer(Forgetter), FILES)["Forgetter"].failure


def test_a_worker_that_hangs_is_killed_with_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.process.CLOSE_S_MAX", 0.2)
    with started(peer(Sleeper)) as worker:
        folder = worker._place.disk
        with pytest.raises(WorkerFailed, match="no answer within 1 s"):
            worker.ask("look_up", Prompt(1, 1, 64), seconds_max=1)
        server = int((folder / "pid").read_text())
    assert not folder.exists()
    wait_until(lambda: not is_running(server))


def is_running(pid: int) -> bool:
    """Query. A killed child of a killed parent may stay a zombie where nobody reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_system_that_does_not_start_says_why() -> None:
    with pytest.raises(WorkerFailed, match="no port is free"):
        started(peer(Broken))


def test_a_refusal_leaves_the_worker_alive() -> None:
    with started(peer(Refuser)) as worker:
        worker.ask("attach", num_blocks=1, block_nbytes=4096)
        prompt, other = Prompt(1, 1, 4096), Prompt(2, 1, 4096)
        worker.ask("store", prompt)
        path = Path(worker.ask("locate")["files"][0])
        path.write_bytes(other.block(0))
        with pytest.raises(SystemRefused, match="checksum"):
            worker.ask("retrieve", prompt)
        assert worker.ask("look_up", prompt)["found"] == 1


def test_stale_blocks_show(files: Worker) -> None:
    """The blocks of another round, under the names of this one."""
    old, new = Prompt(1, 4, BLOCK_NBYTES), Prompt(2, 4, BLOCK_NBYTES)
    files.ask("store", new)
    for path in files.ask("locate")["files"]:
        Path(path).write_bytes(old.block(int(path[-1])))
    assert files.ask("retrieve", new)["wrong"] == [0, 1, 2, 3]


def test_blocks_share_no_word_and_prompts_no_token() -> None:
    prompts = [Prompt(number, 3, 4096) for number in (1, 2, 20_000)]
    rows = [prompt.block(place) for prompt in prompts for place in range(3)]
    words = {row[at : at + 8] for row in rows for at in range(0, 4096, 8)}
    assert len(words) == len(rows) * 512
    assert len({token for prompt in prompts for token in prompt.token_ids}) == 3 * 3 * 64


def test_wrong_finds_a_single_bit() -> None:
    prompt, memory = Prompt(5, 4, 4096), caller_memory(4, 4096)
    prompt.fill(memory[0])
    assert not prompt.wrong(memory[0])
    memory[0][2, 4095] ^= 0x80
    assert prompt.wrong(memory[0]) == [2]


def test_damage_reaches_another_process(files: Worker) -> None:
    """As it does a store's that keeps blocks in its own memory. The worker's block to store is such memory."""
    prompt = Prompt(1, 4, BLOCK_NBYTES)
    files.ask("store", prompt)
    assert damage.flip([], [files.pid], damage.needle_of(prompt.block(DAMAGED_PLACE % 4))) == 1
    assert damage.flip([], [files.pid], damage.needle_of(prompt.block(DAMAGED_PLACE % 4))) == 0


def test_an_environment_of_another_recipe_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments, "RECIPES", {"rival": environments.Recipe(steps=())})
    with pytest.raises(environments.SetUpFailed, match="make bench-peers"):
        environments.python_of("rival")
    environments.set_up("rival")
    assert environments.python_of("rival").exists()
    monkeypatch.setattr(environments, "RECIPES", {"rival": environments.Recipe((("no-such-thing==1",),))})
    with pytest.raises(environments.SetUpFailed):
        environments.python_of("rival")


def test_the_catalog_names_what_exists() -> None:
    assert len({each.name for each in PEERS}) == len(PEERS)
    for each in PEERS:
        assert each.installed in ("", *environments.RECIPES)
        module, _ = each.adapter.split(":")
        assert (environments.ROOT / f"{module.replace('.', '/')}.py").is_file()
