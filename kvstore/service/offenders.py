"""Peers that send what is no message. A few such frames are forgiven; then nothing of theirs is read any more."""

from __future__ import annotations

from collections import OrderedDict

from transports.network import PeerId

MALFORMED_MAX = 16  # in a row, without one good message between
PEERS_MAX = 1024  # remembered


class Offenders:
    """How often each has offended of late. Bounded: the longest silent are forgotten first, and begin anew."""

    def __init__(self) -> None:
        self._counts: OrderedDict[PeerId, int] = OrderedDict()

    def is_dropped(self, peer: PeerId) -> bool:
        """Query. Whether its frames are not worth a look."""
        return bool(self._counts) and self._counts.get(peer, 0) >= MALFORMED_MAX

    def offends(self, peer: PeerId) -> int:
        """Changes state. Another frame that is no message; how many it is by now."""
        count = self._counts.pop(peer, 0) + 1
        self._counts[peer] = count
        if len(self._counts) > PEERS_MAX:
            self._counts.popitem(last=False)
        return count

    def speaks(self, peer: PeerId) -> None:
        """Changes state. A good message: what went before it may have been the line's fault."""
        if self._counts:
            self._counts.pop(peer, None)
