"""Level 1: messages and how they travel. Knows hashes and bytes, never a KVSpec or a Store."""
