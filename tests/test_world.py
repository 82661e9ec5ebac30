"""The store in a small world: fixed seeds, fresh ones under `make fuzz`, the twin without faults, and proof that the
world can fail."""

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kvstore.core.store
from kvstore.core.leases import Lease, Session
from kvstore.core.store import Store
from radix import block_symbols_of
from radix.node import Node
from tests.world import World

STEPS = 400
SEEDS = range(16)


def test_no_seed_makes_the_store_lie_or_leak() -> None:
    """COR, LEK, DSK, TTL: clients die, stall and come back, copies complete late, bits flip; nothing wrong is shown,
    nothing stays held, and at the end all that is cached is found. Everything has happened at least once."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        world = World(seed)
        world.run(STEPS)
        seen += world.seen
        seen["evicted"] += world.store.memory.num_evicted
    wanted = ["hits", "partial hits", "shortened", "refused", "evicted", "private slots", "summed"]
    wanted += ["died", "landed late", "discarded", "cleared", "stale ids"]
    assert not [what for what in wanted if not seen[what]], seen


@pytest.mark.parametrize("seed", range(6))
def test_without_faults_every_stored_token_is_found(seed: int) -> None:
    """HSH, IDN: each hit is exactly the longest common token prefix with anything stored, extra keys counted."""
    world = World(seed, faults=False)
    world.run(STEPS)
    assert world.seen["hits"] > world.seen["committed"] / 4
    assert not world.store.memory.num_evicted
    assert not world.seen["refused"] + world.seen["shortened"]


@settings(max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a seed cannot be shrunk
@given(seed=st.integers(0, 1 << 32))
def test_other_seeds(seed: int) -> None:
    """The same under seeds that hypothesis chooses: fixed in `make test`, fresh and many in `make fuzz`."""
    World(seed).run(STEPS)


def test_a_seed_is_a_whole_run() -> None:
    first, second = World(7), World(7)
    first.run(200)
    second.run(200)
    assert first.seen == second.seen
    assert (first.slab.bytes == second.slab.bytes).all()
    assert first.store.stats == second.store.stats


# --- proof that it can fail: each fault of ours is seen, and by the bytes alone where it makes the store lie


class BytesOnly(World):
    """A world that looks at nothing but what holders of names and leases are shown."""

    def check(self) -> None:
        self._check_bytes()


def is_caught(kind: type[World], *, faults: bool = True, num_seeds: int = 40) -> bool:
    for seed in range(num_seeds):
        try:
            kind(seed, faults=faults).run(STEPS)
        except (AssertionError, KeyError, IndexError):
            return True
    return False


def test_the_worlds_themselves_are_sound() -> None:
    BytesOnly(0).run(STEPS)


def test_a_failure_says_the_seed_and_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Store, "find", lambda *args: 0)
    with pytest.raises(AssertionError):
        World(3).run(STEPS)
    assert re.search(r"World\(3, faults=True\) failed at step \d+: \[.*'acquire'\]", capsys.readouterr().out)


def test_no_quarantine_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore.core.store, "QUARANTINE_MS", 0.0)
    assert is_caught(BytesOnly, num_seeds=200)  # rare: a late write must meet a slot that was handed out again


def test_quarantine_that_ends_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore.core.store, "QUARANTINE_MS", 9_999.0)
    assert is_caught(World)


def test_pin_released_early_is_caught_by_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def lease_without_pin(store: Store, *args: Any) -> Lease | None:
        lease = real_lease(store, *args)
        if lease is not None:
            store.memory.unpin(lease.pins[0])
        return lease

    real_lease = Store._lease
    monkeypatch.setattr(Store, "_lease", lease_without_pin)
    monkeypatch.setattr(Store, "_end_lease", lambda store, session, number: session.pop_lease(number))
    assert is_caught(BytesOnly)


def test_sealing_what_was_not_written_is_caught_by_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit_all(store: Store, session_id: int, number: int, summed: bytes, *, keep: bool = False) -> int:
        reservation = store.session(session_id).reservations.get(number)
        summed = summed.ljust(len(reservation.slots), b"\1") if reservation else summed
        return real_commit(store, session_id, number, summed, keep=keep)

    real_commit = Store.commit
    monkeypatch.setattr(Store, "commit", commit_all)
    assert is_caught(BytesOnly)


def test_extra_keys_left_out_of_symbols_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_keys(tokens: bytes, _: int, digest: bytes) -> bytes:
        return block_symbols_of(tokens, 999, digest)

    monkeypatch.setattr("kvstore.core.store.block_symbols_of", without_keys)
    assert is_caught(BytesOnly)


def test_victims_that_are_pinned_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    careless = property(lambda node: not (node.order or node.detached or node.parent is None))
    monkeypatch.setattr(Node, "is_victim", careless)
    assert is_caught(World)


def test_parent_left_pinned_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_without_unpin(store: Store, session: Session, number: int) -> Any:
        reservation = session.pop_reservation(number)
        assert reservation is not None
        return reservation.slots

    monkeypatch.setattr(Store, "_end_reservation", end_without_unpin)
    assert is_caught(World)


def test_a_cache_that_forgets_everything_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """No way to pass: the twin must find what it stored."""
    monkeypatch.setattr(Store, "find", lambda *args: 0)
    monkeypatch.setattr(Store, "_lease", lambda *args: None)
    assert is_caught(World, faults=False)
