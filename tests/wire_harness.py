"""A peer that keeps the grammar and no sense: messages from chance or a fuzzer's bytes, and what must hold then."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvstore import Client, KVSpec
from kvstore.clock import Clock, MonotonicClock, SimClock
from kvstore.config import config_from
from kvstore.core.layout import Header, Identity, Rect, Shard
from kvstore.core.store import QUARANTINE_MS
from kvstore.service.embedded import embedded_service
from kvstore.service.liveness import start_reading, stop_reading
from kvstore.service.prompt import Prompt
from kvstore.service.service import Service
from kvstore.spec import encode_spec
from tests.daemons import (
    BIG,
    SPEC,
    all_extents_ready,
    assert_balanced,
    chat,
    holds,
    read,
    store,
    verified,
    wait_until,
)
from tests.models import page_of
from transports import messages as wire
from transports.errors import RemoteProtocolError

NOTHING = (0, 0, 0)
STEPS_MAX = 400
NO_SPEC_ID = 60_000
ID_MAX = (1 << 63) - 1
TIMES_MS = [0.0, 5e-324, 1e-9, 1.0, wire.MS_MAX]
WAITS_MS = [0.0, 0.0, 5.0, 1000.0, wire.MS_MAX]
# Of SPEC, whose layers and heads are two each: parts that fit together, that overlap these, and that are none.
FITTING = [((0, 2), (0, 1)), ((0, 2), (1, 2))]
RANKS = [*FITTING * 4, ((0, 1), (0, 2)), ((0, 2), (0, 2)), ((1, 4095), (0, 2)), ((2, 2), (1, 0))]
SHARDS = [Shard(*each) for each in [*FITTING, ((0, 2), (0, 2)), ((0, 4), (0, 0)), ((0, 0), (0, 0)), ((0, 4095),) * 2]]
OPAQUE = KVSpec(model="o", dtype="uint8", num_layers=1, layout="x", token_nbytes=64, block_tokens=16, grain_tokens=4)


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


def small_service(held: ExitStack, clock: Clock | None = None, ssd: Path | None = None) -> Service:
    """Changes state. One whose memory is all there; `held` gives it back."""
    config: dict[str, Any] = {"memory": {"capacity": (8 if ssd else 16) << 20}}
    if ssd is not None:
        config["disk"] = {"path": [str(ssd)], "capacity": 64 << 20}
    service = embedded_service(config_from(config), clock or MonotonicClock(), held)

    def is_ready() -> bool:
        service.run_completions()
        facts = service.status()
        return all_extents_ready(facts) and (ssd is None or facts["disk"]["ready"])

    wait_until(is_ready)
    return service


class Node:
    """A small service with an honest client, whose every block is compared."""

    def __init__(self, held: ExitStack, ssd: Path | None = None) -> None:
        """Changes state."""
        self.clock = SimClock()
        self.service = small_service(held, self.clock, ssd)
        self.lock = threading.RLock()  # the client has a keeper
        self.client = Client(_Inline(self), 10_000)
        held.callback(self.client.close)
        self.cache = self.client.attach(SPEC)
        self._numbers = itertools.count()
        self.prompts: list[list[int]] = []

    def fill(self, num_prompts: int = 20) -> None:
        """Changes state. Store what memory has no room for: with an SSD, the older ones are only there."""
        self.prompts = [self.new_prompt(640) for _ in range(num_prompts)]
        for prompt in self.prompts:
            assert store(self.cache, prompt)
            wait_until(self._has_written)  # the queue of what waits is short

    def _has_written(self) -> bool:
        self.later(1000.0)
        with self.lock:
            lower = self.service.store.lower
            return lower is None or (not self.service.store.filling.sums.pins and lower.writes.is_idle)

    def new_prompt(self, num_tokens: int = 64) -> list[int]:
        """Changes state. One that was not there before."""
        return chat(next(self._numbers), num_tokens)

    @property
    def session(self) -> int:
        """Query. The honest one."""
        return int(self.cache._link.session.id)

    def dispatch(self, message: wire.Message, replies: list[wire.Reply]) -> None:
        """Changes state."""
        with self.lock:
            self.service.dispatch(message, replies.append)

    def later(self, ms: float) -> None:
        """Changes state."""
        with self.lock:
            self.clock.advance(ms)
            self.service.run_completions()

    def check(self) -> None:
        """Query."""
        with self.lock:
            self.service.store.check()
            assert_balanced(self.service.status())

    def is_settled(self) -> bool:
        """Changes state. Whether all that was under way has ended, with nothing held for anybody."""
        assert self.client.status()["available"]  # its next word: only then it says what it holds no more
        self.later(1.0)
        self.check()
        with self.lock:
            facts = self.service.status()
            lower = self.service.store.lower
            is_idle = lower is None or (lower.writes.is_idle and not lower.loads.pins)
            if self.service.store.filling.sums.pins or not is_idle:
                return False
            assert holds(facts) == NOTHING
            assert [each["id"] for each in facts["sessions"]] == [self.session]
            assert not self.service._waiting
        return True


class _Inline:
    """An Endpoint whose other end is a service that somebody else drives, too."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._replies: deque[bytes] = deque()

    def send(self, frame: bytes) -> None:
        with self._node.lock:
            self._node.service.dispatch(wire.decode(frame), lambda reply: self._replies.append(wire.encode(reply)))

    def receive(self, timeout_ms: float) -> bytes | None:
        self._node.later(min(1.0, timeout_ms))
        return self._replies.popleft() if self._replies else None

    def close(self) -> None: ...


class _Asked(NamedTuple):
    wait: wire.Wait
    due_ms: float
    replies: list[wire.Reply]


class Stranger:
    """Speaks in as many sessions as it likes, except in that of the honest client."""

    def __init__(self, node: Node, choose: random.Random, prompts: list[list[int]]) -> None:
        """Changes state. One session and two specs; it has heard of some of `prompts`."""
        self.sessions: list[int] = []
        self.spec_ids = [0] * 6 + [NO_SPEC_ID]
        self._node = node
        self._choose = choose
        self._waits: list[_Asked] = []
        self._members, self._shares = [0, 0, 1, ID_MAX], [0, 1, ID_MAX]
        self._places: list[tuple[int, int, int]] = []  # session, spec id, member: as a rank has them
        self._reserved: list[tuple[int, int]] = []  # session, reservation
        self._readings: list[int] = []  # shares under which it reads on, as another process would
        kind = node.cache._link.session.attached[SPEC.fingerprint, None].hash_kind
        self._true = [Prompt(SPEC, kind, prompt, ()) for prompt in choose.sample(prompts, min(4, len(prompts)))]
        self.say(wire.Hello(1, 1, 1), fills=False)
        self.say(wire.Attach(1, self.sessions[0], encode_spec(BIG)), fills=False)

    def say(self, message: wire.Message, *, fills: bool) -> None:
        """Changes state. A request has exactly one reply; a wait may have it later. `fills`: writes what it may."""
        if getattr(message, "session", 0) == self._node.session:
            return
        replies: list[wire.Reply] = []
        self._node.dispatch(message, replies)
        if isinstance(message, wire.Wait):
            self._waits.append(_Asked(message, self._node.clock.now_ms() + message.wait_ms, replies))
            self._require_answers()
        else:
            assert len(replies) == isinstance(message, wire.Request), message
        for reply in replies:
            assert isinstance(message, wire.Request)
            assert reply.request_id == message.request_id
            assert wire.decode(wire.encode(reply)) == reply
            self._use(message, reply, fills)

    def say_anything(self) -> None:
        """Changes state. Now and then it begins to read under a share, or stops: of that no message tells."""
        if self._choose.random() < 0.1:
            self._read_on(self._choose.choice(self._shares))
        message: wire.Message | None = self._message()
        assert message is not None
        if self._choose.random() < 0.2:
            message = mutated(self._choose, message)
        if message is not None:
            self.say(message, fills=self._choose.random() < 0.7)

    def wait(self) -> None:
        """Changes state. Time goes on: waits that are due have their answer."""
        self._node.later(self._choose.choice([1.0, 10.0, 2000.0]))
        self._require_answers()

    def leave(self) -> None:
        """Changes state. All its sessions end, as by death: then nobody waits for anything."""
        for session in self.sessions:
            with self._node.lock:
                self._node.service.store.close_session(session, self._node.clock.now_ms(), died=True)
        self._node.check()  # while it still reads
        for share in set(self._readings):
            while share in self._readings:
                self._read_on(share)
        self._node.later(QUARANTINE_MS)  # of what a session carried over and said goodbye with
        for wait, _, replies in self._waits:
            assert len(replies) == 1, wait

    def _require_answers(self) -> None:
        for wait, due_ms, replies in self._waits:
            assert len(replies) <= 1, wait
            assert replies or self._node.clock.now_ms() < due_ms, wait

    def _read_on(self, share: int) -> None:
        with self._node.lock:
            if share in self._readings:
                self._readings.remove(share)
                stop_reading(None, share)
            elif start_reading(None, self._node.service.epoch, share):
                self._readings.append(share)

    def _use(self, message: wire.Request, reply: wire.Reply, fills: bool) -> None:
        if isinstance(reply, wire.Attached) and isinstance(message, wire.Attach) and reply.member:
            self._places.append((message.session, reply.spec_id, reply.member))
        if isinstance(reply, wire.Reserved) and isinstance(message, wire.Reserve) and reply.slots:
            self._reserved.append((message.session, message.reservation))
        match reply:
            case wire.Welcome() if reply.session not in (*self.sessions, self._node.session):
                self.sessions.append(reply.session)
            case wire.Attached():
                self.spec_ids.append(reply.spec_id)
                self._members.append(reply.member)
            case wire.Acquired():
                self._shares.append(reply.share)
            case wire.Reserved() if fills and isinstance(message, wire.Reserve):
                slab, memory = self._node.service.slab, self._node.service.store.memory
                slots = np.frombuffer(reply.slots, np.uint32).tolist()
                hashes = message.hashes[len(message.hashes) - 16 * len(slots) :]
                for at, slot in enumerate(slots):
                    page = _header_of(self._choose, hashes[16 * at : 16 * at + 16], reply.generation)
                    slab.write(slab.offset(slot, memory.slot_nbytes_of(slot)), page)

    def _message(self) -> wire.Message:
        """A well-formed one whose values make no sense. Its kind is chosen first: little is drawn that is not used."""
        choose = self._choose
        session = choose.choice(self.sessions * 20 + [self.sessions[0] + 1, 0])
        kinds = [self._request, self._request, self._small_request, self._notice, self._as_rank]
        return choose.choice(kinds)(session)

    def _request(self, session: int) -> wire.Message:
        choose = self._choose
        kind = choose.choice([wire.Find, wire.Acquire, wire.Acquire, wire.Reserve, wire.Reserve, wire.Prefetch])
        spec_id, hashes, tokens, keys = self._prompt()
        if kind is wire.Reserve:
            tail = choose.choice([b"", b"", choose.randbytes(choose.choice([4, 20, 64]))])
            start, member = choose.choice([0, 1, 16, 1 << 40]), choose.choice(self._members)
            return wire.Reserve(1, session, spec_id, self._number(), hashes, start, tail, member)
        if kind is wire.Acquire:
            return wire.Acquire(1, session, spec_id, self._number(), hashes, tokens, keys, choose.random() < 0.5)
        if kind is wire.Find:
            return wire.Find(1, session, spec_id, hashes, tokens, keys)
        return wire.Prefetch(session, spec_id, hashes, tokens, keys)

    def _small_request(self, session: int) -> wire.Message:
        choose, few = self._choose, self._few
        match choose.randrange(8):
            case 0 | 1:
                summed, sums = choose.randbytes(few()), choose.randbytes(8 * choose.choice([0, few()]))
                return wire.Commit(1, session, self._number(), summed, choose.choice([False, True]), sums=sums)
            case 2 | 3:
                share = choose.choice(self._shares)
                return wire.Wait(1, session, self._number(), self._count(), choose.choice(WAITS_MS), share)
            case 4:
                return wire.Carry(1, session, [(self._number(), self._slots()) for _ in range(few() % 3)])
            case 5:
                epoch = choose.choice([0, self._node.service.epoch])
                return wire.Hello(1, few() % 2, few(), session, epoch)
            case 6:
                spec = choose.choice([SPEC, BIG, OPAQUE])
                layers, heads = (choose.choice([(0, 0), (0, 1), (0, 2), (1, 2), (5, 3)]) for _ in range(2))
                encoded = _odd_spec(choose, spec) if choose.random() < 0.5 else encode_spec(spec)
                return wire.Attach(1, session, encoded, choose.choice(["", "a", "a", "b"]), layers, heads)
            case _:
                seldom = choose.random() < 0.1
                return wire.Clear(1, session, choose.choice(self.spec_ids)) if seldom else wire.GetStatus(1)

    def _as_rank(self, session: int) -> wire.Message:
        """What ranks say who fill blocks together: mostly as they should, else hardly any would ever be whole."""
        choose = self._choose
        kind = choose.choice([wire.Attach, wire.Commit, wire.Commit, wire.Reserve, wire.Reserve])
        if kind is wire.Commit and self._reserved:
            session, number = self._reserved.pop(choose.randrange(len(self._reserved)))
            summed, sums = choose.randbytes(1 + self._few()), choose.randbytes(8 * choose.choice([0, 1, self._few()]))
            return wire.Commit(1, session, number, summed, choose.random() < 0.3, sums=sums)
        if kind is wire.Reserve and self._places:
            session, spec_id, member = choose.choice(self._places)
            if choose.random() < 0.1:
                member = choose.choice(self._members)
            chain = choose.choice([b"\xf0", b"\xf1", b"\xf0\xf1"])
            hashes = b"".join(bytes([number]) * 16 for number in chain)
            start, number = choose.choice([0, 0, 0, 16]), choose.randrange(8)
            return wire.Reserve(1, session, spec_id, number, hashes, start, b"", member)
        layers, heads = choose.choice(RANKS)
        return wire.Attach(1, session, encode_spec(SPEC), choose.choice(["r", "r", "s"]), layers, heads)

    def _notice(self, session: int) -> wire.Message:
        choose, few = self._choose, self._few
        match choose.randrange(5):
            case 0:
                return wire.Release(session, [few() for _ in range(few())])
            case 1:
                return wire.Abort(session, self._number())
            case 2:
                reason = choose.choice(["any\0thing", "payload", "header"])
                return wire.Discard(session, self._number(), self._count(), reason, choose.choice(self._shares))
            case 3 if few() == 0 and session != self.sessions[0]:
                return wire.Goodbye(session)
            case _:
                return wire.Report(session, choose.choice(self.spec_ids), few(), choose.choice(TIMES_MS), 1.0)

    def _prompt(self) -> tuple[int, bytes, bytes, list[tuple[int, bytes]]]:
        """Spec id, hashes, tokens and keys: those of a prompt that is there, or such as fit no prompt at all."""
        choose = self._choose
        if choose.random() < 0.3:
            true = choose.choice(self._true)
            return 0, true.hashes[: 16 * choose.randrange(41)], true.tokens, []
        hashes = b"".join(bytes([choose.choice([number, number, number, 5])]) * 16 for number in range(self._few()))
        tokens = choose.choice([bytes(256), choose.randbytes(1) * 4 * choose.choice([0, 1, 3, 16, 17, 40])])
        keys = [(choose.choice([0, 1, 15, 16, 1 << 20]), choose.randbytes(1) * 16) for _ in range(self._few() - 3)]
        return choose.choice(self.spec_ids), hashes, tokens, keys

    def _slots(self) -> bytes:
        """Slots, mostly such as somebody uses."""
        used = np.flatnonzero(self._node.service.slab.tables.slots["state"]).tolist()
        numbers = [self._choose.choice([*used, 0, 1, (1 << 32) - 1]) for _ in range(self._few())]
        return np.array(numbers, np.uint32).tobytes()

    def _few(self) -> int:
        return self._choose.randrange(6)

    def _number(self) -> int:
        return self._choose.choice([0, 1, 2, 3, ID_MAX])

    def _count(self) -> int:
        return self._choose.choice([0, 1, 5, 40, 1 << 40])


def _header_of(choose: random.Random, block_hash: bytes, generation: int) -> bytes:
    """Query. What a slot may begin with: rubbish, or all of a header, whose sums fit what is no block."""
    if choose.random() < 0.5:
        return choose.randbytes(64)
    tokens, zero = choose.choice([4, 4, 128]) * block_hash, bytes(16)  # other hashes mean other tokens, or no tree is
    count = len(tokens) // 4
    identity = Identity(SPEC.fingerprint, block_hash, zero, 0, tokens, count, zero, 0, count)
    shards = [choose.choice(SHARDS) for _ in range(choose.choice([0, 1, 2, 4]))]
    nbytes = choose.choice([0, 1, SPEC.block_nbytes, 1 << 63])
    return page_of(Header(identity, nbytes, generation, tuple(Rect(shard, 0) for shard in shards)))


def mutated(choose: random.Random, message: wire.Message) -> wire.AnyMessage | None:
    """Query. What a body with a wrong bit, and a digest that fits it, decodes to; None: to nothing."""
    body = bytearray(wire.encode(message)[: -wire.DIGEST_NBYTES])
    body[choose.randrange(len(body))] ^= 1 << choose.randrange(8)
    try:
        return wire.decode(wire.sealed(bytes(body)))
    except RemoteProtocolError:
        return None


def misbehave(node: Node, choose: random.Random, num_steps: int) -> None:
    """Changes state: none that stays. Each request gets one reply; every invariant holds; the honest client is served
    right, before and after."""
    prompt = node.new_prompt()
    assert store(node.cache, prompt)
    with node.cache.acquire(prompt) as hit:
        assert hit.wait() == 64
        stranger = Stranger(node, choose, [*node.prompts, prompt])
        for step in range(num_steps):
            stranger.say_anything()
            if step % 20 == 0:
                stranger.wait()
                node.check()
            if isinstance(choose, FromBytes) and choose.is_over:
                break
        node.check()
        assert verified(hit, prompt) == 64
    stranger.leave()
    prompt = node.new_prompt()
    assert store(node.cache, prompt)
    assert read(node.cache, prompt) == 64
    with node.lock:
        for spec_id in {*stranger.spec_ids} - {NO_SPEC_ID}:
            node.service.store.clear(spec_id)


def _odd_spec(choose: random.Random, spec: KVSpec) -> bytes:
    name = choose.choice(KVSpec.__struct_fields__)
    value = choose.choice([0, 1, -1, 3, 1 << 32, "", "x", "\N{GRINNING FACE}", b"\xff", None, 1.5])
    return msgspec.msgpack.encode({**msgspec.structs.asdict(spec), name: value})
