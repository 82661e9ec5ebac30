"""Reserve, fill, commit: by an embedded store, whose client and service are the ones a daemon has."""

import gc
import logging
from typing import Any

import numpy as np
import pytest
import xxhash

import kvstore
from kvstore import Cache, Client, KVSpec
from kvstore.core.layout import HEADER_NBYTES, Header, parse_header
from kvstore.service import hold as hold_module
from tests.daemons import SPEC, assert_balanced, chat, embedded, holds, kv_of, read, store, verified, wait_until

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
MLA = KVSpec(model="mla", dtype="bfloat16", num_layers=3, latent_dim=72, block_tokens=16)
OPAQUE = KVSpec(
    model="m", dtype="uint8", num_layers=2, block_tokens=16, layout="engine-x", token_nbytes=100, grain_tokens=4
)
WIDE = KVSpec(model="wide", dtype="float16", num_layers=8, num_kv_heads=4, head_dim=128, block_tokens=100)


def facts(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.status()["daemon"]
    return found


def headers(cache: Cache, tokens: list[int]) -> list[Header]:
    """Query. Headers of the cached blocks of a prompt, as they lie in the slab."""
    found = []
    with cache.acquire(tokens) as hit:
        for offset in hit.offsets:
            header = parse_header(hit.hold.session.slab.read(offset, HEADER_NBYTES))
            assert header is not None
            found.append(header)
    return found


def sums(cache: Cache, tokens: list[int]) -> list[int | None]:
    return [header.rects[0].sum if header.rects else None for header in headers(cache, tokens)]


def true_sums(spec: KVSpec, tokens: list[int]) -> list[int]:
    starts = range(0, len(tokens), spec.block_tokens)
    parts = [kv_of(spec, tokens, at, min(spec.block_tokens, len(tokens) - at)) for at in starts]
    return [xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts]


def typed(dtype: str) -> KVSpec:
    return KVSpec(model="typed", dtype=dtype, num_layers=2, num_kv_heads=2, head_dim=16, block_tokens=16)


@pytest.mark.parametrize("by_array", [False, True])
@pytest.mark.parametrize(
    "spec", [*map(typed, DTYPES), MLA, OPAQUE, WIDE], ids=lambda spec: f"{spec.model}-{spec.dtype}"
)
def test_every_kind_of_block_comes_back_as_it_was(client: Client, spec: KVSpec, by_array: bool) -> None:
    """COR: whole and short blocks of every dtype, MLA and an engine's own layout."""
    cache, tokens = client.attach(spec), chat(1, 2 * spec.block_tokens + 8)
    assert store(cache, tokens, by_array=by_array)
    assert read(cache, tokens) == len(tokens)


@pytest.mark.parametrize("spec", [typed("float32"), MLA, OPAQUE, WIDE], ids=lambda spec: spec.model)
def test_whoever_makes_the_sum_it_is_the_same(client: Client, spec: KVSpec) -> None:
    """COR: the writer while it copies, or the daemon after the commit."""
    cache, written, filled = client.attach(spec), chat(1, 2 * spec.block_tokens + 4), chat(2, 2 * spec.block_tokens + 4)
    assert store(cache, written)
    assert sums(cache, written) == true_sums(spec, written)
    assert store(cache, filled, by_array=True)
    wait_until(lambda: sums(cache, filled) == true_sums(spec, filled))
    for header in headers(cache, written) + headers(cache, filled):
        assert [rect.shard for rect in header.rects] == [((0, spec.num_layers), (0, spec.num_kv_heads))]
    assert facts(client)["stats"]["blocks_summed"] == 3


def test_an_array_taken_after_write_makes_the_daemon_sum_again(client: Client, cache: Cache) -> None:
    """COR."""
    tokens = chat(1, 16)
    with cache.reserve(tokens) as reservation:
        (block,) = reservation.blocks()
        block.write(np.zeros(SPEC.array_shape(16), np.float32))
        block.array[...] = kv_of(SPEC, tokens, 0, 16)
        assert reservation.commit()
    wait_until(lambda: sums(cache, tokens) == true_sums(SPEC, tokens))


def test_without_checksums_none_are_left() -> None:
    """CFG: memory.checksums."""
    with embedded(checksums=False) as client:
        cache = client.attach(SPEC)
        for number in (1, 2):
            tokens = chat(number, 40)
            assert store(cache, tokens, by_array=number == 2)
            assert sums(cache, tokens) == [None] * 3
            assert read(cache, tokens) == 40
        assert facts(client)["stats"]["blocks_summed"] == 0


@pytest.mark.parametrize("spec", [typed("float32"), typed("bfloat16"), MLA, OPAQUE, WIDE], ids=lambda spec: spec.model)
def test_a_source_of_any_strides_is_written_in_order(client: Client, spec: KVSpec) -> None:
    """COR."""
    cache, tokens = client.attach(spec), chat(1, spec.block_tokens)
    source = kv_of(spec, tokens, 0, spec.block_tokens)
    apart = np.empty((*source.shape[:-1], 2 * source.shape[-1]), source.dtype)
    apart[..., ::2] = source
    turned = np.ascontiguousarray(source.T).T
    for given in (apart[..., ::2], turned, np.asfortranarray(source)):
        with cache.reserve(tokens) as reservation:
            (block,) = reservation.blocks()
            block.write(given)
            assert reservation.commit()
        assert sums(cache, tokens) == true_sums(spec, tokens)
        assert read(cache, tokens) == len(tokens)
        cache.clear()


def test_write_takes_bits_of_the_same_width_and_refuses_the_rest(client: Client) -> None:
    """COR: never a silent conversion."""
    spec, tokens = typed("bfloat16"), chat(1, 16)
    cache = client.attach(spec)
    source = kv_of(spec, tokens, 0, 16)
    with cache.reserve(tokens) as reservation:
        (block,) = reservation.blocks()
        for wrong in (
            source.astype(np.float32),
            source.astype(">f2"),
            source[:1],
            source[..., :-1],
            source[..., None],
            source.ravel(),
            7,
        ):
            with pytest.raises(ValueError, match=r"block\.write wants \(2, 2, 2, 16, 16\) of uint16"):
                block.write(wrong)
        assert not reservation.commit(), "a block that nothing was written to is none"
    with cache.reserve(tokens) as reservation:
        (block,) = reservation.blocks()
        block.write(source.view(np.float16))
        assert reservation.commit()
    assert read(cache, tokens) == 16


def test_an_unfilled_block_ends_what_is_committed(client: Client, cache: Cache) -> None:
    """COR."""
    tokens = chat(1, 80)
    with cache.reserve(tokens) as reservation:
        assert (reservation.start, reservation.num_blocks) == (0, 5)
        for number, block in enumerate(reservation.blocks()):
            if number != 2:
                block.write(kv_of(SPEC, tokens, block.start, block.num_tokens))
        assert reservation.commit()
    assert read(cache, tokens) == 32
    assert holds(facts(client)) == (0, 0, 0)
    assert facts(client)["stats"]["blocks_stored"] == 2


@pytest.mark.parametrize("way", ["abort", "leave", "raise", "drop", "commit nothing"])
def test_what_is_not_committed_is_given_back(client: Client, cache: Cache, way: str) -> None:
    """LEK."""
    tokens = chat(1)
    reservation = cache.reserve(tokens)
    assert holds(facts(client))[:2] == (0, 1)
    if way == "abort":
        reservation.abort()
        reservation.abort()
    elif way == "leave":
        with reservation:
            pass
    elif way == "raise":
        with pytest.raises(ZeroDivisionError), reservation:
            _ = 1 / 0
    elif way == "commit nothing":
        assert not reservation.commit()
    assert not reservation.commit() or way == "drop"
    del reservation
    assert holds(facts(client)) == (0, 0, 0)
    assert cache.match(tokens) == 0
    assert_balanced(facts(client))


def test_a_reservation_that_is_over_takes_nothing_more(client: Client, cache: Cache) -> None:
    """COR: its slots may be another block's by then."""
    tokens = chat(1, 16)
    for commit in (True, False):
        reservation = cache.reserve(tokens)
        (block,) = reservation.blocks()
        block.write(kv_of(SPEC, tokens, 0, 16))
        assert reservation.commit() if commit else reservation.abort() is None
        with pytest.raises(ValueError, match="has ended"):
            block.write(kv_of(SPEC, tokens, 0, 16))
        with pytest.raises(ValueError, match="has ended"):
            _ = block.array
        assert not reservation.commit()
        cache.clear()


def test_an_interrupted_rewrite_leaves_no_block(client: Client, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """COR: half of the new bytes over half of the old ones are nobody's."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    tokens = chat(1, 32)
    with cache.reserve(tokens) as reservation:
        first, second = reservation.blocks()
        for block in (first, second):
            block.write(kv_of(SPEC, tokens, block.start, 16))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("kvstore.service.reservation._copy_and_sum", interrupted)
            second.write(kv_of(SPEC, tokens, 16, 16))
        assert reservation.commit()
    assert read(cache, tokens) == 16
    assert holds(facts(client)) == (0, 0, 0)


def test_a_hint_of_another_type_leaves_the_reservation_open(client: Client, cache: Cache) -> None:
    """LEK: the caller's error, and nothing stays reserved for it."""
    with cache.reserve(chat(1, 16)) as reservation:
        (block,) = reservation.blocks()
        block.write(kv_of(SPEC, chat(1, 16), 0, 16))
        with pytest.raises(TypeError):
            reservation.commit(priority="high")  # type: ignore[arg-type]
    assert holds(facts(client)) == (0, 0, 0)


def test_blocks_that_are_there_are_skipped(client: Client, cache: Cache) -> None:
    """PRF."""
    tokens = chat(1, 80)
    assert store(cache, tokens[:32])
    with cache.reserve(tokens) as reservation:
        assert (reservation.start, reservation.num_blocks) == (32, 3)
    assert store(cache, tokens)
    with cache.reserve(tokens) as reservation:
        assert (reservation.start, reservation.num_blocks) == (80, 0)
        assert not reservation.commit()
    assert holds(facts(client)) == (0, 0, 0)


def test_start_asks_for_the_earlier_tokens_that_are_missing(client: Client, cache: Cache) -> None:
    """COR: a block is never stored behind a gap."""
    tokens = chat(1, 80)
    assert store(cache, tokens[:16])
    for start, answer, num_blocks in ((0, 16, 4), (10, 16, 4), (16, 16, 4), (17, 16, 0), (48, 16, 0), (80, 16, 0)):
        with cache.reserve(tokens, start=start) as reservation:
            assert (reservation.start, reservation.num_blocks) == (answer, num_blocks), start
            assert not reservation.commit()
    assert store(cache, tokens, start=16)
    assert cache.reserve(tokens, start=48).start == 80
    with pytest.raises(ValueError, match="start"):
        cache.reserve(tokens, start=-1)
    assert read(cache, tokens) == 80


@pytest.mark.parametrize("number", [np.int64, np.int16, np.uint8, np.uint64], ids=lambda number: number.__name__)
def test_a_start_may_be_any_whole_number(client: Client, cache: Cache, number: Any) -> None:
    """HNG: what the engine's arrays are made of."""
    tokens = chat(1, 80)
    assert store(cache, tokens[:16])
    for start, num_blocks in ((number(0), 4), (number(16), 4), (number(48), 0), (np.iinfo(number).max, 0)):
        with cache.reserve(tokens, start=start) as reservation:
            assert (reservation.start, reservation.num_blocks) == (16, num_blocks), start
    assert store(cache, tokens, start=number(16))
    assert cache.reserve(tokens, start=number(48)).start == 80
    for wrong, error in ((np.int8(-1), ValueError), (-(1 << 80), ValueError), (np.float64(16), TypeError)):
        with pytest.raises(error):
            cache.reserve(tokens, start=wrong)
    assert client.status()["client"]["deadlines_missed"] == 0
    assert holds(facts(client)) == (0, 0, 0)


@pytest.mark.parametrize(
    "hints",
    [
        {"priority": 2},
        {"priority": np.int64(-7)},
        {"priority": True, "output_tokens": 2.0},
        {"keep_for_s": -1.0},
        {"keep_for_s": float("nan")},
        {"keep_for_s": np.float64("inf")},
        {"output_tokens": -1},
        {"output_tokens": np.int64(1 << 60)},
    ],
)
def test_a_strange_hint_costs_nothing(client: Client, cache: Cache, hints: dict[str, Any]) -> None:
    """HNG, LEK: a hint is a hint; it must not make a message that the daemon refuses to read."""
    tokens = chat(1, 16)
    with cache.reserve(tokens, start=np.int64(0)) as reservation:
        (block,) = reservation.blocks()
        block.write(kv_of(SPEC, tokens, 0, 16))
        assert reservation.commit(**hints)
    assert not cache.reserve(tokens).commit(**hints), "empty: does nothing"
    assert read(cache, tokens) == 16
    assert client.status()["client"]["deadlines_missed"] == 0
    assert holds(facts(client)) == (0, 0, 0)


def test_the_front_of_a_chain_too_long_for_the_room_is_stored(client: Client) -> None:
    """HNG: S#3998, and nothing waits."""
    spec = KVSpec(model="large", dtype="float32", num_layers=4, num_kv_heads=8, head_dim=64, block_tokens=16)
    cache, tokens = client.attach(spec), chat(1, 16 * 100)
    per_slab = 4 * ((4 << 20) // spec.slot_nbytes)
    with cache.reserve(tokens) as reservation:
        assert reservation.start == 0
        half = (8 << 20) // spec.slot_nbytes
        assert 0 < reservation.num_blocks <= min(half, per_slab), "at most its share"
        for block in reservation.blocks():
            block.write(kv_of(spec, tokens, block.start, block.num_tokens))
        assert reservation.commit()
        stored = 16 * reservation.num_blocks
    assert read(cache, tokens) == stored
    with cache.reserve(tokens) as more:
        assert more.start == stored
        assert more.num_blocks > 0


def test_an_embedded_store_has_all_its_memory_without_being_asked() -> None:
    """PRF: extents that nobody would hear of before the next call are room for the next call."""
    spec = KVSpec(model="large", dtype="float32", num_layers=16, num_kv_heads=8, head_dim=128, block_tokens=16)
    with kvstore.open({"memory": {"capacity": "256MiB"}}) as client:
        cache, service = client.attach(spec), client._link._endpoint._service
        slab, completions = service.slab, service.movers._completions
        wait_until(lambda: slab.extents_ready + len(completions) >= slab.geometry.num_extents)
        per_extent = slab.geometry.extent_nbytes // spec.slot_nbytes
        wanted = slab.geometry.num_extents * per_extent // 2 - 1
        with cache.reserve(chat(1, 16 * wanted)) as reservation:
            assert reservation.num_blocks == wanted
        memory = facts(client)["memory"]
        assert memory["extents_ready"] == memory["extents"] == 4


def test_with_no_room_at_all_a_reservation_is_empty(client: Client) -> None:
    """HNG."""
    spec = KVSpec(model="large", dtype="float32", num_layers=4, num_kv_heads=8, head_dim=64, block_tokens=16)
    cache = client.attach(spec)
    held = [cache.reserve(chat(number, 16 * 100)) for number in range(4)]
    assert [bool(each.num_blocks) for each in held] == [True, False, False, False]
    assert held[1].start == 1600
    assert not held[1].commit()
    assert facts(client)["stats"]["reservations_refused"] > 0
    del held
    assert holds(facts(client)) == (0, 0, 0)


def test_a_writable_array_kept_after_commit_keeps_its_block(
    client: Client, cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LEK, COR: S#21624, also for a slice of it. A leak is said once."""
    hold_module._said.clear()
    tokens = chat(0, 16)
    with cache.reserve(tokens) as reservation:
        (block,) = reservation.blocks()
        block.array[...] = kv_of(SPEC, tokens, 0, 16)
        part = block.array[1, 0, :, 3:5]
        with caplog.at_level(logging.WARNING, "kvstore"):
            assert reservation.commit()
    assert holds(facts(client))[:2] == (1, 0)
    churn(client, cache)
    assert np.array_equal(part, kv_of(SPEC, tokens, 0, 16)[1, 0, :, 3:5])
    assert read(cache, tokens) == 16, "a leased block is not evicted"
    del part, block, reservation
    wait_until(lambda: holds(facts(client)) == (0, 0, 0))
    assert [record.message for record in caplog.records if "outlive" in record.message] != []


def test_a_writable_array_kept_after_abort_keeps_its_slot(client: Client, cache: Cache) -> None:
    """COR: a late write through it must not land in another block."""
    reservation = cache.reserve(chat(0, 16))
    (block,) = reservation.blocks()
    array = block.array
    array[...] = 0.5
    reservation.abort()
    assert holds(facts(client))[:2] == (0, 1)
    churn(client, cache)
    assert (array == 0.5).all()
    array[...] = 0.25  # the late write
    churn(client, cache)
    assert (array == 0.25).all()
    assert cache.match(chat(0, 16)) == 0
    del array, block, reservation
    wait_until(lambda: holds(facts(client)) == (0, 0, 0))


def test_a_slot_that_lost_a_race_is_kept_while_views_of_it_live(client: Client, cache: Cache) -> None:
    """COR: two writers of one block."""
    tokens = chat(0, 16)
    first, second = cache.reserve(tokens), cache.reserve(tokens)
    (mine,), (theirs,) = first.blocks(), second.blocks()
    for block in (mine, theirs):
        block.write(kv_of(SPEC, tokens, 0, 16))
    array = theirs.array
    assert first.commit()
    assert second.commit(), "cached, though by another's hand"
    leases, reservations, reserved = holds(facts(client))
    assert (leases, reservations, reserved) == (1, 0, SPEC.slot_nbytes)
    churn(client, cache)
    assert np.array_equal(array, kv_of(SPEC, tokens, 0, 16))
    del array, theirs, second, block
    wait_until(lambda: holds(facts(client)) == (0, 0, 0))
    assert facts(client)["stats"]["blocks_already"] == 1


def churn(client: Client, cache: Cache) -> None:
    """Changes state. Fill the slab three times over with other blocks."""
    evicted = facts(client)["memory"]["blocks_evicted"]
    capacity = 4 * ((4 << 20) // SPEC.slot_nbytes)
    number = 1
    for _ in range(3 * capacity // 50 + 1):
        tokens = chat(number, 16 * 50)
        with cache.reserve(tokens) as reservation:
            for block in reservation.blocks():
                block.write(np.full(SPEC.array_shape(16), -1.0, np.float32))
            reservation.commit()
        number += 50
    assert facts(client)["memory"]["blocks_evicted"] - evicted >= 2 * capacity - 100
    assert_balanced(facts(client))
    gc.collect()


def test_short_blocks_and_the_next_turn(client: Client, cache: Cache) -> None:
    """CFG, PRF: a chat's next turn starts inside the short last block; a longer block takes its place."""
    turn = chat(1, 34)
    assert store(cache, turn)
    following = [*turn, *chat(2, 30)]
    assert cache.match(following) == 34
    assert read(cache, following) == 34
    assert read(cache, turn[:33]) == 33
    with cache.reserve(following) as reservation:
        assert reservation.start == 32
        for block in reservation.blocks():
            block.write(kv_of(SPEC, following, block.start, block.num_tokens))
        assert reservation.commit()
    assert read(cache, following) == 64
    assert read(cache, turn) == 34, "the longer block begins with the short one's tokens"
    assert facts(client)["memory"]["slots"][str(SPEC.slot_nbytes)]["cached"] == 4
    with cache.reserve(turn) as reservation:
        assert (reservation.start, reservation.num_blocks) == (34, 0)


def test_a_turn_that_leaves_the_short_block_shares_its_beginning(client: Client, cache: Cache) -> None:
    """COR."""
    turn = chat(1, 40)
    assert store(cache, turn)
    other = [*turn[:37], 7, 7, 7, 7]
    assert read(cache, other) == 37
    assert store(cache, other)
    assert read(cache, other) == 41
    assert read(cache, turn) == 40
    assert cache.match([*turn[:5], 9, 9]) == 5


def test_two_sources_never_mix() -> None:
    """IDN: what one embedded store holds, another does not."""
    with embedded() as one, embedded() as other:
        assert store(one.attach(SPEC), chat(1))
        assert read(other.attach(SPEC), chat(1)) == 0
        assert read(one.attach(SPEC), chat(1)) == 64


def test_verified_compares_every_byte(cache: Cache) -> None:
    """The helper of these tests sees a single wrong value."""
    tokens = chat(1, 16)
    wrong = kv_of(SPEC, tokens, 0, 16)
    wrong[1, 1, 1, 15, 15] += 1
    with cache.reserve(tokens) as reservation:
        next(reservation.blocks()).write(wrong)
        assert reservation.commit()
    with cache.acquire(tokens) as hit, pytest.raises(AssertionError, match="is not this prompt's"):
        verified(hit, tokens)
    assert isinstance(cache, kvstore.Cache)
