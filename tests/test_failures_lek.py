"""What is never given back: failures that users of such systems reported, each replayed in miniature.

docs/failures.md says which report each test stands for.
"""

from __future__ import annotations

import gc
import os
import random
from collections import deque
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvstore.core.slots import SLOTS_PER_EXTENT_MAX, SlotPool
from kvstore.core.tier import Tier, new_tables
from radix import BlockHash, HashKind, hash_prefix, token_bytes
from tests.daemons import SPEC, Daemon, Other, assert_balanced, chat, embedded, holds, read, wait_until
from tests.test_ssd_edges import config_of, daemon_of, get, opened, put
from transports.errors import PeerLost
from transports.zeromq import ZmqEndpoint

MIB = 1 << 20
NOTHING = (0, 0, 0)


def rss_nbytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


LOOKUPS = """
store(cache, chat(1))
hits = [cache.acquire(chat(1), wait=bool(number % 2)) for number in range(20)]
for _ in range(20):
    assert cache.match(chat(1)) == 64
client.status()
say("asked")
word = hear()
if word == "close":
    client.close()
    del hits
    say("closed"); hear()
sys.exit(0)
"""


@pytest.mark.parametrize("ending", ["close", "exit", "kill"])
def test_a_lookup_that_nothing_follows_ends_with_its_session(daemon: Daemon, ending: str) -> None:
    """LEK: asked for, never loaded, never released; a match pins nothing in the first place."""
    with Other(daemon, LOOKUPS) as other:
        assert other.hear() == "asked"
        assert holds(daemon.status())[:2] == (20, 0)
        other.kill() if ending == "kill" else other.say(ending)
        wait_until(lambda: not daemon.status()["sessions"], seconds=1.0)
        facts = daemon.status()
    assert holds(facts) == NOTHING
    assert_balanced(facts)


def test_a_million_slots_of_random_sizes_leave_the_pool_as_it_was() -> None:
    """LEK: slots of four sizes in any order, so much in use that most extents change their size all the time."""
    choose, extent_nbytes, num_extents = random.Random(1), 1 * MIB, 32
    pool = SlotPool(extent_nbytes, np.zeros(num_extents, np.uint64))
    sizes = (8192, 20480, 65536, MIB)
    for slot_nbytes in sizes:
        pool.add_class(slot_nbytes)
    for extent in range(num_extents):
        pool.add_extent(extent)
    held: deque[tuple[int, object]] = deque()
    num_taken, refused = 0, 0
    while num_taken < 1_000_000:
        slot_nbytes = choose.choice(sizes)
        count = choose.randrange(1, max(2, 2 * extent_nbytes // slot_nbytes))
        slots = pool.take(slot_nbytes, count)
        refused += slots is None
        if slots is not None:
            num_taken += len(slots)
            held.append((slot_nbytes, slots))
        while held and (slots is None or len(held) > 40):
            held.rotate(choose.randrange(3))
            pool.give_back(held.popleft()[1])  # type: ignore[arg-type]
            slots = held
    assert refused > 100, "it was full again and again"
    pool.check()
    while held:
        pool.give_back(held.pop()[1])  # type: ignore[arg-type]
    pool.check()
    assert pool.num_unassigned == num_extents
    for slot_nbytes in sizes:
        assert (pool.num_taken(slot_nbytes), pool.num_slots(slot_nbytes)) == (0, 0)
        slots = pool.take(slot_nbytes, num_extents * (extent_nbytes // slot_nbytes))
        assert slots is not None, "all of it, to the last slot"
        pool.give_back(slots)


def test_a_slab_filled_a_hundred_times_takes_no_more_memory_and_no_descriptor() -> None:
    """LEK, DSK: 34,000 blocks through 341 slots; what is cached never exceeds the capacity, and nothing grows."""
    garbage = np.full(SPEC.array_shape(16), 2.0, np.float32)
    with embedded("4MiB", session_share=1.0) as client:
        cache, capacity = client.attach(SPEC), 4 * MIB

        def fill(first: int, times: int) -> tuple[int, int]:
            for number in range(first, first + times * capacity // (SPEC.slot_nbytes * 100) + 1):
                with cache.reserve(chat(number, 1600)) as reservation:
                    for block in reservation.blocks():
                        block.write(garbage)
                    assert reservation.commit()
                memory = daemon_of(client)["memory"]
                assert memory["cached_nbytes"] + memory["reserved_nbytes"] <= memory["capacity_nbytes"] == capacity
            return rss_nbytes(), num_fds()

        before, after = fill(0, 20), fill(1000, 80)
        assert after[0] - before[0] < 4 * MIB
        assert after[1] == before[1]
        facts = daemon_of(client)
        assert facts["stats"]["blocks_stored"] >= 100 * (capacity // SPEC.slot_nbytes)
        assert holds(facts) == NOTHING
        assert_balanced(facts)


def test_a_trace_of_chats_has_no_slope(tmp_path: Path) -> None:
    """LEK: a thousand turns of 300 chats over both tiers: lookups, stores, evictions, loads, lost interest."""
    choose = random.Random(3)
    with opened(config_of(tmp_path)) as (client, _):
        cache = client.attach(SPEC)

        def turns(count: int) -> tuple[int, int]:
            for _ in range(count):
                tokens = chat(choose.randrange(300), 128)[: choose.randrange(1, 129)]
                hit = cache.acquire(tokens, request_id=str(choose.randrange(50)), wait=choose.random() < 0.7)
                if choose.random() < 0.5:
                    hit.wait()
                with cache.reserve(tokens, 16 * choose.randrange(2)) as reservation:
                    for block in reservation.blocks():
                        block.array[...] = 1.0
                    if choose.random() < 0.8:
                        reservation.commit()
            del hit
            wait_until(lambda: holds(daemon_of(client)) == NOTHING)
            return rss_nbytes(), num_fds()

        turns(500)
        before, after = turns(100), turns(500)
        assert after[0] - before[0] < 4 * MIB
        assert after[1] <= before[1]
        assert_balanced(daemon_of(client))


def test_a_block_that_went_down_and_came_up_again_has_one_owner_and_can_be_evicted(tmp_path: Path) -> None:
    """LEK: each promotion is undone by the next; in the end all that was promoted is evicted, and nothing is held."""
    with opened(config_of(tmp_path)) as (client, cache):
        for number in range(70):  # memory holds 51
            assert put(cache, number)
            if number % 10 == 9:
                wait_until(lambda: daemon_of(client)["disk"]["idle"])
        for _ in range(3):
            for number in range(70):
                assert get(cache, number) == 64
        facts = daemon_of(client)
        assert facts["stats"]["blocks_loaded"] > 3 * 4 * 51
        assert facts["memory"]["blocks_evicted"] >= facts["stats"]["blocks_loaded"]
        assert holds(facts) == NOTHING
        assert_balanced(facts)
        cache.clear()
        wait_until(lambda: daemon_of(client)["disk"]["idle"] and not daemon_of(client)["disk"]["blocks"])
        assert daemon_of(client)["memory"]["cached_nbytes"] == 0


def test_thousands_of_connects_that_fail_leave_no_descriptor(tmp_path: Path) -> None:
    """LEK."""

    def attempts(count: int) -> tuple[int, int]:
        for _ in range(count):
            endpoint = ZmqEndpoint(f"ipc://{tmp_path}/nobody")
            with pytest.raises(PeerLost):
                endpoint.send(b"hello")
            endpoint.close()
        return num_fds(), rss_nbytes()

    before, after = attempts(500), attempts(2500)
    assert after[0] <= before[0]
    assert after[1] - before[1] < 4 * MIB


def test_an_index_through_which_a_million_keys_went_is_as_small_as_before() -> None:
    """LEK: 8,192 blocks fit; chains come, part from others, and are evicted from their ends."""
    extent_nbytes, root, slot_nbytes = 64 * MIB, BlockHash(b"root".ljust(16)), 8192
    tables = new_tables(1)
    tier = Tier(extent_nbytes, tables.extents, tables.slots["state"], lambda slot: slot.to_bytes(4, "big"))
    tier.add_spec(root, slot_nbytes)
    tier.add_extent(0)
    assert extent_nbytes // slot_nbytes == SLOTS_PER_EXTENT_MAX

    def churn(first: int, num_chains: int) -> int:
        for number in range(first, first + num_chains):
            tokens = [number // 4, *range(1000 * number, 1000 * number + 999)]  # every fourth parts from a known one
            hashes = hash_prefix(root, token_bytes(tokens), 1, HashKind.XXH3)
            start = tier.match(root, hashes).num_blocks
            slots = tier.reserve(slot_nbytes, len(tokens) - start)
            assert slots is not None
            inserted = tier.insert(root, hashes, start, slots, short=False)
            tier.give_back(inserted.unused)
        return rss_nbytes()

    before, after = churn(0, 100), churn(100, 900)
    assert after - before < 4 * MIB
    assert tier.num_evicted > 950_000
    assert sum(tier.counts(slot_nbytes)) == SLOTS_PER_EXTENT_MAX
    tier.check()


def test_a_reservation_that_is_refused_or_rejected_leaves_nothing(daemon: Daemon) -> None:
    """LEK: before, while and after it is asked for; also where the caller's own error is what ends it."""
    with daemon.connect() as client:
        cache = client.attach(SPEC)
        for wrong in ([-1], [1.5], "text", [1 << 40]):
            for ask in (cache.acquire, cache.reserve, cache.match):
                with pytest.raises((ValueError, TypeError)):
                    ask(wrong)
        with pytest.raises(ValueError, match="negative"):
            cache.reserve(chat(1), start=-1)

        class Rejected(Exception):
            """The engine's admission control."""

        for number in range(500, 550):
            with pytest.raises(Rejected), cache.acquire(chat(number)), cache.reserve(chat(number)) as reservation:
                next(reservation.blocks()).array[...] = 1
                raise Rejected
        wait_until(lambda: holds(daemon.status()) == NOTHING)
        assert read(cache, chat(500)) == 0
        assert_balanced(daemon.status())
