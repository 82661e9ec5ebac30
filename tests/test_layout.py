"""The header page: golden, exact both ways, and nothing damaged is ever taken for a header."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.layout import (
    BLOCK_TOKENS_MAX,
    HEADER_NBYTES,
    NBYTES_OFFSET,
    RECT_INDEX_MAX,
    RECT_NBYTES,
    RECTS_MAX,
    RECTS_OFFSET,
    STATE_OFFSET,
    STATE_SUM_OFFSET,
    TOKENS_OFFSET,
    Header,
    Identity,
    Rect,
    Shard,
    header_state,
    identity_bytes,
    identity_rows,
    identity_sum,
    parse_header,
)
from tests.models import Page, page_of, write_header

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / "header_page.json").read_text())


def golden() -> Header:
    given = VECTORS["identity"]
    tokens = b"".join(token.to_bytes(4, "little") for token in given["tokens"])
    names = ("fingerprint", "block_hash", "parent", "keys_digest")
    hashes = {name: bytes.fromhex(given[name]) for name in names}
    identity = Identity(
        **hashes,
        number=given["number"],
        tokens=tokens,
        keys_start=given["keys_start"],
        context=int(given["context"], 16),
        block_tokens=given["block_tokens"],
    )
    rects = tuple(
        Rect(Shard(tuple(each["layers"]), tuple(each["heads"])), int(each["sum"], 16)) for each in VECTORS["rects"]
    )
    return Header(identity, VECTORS["payload_nbytes"], VECTORS["generation"], rects)


def checked_bits(header: Header) -> list[range]:
    """Bits that mean something: everything but what is left over from earlier blocks."""
    identity = TOKENS_OFFSET + len(header.identity.tokens)
    return [range(8 * identity), range(8 * NBYTES_OFFSET, 8 * (RECTS_OFFSET + RECT_NBYTES * len(header.rects)))]


def flipped(page: bytes, bit: int) -> bytes:
    changed = bytearray(page)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_golden_page() -> None:
    """A changed page is a format change: slabs and files written before it are unreadable."""
    page = page_of(golden())
    assert len(page) == HEADER_NBYTES
    assert page.rstrip(b"\0").hex() == "".join(VECTORS["page"])
    assert parse_header(page) == golden()


def test_golden_page_lies_as_documented() -> None:
    page, given = page_of(golden()), VECTORS["identity"]
    assert page[:8] == b"KVSLOT\r\n"
    assert page[12:14] == len(given["tokens"]).to_bytes(2, "little")
    assert page[14:16] == given["block_tokens"].to_bytes(2, "little")
    assert page[48:64].hex() == given["block_hash"]
    assert page[104:112] == int(given["context"], 16).to_bytes(8, "little")
    assert page[TOKENS_OFFSET : TOKENS_OFFSET + 4] == given["tokens"][0].to_bytes(4, "little")
    identity = page[: TOKENS_OFFSET + 4 * len(given["tokens"])] + page[2160:2168]
    assert page[2168:2176] == xxhash.xxh3_64_intdigest(identity).to_bytes(8, "little")
    state = page[2176:2296] + page[RECTS_OFFSET : RECTS_OFFSET + RECT_NBYTES * len(VECTORS["rects"])]
    assert page[2296:2304] == xxhash.xxh3_64_intdigest(state).to_bytes(8, "little")
    assert page[2184:2188] == len(VECTORS["rects"]).to_bytes(4, "little")
    packed = int.from_bytes(page[RECTS_OFFSET + 8 : RECTS_OFFSET + 14], "little")
    first = VECTORS["rects"][0]
    spans = [bound for span in (first["layers"], first["heads"]) for bound in (span[0], span[1] - span[0])]
    assert [packed >> shift & 0xFFF for shift in (0, 12, 24, 36)] == spans


def test_any_flipped_bit_is_noticed() -> None:
    """COR: every bit of everything that is checked."""
    header, page = golden(), page_of(golden())
    for bits in checked_bits(header):
        for bit in bits:
            assert parse_header(flipped(page, bit)) is None, f"bit {bit % 8} of byte {bit // 8}"


def test_flipped_bits_elsewhere_change_nothing() -> None:
    header, page = golden(), page_of(golden())
    unchecked = set(range(8 * HEADER_NBYTES)).difference(*checked_bits(header))
    for bit in random.Random(1).sample(sorted(unchecked), 500):
        assert parse_header(flipped(page, bit)) == header


def test_a_header_says_in_what_slot_its_block_lies() -> None:
    """RST: whoever finds one without a table, at a place of another slot size, knows it for a leftover."""
    header = golden()._replace(payload_nbytes=5 * 1000)
    assert header.is_short
    assert header.slot_nbytes == HEADER_NBYTES + 16 * 4096  # 64 tokens of 1,000 bytes
    assert not header._replace(identity=header.identity._replace(block_tokens=5)).is_short


def test_page_of_zeros_or_noise_is_no_header() -> None:
    rng = random.Random(2)
    assert parse_header(bytes(HEADER_NBYTES)) is None
    assert all(parse_header(rng.randbytes(HEADER_NBYTES)) is None for _ in range(100))


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"KVSLOT\n\n"), (8, b"\1\0\0\0"), (12, b"\x41\0"), (14, (BLOCK_TOKENS_MAX + 1).to_bytes(2, "little"))],
    ids=["magic", "version", "more tokens than a whole block", "block_tokens"],
)
def test_other_format_with_a_right_sum_is_no_header(offset: int, value: bytes) -> None:
    page = bytearray(page_of(golden()))
    page[offset : offset + len(value)] = value
    num_tokens = int.from_bytes(page[12:14], "little")
    right = identity_sum(bytes(page[: TOKENS_OFFSET + 4 * num_tokens]), golden().payload_nbytes)
    page[NBYTES_OFFSET + 8 : STATE_OFFSET] = right.to_bytes(8, "little")
    assert parse_header(bytes(page)) is None


def test_what_an_earlier_block_left_in_the_page_means_nothing() -> None:
    """COR: a header is written in two pieces, over whatever was there."""
    page = Page()
    page.bytes[:] = b"\xa5" * HEADER_NBYTES
    write_header(page, 0, golden())
    assert parse_header(bytes(page.bytes)) == golden()


def test_more_rectangles_than_fit_are_no_header() -> None:
    page = bytearray(page_of(golden()))
    for count in (RECTS_MAX + 1, 0xFFFFFFFF):
        page[STATE_OFFSET + 8 : STATE_OFFSET + 12] = count.to_bytes(4, "little")
        state = page[STATE_OFFSET:STATE_SUM_OFFSET] + page[RECTS_OFFSET:]
        page[STATE_SUM_OFFSET:RECTS_OFFSET] = xxhash.xxh3_64_intdigest(state).to_bytes(8, "little")
        assert parse_header(bytes(page)) is None


def test_rectangles_reach_their_bounds() -> None:
    extremes = [
        Rect(Shard((0, RECT_INDEX_MAX), (0, RECT_INDEX_MAX)), (1 << 64) - 1),
        Rect(Shard((RECT_INDEX_MAX, RECT_INDEX_MAX), (RECT_INDEX_MAX - 1, RECT_INDEX_MAX)), 0),
    ]
    header = golden()._replace(rects=tuple(extremes * (RECTS_MAX // 2)))
    page = page_of(header)
    assert RECTS_OFFSET + RECT_NBYTES * RECTS_MAX == len(page) == HEADER_NBYTES
    assert parse_header(page) == header


def test_header_without_rectangles_has_no_checksums() -> None:
    header = golden()._replace(rects=())
    assert parse_header(page_of(header)) == header


def test_sums_written_later_leave_the_head_alone() -> None:
    """The daemon sums a block after commit: it writes from STATE_OFFSET on and nothing before."""
    page = page_of(golden()._replace(rects=()))
    later = page[:STATE_OFFSET] + header_state(golden().generation, golden().rects)
    assert parse_header(later.ljust(HEADER_NBYTES, b"\0")) == golden()


def test_equal_identity_bytes_mean_equal_identity() -> None:
    """COR: what a reader compares names all of the block."""
    identity = golden().identity
    assert page_of(golden()).startswith(identity_bytes(identity))
    for field, value in identity._asdict().items():
        other: Any = value + 1 if isinstance(value, int) else value[:-4] + bytes(4)
        assert identity_bytes(identity._replace(**{field: other})) != identity_bytes(identity), field


digests, numbers = st.binary(min_size=16, max_size=16), st.integers(0, (1 << 32) - 1)
spans = st.tuples(st.integers(0, RECT_INDEX_MAX), st.integers(0, RECT_INDEX_MAX)).map(
    lambda span: (span[0], span[0] + span[1])
)
plain_identities = st.builds(
    Identity,
    fingerprint=st.binary(min_size=32, max_size=32),
    block_hash=digests,
    parent=digests,
    number=numbers,
    tokens=st.integers(0, BLOCK_TOKENS_MAX).flatmap(lambda count: st.binary(min_size=4 * count, max_size=4 * count)),
    keys_start=numbers,
    keys_digest=digests,
    context=st.integers(0, (1 << 64) - 1),
    block_tokens=st.integers(1, BLOCK_TOKENS_MAX),
)
identities = plain_identities.map(
    lambda identity: identity._replace(block_tokens=max(identity.block_tokens, len(identity.tokens) // 4))
)
headers = st.builds(
    Header,
    identity=identities,
    payload_nbytes=st.integers(0, (1 << 64) - 1),
    generation=st.integers(0, (1 << 64) - 1),
    rects=st.lists(st.builds(Rect, st.builds(Shard, spans, spans), st.integers(0, (1 << 64) - 1)), max_size=8).map(
        tuple
    ),
)


@given(header=headers)
def test_what_is_written_is_read(header: Header) -> None:
    assert parse_header(page_of(header)) == header


@given(header=headers, at=st.floats(0, 1, exclude_max=True))
def test_flipped_bit_of_any_header_is_noticed(header: Header, at: float) -> None:
    """COR."""
    bits = [bit for part in checked_bits(header) for bit in part]
    assert parse_header(flipped(page_of(header), bits[int(at * len(bits))])) is None


@given(
    block_tokens=st.integers(1, BLOCK_TOKENS_MAX),
    num_blocks=st.integers(0, 5),
    seed=st.integers(0, 1 << 32),
)
def test_many_headers_at_once_are_the_same_headers(block_tokens: int, num_blocks: int, seed: int) -> None:
    rng = random.Random(seed)
    fingerprint, parent = rng.randbytes(32), rng.randbytes(16)
    hashes, tokens = rng.randbytes(16 * num_blocks), rng.randbytes(4 * num_blocks * block_tokens)
    contexts = [rng.getrandbits(64) for _ in range(num_blocks)]
    chain, width = parent + hashes, 4 * block_tokens
    expected = [
        identity_bytes(
            Identity(
                fingerprint,
                chain[16 * at + 16 : 16 * at + 32],
                chain[16 * at : 16 * at + 16],
                at,
                tokens[at * width : (at + 1) * width],
                block_tokens,
                bytes(16),
                contexts[at],
                block_tokens,
            )
        )
        for at in range(num_blocks)
    ]
    rows = identity_rows(fingerprint, parent, hashes, tokens, contexts, block_tokens)
    assert [row.tobytes() for row in rows] == expected
