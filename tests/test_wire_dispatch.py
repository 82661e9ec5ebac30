"""A real service under messages that keep the grammar and no sense. The harness says what must hold; here chance and
Hypothesis choose, in `make fuzz` coverage does."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.daemons import wait_until
from tests.wire_harness import STEPS_MAX, FromBytes, Node, misbehave


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with ExitStack() as held:
        yield Node(held)


@pytest.mark.parametrize("seed", range(20))
def test_messages_that_make_no_sense_are_answered_and_break_nothing(node: Node, seed: int) -> None:
    """SEC, HNG, LEK: each request gets one reply; every invariant holds; others are served right."""
    misbehave(node, random.Random(seed), STEPS_MAX)
    wait_until(node.is_settled)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.binary(max_size=2000))
def test_whatever_is_chosen_breaks_nothing(node: Node, data: bytes) -> None:
    """SEC, HNG, LEK: the same, for bytes that something else chooses: `make fuzz` lets coverage do so."""
    misbehave(node, FromBytes(data), STEPS_MAX)
    wait_until(node.is_settled)


def test_nor_does_it_where_most_is_on_an_ssd(tmp_path: Path) -> None:
    """SEC, HNG, LEK: loads that nobody, or the wrong one, waits for; waits that are answered when they are due."""
    with ExitStack() as held:
        node = Node(held, tmp_path / "ssd")
        for seed in range(4):
            node.fill()
            misbehave(node, random.Random(seed), STEPS_MAX)
            wait_until(node.is_settled)
        stats = node.service.status()["stats"]
        assert stats["blocks_loaded"] > 0
