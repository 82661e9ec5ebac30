"""LMCache's multi-process server, engine-driven over shared memory: the path of `lmcache bench server --mode cpu`, with
the classes that LMCache's own engine adapters use.

The caller's memory is registered as the paged KV of a model with one layer whose K and V are one plane: its blocks are
contiguous then, which is the fastest layout for LMCache. A chunk is one block. `look_up` takes the locks that
`retrieve` releases, and is not part of its time.
"""

import http.client
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# benchmarks/__init__.py sets these for our own runs; a rival runs with its own defaults.
os.environ.pop("OMP_WAIT_POLICY", None)

import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from benchmarks.peers.servers import Server, free_ports
from benchmarks.peers.system import BLOCK_TOKENS, Bytes, Place, Prompt, Refused

CAPACITY_GB = 2
REPLY_S_MAX = 30.0
SHARED_MEMORY = Path("/dev/shm")


class LMCache:
    """A server, and one client of it."""

    def __init__(self, place: Place) -> None:
        port, self._http_port, metrics_port = free_ports(3)
        self._segment = SHARED_MEMORY / f"lmcache_l1_pool_{place.name}"  # the server adds the front
        self._server = Server(_command(port, self._http_port, metrics_port, place.name), place.disk / "lmcache.log")
        self._server.wait_until(self._is_healthy)
        self._zmq = zmq.Context()
        self._zmq.setsockopt(zmq.LINGER, 0)
        self._requests = RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=self._zmq)
        self._transfer: Any = None
        self._numbers = itertools.count(1)
        self._looked_up: IPCCacheServerKey | None = None  # whose locks are held

    def attach(self, memory: Bytes) -> None:
        self.release()  # the server knows locks only while it knows the model
        self._detach()
        num_rows, nbytes = memory.shape[0] * memory.shape[1], memory.shape[2]
        tensor = torch.from_numpy(memory.reshape(num_rows, nbytes)).view(torch.bfloat16)
        self._caches = {"layer.0": tensor.view(num_rows, BLOCK_TOKENS, nbytes // BLOCK_TOKENS // 2)}
        self._first_target = memory.shape[1]
        self._model = f"peers-{nbytes}"
        self._transfer = EngineDrivenTransferContext(next(self._numbers), self._requests)
        self._transfer.register(
            self._caches,
            self._model,
            1,
            1,
            REPLY_S_MAX,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[EngineGroupInfo(engine_group_id=0, layer_indices=(0,), tokens_per_block=BLOCK_TOKENS)],
            engine_type=EngineType.VLLM,
        )

    def store(self, prompt: Prompt) -> None:
        key = self._key(prompt, prompt.num_blocks, worker=0)
        rows = list(range(prompt.num_blocks))
        future = self._transfer.submit_store(key.request_id, key, self._caches, [rows], None, 1)
        if not future.result(timeout=REPLY_S_MAX):
            raise Refused("store: false")
        self._requests.end_session(key.request_id).result(timeout=REPLY_S_MAX)

    def settle(self) -> None:
        pass

    def release(self) -> None:
        if self._looked_up is not None:
            self._requests.free_lookup_locks(self._looked_up, 1).result(timeout=REPLY_S_MAX)
            self._requests.end_session(self._looked_up.request_id).result(timeout=REPLY_S_MAX)
            self._looked_up = None

    def look_up(self, prompt: Prompt) -> int:
        key = self._key(prompt, prompt.num_blocks, worker=None)
        self._requests.lookup(key, 1).result(timeout=REPLY_S_MAX)
        self._looked_up = key
        found = self._requests.wait_prefetch_status(key.request_id, REPLY_S_MAX).result(timeout=REPLY_S_MAX)
        if found is None:
            raise Refused("look-up: no result")
        self._num_found = int(found)
        return self._num_found

    def retrieve(self, prompt: Prompt) -> int:
        assert self._looked_up is not None
        count = self._num_found
        if not count:
            return 0
        key = self._key(prompt, count, worker=0, request_id=self._looked_up.request_id)
        rows = list(range(self._first_target, self._first_target + count))
        future = self._transfer.submit_retrieve(key.request_id, key, self._caches, [rows], None, 1)
        done = future.result(timeout=REPLY_S_MAX)
        self._looked_up = None  # retrieving has released the locks
        self._requests.end_session(key.request_id).result(timeout=REPLY_S_MAX)
        return count if done else 0

    def forget(self) -> None:
        self.release()
        self._requests.clear(True).result(timeout=REPLY_S_MAX)

    def stored_files(self) -> Sequence[Path]:
        return [self._segment]

    def holders(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
        self._requests.close()
        self._zmq.term()
        self._server.stop()

    def _detach(self) -> None:
        if self._transfer is not None:
            future = self._transfer.unregister()
            if future is not None:
                future.result(timeout=REPLY_S_MAX)
            self._transfer.close()
            self._transfer = None

    def _key(
        self, prompt: Prompt, num_blocks: int, *, worker: int | None, request_id: str | None = None
    ) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            num_kv_readers=1,
            worker_id=worker,
            token_ids=prompt.token_ids,
            start=0,
            end=num_blocks * BLOCK_TOKENS,
            request_id=request_id or f"request-{next(self._numbers)}",
        )

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=2)
        try:
            connection.request("GET", "/healthcheck")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _command(port: int, http_port: int, metrics_port: int, name: str) -> list[str]:
    options = {
        "host": "127.0.0.1",
        "port": port,
        "http-host": "127.0.0.1",
        "http-port": http_port,
        "prometheus-port": metrics_port,
        "shm-name": name,
        "chunk-size": BLOCK_TOKENS,
        "l1-size-gb": CAPACITY_GB,
        "eviction-policy": "LRU",
        "supported-transfer-mode": "auto",
    }
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    program = str(Path(sys.executable).with_name("lmcache"))
    return [program, "server", *words, "--no-l1-use-lazy", "--disable-observability"]
