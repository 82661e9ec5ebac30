"""What a scheduler hands to the processes that read for it: a lease by its number, and all it takes to check blocks."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from transports import messages as wire
from transports.errors import RemoteProtocolError

FORMAT = 1


class Ticket(Struct, frozen=True, array_like=True):
    """A shared lease. `hashes`, `tokens`, `keys`: of the leased blocks, whole; `num_tokens` may tell fewer of the last.

    `share`: of the daemon of this `epoch`. `ready`: so many blocks had their bytes when it was written.
    """

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]
    epoch: wire.Id
    share: wire.Id
    fingerprint: Annotated[bytes, Meta(min_length=32, max_length=32)]
    num_tokens: wire.Count
    ready: wire.Count
    slots: wire.Slots
    hashes: wire.Hashes
    tokens: wire.Tokens
    keys: Annotated[list[tuple[wire.Count, bytes]], Meta(max_length=wire.KEYS_MAX)]

    def __post_init__(self) -> None:
        if len(self.slots) % 4 or len(self.tokens) % 4 or len(self.hashes) != 4 * len(self.slots):
            raise ValueError("slots and tokens are of 4 bytes each, and there is a hash of 16 for every slot")


_decoder = msgspec.msgpack.Decoder(Ticket)


def encode_ticket(ticket: Ticket) -> bytes:
    """Query."""
    return wire.sealed(msgspec.msgpack.encode(ticket))


def decode_ticket(data: bytes) -> Ticket | None:
    """Query. None where it is not what was written; nothing is for a miss. TypeError: no bytes."""
    try:
        return _decoder.decode(wire.unsealed(data))
    except (msgspec.MsgspecError, RecursionError, RemoteProtocolError):
        return None
