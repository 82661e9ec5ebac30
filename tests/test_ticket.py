"""Tickets: what a scheduler hands to ranks comes back as it was, or as nothing."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Cache
from kvstore.service.ticket import FORMAT, Ticket, decode_ticket, encode_ticket
from tests.daemons import chat, store, verified
from transports.messages import BLOCKS_MAX, KEYS_MAX, TOKENS_MAX, sealed

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


def body_of(**changed: object) -> bytes:
    """Query. A ticket with other values, sealed as it should be."""
    return sealed(msgspec.msgpack.encode(list((msgspec.structs.asdict(TICKET) | changed).values())))


@pytest.mark.parametrize(
    "changed",
    [
        {"format": FORMAT + 1},
        {"format": FORMAT - 1},
        {"format": True},
        {"epoch": -1},
        {"share": 1 << 63},
        {"share": 1.5},
        {"fingerprint": bytes(31)},
        {"fingerprint": bytes(33)},
        {"fingerprint": "x" * 32},
        {"num_tokens": -1},
        {"num_tokens": (1 << 48) + 1},
        {"ready": -1},
        {"ready": None},
        {"slots": bytes(7)},
        {"slots": bytes(12)},
        {"slots": [0, 1]},
        {"hashes": bytes(31)},
        {"hashes": b""},
        {"tokens": bytes(3)},
        {"tokens": bytes(4 * TOKENS_MAX + 4)},
        {"slots": bytes(4 * (BLOCKS_MAX + 1)), "hashes": bytes(16 * (BLOCKS_MAX + 1))},
        {"keys": [(0, b"")] * (KEYS_MAX + 1)},
        {"keys": [(0,)]},
        {"keys": [(0, b"", 0)]},
        {"keys": [(-1, b"")]},
        {"keys": {0: b""}},
        {"keys": None},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_what_is_out_of_bounds_is_nothing(changed: dict[str, object]) -> None:
    """SEC: sealed as it should be, by who may say anything."""
    assert decode_ticket(body_of()) == TICKET
    assert decode_ticket(body_of(**changed)) is None


def test_bounds_are_within() -> None:
    most = {
        "epoch": (1 << 63) - 1,
        "share": (1 << 63) - 1,
        "num_tokens": 1 << 48,
        "slots": bytes(4 * BLOCKS_MAX),
        "hashes": bytes(16 * BLOCKS_MAX),
        "tokens": bytes(4 * TOKENS_MAX),
        "keys": [(0, bytes(16))] * KEYS_MAX,
    }
    assert decode_ticket(body_of(**most)) == msgspec.structs.replace(TICKET, **most)


def test_a_ticket_of_fewer_values_is_nothing_and_of_more_is_read() -> None:
    """A later version adds fields at the end, or counts FORMAT up."""
    values = list(msgspec.structs.asdict(TICKET).values())
    for count in range(len(values)):
        assert decode_ticket(sealed(msgspec.msgpack.encode(values[:count]))) is None
    assert decode_ticket(sealed(msgspec.msgpack.encode([*values, {"more": [1]}]))) == TICKET
    assert decode_ticket(sealed(msgspec.msgpack.encode(msgspec.structs.asdict(TICKET)))) is None, "by name"


numbers = st.sampled_from([0, 1, -1, FORMAT, 1 << 48, 1 << 63, (1 << 64) - 1]) | st.integers(-1000, 1000)
anything = numbers | st.none() | st.floats() | st.text(max_size=3) | st.binary(max_size=40) | st.lists(numbers)


@given(at=st.integers(0, 9), value=anything)
def test_any_value_makes_a_ticket_or_nothing(at: int, value: Any) -> None:
    """SEC."""
    changed = list(msgspec.structs.asdict(TICKET).values())
    changed[at] = value
    known = decode_ticket(sealed(msgspec.msgpack.encode(changed)))
    if known is not None:
        assert len(known.hashes) == 4 * len(known.slots)
        assert decode_ticket(encode_ticket(known)) == known
    assert decode_ticket(sealed(msgspec.msgpack.encode(value))) is None


# --- what a reader makes of it


def altered(rng: random.Random, ticket: Ticket) -> bytes:
    """Query. One of the values is another one, of the right type, and sealed as it should be."""
    values = msgspec.structs.asdict(ticket)
    name = rng.choice([name for name in values if name != "format"])
    old = values[name]
    if isinstance(old, int):
        values[name] = rng.choice([0, 1, 17, old + 1, old - 1, 1 << 48])
    elif isinstance(old, bytes):
        piece, at = rng.choice([b"", rng.randbytes(4), bytes(4)]), 4 * rng.randrange(len(old) // 4)
        values[name] = (old[:at] + piece + old[at + 4 :])[: rng.choice([1 << 20, len(old) - 16])]
        if name == "slots":
            values["hashes"] = ticket.hashes.ljust(4 * len(values[name]), b"x")[: 4 * len(values[name])]
    else:
        values[name] = rng.choice([[(0, b"")], [(5, b"x"), (5, b"x")], [(9, b"a"), (3, b"b")], [(64, b"x")]])
    return sealed(msgspec.msgpack.encode(list(values.values())))


def test_a_ticket_that_lies_shows_no_other_bytes(cache: Cache) -> None:
    """COR, SEC: whatever it says is compared with the blocks: a shorter hit, or none; and the next one is served."""
    rng, num_wrong = random.Random(3), 0
    assert store(cache, chat(1))
    assert store(cache, chat(2))
    for _ in range(150):
        assert cache.redeem(b"").wait() == 0
        store(cache, chat(1))  # what a lie has had discarded
        with cache.acquire(chat(1), shared=True) as hit:
            ticket = decode_ticket(hit.ticket)
            assert ticket is not None
            data = altered(rng, ticket)
            known = decode_ticket(data)
            with cache.redeem(data) as own:
                num_tokens = own.wait()
                if num_tokens:
                    assert known is not None
                    assert verified(own, memoryview(known.tokens).cast("I").tolist()) == num_tokens
                num_wrong += num_tokens < 64
    assert 50 < num_wrong < 150
    with cache.acquire(chat(2), shared=True) as hit, cache.redeem(hit.ticket) as own:
        assert verified(own, chat(2)) == 64


@pytest.mark.parametrize("changed", [{"tokens": b"\xff" * 256}, {"keys": [(1 << 48, b"x")]}], ids=["tokens", "keys"])
def test_a_ticket_that_names_no_prompt_is_a_miss(cache: Cache, changed: dict[str, Any]) -> None:
    """SEC: the digest fits, and there is no such token, or no such place."""
    assert store(cache, chat(1))
    with cache.acquire(chat(1), shared=True) as hit:
        ticket = decode_ticket(hit.ticket)
        assert ticket is not None
        with cache.redeem(encode_ticket(msgspec.structs.replace(ticket, **changed))) as own:
            assert own.num_tokens == 0


@pytest.mark.parametrize("wrong", [None, "ticket", 7])
def test_what_is_not_bytes_is_a_programmers_error(wrong: object) -> None:
    with pytest.raises(TypeError):
        decode_ticket(wrong)  # type: ignore[arg-type]
