"""The connector API: what an engine's adapter calls. Only `connect`, `open` and `attach` raise KVStoreError."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kvstore.clock import MonotonicClock
from kvstore.config import Config, config_from, load_config
from kvstore.errors import ConfigInvalid
from kvstore.service.embedded import EmbeddedEndpoint
from kvstore.service.hit import Hit
from kvstore.service.hold import Hold
from kvstore.service.link import Link, Session
from kvstore.service.prompt import ExtraKeys, Prompt
from kvstore.service.reservation import Reservation
from kvstore.spec import KVSpec
from radix import HashKind
from transports import messages as wire
from transports.errors import AddressInvalid
from transports.network import Endpoint
from transports.zeromq import ZmqEndpoint

log = logging.getLogger("kvstore")
REQUESTS_REMEMBERED_MAX = 4096
DEADLINE_MS = 200.0


class Client:
    """A session with a daemon, or with a store in this process. Thread safe."""

    def __init__(self, endpoint: Endpoint, deadline_ms: float) -> None:
        """Changes state. Takes over `endpoint`. DaemonUnavailable when nobody answers."""
        self._link = Link(endpoint, MonotonicClock(), deadline_ms)

    def attach(self, spec: KVSpec) -> Cache:
        """Changes state. The cache of one kind of KV. SpecMismatch when the spec is invalid."""
        spec.validate()
        self._link.attach(spec)
        return Cache(self, self._link, spec)

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
    """One kind of KV (a KVSpec) in the store: look up, load, save. Get it from `Client.attach`."""

    def __init__(self, client: Client, link: Link, spec: KVSpec) -> None:
        self.spec = spec
        self._client = client  # which lives as long as its caches do
        self._link = link
        self._requests: OrderedDict[str, tuple[bytes, Hit]] = OrderedDict()
        self._requests_lock = threading.Lock()

    def match(self, token_ids: Any, extra_keys: ExtraKeys = ()) -> int:
        """Query. Tokens cached now; no pin, no promise. 0 on any fault. ValueError, TypeError: not token ids."""
        asked = self._prompt(token_ids, extra_keys)
        if asked is None:
            return 0
        session, spec_id, prompt = asked

        def make(request_id: int) -> wire.Request:
            return wire.Find(request_id, session.id, spec_id, prompt.hashes, prompt.tokens, prompt.key_facts)

        reply = self._link.ask(wire.Found, make)
        return min(reply.num_tokens, prompt.num_tokens) if reply is not None else 0

    def acquire(
        self,
        token_ids: Any,
        extra_keys: ExtraKeys = (),
        deadline_ms: float | None = None,
        request_id: str | None = None,
        wait: bool = True,
    ) -> Hit:
        """Changes state. Lease the longest cached prefix, in one round trip. Never raises for the store's sake.

        `wait=False` only sends: `hit.settled` turns true later. While the hit of a `request_id` lives, asking again
        with the same tokens gives that hit. ValueError, TypeError: not token ids.
        """
        asked = self._prompt(token_ids, extra_keys)
        if asked is None:
            return Hit(None, None, None)
        session, spec_id, prompt = asked
        known = self._known_hit(request_id, prompt)
        if known is not None:
            return known
        hold = Hold(self._link, session, self._link.new_id(), reservation=False)

        def make(number: int) -> wire.Request:
            return wire.Acquire(
                number, session.id, spec_id, hold.number, prompt.hashes, prompt.tokens, prompt.key_facts
            )

        if wait:
            hit = Hit(prompt, hold, None)
            hit.settle_with(self._link.ask(wire.Acquired, make, deadline_ms, lambda: prompt.whole_identities))
        else:
            hit = Hit(prompt, hold, self._link.ask_later(make, deadline_ms))
        if request_id is not None:
            self._remember(request_id, prompt, hit)
        return hit

    def reserve(self, token_ids: Any, start: int = 0, extra_keys: ExtraKeys = ()) -> Reservation:
        """Changes state. Room for the blocks of the prompt that are not cached; as many as fit, from the front.

        `start`: the caller has no KV before this token. ValueError, TypeError: not token ids, or a negative start.
        """
        if start < 0:
            raise ValueError(f"start={start} is negative")
        asked = self._prompt(token_ids, extra_keys)
        if asked is None:
            return Reservation(None, None, len(token_ids), b"", 0, False)
        session, spec_id, prompt = asked
        hold = Hold(self._link, session, self._link.new_id(), reservation=True)
        grant = self._grant(session, spec_id, hold.number, prompt, start, prompt.num_blocks)
        if grant is not None and not grant.slots and grant.available and grant.start >= start:
            # Not all fits: ask once more for what does. Somebody else may have been faster; then there is no room.
            fits = grant.start // self.spec.block_tokens + grant.available
            grant = self._grant(session, spec_id, hold.number, prompt, start, fits)
        if grant is not None and grant.slots:
            sums = session.welcome.checksums
            return Reservation(prompt, hold, grant.start, grant.slots, grant.generation, sums)
        hold.let_go()
        earlier = grant is not None and not grant.slots and grant.start < start
        return Reservation(None, None, grant.start if grant and earlier else len(token_ids), b"", 0, False)

    def prefetch(self, token_ids: Any, extra_keys: ExtraKeys = ()) -> None:
        """Changes state. Say that this prompt comes soon. Costs one enqueue."""
        asked = self._prompt(token_ids, extra_keys)
        if asked is not None:
            session, spec_id, prompt = asked
            self._link.notify(wire.Prefetch(session.id, spec_id, prompt.hashes))

    def clear(self) -> None:
        """Changes state. Forget every block of this spec. Blocks under a lease go when it ends."""
        session = self._link.session
        attached = session.attached.get(self.spec.fingerprint)
        if attached is not None:
            spec_id = attached.spec_id
            self._link.ask(wire.Done, lambda request_id: wire.Clear(request_id, session.id, spec_id))

    def report(
        self,
        prefill_tokens: int | None = None,
        prefill_ms: float | None = None,
        ttft_ms: float | None = None,
    ) -> None:
        """Changes state. Tell the store what the engine measured. ValueError: a negative or boundless number."""
        for name, value in (("prefill_tokens", prefill_tokens), ("prefill_ms", prefill_ms), ("ttft_ms", ttft_ms)):
            if value is not None and not 0 <= value <= wire.MS_MAX:
                raise ValueError(f"{name}={value} is not within 0..{wire.MS_MAX:g}")
        session = self._link.session
        attached = session.attached.get(self.spec.fingerprint)
        if attached is not None:
            self._link.notify(wire.Report(session.id, attached.spec_id, prefill_tokens, prefill_ms, ttft_ms))

    def _prompt(self, token_ids: Any, extra_keys: ExtraKeys) -> tuple[Session, int, Prompt] | None:
        """The prompt, hashed as the daemon wants it; None without hashing when there is no daemon to ask."""
        if not self._link.usable:
            return None
        session = self._link.session
        attached = session.attached.get(self.spec.fingerprint)
        if attached is None:
            return None
        return session, attached.spec_id, Prompt(self.spec, HashKind(attached.hash_kind), token_ids, extra_keys)

    def _grant(
        self, session: Session, spec_id: int, number: int, prompt: Prompt, start: int, num_blocks: int
    ) -> wire.Reserved | None:
        hashes = prompt.hashes[: 16 * num_blocks]
        tail = prompt.tail if num_blocks == prompt.num_blocks else b""

        def make(request_id: int) -> wire.Request:
            return wire.Reserve(request_id, session.id, spec_id, number, hashes, start, tail)

        return self._link.ask(wire.Reserved, make, meanwhile=lambda: prompt.identities)

    def _known_hit(self, request_id: str | None, prompt: Prompt) -> Hit | None:
        if request_id is None:
            return None
        with self._requests_lock:
            hashes, hit = self._requests.get(request_id, (b"", None))
            return hit if hit is not None and not hit.is_over and hashes == prompt.hashes else None

    def _remember(self, request_id: str, prompt: Prompt, hit: Hit) -> None:
        with self._requests_lock:
            self._requests[request_id] = prompt.hashes, hit
            self._requests.move_to_end(request_id)
            while len(self._requests) > REQUESTS_REMEMBERED_MAX:
                self._requests.popitem(last=False)


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
