"""Lifetimes by the clock: failures that users of such systems reported, each replayed in miniature.

docs/failures.md says which report each test stands for. Time is an argument of the core: here it jumps.
"""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from kvstore.core.tier import ARRIVING, SEALED
from tests.test_lower import Node, ids

HOUR_MS = 3_600_000.0


def evicted_to_ssd(node: Node) -> None:
    """Changes state. The chain 1 lies on the SSD only."""
    node.put(ids(1, 4))
    node.run()
    for first in range(2, 6):
        node.put(ids(first, 4))
        node.run()


@pytest.mark.parametrize("jumps", [1, 24, 10_000])
@pytest.mark.parametrize("cost_is_known", [False, True])
def test_an_hour_in_the_middle_of_a_load_frees_no_slot_that_is_being_filled(jumps: int, cost_is_known: bool) -> None:
    """TTL, COR: the load may be given up by then; what its reads still write into is nobody else's."""
    node = Node()
    evicted_to_ssd(node)
    if cost_is_known:
        for _ in range(20):
            node.store.report(0, 1000, 1000.0, None)
    number, got = node.acquire(ids(1, 4))
    slots = set(array("I", got.slots))
    node.ask()
    assert len(node.loads) == len(slots) == 4
    node.load_one()
    for _ in range(jumps if jumps < 100 else 3):
        node.store.on_time(node.store.now_ms + HOUR_MS * (jumps if jumps >= 100 else 1))
        node.store.check()
        for first in range(20, 30):  # everybody else wants room
            text = node.text(ids(first, 4))
            node.last_id += 1
            grant = node.store.reserve(node.session, text.entry.spec_id, node.last_id, text.hashes, 0, text.tail)
            assert slots.isdisjoint(array("I", grant.slots)), "a slot that is being filled was given away"
            node.store.abort(node.session, node.last_id)
    states = node.slab.tables.slots["state"][sorted(slots)]
    assert set(states.tolist()) <= {ARRIVING, SEALED}
    while node.loads:
        node.load_one()
    text = node.text(ids(1, 4))
    for at, slot in enumerate(array("I", got.slots)):
        payload = node.slab.payload(node.slab.offset(slot), text.payload(at).size)
        assert np.array_equal(payload, text.payload(at).reshape(-1))
    node.store.release(node.session, [number])
    node.run()
    assert node.read(ids(1, 4)) == 16


def test_hours_that_pass_end_no_lease_and_no_reservation() -> None:
    """TTL: neither those of a session that says nothing, nor blocks that nobody asks for."""
    node = Node()
    node.put(ids(1, 4))
    node.run()
    lease, got = node.acquire(ids(1, 4))
    text = node.text(ids(2, 4))
    node.last_id += 1
    grant = node.store.reserve(node.session, text.entry.spec_id, node.last_id, text.hashes, 0, text.tail)
    for _ in range(1000):
        node.store.on_time(node.store.now_ms + HOUR_MS)
    node.store.check()
    session = node.store.session(node.session)
    assert session.leases[lease].slots == got.slots
    assert len(session.reservations) == 1
    assert len(grant.slots) == 4 * 4
    assert node.store.find(0, node.text(ids(1, 4)).query) == 16
