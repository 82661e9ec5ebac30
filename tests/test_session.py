"""The client's end of an exchange: one reply each, and when to stop asking. Times are arguments; nothing sleeps."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transports.messages import Done, Found
from transports.session import BACKOFF_MS_MAX, BACKOFF_MS_MIN, PENDING_MAX, Breaker, Exchange

# --- Exchange


def test_replies_find_their_requests_in_any_order() -> None:
    exchange = Exchange()
    ids = [exchange.begin() for _ in range(3)]
    assert len(set(ids)) == 3
    for request_id in reversed(ids):
        assert exchange.take(request_id) is None
        exchange.deliver(Found(request_id, request_id * 10))
    assert [exchange.take(request_id) for request_id in ids] == [Found(each, each * 10) for each in ids]


def test_reply_is_taken_once() -> None:
    exchange = Exchange()
    request_id = exchange.begin()
    exchange.deliver(Done(request_id))
    assert exchange.waits_for(request_id)
    assert exchange.take(request_id) == Done(request_id)
    assert exchange.take(request_id) is None
    assert not exchange.waits_for(request_id)


def test_first_reply_counts() -> None:
    """HNG: a duplicate changes nothing, before and after the first was taken."""
    exchange = Exchange()
    request_id = exchange.begin()
    for num_tokens in (1, 2):
        exchange.deliver(Found(request_id, num_tokens))
    assert exchange.take(request_id) == Found(request_id, 1)
    exchange.deliver(Found(request_id, 3))
    assert exchange.take(request_id) is None


def test_late_and_foreign_replies_fall_on_the_floor() -> None:
    exchange = Exchange()
    late = exchange.begin()
    exchange.forget(late)
    exchange.forget(late)
    for request_id in (late, 0, 999):
        exchange.deliver(Done(request_id))
        assert exchange.take(request_id) is None


def test_lost_connection_forgets_all_but_never_reuses_an_id() -> None:
    exchange = Exchange()
    old = [exchange.begin() for _ in range(3)]
    exchange.deliver(Done(old[0]))
    exchange.forget_all()
    assert not any(exchange.waits_for(request_id) for request_id in old)
    new = exchange.begin()
    assert new not in old
    exchange.deliver(Done(old[1]))
    assert exchange.take(new) is None


def test_requests_nobody_takes_are_bounded() -> None:
    """LEK: the oldest is forgotten first."""
    exchange = Exchange()
    ids = [exchange.begin() for _ in range(PENDING_MAX + 10)]
    assert [exchange.waits_for(request_id) for request_id in ids] == [False] * 10 + [True] * PENDING_MAX
    exchange.deliver(Done(ids[0]))
    assert exchange.take(ids[0]) is None


class ExchangeMachine(RuleBasedStateMachine):
    """Model: what each request was answered first; a network that loses, delays and repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange = Exchange()
        self.waiting: dict[int, Found | None] = {}
        self.num_begun = 0

    @rule()
    def begin(self) -> None:
        request_id = self.exchange.begin()
        self.num_begun += 1
        assert request_id not in self.waiting
        self.waiting[request_id] = None

    @rule(seed=st.integers(0, 1000))
    def deliver(self, seed: int) -> None:
        reply = Found(random.Random(seed).randint(0, self.num_begun + 1), seed)
        self.exchange.deliver(reply)
        if self.waiting.get(reply.request_id, reply) is None:
            self.waiting[reply.request_id] = reply

    @rule(seed=st.integers(0, 1000), forget=st.booleans())
    def take_or_forget(self, seed: int, forget: bool) -> None:
        request_id = random.Random(seed).randint(0, self.num_begun + 1)
        if forget:
            self.exchange.forget(request_id)
            self.waiting.pop(request_id, None)
            return
        expected = self.waiting.get(request_id)
        assert self.exchange.take(request_id) == expected
        if expected is not None:
            del self.waiting[request_id]

    @invariant()
    def both_wait_for_the_same(self) -> None:
        assert {each for each in range(self.num_begun + 2) if self.exchange.waits_for(each)} == set(self.waiting)


ExchangeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_exchange_against_a_dict = ExchangeMachine.TestCase

# --- Breaker


def test_closed_breaker_has_nothing_to_do() -> None:
    breaker = Breaker()
    assert not breaker.is_open
    assert breaker.probe_due_ms() is None


def test_first_missed_deadline_opens_it_and_sets_the_first_probe() -> None:
    """HNG: one deadline per process, not one per request."""
    breaker = Breaker()
    breaker.trip(1000.0)
    assert breaker.is_open
    assert breaker.probe_due_ms() == 1000.0 + BACKOFF_MS_MIN


def test_requests_that_miss_later_do_not_put_the_probe_off() -> None:
    breaker = Breaker()
    breaker.trip(1000.0)
    breaker.trip(1015.0)
    assert breaker.probe_due_ms() == 1000.0 + BACKOFF_MS_MIN
    breaker.probe_failed(1020.0)
    breaker.trip(1021.0)
    assert breaker.probe_due_ms() == 1020.0 + 2 * BACKOFF_MS_MIN


def test_failed_probes_wait_twice_as_long_up_to_the_bound() -> None:
    breaker, now_ms = Breaker(), 0.0
    breaker.trip(now_ms)
    pauses = []
    for _ in range(10):
        due_ms = breaker.probe_due_ms()
        assert due_ms is not None
        pauses.append(due_ms - now_ms)
        now_ms = due_ms
        breaker.probe_failed(now_ms)
    assert pauses == [min(BACKOFF_MS_MIN * 2**at, BACKOFF_MS_MAX) for at in range(10)]


def test_heal_closes_it_and_the_next_trip_starts_over() -> None:
    breaker = Breaker()
    breaker.trip(0.0)
    for now_ms in (20.0, 60.0, 140.0):
        breaker.probe_failed(now_ms)
    breaker.heal()
    assert not breaker.is_open
    assert breaker.probe_due_ms() is None
    breaker.trip(5000.0)
    assert breaker.probe_due_ms() == 5000.0 + BACKOFF_MS_MIN
