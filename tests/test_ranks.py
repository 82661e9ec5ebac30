"""Ranks of engines as real processes against a real daemon: what one shape of engine wrote, any other reads, byte for
byte, and whatever becomes of one rank is the same for all.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client, KVSpec
from tests.daemons import Daemon, assert_balanced, chat, holds, kv_of, read, store, wait_until
from tests.rank_processes import Part, Rank, all_do, pp, slice_of, tp, tp_pp
from tests.test_flips import is_idle

NUM_RANKS = 8
LENGTH = 3 * 16 + 5  # a short last block


def spec_of(dtype: str, **shape: Any) -> KVSpec:
    shape = shape or {"num_kv_heads": 8, "head_dim": 8}
    return KVSpec(model=f"ranks {dtype}", dtype=dtype, num_layers=4, block_tokens=16, **shape)


MHA = spec_of("bfloat16")
GQA = spec_of("float16", num_kv_heads=2, head_dim=8)
MLA = spec_of("bfloat16", latent_dim=24)

Shape = Callable[[KVSpec], list[Part]]
SHAPES: dict[str, Shape] = {
    "TP1": lambda spec: tp(1, spec),
    "TP2": lambda spec: tp(2, spec),
    "TP4": lambda spec: tp(4, spec),
    "TP8": lambda spec: tp(8, spec),
    "PP2": lambda spec: pp(2, spec),
    "TP2 PP2": lambda spec: tp_pp(2, 2, spec),
}
PAIRS = [("TP4", "TP8"), ("TP4", "TP1"), ("TP4", "PP2"), ("PP2", "TP2"), ("TP2 PP2", "TP4"), ("TP8", "TP2 PP2")]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(capacity="32MiB") as started:
        yield started.wait_ready()


@contextmanager
def ranks_of(daemon: Daemon, count: int) -> Iterator[list[Rank]]:
    """Changes state. So many processes, for the length of the block."""
    with ExitStack() as held:
        ranks = [Rank(daemon.address) for _ in range(count)]
        for rank in ranks:
            held.callback(rank.close)
        yield ranks


@pytest.fixture(scope="module")
def processes(daemon: Daemon) -> Iterator[list[Rank]]:
    """As many as the largest engine has ranks. They attach to what a test wants, and hold nothing after it."""
    with ranks_of(daemon, NUM_RANKS) as ranks:
        yield ranks


@pytest.fixture
def spawn(daemon: Daemon) -> Iterator[Callable[[], Rank]]:
    """Ranks that a test may kill."""
    with ExitStack() as held:

        def make() -> Rank:
            rank = Rank(daemon.address)
            held.callback(rank.close)
            return rank

        yield make


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A scheduler's. What ranks held is gone when a test ends."""
    with daemon.connect() as connected:
        yield connected
    wait_until(lambda: holds(daemon.status()) == (0, 0, 0), what="all has been given back")
    assert_balanced(daemon.status())


names = iter(range(10_000))


def engine(processes: list[Rank], shape: str, spec: KVSpec, with_torch: bool = False) -> list[Rank]:
    """Changes state. The ranks of an engine of this shape, in a group of their own."""
    parts, group = SHAPES[shape](spec), f"{shape} {next(names)}"
    ranks = processes[: len(parts)]
    said = all_do(ranks, "attach", each=lambda number: (spec, group, parts[number], with_torch))
    assert not any(said), said
    return ranks


def store_by(ranks: list[Rank], tokens: list[int]) -> None:
    """Changes state. All at once, as engines do."""
    assert any(all_do(ranks, "put", tokens))


def read_by(ranks: list[Rank], client: Client, spec: KVSpec, tokens: list[int]) -> int:
    """Changes state. A scheduler decides, all ranks read: one number of tokens."""
    with client.attach(spec).acquire(tokens, shared=True) as hit:
        found = all_do(ranks, "read", hit.ticket, tokens)
        assert set(found) == {hit.num_tokens}
        return hit.num_tokens


# --- shapes


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "float32"])
@pytest.mark.parametrize(("written_by", "read_by_"), PAIRS)
def test_what_one_shape_wrote_another_reads(
    processes: list[Rank], client: Client, written_by: str, read_by_: str, dtype: str
) -> None:
    spec, tokens = spec_of(dtype), chat(next(names), LENGTH)
    writers = engine(processes, written_by, spec)
    assert client.attach(spec).match(tokens) == 0
    store_by(writers, tokens)
    assert read(client.attach(spec), tokens) == LENGTH, "an engine in one piece, with every checksum its own"
    readers = engine(processes, read_by_, spec)
    assert read_by(readers, client, spec, tokens) == LENGTH
    assert read_by(readers, client, spec, tokens[:40]) == 40, "a part of a block"
    assert read_by(readers, client, spec, [*tokens[:50], 7, 7, 7]) == 50, "what the short block shares"
    assert read_by(readers, client, spec, [*tokens, 8, 8]) == LENGTH


@pytest.mark.parametrize("written_by", ["TP4", "TP8"])
@pytest.mark.parametrize("read_by_", ["TP8", "TP2", "TP1", "PP2"])
def test_fewer_heads_than_ranks(processes: list[Rank], client: Client, written_by: str, read_by_: str) -> None:
    """GQA: several ranks have the same head; one of them stores it, the others are told that it is being stored."""
    tokens = chat(next(names), LENGTH)
    writers = engine(processes, written_by, GQA)
    granted = all_do(writers, "reserve", "r", tokens)
    assert sorted(granted) == [0] * (len(writers) - 2) + [4, 4]
    all_do(writers, "fill", "r", tokens)
    assert sum(all_do(writers, "commit", "r")) == 2
    assert read_by(engine(processes, read_by_, GQA), client, GQA, tokens) == LENGTH


@pytest.mark.parametrize(("written_by", "read_by_"), [("TP4", "TP8"), ("TP4", "PP2"), ("PP2", "TP2"), ("TP1", "TP4")])
def test_one_latent_for_all_ranks(processes: list[Rank], client: Client, written_by: str, read_by_: str) -> None:
    """MLA."""
    tokens = chat(next(names), LENGTH)
    store_by(engine(processes, written_by, MLA), tokens)
    assert read(client.attach(MLA), tokens) == LENGTH
    assert read_by(engine(processes, read_by_, MLA), client, MLA, tokens) == LENGTH


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_tensors(processes: list[Rank], client: Client, dtype: str) -> None:
    """Of torch, from and to which engines copy."""
    spec, tokens = spec_of(dtype), chat(next(names), LENGTH)
    store_by(engine(processes, "TP4", spec, with_torch=True), tokens)
    assert read_by(engine(processes, "PP2", spec, with_torch=True), client, spec, tokens) == LENGTH
    assert read(client.attach(spec), tokens) == LENGTH


def test_an_engine_in_one_piece_and_one_of_ranks_write_at_once(processes: list[Rank], client: Client) -> None:
    """Whoever comes first is kept; the other's bytes are the same."""
    tokens = chat(next(names), LENGTH)
    ranks = engine(processes, "TP4", MHA)
    assert all_do(ranks, "reserve", "r", tokens) == [4] * 4
    assert store(client.attach(MHA), tokens)
    all_do(ranks, "fill", "r", tokens)
    all_do(ranks, "commit", "r")
    assert read_by(ranks, client, MHA, tokens) == LENGTH


def test_two_engines_of_one_shape_do_not_mix(processes: list[Rank], client: Client) -> None:
    """Groups of different names: a part of the one never makes a block of the other whole."""
    tokens = chat(next(names), LENGTH)
    parts = SHAPES["TP4"](MHA)
    for number, rank in enumerate(processes):
        assert not rank.do("attach", MHA, f"twins {number // 4}", parts[number % 4])
    one, other = processes[:4], processes[4:]
    assert all_do([*one[:2], *other[2:]], "put", tokens) == [True] * 4
    assert client.attach(MHA).match(tokens) == 0
    assert all_do(one[2:], "put", tokens) == [True] * 2
    assert read_by(other, client, MHA, tokens) == LENGTH
    all_do(other[:2], "put", tokens)


# --- what becomes of one rank becomes of all


@contextmanager
def aborted(daemon: Daemon) -> Iterator[None]:
    """Changes state. Returns once the daemon has given up a reservation."""
    before = daemon.status()["stats"]["reservations_aborted"]
    yield
    wait_until(lambda: daemon.status()["stats"]["reservations_aborted"] == before + 1)


@pytest.mark.parametrize("when", ["reserved", "half filled", "committed"])
def test_a_rank_dies(spawn: Callable[[], Rank], client: Client, daemon: Daemon, when: str) -> None:
    """Nothing is ever half there, nothing stays reserved, and who comes next stores it."""
    tokens = chat(next(names), LENGTH)
    ranks = engine([spawn() for _ in range(4)], "TP4", MHA)
    assert all_do(ranks, "reserve", "r", tokens) == [4] * 4
    victim, others = ranks[1], [ranks[0], *ranks[2:]]
    if when != "reserved":
        victim.do("fill", "r", tokens, 2 if when == "half filled" else 1000)
    if when == "committed":
        assert victim.do("commit", "r")
    with aborted(daemon):
        victim.kill()
    all_do(others, "fill", "r", tokens)
    assert not any(all_do(others, "commit", "r"))
    assert client.attach(MHA).match(tokens) == 0
    ranks[1] = spawn()
    store_by(engine(ranks, "TP4", MHA), tokens)
    assert read_by(ranks, client, MHA, tokens) == LENGTH


def test_a_rank_drops_its_part(processes: list[Rank], client: Client, daemon: Daemon) -> None:
    tokens = chat(next(names), LENGTH)
    ranks = engine(processes, "TP4", MHA)
    assert all_do(ranks, "reserve", "r", tokens) == [4] * 4
    with aborted(daemon):
        ranks[3].do("abort", "r")
    all_do(ranks[:3], "fill", "r", tokens)
    assert not any(all_do(ranks[:3], "commit", "r"))
    store_by(ranks, tokens)
    assert read_by(ranks, client, MHA, tokens) == LENGTH


def test_a_rank_stalls(spawn: Callable[[], Rank], client: Client) -> None:
    """The others are done and wait for nobody; once it goes on, the blocks are there."""
    tokens = chat(next(names), LENGTH)
    ranks = engine([spawn() for _ in range(4)], "TP4", MHA)
    assert all_do(ranks, "reserve", "r", tokens) == [4] * 4
    all_do(ranks, "fill", "r", tokens)
    ranks[2].signal(signal.SIGSTOP)
    started = time.monotonic()
    assert all_do([*ranks[:2], ranks[3]], "commit", "r") == [True] * 3
    assert client.attach(MHA).match(tokens) == 0
    assert time.monotonic() - started < 5.0, "nobody waited for a part that may never come"
    ranks[2].signal(signal.SIGCONT)
    assert ranks[2].do("commit", "r")
    assert read_by(ranks, client, MHA, tokens) == LENGTH


def test_a_rank_repeats_itself(processes: list[Rank], client: Client) -> None:
    """A second part of the same rank is no other's part."""
    tokens = chat(next(names), LENGTH)
    ranks = engine(processes, "TP2", MHA)
    assert ranks[0].do("put", tokens)
    assert ranks[0].do("reserve", "again", tokens) == 0
    assert not ranks[0].do("commit", "again")
    assert client.attach(MHA).match(tokens) == 0
    assert ranks[1].do("put", tokens)
    assert ranks[1].do("reserve", "again", tokens) == 0
    assert read_by(ranks, client, MHA, tokens) == LENGTH


def test_ranks_come_in_any_order_and_shorten_each_other(processes: list[Rank], client: Client) -> None:
    """One has only two of four blocks: that is what all have."""
    tokens = chat(next(names), 64)
    ranks = engine(processes, "TP2 PP2", MHA)
    for number in (2, 0, 3, 1):
        assert ranks[number].do("reserve", "r", tokens) == 4
        ranks[number].do("fill", "r", tokens, 2 if number == 3 else 4)
        assert client.attach(MHA).match(tokens) == 0
        assert ranks[number].do("commit", "r")
    assert read_by(ranks, client, MHA, tokens) == 32
    store_by(ranks, tokens)
    assert read_by(ranks, client, MHA, tokens) == 64


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (((0, 4), (0, 4)), ((0, 4), (2, 6)), "overlap"),
        (((0, 2), (0, 8)), ((1, 4), (0, 8)), "overlap"),
    ],
)
def test_parts_that_cannot_make_a_block_are_refused(
    processes: list[Rank], client: Client, first: Part, second: Part, said: str
) -> None:
    group = f"bad {next(names)}"
    assert not processes[0].do("attach", MHA, group, first)
    assert said in processes[1].do("attach", MHA, group, second)
    assert processes[2].do("attach", GQA, group, ((0, 4), (0, 1))), "another spec in the same group"


# --- one decision


def evict_all(client: Client, tokens: list[int]) -> None:
    """Changes state. Other blocks take every slot that may be taken."""
    cache = client.attach(MHA)
    for number in range(20_000, 20_200):
        store(cache, chat(number, 640))
        if not number % 20 and not cache.match(tokens):
            break


@pytest.mark.parametrize("end", ["released", "killed"])
def test_ranks_read_on_after_the_scheduler(
    processes: list[Rank], spawn: Callable[[], Rank], client: Client, daemon: Daemon, end: str
) -> None:
    """It ends once for all: when the last of them has let go."""
    client.attach(MHA).clear()
    before = daemon.status()["memory"]["cached_nbytes"]
    tokens = chat(next(names), LENGTH)
    store_by(engine(processes, "TP4", MHA), tokens)
    scheduler = engine([spawn()], "TP1", MHA)[0]
    ticket = scheduler.do("acquire", "h", tokens)
    readers = engine(processes, "TP8", MHA)
    assert all_do(readers[:7], "redeem", "h", ticket) == [LENGTH] * 7
    if end == "killed":
        scheduler.kill()
    else:
        scheduler.do("let_go", "h")
    wait_until(lambda: not holds(daemon.status())[0])
    client.attach(MHA).clear()
    evict_all(client, tokens)
    assert client.attach(MHA).match(tokens) == 0
    assert all_do(readers[:7], "look", "h", tokens) == [LENGTH] * 7
    assert readers[7].do("redeem", "h", ticket) in (0, LENGTH), "too late, or just in time"
    assert readers[7].do("look", "h", tokens) in (0, LENGTH)
    all_do(readers, "let_go", "h")
    wait_until(lambda: readers[0].do("read", ticket, tokens) == 0, what="nobody may begin once all have ended")
    client.attach(MHA).clear()
    wait_until(lambda: daemon.status()["memory"]["cached_nbytes"] == before, what="its slots are free again")


def test_a_reader_dies_while_it_reads(processes: list[Rank], spawn: Callable[[], Rank], client: Client) -> None:
    tokens = chat(next(names), LENGTH)
    store_by(engine(processes, "TP2", MHA), tokens)
    reader = engine([spawn()], "TP1", MHA)[0]
    with client.attach(MHA).acquire(tokens, shared=True) as hit:
        ticket = hit.ticket
        assert reader.do("redeem", "h", ticket) == LENGTH
    assert processes[0].do("read", ticket, tokens) == LENGTH, "as long as one reads, another may begin"
    reader.kill()
    wait_until(lambda: processes[0].do("read", ticket, tokens) == 0, what="the kernel let go for the dead")


def test_tickets_that_are_none(processes: list[Rank], client: Client) -> None:
    tokens = chat(next(names), LENGTH)
    ranks = engine(processes, "TP2", MHA)
    store_by(ranks, tokens)
    with client.attach(MHA).acquire(tokens, shared=True) as hit:
        ticket = hit.ticket
        for bad in (b"", b"ticket", ticket[:-1], bytes(len(ticket)), os.urandom(200)):
            assert ranks[0].do("redeem", "bad", bad) == 0
        other = engine(processes[2:], "TP2", GQA)
        assert other[0].do("redeem", "bad", ticket) == 0, "of another spec"
        assert ranks[0].do("read", ticket, tokens) == LENGTH


def test_another_daemon_has_none_of_the_tickets() -> None:
    """RST: what was redeemed is read on while no daemon is there, and under the next one; what was not is a miss."""
    with Daemon() as daemon, ranks_of(daemon.wait_ready(), 4) as ranks:
        tokens = chat(1, LENGTH)
        store_by(engine(ranks, "TP4", MHA), tokens)
        with daemon.connect() as client:
            hit = client.attach(MHA).acquire(tokens, shared=True)
            ticket = hit.ticket
            assert ranks[0].do("redeem", "h", ticket) == LENGTH
            daemon.kill()
            assert ranks[0].do("look", "h", tokens) == LENGTH
            daemon.start()
            wait_until(lambda: ranks[1].do("match", tokens) == LENGTH, what="the slab was taken over")
            assert ranks[1].do("redeem", "h", ticket) == 0
            assert ranks[0].do("look", "h", tokens) == LENGTH
            hit.release()
        ranks[0].do("let_go", "h")
        with daemon.connect() as client:
            with client.attach(MHA).acquire(tokens, shared=True) as hit:
                ticket = hit.ticket
                wait_until(lambda: all_do(ranks, "read_unplanned", ticket, tokens) == [LENGTH] * 4)
            other = chat(2, LENGTH)
            wait_until(lambda: all(all_do(ranks, "put", other)), what="ranks are in their group again")
            assert read_by(ranks, client, MHA, other) == LENGTH


# --- what lies below, and what is damaged


def test_what_comes_from_the_ssd_is_the_same_for_all_ranks(tmp_path: Path) -> None:
    """Rectangles and their sums go down and come up."""
    disk = "--disk.path", str(tmp_path), "--disk.capacity", "64MiB", "--disk.write_budget", "unlimited"
    small = Daemon(*disk, "--memory.keep", "false", capacity="8MiB")
    with small as daemon, ranks_of(daemon.wait_ready(), 4) as ranks:
        tokens = chat(1, 64)  # short blocks are not written
        with daemon.connect() as client:
            wait_until(lambda: is_idle(client))
            store_by(engine(ranks, "TP4", MHA), tokens)
            wait_until(lambda: client.status()["daemon"]["stats"]["blocks_written"] == 4)
        assert daemon.terminate() == 0
        daemon.start()  # with nothing in memory
        with daemon.connect() as client:
            wait_until(lambda: is_idle(client))
            wait_until(lambda: ranks[0].do("match", tokens) == 64)
            readers = engine(ranks, "PP2", MHA)
            assert read_by(readers, client, MHA, tokens) == 64
            assert client.status()["daemon"]["stats"]["blocks_loaded"] == 4
            assert read_by(engine(ranks, "TP2 PP2", MHA), client, MHA, tokens) == 64


@pytest.mark.parametrize("rank_of_damage", [0, 3])
def test_a_damaged_rectangle_is_a_miss_for_whoever_reads_of_it(rank_of_damage: int) -> None:
    """COR: memory.verify. Readers of other rectangles have theirs; nobody has wrong bytes."""
    with Daemon("--memory.verify", "true") as daemon, ranks_of(daemon.wait_ready(), 4) as ranks:
        tokens = chat(1, LENGTH)
        store_by(engine(ranks, "TP4", MHA), tokens)
        part = SHAPES["TP4"](MHA)[rank_of_damage]
        flip_in(daemon.slabs[0], slice_of(MHA, part, tokens, 16, 16)[0, 0, 0].tobytes())
        with daemon.connect() as client:
            cache = client.attach(MHA)
            with cache.acquire(tokens, shared=True) as hit:
                for number in range(4):
                    if number != rank_of_damage:
                        assert ranks[number].do("read_unplanned", hit.ticket, tokens) == LENGTH
                assert ranks[rank_of_damage].do("read_unplanned", hit.ticket, tokens) == 16
            wait_until(lambda: cache.match(tokens) == 16, what="it was discarded")
            store_by(ranks, tokens)
            assert read_by(engine(ranks, "PP2", MHA), client, MHA, tokens) == LENGTH


def flip_in(slab: Path, row: bytes) -> None:
    """Changes state. One bit of the one place where these bytes lie."""
    content = slab.read_bytes()
    assert content.count(row) == 1
    with slab.open("r+b") as file:
        file.seek(content.index(row) + 5)
        file.write(bytes([row[5] ^ 4]))


def test_kv_differs_in_every_rank() -> None:
    """Of the test's own data: no two rectangles are alike, or a mix-up would not be seen."""
    tokens = chat(1, 16)
    for spec in (MHA, GQA):
        for parts in (tp(2, spec), pp(2, spec), tp_pp(2, 2, spec)):
            pieces = [slice_of(spec, part, tokens, 0, 16).tobytes() for part in parts]
            assert len(set(pieces)) == len(pieces)
    assert not np.array_equal(kv_of(MHA, tokens, 0, 16), kv_of(MHA, chat(2, 16), 0, 16))
