"""The wire: a golden sample of each message, bounds at both ends, and no bytes that do anything but decode or fail."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transports import messages as wire
from transports.errors import LocalProtocolError, RemoteProtocolError
from transports.messages import DIGEST_NBYTES, MESSAGE_NBYTES_MAX, Message, Reply, Request, decode, encode, sealed

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "vectors" / "messages.json").read_text())
KINDS: list[type[Message]] = list(get_args(wire.AnyMessage))

SESSION, LEASE, SHARE = 5 << 16 | 3, 77, 1234567890123456791
HASHES, TOKENS, SLOTS = bytes(range(32)), bytes(range(40)), bytes(range(8))
KEYS = [(3, bytes(range(16)))]
SAMPLES: list[Message] = [
    wire.Hello(1, 1, 1, SESSION, 1234567890123456789),
    wire.Attach(2, SESSION, b"\x81\xa5model\xa1m", "tp2", (0, 32), (4, 8)),
    wire.Find(3, SESSION, 7, HASHES, TOKENS, KEYS),
    wire.Acquire(4, SESSION, 7, LEASE, HASHES, TOKENS, KEYS, True),
    wire.Reserve(5, SESSION, 7, LEASE, HASHES, 64, b"tail", 3),
    wire.Commit(6, SESSION, LEASE, b"\x01\x00", True, -1, 30.5, 128, bytes(range(16))),
    wire.Clear(7, SESSION, 7),
    wire.GetStatus(8),
    wire.Wait(9, SESSION, LEASE, 12, 100.0, SHARE),
    wire.Carry(10, SESSION, [(LEASE, SLOTS), (78, b"")]),
    wire.Release(SESSION, [1, LEASE, (1 << 63) - 1]),
    wire.Abort(SESSION, LEASE),
    wire.Discard(SESSION, LEASE, 3, "header", SHARE),
    wire.Prefetch(SESSION, 7, HASHES, TOKENS, KEYS),
    wire.Report(SESSION, 7, 1500, 812.25, 850.5),
    wire.Goodbye(SESSION),
    wire.Welcome(1, 1, 1234567890123456789, SESSION, "/dev/shm/x/slab", "/dev/shm/x/sessions", True, True),
    wire.Attached(2, 7, "xxh3-128", 3),
    wire.Found(3, 1500),
    wire.Acquired(4, 100, SLOTS, 1, SHARE),
    wire.Reserved(5, 64, SLOTS, 1234567890123456790, 2),
    wire.Committed(6, 2),
    wire.Done(7),
    wire.State(8, b'{"epoch": 1}'),
    wire.Failed(9, "session-lost", "session 1 is unknown here — é"),
    wire.Loaded(10, 12, True),
]


# --- golden samples


def test_there_is_a_sample_of_each_message() -> None:
    assert [type(sample) for sample in SAMPLES] == sorted(KINDS, key=lambda kind: kind.__struct_config__.tag)  # type: ignore[arg-type, return-value]
    assert set(GOLDEN) == {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_golden_sample(sample: Message) -> None:
    """A changed frame is a change of protocol: raise VERSION_MAX, or older clients of a node misread the daemon."""
    assert encode(sample).hex() == GOLDEN[type(sample).__name__]
    assert decode(bytes.fromhex(GOLDEN[type(sample).__name__])) == sample
    assert decode(memoryview(encode(sample))) == sample


def test_every_message_is_request_notice_or_reply() -> None:
    requests, notices, replies = (get_args(each) for each in (wire.AnyRequest, wire.AnyNotice, wire.AnyReply))
    assert set(requests) | set(notices) | set(replies) == set(KINDS)
    assert all(issubclass(kind, Request) for kind in requests)
    assert all(issubclass(kind, Reply) for kind in replies)
    assert not any(issubclass(kind, (Request, Reply)) for kind in notices)


def test_fields_with_defaults_may_be_missing_and_unknown_ones_follow() -> None:
    """Old writers omit later fields, old readers ignore them."""
    for sample in SAMPLES:
        fields = msgspec.structs.fields(type(sample))
        needed = [field for field in fields if field.required]
        tag: Any = type(sample).__struct_config__.tag
        values = [getattr(sample, field.name) for field in needed]
        short = decode(sealed(msgspec.msgpack.encode([tag, *values])))
        assert [getattr(short, field.name) for field in needed] == values
        longer = [tag, *(getattr(sample, field.name) for field in fields), "later", {"x": [1]}]
        assert decode(sealed(msgspec.msgpack.encode(longer))) == sample


# --- bounds


@pytest.mark.parametrize(
    "message",
    [
        wire.GetStatus(-1),
        wire.GetStatus(1 << 63),
        wire.Found(1, -1),
        wire.Clear(1, SESSION, 65536),
        wire.Find(1, SESSION, 0, b"", bytes(4 * (wire.TOKENS_MAX + 1))),
        wire.Acquired(1, 1, bytes(4 * (wire.BLOCKS_MAX + 1)), 0),
        wire.Wait(1, SESSION, 1, 1, -1.0),
        wire.Carry(1, SESSION, [(1, b"")] * (wire.LEASES_PER_NOTICE_MAX + 1)),
        wire.Commit(1, SESSION, 1, bytes(wire.BLOCKS_MAX + 1)),
        wire.Commit(1, SESSION, 1, b"", priority=2),
        wire.Commit(1, SESSION, 1, b"", keep_for_s=-1.0),
        wire.Commit(1, SESSION, 1, b"", keep_for_s=float("nan")),
        wire.Report(SESSION, 0, 1, float("inf")),
        wire.Release(SESSION, [1] * (wire.LEASES_PER_NOTICE_MAX + 1)),
        wire.Release(SESSION, [-1]),
        wire.Reserve(1, SESSION, 0, 1, b"", 0, bytes(4097)),
        wire.Attach(1, SESSION, bytes(wire.SPEC_NBYTES_MAX + 1)),
        wire.Attach(1, SESSION, b"", "x" * 4097),
        wire.Attach(1, SESSION, b"", "g", (-1, 1)),
        wire.Attach(1, SESSION, b"", "g", (0, 1), (0, 1 << 32)),
        wire.Reserve(1, SESSION, 0, 1, b"", 0, b"", -1),
        wire.Commit(1, SESSION, 1, b"\1", sums=bytes(8 * wire.BLOCKS_MAX + 8)),
        wire.Wait(1, SESSION, 1, 1, 0.0, -1),
        wire.Acquired(1, 1, b"", 0, 1 << 63),
        wire.Discard(SESSION, 1, 0, "x" * 4097),
        wire.Find(1, SESSION, 0, b"", b"", [(0, bytes(16))] * (wire.KEYS_MAX + 1)),
        wire.Find(1, SESSION, 0, b"", b"", [(0, bytes(15))]),
        wire.Find(1, SESSION, 0, b"", b"", [(0, bytes(17))]),
        wire.Find(1, SESSION, 0, b"", b"", [(-1, bytes(16))]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_out_of_bounds_is_refused(message: Message) -> None:
    """SEC."""
    with pytest.raises(RemoteProtocolError):
        decode(encode(message))


def test_bounds_themselves_are_allowed() -> None:
    for message in (
        wire.GetStatus((1 << 63) - 1),
        wire.Find(1, SESSION, 65535, bytes(16 * wire.BLOCKS_MAX), bytes(4 * wire.TOKENS_MAX)),
        wire.Acquired(1, 1, bytes(4 * wire.BLOCKS_MAX), 0),
        wire.Release(SESSION, [1] * wire.LEASES_PER_NOTICE_MAX),
        wire.Find(1, SESSION, 0, b"", b"", [(wire.TOKENS_MAX, bytes(16))] * wire.KEYS_MAX),
    ):
        assert decode(encode(message)) == message


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_packed_fields_hold_whole_elements(sample: Message) -> None:
    """SEC: half a token or slot number would break whoever reads them as an array."""
    widths = {"hashes": 16, "tokens": 4, "slots": 4, "sums": 8}
    fields = [field.name for field in msgspec.structs.fields(type(sample))]
    tag: Any = type(sample).__struct_config__.tag
    for name in widths.keys() & set(fields):
        values = msgspec.structs.asdict(sample)
        for extra in range(1, widths[name]):
            broken = values | {name: values[name] + bytes(extra)}
            with pytest.raises(RemoteProtocolError, match=f"{name}: .* no multiple of {widths[name]}"):
                decode(sealed(msgspec.msgpack.encode([tag, *broken.values()])))


def test_carried_slots_are_whole_numbers() -> None:
    """SEC."""
    with pytest.raises(RemoteProtocolError, match="no multiple of 4"):
        decode(sealed(msgspec.msgpack.encode([10, 1, SESSION, [(1, b"123")]])))


def test_frame_above_the_limit_is_our_bug() -> None:
    """What ZeroMQ would drop without a word is an error here."""
    with pytest.raises(LocalProtocolError, match="State of"):
        encode(wire.State(1, bytes(MESSAGE_NBYTES_MAX)))
    fits = wire.State(1, bytes(MESSAGE_NBYTES_MAX - 8 - DIGEST_NBYTES))
    assert len(encode(fits)) == MESSAGE_NBYTES_MAX
    assert decode(encode(fits)) == fits


# --- whatever arrives


def decodes_or_fails(frame: bytes) -> Message | None:
    try:
        message = decode(frame)
    except RemoteProtocolError as exc:
        assert len(str(exc)) < 1000
        return None
    assert isinstance(message, Message)
    assert decode(encode(message)) == message
    return message


DEEP = b"\x91" * 50_000
GET_STATUS = encode(wire.GetStatus(1))[:-DIGEST_NBYTES]


@given(frame=st.binary(max_size=300))
@example(frame=b"")
@example(frame=DEEP)
@example(frame=b"\x81" * 50_000)
@example(frame=b"\xdd\xff\xff\xff\xff\x08\x01")  # an array of four billion
@example(frame=b"\xdf\xff\xff\xff\xff")
@example(frame=b"\x94\x15\x01\x01\xc6\xff\xff\xff\xff")  # bytes of four billion
@example(frame=b"\x93\x14\x01\xdd\xff\xff\xff\xff")  # leases of four billion
@example(frame=b"\x93" + GET_STATUS[1:] + DEEP)  # in a field of a later version
@example(frame=b"\x9f" * 10_000)
@example(frame=b"\x92\xff\x01")  # a tag below zero
@example(frame=b"\x92\xa1x\x01")  # a tag of text
@example(frame=b"\x91\xd8\x05" + bytes(16))  # an extension type
@example(frame=GET_STATUS + b"\0")  # something after the end
def test_any_bytes_are_a_message_or_one_error(frame: bytes) -> None:
    """SEC: with a digest that fits and without."""
    decodes_or_fails(frame)
    decodes_or_fails(sealed(frame))


@given(sample=st.sampled_from(SAMPLES), seed=st.integers(0, 1 << 32))
def test_mutated_frames_are_a_message_or_one_error(sample: Message, seed: int) -> None:
    """SEC."""
    rng = random.Random(seed)
    frame = bytearray(encode(sample)[:-DIGEST_NBYTES])
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(frame) + 1)
        match rng.randrange(4):
            case 0:
                frame[at : at + 1] = rng.randbytes(1)
            case 1:
                del frame[at : at + rng.randint(1, 8)]
            case 2:
                frame[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                frame[at : at + 5] = rng.choice((b"\xdd", b"\xc6", b"\xdb", b"\xdf")) + b"\xff\xff\xff\xff"
    decodes_or_fails(sealed(bytes(frame)))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_bit_that_flips_on_the_way_is_one_error(sample: Message) -> None:
    """COR, SEC: also in a number of a notice, where it would name somebody else's session or lease."""
    frame = encode(sample)
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError, match="not what was sent"):
            decode(bytes(changed))


@pytest.mark.parametrize("claim", [b"\xdd", b"\xc6", b"\xdb", b"\xdf"])
def test_a_claim_of_four_billion_takes_no_memory(claim: bytes) -> None:
    """SEC, DSK: lengths are believed only as far as the frame goes."""
    tracemalloc.start()
    try:
        for tag, count in ((3, 6), (4, 7), (10, 3), (20, 3)):
            frame = sealed(bytes((0x90 | count, tag)) + b"\x01" * (count - 2) + claim + b"\xff\xff\xff\xff")
            with pytest.raises(RemoteProtocolError):
                decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_truncated_frames_are_one_error(sample: Message) -> None:
    """SEC."""
    frame = encode(sample)
    for length in range(len(frame)):
        with pytest.raises(RemoteProtocolError):
            decode(frame[:length])


@pytest.mark.parametrize("text", [b"\xff\xfe\xfd", b"\xed\xa0\x80", b"\xc0\xaf\x41", b"\xf5\x80\x80"])
def test_text_that_is_no_utf8_is_one_error(text: bytes) -> None:
    """SEC."""
    frame = encode(wire.Failed(1, "abc", "x"))
    with pytest.raises(RemoteProtocolError):
        decode(sealed(frame[:-DIGEST_NBYTES].replace(b"abc", text)))
