"""The client's end of an exchange, without sockets or clocks: who waits for which reply, and when to stop asking."""

from collections import OrderedDict

from transports.messages import Reply

PENDING_MAX = 4096
BACKOFF_MS_MIN = 20.0
BACKOFF_MS_MAX = 250.0


class Exchange:
    """Replies matched to requests by id. Late, repeated and foreign replies fall on the floor."""

    def __init__(self) -> None:
        self._replies: OrderedDict[int, Reply | None] = OrderedDict()  # None: still waited for
        self._last_id = 0

    def begin(self) -> int:
        """Changes state. A fresh request id; the oldest request is forgotten beyond PENDING_MAX."""
        self._last_id += 1
        self._replies[self._last_id] = None
        if len(self._replies) > PENDING_MAX:
            self._replies.popitem(last=False)
        return self._last_id

    def deliver(self, reply: Reply) -> None:
        """Changes state. Keep a reply for whoever waits for it; the first one counts."""
        if self._replies.get(reply.request_id, reply) is None:
            self._replies[reply.request_id] = reply

    def take(self, request_id: int) -> Reply | None:
        """Changes state. The reply, once; None while it has not come."""
        reply = self._replies.get(request_id)
        if reply is not None:
            del self._replies[request_id]
        return reply

    def waits_for(self, request_id: int) -> bool:
        """Query. Whether a reply to this request could still be delivered or taken."""
        return request_id in self._replies

    def forget(self, request_id: int) -> None:
        """Changes state. Nobody waits for this reply any more."""
        self._replies.pop(request_id, None)

    def forget_all(self) -> None:
        """Changes state. The connection is gone: no reply will come."""
        self._replies.clear()


class Breaker:
    """Opens at the first missed deadline, closes when a background hello succeeds.

    While `is_open`, callers answer every request as a miss without touching the network, so that a stopped
    daemon costs one deadline per process and not one per request.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._backoff_ms = BACKOFF_MS_MIN
        self._next_probe_ms = 0.0

    def trip(self, now_ms: float) -> None:
        """Changes state. Stop asking; the first probe is due after the shortest pause."""
        if not self.is_open:
            self.is_open = True
            self._backoff_ms = BACKOFF_MS_MIN
            self._next_probe_ms = now_ms + self._backoff_ms

    def probe_due_ms(self) -> float | None:
        """Query. When the next hello should be tried; None while closed."""
        return self._next_probe_ms if self.is_open else None

    def probe_failed(self, now_ms: float) -> None:
        """Changes state. Wait twice as long before the next probe, at most BACKOFF_MS_MAX."""
        self._backoff_ms = min(2 * self._backoff_ms, BACKOFF_MS_MAX)
        self._next_probe_ms = now_ms + self._backoff_ms

    def heal(self) -> None:
        """Changes state. A hello succeeded: ask again."""
        self.is_open = False
