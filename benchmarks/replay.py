"""Request traces, and a node's own `Store` that is asked for them: no memory behind it, a clock that the trace moves.

A trace has a JSON object a line, ordered by time: `timestamp` (ms), `input_length` (tokens) and
`hash_ids`, one for each 512 tokens of the prompt, the last one possibly partial. Equal ids are equal prompts up to
there. benchmarks/traces has four, with their sources; a file of one's own may be packed with gzip or zstandard.

Counted is what an engine would find: complete blocks only, one request at a time, the longest prefix that is there;
then all of its blocks are stored. A prompt that is longer than the whole cache is cut to it.
"""

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from msgspec import Struct

import kvstore
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.core.store import Query, Store
from kvstore.core.tier import new_tables
from radix import HASH_NBYTES

FOLDER = Path(__file__).with_name("traces")
NAMES = {
    "conversation": "conversation_trace.jsonl.zst",
    "synthetic": "synthetic_trace.jsonl.zst",
    "agentic_sample": "agentic_sample.jsonl.zst",
    "agentic_full": "agentic_full.jsonl.zst",
}
BLOCK_TOKENS = 512
WINDOW_NBYTES_MAX = 1 << 27  # of zstandard: the traces are packed with --long=27
SPEC = kvstore.KVSpec(model="trace", dtype="uint8", num_layers=1, head_dim=1, block_tokens=BLOCK_TOKENS)


class TraceInvalid(Exception):
    """A file is no trace. Says which, where, and what was expected."""


class _Line(Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int]


class Request(NamedTuple):
    """`ids`: of its complete blocks, u64."""

    now_ms: float
    ids: npt.NDArray[np.uint64]


class Trace(NamedTuple):
    """Requests that have a complete block, in order of time."""

    name: str
    requests: list[Request]

    @property
    def num_unique(self) -> int:
        """Query. Blocks that an infinite cache would hold."""
        return len(np.unique(np.concatenate([request.ids for request in self.requests])))

    @property
    def num_reads(self) -> int:
        """Query. Blocks asked for."""
        return sum(len(request.ids) for request in self.requests)


def read_trace(given: str) -> Trace:
    """Query. A trace by name, or from a file. TraceInvalid."""
    path = FOLDER / NAMES[given] if given in NAMES else Path(given)
    try:
        with _opened(path) as file:
            requests = [each for each in _requests(path, file) if len(each.ids)]
    except (OSError, zstandard.ZstdError, EOFError) as exc:
        names = ", ".join(NAMES)
        raise TraceInvalid(f"trace {given!r}: {exc}. It is {names}, or a .jsonl, .jsonl.gz or .jsonl.zst file") from exc
    if not requests:
        raise TraceInvalid(f"trace {given!r}: no request has a complete block of {BLOCK_TOKENS} tokens")
    return Trace(given, requests)


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(path))
    if path.suffix == ".zst":
        unpacked = zstandard.ZstdDecompressor(max_window_size=WINDOW_NBYTES_MAX).stream_reader(path.open("rb"))
        return io.BufferedReader(unpacked)
    return path.open("rb")


def _requests(path: Path, file: IO[bytes]) -> Iterator[Request]:
    decoder, before_ms = msgspec.json.Decoder(_Line), float("-inf")
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            ids = np.array(line.hash_ids[: line.input_length // BLOCK_TOKENS], np.uint64)
        except (msgspec.MsgspecError, OverflowError, ValueError) as exc:
            raise TraceInvalid(f"trace {path}, line {number}: {exc}") from exc
        if not line.timestamp >= before_ms:
            raise TraceInvalid(f"trace {path}, line {number}: timestamp {line.timestamp} is before the last line's")
        before_ms = line.timestamp
        yield Request(line.timestamp, ids)


class Replay:
    """A node whose memory has room for so many blocks."""

    def __init__(self, capacity: int) -> None:
        """Changes state. `capacity`: blocks, at least one."""
        self.capacity = capacity
        num_extents = -(-capacity // SLOTS_PER_EXTENT_MAX)
        tables = new_tables(num_extents)
        self._id_in = np.zeros(num_extents * SLOTS_PER_EXTENT_MAX, np.uint64)  # by slot; there is no header to read
        self.store = Store(
            extent_nbytes=SPEC.slot_nbytes * SLOTS_PER_EXTENT_MAX,
            tables=tables,
            symbols_of=self._symbols_of,
            session_share=1.0,
            checksums=False,
        )
        for extent in range(num_extents):
            self.store.add_extent(extent)
        self._spec_id = self.store.attach(SPEC).spec_id
        session = self.store.open_session()
        assert session is not None
        self._session = session.id
        surplus = num_extents * SLOTS_PER_EXTENT_MAX - capacity
        assert self.store.memory.reserve(SPEC.slot_nbytes, surplus) is not None, "an empty store has room"
        self._last_id = 0

    def ask(self, request: Request) -> int:
        """Changes state. How many of its blocks are there; then all of them are."""
        store, session, ids = self.store, self._session, request.ids[: self.capacity]
        hashes = _hashes(ids)
        self._last_id += 1
        store.on_time(request.now_ms)
        hit = store.acquire(session, self._spec_id, self._last_id, Query(hashes, b""))
        num_hits = len(hit.slots) // 4
        store.release(session, [self._last_id])
        if num_hits < len(ids):
            grant = store.reserve(session, self._spec_id, self._last_id, hashes, 0)
            slots = np.frombuffer(grant.slots, np.uint32)
            assert len(slots) == len(ids) - num_hits, "what nobody holds can be evicted"
            self._id_in[slots] = ids[num_hits:]
            assert store.commit(session, self._last_id, b"\1" * len(slots)) == len(slots)
        return num_hits

    def _symbols_of(self, slot: int) -> bytes:
        return int(self._id_in[slot]).to_bytes(8, "big")


def _hashes(ids: npt.NDArray[np.uint64]) -> bytes:
    """An id stands for all before it, as a block's hash does."""
    rows = np.zeros((len(ids), HASH_NBYTES // 8), np.uint64)
    rows[:, 0] = ids
    return rows.tobytes()
