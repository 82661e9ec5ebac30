"""What a daemon and an embedded store have in common: messages in, one reply each, and the machine behind the core."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kvstore.clock import Clock
from kvstore.config import Config
from kvstore.core.layout import STATE_OFFSET, Rect, header_state
from kvstore.core.leases import Session
from kvstore.core.slots import extent_nbytes_for
from kvstore.core.store import Query, Store, SumBlocks
from kvstore.errors import DaemonUnavailable, KVStoreError, SessionLost, TierUnavailable
from kvstore.media.memory import Geometry, Slab
from kvstore.service.movers import Movers
from kvstore.spec import KVSpec, decode_spec
from radix import block_symbols_of
from transports import messages as wire

log = logging.getLogger("kvstore")
NUM_MOVERS = 2
SPECS_LISTED_MAX = 64  # of status, the newest ones
SenderPid = Callable[[], int | None]


def geometry_for(capacity_nbytes: int) -> Geometry:
    """Query. How a slab of this capacity is cut; the capacity is rounded down to whole extents."""
    extent_nbytes = extent_nbytes_for(capacity_nbytes)
    return Geometry(capacity_nbytes // extent_nbytes, extent_nbytes)


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
        on_open: Callable[[Session, int | None], None] | None = None,
        is_held: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Changes state. Takes over `slab`. Usable at once with the first extent; the others follow in the background.

        `on_open` is told each new session and its pid, for whoever watches processes. `is_held`: see
        `Store.open_session`.
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
        )
        slab.allocate_extent(0)
        self._extent_is_ready()
        self.movers = Movers(NUM_MOVERS)
        self.movers.submit(self._allocate_extents, lambda _: None)

    # Messages

    def dispatch(
        self, message: wire.Message, send: Callable[[wire.Reply], None], sender_pid: SenderPid = lambda: None
    ) -> None:
        """Changes state. A request gets exactly one reply, also when its handler raises; a notice gets none."""
        if not isinstance(message, wire.Request):
            self._notice(message)
            return
        reply: wire.Reply = wire.Failed(message.request_id, KVStoreError.code, "the daemon failed while answering")
        try:
            reply = self._answer(message, sender_pid)
        except KVStoreError as exc:
            reply = wire.Failed(message.request_id, exc.code, str(exc)[:4096])
        finally:  # an error that is not ours stops the daemon, but not before the client has its answer
            send(reply)
        if isinstance(message, wire.Commit) and isinstance(reply, wire.Committed):
            self.store.commit(message.session, message.reservation, message.summed, keep=message.keep)
        self._start_transfers()

    def _answer(self, message: wire.Request, sender_pid: SenderPid) -> wire.Reply:
        request_id, store = message.request_id, self.store
        match message:
            case wire.Hello():
                return self._hello(message, sender_pid)
            case wire.Attach():
                store.session(message.session)
                entry = store.attach(decode_spec(message.spec))
                return wire.Attached(request_id, entry.spec_id, entry.hash_kind)
            case wire.Find():
                store.session(message.session)
                query = Query(message.hashes, message.tokens, message.keys)
                return wire.Found(request_id, store.find(message.spec_id, query))
            case wire.Acquire():
                query = Query(message.hashes, message.tokens, message.keys)
                got = store.acquire(message.session, message.spec_id, message.lease, query)
                return wire.Acquired(request_id, got.num_tokens, got.slots)
            case wire.Reserve():
                grant = store.reserve(
                    message.session, message.spec_id, message.reservation, message.hashes, message.start, message.tail
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
            case wire.GetStatus():
                return wire.State(request_id, json.dumps(self.status()).encode())
        raise AssertionError(f"{type(message).__name__} is a request without a handler")

    def _notice(self, message: wire.Message) -> None:
        try:
            match message:
                case wire.Release():
                    self.store.release(message.session, message.leases)
                case wire.Abort():
                    self.store.abort(message.session, message.reservation)
                case wire.Discard():
                    self.store.discard(message.session, message.lease, message.block, message.reason)
                case wire.Report():
                    self.store.report(message.prefill_tokens, message.prefill_ms, message.ttft_ms)
                case wire.Goodbye():
                    self.store.close_session(message.session, self._clock.now_ms())
        except SessionLost:
            return  # of a session that has ended: what it held is free already

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
        """Changes state. What the movers have finished."""
        self.movers.run_completions()
        self._start_transfers()

    def close(self) -> None:
        """Changes state."""
        self.movers.close()
        self.slab.close()

    def status(self) -> dict[str, Any]:
        """Query. JSON-serialisable facts for operators."""
        memory, stats = self.store.memory, self.store.stats
        classes = {}
        for slot_nbytes in memory.pool.classes:
            free, cached, reserved = memory.counts(slot_nbytes)
            classes[str(slot_nbytes)] = {"free": free, "cached": cached, "reserved": reserved}
        return {
            "epoch": self.epoch,
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
                "slots": classes,
            },
            "sessions": [self._session_status(session) for session in self.store.sessions],
            "specs_served": len(self.store.specs),
            "specs": [
                {"model": entry.spec.model, "fingerprint": entry.spec.fingerprint.hex()[:16], "hash": entry.hash_kind}
                for entry in self.store.specs[-SPECS_LISTED_MAX:]
            ],
            "stats": msgspec.to_builtins(stats),
        }

    @staticmethod
    def _session_status(session: Session) -> dict[str, Any]:
        return {
            "id": session.id,
            "leases": len(session.leases),
            "reservations": len(session.reservations),
            "held_nbytes": session.held_nbytes,
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
        for extent in range(1, num_extents):
            if self.movers.is_closing:
                return
            try:
                self.slab.allocate_extent(extent)
            except TierUnavailable as exc:
                log.error("%s; going on with %d of %d extents", exc, extent, num_extents)
                return
            self.movers.post(self._extent_is_ready)

    def _start_transfers(self) -> None:
        for transfer in self.store.take_transfers():
            self.movers.submit(partial(self._sum, transfer), partial(self._summed, transfer))

    def _sum(self, transfer: SumBlocks) -> list[bytes | None]:
        """On a mover. The new state part of each slot's header; None where the header is not what was written."""
        return [self._summed_state(slot, transfer.entry.spec) for slot in transfer.slots]

    def _summed_state(self, slot: int, spec: KVSpec) -> bytes | None:
        header = self.slab.header(slot)
        if header is None or header.payload_nbytes > spec.block_nbytes:
            return None
        payload = self.slab.payload(self.slab.offset(slot, spec.slot_nbytes), header.payload_nbytes)
        rect = Rect((0, spec.num_layers), (0, spec.num_kv_heads), xxhash.xxh3_64_intdigest(payload.data))
        return header_state(header.generation, (rect,))

    def _summed(self, transfer: SumBlocks, states: list[bytes | None]) -> None:
        for slot, state in zip(transfer.slots, states, strict=True):
            if state is not None:
                self.slab.write(self.slab.offset(slot, transfer.entry.spec.slot_nbytes) + STATE_OFFSET, state)
        self.store.complete(transfer)
