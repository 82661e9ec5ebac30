"""How soon a node serves again after a restart, what its SSD index costs in memory, and how long its loop stands still.

SSD tier: an index of a million blocks is written straight into a folder, twice. Once every block is a run of its own,
as in chats that branch at every block (4 ways), which is the most expensive tree there is; once, with the suffix `_64`,
runs are 64 blocks long. Slots are in random order, as in a tier that has been full for long; those that are read hold
valid blocks, the others are holes. A real daemon is started on each:

    open_s                      from starting the process until the tier is in use, Python's start and a slab included;
                                index_open_s is the part that reads the index, in the daemon's own words
    first_match_ms              first question for a chain that only the SSD has; first_load_ms: until it is in memory
    anon_bytes_per_block        RssAnon of the daemon after it has served, less that of one with an empty SSD tier of
                                the same size that has served the same; anon_bytes_per_block_total: without subtraction
    longest_loop_stall_ms       longest turn of the daemon's loop while one client works: matches that hit, miss and end
                                inside a block, loads, new chains that are written down and evict others, clears of a
                                small spec; longest_call_ms is what that client has waited for one match, cpu_wait_ms
                                how long the loop waited for a processor in the step with the longest turn: on a
                                machine with other work, that is most of it
    opening_stall_ms            longest turn before the tier was in use, when clients are served from memory
    new_size_stall_ms           longest turn when, at last, blocks of another slot size come and need an extent of their
                                own, and new_size_blocks_lost, the others that were forgotten for it

Files that were written just now are in the page cache: a node that was rebooted reads its index (index_mib) first.

RAM tier: a slab filled by a client, SIGKILL, a new start: warm_restart_s is from starting the process until that client
hits again; the blocks that were found are counted, and some are compared byte by byte.
"""

import contextlib
import itertools
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

import kvstore
from benchmarks.daemon import Daemon, terminated_like_interrupted
from benchmarks.report import Bar, at_most, finish, holds, parser
from kvstore.core.layout import (
    HEADER_NBYTES,
    NBYTES_OFFSET,
    Identity,
    Rect,
    header_tail,
    identity_bytes,
    identity_sum,
)
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX, extent_nbytes_for
from kvstore.media.disk import BlockRow, Disk
from kvstore.ranks import whole_of
from radix import HASH_NBYTES, NO_KEYS, HashKind, context_digests, hash_block, keys_digest, root_hash

BLOCKS, BLOCKS_MIN = 1_000_000, 2048
WARM_SHARE = 0.1  # of BLOCKS: what the RAM tier holds
BLOCK_TOKENS = 64
VOCABULARY = 50_000
FAN_OUT = 4
SHARED_TOKENS = 16  # what siblings begin with: conversations part inside a block, not at its edge
SHAPES = {1: 50, 64: 4}  # blocks of a run -> runs that follow each other in a conversation
READABLE_MAX = 16_384  # blocks with bytes on the SSD: twice what memory holds, so that they are loaded again and again
ROWS_PER_COMMIT = 65_536
MEMORY = "64MiB"
MEMORY_SLOTS = 8192
WORK_S, SETTLE_S = 10.0, 3.0
WORK_TIMES_MAX = 3  # of WORK_S: where the drive is slow, evictions come late
NEW_BLOCKS, MORE_BLOCKS, SMALL_BLOCKS = 64, 8, 32
CLEAR_EVERY = 10  # rounds of work
WARM_CHAIN = 250  # blocks
WARM_COMPARED = 8  # chains
DEADLINE_MS = 30_000.0
BARS = {"": (8.0, 400.0, 50.0), "_64": (8.0, 150.0, 50.0)}  # open_s, anon_bytes_per_block_total, longest_loop_stall_ms
SPEC = kvstore.KVSpec(model="restart", dtype="float16", num_layers=1, head_dim=16, block_tokens=BLOCK_TOKENS)
SMALL_SPEC = msgspec.structs.replace(SPEC, model="small")
LARGER_SPEC = msgspec.structs.replace(SPEC, model="larger", head_dim=32)  # of another slot size
ROOT = root_hash(SPEC.fingerprint, HashKind.XXH3)
SLOT_NBYTES = SPEC.slot_nbytes
Tokens = npt.NDArray[np.uint32]


def say(text: str) -> None:
    """Changes state. Progress, for people."""
    print(f"restart: {text}", file=sys.stderr, flush=True)


def capacity_for(num_blocks: int) -> int:
    """Query. Bytes of the fewest whole extents, and of four at least: hardly a slot is left free."""
    extent_nbytes = extent_nbytes_for(num_blocks * SLOT_NBYTES)
    return max(4, -(-num_blocks * SLOT_NBYTES // extent_nbytes)) * extent_nbytes


def payload_of(tokens: bytes, spec: kvstore.KVSpec = SPEC) -> bytes:
    """Query. A block's KV: bytes that depend on its tokens and are cheap to make."""
    return (tokens * -(-spec.block_nbytes // len(tokens)))[: spec.block_nbytes]


def new_tokens(number: int, num_blocks: int) -> Tokens:
    """Query. A prompt that no conversation has."""
    random = np.random.default_rng([1, number])
    return random.integers(VOCABULARY, 2 * VOCABULARY, num_blocks * BLOCK_TOKENS, dtype=np.uint32)


# --- what lies on the SSD


class Chats:
    """Conversations that fork FAN_OUT ways after every run; the first way goes on, the others were given up.

    Blocks are numbered conversation by conversation, level by level, way by way. Last used: the first conversation.
    """

    def __init__(self, num_blocks: int, run: int) -> None:
        self.num_blocks, self.run, self.levels = num_blocks, run, SHAPES[run]
        self.blocks_each = self.levels * FAN_OUT * run
        self.num_whole = num_blocks // self.blocks_each
        self.num_readable = max(1, min(READABLE_MAX, num_blocks // 8) // (self.levels * run))

    def tokens(self, conversation: int) -> Tokens:
        """Query. (levels, FAN_OUT, run, BLOCK_TOKENS)."""
        shape = self.levels, FAN_OUT, self.run, BLOCK_TOKENS
        tokens = np.random.default_rng([0, conversation]).integers(0, VOCABULARY, shape, dtype=np.uint32)
        tokens[:, 1:, 0, :SHARED_TOKENS] = tokens[:, :1, 0, :SHARED_TOKENS]
        return tokens

    def prompt(self, conversation: int, level: int | None = None, way: int = 0) -> Tokens:
        """Query. From the beginning of a conversation to the end of a run; without more, all of its first way."""
        tokens = self.tokens(conversation)
        level = self.levels - 1 if level is None else level
        return np.concatenate((tokens[:level, 0].reshape(-1), tokens[level, way].reshape(-1)))

    def readable_blocks(self) -> list[int]:
        """Query. Numbers of the blocks on the first way of the conversations that are read."""
        numbers = np.arange(self.num_readable * self.blocks_each).reshape(-1, self.levels, FAN_OUT, self.run)
        blocks: list[int] = numbers[:, :, 0].reshape(-1).tolist()
        return blocks

    @cached_property
    def columns(self) -> "Columns":
        """Query. Every block, in order of its number."""
        tokens: list[Tokens] = []
        parents: list[bytes] = []
        hashes: list[bytes] = []
        for conversation in range(-(-self.num_blocks // self.blocks_each)):
            tokens.append(self.tokens(conversation).reshape(-1, BLOCK_TOKENS))
            _add_hashes(tokens[-1].tobytes(), self.levels, self.run, parents, hashes)
        numbers = np.arange(self.levels * self.run).reshape(self.levels, 1, self.run)
        each = np.broadcast_to(numbers, (self.levels, FAN_OUT, self.run)).reshape(-1)
        return Columns(np.concatenate(tokens), b"".join(parents), b"".join(hashes), np.tile(each, len(tokens)))


class Columns(NamedTuple):
    """Blocks, one a row."""

    tokens: Tokens  # (B, BLOCK_TOKENS)
    parents: bytes  # HASH_NBYTES each
    hashes: bytes
    numbers: npt.NDArray[np.int64]  # place in the chain


def _add_hashes(tokens: bytes, levels: int, run: int, parents: list[bytes], hashes: list[bytes]) -> None:
    """Changes state: appends those of one conversation."""
    width, at, fork = 4 * BLOCK_TOKENS, 0, bytes(ROOT)
    for _ in range(levels):
        goes_on = fork
        for way in range(FAN_OUT):
            parent = fork
            for _ in range(run):
                parents.append(parent)
                parent = hash_block(parent, tokens[at : at + width], NO_KEYS, HashKind.XXH3)
                hashes.append(parent)
                at += width
            if way == 0:
                goes_on = parent
        fork = goes_on


def write_index(folder: Path, chats: Chats) -> None:
    """Changes state. A tier that holds all of `chats`, at random places, and the bytes of those that are read."""
    capacity = capacity_for(chats.num_blocks)
    per_extent = extent_nbytes_for(capacity) // SLOT_NBYTES
    block_at = np.random.default_rng(2).permutation(chats.num_blocks)
    place_of = np.empty(chats.num_blocks, np.int64)
    place_of[block_at] = np.arange(chats.num_blocks)
    with contextlib.closing(Disk.open([folder], capacity)) as disk:
        for extent in range(-(-chats.num_blocks // per_extent)):
            disk.set_class(extent, SLOT_NBYTES)
        _write_bytes(disk, chats, lambda block: _slot(int(place_of[block]), per_extent))
        disk.sync()
        for first in range(0, chats.num_blocks, ROWS_PER_COMMIT):
            blocks = block_at[first : first + ROWS_PER_COMMIT].tolist()
            disk.commit([_row(chats, block, _slot(at, per_extent)) for at, block in enumerate(blocks, first)], ())


def _slot(place: int, per_extent: int) -> int:
    extent, index = divmod(place, per_extent)
    return extent * SLOTS_PER_EXTENT_MAX + index


def _row(chats: Chats, block: int, slot: int) -> BlockRow:
    columns, at = chats.columns, slice(block * HASH_NBYTES, (block + 1) * HASH_NBYTES)
    symbols = columns.tokens[block].astype(">u4").tobytes()
    last_used = chats.num_blocks - block // chats.blocks_each
    number = int(columns.numbers[block])
    return BlockRow(slot, columns.hashes[at], columns.parents[at], number, False, last_used, symbols)


def _write_bytes(disk: Disk, chats: Chats, slot_of: Callable[[int], int]) -> None:
    with mmap.mmap(-1, SLOT_NBYTES) as page:
        view = memoryview(page)  # page-aligned, as direct I/O wants it
        contexts: list[int] = []
        for block in chats.readable_blocks():
            row, tokens = _row(chats, block, 0), chats.columns.tokens[block].tobytes()
            if row.number == 0:
                contexts = context_digests(chats.prompt(block // chats.blocks_each).tobytes(), BLOCK_TOKENS)
            view[:] = slot_bytes(row, tokens, contexts[row.number])
            disk.write(slot_of(block), SLOT_NBYTES, view)
        view.release()


def slot_bytes(row: BlockRow, tokens: bytes, context: int) -> bytes:
    """Query. Header and payload of a whole block."""
    payload = payload_of(tokens)
    keys = BLOCK_TOKENS, keys_digest(NO_KEYS)
    identity = identity_bytes(
        Identity(SPEC.fingerprint, row.block_hash, row.parent, row.number, tokens, *keys, context, BLOCK_TOKENS)
    )
    rect = Rect(whole_of(SPEC), xxhash.xxh3_64_intdigest(payload))
    tail = header_tail(len(payload), identity_sum(identity, len(payload)), 1, (rect,))
    header = identity.ljust(NBYTES_OFFSET, b"\0") + tail
    return (header.ljust(HEADER_NBYTES, b"\0") + payload).ljust(SLOT_NBYTES, b"\0")


# --- what a client does


@dataclass
class Work:
    """Rounds of everything that a client may ask for, and how long the daemon's loop stood still meanwhile."""

    client: kvstore.Client
    chats: Chats
    longest_turn_ms: float = 0.0
    cpu_wait_ms: float = 0.0  # in the step that had the longest turn
    longest_call_ms: float = 0.0
    rounds: int = 0
    longest_turn_of: dict[str, float] = field(default_factory=dict)  # step -> ms
    wrong: list[str] = field(default_factory=list)  # answers that were not right

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(3)
        self._cache, self._small = self.client.attach(SPEC), self.client.attach(SMALL_SPEC)
        self._numbers = itertools.count()
        self._pid = self.client.status()["daemon"]["pid"]
        self._cpu_wait_ms = cpu_wait_ms(self._pid)

    def run(self, seconds: float, *, until_evicting: bool = False) -> None:
        """Changes state. Longer, within bounds, where it has to go on until blocks are evicted from the SSD."""
        began_s = time.monotonic()
        is_done = not until_evicting
        self.client.status()  # what was before does not count
        while (spent_s := time.monotonic() - began_s) < seconds or (not is_done and spent_s < WORK_TIMES_MAX * seconds):
            for step in (self._match_known, self._match_partly, self._match_unknown, self._load, self._store):
                step()
                facts = self.note(step.__name__.removeprefix("_"))
                is_done = is_done or facts["disk"]["blocks_evicted"] > 0
            if self.rounds % CLEAR_EVERY == 0:
                self._clear()
                self.note("clear")
            self.rounds += 1

    def note(self, step: str) -> dict[str, Any]:
        """Changes state. What the daemon says, now that `step` is over."""
        facts: dict[str, Any] = self.client.status()["daemon"]
        turn_ms = facts["longest_turn_ms"]
        self.longest_turn_of[step] = max(self.longest_turn_of.get(step, 0.0), turn_ms)
        before_ms, self._cpu_wait_ms = self._cpu_wait_ms, cpu_wait_ms(self._pid)
        if turn_ms > self.longest_turn_ms:
            self.longest_turn_ms, self.cpu_wait_ms = turn_ms, self._cpu_wait_ms - before_ms
        return facts

    def _match(self, tokens: Tokens) -> int:
        began_s = time.perf_counter()
        found = self._cache.match(tokens)
        self.longest_call_ms = max(self.longest_call_ms, 1000 * (time.perf_counter() - began_s))
        return found

    def _match_known(self) -> None:
        self._match(self._some_prompt())

    def _match_partly(self) -> None:
        """A prompt that leaves a known chain in the middle of its last block."""
        tokens, cut = self._some_prompt(), -BLOCK_TOKENS // 2
        tokens[cut:] += VOCABULARY
        found = self._match(tokens)
        if found > len(tokens) + cut:
            self.wrong.append(f"{found} of {len(tokens)} tokens match, though the last {-cut} are unknown")

    def _match_unknown(self) -> None:
        tokens = new_tokens(next(self._numbers), self.chats.levels * self.chats.run) + VOCABULARY  # unlike all others
        if self._match(tokens):
            self.wrong.append("a chain that was never stored matches")

    def _load(self) -> None:
        """From the SSD, unless it is still in memory; then the conversation goes on."""
        tokens = self.chats.prompt(int(self._random.integers(self.chats.num_readable)))
        with self._cache.acquire(tokens) as hit:
            found = hit.wait()
            for block in itertools.islice(hit.blocks(), 0, None, 16):
                self._compare(block, tokens)
        if found == len(tokens):
            put(self._cache, np.concatenate((tokens, new_tokens(next(self._numbers), MORE_BLOCKS))), found)

    def _compare(self, block: Any, tokens: Tokens) -> None:
        expected = payload_of(tokens[block.start : block.start + BLOCK_TOKENS].tobytes())
        if block.num_tokens == BLOCK_TOKENS and block.array.tobytes() != expected:
            self.wrong.append(f"the block at token {block.start} does not hold what was stored")

    def _store(self) -> None:
        put(self._cache, new_tokens(next(self._numbers), NEW_BLOCKS))

    def _clear(self) -> None:
        put(self._small, new_tokens(0, SMALL_BLOCKS))
        self._small.clear()

    def figures(self) -> dict[str, Any]:
        """Changes state. What it has seen, and what the daemon has done for it."""
        facts = self.note("afterwards")
        return {
            "longest_loop_stall_ms": self.longest_turn_ms,
            "cpu_wait_ms": self.cpu_wait_ms,
            "longest_turn_of": self.longest_turn_of,
            "longest_call_ms": self.longest_call_ms,
            "rounds": self.rounds,
            "wrong_answers": self.wrong[:8],
            "blocks_evicted": facts["disk"]["blocks_evicted"],
            **{name: facts["stats"][name] for name in ("blocks_loaded", "blocks_written", "writes_dropped")},
        }

    def _some_prompt(self) -> Tokens:
        chats, random = self.chats, self._random
        return chats.prompt(
            int(random.integers(chats.num_whole)), int(random.integers(chats.levels)), int(random.integers(FAN_OUT))
        )


def put(cache: kvstore.Cache, tokens: Tokens, start: int = 0) -> bool:
    """Changes state. Store what is missing of a prompt, from token `start` on at the earliest."""
    with cache.reserve(tokens, start) as reservation:
        for block in reservation.blocks():
            payload = payload_of(tokens[block.start : block.start + BLOCK_TOKENS].tobytes(), cache.spec)
            block.write(np.frombuffer(payload, cache.spec.numpy_dtype).reshape(cache.spec.array_shape(BLOCK_TOKENS)))
        return reservation.commit()


# --- what is measured


def anon_nbytes(pid: int) -> int:
    """Query. Memory of a process that is neither shared nor a file's."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("this kernel tells no RssAnon")


def cpu_wait_ms(pid: int) -> float:
    """Query. How long the main thread of a process has been ready to run while others had the processors; ever."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e6


def index_open_s(daemon: Daemon) -> float | None:
    """Query. What the daemon says of reading its index."""
    log = Path(daemon.address.removeprefix("ipc://")).with_name("log").read_text(encoding="utf-8")
    found = [line.rpartition("seconds=")[2] for line in log.splitlines() if "ssd: " in line and "seconds=" in line]
    return float(found[-1]) if found else None


def wait_for_tier(client: kvstore.Client) -> float:
    """Changes state. Returns once the SSD tier is in use; the longest turn of the loop meanwhile, in ms."""
    longest_ms = 0.0
    while True:
        facts: dict[str, Any] = client.status()["daemon"]
        longest_ms = max(longest_ms, float(facts["longest_turn_ms"]))
        if facts["disk"]["ready"]:
            return longest_ms
        time.sleep(0.02)


@contextlib.contextmanager
def daemon_on(folder: Path, num_blocks: int) -> Iterator[tuple[Daemon, kvstore.Client, dict[str, Any]]]:
    """Changes state. A daemon whose SSD tier is in use, a client of it, and what starting it took."""
    daemon = Daemon(MEMORY, "--disk.path", str(folder), "--disk.capacity", str(capacity_for(num_blocks)))
    began_s = time.monotonic()
    with daemon, kvstore.connect(daemon.address, deadline_ms=DEADLINE_MS) as client:
        stall_ms = wait_for_tier(client)
        yield daemon, client, {"open_s": time.monotonic() - began_s, "opening_stall_ms": stall_ms}


def measure_empty(folder: Path, num_blocks: int, work_s: float) -> int:
    """Changes state. RssAnon of a daemon whose SSD tier began empty, after it has served."""
    chats = Chats(num_blocks, 64)
    with daemon_on(folder, num_blocks) as (daemon, client, _):
        Work(client, chats).run(work_s)
        return anon_nbytes(daemon.pid)


def measure_index(folder: Path, chats: Chats, empty_nbytes: int, work_s: float) -> dict[str, Any]:
    """Changes state. One index, from its start to the end of the work on it."""
    num_blocks = chats.num_blocks
    with daemon_on(folder, num_blocks) as (daemon, client, found):
        say(f"  open after {found['open_s']:.1f} s")
        found |= measure_first(client, chats)
        found |= {"index_open_s": index_open_s(daemon), "blocks_found": client.status()["daemon"]["disk"]["blocks"]}
        work = Work(client, chats)
        work.run(work_s, until_evicting=True)
        time.sleep(min(work_s, SETTLE_S))
        served_nbytes = anon_nbytes(daemon.pid)
        found["anon_bytes_per_block"] = (served_nbytes - empty_nbytes) / num_blocks
        found["anon_bytes_per_block_total"] = served_nbytes / num_blocks
        return found | work.figures() | measure_new_size(client)


def measure_new_size(client: kvstore.Client) -> dict[str, Any]:
    """Changes state. Blocks of a slot size that is new to the daemon come to a tier that is full."""
    cache, blocks_before = client.attach(LARGER_SPEC), client.status()["daemon"]["disk"]["blocks"]
    longest_ms, stored, until_s = 0.0, False, time.monotonic() + SETTLE_S
    while time.monotonic() < until_s:
        stored = stored or put(cache, new_tokens(0, SMALL_BLOCKS))
        facts = client.status()["daemon"]
        longest_ms = max(longest_ms, facts["longest_turn_ms"])
        time.sleep(0.05)
    lost = max(0, blocks_before - facts["disk"]["blocks"])
    return {"new_size_stored": stored, "new_size_stall_ms": longest_ms, "new_size_blocks_lost": lost}


def measure_first(client: kvstore.Client, chats: Chats) -> dict[str, Any]:
    """Changes state. The first question for a chain that only the SSD has, and the first load of it."""
    cache, tokens = client.attach(SPEC), chats.prompt(0)
    began_s = time.perf_counter()
    found = cache.match(tokens)
    matched_s = time.perf_counter()
    with cache.acquire(tokens) as hit:
        loaded = hit.wait(DEADLINE_MS)
    ended_s = time.perf_counter()
    if not found == loaded == len(tokens):
        raise AssertionError(f"{found} tokens match and {loaded} are loaded of {len(tokens)} that are on the SSD")
    return {"first_match_ms": 1000 * (matched_s - began_s), "first_load_ms": 1000 * (ended_s - matched_s)}


def measure_warm(num_blocks: int) -> dict[str, Any]:
    """Changes state. A slab survives its daemon's death, and a client with it."""
    daemon = Daemon(str(capacity_for(num_blocks)))
    with daemon, kvstore.connect(daemon.address) as client:  # the usual deadline: what it waits for a dead one counts
        cache = client.attach(SPEC)
        sizes = [min(WARM_CHAIN, num_blocks - first) for first in range(0, num_blocks, WARM_CHAIN)]
        _wait_for_memory(client)
        stored = sum(size for number, size in enumerate(sizes) if put(cache, new_tokens(number, size)))
        client.status()  # the answer to a commit is sent before it is done: with this one, the last is done too
        daemon.kill()
        began_s = time.monotonic()
        daemon.start()
        chains = list(enumerate(sizes))[:: max(1, len(sizes) // WARM_COMPARED)]
        _wait_for_hit(cache, new_tokens(*chains[-1]))
        took_s = time.monotonic() - began_s
        found = client.status()["daemon"]["memory"]["blocks_taken_over"]
        right = all(_is_there(cache, new_tokens(*chain)) for chain in chains)
    return {"warm_restart_s": took_s, "warm_blocks": found, "warm_stored": stored, "warm_bytes_right": right}


def _wait_for_memory(client: kvstore.Client) -> None:
    """All of the slab is there: until then, there may be no room."""
    while (memory := client.status()["daemon"]["memory"])["extents_ready"] < memory["extents"]:
        time.sleep(0.05)


def _wait_for_hit(cache: kvstore.Cache, tokens: Tokens) -> None:
    give_up_s = time.monotonic() + DEADLINE_MS / 1000
    while cache.match(tokens) < len(tokens):
        if time.monotonic() > give_up_s:
            raise AssertionError("what was stored before the daemon died is not found again")
        time.sleep(0.005)


def _is_there(cache: kvstore.Cache, tokens: Tokens) -> bool:
    with cache.acquire(tokens) as hit:
        found = b"".join([block.array.tobytes() for block in hit.blocks()])
    rows = tokens.reshape(-1, BLOCK_TOKENS)
    return found == b"".join([payload_of(row.tobytes()) for row in rows])


def measure(num_blocks: int, work_s: float, base: Path) -> dict[str, Any]:
    """Changes state: makes a folder in `base` for as long as it takes, and runs four daemons in turn."""
    results: dict[str, Any] = {"blocks": num_blocks, "load_average": os.getloadavg()[0]}
    with _folder_in(base) as folder:
        say("a daemon with an empty SSD tier")
        empty_nbytes = measure_empty(folder / "empty", num_blocks, min(work_s, SETTLE_S))
        results["anon_mib_empty"] = empty_nbytes / 2**20
        shutil.rmtree(folder / "empty")
        for run in SHAPES:
            suffix = f"_{run}" if run > 1 else ""
            say(f"an index of {num_blocks} blocks in runs of {run}")
            chats, place = Chats(num_blocks, run), folder / f"runs{run}"
            write_index(place, chats)
            del chats.columns  # half a gigabyte
            index_mib = (place / "index" / "data.mdb").stat().st_size / 2**20
            figures = {"index_mib": index_mib, **measure_index(place, chats, empty_nbytes, work_s)}
            results |= {f"{name}{suffix}": value for name, value in figures.items()}
            shutil.rmtree(place)
    say("a slab in memory whose daemon is killed")
    return results | measure_warm(max(1, int(num_blocks * WARM_SHARE)))


@contextlib.contextmanager
def _folder_in(base: Path) -> Iterator[Path]:
    """Gone afterwards, and `base` with it if it is empty then."""
    base.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="restart-", dir=base) as folder:
            yield Path(folder)
    finally:
        with contextlib.suppress(OSError):
            base.rmdir()


def bars(results: dict[str, Any]) -> list[Bar]:
    """Query. The bar on memory counts all of the daemon's, not only what its index adds."""
    found = []
    for suffix, (open_s, anon, stall_ms) in BARS.items():
        limits = {"open_s": open_s, "anon_bytes_per_block_total": anon, "longest_loop_stall_ms": stall_ms}
        found += [at_most(f"{name}{suffix}", results[f"{name}{suffix}"], limit) for name, limit in limits.items()]
        found.append(holds(f"all_blocks_found{suffix}", results[f"blocks_found{suffix}"] == results["blocks"]))
        found.append(holds(f"blocks_were_evicted{suffix}", results[f"blocks_evicted{suffix}"] > 0))
        found.append(holds(f"no_wrong_answer{suffix}", not results[f"wrong_answers{suffix}"]))
    found.append(holds("all_warm_blocks_found", results["warm_blocks"] == results["warm_stored"]))
    found.append(holds("warm_bytes_right", results["warm_bytes_right"]))
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--blocks", type=int, default=BLOCKS, help=f"on the SSD, {BLOCKS_MIN} or more (%(default)s)")
    options.add_argument("--seconds", type=float, default=WORK_S, help="of work on each index (%(default)s)")
    options.add_argument("--folder", type=Path, default=Path(".bench"), help="on the SSD to use (%(default)s)")
    given = options.parse_args()
    if given.blocks < BLOCKS_MIN:
        options.error(f"--blocks: {BLOCKS_MIN} or more")
    with terminated_like_interrupted():
        results = measure(given.blocks, given.seconds, given.folder)
    return finish("restart", results, bars(results), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
