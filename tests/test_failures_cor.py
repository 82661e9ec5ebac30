"""Wrong bytes under the right key: failures that users of such systems reported, each replayed in miniature.

docs/failures.md says which report each test stands for. KV is a pattern, so that bytes of another block show.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from connectors.reference import ReferenceConnector
from kvstore import Cache, Client, KVSpec
from kvstore.core.layout import HEADER_NBYTES, parse_header
from kvstore.media.disk import Disk
from kvstore.service import daemon as daemon_module
from tests.daemons import (
    SPEC,
    assert_balanced,
    chat,
    embedded,
    holds,
    kv_of,
    read,
    store,
    wait_until,
)
from tests.test_disk import run_child
from tests.test_ssd_edges import SPEC as DISK_SPEC
from tests.test_ssd_edges import config_of, daemon_of, get, opened, put, tokens_of
from tests.test_ssd_edges import kv_of as disk_kv_of
from transports import messages as wire

# --- the SSD


FILE_LIMIT = """
import resource, sys
from pathlib import Path
from kvstore import KVSpec
from tests.daemons import chat, read, store, wait_until
from tests.test_ssd_edges import config_of, daemon_of, opened

spec = KVSpec(model="large", dtype="float32", num_layers=4, num_kv_heads=8, head_dim=128, block_tokens=128)
assert spec.block_nbytes == 4 << 20
tokens, config = chat(1, 256), config_of(Path(sys.argv[1]), memory="64MiB", capacity="64MiB")

def life(limit_nbytes, stores):
    with opened(config) as (client, _):
        cache = client.attach(spec)
        found = read(cache, tokens)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_nbytes, resource.RLIM_INFINITY))
        if stores:
            assert store(cache, tokens)
            wait_until(lambda: daemon_of(client)["disk"]["idle"])
        disk = daemon_of(client)["disk"]
        print(found, read(cache, tokens), disk["blocks"], bool(disk["failures"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

life(1 << 20, True)
life(resource.RLIM_INFINITY, True)
life(resource.RLIM_INFINITY, False)
"""


def test_a_block_that_a_file_size_limit_cut_off_is_a_miss_until_it_is_stored_again(tmp_path: Path) -> None:
    """COR: 4 MiB blocks, RLIMIT_FSIZE of 1 MiB. Printed: found at start, found at the end, blocks below, any fault."""
    assert run_child(FILE_LIMIT, tmp_path).splitlines() == [
        "0 256 0 True",  # memory goes on, nothing lies on the SSD
        "0 256 2 False",  # a miss after the restart; stored again
        "256 256 2 False",
    ]


class Patchy(Disk):
    """A medium whose reads of some blocks of a chain fail, halt halfway, or take their time."""

    fails: ClassVar[set[int]] = set()
    numbers: ClassVar[dict[int, int]] = {}  # of the chain, by slot
    gate: ClassVar[threading.Event | None] = None

    def write(self, slot: int, slot_nbytes: int, data: memoryview) -> None:
        header = parse_header(bytes(data[:HEADER_NBYTES]))
        assert header is not None
        self.numbers[slot] = header.identity.number
        super().write(slot, slot_nbytes, data)

    def read(self, slot: int, slot_nbytes: int, into: memoryview) -> None:
        if self.numbers[slot] in self.fails:
            raise kvstore.TierUnavailable("disk.path=here: Input/output error (EIO)")
        super().read(slot, slot_nbytes, into)
        if self.gate is not None:
            late = bytes(into[slot_nbytes // 2 :])
            into[slot_nbytes // 2 :] = bytes(len(late))
            assert self.gate.wait(20)
            into[slot_nbytes // 2 :] = late


@pytest.fixture
def patchy(monkeypatch: pytest.MonkeyPatch) -> type[Patchy]:
    monkeypatch.setattr(daemon_module, "Disk", Patchy)
    for name, value in (("fails", set()), ("numbers", {}), ("gate", None)):
        monkeypatch.setattr(Patchy, name, value)
    return Patchy


def only_on_ssd(folder: Path, number: int) -> None:
    """Changes state. A store's life: afterwards the chain lies on the SSD, and memory is gone."""
    with opened(config_of(folder)) as (client, cache):
        assert put(cache, number)
        wait_until(lambda: daemon_of(client)["disk"]["blocks"] == 4)


class MarkedPages:
    """An engine's pages, full of a number that no KV has."""

    def __init__(self, num_tokens: int) -> None:
        self.kv = np.full(DISK_SPEC.array_shape(num_tokens), 0xABCD, np.uint16)

    def read(self, start: int, num_tokens: int) -> npt.NDArray[Any]:
        return self.kv[:, :, :, start : start + num_tokens]

    def write(self, start: int, kv: npt.NDArray[Any]) -> None:
        self.kv[:, :, :, start : start + kv.shape[3]] = kv.view(np.uint16)


@pytest.mark.parametrize("bad", range(4))
def test_a_load_that_fails_after_the_promise_counts_no_token_from_there_on(
    tmp_path: Path, patchy: type[Patchy], bad: int
) -> None:
    """COR: the hit said 64 tokens; the engine is told how many it has, and no page beyond them was touched."""
    only_on_ssd(tmp_path, 7)
    with opened(config_of(tmp_path)) as (client, cache):
        patchy.fails.add(bad)
        with cache.acquire(tokens_of(7)) as hit:
            assert hit.num_tokens == 64
            assert hit.wait() == hit.verified_tokens == 16 * bad
        pages = MarkedPages(65)
        connector = ReferenceConnector(client, DISK_SPEC)
        assert connector.load([*tokens_of(7), 5], pages) == 16 * bad
        for start in range(0, 16 * bad, 16):
            assert np.array_equal(pages.read(start, 16), disk_kv_of(7, start).view(np.uint16))
        assert (pages.read(16 * bad, 65) == 0xABCD).all()
        patchy.fails.clear()
        assert put(cache, 7)
        assert get(cache, 7) == 64, "healed"


def test_nothing_counts_before_its_last_byte_is_there(tmp_path: Path, patchy: type[Patchy]) -> None:
    """COR: whoever polls while the second half of each block is still on its way sees no block at all."""
    only_on_ssd(tmp_path, 7)
    patchy.gate = threading.Event()
    with opened(config_of(tmp_path)) as (_, cache):
        hits = [cache.acquire(tokens_of(7)) for _ in range(3)]
        assert [hit.num_tokens for hit in hits] == [64] * 3
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            assert not hits[0].ready()
        assert hits[1].wait(10.0) == 0, "nothing had come by its deadline"
        patchy.gate.set()
        for hit in (hits[0], hits[2]):
            assert hit.wait() == 64
            for block in hit.blocks():
                assert np.array_equal(block.array.view(np.uint16), disk_kv_of(7, block.start).view(np.uint16))
        for hit in hits:
            hit.release()


# --- memory


def test_a_block_that_is_half_written_is_nobodys_hit(client: Client, cache: Cache) -> None:
    """COR: presence is said after the bytes, never before."""
    other = client.attach(SPEC)
    with cache.reserve(chat(1, 32)) as reservation:
        first, second = reservation.blocks()
        for step, half in enumerate((first, second)):
            half.array[0] = kv_of(SPEC, chat(1, 32), 16 * step, 16)[0]
            assert other.match(chat(1, 32)) == read(other, chat(1, 32)) == 0
            half.array[1] = kv_of(SPEC, chat(1, 32), 16 * step, 16)[1]
        assert other.match(chat(1, 32)) == 0
        assert reservation.commit()
    assert read(other, chat(1, 32)) == 32


def test_a_slow_reader_sees_its_own_block_while_others_are_evicted(client: Client, cache: Cache) -> None:
    """COR: it copies a piece every millisecond, and all else in the slab is replaced meanwhile, more than once."""
    tokens, copies = chat(0, 16), []
    assert store(cache, tokens)
    expected, garbage = kv_of(SPEC, tokens, 0, 16).tobytes(), np.full(SPEC.array_shape(16), -1.0, np.float32)

    def copy_slowly() -> None:
        with cache.acquire(tokens) as hit:
            source = memoryview(next(hit.blocks()).array).cast("B")
            leased.set()
            copy = bytearray()
            for at in range(0, len(source), 32):
                copy += source[at : at + 32]
                time.sleep(0.001)
            copies.append(bytes(copy))

    leased = threading.Event()
    reader = threading.Thread(target=copy_slowly)
    reader.start()
    assert leased.wait(10)
    number = 0
    while reader.is_alive():
        number += 1
        with cache.reserve(chat(number, 1600)) as reservation:
            for block in reservation.blocks():
                block.write(garbage)
            reservation.commit()
    memory = client.status()["daemon"]["memory"]
    assert memory["blocks_evicted"] > 4 * ((4 << 20) // SPEC.slot_nbytes)
    assert copies == [expected]
    assert_balanced(client.status()["daemon"])


EIGHT = KVSpec(model="eight", dtype="uint8", num_layers=16, num_kv_heads=1, head_dim=1016, block_tokens=16)
assert (4 << 20) // EIGHT.slot_nbytes == 8


def pattern(number: int, block: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([number, block]).integers(0, 256, EIGHT.array_shape(16), np.uint8)


def read_eight(cache: Cache, number: int) -> int:
    """Changes state. Tokens found, every byte compared."""
    with cache.acquire(chat(number, 32)) as hit:
        for block in hit.blocks(2000):
            assert np.array_equal(block.array, pattern(number, block.start // 16)), f"block {block.start} of {number}"
        return hit.verified_tokens


def test_64_requests_over_a_pool_of_8_blocks_read_their_own(tmp_path: Path) -> None:
    """COR: eight threads, sixteen prompts, and an SSD below, so that blocks leave and come back all the time."""
    with opened(config_of(tmp_path)) as (client, _):
        cache = client.attach(EIGHT)

        def request(seed: int) -> int:
            number = random.Random(seed).randrange(16)
            found = read_eight(cache, number)
            with cache.reserve(chat(number, 32)) as reservation:
                for block in reservation.blocks():
                    block.write(pattern(number, block.start // 16))
                reservation.commit()
            if seed % 4 == 0:
                wait_until(lambda: daemon_of(client)["disk"]["idle"])
            return found + read_eight(cache, number)

        with ThreadPoolExecutor(8) as threads:
            found = sum(threads.map(request, range(64)))
        assert found > 0
        assert holds(daemon_of(client)) == (0, 0, 0)
        wait_until(lambda: daemon_of(client)["disk"]["idle"])
        stats = daemon_of(client)["stats"]
        assert daemon_of(client)["memory"]["blocks_evicted"] > 8
        assert stats["blocks_loaded"] > 0
        assert not any(stats["discards"].values())
        for number in range(16):  # the twin: nothing is in the way, and what was stored is found
            assert put_eight(cache, number)
            assert read_eight(cache, number) == 32


def put_eight(cache: Cache, number: int) -> bool:
    with cache.reserve(chat(number, 32)) as reservation:
        for block in reservation.blocks():
            block.write(pattern(number, block.start // 16))
        return reservation.commit() or cache.match(chat(number, 32)) == 32


def test_a_reference_to_slots_that_are_anothers_by_now_does_nothing(client: Client, cache: Cache) -> None:
    """COR: reservation numbers are never given twice, so a stale one seals, writes and frees nothing."""
    assert store(cache, chat(9, 16)), "keeps the extent with its class, so that slots are given again"
    stale = cache.reserve(chat(1, 32))
    blocks, number, offsets = list(stale.blocks()), stale.hold.number, [block.offset for block in stale.blocks()]
    stale.abort()
    fresh = cache.reserve(chat(2, 32))
    assert sorted(block.offset for block in fresh.blocks()) == sorted(offsets), "the very same slots"
    for block in fresh.blocks():
        block.write(kv_of(SPEC, chat(2, 32), block.start, 16))
    for block in blocks:
        with pytest.raises(ValueError, match="has ended"):
            block.write(kv_of(SPEC, chat(1, 32), block.start, 16))
    assert not stale.commit()
    link = client._link
    for told in (number, number + 1000):  # a peer that keeps no rule says it anyway
        reply = link.ask(wire.Committed, lambda at, told=told: wire.Commit(at, link.session.id, told, b"\1\1", False))
        assert reply is not None
        assert reply.num_blocks == 0
        link.notify(wire.Abort(link.session.id, told))
    assert cache.match(chat(1, 32)) == cache.match(chat(2, 32)) == 0
    assert fresh.commit()
    assert read(cache, chat(2, 32)) == 32
    assert read(cache, chat(1, 32)) == 0


# --- shapes

TAILS = [
    KVSpec(model="mha", dtype="float16", num_layers=2, num_kv_heads=1, head_dim=2, block_tokens=256),
    KVSpec(model="mla", dtype="float16", num_layers=2, latent_dim=3, block_tokens=256),
    KVSpec(model="own", dtype="uint8", num_layers=2, block_tokens=256, layout="mine", token_nbytes=6, grain_tokens=1),
]


@pytest.mark.parametrize("spec", TAILS, ids=lambda spec: spec.model)
def test_tails_of_every_length_come_back_as_they_were(spec: KVSpec) -> None:
    """COR: from 1 to 255 tokens of a block of 256, alone and as the beginning of a whole one."""
    with embedded() as client:
        cache, whole = client.attach(spec), chat(0, 256)
        assert store(cache, whole)
        for count in range(1, 256):
            tokens = chat(count, count)
            assert store(cache, tokens)
            assert read(cache, tokens) == count
            assert read(cache, [*whole[:count], 1 << 20]) == count
        assert_balanced(client.status()["daemon"])


def test_arrays_of_another_rank_or_half_the_elements_are_refused(client: Client) -> None:
    """COR: K and V in one array each, layers apart, flat, halved: an error at once, and no block of it."""
    spec = KVSpec(model="ranks", dtype="float16", num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=16)
    cache, whole = client.attach(spec), np.ones(spec.array_shape(16), np.float16)
    wrong = [whole[0], whole[0, 0], whole.reshape(2, 2, -1), whole.reshape(-1), whole[:, :, :1], whole[..., :4]]
    wrong += [whole[:, :1], whole[:, :, :, :8], whole[None], whole.astype(np.float32), whole.astype(np.int8)]
    for array in wrong:
        with cache.reserve(chat(1, 16)) as reservation:
            with pytest.raises(ValueError, match=r"block\.write wants"):
                next(reservation.blocks()).write(array)
            assert not reservation.commit()
    assert cache.match(chat(1, 16)) == 0
    assert holds(client.status()["daemon"]) == (0, 0, 0)


# --- an engine whose answers depend on every bit of its KV

TINY = KVSpec(model="numpy", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=16)
VOCABULARY = 64


class TinyTransformer:
    """Two layers of causal attention, one token at a time, so that cold and warm runs do the very same sums."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0).standard_normal
        self.embedding = draw((VOCABULARY, 16), np.float32)
        self.weights = draw((2, 4, 16, 16), np.float32) / 4  # query, key, value, out of each layer
        self.kv = np.zeros(TINY.array_shape(256), np.float32)

    def read(self, start: int, num_tokens: int) -> npt.NDArray[Any]:
        return self.kv[:, :, :, start : start + num_tokens]

    def write(self, start: int, kv: npt.NDArray[Any]) -> None:
        self.kv[:, :, :, start : start + kv.shape[3]] = kv

    def prefill(self, token_ids: Sequence[int], start: int) -> npt.NDArray[np.float32]:
        """Changes state. KV of the tokens from `start` on; the logits after the last one."""
        state = np.zeros(16, np.float32)
        for at in range(start, len(token_ids)):
            state = self.embedding[token_ids[at]] * np.float32(1 + at / 97)
            for layer, (query, key, value, out) in enumerate(self.weights):
                heads = (state @ query).reshape(2, 8)
                self.kv[layer, 0, :, at], self.kv[layer, 1, :, at] = (
                    (state @ each).reshape(2, 8) for each in (key, value)
                )
                scores = np.exp(np.tanh((self.kv[layer, 0, :, : at + 1] * heads[:, None]).sum(-1)))
                mixed = (scores[..., None] * self.kv[layer, 1, :, : at + 1]).sum(1) / scores.sum(-1, keepdims=True)
                state = state + np.tanh(mixed.reshape(16) @ out)
        return state @ self.embedding.T


@pytest.fixture
def connector(client: Client) -> Iterator[ReferenceConnector]:
    yield ReferenceConnector(client, TINY)


def test_logits_after_restored_kv_are_those_of_a_cold_prefill(connector: ReferenceConnector) -> None:
    """COR: bit by bit, for prompts that share any part of what was stored."""
    choose = np.random.default_rng(1)
    base = choose.integers(0, VOCABULARY, 100).tolist()
    engine = TinyTransformer()
    engine.prefill(base, 0)
    assert connector.save(base, engine)
    for shared in (1, 15, 16, 17, 31, 64, 77, 99, 100):
        other = (base[shared] + 1) % VOCABULARY if shared < 100 else 0
        prompt = [*base[:shared], other, *choose.integers(0, VOCABULARY, 20).tolist()]
        cold, warm = TinyTransformer(), TinyTransformer()
        loaded = connector.load(prompt, warm)
        assert loaded == shared
        assert cold.prefill(prompt, 0).tobytes() == warm.prefill(prompt, loaded).tobytes()
        assert cold.kv.tobytes() == warm.kv.tobytes()
