"""A request whose response another stream shows: counted once, released once, whichever stream ends first."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from epp.config import load_default
from epp.director import Director, Flight, Options
from epp.endpoint import Endpoint, Pool
from epp.gateway.ext_proc_events import ResponseHead
from epp.observe.decision_log import DecisionLog
from epp.observe.metrics import Metrics
from epp.request import Headers, RequestHead
from epp.scheduler import Scheduler
from epp.signals.health import Health

BODY = b'{"model":"m","prompt":"hello"}'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}'
JSON = Headers({"content-type": [b"application/json"]})
NOW = 100.0


def director(*, observe: bool = True) -> Director:
    pool, random = Pool([Endpoint("10.0.0.1", 8000)]), Random(1)
    scheduler = Scheduler(load_default(), random=random)
    return Director(
        pool=pool,
        scheduler=lambda: scheduler,
        health=Health(pool, random=random),
        metrics=Metrics(pool, "pool"),
        decisions=DecisionLog(None, random=random),
        wall=lambda: 0.0,
        options=Options(observe_responses=observe),
    )


def steered(director: Director) -> tuple[str, Flight]:
    head = RequestHead("POST", "/v1/completions", Headers())
    answer = director.decide(director.read(head, BODY), BODY, NOW)
    assert isinstance(answer, tuple)
    return answer[0].flight, answer[1]


def shown(director: Director, key: str) -> Flight:
    flight = director.observe(key)
    assert flight is not None
    director.response_began(flight, ResponseHead(200, JSON, ""), NOW)
    director.response_data(flight, USAGE, NOW)
    return flight


ENDS = ["answering", "observing", "observing again", "answering again"]


@pytest.mark.parametrize("order", list(permutations(ENDS)))
@pytest.mark.parametrize("complete", [True, False])
def test_it_is_counted_once_with_its_usage_whichever_stream_ends_first(order: tuple[str, ...], complete: bool) -> None:
    d = director()
    key, flight = steered(d)
    assert shown(d, key) is flight
    for stream in order:
        if stream.startswith("answering"):
            d.landed(flight, complete=False, now=NOW + 1)
        else:
            d.observed(flight, complete=complete, now=NOW + 1)
    stats = d.metrics.model("m", "m")
    assert (stats.requests, stats.running, stats.input_tokens.total) == (1, 0, 9)
    assert d.pool.endpoints[0].in_flight == 0
    assert d.observe(key) is None


def test_an_observing_stream_that_breaks_leaves_the_load_to_the_one_that_answers() -> None:
    d = director()
    key, flight = steered(d)
    shown(d, key)
    d.observed(flight, complete=False, now=NOW)
    assert d.pool.endpoints[0].in_flight == 1
    d.landed(flight, complete=False, now=NOW)
    assert d.pool.endpoints[0].in_flight == 0
    assert d.metrics.model("m", "m").running == 0


def test_a_request_is_observed_by_one_stream_at_most_and_an_unknown_key_is_counted() -> None:
    d = director()
    key, _ = steered(d)
    assert d.observe(key) is not None
    assert d.observe(key) is None
    assert d.observe("") is None
    assert d.metrics.reasons["observed-unknown-request"] == 2


def test_without_the_option_no_request_has_a_key() -> None:
    d = director(observe=False)
    key, _ = steered(d)
    assert key == ""
    assert d.observe("1") is None
