"""Write-through and write-back: what waits to be written to the lower tier, and the groups it is written in.

    commit ──> queue ──> group: write blocks ─ sync ─ commit rows ──> sealed in the lower tier
                                 (the next group writes meanwhile; rows are committed in order)

A queued chain is pinned in memory: what is not written yet is no victim there, so nothing is forgotten on its way
down. The queue is bounded in bytes; beyond the bound a block stays in memory only, and that is counted. A block in a
group is in the lower tier's tree already, ARRIVING, so its children can follow before it is durable.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from kvstore.core.leases import SpecEntry
from kvstore.core.moves import WriteGroup, WrittenBlock
from kvstore.core.placement import WriteBudget
from kvstore.core.stats import Guard, Stats
from kvstore.core.tier import ARRIVING, SEALED, Tier
from radix import HASH_NBYTES, BlockHash, Pin

GROUP_NBYTES = 64 << 20
GROUP_MS = 100.0
GROUPS_MAX = 3  # one that writes, one that has almost written, one that syncs
DELETES_MAX = 8192  # rows forgotten per group: their slots are freed in one turn of the loop
RETRY_MS = 20.0  # after a look at a queue of which nothing could begin: sums or room that are not there yet
PAUSE_MS, PAUSE_MS_MAX = 1000.0, 60_000.0  # after a group that failed


@dataclass(slots=True, eq=False)
class _Item:
    """A chain to be written as far as the lower tier lacks it."""

    entry: SpecEntry
    hashes: bytes
    short: bool
    pin: Pin
    fresh: list[bytes]  # hashes of the blocks that no chain before it in the queue has
    nbytes: int
    queued_ms: float
    sum_id: int | None  # sums that have yet to be made
    is_broken: bool = False  # a block of it could not be written: nor will those after it


@dataclass(slots=True)
class _Part:
    """A chain's blocks in one group."""

    item: _Item
    memory_pin: Pin
    disk_pin: Pin
    blocks: list[WrittenBlock]
    is_damaged: bool = False  # the first block that is not written was found damaged in memory


@dataclass(slots=True)
class _Group:
    parts: list[_Part]
    deletes: array[int]
    nbytes: int  # of the blocks


class Writes:
    """The queue, the groups, and the bounds on both."""

    def __init__(
        self, memory: Tier, disk: Tier, budget: WriteBudget, stats: Stats, *, queue_nbytes_max: int, hold_nbytes: int
    ) -> None:
        """`hold_nbytes`: so much may wait without being written: 0 is write-through, more is write-back."""
        self.writing_from: dict[int, int] = {}  # disk slot -> memory slot
        self.queued_nbytes = 0
        self.writing_nbytes = 0
        self._memory = memory
        self._disk = disk
        self._budget = budget
        self._stats = stats
        self._queue_nbytes_max = queue_nbytes_max
        self._hold_nbytes = hold_nbytes
        self._queue: deque[_Item] = deque()
        self._queued: set[bytes] = set()  # hashes of all blocks that wait
        self._groups: dict[int, _Group] = {}
        self._last_id = 0
        self._is_writing = False
        self._parked_since_ms: float | None = None
        self._retry_ms = 0.0
        self._paused_until_ms = 0.0
        self._pause_ms = PAUSE_MS
        self.bytes_ever = 0  # over all lives of the medium

    @property
    def pins(self) -> list[tuple[Pin | None, Pin | None]]:
        """Query. (memory, disk) pins of all that is queued or written."""
        queued: list[tuple[Pin | None, Pin | None]] = [(item.pin, None) for item in self._queue]
        parts = [part for group in self._groups.values() for part in group.parts]
        return queued + [(part.memory_pin, part.disk_pin) for part in parts]

    @property
    def is_idle(self) -> bool:
        """Query. Nothing waits and nothing is under way."""
        return not (self._queue or self._groups)

    def write_later(
        self, entry: SpecEntry, hashes: bytes, now_ms: float, *, sum_id: int | None = None, used_twice: bool = False
    ) -> None:
        """Changes state. Queue what the lower tier lacks of a chain in memory; drop it, counted, beyond a bound."""
        match = self._memory.match(entry.root, hashes)
        hashes = hashes[: match.num_blocks * HASH_NBYTES]
        fresh = self._fresh(hashes, self._disk.match(entry.root, hashes).num_blocks)
        if not fresh:
            return
        missing, nbytes = len(fresh), len(fresh) * entry.spec.slot_nbytes
        pinned = self.queued_nbytes + self.writing_nbytes
        is_full = pinned > 0 and pinned + nbytes > self._queue_nbytes_max  # one always fits
        if is_full or now_ms < self._paused_until_ms:
            self._stats.writes_dropped["full" if is_full else "paused"] += missing
            return
        if not self._budget.take(nbytes, now_ms):
            if not used_twice:
                self._stats.writes_dropped["budget"] += missing
                return
            self._budget.spend(nbytes, now_ms)
        pin = self._memory.pin(match)
        self._queue.append(_Item(entry, hashes, pin.node.short, pin, fresh, nbytes, now_ms, sum_id))
        self._queued.update(fresh)
        self.queued_nbytes += nbytes

    def _fresh(self, hashes: bytes, known: int) -> list[bytes]:
        """Hashes of a chain's blocks behind the first `known` ones that do not wait already."""
        fresh = []
        for at in range(len(hashes) - HASH_NBYTES, (known - 1) * HASH_NBYTES, -HASH_NBYTES):
            block_hash = hashes[at : at + HASH_NBYTES]
            if block_hash in self._queued:  # so are all before it
                break
            fresh.append(block_hash)
        return fresh

    def summed(self, sum_id: int) -> None:
        """Changes state. The sums of these blocks are made: they may leave memory."""
        for item in self._queue:
            if item.sum_id == sum_id:
                item.sum_id = None

    def next_deadline_ms(self) -> float | None:
        """Query. When `start_group` has something to do though nothing else happens."""
        if self._is_writing or len(self._groups) == GROUPS_MAX:
            return None
        times = [] if self._parked_since_ms is None else [self._parked_since_ms + GROUP_MS]
        if self._queue and self.queued_nbytes > self._hold_nbytes:
            times.append(self._queue[0].queued_ms + GROUP_MS)
        return max(min(times), self._paused_until_ms, self._retry_ms) if times else None

    def start_group(self, now_ms: float, *, flush: bool = False) -> WriteGroup | None:
        """Changes state. The next group, when there is enough for one or it has waited long enough.

        `flush`: whatever there is.
        """
        if self._disk.has_parked and self._parked_since_ms is None:
            self._parked_since_ms = now_ms
        if not flush and not self._is_due(now_ms):
            return None
        if self._is_writing or len(self._groups) == GROUPS_MAX:
            return None
        parts = self._take_parts()
        parked = self._disk.take_parked(DELETES_MAX)  # after the parts: what they evicted is forgotten with this group
        self._parked_since_ms = None
        if not parts and not parked:
            self._retry_ms = now_ms + RETRY_MS
            return None
        return self._begin(parts, parked)

    def almost_written(self) -> None:
        """Changes state. The group that writes does not keep the medium busy much longer; another may begin."""
        self._is_writing = False

    def damaged(self, group_id: int, disk_slot: int) -> None:
        """Changes state. The payload of a block in this group is not what was summed: memory must not serve it either.

        It leaves both tiers at once, with all that hangs below it, so that it can be stored anew; `committed`, where it
        is among the failed, follows. Leases on it go on, as after a reader's discard.
        """
        for part in self._groups[group_id].parts:
            for block in part.blocks:
                if block.disk_slot == disk_slot:
                    part.is_damaged = True
                    self._stats.discards["payload"] += 1
                    self._memory.remove(part.memory_pin, block.number)
                    self._disk.remove(part.disk_pin, block.number)

    def committed(self, group_id: int, failed: frozenset[int], ok: bool, now_ms: float) -> None:
        """Changes state. A group has ended. `failed`: disk slots whose block is not there; not `ok`: none is."""
        group = self._groups.pop(group_id)
        self.writing_nbytes -= group.nbytes
        for part in group.parts:
            self._end_part(part, failed, ok)
        if ok:
            self._disk.unpark(group.deletes)
            self._stats.guards[Guard.ROW] += len(group.deletes)
            self._pause_ms = PAUSE_MS
        else:
            self._disk.park_again(group.deletes)
            self._stats.groups_failed += 1
            self._paused_until_ms = now_ms + self._pause_ms
            self._pause_ms = min(2 * self._pause_ms, PAUSE_MS_MAX)
            self._drop_queue()
        if self._disk.has_parked and self._parked_since_ms is None:
            self._parked_since_ms = now_ms

    def _is_due(self, now_ms: float) -> bool:
        if self.queued_nbytes - self._hold_nbytes >= GROUP_NBYTES:
            return now_ms >= max(self._paused_until_ms, self._retry_ms)
        due_ms = self.next_deadline_ms()
        return due_ms is not None and now_ms >= due_ms

    def _take_parts(self) -> list[_Part]:
        parts: list[_Part] = []
        nbytes = 0
        while self._queue and nbytes < GROUP_NBYTES:
            item = self._queue[0]
            if item.sum_id is not None:
                break
            part, is_done = self._take_part(item, GROUP_NBYTES - nbytes, stuck=not parts and not self._groups)
            if part is not None:
                parts.append(part)
                nbytes += len(part.blocks) * item.entry.spec.slot_nbytes
            if not is_done:
                break
            self._queue.popleft()
            self._finish(item)
        return parts

    def _take_part(self, item: _Item, room_nbytes: int, *, stuck: bool) -> tuple[_Part | None, bool]:
        """A chain's next blocks that find room in the lower tier and in the group, and whether that is all of it."""
        entry, disk, slot_nbytes = item.entry, self._disk, item.entry.spec.slot_nbytes
        total = self._memory.num_sealed(self._memory.tree.path_slots(item.pin))  # not what is still on its way up
        match = disk.match(entry.root, item.hashes)
        done = match.num_blocks
        if item.is_broken or item.pin.node.detached or done >= total:
            return None, True
        above = disk.pin(match)  # room must not be made of what it goes on from
        can_be = disk.make_room_later(slot_nbytes, total - done)
        if can_be and not disk.pool.num_free(slot_nbytes):
            self._make_more_room(slot_nbytes)
        disk.unpin(above)
        count = min(total - done, disk.pool.num_free(slot_nbytes), max(1, room_nbytes // slot_nbytes))
        if not count:
            if not can_be and stuck:
                self._stats.writes_dropped["full"] += total - done
                return None, True
            return None, False
        hashes = item.hashes[: (done + count) * HASH_NBYTES]
        part = self._insert(item, hashes, done, count)
        return part, done + count == total

    def _make_more_room(self, slot_nbytes: int) -> None:
        """Changes state. The tier is full: evict for a group of what waits, else each group would write one chain."""
        disk, waiting_nbytes = self._disk, min(self.queued_nbytes - self._hold_nbytes, GROUP_NBYTES)
        could_be = disk.num_parked(slot_nbytes) + disk.tree.num_evictable(slot_nbytes)
        disk.make_room_later(slot_nbytes, min(waiting_nbytes // slot_nbytes, could_be))

    def _insert(self, item: _Item, hashes: bytes, done: int, count: int) -> _Part | None:
        entry, disk = item.entry, self._disk
        slots = disk.reserve(entry.spec.slot_nbytes, count)
        assert slots is not None
        sources = self._memory.tree.path_slots(item.pin)[done : done + count]
        self.writing_from |= dict(zip(slots, sources, strict=True))
        short = item.short and len(hashes) == len(item.hashes)
        unused = set(disk.insert(entry.root, hashes, done, slots, short=short, state=ARRIVING).unused)
        for slot in unused:
            del self.writing_from[slot]
        disk.give_back(unused)
        if len(unused) == count:
            return None
        blocks = [
            _written_block(entry, hashes, number, source, slot, short)
            for number, (slot, source) in enumerate(zip(slots, sources, strict=True), done)
            if slot not in unused
        ]
        memory_pin = self._memory.pin(self._memory.match(entry.root, hashes))
        return _Part(item, memory_pin, disk.pin(disk.match(entry.root, hashes)), blocks)

    def _begin(self, parts: list[_Part], parked: array[int]) -> WriteGroup:
        self._last_id += 1
        blocks = tuple(block for part in parts for block in part.blocks)
        nbytes = sum(block.slot_nbytes for block in blocks)
        self._groups[self._last_id] = _Group(parts, parked, nbytes)
        self._is_writing = bool(blocks)
        self.writing_nbytes += nbytes
        self.bytes_ever += nbytes
        facts = {"bytes_written": self.bytes_ever, "budget_level": self._budget.level_nbytes}
        return WriteGroup(self._last_id, self._last_id, blocks, parked, facts)

    def _end_part(self, part: _Part, failed: frozenset[int], ok: bool) -> None:
        there = [block.disk_slot for block in part.blocks if ok and block.disk_slot not in failed]
        for block in part.blocks:
            del self.writing_from[block.disk_slot]
        self._disk.settle(array("I", there), SEALED)
        self._stats.blocks_written += len(there)
        self._stats.bytes_written += sum(block.slot_nbytes for block in part.blocks[: len(there)])
        if len(there) < len(part.blocks):
            part.item.is_broken = True
            reason = "payload" if part.is_damaged else "io"
            self._stats.writes_dropped[reason] += len(part.blocks) - len(there)
            self._stats.guards[Guard.CHECKSUM] += part.is_damaged
            self._stats.guards[Guard.BYTES] += len(part.blocks) - len(there) - part.is_damaged
            self._disk.remove(part.disk_pin, part.blocks[len(there)].number)
        self._disk.unpin(part.disk_pin)
        self._memory.unpin(part.memory_pin)

    def _drop_queue(self) -> None:
        for item in self._queue:
            self._stats.writes_dropped["paused"] += item.nbytes // item.entry.spec.slot_nbytes
            self._finish(item)
        self._queue.clear()

    def _finish(self, item: _Item) -> None:
        self._memory.unpin(item.pin)
        self._queued.difference_update(item.fresh)
        self.queued_nbytes -= item.nbytes


def _written_block(entry: SpecEntry, hashes: bytes, number: int, source: int, slot: int, short: bool) -> WrittenBlock:
    """A block of a chain. `short`: whether the chain's last one is."""
    at = number * HASH_NBYTES
    parent = hashes[at - HASH_NBYTES : at] if number else entry.root
    is_last = at + HASH_NBYTES == len(hashes)
    block_hash = BlockHash(hashes[at : at + HASH_NBYTES])
    return WrittenBlock(source, slot, entry.spec.slot_nbytes, block_hash, BlockHash(parent), number, short and is_last)
