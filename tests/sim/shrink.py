"""From a run that failed to the fewest turns that still fail in the same way."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

from kvstore.errors import KVStoreError
from tests.sim.faults import HAPPENINGS
from tests.sim.world import Plan, Turn, World, collect
from transports.errors import TransportError

FAILURES = (
    *(AssertionError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError),
    *(OSError, KVStoreError, TransportError, BufferError, RecursionError),
)  # whatever product code may raise when it is wrong


class Failure(NamedTuple):
    """What went wrong in a world, and the turns that lead there."""

    plan: Plan
    what: str
    num_steps: int
    turns: tuple[Turn, ...]


def run_world(plan: Plan, num_steps: int, use: Callable[[World], None] = lambda _: None) -> Failure | None:
    """Changes state. A world from its beginning to its healing; `use` sees it before it goes."""
    with _opened(plan) as world:
        try:
            world.run(num_steps, HAPPENINGS)
        except FAILURES as exc:
            return Failure(plan, _said(exc), world.num_steps, tuple(world.turns))
        finally:
            use(world)
    return None


@contextmanager
def _opened(plan: Plan) -> Iterator[World]:
    """A world that logs nothing, and leaves nothing behind, however it ends."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with closing(World(plan)) as world:
            yield world
    finally:
        collect()
        logging.disable(level)


def shrink(failure: Failure, seconds: float) -> Failure:
    """Changes state. Leave out turns, half of them at first, one by one at last, for as long as there is time."""
    until, turns = time.monotonic() + seconds, list(failure.turns)
    size = len(turns) // 2
    while size and time.monotonic() < until:
        at = 0
        while at < len(turns) and time.monotonic() < until:
            fewer = turns[:at] + turns[at + size :]
            if _fails_alike(failure, fewer):
                turns = fewer
            else:
                at += size
        size //= 2
    return failure._replace(turns=tuple(turns))


def _fails_alike(failure: Failure, turns: list[Turn]) -> bool:
    with _opened(failure.plan) as world:
        try:
            for turn in turns:
                world.take(turn, HAPPENINGS)
        except FAILURES as exc:
            return _kind(_said(exc)) == _kind(failure.what)
    return False


def _kind(what: str) -> str:
    """What a failure says, without its numbers."""
    return re.sub(r"[\d(), \[\]]+", " ", what)


def _said(exc: BaseException) -> str:
    if not str(exc):
        trace = exc.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            return f"{type(exc).__name__} at {trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}"
    return f"{type(exc).__name__}: {exc}"
