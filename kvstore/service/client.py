"""The connector API: what an engine's adapter calls. Only `connect`, `open` and `attach` raise KVStoreError."""

from __future__ import annotations

import json
import logging
import operator
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from kvstore.clock import MonotonicClock
from kvstore.config import Config, config_from, load_config
from kvstore.core.layout import Shard
from kvstore.errors import ConfigInvalid
from kvstore.ranks import RankGroup
from kvstore.service.embedded import EmbeddedEndpoint
from kvstore.service.hit import Hit
from kvstore.service.hold import Hold
from kvstore.service.link import LEASE, RESERVATION, Attached, Attachment, Link, Session
from kvstore.service.prompt import ExtraKeys, Prompt, RecentPrompts
from kvstore.service.reservation import Reservation, bounded
from kvstore.service.ticket import decode_ticket
from kvstore.spec import KVSpec
from radix import HASH_NBYTES
from transports import messages as wire
from transports.errors import AddressInvalid
from transports.messages import TOKENS_MAX
from transports.network import Endpoint
from transports.zeromq import ZmqEndpoint

log = logging.getLogger("kvstore")
DEADLINE_MS = 200.0


class Client:
    """A session with a daemon, or with a store in this process. Thread safe."""

    def __init__(self, endpoint: Endpoint, deadline_ms: float) -> None:
        """Changes state. Takes over `endpoint`. DaemonUnavailable when nobody answers."""
        self._link = Link(endpoint, MonotonicClock(), deadline_ms)

    def attach(self, spec: KVSpec, group: RankGroup | None = None) -> Cache:
        """Changes state. The cache of one kind of KV; with `group`, of a rank's part of it.

        SpecMismatch when the spec is invalid, or the part does not go together with those of the group's other ranks.
        """
        spec.validate()
        if group is not None:
            group.validate(spec)
        attachment = Attachment(spec, group)
        self._link.attach(attachment)
        return Cache(self, self._link, attachment)

    def status(self) -> dict[str, Any]:
        """Query. Facts of the client and, while it answers, of the daemon. JSON-serialisable; never raises."""
        link = self._link
        reply = link.ask(wire.State, wire.GetStatus)
        daemon = json.loads(reply.json) if reply is not None else None
        return {
            "available": daemon is not None,
            "client": {
                "session": link.session.id,
                "deadline_ms": link.deadline_ms,
                "deadlines_missed": link.num_deadlines_missed,
                "reconnects": link.num_reconnects,
            },
            "daemon": daemon,
        }

    def close(self) -> None:
        """Changes state. End the session; arrays that are alive stay valid and end it when they go. Idempotent."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_link"):
            self._link.abandon()


class Cache:
    """One kind of KV (a KVSpec) in the store: look up, load, save. Get it from `Client.attach`.

    A rank's (`group`) gives and takes arrays of that rank's part: `[l, 2, h, T, D]` of its layers and heads.
    """

    def __init__(self, client: Client, link: Link, attachment: Attachment) -> None:
        self.spec, self.group = attachment
        self._key = attachment.key
        self._client = client  # which lives as long as its caches do
        self._link = link
        self._requests: WeakValueDictionary[str, Hit] = WeakValueDictionary()  # the caller's hits, by request id
        self._recent = RecentPrompts()

    def match(self, token_ids: Any, extra_keys: ExtraKeys = ()) -> int:
        """Query. Tokens cached now; no pin, no promise. 0 on any fault. ValueError, TypeError: not token ids."""
        asked = self._prompt(token_ids, extra_keys)
        if asked is None:
            return 0
        _, at, prompt = asked

        def make(request_id: int) -> wire.Request:
            return wire.Find(request_id, at.session, at.spec_id, prompt.hashes, prompt.tokens, prompt.key_facts)

        reply = self._link.ask(wire.Found, make)
        return min(reply.num_tokens, prompt.num_tokens) if reply is not None else 0

    def acquire(
        self,
        token_ids: Any,
        extra_keys: ExtraKeys = (),
        deadline_ms: float | None = None,
        request_id: str | None = None,
        wait: bool = True,
        shared: bool = False,
    ) -> Hit:
        """Changes state. Lease the longest cached prefix, in one round trip. Never raises for the store's sake.

        `wait=False` only sends: `hit.settled` turns true later. While the hit of a `request_id` lives, asking again
        with the same tokens gives that hit. `shared`: the hit gets a `ticket`, with which other processes read it.
        ValueError, TypeError: not token ids.
        """
        asked = self._prompt(token_ids, extra_keys)
        if asked is None:
            return Hit(None, None, None)
        session, at, prompt = asked
        known = self._known_hit(request_id, prompt, shared)
        if known is not None:
            return known
        hold = Hold(self._client, self._link, session, LEASE)

        def make(number: int) -> wire.Request:
            return wire.Acquire(
                number, at.session, at.spec_id, hold.number, prompt.hashes, prompt.tokens, prompt.key_facts, shared
            )

        hit = Hit(prompt, hold, self._shard, is_shared=shared)
        if wait:
            hit.settle_with(self._link.ask(wire.Acquired, make, deadline_ms, lambda: prompt.whole_identities))
        else:
            hit.settle_later(self._link.ask_later(make, deadline_ms))
        if request_id is not None:
            self._requests[request_id] = hit
        return hit

    def redeem(self, ticket: bytes) -> Hit:
        """Changes state. Read what another process has leased: the same tokens, without asking the daemon.

        `ticket`: of its `hit.ticket`. The blocks stay for as long as this hit or an array of it lives, also when the
        other one has ended by then. A miss where it had ended before, and for a ticket of another daemon or spec, or
        of nothing. TypeError: no bytes.
        """
        session, known = self._link.session, decode_ticket(ticket)
        at = session.attached.get(self._key)
        if known is None or at is None or not self._link.is_open:
            return Hit(None, None, None)
        if (known.epoch, known.fingerprint) != (session.welcome.epoch, self.spec.fingerprint):
            return Hit(None, None, None)
        try:
            prompt = Prompt(self.spec, at.hash_kind, np.frombuffer(known.tokens, "<u4"), known.keys, known.hashes)
        except ValueError:  # sealed as it should be, and yet of tokens or keys that cannot be
            return Hit(None, None, None)
        hold = Hold(self._client, self._link, session)
        hit = Hit(prompt, hold, self._shard, is_shared=True)
        is_there = hold.read_under(known.share)
        hit.settle_with(wire.Acquired(0, known.num_tokens, known.slots, known.ready, known.share) if is_there else None)
        return hit

    def reserve(self, token_ids: Any, start: int = 0, extra_keys: ExtraKeys = ()) -> Reservation:
        """Changes state. Room for the blocks of the prompt that are not cached; as many as fit, from the front.

        Ranks of a group that reserve the same prompt get the same blocks, each its part; they are cached once all parts
        are committed. A rank whose part another one fills already (MLA, replicated heads) gets none. `start`: the
        caller has no KV before this token. ValueError, TypeError: not token ids, or a negative start.
        """
        start = min(operator.index(start), TOKENS_MAX)
        if start < 0:
            raise ValueError(f"start={start} is negative")
        asked = self._prompt(token_ids, extra_keys)
        if asked is None:
            return Reservation(None, None, self._shard, len(token_ids), b"", 0)
        session, at, prompt = asked
        hold = Hold(self._client, self._link, session, RESERVATION)
        grant = None
        try:
            grant = self._grant(at, hold.number, prompt, start)
        finally:  # also when the caller is interrupted while it waits: nothing stays reserved
            if grant is None or not grant.slots:
                hold.let_go()
        if grant is not None and grant.slots:
            return Reservation(prompt, hold, self._shard, grant.start, grant.slots, grant.generation)
        earlier = grant is not None and grant.start < start
        end = grant.start if grant and earlier else len(token_ids)
        return Reservation(None, None, self._shard, end, b"", 0)

    def prefetch(self, token_ids: Any, extra_keys: ExtraKeys = ()) -> None:
        """Changes state. Say that this prompt comes soon: blocks that are only in a lower tier are brought up, when
        nobody waits for others. ValueError, TypeError: not token ids."""
        asked = self._prompt(token_ids, extra_keys)
        if asked is not None:
            _, at, prompt = asked
            self._link.notify(wire.Prefetch(at.session, at.spec_id, prompt.hashes, prompt.tokens, prompt.key_facts))

    def clear(self) -> None:
        """Changes state. Forget every block of this spec. Blocks under a lease go when it ends."""
        at = self._link.session.attached.get(self._key)
        if at is not None:
            self._link.ask(wire.Done, lambda request_id: wire.Clear(request_id, at.session, at.spec_id))

    def report(
        self,
        prefill_tokens: int | None = None,
        prefill_ms: float | None = None,
        ttft_ms: float | None = None,
    ) -> None:
        """Changes state. Tell the store what the engine measured. What is no number within bounds is left out."""
        at = self._link.session.attached.get(self._key)
        if at is not None:
            tokens = bounded(prefill_tokens, 0, wire.MS_MAX)
            times = (bounded(value, 0, wire.MS_MAX) for value in (prefill_ms, ttft_ms))
            count = None if tokens is None else int(tokens)
            self._link.notify(wire.Report(at.session, at.spec_id, count, *times))

    def _prompt(self, token_ids: Any, extra_keys: ExtraKeys) -> tuple[Session, Attached, Prompt] | None:
        """The prompt, hashed as the daemon wants it; None without hashing when there is no daemon to ask."""
        if not self._link.usable:
            return None
        session = self._link.session
        attached = session.attached.get(self._key)
        if attached is None:
            return None
        prompt = Prompt(self.spec, attached.hash_kind, token_ids, extra_keys)
        return session, attached, self._recent.met(prompt)

    def _grant(self, at: Attached, number: int, prompt: Prompt, start: int) -> wire.Reserved | None:
        """Slots for all that is missing; if that is too much, for as much as fits. Both within one deadline."""
        due_ms = self._link.due_ms()
        grant = self._ask_grant(at, number, prompt, start, prompt.num_blocks, due_ms)
        if grant is None or grant.slots or not grant.available or grant.start < start or at.member:
            return grant
        # Somebody else may be faster than this second question; then there is no room.
        fits = grant.start // self.spec.block_tokens + grant.available
        return self._ask_grant(at, number, prompt, start, fits, due_ms)

    def _ask_grant(
        self, at: Attached, number: int, prompt: Prompt, start: int, num_blocks: int, due_ms: float
    ) -> wire.Reserved | None:
        hashes = prompt.hashes[: HASH_NBYTES * num_blocks]
        tail = prompt.tail if num_blocks == prompt.num_blocks else b""

        def make(request_id: int) -> wire.Request:
            return wire.Reserve(request_id, at.session, at.spec_id, number, hashes, start, tail, at.member)

        return self._link.ask(wire.Reserved, make, due_ms - self._link.now_ms(), lambda: prompt.whole_identities)

    @property
    def _shard(self) -> Shard | None:
        return None if self.group is None else self.group.shard

    def _known_hit(self, request_id: str | None, prompt: Prompt, shared: bool) -> Hit | None:
        hit = self._requests.get(request_id) if request_id is not None else None
        if hit is None or hit.is_over or hit.prompt.hashes != prompt.hashes:
            return None
        return hit if hit.is_shared or not shared else None


def connect(address: str, deadline_ms: float = DEADLINE_MS) -> Client:
    """Changes state. A client of the daemon at `address` (ipc:///absolute/path).

    `deadline_ms`: longest time any later call may take. DaemonUnavailable if nobody answers; ConfigInvalid for an
    address that cannot be one.
    """
    try:
        endpoint = ZmqEndpoint(address)
    except AddressInvalid as exc:
        raise ConfigInvalid(str(exc)) from exc
    return Client(endpoint, deadline_ms)


def open_embedded(config: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Client:
    """Changes state. A store inside this process, with the interface of `connect` and no daemon.

    `config`: a Config, its values as nested mappings, or the path of a TOML file. ConfigInvalid, TierUnavailable.
    """
    if isinstance(config, Mapping):
        config = config_from(config)
    elif not isinstance(config, Config):
        config = load_config(config)
    return Client(EmbeddedEndpoint(config), DEADLINE_MS)
