"""A peer that keeps the grammar and no sense: messages from chance or a fuzzer's bytes, and what must hold then."""

from __future__ import annotations

import random
from contextlib import ExitStack

import numpy as np

from kvstore.clock import MonotonicClock
from kvstore.config import config_from
from kvstore.core.leases import Session
from kvstore.service.embedded import embedded_service
from kvstore.service.service import Service
from tests.daemons import BIG, SPEC, all_extents_ready, assert_balanced, holds, wait_until
from transports import messages as wire
from transports.errors import RemoteProtocolError

NOTHING = (0, 0, 0)
STEPS_MAX = 400


class FromBytes(random.Random):
    """Chance that somebody else has chosen: each bit of it is a bit of `data`; zeros behind its end."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    @property
    def is_over(self) -> bool:
        """Query."""
        return self._at >= len(self._data)

    def getrandbits(self, k: int) -> int:
        count = -(-k // 8)
        piece = self._data[self._at : self._at + count].ljust(count, b"\0")
        self._at += count
        return int.from_bytes(piece, "little") >> (8 * count - k)

    def random(self) -> float:
        return self.getrandbits(53) / (1 << 53)


def small_service(held: ExitStack) -> Service:
    """Changes state. One whose memory is all there; `held` gives it back."""
    service = embedded_service(config_from({"memory": {"capacity": 16 << 20}}), MonotonicClock(), held)

    def is_ready() -> bool:
        service.run_completions()
        return all_extents_ready(service.status())

    wait_until(is_ready)
    return service


def hostile_message(choose: random.Random, session: int, spec_ids: list[int]) -> wire.Message:
    """A well-formed message whose values make no sense."""

    def few() -> int:
        return choose.randrange(6)

    hashes = b"".join(bytes([number if choose.random() < 0.8 else few()]) * 16 for number in range(few()))
    tokens = choose.choice([bytes(256), choose.randbytes(4 * choose.choice([0, 1, 3, 16, 17, 40]))])
    keys = [(choose.choice([0, 1, 15, 16, 1 << 20]), choose.randbytes(choose.randrange(17))) for _ in range(few() - 2)]
    tail = choose.choice([b"", b"", choose.randbytes(choose.choice([4, 20, 64, 4096]))])
    session = choose.choice([session] * 20 + [session + 1, 0])
    spec_id = choose.choice(spec_ids)
    number = choose.choice([0, 1, 2, 3, (1 << 63) - 1])
    flags = choose.randbytes(few())
    return choose.choice(
        [
            wire.Find(1, session, spec_id, hashes, tokens, keys),
            wire.Acquire(1, session, spec_id, number, hashes, tokens, keys),
            wire.Reserve(1, session, spec_id, number, hashes, choose.choice([0, 1, 16, 1 << 40]), tail),
            wire.Commit(1, session, number, flags, bool(few() % 2), 0, None, None),
            wire.Release(session, [few() for _ in range(few())]),
            wire.Abort(session, number),
            wire.Discard(session, number, choose.choice([0, 1, 5, 1 << 40]), choose.choice(["any\0thing", "payload"])),
            wire.Report(session, spec_id, few(), 1.0, 1.0),
            wire.Prefetch(session, spec_id, hashes, tokens, keys),
            wire.Wait(1, session, number, few(), 0.0),
            wire.Carry(1, session, [(number, choose.randbytes(4 * choose.randrange(4))) for _ in range(few() % 3)]),
            wire.GetStatus(1),
            *([wire.Clear(1, session, spec_id)] if few() == 0 else []),
        ]
    )


def mutated(choose: random.Random, message: wire.Message) -> wire.AnyMessage | None:
    """Query. What a body with a wrong bit, and a digest that fits it, decodes to; None: to nothing."""
    body = bytearray(wire.encode(message)[: -wire.DIGEST_NBYTES])
    body[choose.randrange(len(body))] ^= 1 << choose.randrange(8)
    try:
        return wire.decode(wire.sealed(bytes(body)))
    except RemoteProtocolError:
        return None


def misbehave(service: Service, choose: random.Random, num_steps: int) -> None:
    """Changes state: none that stays. Each request gets one reply; every invariant holds; an honest block is there."""
    honest, rude = service.store.open_session(), service.store.open_session()
    assert honest is not None
    assert rude is not None
    entries = [service.store.attach(spec) for spec in (SPEC, BIG)]
    grant = service.store.reserve(honest.id, entries[0].spec_id, 1, b"h" * 16, 0)
    for step in range(num_steps):
        message: wire.Message | None = hostile_message(choose, rude.id, [entry.spec_id for entry in entries] * 5 + [77])
        if step % 5 == 0:
            assert message is not None
            message = mutated(choose, message)
        if message is not None and not _is_honests(message, honest):
            _dispatch(service, message, choose, fills=step % 3 > 0)
        if step % 20 == 0:
            _check(service)
        if isinstance(choose, FromBytes) and choose.is_over:
            break
    _check(service)
    assert honest.reservations[1].slots.tobytes() == grant.slots
    assert service.store.commit(honest.id, 1, b"\1") == 1
    for session in (honest, rude):
        service.store.close_session(session.id, 0.0)
    for entry in entries:
        service.store.clear(entry.spec_id)


def settle(service: Service) -> bool:
    """Changes state. Whether all that was under way has ended, with nothing held for anybody."""
    service.run_completions()
    if service.store._summing:
        return False
    _check(service)
    assert holds(service.status()) == NOTHING
    return True


def _is_honests(message: wire.Message, honest: Session) -> bool:
    """What would be another peer's word, or opens a session of its own."""
    if isinstance(message, wire.Reply | wire.Hello | wire.Attach):
        return True
    return getattr(message, "session", 0) == honest.id


def _dispatch(service: Service, message: wire.Message, choose: random.Random, *, fills: bool) -> None:
    replies: list[wire.Reply] = []
    service.dispatch(message, replies.append)
    service.run_completions()  # a wait of no time is answered by then
    if not (isinstance(message, wire.Wait) and message.wait_ms):
        assert len(replies) == isinstance(message, wire.Request), message
    for reply in replies:
        assert wire.decode(wire.encode(reply)) == reply
        if fills and isinstance(reply, wire.Reserved):
            for slot in np.frombuffer(reply.slots, np.uint32).tolist():
                size = service.store.memory.slot_nbytes_of(slot)
                service.slab.write(service.slab.offset(slot, size), choose.randbytes(64))


def _check(service: Service) -> None:
    service.store.check()
    assert_balanced(service.status())
