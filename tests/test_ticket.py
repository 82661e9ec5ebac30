"""Tickets: what a scheduler hands to ranks comes back as it was, or as nothing."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvstore.service.ticket import FORMAT, Ticket, decode_ticket, encode_ticket
from transports.messages import BLOCKS_MAX, KEYS_MAX, sealed

TICKET = Ticket(FORMAT, 1 << 60, 77, bytes(range(32)), 20, 2, bytes(8), bytes(range(32)), bytes(80), [(3, bytes(16))])


def test_what_was_written_is_read() -> None:
    assert decode_ticket(encode_ticket(TICKET)) == TICKET
    assert decode_ticket(memoryview(encode_ticket(TICKET))) == TICKET  # type: ignore[arg-type]


def test_any_flipped_bit_makes_it_nothing() -> None:
    """COR: also where what is left would be a ticket."""
    data = encode_ticket(TICKET)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_ticket(bytes(flipped)) is None


def test_rubbish_is_nothing() -> None:
    """SEC."""
    rng, data = random.Random(1), encode_ticket(TICKET)
    for length in range(len(data)):
        assert decode_ticket(data[:length]) is None
    for _ in range(1000):
        assert decode_ticket(rng.randbytes(rng.randrange(300))) is None
        assert decode_ticket(sealed(rng.randbytes(rng.randrange(100)))) is None
    assert decode_ticket(sealed(b"\x91" * 100_000)) is None, "nested deeply"


@pytest.mark.parametrize(
    "changed",
    [
        {"format": FORMAT + 1},
        {"epoch": -1},
        {"share": 1 << 63},
        {"fingerprint": bytes(31)},
        {"num_tokens": -1},
        {"ready": -1},
        {"slots": bytes(7)},
        {"slots": bytes(12)},
        {"hashes": bytes(31)},
        {"tokens": bytes(3)},
        {"slots": bytes(4 * (BLOCKS_MAX + 1)), "hashes": bytes(16 * (BLOCKS_MAX + 1))},
        {"keys": [(0, b"")] * (KEYS_MAX + 1)},
    ],
    ids=str,
)
def test_what_is_out_of_bounds_is_nothing(changed: dict[str, object]) -> None:
    """SEC: sealed as it should be, by who may say anything."""
    values = msgspec.structs.asdict(TICKET) | changed
    assert decode_ticket(sealed(msgspec.msgpack.encode(list(values.values())))) is None


@pytest.mark.parametrize("wrong", [None, "ticket", 7])
def test_what_is_not_bytes_is_a_programmers_error(wrong: object) -> None:
    with pytest.raises(TypeError):
        decode_ticket(wrong)  # type: ignore[arg-type]
