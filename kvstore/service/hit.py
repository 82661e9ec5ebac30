"""What `acquire` answers: leased blocks, each checked against the prompt before it counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType

import numpy as np

from kvstore.core.layout import HEADER_NBYTES, STATE_OFFSET, Shard, identity_bytes, parse_header, parse_state
from kvstore.core.shards import are_right
from kvstore.ranks import whole_of
from kvstore.service.hold import Array, Hold
from kvstore.service.link import Pending, bounded_wait_ms
from kvstore.service.prompt import Prompt
from kvstore.service.ticket import FORMAT, Ticket, encode_ticket
from radix import block_symbols_of, common_tokens
from transports import messages as wire

SUMMED_NBYTES = 2 << 20  # at a time, where payloads are summed: the caller's copy then finds them in the cache
SLICE_MS = 2.0  # so long one waiting thread has the connection for itself


class Block:
    """A verified block. `array`: read-only, on the slab, `[L, 2, H, T, D]` (KVSpec.array_shape) with T = num_tokens.

    Of a rank's hit, its layers and heads of that.
    """

    __slots__ = ("_hold", "_offset", "_prompt", "_shard", "_stored_tokens", "num_tokens", "start")

    def __init__(self, hit: Hit, number: int) -> None:
        self._prompt = hit.prompt
        self._hold = hit.hold
        self._shard = hit.shard
        self._offset = hit.offsets[number]
        self._stored_tokens = hit.stored_tokens[number]
        self.start = number * hit.prompt.spec.block_tokens
        self.num_tokens = min(hit.verified_tokens - self.start, hit.prompt.spec.block_tokens)

    @property
    def array(self) -> Array:
        """The block's bytes.

        The block stays leased while this array or any view of it lives. ValueError after release.
        """
        spec, stored = self._prompt.spec, self._stored_tokens
        array = self._hold.lend(
            self._offset, spec.payload_nbytes(stored), spec.numpy_dtype, spec.array_shape(stored), writeable=False
        )
        if spec.is_opaque:
            return array[: spec.payload_nbytes(self.num_tokens)]
        return part_of(array, self._shard)[:, :, :, : self.num_tokens]


def part_of(array: Array, shard: Shard | None) -> Array:
    """Query. A rank's view of a block, `[L, 2, H, T, D]`; None is all of it, in any layout."""
    if shard is None or array.ndim == 1:
        return array
    (first_layer, end_layer), (first_head, end_head) = shard
    return array[first_layer:end_layer, :, first_head:end_head]


class Hit:
    """The longest cached prefix of a prompt, leased. Use it as a context manager, or call `release`.

    Every fault (no daemon, deadline, damaged block) makes it shorter, down to 0 tokens; nothing raises.
    """

    def __init__(
        self, prompt: Prompt | None, hold: Hold | None, shard: Shard | None, *, is_shared: bool = False
    ) -> None:
        """Without a prompt: a miss, known before anything was asked. Else `settle_with` or `settle_later` is next.

        `shard`: what of each block is looked at; None for all of it. `is_shared`: whether it is to have a ticket.
        """
        self.offsets: list[int] = []  # of the leased slots in the slab
        self.shard = shard
        self.is_shared = is_shared
        self._share = 0
        self._prompt = prompt
        self._hold = hold
        self._pending: Pending | None = None
        self._planned = 0
        self._slots = b""  # u32le
        self._ready = 0  # blocks whose bytes are in memory
        self._no_more = False  # the rest of them will not come
        self._progress: Pending | None = None  # a question how far they are
        self.stored_tokens: list[
            int
        ] = []  # per verified block, how many tokens its slot holds: as many as ours or more
        self._is_final = prompt is None
        self._busy = threading.Lock()  # of the thread that settles or verifies

    @property
    def prompt(self) -> Prompt:
        assert self._prompt is not None
        return self._prompt

    @property
    def hold(self) -> Hold:
        assert self._hold is not None
        return self._hold

    @property
    def is_over(self) -> bool:
        """Query. Whether the lease has been let go."""
        return self._hold is None or self._hold.is_over

    @property
    def settled(self) -> bool:
        """Query. Whether `num_tokens` is known; never waits."""
        return self._settle(0.0)

    @property
    def num_tokens(self) -> int:
        """Tokens planned: what `wait` will verify. 0 on a miss, without a daemon, on any fault, and until settled."""
        self._settle(0.0)
        return self._planned

    @property
    def ticket(self) -> bytes:
        """With which other processes of the node read these blocks (`Cache.redeem`); none on a miss, or until settled.

        It names as many tokens as `wait` has verified, or, before that, as are planned; so all who read have one
        answer. ValueError: not acquired with `shared`.
        """
        self._settle(0.0)
        num_tokens = self.verified_tokens if self._is_final else self._planned
        if self._prompt is not None and not self.is_shared:
            raise ValueError("only a hit acquired with shared=True has a ticket")
        if not num_tokens or not self._share or self.is_over:
            return b""
        prompt, num_blocks = self.prompt, -(-num_tokens // self.prompt.spec.block_tokens)
        ready, slots = min(self._ready, num_blocks), self._slots[: 4 * num_blocks]
        epoch, fingerprint = self.hold.session.welcome.epoch, prompt.spec.fingerprint
        facts = epoch, self._share, fingerprint, num_tokens, ready, slots
        return encode_ticket(Ticket(FORMAT, *facts, *prompt.leading(num_blocks)))

    @property
    def verified_tokens(self) -> int:
        """Tokens verified so far."""
        return min(self._planned, len(self.stored_tokens) * self.prompt.spec.block_tokens) if self.stored_tokens else 0

    def ready(self) -> bool:
        """Changes state. Whether `wait` would return at once; never waits."""
        if not self._settle(0.0):
            return False
        if not self._is_all_there:
            self._learn(len(self.offsets), self._now_ms(), may_wait=False)
        return self._is_all_there

    def wait(self, deadline_ms: float | None = None) -> int:
        """Changes state. Wait for blocks that come from a lower tier, and verify; the tokens that are good. Final.

        `deadline_ms`: the client's by default. What has come by then counts. A daemon that falls silent is not waited
        for longer than the client's deadline, whatever is given here.
        """
        if self._hold is None:
            return 0
        due_ms = self._due_ms(deadline_ms)
        if self._settle(due_ms - self._now_ms()):
            while self._advance(len(self.offsets), due_ms):
                pass
            self._is_final = True
        else:
            self._give_up()
        return self.verified_tokens

    def blocks(self, deadline_ms: float | None = None) -> Iterator[Block]:
        """Changes state. The blocks in order, each as soon as it is verified. `deadline_ms`: for all, as in `wait`."""
        if self._hold is None:
            return
        due_ms = self._due_ms(deadline_ms)
        if not self._settle(due_ms - self._now_ms()):
            self._give_up()
        at = 0
        while at < len(self.stored_tokens) or self._advance(at + 1, due_ms):
            if at < len(self.stored_tokens):
                yield Block(self, at)
                at += 1
        self._is_final = True

    def release(self) -> None:
        """Changes state. End the lease, as soon as no array of it is alive. Idempotent."""
        self._is_final = True
        self._let_go()

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self._let_go()

    def settle_with(self, reply: wire.Acquired | None) -> None:
        """Changes state. The daemon's answer; None is a miss."""
        if self._is_final:  # given up or released meanwhile
            self._pending = None
        elif reply is not None and self._plausible(reply):
            self._planned, self._ready = reply.num_tokens, min(reply.ready, len(self.offsets))
            self._share = reply.share
            self._pending = None  # last: who sees a settled hit sees all of it
        else:
            self._give_up()

    def settle_later(self, pending: Pending | None) -> None:
        """Changes state. The answer is on its way; None: it could not be asked for, a miss."""
        self._pending = pending
        if pending is None:
            self._give_up()

    def _plausible(self, reply: wire.Acquired) -> bool:
        """A daemon's answer is used as an index into shared memory, so it is checked first."""
        spec, slab = self.prompt.spec, self.hold.session.slab
        num_blocks = -(-reply.num_tokens // spec.block_tokens)
        if not 0 < reply.num_tokens <= self.prompt.num_tokens or len(reply.slots) != 4 * num_blocks:
            return False
        self._slots, offsets = reply.slots, slab.offsets(reply.slots, spec.slot_nbytes)
        self.offsets = offsets.tolist()
        return slab.contains(offsets, spec.slot_nbytes) and self.hold.receive(reply.slots)

    def _settle(self, wait_ms: float) -> bool:
        if self._pending is None:
            return True
        if not self._busy.acquire(timeout=bounded_wait_ms(wait_ms) / 1000):
            return False  # another thread waits for the same answer
        try:
            pending = self._pending
            if pending is not None:
                settled, reply = self.hold.link.poll(wire.Acquired, pending, wait_ms)
                if not settled:
                    return False
                self.settle_with(reply)
        finally:
            self._busy.release()
        return True

    def _give_up(self) -> None:
        """A miss.

        The daemon may have pinned blocks for an answer that came too late, so the lease is ended all the same.
        """
        self._planned = 0
        self._is_final = True
        self._let_go()

    def _let_go(self) -> None:
        pending, self._pending = self._pending, None
        progress, self._progress = self._progress, None
        if self._hold is not None:
            for unanswered in (pending, progress):
                if unanswered is not None:
                    self._hold.link.disregard(unanswered)
            self._hold.let_go()

    def _now_ms(self) -> float:
        return self.hold.link.now_ms()

    def _due_ms(self, deadline_ms: float | None) -> float:
        link = self.hold.link
        return link.now_ms() + bounded_wait_ms(link.deadline_ms if deadline_ms is None else deadline_ms)

    @property
    def _is_all_there(self) -> bool:
        return self._no_more or self._ready == len(self.offsets)

    def _advance(self, blocks: int, due_ms: float) -> bool:
        """Verify what is there; else wait until more is. False once no more can come of it."""
        with self._busy:
            if self._is_final:
                return False
            if len(self.stored_tokens) < self._ready and self._verify():
                return True
            if self._is_all_there or self._now_ms() >= due_ms:
                return False
        return self._learn(blocks, due_ms, may_wait=True) or self._now_ms() < due_ms

    def _learn(self, blocks: int, due_ms: float, *, may_wait: bool) -> bool:
        """Ask the daemon how far the blocks have come; whether it has answered."""
        link = self.hold.link
        if not self._busy.acquire(timeout=bounded_wait_ms(due_ms - link.now_ms()) / 1000):
            return False
        try:
            pending = self._progress or self._ask_progress(blocks, due_ms if may_wait else None)
            while pending is not None:
                settled, reply = link.poll(wire.Loaded, pending, min(SLICE_MS, max(0.0, due_ms - link.now_ms())))
                if settled:
                    self._take_progress(reply)
                    return True
                self._progress = pending
                if link.now_ms() >= due_ms:
                    return False
            self._no_more = True  # it cannot be asked
            return True
        finally:
            self._busy.release()

    def _ask_progress(self, blocks: int, due_ms: float | None) -> Pending | None:
        """Each answer comes soon, also if nothing has: only so is a dead daemon told from a slow disk."""
        hold, link = self.hold, self.hold.link
        if not hold.can_be_told:
            return None
        slice_ms = link.deadline_ms / 2
        wait_ms = slice_ms if due_ms is None else min(slice_ms, max(0.0, due_ms - link.now_ms()))
        session, share = hold.session.id, self._share
        return link.ask_later(
            lambda number: wire.Wait(number, session, hold.number, blocks, wait_ms, share), wait_ms + link.deadline_ms
        )

    def _take_progress(self, reply: wire.Loaded | None) -> None:
        self._progress = None
        if reply is None:
            self._no_more = True
        else:
            self._ready = max(self._ready, min(reply.ready, len(self.offsets)))
            self._no_more = reply.final and self._ready < len(self.offsets)

    def _verify(self) -> bool:
        """Check blocks that have come against the prompt; False if none of them is right.

        The first one that is wrong ends the hit and is reported.
        """
        block_tokens, first = self.prompt.spec.block_tokens, len(self.stored_tokens)
        # The slab's own table tells what is on its way up, whatever a damaged answer says.
        end = first + self.hold.session.slab.num_arrived(self._slots[4 * first : 4 * self._ready])
        if self._sums:
            end = min(end, first + max(1, SUMMED_NBYTES // self.prompt.spec.block_nbytes))
        self._verify_whole_blocks(end)
        for number in range(len(self.stored_tokens), end):
            num_tokens = min(self._planned - number * block_tokens, block_tokens)
            stored_tokens = self._tokens_in(number, num_tokens)
            if stored_tokens is None or not self._is_payload_right(number, stored_tokens):
                self._no_more, self._ready = True, len(self.stored_tokens)
                reason = "header" if stored_tokens is None else "payload"
                if self.hold.can_be_told:
                    at = self.hold.session.id, self.hold.number
                    self.hold.link.notify(wire.Discard(*at, number, reason, self._share))
                break
            self.stored_tokens.append(stored_tokens)
        return len(self.stored_tokens) > first

    @property
    def _sums(self) -> bool:
        """Whether payloads are summed, too (memory.verify)."""
        return self.hold.session.welcome.verify

    def _is_payload_right(self, number: int, stored_tokens: int) -> bool:
        """Whether the slot's bytes are what was summed. What was not summed yet has nothing to be compared with."""
        if not self._sums:
            return True
        slab, at = self.hold.session.slab, self.offsets[number]
        state = None
        for _ in range(2):  # the daemon may have been writing a sum it has just made
            state = state or parse_state(slab.read(at + STATE_OFFSET, HEADER_NBYTES - STATE_OFFSET))
        if state is None:
            return False
        spec = self.prompt.spec
        own = self.shard or whole_of(spec)
        rects = [rect for rect in state[1] if rect.shard.overlaps(own)]
        return are_right(
            slab.payload(at, spec.payload_nbytes(stored_tokens)), spec.num_layers, spec.num_kv_heads, rects
        )

    def _verify_whole_blocks(self, end: int) -> None:
        """All whole blocks before `end`, in one comparison, up to the first that is not right."""
        block_tokens, first = self.prompt.spec.block_tokens, len(self.stored_tokens)
        end = min(self._planned // block_tokens, end)
        expected = self.prompt.whole_identities
        if expected is None or first >= end:
            return
        expected = expected[first:end]
        rows = expected.view("<u4").reshape(end - first, -1)
        found = self.hold.session.slab.heads(np.array(self.offsets[first:end]), expected.dtype.itemsize).view("<u4")
        right = end - first
        if not np.array_equal(found, rows):
            right = int((found == rows).all(axis=1).argmin())
        if self._sums:
            right = next((at for at in range(right) if not self._is_payload_right(first + at, block_tokens)), right)
        self.stored_tokens.extend([block_tokens] * right)

    def _tokens_in(self, number: int, num_tokens: int) -> int | None:
        """Tokens of the slot's block; None if its header neither names this prompt's block nor begins like it."""
        slab, offset = self.hold.session.slab, self.offsets[number]
        identity = self.prompt.identity(number)
        if num_tokens == len(identity.tokens) // 4:
            expected = identity_bytes(identity)
            if slab.read(offset, len(expected)) == expected:
                return num_tokens
        header = parse_header(slab.read(offset, HEADER_NBYTES))
        if header is None:
            return None
        stored = header.identity
        symbols = block_symbols_of(stored.tokens, stored.keys_start, stored.keys_digest)
        same_place = (stored.fingerprint, stored.parent, stored.number, stored.context) == (
            identity.fingerprint,
            identity.parent,
            identity.number,
            identity.context,
        )
        if not same_place or common_tokens(symbols, self.prompt.symbols(number)) < num_tokens:
            return None
        return len(stored.tokens) // 4
