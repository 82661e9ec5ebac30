"""KV-cache tiering and prefix caching for LLM inference engines: the connector API.

`connect` (to a daemon) or `open` (in this process) gives a Client; `Client.attach(KVSpec)` a Cache with `match`,
`acquire`, `reserve`. Everything an engine may see derives from KVStoreError, and only these three raise it.
"""

from kvstore.config import Config, MemoryConfig
from kvstore.errors import ConfigInvalid, DaemonUnavailable, KVStoreError, SessionLost, SpecMismatch, TierUnavailable
from kvstore.ranks import RankGroup
from kvstore.service.client import Cache, Client, connect
from kvstore.service.client import open_embedded as open
from kvstore.service.hit import Block, Hit
from kvstore.service.reservation import Reservation, WritableBlock
from kvstore.spec import KVSpec

__all__ = [
    "Block",
    "Cache",
    "Client",
    "Config",
    "ConfigInvalid",
    "DaemonUnavailable",
    "Hit",
    "KVSpec",
    "KVStoreError",
    "MemoryConfig",
    "RankGroup",
    "Reservation",
    "SessionLost",
    "SpecMismatch",
    "TierUnavailable",
    "WritableBlock",
    "connect",
    "open",
]
