"""Peers that send what is no message. A few such frames are forgiven; then nothing of theirs is read any more."""

from __future__ import annotations

import math
from collections import OrderedDict

from transports.network import PeerId

MALFORMED_MAX = 16  # in a row, without one good message between
PEERS_MAX = 1024  # remembered
LINE_MS = 1000.0  # at most one line of a kind in that time


class Offenders:
    """How often each has offended of late. Bounded: the longest silent are forgotten first, and begin anew."""

    def __init__(self) -> None:
        self._counts: OrderedDict[PeerId, int] = OrderedDict()
        self._told_ms: dict[str, float] = {}

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

    def may_be_told(self, kind: str, now_ms: float) -> bool:
        """Changes state. Whether a line in the log is due: peers, old and new, cause them as often as they like."""
        if now_ms < self._told_ms.get(kind, -math.inf) + LINE_MS:
            return False
        self._told_ms[kind] = now_ms
        return True
