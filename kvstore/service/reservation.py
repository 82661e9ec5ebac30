"""What `reserve` answers: room for the blocks of a prompt that are not cached yet."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.layout import RECT_COUNT_OFFSET, Rect, header_head, header_rects, identity_bytes
from kvstore.service.hold import Array, Hold
from kvstore.service.prompt import Prompt
from transports import messages as wire

PIECE_NBYTES = 128 << 10  # copied and summed while it is in the L2 cache


class WritableBlock:
    """A slot to fill: by `write`, or through `array`, or by a device that writes to the array's memory."""

    def __init__(self, reservation: Reservation, number: int, offset: int) -> None:
        spec = reservation.prompt.spec
        self.start = number * spec.block_tokens
        self.num_tokens = min(spec.block_tokens, reservation.prompt.num_tokens - self.start)
        self.is_filled = False
        self.is_summed = False
        self._reservation = reservation
        self._offset = offset

    @property
    def array(self) -> Array:
        """Writable, on the slab, shaped like a hit's. Its checksum is made after commit, off the critical path."""
        spec = self._reservation.prompt.spec
        nbytes, shape = spec.payload_nbytes(self.num_tokens), spec.array_shape(self.num_tokens)
        array = self._reservation.hold.lend(self._offset, nbytes, spec.numpy_dtype, shape)
        self.is_filled, self.is_summed = True, False
        return array

    def write(self, source: npt.ArrayLike) -> None:
        """Changes state. Copy `source` (this block's shape; any strides; its dtype or one of the same width) and sum it
        in one pass. ValueError on another shape or width."""
        self._reservation.hold.require_open()
        spec, slab = self._reservation.prompt.spec, self._reservation.hold.session.slab
        given = np.asarray(source)
        shape = spec.array_shape(self.num_tokens)
        if given.shape != shape or given.dtype.itemsize != spec.numpy_dtype.itemsize:
            raise ValueError(f"block.write wants {shape} of {spec.numpy_dtype}, not {given.shape} of {given.dtype}")
        target = slab.payload(self._offset, spec.payload_nbytes(self.num_tokens))
        bits = given.view(spec.numpy_dtype)
        if self._reservation.sums:
            rect = Rect((0, spec.num_layers), (0, spec.num_kv_heads), _copy_and_sum(bits, target))
            slab.write(self._offset + RECT_COUNT_OFFSET, header_rects((rect,)))
        else:
            np.copyto(target.view(spec.numpy_dtype).reshape(shape), bits)
        self.is_filled, self.is_summed = True, self._reservation.sums


def _copy_and_sum(source: Array, target: npt.NDArray[np.uint8]) -> int:
    """XXH3-64 of `source` in C order, made while it is copied: a piece is summed when it has just been read."""
    total = xxhash.xxh3_64()
    if source.flags.c_contiguous:
        flat = source.reshape(-1).view(np.uint8)
        for at in range(0, len(target), PIECE_NBYTES):
            piece = flat[at : at + PIECE_NBYTES]
            total.update(piece.data)
            np.copyto(target[at : at + PIECE_NBYTES], piece)
        return total.intdigest()
    rows = target.view(source.dtype).reshape(source.shape)
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
        self._blocks: list[WritableBlock] = []
        self._is_over = hold is None
        if hold is not None and prompt is not None:
            self._prepare(np.frombuffer(slots, np.uint32), generation)

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
        """Changes state. Make the leading blocks that were filled readable; True if the daemon confirmed it.

        `priority`: 1 will return, 0 unknown, -1 will not. `keep_for_s`: expected seconds until it returns.
        A block nobody wrote to ends the run: it and those after it are given back.
        """
        if self._is_over or not self._hold:
            return False
        self._is_over = True
        filled = next((at for at, block in enumerate(self._blocks) if not block.is_filled), len(self._blocks))
        if not filled or not self.hold.link.usable:
            self.hold.let_go()
            return False
        return self._commit(filled, priority, keep_for_s, output_tokens)

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

    def _prepare(self, slots: npt.NDArray[np.uint32], generation: int) -> None:
        """Write the headers now: they name the block, whatever way its bytes take."""
        spec, slab = self.prompt.spec, self.hold.session.slab
        first = self.start // spec.block_tokens
        for number, slot in enumerate(slots.tolist(), first):
            offset = slab.offset(slot, spec.slot_nbytes)
            block = WritableBlock(self, number, offset)
            identity = identity_bytes(self.prompt.identity(number))
            head = header_head(identity, spec.payload_nbytes(block.num_tokens), generation)
            slab.write(offset, head + header_rects(()))
            self._blocks.append(block)

    def _commit(self, filled: int, priority: int, keep_for_s: float | None, output_tokens: int | None) -> bool:
        session, keep = self.hold.session, self.hold.has_views
        summed = bytes(block.is_summed for block in self._blocks[:filled])

        def make(request_id: int) -> wire.Request:
            return wire.Commit(
                request_id, session.id, self.hold.number, summed, keep, priority, keep_for_s, output_tokens
            )

        reply = self.hold.link.ask(wire.Committed, make)
        if keep:
            self.hold.becomes_lease(surely=reply is not None)
        if keep or reply is None:
            self.hold.let_go()
        else:
            self.hold.forget()
        return reply is not None and reply.num_blocks > 0
