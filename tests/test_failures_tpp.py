"""Ranks that disagree: failures that users of such systems reported, each replayed in miniature.

docs/failures.md says which report each test stands for. A rank here is a session of its own with a real daemon.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import permutations

import numpy as np
import pytest

from kvstore import Cache, Client, Hit, RankGroup, Reservation
from kvstore.core.layout import Header
from kvstore.service.reservation import WritableBlock
from tests.daemons import SPEC, Daemon, assert_balanced, chat, embedded, holds, kv_of, read, wait_until
from tests.models import page_of
from tests.sources import ROOT

Part = tuple[tuple[int, int], tuple[int, int]]  # layers, heads
BOTH = (0, 2)
TP2: list[Part] = [(BOTH, (0, 1)), (BOTH, (1, 2))]
PP2: list[Part] = [((0, 1), BOTH), ((1, 2), BOTH)]
TP2_PP2: list[Part] = [(layers, heads) for layers in ((0, 1), (1, 2)) for heads in ((0, 1), (1, 2))]


def rank_of(client: Client, name: str, part: Part) -> Cache:
    layers, heads = part
    return client.attach(SPEC, group=RankGroup(group_id=name, layers=layers, heads=heads))


def part_of(rank: Cache, tokens: list[int], start: int, count: int) -> np.ndarray:
    assert rank.group is not None
    (first_layer, end_layer), (first_head, end_head) = rank.group.layers, rank.group.heads
    return kv_of(SPEC, tokens, start, count)[first_layer:end_layer, :, first_head:end_head]


def fill(rank: Cache, reservation: Reservation, tokens: list[int], blocks: int = 1000) -> None:
    for block in list(reservation.blocks())[:blocks]:
        block.write(part_of(rank, tokens, block.start, block.num_tokens))


def store_part(rank: Cache, tokens: list[int]) -> bool:
    with rank.reserve(tokens) as reservation:
        fill(rank, reservation, tokens)
        return reservation.commit()


def look(rank: Cache, hit: Hit, tokens: list[int]) -> int:
    """Query. Tokens of a rank's hit, every byte of its part compared."""
    at = 0
    for block in hit.blocks():
        assert np.array_equal(block.array, part_of(rank, tokens, block.start, block.num_tokens))
        at = block.start + block.num_tokens
    assert at == hit.verified_tokens
    return at


@pytest.fixture
def connect(daemon: Daemon) -> Iterator[Callable[[], Client]]:
    with ExitStack() as held:
        yield lambda: held.enter_context(daemon.connect())


def test_a_part_that_is_missing_shortens_the_hit_for_all_ranks_alike(connect: Callable[[], Client]) -> None:
    """TPP: of four ranks one stores only three of four blocks. What all have is hit, by every rank the same."""
    tokens = chat(1)
    ranks = [rank_of(connect(), "short", part) for part in TP2_PP2]
    reservations = [rank.reserve(tokens) for rank in ranks]
    for number, (rank, reservation) in enumerate(zip(ranks, reservations, strict=True)):
        assert reservation.num_blocks == 4
        fill(rank, reservation, tokens, 3 if number == 2 else 4)
        assert rank.match(tokens) == 0, "nothing is half there"
        assert reservation.commit()
    with connect().attach(SPEC).acquire(tokens, shared=True) as hit:
        hits = [rank.redeem(hit.ticket) for rank in ranks]
        assert [each.num_tokens for each in hits] == [48] * 4
        assert [look(rank, each, tokens) for rank, each in zip(ranks, hits, strict=True)] == [48] * 4
        for each in hits:
            each.release()


def test_the_common_prefix_is_what_counts_whatever_part_is_lost(connect: Callable[[], Client]) -> None:
    """TPP: one rank drops its part after the others have stored theirs: none of them hits anything, nor waits."""
    for lost in range(4):
        tokens = chat(10 + lost)
        ranks = [rank_of(connect(), f"lost {lost}", part) for part in TP2_PP2]
        reservations = [rank.reserve(tokens) for rank in ranks]
        reservations[lost].abort()
        assert ranks[lost].match(tokens) == 0  # by now the daemon has heard of it
        for rank, reservation in zip(ranks, reservations, strict=True):
            fill(rank, reservation, tokens, 0 if rank is ranks[lost] else 4)
            assert not reservation.commit()
        assert [rank.match(tokens) for rank in ranks] == [0] * 4
        assert all(store_part(rank, tokens) for rank in ranks), "and then they store it"
        assert [rank.match(tokens) for rank in ranks] == [64] * 4


def test_what_tensor_and_pipeline_ranks_store_is_all_retrieved(connect: Callable[[], Client]) -> None:
    """TPP: two stages of two ranks; every one of 9 prompts is there for each, and for an engine in one piece."""
    ranks = [rank_of(connect(), "tp2 pp2", part) for part in TP2_PP2]
    scheduler = connect().attach(SPEC)
    for number in range(20, 29):
        tokens = chat(number)
        assert all(store_part(rank, tokens) for rank in ranks)
        with scheduler.acquire(tokens, shared=True) as hit:
            hits = [rank.redeem(hit.ticket) for rank in ranks]
            assert [look(rank, each, tokens) for rank, each in zip(ranks, hits, strict=True)] == [64] * 4
            del hits
        assert read(scheduler, tokens) == 64


def test_a_stage_that_comes_last_makes_it_whole(connect: Callable[[], Client]) -> None:
    """TPP: whatever the order of the stages, blocks are there once the last has stored its layers, and not before."""
    for number, order in enumerate(permutations(range(2))):
        tokens = chat(30 + number)
        stages = [rank_of(connect(), f"order {number}", part) for part in PP2]
        assert store_part(stages[order[0]], tokens)
        assert [stage.match(tokens) for stage in stages] == [0, 0]
        assert store_part(stages[order[1]], tokens)
        assert [stage.match(tokens) for stage in stages] == [64, 64]


SENDER = """
import sys
from kvstore import RankGroup, connect
from tests.daemons import SPEC, chat
from tests.test_failures_tpp import TP2, rank_of, store_part
address, rank, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with connect(address, 2000) as client:
    cache = rank_of(client, "senders", TP2[rank])
    print("there", flush=True)
    sys.stdin.readline()
    assert store_part(cache, chat(number))
    print("stored", flush=True)
    sys.stdin.readline()
"""


def test_two_sending_ranks_serve_one_receiver_whatever_their_environments(daemon: Daemon) -> None:
    """TPP, HSH: each rank is a process with an environment of its own; they name blocks alike, and one reads them."""
    environments = ({"PYTHONHASHSEED": "0", "LC_ALL": "C"}, {"PYTHONHASHSEED": "4711", "TZ": "Asia/Tokyo"})
    with ExitStack() as held:
        senders = [
            held.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", textwrap.dedent(SENDER), daemon.address, str(rank), "40"],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | environment,
                )
            )
            for rank, environment in enumerate(environments)
        ]
        for answer in ("there", "stored"):
            for sender in senders:
                assert sender.stdout is not None
                assert sender.stdout.readline().strip() == answer
                if answer == "there":
                    print(file=sender.stdin, flush=True)
        receiver = held.enter_context(daemon.connect()).attach(SPEC)
        assert read(receiver, chat(40)) == 64
        for sender in senders:
            print(file=sender.stdin, flush=True)


def test_ranks_may_call_unequally_often(connect: Callable[[], Client]) -> None:
    """TPP: no call of one rank waits for a call of another: one that leaves its loop early stops nobody."""
    ranks = [rank_of(connect(), "unequal", part) for part in TP2]
    calls: Counter[int] = Counter()
    for number in range(8):
        for index, rank in enumerate(ranks):
            if index == 1 and number in (2, 5):
                continue  # it breaks out of its loop
            began = time.monotonic()
            store_part(rank, chat(50 + number))
            assert time.monotonic() - began < 1.0
            calls[index] += 1
    assert calls == {0: 8, 1: 6}
    scheduler = connect().attach(SPEC)
    assert [scheduler.match(chat(50 + number)) for number in range(8)] == [64, 64, 0, 64, 64, 0, 64, 64]


def test_a_decision_has_one_size_and_one_length_for_ranks_of_all_shapes(connect: Callable[[], Client]) -> None:
    """TPP: what the scheduler hands on is the same bytes for each rank, and says how many tokens: no masks to merge."""
    tokens = chat(60)
    with connect().attach(SPEC).reserve(tokens) as reservation:
        for block in reservation.blocks():
            block.write(kv_of(SPEC, tokens, block.start, block.num_tokens))
        assert reservation.commit()
    asked = [*tokens[:40], *chat(61)]
    with connect().attach(SPEC).acquire(asked, shared=True) as hit:
        assert hit.num_tokens == 40
        ticket = hit.ticket
        assert hit.wait() == 40
        assert hit.ticket == ticket
        for shape in (TP2, PP2, TP2_PP2):
            ranks = [rank_of(connect(), f"shape of {len(shape)} {shape[0]}", part) for part in shape]
            hits = [rank.redeem(ticket) for rank in ranks]
            assert {each.num_tokens for each in hits} == {40}
            assert {look(rank, each, asked) for rank, each in zip(ranks, hits, strict=True)} == {40}
            del hits


def test_two_writers_and_two_readers_come_to_an_end_in_any_order(connect: Callable[[], Client]) -> None:
    """HNG, TPP: two ranks that store and two of another shape that read, each on a thread, start in every order."""
    writers = [rank_of(connect(), "writers", part) for part in TP2]
    readers = [rank_of(connect(), "readers", part) for part in PP2]
    scheduler = connect().attach(SPEC)
    for number, order in enumerate(permutations(range(4))):
        tokens, found = chat(100 + number), []

        def write(rank: Cache, tokens: list[int] = tokens) -> None:
            store_part(rank, tokens)

        def fetch(rank: Cache, tokens: list[int] = tokens, found: list[int] = found) -> None:
            with scheduler.acquire(tokens, shared=True) as hit, rank.redeem(hit.ticket) as own:
                found.append(look(rank, own, tokens))

        acts = [(write, writers[0]), (write, writers[1]), (fetch, readers[0]), (fetch, readers[1])]
        threads = [threading.Thread(target=acts[index][0], args=(acts[index][1],)) for index in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), "a request did not end"
        assert set(found) <= {0, 64}
        assert read(scheduler, tokens) == 64


def test_no_stage_keeps_anything_back_after_thousands_of_requests() -> None:
    """LEK, TPP: whatever a stage does with a request, the store keeps nothing for it, on no stage."""
    with embedded("16MiB") as client:
        stages = [rank_of(client, "stages", part) for part in PP2]
        rng = random.Random(1)
        for number in range(2000):
            tokens = chat(number % 50, 32)
            reservations = [stage.reserve(tokens) for stage in stages]
            for stage, reservation in zip(stages, reservations, strict=True):
                fill(stage, reservation, tokens, rng.choice((0, 1, 2, 2, 2)))
                (reservation.commit if rng.random() < 0.8 else reservation.abort)()
            if rng.random() < 0.2:
                stages[0].clear()
        wait_until(lambda: holds(client.status()["daemon"]) == (0, 0, 0))
        facts = client.status()["daemon"]
        assert_balanced(facts)
        stats = facts["stats"]
        assert stats["reservations"] == stats["reservations_committed"] + stats["reservations_aborted"]
        assert stats["reservations_committed"] > 200
        assert stats["reservations_aborted"] > 200


def test_no_rank_waits_for_anothers_copies(connect: Callable[[], Client]) -> None:
    """PRF, TPP: a rank in the midst of its copy holds nobody up: each copies in its own process."""
    ranks = [rank_of(connect(), "slow", part) for part in TP2_PP2]
    prompts = [chat(200 + number) for number in range(4)]
    with ranks[0].reserve(prompts[0]) as slow:  # and it does not go on
        block = next(slow.blocks())
        array = block.array
        for tokens in prompts:
            began = time.monotonic()
            assert all(store_part(rank, tokens) for rank in ranks[1:])
            assert time.monotonic() - began < 1.0
        array[...] = part_of(ranks[0], prompts[0], 0, 16)
        fill(ranks[0], slow, prompts[0])
        del array
        assert slow.commit()
    assert ranks[1].match(prompts[0]) == 64
    assert all(store_part(ranks[0], tokens) for tokens in prompts[1:])
    assert [ranks[1].match(tokens) for tokens in prompts] == [64] * 4


def test_a_header_whose_payload_is_no_whole_rows_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """HNG, COR: a rank's word, which the daemon's own sums of the parts must not trust."""
    tokens = chat(90, 16)

    def forge(reservation: Reservation, blocks: list[WritableBlock]) -> None:
        header = Header(reservation.prompt.identity(0), 1, reservation._generation, ())
        reservation.hold.session.slab.write(blocks[0].offset, page_of(header))

    with embedded() as client:
        ranks = [rank_of(client, "forged", part) for part in TP2]
        monkeypatch.setattr(Reservation, "_write_headers", forge)
        for rank in ranks:
            with rank.reserve(tokens) as reservation:
                for block in reservation.blocks():
                    block.array[...] = part_of(rank, tokens, block.start, block.num_tokens)  # without a sum
                assert reservation.commit()
        monkeypatch.undo()
        wait_until(lambda: client.status()["daemon"]["memory"]["reserved_nbytes"] == 0)
        other = chat(91)
        assert all(store_part(rank, other) for rank in ranks), "it goes on"
        assert read(client.attach(SPEC), other) == 64
