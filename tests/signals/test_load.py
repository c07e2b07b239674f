"""What a request weighs on its endpoint: counted at the pick, seen by a scrape, taken back once."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from epp.endpoint import Endpoint, Load, Pool


def test_a_pick_counts_at_once_and_its_release_takes_it_back_once() -> None:
    endpoint = Endpoint("10.0.0.1", 8000)
    pool = Pool([endpoint])
    load = endpoint.acquire(500, now=1.0)
    assert (endpoint.in_flight, endpoint.in_flight_tokens, endpoint.unseen) == (1, 500, 1)
    assert pool.candidates(1.0).column("in_flight_tokens")[0] == 500
    load.first_token()
    load.first_token()
    assert (endpoint.in_flight, endpoint.in_flight_tokens) == (1, 0)
    load.release()
    load.release()
    load.first_token()
    assert (endpoint.in_flight, endpoint.in_flight_tokens, endpoint.unseen) == (0, 0, 0)


def test_a_release_without_a_first_token_takes_the_tokens_back() -> None:
    endpoint = Endpoint("10.0.0.1", 8000)
    endpoint.acquire(500, now=1.0).release()
    assert endpoint.in_flight_tokens == 0


def test_an_endpoint_that_flaps_keeps_the_counts_of_the_object_that_was_picked() -> None:
    """In-flight counters went negative where a pod was removed and added again while requests ran."""
    first = Endpoint("10.0.0.1", 8000)
    pool = Pool([first])
    old = first.acquire(10, now=0.0)
    pool.update(remove=[first])
    second = Endpoint("10.0.0.1", 8000)
    pool.update(add=[second])
    new = second.acquire(20, now=1.0)
    old.release()
    assert pool.candidates(1.0).column("in_flight")[0] == 1
    new.release()
    assert (first.in_flight, second.in_flight) == (0, 0)
    assert pool.candidates(1.0).column("in_flight_tokens")[0] == 0


def test_a_stream_of_hours_stays_in_flight() -> None:
    endpoint = Endpoint("10.0.0.1", 8000)
    pool = Pool([endpoint])
    endpoint.acquire(10, now=0.0)
    for minute in range(600):
        endpoint.scrape_began()
        endpoint.scrape_succeeded(minute * 60.0)
    assert pool.candidates(36_000.0).column("in_flight")[0] == 1


def test_a_pick_made_during_a_scrape_is_not_seen_by_it() -> None:
    endpoint = Endpoint("10.0.0.1", 8000)
    endpoint.acquire(1, now=0.0)
    endpoint.scrape_began()
    endpoint.acquire(1, now=0.1)
    endpoint.scrape_succeeded(0.2)
    assert endpoint.unseen == 1


def test_a_failed_scrape_sees_nothing_and_the_next_good_one_sees_all() -> None:
    endpoint = Endpoint("10.0.0.1", 8000)
    endpoint.acquire(1, now=0.0)
    endpoint.scrape_began()
    endpoint.acquire(1, now=0.1)
    endpoint.scrape_began()
    assert endpoint.unseen == 2
    endpoint.scrape_succeeded(0.2)
    assert endpoint.unseen == 0


@given(
    st.lists(st.sampled_from(["pick", "release", "begin", "succeed"]), max_size=60), st.randoms(use_true_random=False)
)
def test_unseen_is_the_number_of_live_requests_picked_since_the_last_good_scrape_began(
    events: list[str], random: Random
) -> None:
    endpoint = Endpoint("10.0.0.1", 8000)
    live: list[tuple[Load, int]] = []  # each with the time of its pick
    began, seen = -1, -1
    for time, event in enumerate(events):
        if event == "pick":
            live.append((endpoint.acquire(1, now=time), time))
        elif event == "release" and live:
            live.pop(random.randrange(len(live)))[0].release()
        elif event == "begin":
            endpoint.scrape_began()
            began = time
        elif event == "succeed" and began > seen:
            endpoint.scrape_succeeded(time)
            seen = began
        assert endpoint.unseen == sum(picked > seen for _, picked in live)
        assert endpoint.in_flight == len(live)


def test_all_stale_means_staleness_is_ignored_and_some_stale_means_fresh_ones_are_told() -> None:
    a, b = Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000)
    pool = Pool([a, b])
    assert pool.candidates(100.0).fresh(2.0).tolist() == [True, True]
    a.set("scraped_at", 99.0)
    assert pool.candidates(100.0).fresh(2.0).tolist() == [True, False]
    assert pool.candidates(200.0).fresh(2.0).tolist() == [True, True]


def test_slow_start_rises_from_the_moment_an_endpoint_joined() -> None:
    a, b, c = (Endpoint(f"10.0.0.{i}", 8000) for i in (1, 2, 3))
    pool = Pool([a, b, c])
    a.set("ready_at", 100.0)
    b.set("ready_at", 95.0)
    assert math.isinf(c.get("ready_at"))
    assert pool.candidates(100.0).ramp(10.0).tolist() == [0.0, 0.5, 1.0]
    assert pool.candidates(100.0).ramp(0.0).tolist() == [1.0, 1.0, 1.0]
