"""Endpoints that fail are left out for a while, and come back by trial."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epp.endpoint import Endpoint, Pool
from epp.signals.health import Health, HealthSettings, Phase
from epp.signals.outcome import Outcome

SETTINGS = HealthSettings(failures=3, refused_scrapes=3, silent_scrapes=5, backoff_s=1.0, max_backoff_s=8.0)
LONGEST_BACKOFF_S = 8.0 * 1.2


def fleet(size: int = 4, share: float = 0.5) -> tuple[Health, list[Endpoint]]:
    pool = Pool(Endpoint("10.0.0.1", 8000 + i) for i in range(size))
    health = Health(pool, Random(1), replace(SETTINGS, max_out_share=share))
    return health, pool.endpoints


def up(endpoint: Endpoint) -> bool:
    return endpoint.available


def fail(health: Health, endpoint: Endpoint, now: float, times: int = 3) -> None:
    for _ in range(times):
        health.failed(endpoint, now, "status 500")


def scrape(health: Health, endpoint: Endpoint, now: float, outcome: Outcome, times: int) -> None:
    for _ in range(times):
        health.scraped(endpoint, now, outcome)


def available(health: Health) -> list[bool]:
    return [endpoint.available for endpoint in health.pool.endpoints]


def test_failures_in_a_row_push_an_endpoint_out() -> None:
    health, (a, *_) = fleet()
    fail(health, a, 0.0, times=2)
    assert up(a)
    fail(health, a, 0.0, times=1)
    assert not up(a)
    assert a.address not in [e.address for e in health.pool.candidates(0.0)]
    assert health.counters["ejected"] == 1


def test_a_success_between_failures_starts_the_count_again() -> None:
    health, (a, *_) = fleet()
    fail(health, a, 0.0, times=2)
    health.succeeded(a, 0.0)
    fail(health, a, 0.0, times=2)
    assert up(a)


def test_after_the_backoff_one_request_may_try_and_its_success_brings_the_endpoint_back_slowly() -> None:
    health, (a, *_) = fleet()
    fail(health, a, 10.0)
    health.tick(10.7)
    assert not up(a)
    health.tick(11.3)
    assert health.phase(a) is Phase.TRIAL
    assert up(a)
    health.picked(a, 11.4)
    assert not up(a)
    health.succeeded(a, 12.0, picked_at=11.4)
    assert (up(a), health.phase(a), a.get("ready_at")) == (True, Phase.IN, 12.0)
    assert health.pool.candidates(12.0).ramp(10.0)[0] == 0.0


def test_a_failed_trial_doubles_the_backoff_up_to_a_limit() -> None:
    health, (a, *_) = fleet()
    now, lengths = 0.0, []
    fail(health, a, now)
    for _ in range(6):
        start = now
        while not up(a):
            now += 0.01
            health.tick(now)
        lengths.append(now - start)
        health.picked(a, now)
        health.failed(a, now, "reset")
    for length, expected in zip(lengths, [1, 2, 4, 8, 8, 8], strict=True):
        assert 0.79 * expected <= length <= 1.21 * expected + 0.01


def test_what_was_sent_before_the_trial_does_not_decide_it() -> None:
    health, (a, *_) = fleet()
    fail(health, a, 10.0)
    health.tick(12.0)
    health.picked(a, 12.5)
    health.succeeded(a, 13.0, picked_at=9.0)
    health.failed(a, 13.0, "status 500", picked_at=9.0)
    assert health.phase(a) is Phase.TRIAL
    health.succeeded(a, 13.0, picked_at=12.5)
    assert health.phase(a) is Phase.IN


def test_a_burst_of_failures_counts_as_one_time_out() -> None:
    health, (a, *_) = fleet()
    fail(health, a, 0.0, times=64)
    assert health.counters["ejected"] == 1
    health.tick(1.3)
    assert health.phase(a) is Phase.TRIAL


def test_a_trial_whose_end_is_never_seen_goes_to_another_request() -> None:
    health, (a, *_) = fleet()
    fail(health, a, 0.0)
    health.tick(2.0)
    health.picked(a, 2.0)
    health.tick(31.0)
    assert not up(a)
    health.tick(33.0)
    assert up(a)


def test_earlier_times_out_are_forgiven_after_a_while() -> None:
    health, (a, *_) = fleet()
    fail(health, a, 0.0)
    health.tick(2.0)
    health.succeeded(a, 2.0)
    fail(health, a, 100.0)
    health.tick(101.3)
    assert health.phase(a) is Phase.TRIAL


@pytest.mark.parametrize(("size", "out"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_no_more_than_half_of_the_pool_is_out_and_the_last_stays(size: int, out: int) -> None:
    health, endpoints = fleet(size)
    for endpoint in endpoints:
        fail(health, endpoint, 0.0)
    assert available(health).count(False) == out
    assert health.counters["spared"] == size - out


def test_the_last_endpoint_stays_whatever_the_share() -> None:
    health, endpoints = fleet(3, share=1.0)
    for endpoint in endpoints:
        fail(health, endpoint, 0.0)
    assert available(health).count(True) == 1


def test_when_the_good_ones_leave_the_pool_the_others_may_try_early() -> None:
    health, endpoints = fleet(4)
    a, b, c, d = endpoints
    fail(health, a, 0.0)
    fail(health, b, 0.1)
    health.pool.update(remove=[c, d])
    health.tick(0.2)
    assert (up(a), up(b)) == (True, False)
    assert health.phase(a) is Phase.TRIAL


def test_refused_scrapes_push_out_and_a_scrape_that_is_answered_brings_back() -> None:
    """With response phases off nothing is seen of requests: this is the signal that is left."""
    health, (a, *_) = fleet()
    scrape(health, a, 0.0, Outcome.REFUSED, 3)
    assert not up(a)
    health.tick(50.0)
    assert not up(a)
    scrape(health, a, 50.0, Outcome.GOOD, 1)
    assert up(a)
    assert a.get("ready_at") == 50.0


def test_a_worker_that_flaps_stays_out_for_its_backoff_though_scrapes_are_answered() -> None:
    health, (a, *_) = fleet()
    for now in (0.0, 2.0):
        scrape(health, a, now, Outcome.REFUSED, 3)
        scrape(health, a, now + 0.5, Outcome.GOOD, 1)
        assert not up(a)
        scrape(health, a, now + 1.3, Outcome.GOOD, 1)
        assert up(a) is (now == 0.0)


def test_silent_scrapes_are_borne_longer_than_refused_ones() -> None:
    health, (a, *_) = fleet()
    scrape(health, a, 0.0, Outcome.TIMEOUT, 4)
    assert up(a)
    scrape(health, a, 0.0, Outcome.TIMEOUT, 1)
    assert not up(a)


@pytest.mark.parametrize("outcome", [Outcome.STATUS, Outcome.UNREADABLE])
def test_a_worker_without_metrics_is_not_a_sick_one(outcome: Outcome) -> None:
    health, (a, *_) = fleet()
    scrape(health, a, 0.0, outcome, 50)
    assert up(a)


def test_an_endpoint_pushed_out_by_requests_gets_no_trial_while_scrapes_are_refused() -> None:
    health, (a, *_) = fleet()
    fail(health, a, 0.0)
    scrape(health, a, 0.5, Outcome.REFUSED, 3)
    health.tick(5.0)
    assert not up(a)
    scrape(health, a, 6.0, Outcome.GOOD, 1)
    health.tick(6.1)
    assert health.phase(a) is Phase.TRIAL


def test_an_address_that_comes_back_starts_with_a_clean_slate() -> None:
    health, (a, *_) = fleet()
    fail(health, a, 0.0)
    health.pool.update(remove=[a])
    again = Endpoint(a.host, a.port)
    health.pool.update(add=[again])
    health.tick(0.1)
    assert up(again)
    assert health.phase(a) is Phase.IN
    health.failed(a, 0.2, "status 500")
    assert up(again)


class Machine(RuleBasedStateMachine):
    """Whatever happens in whatever order, most of the pool stays, and what is well comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.health, _ = fleet(5)
        self.pool = self.health.pool
        self.next_port = 9000

    def some(self, index: int) -> Endpoint:
        return self.pool.endpoints[index % len(self.pool)]

    @rule(index=st.integers(0, 9), times=st.integers(1, 4))
    def requests_fail(self, index: int, times: int) -> None:
        fail(self.health, self.some(index), self.now, times)

    @rule(index=st.integers(0, 9), age=st.sampled_from([0.0, 1.0, 100.0]))
    def a_request_succeeds(self, index: int, age: float) -> None:
        self.health.succeeded(self.some(index), self.now, picked_at=self.now - age)

    @rule(index=st.integers(0, 9))
    def a_request_is_picked(self, index: int) -> None:
        endpoint = self.some(index)
        if endpoint.available:
            self.health.picked(endpoint, self.now)

    @rule(index=st.integers(0, 9), outcome=st.sampled_from(list(Outcome)), times=st.integers(1, 6))
    def scrapes_end(self, index: int, outcome: Outcome, times: int) -> None:
        scrape(self.health, self.some(index), self.now, outcome, times)

    @rule(seconds=st.sampled_from([0.0, 0.4, 1.5, 10.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.health.tick(self.now)

    @rule()
    def an_endpoint_joins(self) -> None:
        self.next_port += 1
        self.pool.update(add=[Endpoint("10.0.0.1", self.next_port)])

    @rule(index=st.integers(0, 9))
    def an_endpoint_leaves(self, index: int) -> None:
        if len(self.pool) > 1:
            self.pool.update(remove=[self.some(index)])
            self.health.tick(self.now)

    @invariant()
    def at_least_half_stays(self) -> None:
        hidden = available(self.health).count(False)
        assert hidden <= math.floor(len(self.pool) / 2)
        assert hidden < len(self.pool)

    @invariant()
    def phases_and_availability_agree(self) -> None:
        for endpoint in self.pool.endpoints:
            phase = self.health.phase(endpoint)
            assert endpoint.available or phase is not Phase.IN
            assert not (endpoint.available and phase is Phase.OUT)

    def teardown(self) -> None:
        for _ in range(3):
            self.now += max(LONGEST_BACKOFF_S, SETTINGS.trial_timeout_s) + 1
            for endpoint in self.pool.endpoints:
                self.health.scraped(endpoint, self.now, Outcome.GOOD)
            self.health.tick(self.now)
            for endpoint in self.pool.endpoints:
                self.health.picked(endpoint, self.now)
                self.health.succeeded(endpoint, self.now, picked_at=self.now)
        assert all(available(self.health))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
