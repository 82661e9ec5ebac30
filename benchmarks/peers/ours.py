"""Our store: `kvstore serve` as its own process, and the client that engines use."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kvstore
from benchmarks.peers.servers import Server
from benchmarks.peers.system import BLOCK_TOKENS, Bytes, Place, Prompt

DEADLINE_MS = 5000
READY_S_MAX = 60.0
WRITTEN_S_MAX = 30.0
VALUE_NBYTES = 2
FILLER_NUMBER = 20_000  # prompts from here on only push others out of memory


def spec_of(block_nbytes: int) -> kvstore.KVSpec:
    """Query. bfloat16 KV of 64 tokens: 8 heads of 64 while that divides the block, else one narrow head."""
    token_values = block_nbytes // BLOCK_TOKENS // VALUE_NBYTES
    layers, rest = divmod(token_values, 2 * 8 * 64)
    shape = (layers, 8, 64) if layers and not rest else (1, 1, token_values // 2)
    spec = kvstore.KVSpec(
        model="peers",
        dtype="bfloat16",
        num_layers=shape[0],
        num_kv_heads=shape[1],
        head_dim=shape[2],
        block_tokens=BLOCK_TOKENS,
    )
    assert spec.block_nbytes == block_nbytes
    return spec


class Ours:
    """`disk`: capacity of an SSD tier, empty for none. With one, `settle` pushes what was stored out of memory."""

    def __init__(self, place: Place, *, memory: str, disk: str = "") -> None:
        address = f"ipc://{place.shared / 'kvstore.sock'}"
        self._slab, self._disk = place.shared / "slab", place.disk / "ssd" if disk else None
        command = [str(Path(sys.executable).with_name("kvstore")), "serve", "--address", address]
        command += ["--memory.capacity", memory, "--memory.path", str(self._slab)]
        if self._disk is not None:
            command += ["--disk.path", str(self._disk), "--disk.capacity", disk, "--disk.write_budget", "unlimited"]
        self._server = Server(command, place.disk / "kvstore.log")
        self._address = address
        self._server.wait_until(self._answers)
        self._client = kvstore.connect(address, deadline_ms=DEADLINE_MS)
        self._wait_ready()

    def attach(self, memory: Bytes) -> None:
        spec = spec_of(memory.shape[2])
        self._cache = self._client.attach(spec)
        arrays = memory.view(spec.numpy_dtype).reshape(*memory.shape[:2], *spec.array_shape(BLOCK_TOKENS))
        self._sources, self._targets = list(arrays[0]), list(arrays[1])

    def store(self, prompt: Prompt) -> None:
        with self._cache.reserve(prompt.token_ids) as reservation:
            for block, source in zip(reservation.blocks(), self._sources, strict=False):
                block.write(source)
            reservation.commit()

    def settle(self) -> None:
        if self._disk is None:
            return
        spec, count = self._cache.spec, len(self._sources)
        self._wait_written()
        capacity = self._client.status()["daemon"]["memory"]["capacity_nbytes"]
        for number in range(capacity // (count * spec.slot_nbytes) + 1):
            self.store(Prompt(FILLER_NUMBER + number, count, spec.block_nbytes))
            self._wait_written()  # what waits for the drive is kept in memory, and beyond a bound not written

    def release(self) -> None:
        pass

    def look_up(self, prompt: Prompt) -> int:
        return self._cache.match(prompt.token_ids) // BLOCK_TOKENS

    def retrieve(self, prompt: Prompt) -> int:
        count = 0
        with self._cache.acquire(prompt.token_ids) as hit:
            for block, target in zip(hit.blocks(), self._targets, strict=False):
                np.copyto(target, block.array)
                count += 1
        return count

    def forget(self) -> None:
        self._cache.clear()

    def stored_files(self) -> Sequence[Path]:
        root = self._slab if self._disk is None else self._disk
        return sorted(path for path in root.rglob("*") if path.is_file())

    def holders(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        self._client.close()
        self._server.stop()

    def _answers(self) -> bool:
        try:
            kvstore.connect(self._address, deadline_ms=200).close()
        except kvstore.DaemonUnavailable:
            return False
        return True

    def _wait_written(self) -> None:
        give_up_at = time.monotonic() + WRITTEN_S_MAX
        while not self._client.status()["daemon"]["disk"]["idle"]:
            assert time.monotonic() < give_up_at, "the SSD tier did not write what was stored"
            time.sleep(0.005)

    def _wait_ready(self) -> None:
        """The slab is usable at once, but this measures the steady state: all its memory is there."""
        give_up_at = time.monotonic() + READY_S_MAX
        while (memory := self._client.status()["daemon"]["memory"])["extents_ready"] < memory["extents"]:
            assert time.monotonic() < give_up_at, "the slab's memory did not come"
            time.sleep(0.05)
