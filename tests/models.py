"""Models a test can trust: prompts whose KV is a pattern, and a slab of plain bytes."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.layout import (
    HEADER_NBYTES,
    NBYTES_OFFSET,
    Header,
    header_tail,
    identity_bytes,
    identity_sum,
    parse_header,
)
from kvstore.core.leases import SpecEntry
from kvstore.core.moves import LoadedBlock, Outcome, WriteGroup, WrittenBlock
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX, slot_offset
from kvstore.core.store import Query, Store
from kvstore.core.tier import new_tables
from kvstore.service.prompt import Prompt
from kvstore.spec import KVSpec
from radix import HashKind, block_symbols_of

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Keys = tuple[tuple[int, bytes], ...]


class Writable(Protocol):
    """A slab, real or simulated."""

    def write(self, offset: int, data: bytes) -> None: ...


def write_header(slab: Writable, offset: int, header: Header) -> None:
    """Changes state. The two pieces that a client writes; what lies between them stays."""
    identity = identity_bytes(header.identity)
    nbytes = header.payload_nbytes
    tail = header_tail(nbytes, identity_sum(identity, nbytes), header.generation, header.rects)
    slab.write(offset, identity)
    slab.write(offset + NBYTES_OFFSET, tail)


class Page:
    """One header page as a slab, zero where nothing is written."""

    def __init__(self) -> None:
        self.bytes = bytearray(HEADER_NBYTES)

    def write(self, offset: int, data: bytes) -> None:
        self.bytes[offset : offset + len(data)] = data


def page_of(header: Header) -> bytes:
    """Query. A fresh page with this header."""
    page = Page()
    write_header(page, 0, header)
    return bytes(page.bytes)


@cache
def rows_of(spec: KVSpec) -> tuple[int, int]:
    """Query. A payload is [rows, tokens, width] bytes, whatever its layout."""
    if spec.is_opaque:
        return 1, spec.token_nbytes
    rows = spec.num_layers * (1 if spec.latent_dim else 2 * spec.num_kv_heads)
    return rows, spec.token_payload_nbytes // rows


@cache
def kv_of(spec: KVSpec, context: bytes) -> Bytes:
    """Query. What a model would compute for one token: [rows, width]."""
    rows, width = rows_of(spec)
    return np.frombuffer(hashlib.shake_128(context).digest(rows * width), np.uint8).reshape(rows, width)


class Text(Prompt):
    """A prompt together with the KV of each of its tokens."""

    def __init__(self, entry: SpecEntry, token_ids: tuple[int, ...], keys: Keys) -> None:
        super().__init__(entry.spec, HashKind(entry.hash_kind), token_ids, keys)
        self.entry = entry
        self.token_ids = token_ids[: self.num_tokens]
        self.keys = tuple((start, key) for start, key in keys if start < self.num_tokens)
        self.query = Query(self.hashes, self.tokens, self.key_facts)
        self._payloads: dict[int, Bytes] = {}

    def num_tokens_of(self, block: int) -> int:
        return min(self.spec.block_tokens, self.num_tokens - block * self.spec.block_tokens)

    def payload(self, block: int) -> Bytes:
        """Query. [rows, tokens, width]: a token depends on the ids up to it and the extra keys that have begun."""
        if block not in self._payloads:
            first = block * self.spec.block_tokens
            contexts = [self._context(token) for token in range(first, first + self.num_tokens_of(block))]
            self._payloads[block] = np.stack([kv_of(self.spec, context) for context in contexts], axis=1)
        return self._payloads[block]

    def _context(self, token: int) -> bytes:
        begun = [key for key in self.keys if key[0] <= token]
        return repr((self.spec.fingerprint, self.token_ids[: token + 1], begun)).encode()


class SimSlab:
    """Real bytes, real headers, no shared memory."""

    def __init__(self, num_extents: int, extent_nbytes: int) -> None:
        self.extent_nbytes = extent_nbytes
        self.tables = new_tables(num_extents)
        self.bytes = np.zeros(num_extents * extent_nbytes, np.uint8)

    def class_of(self, slot: int) -> int:
        return int(self.tables.extents[slot // SLOTS_PER_EXTENT_MAX])

    def offset(self, slot: int) -> int:
        return slot_offset(slot, self.class_of(slot), self.extent_nbytes)

    def write(self, offset: int, data: bytes | Bytes) -> None:
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def header(self, slot: int) -> Header | None:
        offset = self.offset(slot)
        return parse_header(self.bytes[offset : offset + HEADER_NBYTES].tobytes())

    def payload(self, offset: int, nbytes: int) -> Bytes:
        return self.bytes[offset + HEADER_NBYTES : offset + HEADER_NBYTES + nbytes]

    def symbols_of(self, slot: int) -> bytes:
        header = self.header(slot)
        if header is None:
            return b""
        return block_symbols_of(header.identity.tokens, header.identity.keys_start, header.identity.keys_digest)

    def slots_in(self, state: int) -> list[int]:
        slots: list[int] = np.flatnonzero(self.tables.slots["state"] == state).tolist()
        return slots


def store_on(slab: SimSlab, **options: Any) -> Store:
    """Changes state. A store whose memory is this slab, all of it there. `options`: as Store's."""
    store = Store(extent_nbytes=slab.extent_nbytes, tables=slab.tables, symbols_of=slab.symbols_of, **options)
    for extent in range(len(slab.tables.extents)):
        store.add_extent(extent)
    return store


class SimDisk:
    """A medium of plain bytes: slots and committed rows. What was written but not committed is gone at a crash."""

    def __init__(self, slab: SimSlab, num_extents: int, extent_nbytes: int) -> None:
        self.slab = slab
        self.num_extents, self.extent_nbytes = num_extents, extent_nbytes
        self.slots: dict[int, bytes] = {}
        self.rows: dict[int, tuple[WrittenBlock, int, bytes]] = {}  # slot -> block, last use, symbols
        self.classes = np.zeros(num_extents, np.uint64)
        self.fails: set[int] = set()  # slots whose reads and writes fail
        self.is_dead = False

    def symbols(self, slot: int) -> bytes:
        return self.rows[slot][2] if slot in self.rows else b""

    def _is_refused(self, slot: int | None = None) -> bool:
        return self.is_dead or slot in self.fails

    def load(self, block: LoadedBlock) -> Outcome:
        """Changes state. As a mover does: the bytes go into the slab, then they are checked."""
        if self._is_refused(block.disk_slot):
            return Outcome.IO
        data = self.slots.get(block.disk_slot, b"")
        self.slab.write(self.slab.offset(block.memory_slot), data)
        header = parse_header(data[:HEADER_NBYTES].ljust(HEADER_NBYTES, b"\0"))
        if header is None or header.identity.block_hash != block.block_hash or not header.rects:
            return Outcome.CORRUPT
        payload = data[HEADER_NBYTES : HEADER_NBYTES + header.payload_nbytes]
        return Outcome.OK if xxhash.xxh3_64_intdigest(payload) == header.rects[0].sum else Outcome.CORRUPT

    def _write(self, block: WrittenBlock) -> bool:
        """False where it fails; what is not summed is not written."""
        assert block.disk_slot not in self.rows, "a slot was reused before its row was gone"
        header, offset = self.slab.header(block.memory_slot), self.slab.offset(block.memory_slot)
        if self._is_refused(block.disk_slot) or header is None or not header.rects:
            return False
        if header.identity.block_hash != block.block_hash:
            return False
        self.slots[block.disk_slot] = self.slab.bytes[offset : offset + block.slot_nbytes].tobytes()
        return True

    def commit(self, group: WriteGroup) -> tuple[frozenset[int], bool]:
        """Changes state. Write and commit a whole group: the slots that failed, and whether anything is durable."""
        written = {block.disk_slot for block in group.blocks if self._write(block)}
        return self.commit_rows(group, written)

    def commit_rows(self, group: WriteGroup, written: set[int]) -> tuple[frozenset[int], bool]:
        """Changes state. All rows at once; none where a block or one before it in its chain was not written."""
        failed: set[int] = set()
        hashes: set[bytes] = set()
        for block in group.blocks:
            if block.parent in hashes or block.disk_slot not in written:
                failed.add(block.disk_slot)
                hashes.add(block.block_hash)
        if self._is_refused():
            return frozenset(failed), False
        for slot in group.deletes:
            self.rows.pop(slot, None)
        for block in group.blocks:
            if block.disk_slot not in failed:
                self.classes[block.disk_slot // SLOTS_PER_EXTENT_MAX] = block.slot_nbytes
                self.rows[block.disk_slot] = (block, group.last_used, self.slab.symbols_of(block.memory_slot))
        return frozenset(failed), True

    def table(self) -> npt.NDArray[np.void]:
        """Query. The committed rows as an index gives them."""
        made = np.zeros(len(self.rows), SIM_ROW)
        for at, (slot, (block, last_used, _)) in enumerate(self.rows.items()):
            made[at] = (slot, block.number, block.is_short, block.block_hash, block.parent, last_used)
        return made


SIM_ROW = np.dtype(
    [("slot", "<u4"), ("number", "<u4"), ("short", "u1"), ("hash", "V16"), ("parent", "V16"), ("last_used", "<i8")]
)
