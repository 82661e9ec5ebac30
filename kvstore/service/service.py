"""What a daemon and an embedded store have in common: messages in, one reply each, and the machine behind the core."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import os
import select
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvstore.clock import Clock
from kvstore.config import Config
from kvstore.core.groups import Group
from kvstore.core.layout import STATE_OFFSET, Rect, Shard, header_state
from kvstore.core.leases import Session
from kvstore.core.lower import LowerSettings, LowerTier
from kvstore.core.moves import LoadBlocks, SumBlocks, WriteGroup
from kvstore.core.shards import shard_sum
from kvstore.core.shares import Readers
from kvstore.core.slots import SLOTS_PER_EXTENT_MAX, extent_nbytes_for
from kvstore.core.stats import Guard
from kvstore.core.store import Query, Store
from kvstore.errors import DaemonUnavailable, KVStoreError, SessionLost, TierUnavailable
from kvstore.media.disk import Disk
from kvstore.media.legacy import read_legacies
from kvstore.media.memory import Geometry, Slab, trim_heap
from kvstore.service.disk_moves import DiskMoves
from kvstore.service.movers import Lane, Movers
from kvstore.spec import KVSpec, decode_spec
from radix import block_symbols_of
from transports import messages as wire

log = logging.getLogger("kvstore")
SPECS_LISTED_MAX = 64  # of status, the newest ones
GROUPS_LISTED_MAX = 64
PROGRESS_MS = 2000.0
FLUSH_MS = 5000.0
ALLOCATE_AGAIN_MS = 5000.0
FLUSH_TURN_MS = 50.0
SenderPid = Callable[[], int | None]


def _symbols_on(disk: Disk, slot: int) -> bytes:
    """Query. A broken index costs a partial hit; what else it breaks shows at the next commit."""
    try:
        return disk.symbols(slot)
    except TierUnavailable:
        return b""


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def geometry_for(capacity_nbytes: int) -> Geometry:
    """Query. How a slab of this capacity is cut; the capacity is rounded down to whole extents."""
    extent_nbytes = extent_nbytes_for(capacity_nbytes)
    return Geometry(capacity_nbytes // extent_nbytes, extent_nbytes)


class SlowTicker:
    """True at most every PROGRESS_MS."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_ms = clock.now_ms()

    def is_due(self) -> bool:
        """Changes state."""
        if self._clock.now_ms() < self._next_ms:
            return False
        self._next_ms = self._clock.now_ms() + PROGRESS_MS
        return True


def _say_progress(ticker: SlowTicker, done: int, total: int) -> None:
    if done == total or ticker.is_due():
        log.info("ssd: index is being rebuilt from the blocks extents=%d of=%d", done, total)


class Service:
    """A store on a real slab. Single-threaded: whoever owns it calls `dispatch` and `run_completions`."""

    def __init__(
        self,
        config: Config,
        slab: Slab,
        epoch: int,
        slab_path: Path,
        sessions_path: Path | None,
        clock: Clock,
        disk: Disk | None = None,
        on_open: Callable[[Session, int | None], None] | None = None,
        is_held: Callable[[int], bool] = lambda _: False,
        strangers: Iterable[int] = (),
        readers: Readers | None = None,
    ) -> None:
        """Changes state. Takes over `slab`, with what is in it, and `disk`, whose index is read in the background.

        Usable at once with the extents that are ready, or the first; the others follow in the background. `on_open`
        is told each new session and its pid, for whoever watches processes. `is_held`: see `Store.open_session`;
        `strangers`: see `Store.take_over`; `readers`: see Store.
        """
        self.slab = slab
        self.epoch = epoch
        self._config = config
        self._clock = clock
        self._on_open = on_open
        self._is_held = is_held
        self._paths = str(slab_path), str(sessions_path or "")
        self._started_ms = clock.now_ms()
        self.store = Store(
            extent_nbytes=slab.geometry.extent_nbytes,
            tables=slab.tables,
            symbols_of=self._symbols_of,
            generation=epoch,
            session_share=config.memory.session_share,
            checksums=config.memory.checksums,
            readers=readers,
        )
        self.disk = disk
        self.is_sound = True  # false while it is at work: who leaves it so was interrupted, or met a bug of ours
        self.blocks_taken_over = 0
        self._disk_moves: DiskMoves | None = None
        self._longest_turn_ms = 0.0
        self._unfilled_told = 0
        self._groups_told: set[str] = set()
        self._extents_missing: list[int] = []  # of the SSD, which had no space for them
        self._allocate_ms = math.inf  # when to try them again
        self._waiting: dict[int, tuple[int, Callable[[wire.Reply], None]]] = {}  # token -> request, its way back
        self._tokens = itertools.count(1)
        self.movers = Movers()
        self._take_over(strangers)
        if not slab.extents_ready:
            slab.allocate_extent(0)
            self._extent_is_ready()
        self.movers.submit(self._allocate_extents, lambda _: None)
        if disk is not None:
            self.movers.submit(partial(self._read_index, disk), partial(self._disk_is_ready, disk), Lane.INDEX)

    # Messages

    def dispatch(
        self, message: wire.Message, send: Callable[[wire.Reply], None], sender_pid: SenderPid = lambda: None
    ) -> None:
        """Changes state. A request gets exactly one reply, also when its handler raises; a notice gets none."""
        self.is_sound = False
        if isinstance(message, wire.Request):
            self._reply(message, send, sender_pid)
        else:
            self._notice(message)
        self.is_sound = True

    def _reply(self, message: wire.Request, send: Callable[[wire.Reply], None], sender_pid: SenderPid) -> None:
        reply: wire.Reply | None
        reply = failed = wire.Failed(message.request_id, KVStoreError.code, "the daemon failed while answering")
        self.store.on_time(self._clock.now_ms())
        try:
            reply = self._answer(message, send, sender_pid)
        except KVStoreError as exc:
            reply = wire.Failed(message.request_id, exc.code, str(exc)[:4096])
        finally:  # an error that is not ours stops the daemon, but not before the client has its answer
            self.store.stats.guards[Guard.DEADLINE] += reply is failed
            if reply is not None:
                send(reply)
        if isinstance(message, wire.Commit) and isinstance(reply, wire.Committed):
            sums = np.frombuffer(message.sums, "<u8").tolist()
            self.store.commit(message.session, message.reservation, message.summed, keep=message.keep, sums=sums)
        self._follow_up()

    def _answer(
        self, message: wire.Request, send: Callable[[wire.Reply], None], sender_pid: SenderPid
    ) -> wire.Reply | None:
        """The reply; None where it comes later, from `_tell_progress`."""
        request_id, store = message.request_id, self.store
        match message:
            case wire.Hello():
                return self._hello(message, sender_pid)
            case wire.Attach():
                store.session(message.session)
                entry, shard = store.attach(decode_spec(message.spec)), Shard(message.layers, message.heads)
                member = store.join_group(message.session, entry, message.group, shard) if message.group else 0
                return wire.Attached(request_id, entry.spec_id, entry.hash_kind, member)
            case wire.Find():
                store.session(message.session)
                query = Query(message.hashes, message.tokens, message.keys)
                return wire.Found(request_id, store.find(message.spec_id, query))
            case wire.Acquire():
                query = Query(message.hashes, message.tokens, message.keys)
                got = store.acquire(message.session, message.spec_id, message.lease, query, shared=message.shared)
                self._start_transfers()  # before the answer: the medium need not wait for it
                return wire.Acquired(request_id, *got)
            case wire.Wait():
                token = next(self._tokens)
                until_ms = store.now_ms + message.wait_ms
                store.wait(token, message.session, message.lease, message.blocks, until_ms, message.share)
                self._waiting[token] = request_id, send
                return None
            case wire.Reserve():
                grant = store.reserve(
                    message.session,
                    message.spec_id,
                    message.reservation,
                    message.hashes,
                    message.start,
                    message.tail,
                    message.member,
                )
                return wire.Reserved(request_id, *grant)
            case wire.Commit():
                # The answer goes first and the sealing follows in dispatch: one loop does both, nothing comes between.
                num_blocks = store.sealable(message.session, message.reservation, len(message.summed))
                return wire.Committed(request_id, num_blocks)
            case wire.Clear():
                store.session(message.session)
                store.clear(message.spec_id)
                return wire.Done(request_id)
            case wire.Carry():
                store.carry(message.session, message.holds)
                return wire.Done(request_id)
            case wire.GetStatus():
                return wire.State(request_id, json.dumps(self.status()).encode())
        raise AssertionError(f"{type(message).__name__} is a request without a handler")

    def _tell_progress(self) -> None:
        for token, progress in self.store.take_progress():
            request_id, send = self._waiting.pop(token)
            send(wire.Loaded(request_id, *progress))

    def _notice(self, message: wire.Message) -> None:
        self.store.on_time(self._clock.now_ms())
        try:
            match message:
                case wire.Release():
                    self.store.release(message.session, message.leases)
                case wire.Abort():
                    self.store.abort(message.session, message.reservation)
                case wire.Discard():
                    self.store.discard(message.session, message.lease, message.block, message.reason, message.share)
                case wire.Prefetch():
                    query = Query(message.hashes, message.tokens, message.keys)
                    self.store.prefetch(message.session, message.spec_id, query)
                case wire.Report():
                    self.store.report(message.spec_id, message.prefill_tokens, message.prefill_ms, message.ttft_ms)
                case wire.Goodbye():
                    self.store.close_session(message.session, self._clock.now_ms())
        except SessionLost:
            return  # of a session that has ended: what it held is free already
        self._follow_up()

    def _hello(self, message: wire.Hello, sender_pid: SenderPid) -> wire.Reply:
        if not message.version_min <= wire.VERSION_MAX or not message.version_max >= wire.VERSION_MIN:
            raise DaemonUnavailable(
                f"the client speaks protocol {message.version_min}-{message.version_max}, "
                f"the daemon {wire.VERSION_MIN}-{wire.VERSION_MAX}: upgrade the older one"
            )
        session = self._known_session(message)
        if session is None:
            session = self.store.open_session(self._is_held)
            if session is None:
                raise DaemonUnavailable("the daemon has as many sessions as it can: close some clients")
            if self._on_open is not None:
                self._on_open(session, sender_pid())
        return wire.Welcome(
            message.request_id,
            min(wire.VERSION_MAX, message.version_max),
            self.epoch,
            session.id,
            *self._paths,
            self._config.memory.checksums,
            self._config.memory.verify,
        )

    def _known_session(self, message: wire.Hello) -> Session | None:
        if message.epoch != self.epoch:
            return None
        try:
            return self.store.session(message.session)
        except SessionLost:
            return None

    # Machine

    def run_completions(self) -> None:
        """Changes state. What the movers have finished, and what has become due."""
        self.is_sound = False
        self.movers.run_completions()
        self.store.on_time(self._clock.now_ms())  # after them: a load that has come is not cut for being late
        if self._clock.now_ms() >= self._allocate_ms:
            self._allocate_later()
        self._follow_up()
        self.is_sound = True

    def _flush(self) -> None:
        lower, until_ms = self.store.lower, self._clock.now_ms() + FLUSH_MS
        if lower is None:
            return
        poll = select.poll()
        poll.register(self.movers.fd, select.POLLIN)
        while not lower.writes.is_idle and self._clock.now_ms() < until_ms:
            group = lower.writes.start_group(self._clock.now_ms(), flush=True)
            if group is not None:
                self._disk().write(group)
            poll.poll(FLUSH_TURN_MS)
            self.run_completions()

    def note_turn(self, ms: float) -> None:
        """Changes state. How long the loop was busy: status tells the longest since the last status."""
        self._longest_turn_ms = max(self._longest_turn_ms, ms)

    def next_deadline_ms(self) -> float | None:
        """Query. When `run_completions` has something to do though no mover has finished anything."""
        due_ms = self.store.next_deadline_ms()
        if self._allocate_ms == math.inf:
            return due_ms
        return self._allocate_ms if due_ms is None else min(due_ms, self._allocate_ms)

    def close(self) -> None:
        """Changes state. What waits to be written to the SSD still is, within FLUSH_MS. `disk` stays open.

        Nothing is written of a state that may contradict itself.
        """
        try:
            if self.is_sound:
                self._flush()
        finally:
            self.movers.close()
            self.slab.close()

    def status(self) -> dict[str, Any]:
        """Changes state (of the longest turn). JSON-serialisable facts for operators."""
        memory, stats = self.store.memory, self.store.stats
        classes = {}
        for slot_nbytes in memory.pool.classes:
            free, cached, reserved = memory.counts(slot_nbytes)
            classes[str(slot_nbytes)] = {"free": free, "cached": cached, "reserved": reserved}
        longest_turn_ms, self._longest_turn_ms = self._longest_turn_ms, 0.0
        return {
            "epoch": self.epoch,
            "longest_turn_ms": round(longest_turn_ms, 3),
            "pid": os.getpid(),
            "address": self._config.address,
            "uptime_s": round((self._clock.now_ms() - self._started_ms) / 1000, 1),
            "memory": {
                "capacity_nbytes": self.store.capacity_nbytes,
                "extent_nbytes": self.slab.geometry.extent_nbytes,
                "extents": self.slab.geometry.num_extents,
                "extents_ready": self.slab.extents_ready,
                "extents_unassigned": memory.pool.num_unassigned,
                "cached_nbytes": sum(int(size) * counts["cached"] for size, counts in classes.items()),
                "reserved_nbytes": sum(int(size) * counts["reserved"] for size, counts in classes.items()),
                "blocks_evicted": memory.num_evicted,
                "blocks_taken_over": self.blocks_taken_over,
                "sessions_unaccounted": len(self.store.strangers),
                "slots": classes,
            },
            "disk": self._disk_status(),
            "prefill": [
                {"fingerprint": entry.spec.fingerprint.hex()[:16], "tokens_per_s": round(1000 / ms)}
                for entry in self.store.specs[-SPECS_LISTED_MAX:]
                if (ms := self.store.watch.prefill_of(entry).ms_per_unit) is not None
            ],
            "sessions": [self._session_status(session) for session in self.store.sessions],
            "groups": [self._group_status(group) for group in self.store.filling.groups.all[-GROUPS_LISTED_MAX:]],
            "specs_served": len(self.store.specs),
            "specs": [
                {"model": entry.spec.model, "fingerprint": entry.spec.fingerprint.hex()[:16], "hash": entry.hash_kind}
                for entry in self.store.specs[-SPECS_LISTED_MAX:]
            ],
            "stats": msgspec.to_builtins(stats),
        }

    def _disk_status(self) -> dict[str, Any] | None:
        """None without one; `ready` False while its index is read."""
        disk, lower = self.disk, self.store.lower
        if disk is None:
            return None
        found: dict[str, Any] = {
            "paths": self._config.disk.path,
            "ready": lower is not None,
            "capacity_nbytes": disk.geometry.capacity_nbytes,
            "direct_io": disk.is_direct,
            "write": self._config.disk.write,
        }
        if lower is None:
            return found
        tier, writes = lower.tier, lower.writes
        counts = {size: tier.counts(size) for size in tier.pool.classes}
        capacity = disk.geometry.capacity_nbytes
        return found | {
            "extents": disk.geometry.num_extents,
            "extents_lost": lower.num_extents_lost,
            "extents_unassigned": tier.pool.num_unassigned,
            "cached_nbytes": sum(size * cached for size, (_, cached, _) in counts.items()),
            "blocks": sum(cached for _, cached, _ in counts.values()),
            "blocks_evicted": tier.num_evicted,
            "slots": {
                str(size): {"free": free, "cached": cached, "reserved": reserved}
                for size, (free, cached, reserved) in counts.items()
            },
            "queued_nbytes": writes.queued_nbytes + writes.writing_nbytes,
            "idle": writes.is_idle,
            "loading_nbytes": lower.loads.queued_nbytes,
            "read_gbps": _rounded(lower.gate.read_gbps),
            "bytes_written_ever": writes.bytes_ever,
            "drive_writes": round(writes.bytes_ever / capacity, 3),
            "write_budget_left_nbytes": lower.budget.level_nbytes if lower.budget.nbytes_a_day else None,
            "failures": self._disk().num_failures,
        }

    @staticmethod
    def _session_status(session: Session) -> dict[str, Any]:
        return {
            "id": session.id,
            "leases": len(session.leases),
            "reservations": len(session.reservations),
            "held_nbytes": session.held_nbytes,
        }

    def _group_status(self, group: Group) -> dict[str, Any]:
        spec, shards = group.entry.spec, {member.shard for member in group.members}
        return {
            "id": group.group_id,
            "model": spec.model,
            "ranks": len(group.members),
            "parts": len(shards),
            "complete": sum(shard.area for shard in shards) == spec.num_layers * spec.num_kv_heads,
            "open": len(group.open),
            "unfilled": self.store.filling.groups.unfilled[group.group_id],
        }

    def _symbols_of(self, slot: int) -> bytes:
        header = self.slab.header(slot)
        if header is None:
            return b""  # damaged: shares no token with anything
        identity = header.identity
        return block_symbols_of(identity.tokens, identity.keys_start, identity.keys_digest)

    def _extent_is_ready(self) -> None:
        self.store.add_extent(self.slab.extents_ready)
        self.slab.extents_ready += 1

    def _allocate_extents(self) -> None:
        """On a mover. All extents but the first, in order; each is reported as soon as its memory is there."""
        num_extents = self.slab.geometry.num_extents
        for extent in range(self.slab.extents_ready, num_extents):
            if self.movers.is_closing:
                return
            try:
                self.slab.allocate_extent(extent)
            except TierUnavailable as exc:
                log.error("%s; going on with %d of %d extents", exc, extent, num_extents)
                return
            self.movers.post(self._extent_is_ready)

    def _take_over(self, strangers: Iterable[int]) -> None:
        """What an earlier daemon left in the slab. Of its extents, those that hold nothing any more serve any size."""
        slab, pool = self.slab, self.store.memory.pool
        self.store.on_time(self._clock.now_ms())
        legacies = read_legacies(slab)
        used = [
            slots // SLOTS_PER_EXTENT_MAX for each in legacies for slots in (each.blocks.slots, np.array(each.reserved))
        ]
        in_use = set(np.concatenate(used).tolist()) if used else set()
        for extent in set(range(slab.geometry.num_extents)) - in_use:
            slab.tables.extents[extent] = 0
        self.blocks_taken_over = self.store.take_over(legacies, strangers)
        for extent in range(slab.extents_ready):
            if extent not in in_use:
                pool.add_extent(extent)

    def _read_index(self, disk: Disk) -> LowerTier | None:
        """On a mover. The tier that the medium's rows make; nobody else knows of it yet. None: it cannot be read."""
        try:
            return self._read_tier(disk)
        except TierUnavailable as exc:
            log.error("ssd: %s; going on without the SSD", exc)
            return None

    def _read_tier(self, disk: Disk) -> LowerTier:
        began_ms = self._clock.now_ms()
        rows = disk.rows()
        if disk.needs_rebuild:
            disk.rebuild(partial(_say_progress, SlowTicker(self._clock)))
            rows = disk.rows()
        facts = disk.facts()
        settings = LowerSettings(
            self._config.disk.write == "back",
            self._config.disk.write_budget_nbytes,
            facts.get("bytes_written", 0),
            facts.get("budget_level"),
        )
        num_extents, extent_nbytes = disk.geometry
        lower = LowerTier(extent_nbytes, num_extents, partial(_symbols_on, disk), settings)
        gc.disable()  # it would look at a growing million of nodes again and again, with the loop waiting
        try:
            num_blocks = lower.adopt(rows, disk.classes())
        finally:
            gc.freeze()  # a million nodes that stay are no business of any later collection
            gc.enable()
        trim_heap()
        took_s = (self._clock.now_ms() - began_ms) / 1000
        log.info(
            "ssd: %d blocks found blocks_per_s=%d seconds=%.2f", num_blocks, num_blocks / max(took_s, 1e-3), took_s
        )
        return lower

    def _disk_is_ready(self, disk: Disk, lower: LowerTier | None) -> None:
        if lower is None:
            return
        self.store.add_lower(lower)
        self._disk_moves = DiskMoves(lower, disk, self.slab, self.movers, self._clock.now_ms)
        self._extents_missing = [extent for extent in disk.usable_extents if lower.tier.pool.class_of(extent) is None]
        self._allocate_later(is_first=True)

    def _allocate_later(self, *, is_first: bool = False) -> None:
        assert self.disk is not None
        usable = set(self.disk.usable_extents)
        extents, self._allocate_ms = [extent for extent in self._extents_missing if extent in usable], math.inf
        job = partial(self._allocate_on_disk, self.disk, extents, is_first)
        self.movers.submit(job, self._allocated)

    def _allocate_on_disk(self, disk: Disk, extents: list[int], is_first: bool) -> list[int]:
        """On a mover. The extents for which their path has no space now."""
        missing: list[int] = []
        full: set[Path] = set()
        for extent in extents:
            path = disk.path_of(extent * SLOTS_PER_EXTENT_MAX)
            if self.movers.is_closing or path in full:
                missing.append(extent)
                continue
            try:
                disk.allocate_extent(extent)
            except TierUnavailable as exc:
                full.add(path)
                missing.append(extent)
                if is_first:
                    log.error("ssd: %s; going on with what there is", exc)
                continue
            self.movers.post(partial(self._extent_on_disk_is_ready, extent))
        return missing

    def _extent_on_disk_is_ready(self, extent: int) -> None:
        if self.store.lower is not None:
            self.store.lower.tier.add_extent(extent)

    def _allocated(self, missing: list[int]) -> None:
        """What had no space is tried again: an operator may make some."""
        self._extents_missing = missing
        if missing:
            self._allocate_ms = self._clock.now_ms() + ALLOCATE_AGAIN_MS

    def _follow_up(self) -> None:
        """What commands and completions have set in motion: transfers, and answers to those who wait."""
        self._start_transfers()
        if self._waiting:
            self._tell_progress()
        if self.store.stats.reservations_unfilled != self._unfilled_told:
            self._tell_unfilled()

    def _tell_unfilled(self) -> None:
        """Once per group: it may be that an engine's ranks never agree, and then nothing of theirs is ever stored."""
        self._unfilled_told = self.store.stats.reservations_unfilled
        groups = self.store.filling.groups
        self._groups_told &= {group.group_id for group in groups.all}
        for group in groups.all:
            if groups.unfilled[group.group_id] and group.group_id not in self._groups_told:
                self._groups_told.add(group.group_id)
                log.warning(
                    "rank group %s: blocks were given up, since the part of a rank never came: "
                    "are all its ranks attached, and do they store the same prompts? %s",
                    *(group.group_id, " ".join(f"{name}={fact}" for name, fact in self._group_status(group).items())),
                )

    def _start_transfers(self) -> None:
        for transfer in self.store.take_transfers():
            match transfer:
                case SumBlocks():
                    self.movers.submit(partial(self._sum, transfer), partial(self._summed, transfer))
                case LoadBlocks():
                    self._disk().load(transfer)
                case WriteGroup():
                    self._disk().write(transfer)

    def _disk(self) -> DiskMoves:
        assert self._disk_moves is not None, "moves between tiers without a disk"
        return self._disk_moves

    def _sum(self, transfer: SumBlocks) -> list[bytes | None]:
        """On a mover. The new state part of each slot's header; None where the header is not what was written."""
        return [
            self._summed_state(slot, transfer.entry.spec, transfer.shards, sums)
            for slot, sums in zip(transfer.slots, transfer.sums, strict=True)
        ]

    def _summed_state(
        self, slot: int, spec: KVSpec, shards: tuple[Shard, ...], sums: tuple[int | None, ...]
    ) -> bytes | None:
        header = self.slab.header(slot)
        if header is None:
            return None
        num_tokens = len(header.identity.tokens) // 4  # a writer's word, as is the size: it may be no whole rows
        if num_tokens > spec.block_tokens or header.payload_nbytes != spec.payload_nbytes(num_tokens):
            return None
        payload = self.slab.payload(self.slab.offset(slot, spec.slot_nbytes), header.payload_nbytes)
        rects = [
            Rect(shard, shard_sum(payload, spec.num_layers, spec.num_kv_heads, shard) if known is None else known)
            for shard, known in zip(shards, sums, strict=True)
        ]
        return header_state(header.generation, tuple(rects))

    def _summed(self, transfer: SumBlocks, states: list[bytes | None]) -> None:
        for slot, state in zip(transfer.slots, states, strict=True):
            if state is not None:
                self.slab.write(self.slab.offset(slot, transfer.entry.spec.slot_nbytes) + STATE_OFFSET, state)
        self.store.complete(transfer)
