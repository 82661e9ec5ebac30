"""What a prefix tree asks of an eviction policy."""

from typing import Protocol

from radix.node import Node


class EvictionPolicy(Protocol):
    """Orders the victims of one group of slots.

    Only an unpinned leaf can be a victim, and it loses blocks from the tail of its run: prefixes die from their end.
    The tree says which nodes these are; the policy only orders them. It may read the nodes but never changes them.
    """

    def offer(self, node: Node) -> None:
        """Changes state. `node` is an unpinned leaf. Called again, also without a `withdraw`, when it was used."""

    def withdraw(self, node: Node) -> None:
        """Changes state. `node` is no victim now: pinned, given a child, or gone. No effect if it was not on offer."""

    def victim(self) -> Node | None:
        """Query. The node on offer that should lose its tail next; None: nothing is on offer."""
