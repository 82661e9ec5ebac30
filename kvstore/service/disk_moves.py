"""Carries out moves between host memory and the SSD: bytes straight between slab and file, checked on either way."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from kvstore.core.layout import HEADER_NBYTES, parse_header
from kvstore.core.lower import LowerTier
from kvstore.core.moves import LoadBlocks, LoadedBlock, Outcome, WriteGroup, WrittenBlock
from kvstore.core.shards import is_whole
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX
from kvstore.errors import TierUnavailable
from kvstore.media.disk import BlockRow, Disk
from kvstore.media.memory import Slab
from kvstore.service.movers import Lane, Movers
from radix import block_symbols_of

T = TypeVar("T")
log = logging.getLogger("kvstore")
AHEAD_BLOCKS = 28  # so many left of a group, and the next one begins: the device must not run dry between two
PATH_FAILURES_MAX = 8  # in a row; then a path counts as gone


class Refused(NamedTuple):
    """A block that must not leave memory. `is_damaged`: nor be served from there any more."""

    reason: str
    is_damaged: bool


@dataclass(slots=True)
class _Run:
    """A group under way."""

    group: WriteGroup
    rows: dict[int, BlockRow] = field(default_factory=dict)  # by disk slot
    num_left: int = 0


class DiskMoves:
    """Jobs for the movers, and their completions. All but the jobs runs where the store's state is."""

    def __init__(self, lower: LowerTier, disk: Disk, slab: Slab, movers: Movers, now_ms: Callable[[], float]) -> None:
        self._lower = lower
        self._disk = disk
        self._slab = slab
        self._movers = movers
        self._now_ms = now_ms
        self._failures: Counter[str] = Counter()  # in a row, per path
        self._group_failure = ""  # why the last group failed; nothing if it did not
        self.num_failures = 0
        self._runs: deque[_Run] = deque()  # groups that are not committed yet, in order

    def load(self, transfer: LoadBlocks) -> None:
        """Changes state. Several in flight together; each counts as soon as it is there."""
        blocks = deque(enumerate(transfer.blocks))
        for _ in range(min(Lane.READS.num_threads, len(blocks))):
            self._movers.submit(partial(self._load_blocks, transfer, blocks), _nothing, Lane.READS)

    def write(self, group: WriteGroup) -> None:
        """Changes state. Groups are committed in the order of these calls: a child's row never before its parent's."""
        run = _Run(group, num_left=len(group.blocks))
        self._runs.append(run)
        blocks = deque(group.blocks)
        for _ in range(min(Lane.WRITES.num_threads, len(blocks))):
            self._movers.submit(partial(self._write_blocks, run, blocks), _nothing, Lane.WRITES)
        self._commit_ready()

    # Jobs, on movers. Each takes blocks until none is left: a job per block would cost the loop more than the block.

    def _load_blocks(self, transfer: LoadBlocks, blocks: deque[tuple[int, LoadedBlock]]) -> None:
        while (taken := _pop(blocks)) is not None and not self._movers.is_closing:
            index, block = taken
            result = self._load_block(block, transfer.slot_nbytes)
            self._movers.post(partial(self._loaded, transfer, index, result))

    def _write_blocks(self, run: _Run, blocks: deque[WrittenBlock]) -> None:
        while (block := _pop(blocks)) is not None and not self._movers.is_closing:
            self._movers.post(partial(self._written, run, block, self._write_block(block, run.group.last_used)))

    def _load_block(self, block: LoadedBlock, slot_nbytes: int) -> tuple[Outcome, str]:
        view = self._slab.slot(block.memory_slot, slot_nbytes)
        try:
            self._disk.read(block.disk_slot, slot_nbytes, view)
        except TierUnavailable as exc:
            return Outcome.IO, str(exc)
        header = parse_header(bytes(view[:HEADER_NBYTES]))
        if header is None or header.identity.block_hash != block.block_hash or not is_whole(header, view):
            return Outcome.CORRUPT, f"slot {block.disk_slot} of the SSD does not hold what was written there"
        return Outcome.OK, ""

    def _write_block(self, block: WrittenBlock, last_used: int) -> BlockRow | TierUnavailable | Refused:
        """The row to commit; or why there is none: the medium's fault, or the block's own.

        What is not sealed and summed never leaves memory, nor what is not what was summed: below, a wrong byte would
        be the only copy. The bytes are written from where they were just summed; what is hit in between is found
        when the block comes back.
        """
        view = self._slab.slot(block.memory_slot, block.slot_nbytes)
        header = parse_header(bytes(view[:HEADER_NBYTES]))
        if header is None or header.identity.block_hash != block.block_hash or not header.rects:
            return Refused(f"slab slot {block.memory_slot}: does not hold the block it should: not written", False)
        if not is_whole(header, view):
            return Refused(f"slab slot {block.memory_slot}: payload does not match its checksum: not written", True)
        try:
            self._disk.write(block.disk_slot, block.slot_nbytes, view)
        except TierUnavailable as exc:
            return exc
        identity = header.identity
        symbols = block_symbols_of(identity.tokens, identity.keys_start, identity.keys_digest)
        return BlockRow(
            block.disk_slot, block.block_hash, block.parent, block.number, block.is_short, last_used, symbols
        )

    def _commit_rows(self, group: WriteGroup, rows: list[BlockRow]) -> str:
        """Why nothing of the group is durable; nothing if it is."""
        try:
            for extent, slot_nbytes in {
                (block.disk_slot // SLOTS_PER_EXTENT_MAX, block.slot_nbytes) for block in group.blocks
            }:
                self._disk.set_class(extent, slot_nbytes)
            self._disk.sync()
            self._disk.commit(rows, group.deletes, group.facts)
        except TierUnavailable as exc:
            return str(exc)
        return ""

    # Completions, on the loop

    def _loaded(self, transfer: LoadBlocks, index: int, result: tuple[Outcome, str]) -> None:
        outcome, reason = result
        self._note(transfer.blocks[index].disk_slot, reason, counts=outcome is Outcome.IO)
        self._lower.loaded(transfer.id, index, outcome, self._now_ms())

    def _written(self, run: _Run, block: WrittenBlock, result: BlockRow | TierUnavailable | Refused) -> None:
        if isinstance(result, BlockRow):
            self._note(block.disk_slot, "", counts=True)
            run.rows[block.disk_slot] = result
        elif isinstance(result, TierUnavailable):
            self._note(block.disk_slot, str(result), counts=True)
        else:
            log.error("%s", result.reason)
            self.num_failures += 1
            if result.is_damaged:
                self._lower.damaged(run.group.id, block.disk_slot)
        run.num_left -= 1
        if run.num_left == min(AHEAD_BLOCKS, len(run.group.blocks) - 1):
            self._lower.writes.almost_written()
        self._commit_ready()

    def _commit_ready(self) -> None:
        while self._runs and not self._runs[0].num_left:
            run = self._runs.popleft()
            failed = _failed(run)
            rows = [row for slot, row in run.rows.items() if slot not in failed]
            self._movers.submit(
                partial(self._commit_rows, run.group, rows), partial(self._committed, run, failed), Lane.INDEX
            )

    def _committed(self, run: _Run, failed: frozenset[int], reason: str) -> None:
        if reason != self._group_failure:
            if reason:
                log.error("ssd: %s; blocks stay in memory only", reason)
            else:
                log.warning("ssd: blocks are written again")
            self._group_failure = reason
        if reason:
            self.num_failures += 1
            lost = self._disk.fail_unsound()
            if lost:
                log.error("ssd: no write to that path can be trusted any more: going on without it")
                self._lower.lose_extents(lost)
        self._lower.writes.committed(run.group.id, failed, not reason, self._now_ms())

    def _note(self, slot: int, reason: str, *, counts: bool) -> None:
        """Log the first failure in a row of a path; take it out of use after several."""
        path = str(self._disk.path_of(slot))
        if not reason:
            self._failures.pop(path, None)
            return
        self.num_failures += 1
        if not self._failures[path]:
            log.error("ssd: %s", reason)
        self._failures[path] += counts
        if counts and self._failures[path] == PATH_FAILURES_MAX:
            log.error("ssd: disk.path=%s failed %d times in a row: going on without it", path, PATH_FAILURES_MAX)
            self._lower.lose_extents(self._disk.fail_path(slot))


def _pop(queue: deque[T]) -> T | None:
    """Changes state. Several threads take from it."""
    try:
        return queue.popleft()
    except IndexError:
        return None


def _nothing(_: None) -> None:
    """Query. A job that has posted its completions one by one."""


def _failed(run: _Run) -> frozenset[int]:
    """Disk slots of blocks that were not written, or whose parent was not: prefix closure."""
    failed: set[int] = set()
    hashes: set[bytes] = set()
    for block in run.group.blocks:
        if block.disk_slot not in run.rows or block.parent in hashes:
            failed.add(block.disk_slot)
            hashes.add(block.block_hash)
    return frozenset(failed)
