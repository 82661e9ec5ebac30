"""Prefix trees over chains of block hashes. Pure: standard library, numpy and xxhash only."""

from radix.eviction import LRU, EvictionPolicy
from radix.hashing import (
    HASH_NBYTES,
    NO_KEYS,
    TOKEN_MAX,
    BlockHash,
    HashKind,
    Keys,
    block_symbols,
    block_symbols_of,
    common_tokens,
    context_digests,
    hash_block,
    hash_prefix,
    keys_digest,
    keys_in,
    normalise_keys,
    root_hash,
    token_bytes,
)
from radix.load import LoadedBlocks
from radix.node import Inserted, Match, Node, Pin
from radix.tree import PrefixTree

__all__ = [
    "HASH_NBYTES",
    "LRU",
    "NO_KEYS",
    "TOKEN_MAX",
    "BlockHash",
    "EvictionPolicy",
    "HashKind",
    "Inserted",
    "Keys",
    "LoadedBlocks",
    "Match",
    "Node",
    "Pin",
    "PrefixTree",
    "block_symbols",
    "block_symbols_of",
    "common_tokens",
    "context_digests",
    "hash_block",
    "hash_prefix",
    "keys_digest",
    "keys_in",
    "normalise_keys",
    "root_hash",
    "token_bytes",
]
