"""Replays of traces: the store's LRU against a flat one, and files that are no traces."""

from __future__ import annotations

import gzip
import json
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import zstandard
from rich.console import Console

from benchmarks import hit_rate
from benchmarks.replay import BLOCK_TOKENS, Replay, Request, Trace, TraceInvalid, read_trace


def some_trace(seed: int, num_requests: int = 300) -> Trace:
    """Query. Prompts that begin anew, go on from an earlier one, or leave it midway."""
    rng, prompts, requests, last_id = random.Random(seed), [[1]], [], 1
    for number in range(num_requests):
        old = rng.choice(prompts[-30:]) if rng.random() < 0.8 else []
        kept = old[: rng.randint(0, len(old))]
        new = list(range(last_id + 1, last_id + 1 + rng.randint(0, 6)))
        last_id += len(new)
        if kept + new:
            prompts.append(kept + new)
            requests.append(Request(1000.0 * number, np.array(kept + new, np.uint64)))
    return Trace("some", requests)


def flat_lru(trace: Trace, capacity: int) -> list[int]:
    """Query. Hits of each request, by a cache that knows no chains."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in trace.requests:
        ids = request.ids.tolist()[:capacity]
        hits.append(next((at for at, each in enumerate(ids) if each not in cached), len(ids)))
        for each in reversed(ids):  # the tail first, so that it is evicted first
            cached[each] = None
            cached.move_to_end(each)
            while len(cached) > capacity:
                cached.popitem(last=False)
    return hits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [1, 2, 7, 40, 300, 20_000])
def test_the_stores_lru_is_the_flat_one(seed: int, capacity: int) -> None:
    """Over one extent and over several; a prompt longer than the cache is cut."""
    trace, node = some_trace(seed), Replay(capacity)
    assert [node.ask(request) for request in trace.requests] == flat_lru(trace, capacity)
    node.store.memory.check()


def test_a_trace_by_name_gives_what_others_have_counted() -> None:
    found = hit_rate.measure(read_trace("synthetic"), ["lru"], [0.2], Console(quiet=True))
    assert (found["requests"], found["unique_blocks"]) == (2886, 40148)
    assert [bar.met for bar in hit_rate.bars(found)] == [True]
    found["results"]["lru"]["0.2"] += 0.06
    assert [bar.met for bar in hit_rate.bars(found)] == [False]


LINES = [
    {"timestamp": 0, "input_length": 2 * BLOCK_TOKENS + 1, "output_length": 5, "hash_ids": [1, 2, 3], "session": "a"},
    {"timestamp": 7.5, "input_length": BLOCK_TOKENS - 1, "hash_ids": [9]},
    {"timestamp": 7.5, "input_length": BLOCK_TOKENS, "hash_ids": [1], "more": {}},
]


@pytest.mark.parametrize(
    ("ending", "pack"),
    [("jsonl", bytes), ("jsonl.gz", gzip.compress), ("jsonl.zst", zstandard.ZstdCompressor().compress)],
)
def test_a_file_is_read_whatever_it_is_packed_with(tmp_path: Path, ending: str, pack: object) -> None:
    path = tmp_path / f"own.{ending}"
    assert callable(pack)
    path.write_bytes(pack("\n".join(map(json.dumps, LINES)).encode() + b"\n\n"))
    trace = read_trace(str(path))
    assert [request.ids.tolist() for request in trace.requests] == [[1, 2], [1]], "complete blocks only"
    assert (trace.num_unique, trace.num_reads) == (2, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no request has a complete block"),
        (b"{}", "line 1: .*timestamp"),
        (b"\n[1]", "line 2"),
        (b'{"timestamp": 1, "input_length": 512, "hash_ids": [-1]}', "line 1"),
        (b'{"timestamp": NaN, "input_length": 512, "hash_ids": [1]}', "line 1"),
        (json.dumps(LINES[1]).encode() + b"\n" + json.dumps(LINES[0]).encode(), "line 2: timestamp 0.0 is before"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text)
    with pytest.raises(TraceInvalid, match=said):
        read_trace(str(path))


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "jsonl"])
def test_files_that_cannot_be_read_are_said(tmp_path: Path, ending: str) -> None:
    with pytest.raises(TraceInvalid, match="conversation, synthetic"):
        read_trace(str(tmp_path / f"absent.{ending}"))
    if ending != "jsonl":
        path = tmp_path / f"rubbish.{ending}"
        path.write_bytes(b"rubbish")
        with pytest.raises(TraceInvalid, match="conversation, synthetic"):
            read_trace(str(path))


@pytest.mark.parametrize("option", [["--policy", "lru,best"], ["--capacity", "2"], ["--capacity", "x"]])
def test_options_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch, option: list[str]) -> None:
    monkeypatch.setattr("sys.argv", ["hit_rate", *option])
    with pytest.raises(SystemExit, match="2"):
        hit_rate.main()
