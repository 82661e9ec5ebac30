"""What a prefix tree asks of an eviction policy."""

from typing import Protocol

from radix.node import Node


class EvictionPolicy(Protocol):
    """Orders the victims of one group of slots.

    Only an unpinned leaf can be a victim, and it loses blocks from the tail of its run: prefixes die from their end.
    The tree offers a node whenever it has become a victim, or was used while it is one. It does not say when it is none
    any more: a policy is constructed with `Leaves` (radix.owners), and asks them which of its offers still hold.

    A node is named by the first slot of its run. Whatever else a policy wants to know it reads from the node.
    """

    def offer(self, slot: int, last_used: int) -> None:
        """Changes state. The node whose run begins in `slot` is a victim now, last used at this tick."""

    def victim(self) -> Node | None:
        """Query. The victim that should lose its tail next; None: there is none."""
