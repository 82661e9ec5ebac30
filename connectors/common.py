"""What connectors share: moving a whole prefix between the store's blocks and one array of an engine's own.

There is no error handling here, on purpose. A fault of the store is a miss: `acquire` and `reserve` answer it with a
hit of no tokens and a reservation of no blocks, and everything below then does nothing.
"""

import math

import numpy as np
import numpy.typing as npt

from kvstore import Hit, KVSpec, Reservation

# A load from a lower tier may take as long as it is worth: the daemon ends it when recomputing would be faster, and a
# daemon that falls silent is given up after the client's deadline.
LOAD_MS_MAX = 60_000.0
KVArray = npt.NDArray[np.generic]


class PrefixBuffer:
    """Memory for the KV of one prefix, kept mapped from one prefix to the next.

    Touching fresh memory costs several times the copy itself (1.3-1.5 GB/s against 6-10), and every turn of a chat
    needs about as much again. One user at a time: an array is valid until the next one is asked for.
    """

    def __init__(self, spec: KVSpec) -> None:
        self._spec = spec
        self._values: KVArray = np.empty(0, dtype=spec.numpy_dtype)

    def array(self, num_tokens: int) -> KVArray:
        """Changes state. `[L, 2, H, n, D]` for n tokens, with any content; grows by doubling at least."""
        shape = self._spec.array_shape(num_tokens)
        count = math.prod(shape)
        if count > self._values.size:
            self._values = np.empty(max(count, 2 * self._values.size), dtype=self._spec.numpy_dtype)
        return self._values[:count].reshape(shape)

    def holds(self, address: int) -> bool:
        """Query. Whether this memory address is the buffer's."""
        start = self._values.ctypes.data
        return start <= address < start + self._values.nbytes


def copy_hit(hit: Hit, buffer: PrefixBuffer) -> KVArray:
    """Changes state. `[L, 2, H, n, D]`: the verified tokens of a hit, in `buffer`; n is 0 on a miss.

    One strided copy per block, each as soon as the block is verified.
    """
    target = buffer.array(hit.num_tokens)
    for block in hit.blocks(LOAD_MS_MAX):
        np.copyto(target[..., block.start : block.start + block.num_tokens, :], block.array)
    return target[..., : hit.wait(), :]


def write_blocks(reservation: Reservation, kv: KVArray) -> int:
    """Changes state. Tokens written. `kv`: `[L, 2, H, n, D]` of the tokens from `reservation.start` on."""
    num_tokens = 0
    for block in reservation.blocks():
        start = block.start - reservation.start
        block.write(kv[..., start : start + block.num_tokens, :])
        num_tokens += block.num_tokens
    return num_tokens
