"""Victim order over unpinned leaves, in logical ticks; one small file per policy."""

from radix.eviction.lru import LRU
from radix.eviction.policy import EvictionPolicy

__all__ = ["LRU", "EvictionPolicy"]
