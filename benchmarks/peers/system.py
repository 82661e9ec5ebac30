"""What every adapter does, and the blocks that all of them store.

A worker owns the caller's memory: `memory[0]` holds the blocks to store, `memory[1]` is where they come back, each
`[B, block_nbytes]`, a block in one piece. The bytes of a block follow from its prompt and its place, so that a stale or
misplaced block shows in every word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 64
PROMPT_TOKENS_MAX = 1 << 17
PROMPTS_MAX = 1 << 15  # their token ids fill 32 bits
ALIGN_NBYTES = 64
WORD_STEP = 0x9E3779B97F4A7C15
MARK_STEP = 0xD6E8FEB86659FD93

Bytes = npt.NDArray[np.uint8]


class Refused(Exception):
    """The system answered with an error of its own. Anything else that an adapter raises ends its worker."""


@dataclass(frozen=True)
class Prompt:
    """A run of blocks. Prompts of different numbers share no token, no key and no word of their blocks."""

    number: int
    num_blocks: int
    block_nbytes: int

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """For systems that look up by tokens. A sequence of ints, as engines hold them."""
        first = self.number % PROMPTS_MAX * PROMPT_TOKENS_MAX
        return tuple(range(first, first + self.num_blocks * BLOCK_TOKENS))

    @cached_property
    def keys(self) -> list[str]:
        """For systems that look up by a name per block: these are spared the hashing of tokens."""
        return [f"{self.block_nbytes}-{self.number}-{place}" for place in range(self.num_blocks)]

    @cached_property
    def token_bytes(self) -> bytes:
        """u32 little endian."""
        return np.array(self.token_ids, "<u4").tobytes()

    def fill(self, blocks: Bytes) -> None:
        """Changes state. Write the prompt's blocks to the first rows of `blocks`, [B, block_nbytes]."""
        words = self._words()
        for place, row in zip(range(self.num_blocks), blocks, strict=False):
            np.add(words, self._mark(place), out=row.view(np.uint64))

    def block(self, place: int) -> bytes:
        """Query. The bytes of one block."""
        return (self._words() + self._mark(place)).tobytes()

    def wrong(self, blocks: Bytes) -> list[int]:
        """Query. Which of the rows, given from the first block on, are not what `fill` wrote."""
        words = self._words()
        rows = enumerate(blocks)
        return [place for place, row in rows if not np.array_equal(row.view(np.uint64), words + self._mark(place))]

    def _words(self) -> npt.NDArray[np.uint64]:
        return np.arange(self.block_nbytes // 8, dtype=np.uint64) * np.uint64(WORD_STEP)

    def _mark(self, place: int) -> np.uint64:
        """Two blocks have a word in common at the same offset only if their marks are equal."""
        return np.uint64((self.number << 20 | place) * MARK_STEP % (1 << 64))


class Place(NamedTuple):
    """Where a worker's system may leave things. All of it is removed when the worker has ended."""

    name: str  # of nothing else on this machine
    disk: Path  # a folder of its own
    shared: Path  # a folder of its own, in shared memory


class System(Protocol):
    """One store. Constructed with a Place and its options; every call is bounded in time by whoever asks."""

    def attach(self, memory: Bytes) -> None:
        """Changes state. The caller's memory from now on, [2, B, block_nbytes]: blocks of another size begin."""

    def store(self, prompt: Prompt) -> None:
        """Changes state. Put `memory[0]`; on return the blocks can be looked up. Refused."""

    def settle(self) -> None:
        """Changes state. Move what was stored to where reads shall come from. Never timed."""

    def release(self) -> None:
        """Changes state. Let go of what the last look-up holds, when no `retrieve` followed it. Never timed."""

    def look_up(self, prompt: Prompt) -> int:
        """Changes state, in systems that lock what they find. Number of leading blocks that are there. Refused."""

    def retrieve(self, prompt: Prompt) -> int:
        """Changes state. Copy the leading blocks to `memory[1]`; how many. Follows a `look_up`. Refused."""

    def forget(self) -> None:
        """Changes state. Drop every block."""

    def stored_files(self) -> Sequence[Path]:
        """Query. The files, shared memory included, that hold what is stored."""

    def holders(self) -> Sequence[int]:
        """Query. The processes whose private memory holds what is stored."""

    def close(self) -> None:
        """Changes state. End the system's own processes. Idempotent."""


def caller_memory(num_blocks: int, block_nbytes: int) -> Bytes:
    """Query. Touched memory [2, B, block_nbytes] on a 64-byte boundary, as torch and CUDA allocate it."""
    nbytes = 2 * num_blocks * block_nbytes
    flat = np.ones(nbytes + ALIGN_NBYTES, np.uint8)
    first = -flat.ctypes.data % ALIGN_NBYTES
    return flat[first : first + nbytes].reshape(2, num_blocks, block_nbytes)


def addresses(blocks: Any) -> list[int]:
    """Query. Where each row of `blocks` begins, for systems that take pointers."""
    return [blocks.ctypes.data + place * blocks.strides[0] for place in range(len(blocks))]
