"""What `acquire` answers: leased blocks, each checked against the prompt before it counts."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import numpy as np

from kvstore.core.layout import HEADER_NBYTES, identity_bytes, parse_header
from kvstore.service.hold import Array, Hold
from kvstore.service.link import Pending
from kvstore.service.prompt import Prompt
from radix import block_symbols_of, common_tokens
from transports import messages as wire


class Block:
    """A verified block. `array`: read-only, on the slab, `[L, 2, H, T, D]` (KVSpec.array_shape) with T = num_tokens."""

    def __init__(self, hit: Hit, number: int, start: int, num_tokens: int, stored_tokens: int) -> None:
        self.start = start
        self.num_tokens = num_tokens
        self._hit = hit
        self._number = number
        self._stored_tokens = stored_tokens

    @property
    def array(self) -> Array:
        """The block's bytes. The block stays leased while this array or any view of it lives."""
        spec, hold, stored = self._hit.prompt.spec, self._hit.hold, self._stored_tokens
        offset = self._hit.offset(self._number)
        array = hold.lend(offset, spec.payload_nbytes(stored), spec.numpy_dtype, spec.array_shape(stored))
        array.flags.writeable = False
        if spec.is_opaque:
            return array[: spec.payload_nbytes(self.num_tokens)]
        return array[:, :, :, : self.num_tokens]


class Hit:
    """The longest cached prefix of a prompt, leased. Use it as a context manager, or call `release`.

    Every fault (no daemon, deadline, damaged block) makes it shorter, down to 0 tokens; nothing raises.
    """

    def __init__(self, prompt: Prompt | None, hold: Hold | None, pending: Pending | None) -> None:
        """`prompt` None: a miss, known before anything was asked."""
        self._prompt = prompt
        self._hold = hold
        self._pending = pending
        self._planned = 0
        self._slots = np.empty(0, np.uint32)
        self._verified: list[Block] = []
        self._is_final = prompt is None

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
    def verified_tokens(self) -> int:
        """Tokens verified so far."""
        return self._verified[-1].start + self._verified[-1].num_tokens if self._verified else 0

    def ready(self) -> bool:
        """Query. Whether `wait` would return at once."""
        return self._settle(0.0)

    def wait(self, deadline_ms: float | None = None) -> int:
        """Changes state. Verify the leased blocks; the tokens of those that are what they should be. Final."""
        link = self._hold.link if self._hold else None
        if link is not None and not self._settle(link.deadline_ms if deadline_ms is None else deadline_ms):
            self._give_up()
        for _ in self.blocks():
            pass
        return self.verified_tokens

    def blocks(self) -> Iterator[Block]:
        """Changes state. The blocks in order, each as soon as it is verified."""
        self._settle(self._hold.link.deadline_ms if self._hold else 0.0)
        at = 0
        while at < len(self._verified) or self._verify_next():
            yield self._verified[at]
            at += 1

    def release(self) -> None:
        """Changes state. End the lease, as soon as no array of it is alive. Idempotent."""
        self._is_final = True
        if self._hold is not None:
            self._hold.let_go()

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._hold is not None:
            self._hold.let_go()

    def offset(self, number: int) -> int:
        """Query. Where the slot of a block begins in the slab."""
        return self.hold.session.slab.offset(int(self._slots[number]), self.prompt.spec.slot_nbytes)

    def settle_with(self, reply: wire.Acquired | None) -> None:
        """Changes state. The daemon's answer; None is a miss."""
        self._pending = None
        planned = reply is not None and self._plausible(reply)
        if reply is not None and planned:
            self._planned = reply.num_tokens
            self._slots = np.frombuffer(reply.slots, np.uint32)
        if not self._planned:
            self._give_up()

    def _plausible(self, reply: wire.Acquired) -> bool:
        """A daemon's answer is used as an index into shared memory, so it is checked first."""
        covered = len(reply.slots) // 4 * self.prompt.spec.block_tokens
        return 0 < reply.num_tokens <= self.prompt.num_tokens and covered - reply.num_tokens in range(
            self.prompt.spec.block_tokens
        )

    def _settle(self, wait_ms: float) -> bool:
        if self._pending is not None:
            settled, reply = self.hold.link.poll(wire.Acquired, self._pending, wait_ms)
            if not settled:
                return False
            self.settle_with(reply)
        return True

    def _give_up(self) -> None:
        """A miss.

        The daemon may have pinned blocks for an answer that came too late, so the lease is ended all the same.
        """
        self._pending = None
        self._planned = 0
        self._is_final = True
        self.hold.let_go()

    def _verify_next(self) -> bool:
        """Check one more block against the prompt. The first one that is wrong ends the hit and is reported."""
        number = len(self._verified)
        if self._is_final or number == len(self._slots):
            return False
        start = number * self.prompt.spec.block_tokens
        num_tokens = min(self._planned - start, self.prompt.spec.block_tokens)
        stored_tokens = self._stored_tokens(number, num_tokens)
        if stored_tokens is None:
            self._is_final = True
            self.hold.link.notify(wire.Discard(self.hold.session.id, self.hold.number, number, "header"))
            return False
        self._verified.append(Block(self, number, start, num_tokens, stored_tokens))
        return True

    def _stored_tokens(self, number: int, num_tokens: int) -> int | None:
        """How many tokens the slot's block has, if its header names this prompt's block or begins like it;

        else None.
        """
        slab, offset = self.hold.session.slab, self.offset(number)
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
        same_place = (stored.fingerprint, stored.parent, stored.number) == (
            identity.fingerprint,
            identity.parent,
            identity.number,
        )
        if not same_place or common_tokens(symbols, self.prompt.symbols(number)) < num_tokens:
            return None
        return len(stored.tokens) // 4
