"""What `reserve` answers: room for the blocks of a prompt that are not cached yet."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.layout import NBYTES_OFFSET, Rect, Shard, header_tail
from kvstore.ranks import whole_of
from kvstore.service.hit import part_of
from kvstore.service.hold import Array, Hold
from kvstore.service.prompt import Prompt
from kvstore.spec import KVSpec
from transports import messages as wire

PIECE_NBYTES = 2 << 20  # small enough for a cache, large enough for memcpy's fast path (docs/measurements.md)


class WritableBlock:
    """A slot to fill, or a rank's part of it: by `write`, or through `array`, or by a device that writes to the array's
    memory."""

    __slots__ = ("_hold", "_shard", "_spec", "is_filled", "num_tokens", "offset", "start", "sum")

    def __init__(self, spec: KVSpec, hold: Hold, shard: Shard | None, offset: int, start: int, num_tokens: int) -> None:
        self._spec = spec
        self._hold = hold
        self._shard = shard
        self.offset = offset
        self.start = start
        self.num_tokens = num_tokens
        self.is_filled = False
        self.sum: int | None = None  # of what `write` copied; None where the daemon has to make it

    @property
    def array(self) -> Array:
        """Writable, on the slab, shaped like a hit's. Its checksum is made after commit, off the critical path."""
        spec, count = self._spec, self.num_tokens
        nbytes, shape = spec.payload_nbytes(count), spec.array_shape(count)
        array = self._hold.lend(self.offset, nbytes, spec.numpy_dtype, shape, writeable=True)
        self.is_filled, self.sum = True, None
        return part_of(array, self._shard)

    def write(self, source: npt.ArrayLike) -> None:
        """Changes state. Copy `source` and sum it in one pass.

        It has this block's shape, any strides, and the spec's dtype or one of the same width, whose bits are taken.
        ValueError on anything else, and after the reservation has ended.
        """
        _grip = self._hold.grip()  # until the copy is done: an abort by another thread must not free the slot under it
        target = self._target()
        bits = _bits_like(np.asarray(source), target)
        self.is_filled, self.sum = False, None  # until all is copied: an interrupted rewrite leaves no block
        if self._hold.session.welcome.checksums:
            self.sum = _copy_and_sum(bits, target)
        else:
            np.copyto(target, bits)
        self.is_filled = True

    def _target(self) -> Array:
        spec, count = self._spec, self.num_tokens
        payload = self._hold.session.slab.payload(self.offset, spec.payload_nbytes(count))
        return part_of(payload.view(spec.numpy_dtype).reshape(spec.array_shape(count)), self._shard)


def _bits_like(given: Array, target: Array) -> Array:
    """What is to be copied. ValueError: it does not fit."""
    if given.shape == target.shape:
        if given.dtype == target.dtype:
            return given
        if given.dtype.itemsize == target.dtype.itemsize and given.dtype.isnative:
            return given.view(target.dtype)
    raise ValueError(f"block.write wants {target.shape} of {target.dtype}, not {given.shape} of {given.dtype}")


def _copy_and_sum(source: Array, target: Array) -> int:
    """XXH3-64 of `source` in C order, a piece at a time: summed first, then copied from the cache that this filled.

    A rank's target has gaps: then a piece is some layers, and its copy one call over two rows for each.
    """
    if not source.flags.c_contiguous:
        return _copy_and_sum_rows(source, target)
    if source.nbytes <= PIECE_NBYTES:
        value = xxhash.xxh3_64_intdigest(source.data)
        np.copyto(target, source)
        return value
    if target.flags.c_contiguous:
        source, target = source.reshape(-1).view(np.uint8), target.reshape(-1).view(np.uint8)
    step = max(1, PIECE_NBYTES * len(source) // source.nbytes)
    total = xxhash.xxh3_64()
    for at in range(0, len(source), step):
        piece = source[at : at + step]
        total.update(piece.reshape(-1).view(np.uint8).data)
        np.copyto(target[at : at + step], piece)
    return total.intdigest()


def _copy_and_sum_rows(source: Array, target: Array) -> int:
    """Of a source with gaps, a layer at a time."""
    total = xxhash.xxh3_64()
    if source.ndim == 1:
        source, target = source[None], target[None]
    for given, row in zip(source, target, strict=True):
        np.copyto(row, given)
        total.update((row if row.flags.c_contiguous else np.ascontiguousarray(given)).data)
    return total.intdigest()


class Reservation:
    """Use it as a context manager: leaving without `commit` gives everything back.

    `start`: token where storing begins. Empty (no blocks, start == len(token_ids)) when all is cached, and when
    there is no room or no daemon; with an earlier `start` when the chain before the one asked for is not cached. A
    rank's is empty, too, where another rank of its group fills the same part.
    """

    def __init__(
        self,
        prompt: Prompt | None,
        hold: Hold | None,
        shard: Shard | None,
        start: int,
        slots: bytes,
        generation: int,
    ) -> None:
        """`shard`: a rank's; None for a writer of whole blocks."""
        self.start = start
        self._prompt = prompt
        self._hold = hold
        self._shard = shard
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
        """Changes state. Make the leading blocks that were filled readable; True if they are cached now, or, of a rank,
        once the other ranks have committed their parts.

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
            self._blocks.append(WritableBlock(spec, hold, self._shard, offset, start, num_tokens))

    def _write_headers(self, blocks: list[WritableBlock]) -> None:
        """Name the blocks, whatever way their bytes came.

        All ranks of a group write the same, so it does not matter who comes last; their sums the daemon puts there.
        """
        slab, spec = self.hold.session.slab, self.prompt.spec
        identities = self.prompt.identities(self.start // spec.block_tokens)
        for block, (identity, sum_of_identity) in zip(blocks, identities, strict=False):
            is_summed = block.sum is not None and self._shard is None
            rects = (Rect(whole_of(spec), block.sum or 0),) if is_summed else ()
            tail = header_tail(spec.payload_nbytes(block.num_tokens), sum_of_identity, self._generation, rects)
            slab.write(block.offset, identity)
            slab.write(block.offset + NBYTES_OFFSET, tail)

    def _commit(self, filled: int, hints: tuple[int, float | None, int | None]) -> bool:
        self.hold.stop_lending()  # so that `keep` stays true
        session, keep = self.hold.session, self.hold.has_views
        self._write_headers(self._blocks[:filled])
        summed = bytes(block.sum is not None for block in self._blocks[:filled])
        sums = b""
        if self._shard is not None:
            sums = b"".join((block.sum or 0).to_bytes(8, "little") for block in self._blocks[:filled])
        if keep:
            self.hold.becomes_lease(surely=False)
        reply = self.hold.link.ask(
            wire.Committed,
            lambda request_id: wire.Commit(request_id, session.id, self.hold.number, summed, keep, *hints, sums),
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
