"""What `reserve` answers: room for the blocks of a prompt that are not cached yet."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.layout import NBYTES_OFFSET, Rect, header_tail
from kvstore.service.hold import Array, Hold
from kvstore.service.prompt import Prompt
from kvstore.spec import KVSpec
from transports import messages as wire

_UINT8 = np.dtype(np.uint8)
PIECE_NBYTES = 2 << 20  # small enough for a cache, large enough for memcpy's fast path (docs/measurements.md)


class WritableBlock:
    """A slot to fill: by `write`, or through `array`, or by a device that writes to the array's memory."""

    __slots__ = ("_hold", "_spec", "_sums", "is_filled", "num_tokens", "offset", "start", "sum")

    def __init__(self, spec: KVSpec, hold: Hold, sums: bool, offset: int, start: int, num_tokens: int) -> None:
        self._spec = spec
        self._hold = hold
        self._sums = sums
        self.offset = offset
        self.start = start
        self.num_tokens = num_tokens
        self.is_filled = False
        self.sum: int | None = None

    @property
    def array(self) -> Array:
        """Writable, on the slab, shaped like a hit's. Its checksum is made after commit, off the critical path."""
        spec, count = self._spec, self.num_tokens
        nbytes, shape = spec.payload_nbytes(count), spec.array_shape(count)
        array = self._hold.lend(self.offset, nbytes, spec.numpy_dtype, shape, writeable=True)
        self.is_filled, self.sum = True, None
        return array

    def write(self, source: npt.ArrayLike) -> None:
        """Changes state. Copy `source` and sum it in one pass.

        It has this block's shape, any strides, and the spec's dtype or one of the same width, whose bits are taken.
        ValueError on anything else, and after the reservation has ended.
        """
        spec, shape = self._spec, self._spec.array_shape(self.num_tokens)
        given = np.asarray(source)
        same_width = given.dtype.itemsize == spec.numpy_dtype.itemsize and given.dtype.isnative
        if given.shape != shape or not same_width:
            raise ValueError(f"block.write wants {shape} of {spec.numpy_dtype}, not {given.shape} of {given.dtype}")
        bits = given if given.dtype == spec.numpy_dtype else given.view(spec.numpy_dtype)
        nbytes = spec.payload_nbytes(self.num_tokens)
        # Lent for as long as the copy takes: an abort by another thread must not free the slot under it.
        target = self._hold.lend(self.offset, nbytes, _UINT8, (nbytes,), writeable=True)
        self.is_filled, self.sum = False, None  # until all is copied: an interrupted rewrite leaves no block
        if self._sums:
            self.sum = _copy_and_sum(bits, target)
        else:
            np.copyto(target.view(spec.numpy_dtype).reshape(shape), bits)
        self.is_filled = True

    @property
    def rect(self) -> Rect | None:
        """Query. The checksum of what `write` copied; None where the daemon has to make it."""
        if self.sum is None:
            return None
        return Rect((0, self._spec.num_layers), (0, self._spec.num_kv_heads), self.sum)


def _copy_and_sum(source: Array, target: Array) -> int:
    """XXH3-64 of `source` in C order, a piece at a time: summed first, then copied from the cache that this filled."""
    if not source.flags.c_contiguous:
        return _copy_and_sum_rows(source, target)
    flat = source.reshape(-1).view(np.uint8)
    if len(flat) <= PIECE_NBYTES:
        value = xxhash.xxh3_64_intdigest(flat.data)
        np.copyto(target, flat)
        return value
    total = xxhash.xxh3_64()
    for at in range(0, len(flat), PIECE_NBYTES):
        piece = flat[at : at + PIECE_NBYTES]
        total.update(piece.data)
        np.copyto(target[at : at + PIECE_NBYTES], piece)
    return total.intdigest()


def _copy_and_sum_rows(source: Array, target: Array) -> int:
    total = xxhash.xxh3_64()
    rows = target.view(source.dtype).reshape(source.shape)
    if source.ndim == 1:
        rows, source = rows[None], source[None]
    for row, given in zip(rows, source, strict=True):
        np.copyto(row, given)
        total.update(row.data)
    return total.intdigest()


class Reservation:
    """Use it as a context manager: leaving without `commit` gives everything back.

    `start`: token where storing begins. Empty (no blocks, start == len(token_ids)) when all is cached, and when
    there is no room or no daemon; with an earlier `start` when the chain before the one asked for is not cached.
    """

    def __init__(self, prompt: Prompt | None, hold: Hold | None, start: int, slots: bytes, generation: int, sums: bool):
        self.start = start
        self.sums = sums
        self._prompt = prompt
        self._hold = hold
        self._generation = generation
        self._blocks: list[WritableBlock] = []
        self._is_over = hold is None
        if hold is not None and prompt is not None:
            self._prepare(slots)

    @property
    def prompt(self) -> Prompt:
        assert self._prompt is not None
        return self._prompt

    @property
    def hold(self) -> Hold:
        assert self._hold is not None
        return self._hold

    @property
    def num_blocks(self) -> int:
        """Blocks to fill."""
        return len(self._blocks)

    def blocks(self) -> Iterator[WritableBlock]:
        """Query. The blocks to fill, in order."""
        return iter(self._blocks)

    def commit(self, priority: int = 0, keep_for_s: float | None = None, output_tokens: int | None = None) -> bool:
        """Changes state. Make the leading blocks that were filled readable; True if they are cached now.

        `priority`: 1 will return, 0 unknown, -1 will not. `keep_for_s`: expected seconds until it returns. A hint out
        of bounds counts as the nearest that is not. A block nobody wrote to ends the run: it and those after it are
        given back.
        """
        hints = _hints(priority, keep_for_s, output_tokens)  # first: a TypeError must leave all as it is
        if self._is_over:
            return False
        self._is_over = True
        filled = next((at for at, block in enumerate(self._blocks) if not block.is_filled), len(self._blocks))
        try:
            return bool(filled) and self.hold.can_be_told and self._commit(filled, hints)
        finally:  # also when the caller is interrupted while it waits: nothing stays reserved
            self.hold.let_go()

    def abort(self) -> None:
        """Changes state. Give everything back, as soon as no array of it is alive. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self.hold.let_go()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        self.abort()

    def _prepare(self, slots: bytes) -> None:
        prompt, hold, slab = self.prompt, self.hold, self.hold.session.slab
        spec, block_tokens = prompt.spec, prompt.spec.block_tokens
        offsets = slab.offsets(slots, spec.slot_nbytes)
        # The answer is an index into shared memory, and a bit of it that flipped names slots of others: to write there
        # would put our bytes under their header. So it counts only where the daemon's own table says the same. A start
        # within a block would put bytes of other tokens under ours.
        first, rest = divmod(self.start, block_tokens)
        if rest or not 0 < len(slots) // 4 <= prompt.num_blocks - first:
            return
        if not slab.contains(offsets, spec.slot_nbytes):
            return
        if not slab.are_reserved(slots, spec.slot_nbytes, self._generation) or not hold.receive(slots):
            return
        for start, offset in zip(range(self.start, prompt.num_tokens, block_tokens), offsets.tolist(), strict=False):
            num_tokens = min(block_tokens, prompt.num_tokens - start)
            self._blocks.append(WritableBlock(spec, hold, self.sums, offset, start, num_tokens))

    def _write_headers(self, blocks: list[WritableBlock]) -> None:
        """Name the blocks, whatever way their bytes came."""
        slab, spec, identities = self.hold.session.slab, self.prompt.spec, self.prompt.identities
        for number, block in enumerate(blocks, self.start // spec.block_tokens):
            identity, sum_of_identity = identities[number]
            rects = (block.rect,) if block.rect else ()
            tail = header_tail(spec.payload_nbytes(block.num_tokens), sum_of_identity, self._generation, rects)
            slab.write(block.offset, identity)
            slab.write(block.offset + NBYTES_OFFSET, tail)

    def _commit(self, filled: int, hints: tuple[int, float | None, int | None]) -> bool:
        self.hold.stop_lending()  # so that `keep` stays true
        session, keep = self.hold.session, self.hold.has_views
        self._write_headers(self._blocks[:filled])
        summed = bytes(block.sum is not None for block in self._blocks[:filled])
        if keep:
            self.hold.becomes_lease(surely=False)
        reply = self.hold.link.ask(
            wire.Committed,
            lambda request_id: wire.Commit(request_id, session.id, self.hold.number, summed, keep, *hints),
        )
        if reply is None:
            return False
        if keep:
            self.hold.becomes_lease(surely=True)
        else:
            self.hold.forget()
        return reply.num_blocks > 0


def _hints(
    priority: float, keep_for_s: float | None, output_tokens: float | None
) -> tuple[int, float | None, int | None]:
    """Retention hints as the wire takes them, from any kind of number; one that is no number is no hint."""
    rank = bounded(priority, -1, 1)
    seconds = bounded(keep_for_s, 0, wire.SECONDS_MAX)
    tokens = bounded(output_tokens, 0, wire.TOKENS_MAX)
    return int(rank or 0), seconds, None if tokens is None else int(tokens)


def bounded(value: float | None, low: float, high: float) -> float | None:
    """Query. The nearest value within bounds; None for None and NaN."""
    if value is None or value != value:
        return None
    return float(min(max(value, low), high))
