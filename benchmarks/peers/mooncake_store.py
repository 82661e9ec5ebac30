"""Mooncake Store over TCP without etcd: `mooncake_master` and a client whose segment holds the blocks, either in the
caller's own process, or in a storage node beside it, so that every byte crosses the loopback."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import mooncake
from mooncake.store import MooncakeDistributedStore

from benchmarks.peers.servers import Server, free_ports, listens
from benchmarks.peers.system import Bytes, Place, Prompt, Refused, addresses

SEGMENT_NBYTES = 1 << 30
BUFFER_NBYTES = 256 << 20
NODE_BUFFER_NBYTES = 64 << 20
OBJECT_NOT_FOUND = -704
READY = b"storage node is ready"


def connected(port: int, master_port: int, segment_nbytes: int, buffer_nbytes: int) -> MooncakeDistributedStore:
    """Changes state. A client of the master; Refused."""
    store = MooncakeDistributedStore()
    master, metadata = f"127.0.0.1:{master_port}", "P2PHANDSHAKE"
    code = store.setup(f"127.0.0.1:{port}", metadata, segment_nbytes, buffer_nbytes, "tcp", "", master)
    if code:
        raise Refused(f"setup: {code}")
    return store


class Mooncake:
    """`remote`: the blocks lie in another process."""

    def __init__(self, place: Place, *, remote: bool) -> None:
        master_port, metrics_port, node_port, client_port = free_ports(4)
        self._remote = remote
        self._servers = [_master(master_port, metrics_port, place.disk / "master.log")]
        self._servers[0].wait_until(lambda: listens(master_port))
        if remote:
            self._servers.append(_node(node_port, master_port, place.disk / "node.log"))
        self._store = connected(client_port, master_port, 0 if remote else SEGMENT_NBYTES, BUFFER_NBYTES)
        self._memory: Bytes | None = None

    def attach(self, memory: Bytes) -> None:
        if self._memory is not None:
            self._store.unregister_buffer(self._memory.ctypes.data)
        code = self._store.register_buffer(memory.ctypes.data, memory.nbytes)
        if code:
            raise Refused(f"register_buffer: {code}")
        self._memory = memory
        self._sources, self._targets = addresses(memory[0]), addresses(memory[1])
        self._sizes = [memory.shape[2]] * memory.shape[1]

    def store(self, prompt: Prompt) -> None:
        count = prompt.num_blocks
        codes = self._store.batch_put_from(prompt.keys, self._sources[:count], self._sizes[:count])
        if any(codes):
            raise Refused(f"batch_put_from: {sorted(set(codes))}")

    def settle(self) -> None:
        pass

    def release(self) -> None:
        pass

    def look_up(self, prompt: Prompt) -> int:
        found = self._store.batch_is_exist(prompt.keys)
        return next((at for at, code in enumerate(found) if code != 1), prompt.num_blocks)

    def retrieve(self, prompt: Prompt) -> int:
        count = prompt.num_blocks
        read = self._store.batch_get_into(prompt.keys, self._targets[:count], self._sizes[:count])
        first = next((at for at, nbytes in enumerate(read) if nbytes != prompt.block_nbytes), count)
        if first < count and read[first] != OBJECT_NOT_FOUND:
            raise Refused(f"batch_get_into: {read[first]}")
        return first

    def forget(self) -> None:
        self._store.remove_all(True)  # also what a lease of the last read still protects

    def stored_files(self) -> Sequence[Path]:
        return ()

    def holders(self) -> Sequence[int]:
        return [self._servers[1].pid if self._remote else os.getpid()]

    def close(self) -> None:
        self._store.close()
        for server in reversed(self._servers):
            server.stop()


def _master(port: int, metrics_port: int, log: Path) -> Server:
    program = Path(mooncake.__file__).with_name("mooncake_master")
    options = {
        "rpc_port": port,
        "rpc_address": "127.0.0.1",
        "metrics_port": metrics_port,
        "enable_http_metadata_server": "false",
        "eviction_high_watermark_ratio": 0.95,
    }
    return Server([str(program), *(f"--{name}={value}" for name, value in options.items())], log)


def _node(port: int, master_port: int, log: Path) -> Server:
    node = Server([sys.executable, "-m", "benchmarks.peers.mooncake_store", str(port), str(master_port)], log)
    node.wait_until(lambda: READY in log.read_bytes())
    return node


def serve_segment(port: int, master_port: int) -> None:
    """Changes state. The storage node, until it is killed."""
    with contextlib.closing(connected(port, master_port, SEGMENT_NBYTES, NODE_BUFFER_NBYTES)):
        sys.stdout.buffer.write(READY + b"\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    serve_segment(int(sys.argv[1]), int(sys.argv[2]))
