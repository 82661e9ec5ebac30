"""The restart benchmark at its smallest: a daemon finds what it writes, and what it asks is answered right."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from benchmarks import restart
from kvstore.config import DISK_EXTENTS_MIN
from kvstore.core.layout import HEADER_NBYTES, parse_header
from kvstore.core.slots import extent_nbytes_for
from kvstore.media.disk import Disk
from radix import HashKind, hash_prefix


@contextlib.contextmanager
def page() -> Iterator[memoryview]:
    """Memory as direct I/O wants it."""
    with mmap.mmap(-1, restart.SLOT_NBYTES) as memory, memoryview(memory) as view:
        yield view


@pytest.mark.parametrize("run", restart.SHAPES)
def test_columns_hold_the_chain_of_every_prompt(run):
    chats = restart.Chats(restart.BLOCKS_MIN, run)
    columns = chats.columns
    hashes = [columns.hashes[at : at + 16] for at in range(0, len(columns.hashes), 16)]
    for level, way in ((0, 3), (chats.levels - 1, 0), (chats.levels - 1, 2)):
        prompt = chats.prompt(1, level, way)
        chain = hash_prefix(restart.ROOT, prompt.tobytes(), restart.BLOCK_TOKENS, HashKind.XXH3)
        last = hashes.index(chain[-16:])
        assert columns.numbers[last] == len(chain) // 16 - 1
        assert columns.parents[16 * last : 16 * last + 16] == (restart.ROOT + chain)[-32:-16]
        assert np.array_equal(columns.tokens[last], prompt[-restart.BLOCK_TOKENS :])
        assert all(chain[at : at + 16] in hashes for at in range(0, len(chain), 16))


def test_an_index_lists_all_blocks_and_the_readable_ones_are_whole(tmp_path):
    chats = restart.Chats(restart.BLOCKS_MIN, 64)
    folder = tmp_path / "tier"
    restart.write_index(folder, chats)
    with contextlib.closing(Disk.open([folder], restart.capacity_for(chats.num_blocks))) as disk, page() as view:
        rows = disk.rows()
        hash_at = dict(zip(rows["slot"].tolist(), (bytes(each) for each in rows["hash"]), strict=True))
        whole = set()
        for slot, block_hash in hash_at.items():
            disk.read(slot, restart.SLOT_NBYTES, view)
            header = parse_header(bytes(view[:HEADER_NBYTES]))
            if header is not None:
                payload = restart.payload_of(header.identity.tokens)
                assert header.identity.block_hash == block_hash
                assert bytes(view[HEADER_NBYTES : HEADER_NBYTES + len(payload)]) == payload
                assert header.rects[0].sum == xxhash.xxh3_64_intdigest(payload)
                whole.add(block_hash)
    assert len(hash_at) == len(set(hash_at.values())) == chats.num_blocks
    chain = chats.prompt(0)
    hashes = hash_prefix(restart.ROOT, chain.tobytes(), restart.BLOCK_TOKENS, HashKind.XXH3)
    assert whole == {hashes[at : at + 16] for at in range(0, len(hashes), 16)}


def test_a_tier_has_hardly_more_room_than_blocks():
    for num_blocks in (restart.BLOCKS_MIN, 5000, 100_000, restart.BLOCKS):
        capacity = restart.capacity_for(num_blocks)
        extent_nbytes = extent_nbytes_for(capacity)
        room = capacity // restart.SLOT_NBYTES - num_blocks
        assert 0 <= room < DISK_EXTENTS_MIN * extent_nbytes // restart.SLOT_NBYTES
        assert capacity % extent_nbytes == 0


def test_the_smallest_run_answers_right_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(restart, "SHAPES", {64: restart.SHAPES[64]})  # one index will do
    monkeypatch.setattr(restart, "BARS", {"_64": restart.BARS["_64"]})
    base = tmp_path / "bench"
    results = restart.measure(restart.BLOCKS_MIN, 0.1, base)
    kept = {bar.name: bar.met for bar in restart.bars(results)}
    right = ("all_blocks_found_64", "no_wrong_answer_64", "all_warm_blocks_found", "warm_bytes_right")
    assert all(kept[name] for name in right), results
    assert results["blocks_loaded_64"] > 0
    assert not base.exists()
