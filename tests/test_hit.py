"""Leased blocks as a reader sees them: verified, never another block's, and let go when nobody looks at them."""

import gc
import logging
import os
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore import Cache, Client, Hit, KVSpec
from kvstore.core.layout import HEADER_NBYTES, NBYTES_OFFSET, RECTS_OFFSET, STATE_OFFSET, TOKENS_OFFSET
from kvstore.service import hold as hold_module
from kvstore.service import link as link_module
from tests.daemons import (
    SPEC,
    Daemon,
    assert_balanced,
    chat,
    embedded,
    holds,
    kv_of,
    read,
    store,
    verified,
    wait_until,
)
from transports import messages as wire

OPAQUE = KVSpec(
    model="m", dtype="uint8", num_layers=2, block_tokens=16, layout="engine-x", token_nbytes=100, grain_tokens=4
)


def facts(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.status()["daemon"]
    return found


def damage(hit: Hit, block: int, at: int, nbytes: int = 1) -> None:
    """Changes state. Flip bits of a leased slot, through a mapping that is not the client's."""
    fd = os.open(hit.hold.session.welcome.slab_path, os.O_RDWR)
    offset = hit.offsets[block] + at
    os.pwrite(fd, bytes(each ^ 0x41 for each in os.pread(fd, nbytes, offset)), offset)
    os.close(fd)


HEADER_PARTS = {
    "magic": 0,
    "version": 8,
    "num_tokens": 12,
    "fingerprint": 20,
    "hash": 50,
    "parent": 70,
    "keys digest": 82,
    "keys start": 96,
    "number": 100,
    "context": 104,
    "first token": TOKENS_OFFSET,
    "last token": TOKENS_OFFSET + 4 * 15,
}


@pytest.mark.parametrize("part", HEADER_PARTS)
@pytest.mark.parametrize("bad", [0, 2])
def test_a_damaged_header_is_a_miss_that_takes_the_subtree_and_heals(
    client: Client, cache: Cache, part: str, bad: int
) -> None:
    """COR."""
    tokens, sibling = chat(1, 80), [*chat(1, 80)[:16], *chat(2, 32)]
    assert store(cache, tokens)
    assert store(cache, sibling)
    with cache.acquire(tokens) as hit:
        assert hit.num_tokens == 80
        damage(hit, bad, HEADER_PARTS[part])
        assert hit.wait() == 16 * bad
        assert verified(hit, tokens) == 16 * bad
        assert hit.num_tokens == 80, "what was planned"
    assert facts(client)["stats"]["discards"] == {"header": 1}
    assert cache.match(tokens) == 16 * bad
    assert read(cache, tokens) == 16 * bad
    assert read(cache, sibling) == (48 if bad else 0)
    assert holds(facts(client)) == (0, 0, 0)
    assert store(cache, tokens)
    assert read(cache, tokens) == 80
    assert_balanced(facts(client))


def test_a_damaged_header_of_a_short_block_is_a_miss(client: Client, cache: Cache) -> None:
    """COR: also where only its first tokens are asked for, and whatever part of the identity is damaged."""
    tokens = chat(1, 26)
    for asked in (tokens, [*tokens[:20], 5, 5, 5]):
        for at in (*HEADER_PARTS.values(), NBYTES_OFFSET, NBYTES_OFFSET + 8):
            if TOKENS_OFFSET + 4 * 9 < at < NBYTES_OFFSET or (asked is tokens and at >= NBYTES_OFFSET):
                continue  # left over from earlier blocks, or beyond what names a whole block
            store(cache, tokens)
            with cache.acquire(asked) as hit:
                assert hit.num_tokens == (26 if asked is tokens else 20)
                damage(hit, 1, at)
                assert hit.wait() == 16, f"damage at {at} is not seen"
            assert read(cache, asked) == 16
    assert_balanced(facts(client))


def test_damage_beside_the_identity_does_not_hide_a_block(client: Client, cache: Cache) -> None:
    """COR, its twin: the sums are for those who carry the bytes away."""
    tokens = chat(1, 32)
    assert store(cache, tokens)
    with cache.acquire(tokens) as hit:
        damage(hit, 1, STATE_OFFSET, 16)
        assert hit.wait() == verified(hit, tokens) == 32
    assert not any(facts(client)["stats"]["discards"].values())


@pytest.fixture
def strict() -> Iterator[Client]:
    """A store whose readers sum what they read."""
    with embedded(verify=True) as client:
        yield client


@pytest.mark.parametrize("asked", [80, 75, 40], ids=["whole blocks", "part of the last", "some"])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_flipped_payload_is_a_miss_where_readers_sum(strict: Client, bad: int, asked: int) -> None:
    """COR: memory.verify. Also where only the first tokens of a block count: all of it was summed."""
    cache, tokens = strict.attach(SPEC), chat(1, 80)
    assert store(cache, tokens)
    with cache.acquire(tokens[:asked]) as hit:
        assert hit.num_tokens == asked
        damage(hit, bad, HEADER_NBYTES + SPEC.block_nbytes - 1)
        assert hit.wait() == verified(hit, tokens) == 16 * bad
    assert facts(strict)["stats"]["discards"] == {"payload": 1}
    assert read(cache, tokens) == 16 * bad
    assert store(cache, tokens)
    assert read(cache, tokens) == 80
    assert_balanced(facts(strict))


@pytest.mark.parametrize("at", [STATE_OFFSET, STATE_OFFSET + 8, RECTS_OFFSET, RECTS_OFFSET + 9])
def test_a_flipped_sum_is_a_miss_where_readers_sum(strict: Client, at: int) -> None:
    """COR: what cannot be verified does not count."""
    cache, tokens = strict.attach(SPEC), chat(1, 80)
    assert store(cache, tokens)
    with cache.acquire(tokens) as hit:
        damage(hit, 2, at)
        assert hit.wait() == verified(hit, tokens) == 32
    assert facts(strict)["stats"]["discards"] == {"payload": 1}
    assert store(cache, tokens)
    assert read(cache, tokens) == 80


@pytest.mark.parametrize("by_array", [False, True])
def test_what_is_right_is_read_where_readers_sum(strict: Client, by_array: bool) -> None:
    """COR, its twin: blocks of any length, summed by their writer or later, or not yet."""
    for number, spec in enumerate((SPEC, OPAQUE)):
        cache = strict.attach(spec)
        for length in (16, 28, 80, 1600):
            tokens = chat(100 * number + length, length)
            assert store(cache, tokens, by_array=by_array)
            assert read(cache, tokens) == length
            assert read(cache, [*tokens[: length - 4], 5, 5, 5, 5]) == length - 4
    wait_until(lambda: not by_array or facts(strict)["stats"]["blocks_summed"] >= 109)
    assert all(read(strict.attach(SPEC), chat(length, length)) == length for length in (16, 28, 80, 1600))
    assert not any(facts(strict)["stats"]["discards"].values())


def test_without_verify_a_reader_does_not_sum(client: Client, cache: Cache) -> None:
    """PRF: the option's twin, and its price: a flip in RAM is seen only when the block leaves it."""
    assert store(cache, chat(1))
    with cache.acquire(chat(1)) as hit:
        damage(hit, 1, HEADER_NBYTES + 5)
        assert hit.wait() == 64
    assert not any(facts(client)["stats"]["discards"].values())


def test_two_readers_may_report_one_damage(client: Client, cache: Cache) -> None:
    """COR: each is told less, the second report finds nothing to drop."""
    tokens = chat(1, 80)
    assert store(cache, tokens)
    first, second, third = cache.acquire(tokens), cache.acquire(tokens), cache.acquire(tokens[:32])
    damage(first, 2, 50)
    damage(first, 1, 50)
    assert third.wait() == 16
    assert first.wait() == 16
    assert second.wait() == 16
    assert cache.match(tokens) == 16
    array = next(second.blocks()).array
    assert np.array_equal(array, kv_of(SPEC, tokens, 0, 16))
    for hit in (first, second, third):
        hit.release()
    del array
    wait_until(lambda: holds(facts(client)) == (0, 0, 0))
    assert facts(client)["stats"]["discards"] == {"header": 3}
    assert_balanced(facts(client))


# Arrays


def test_arrays_are_read_only_and_on_the_slab(cache: Cache) -> None:
    """COR, PRF."""
    tokens = chat(1, 26)
    assert store(cache, tokens)
    with cache.acquire(tokens) as hit:
        for block in hit.blocks():
            with pytest.raises(ValueError, match="read-only"):
                block.array[...] = 0
            assert np.shares_memory(block.array, block.array)
        assert [(block.start, block.num_tokens) for block in hit.blocks()] == [(0, 16), (16, 10)]
        assert [block.array.shape for block in hit.blocks()] == [(2, 2, 2, 16, 16), (2, 2, 2, 10, 16)]
    with pytest.raises(ValueError, match="has ended"):
        _ = next(hit.blocks()).array


KEPT: dict[str, Callable[[Any], Any]] = {
    "array": lambda array: array,
    "slice": lambda array: array[1, :, 0, 3:7],
    "view": lambda array: array.view(np.uint32),
    "reversed": lambda array: array[::-1],
    "memoryview": memoryview,
    "flat part": lambda array: array.reshape(-1)[5:50],
}


@pytest.mark.parametrize("how", KEPT)
def test_what_is_kept_of_a_hit_never_shows_another_block(client: Client, cache: Cache, how: str) -> None:
    """COR, LEK: S#21624. The slab is filled three times over meanwhile."""
    tokens = chat(0, 48)
    assert store(cache, tokens)
    with cache.acquire(tokens) as hit:
        kept = [KEPT[how](block.array) for block in hit.blocks()]
    del hit
    gc.collect()
    assert holds(facts(client)) == (1, 0, 0)
    fill_over(client, cache, 3)
    for number, each in enumerate(kept):
        assert np.array_equal(each, KEPT[how](kv_of(SPEC, tokens, 16 * number, 16)))
    assert read(cache, tokens) == 48
    del kept, each
    wait_until(lambda: holds(facts(client)) == (0, 0, 0))
    fill_over(client, cache, 2)
    assert cache.match(tokens) == 0, "it can be evicted again"


def fill_over(client: Client, cache: Cache, times: int) -> None:
    """Changes state. Store that many slabs full of other blocks."""
    memory = facts(client)["memory"]
    wanted = times * memory["extents"] * (memory["extent_nbytes"] // SPEC.slot_nbytes)
    garbage = np.full(SPEC.array_shape(16), -1.0, np.float32)
    for number in range(1, 2 + wanted // 100):
        with cache.reserve(chat(number + wanted, 1600)) as reservation:
            for block in reservation.blocks():
                block.write(garbage)
            assert reservation.commit()


def test_one_kept_array_is_said_once(client: Client, cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """LEK."""
    hold_module._said.clear()
    assert store(cache, chat(0, 48))
    kept = []
    with caplog.at_level(logging.WARNING, "kvstore"):
        for _ in range(5):
            with cache.acquire(chat(0, 48)) as hit:
                kept += [block.array for block in hit.blocks()]
    assert [record.message.startswith("arrays outlive") for record in caplog.records] == [True]
    del kept


def test_a_dropped_hit_ends_its_lease(client: Client, cache: Cache) -> None:
    """LEK: L#1034, also where the dropping is left to the collector."""
    assert store(cache, chat(0, 48))
    cache.acquire(chat(0, 48))
    assert holds(facts(client)) == (0, 0, 0)
    hit = cache.acquire(chat(0, 48))
    cycle: list[Any] = [hit]
    cycle.append(cycle)
    del hit, cycle
    gc.collect()
    assert holds(facts(client)) == (0, 0, 0)


def test_arrays_outlive_a_closed_client() -> None:
    """LEK, RST: the session ends when the last of them goes."""
    tokens = chat(0, 48)
    with Daemon() as daemon:
        with daemon.connect() as client:
            cache = client.attach(SPEC)
            assert store(cache, tokens)
            hit = cache.acquire(tokens)
            arrays = [block.array for block in hit.blocks()]
            reservation = cache.reserve(chat(1, 16))
            (block,) = reservation.blocks()
            writable = block.array
        assert read(cache, tokens) == 0, "a closed client has no hits"
        hit.release()
        reservation.abort()
        assert holds(daemon.status())[:2] == (1, 1)
        with daemon.connect() as other:
            fill_over(other, other.attach(SPEC), 2)
        for number, array in enumerate(arrays):
            assert np.array_equal(array, kv_of(SPEC, tokens, 16 * number, 16))
        writable[...] = 1
        del arrays, array, writable, block, hit, reservation
        wait_until(lambda: not daemon.status()["sessions"])
        wait_until(lambda: holds(daemon.status()) == (0, 0, 0))


def test_arrays_in_a_cycle_with_their_hit_go_with_it(client: Client, cache: Cache) -> None:
    """LEK: only the collector sees that nobody looks at them any more."""
    assert store(cache, chat(0, 48))
    hit = cache.acquire(chat(0, 48))
    cycle: list[Any] = [hit, [block.array for block in hit.blocks()]]
    cycle.append(cycle)
    hit.hold.cycle = cycle  # type: ignore[attr-defined]
    del hit, cycle
    gc.collect()
    wait_until(lambda: holds(facts(client)) == (0, 0, 0))


# Token-granular hits


def test_a_hit_ends_where_the_tokens_part(cache: Cache) -> None:
    """COR, CFG: L#4109, a 34-token prompt hits 33."""
    tokens = chat(1, 64)
    assert store(cache, tokens)
    for count in (1, 5, 15, 16, 17, 33, 63, 64):
        assert read(cache, tokens[:count]) == count
        assert read(cache, [*tokens[:count], 123456]) == count
        assert cache.match([*tokens[:count], 123456]) == count
    assert read(cache, [123456, *tokens]) == 0
    assert read(cache, []) == 0


def test_an_opaque_layout_hits_whole_grains(client: Client) -> None:
    """COR: L#4155, an engine's own layout cannot be cut between its blocks."""
    cache, tokens = client.attach(OPAQUE), chat(1, 40)
    assert store(cache, tokens)
    for count, usable in ((3, 0), (4, 4), (15, 12), (16, 16), (17, 16), (22, 20), (39, 36), (40, 40)):
        assert read(cache, [*tokens[:count], 9, 9, 9, 9]) == usable
        assert read(cache, tokens[:count]) == usable


def test_a_mixed_crowd_reads_its_own(client: Client, cache: Cache) -> None:
    """COR: V#31210. Chains that share, part, extend and are evicted, every byte compared."""
    choose = random.Random(1)
    trunk = chat(0, 100)
    chains = [[*trunk[: choose.randrange(0, 100)], *chat(number, choose.randrange(1, 60))] for number in range(40)]
    total = 0
    for step in range(400):
        tokens = choose.choice(chains)
        tokens = tokens[: choose.randrange(1, len(tokens) + 1)]
        total += read(cache, tokens)
        if step % 2:
            store(cache, tokens, by_array=step % 4 == 1)
            assert read(cache, tokens) == len(tokens)
        if step % 97 == 0:
            fill_over(client, cache, 1)
    assert total > 5000
    assert holds(facts(client)) == (0, 0, 0)
    assert_balanced(facts(client))


# Identity


def test_extra_keys_part_chains_from_the_block_they_touch(client: Client, cache: Cache) -> None:
    """IDN: L#690, S#2151, V#20261."""
    tokens = [7] * 64
    images = {1: [(20, b"digest-1")], 2: [(20, b"digest-2")], 3: [(20, b"digest-1"), (40, b"x")], 4: [b"all"], 0: []}
    for salt, keys in images.items():
        assert store(cache, tokens, salt=salt if salt == 4 else 0, extra_keys=keys)
        # before the first key the bytes are the same KV; behind it they are not
        assert cache.match(tokens, extra_keys=keys) == 64
    assert facts(client)["memory"]["slots"][str(SPEC.slot_nbytes)]["cached"] == 4 + 3 + 3 + 2 + 4


def test_another_image_hits_up_to_the_placeholder_and_no_further(cache: Cache) -> None:
    """IDN: also inside the block that holds it, and whichever of the two has the key."""
    tokens = [7] * 64
    assert store(cache, tokens, extra_keys=[(20, b"digest-1")])
    for keys, usable in (
        ([(20, b"digest-1")], 64),
        ([(20, b"digest-2")], 20),
        ([], 20),
        ([(18, b"digest-1")], 18),
        ([(25, b"digest-1")], 20),
        ([(20, b"digest-1"), (33, b"more")], 33),
        ([b"digest-1"], 0),
        ([(20, b"digest-1"), (64, b"beyond")], 64),
    ):
        assert cache.match(tokens, extra_keys=keys) == usable, keys
        with cache.acquire(tokens, extra_keys=keys) as hit:
            assert hit.wait() == usable, keys


def test_specs_that_differ_in_a_word_never_share(client: Client) -> None:
    """IDN: L#44250, V#30931; salted names use SHA-256, which nobody can forge."""
    tokens = chat(1)
    fields = {name: getattr(SPEC, name) for name in SPEC.__struct_fields__}
    changes = [{}, {"adapter": "a"}, {"adapter": "b"}, {"tenant_salt": "x"}, {"tenant_salt": "y"}, {"rope": "yarn"}]
    specs = [KVSpec(**(fields | change)) for change in changes]
    for number, spec in enumerate(specs):
        cache = client.attach(spec)
        assert read(cache, tokens) == 0
        assert store(cache, tokens, salt=number)
    for number, spec in enumerate(specs):
        assert read(client.attach(spec), tokens, salt=number) == 64
    hashes = {each["fingerprint"]: each["hash"] for each in facts(client)["specs"]}
    assert len(hashes) == len(specs)
    for spec in specs:
        assert hashes[spec.fingerprint.hex()[:16]] == ("sha256-128" if spec.tenant_salt else "xxh3-128")


def test_clear_forgets_one_spec_and_spares_what_is_leased(client: Client, cache: Cache) -> None:
    """COR."""
    other = client.attach(OPAQUE)
    assert store(cache, chat(1))
    assert store(other, chat(1))
    hit = cache.acquire(chat(1))
    cache.clear()
    assert cache.match(chat(1)) == 0
    assert read(other, chat(1)) == 64
    fill_over(client, cache, 2)
    assert hit.wait() == verified(hit, chat(1)) == 64
    hit.release()
    assert holds(facts(client)) == (0, 0, 0)
    assert_balanced(facts(client))


# Not waiting


def test_a_hit_that_nobody_waited_for_settles(daemon: Daemon) -> None:
    """HNG: wait=False is one enqueue; num_tokens is 0 until the answer is there."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        assert store(cache, chat(100))
        hit = cache.acquire(chat(100), wait=False)
        assert hit.verified_tokens == 0
        wait_until(partial(getattr, hit, "settled"))
        assert hit.ready()
        assert hit.num_tokens == 64
        assert hit.verified_tokens == 0, "nobody has asked for the blocks"
        assert hit.wait() == hit.verified_tokens == verified(hit, chat(100)) == 64
        hit.release()
        assert hit.num_tokens == 64
        miss = cache.acquire(chat(101), wait=False)
        assert miss.wait() == 0
        assert miss.settled
        assert miss.ready()
        several = [cache.acquire(chat(100)[:count], wait=False) for count in range(1, 65)]
        assert [hit.wait() for hit in several[::-1]] == list(range(64, 0, -1))
        del several, hit, miss
        wait_until(lambda: holds(daemon.status()) == (0, 0, 0))


def test_a_hit_dropped_before_its_answer_leaves_no_lease(daemon: Daemon) -> None:
    """LEK: V#41269."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(100))
        for _ in range(50):
            cache.acquire(chat(100), wait=False)
        for _ in range(50):
            cache.acquire(chat(100), wait=False).release()
        assert cache.match(chat(100)) == 64
        wait_until(lambda: holds(daemon.status()) == (0, 0, 0))


def test_one_request_id_is_one_hit(daemon: Daemon) -> None:
    """LEK: an engine's scheduler asks again and again."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(100))
        first = cache.acquire(chat(100), request_id="r1", wait=False)
        assert cache.acquire(chat(100), request_id="r1") is first
        assert cache.acquire(chat(100), request_id="r1", wait=False) is first
        assert first.wait() == 64
        assert holds(client.status()["daemon"])[0] == 1
        other = cache.acquire(chat(100), request_id="r2")
        assert other is not first
        changed = cache.acquire(chat(100)[:20], request_id="r1")
        assert changed is not first
        assert changed.wait() == 20
        first.release()
        changed.release()
        again = cache.acquire(chat(100), request_id="r1")
        assert again is not first
        assert again.wait() == 64
        missed = cache.acquire(chat(102), request_id="r3")
        store(cache, chat(102))
        assert missed.num_tokens == 0
        assert cache.acquire(chat(102), request_id="r3").num_tokens == 64, "a miss is asked again"
        for hit in (other, again):
            hit.release()
        cache._requests.clear()
        del missed, hit
        wait_until(lambda: holds(daemon.status()) == (0, 0, 0))


@pytest.mark.parametrize("released", [True, False])
def test_a_request_id_keeps_no_hit_alive(client: Client, cache: Cache, released: bool) -> None:
    """LEK: ids are never told to be over, and there are more of them than memory."""
    assert store(cache, chat(1))
    gone = []
    for number in range(100):
        hit = cache.acquire(chat(1), request_id=f"r{number}")
        assert cache.acquire(chat(1), request_id=f"r{number}") is hit
        assert hit.wait() == 64
        gone.append(weakref.ref(hit))
        if released:
            hit.release()
        del hit
    assert [ref() for ref in gone] == [None] * 100
    assert len(cache._requests) == 0
    assert holds(facts(client)) == (0, 0, 0)
    assert not client._link.session.in_use
    assert not client._link.session.lingering


@pytest.mark.parametrize("way", ["release", "drop"])
def test_answers_to_hits_that_were_let_go_are_not_kept(daemon: Daemon, way: str) -> None:
    """LEK: whether they had come by then or come later."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        store(cache, chat(100))
        for number in range(500):
            hit = cache.acquire(chat(100), wait=False)
            if number % 7 == 0:
                assert cache.match(chat(100)) == 64, "the hit's answer comes first"
            if way == "release":
                hit.release()
            del hit
        assert cache.match(chat(100)) == 64
        assert not client._link._exchange._replies
        wait_until(lambda: holds(daemon.status()) == (0, 0, 0))


@pytest.mark.parametrize("call", ["acquire", "acquire later", "reserve"])
def test_an_interrupted_call_holds_nothing(
    client: Client, cache: Cache, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """LEK: else the session never ends, for something that nobody has."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    calls = {
        "acquire": partial(cache.acquire, chat(1)),
        "acquire later": partial(cache.acquire, chat(1), wait=False),
        "reserve": partial(cache.reserve, chat(1)),
    }
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(client._link._endpoint, "send", interrupt)
        calls[call]()
    gc.collect()
    assert not client._link.session.in_use
    assert holds(facts(client)) == (0, 0, 0)


def test_an_answer_that_cannot_be_is_a_miss(client: Client, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC: it is an index into shared memory."""
    assert store(cache, chat(1))
    true_ask = link_module.Link.ask
    answers = [
        wire.Acquired(1, 1 << 40, bytes(16), 4),
        wire.Acquired(1, 64, b"", 4),
        wire.Acquired(1, 64, b"\xff" * 16, 4),
        wire.Acquired(1, 64, bytes(64), 4),
        wire.Acquired(1, 17, bytes(4), 4),
        wire.Acquired(1, 0, bytes(16), 4),
        wire.Acquired(1, 64, (10**6).to_bytes(4, "little") * 4, 4),
    ]
    for answer in answers:
        monkeypatch.setattr(link_module.Link, "ask", lambda *_, answer=answer: answer)
        hit = cache.acquire(chat(1))
        assert hit.wait() == 0, answer
        assert list(hit.blocks()) == []
        monkeypatch.setattr(link_module.Link, "ask", true_ask)
    assert read(cache, chat(1)) == 64
