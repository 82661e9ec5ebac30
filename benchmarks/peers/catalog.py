"""The systems that can take part, and where each runs."""

from benchmarks.peers.process import Peer

OURS = "ours"
_FILES = "benchmarks.peers.plain_files:PlainFiles"
_LMCACHE = "benchmarks.peers.lmcache_server:LMCache"
_MOONCAKE = "benchmarks.peers.mooncake_store:Mooncake"
_OURS = "benchmarks.peers.ours:Ours"
_NOT_TRACKED = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
_QUIET = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}

PEERS = [
    Peer(OURS, _OURS, "kvstore serve, memory tier", options={"memory": "1GiB"}, damage=("payload", "header")),
    Peer(
        "ours-ssd",
        _OURS,
        "kvstore serve, blocks pushed out to the SSD tier before they are read",
        options={"memory": "512MiB", "disk": "8GiB"},
        damage=("payload", "header"),
    ),
    Peer("lmcache", _LMCACHE, "LMCache server, engine-driven, shared memory", "lmcache", environment=_NOT_TRACKED),
    Peer(
        "lmcache-1thread",
        _LMCACHE,
        "the same with OMP_NUM_THREADS=1",
        "lmcache",
        environment={**_NOT_TRACKED, "OMP_NUM_THREADS": "1"},
    ),
    Peer("mooncake", _MOONCAKE, "Mooncake Store, caller's process", "mooncake", {"remote": False}, environment=_QUIET),
    Peer("mooncake-tcp", _MOONCAKE, "Mooncake Store, node over TCP", "mooncake", {"remote": True}, environment=_QUIET),
    Peer("files", _FILES, "a file per block, on disk, not synced"),
    Peer("files-shm", _FILES, "a file per block, in shared memory", options={"shared": True}),
]
DEFAULT = [peer.name for peer in PEERS if peer.name != "ours-ssd"]
