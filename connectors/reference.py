"""The smallest complete adapter: what an engine does with the store, without an engine. Read this first.

An engine with paged KV calls three things:

    load(token_ids)   before prefill: copies what is cached into the engine's pages, says how many tokens it may skip
    save(token_ids)   whenever blocks have filled: stores what is not cached yet, generated tokens included
    report(...)       after prefill: what it cost, so that the store can weigh loading against recomputing
    close()           at the end

Every fault of the store (no daemon, a missed deadline, a damaged block, no room) is a shorter load or a dropped save;
nothing here raises for the store's sake after construction.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

import kvstore


class Pages(Protocol):
    """The engine's KV of one sequence. `[L, 2, H, T, D]`: layers, K and V, K/V heads, tokens, head dim."""

    def read(self, start: int, num_tokens: int) -> npt.NDArray[Any]:
        """Query. The KV of tokens [start, start + num_tokens), any strides, the spec's dtype (bfloat16 as uint16)."""

    def write(self, start: int, kv: npt.NDArray[Any]) -> None:
        """Changes state. Copy `kv` in as the KV of the tokens from `start` on."""


class ReferenceConnector:
    """Loads and saves the KV of one kind of model for an engine with `Pages`."""

    def __init__(self, client: kvstore.Client, spec: kvstore.KVSpec) -> None:
        """Changes state. SpecMismatch or DaemonUnavailable: the only place where the store's errors come up."""
        self._cache = client.attach(spec)

    def load(self, token_ids: Sequence[int], pages: Pages, extra_keys: Sequence[bytes | tuple[int, bytes]] = ()) -> int:
        """Changes state. Tokens whose KV is in `pages` now; the engine prefills the rest, at least the last one.

        A block counts when it is verified and copied, so the engine must not count on `hit.num_tokens` before.
        """
        loaded = 0
        with self._cache.acquire(token_ids[:-1], extra_keys) as hit:
            for block in hit.blocks():
                pages.write(block.start, block.array)
                loaded = block.start + block.num_tokens
        return loaded

    def save(
        self,
        token_ids: Sequence[int],
        pages: Pages,
        extra_keys: Sequence[bytes | tuple[int, bytes]] = (),
        start: int = 0,
    ) -> bool:
        """Changes state. Store the KV of all of `token_ids`; False when nothing was stored.

        `start`: the engine has no KV before this token. The blocks that are cached already are skipped; the last one
        may be short, since a chat's next turn goes on in exactly that block.
        """
        with self._cache.reserve(token_ids, start, extra_keys) as reservation:
            for block in reservation.blocks():
                block.write(pages.read(block.start, block.num_tokens))
            return reservation.commit()

    def report(self, prefill_tokens: int, prefill_ms: float, ttft_ms: float) -> None:
        """Changes state. What the engine measured for one request."""
        self._cache.report(prefill_tokens=prefill_tokens, prefill_ms=prefill_ms, ttft_ms=ttft_ms)
