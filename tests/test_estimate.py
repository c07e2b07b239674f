import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.endpoint import Candidates
from epp.estimate import OVERHEAD_BOUNDS, RATE_BOUNDS, FirstTokenModel, TTFTEstimator
from epp.plugin import Outcome
from scorers.expected_ttft import ExpectedTTFT
from tests.pools import candidates, plugin, request

EXACT = {
    "prefill_tokens_per_second": 1000.0,
    "overhead": 0.0,
    "request_cost": 0.0,
    "decode_weight": 0.0,
    "eviction_weight": 0.0,
}


def ttft(estimator: TTFTEstimator, pool: Candidates, tokens: int) -> list[float]:
    estimator.produce(request(prompt_tokens=tokens), pool)
    assert pool.expected_ttft is not None
    return [float(x) for x in pool.expected_ttft]


def test_the_estimate_is_work_ahead_and_uncached_tokens_over_the_rate() -> None:
    pool = candidates(in_flight_tokens=[0, 3000, 0], prefill_until=[0, 200, 0], prefill_rate=[1000, 1000, 500])
    pool.cached_tokens = np.array([0.0, 4000.0, 4000.0])
    assert ttft(plugin(TTFTEstimator, **EXACT), pool, 5000) == [5, 4, 2]


def test_more_cached_than_the_prompt_has_is_no_negative_work() -> None:
    pool = candidates(1)
    pool.cached_tokens = np.array([99.0])
    assert ttft(plugin(TTFTEstimator, **EXACT), pool, 10) == [0]


def test_queued_requests_of_others_cost_a_mean_request_each_but_our_own_are_not_counted_twice() -> None:
    pool = candidates(waiting=[3, 3], running=[0, 0], in_flight=[0, 3])
    assert ttft(plugin(TTFTEstimator, **EXACT), pool, 0) == [3, 0]


def test_unknown_and_stale_gauges_are_neutral() -> None:
    pool = candidates(
        waiting=[4, 2, math.nan, 50], running=[0, 0, math.nan, 0], scraped_at=[100, 100, 100, 10], in_flight=[0] * 4
    )
    assert ttft(plugin(TTFTEstimator, **EXACT), pool, 0) == [4, 2, 3, 3]


def test_staleness_is_ignored_when_all_are_stale() -> None:
    pool = candidates(waiting=[4, 2], running=[0, 0], scraped_at=[20, 10])
    assert ttft(plugin(TTFTEstimator, **EXACT), pool, 0) == [4, 2]


def test_an_endpoint_without_a_learned_rate_counts_as_the_median() -> None:
    pool = candidates(prefill_rate=[100, math.nan, 400, 200])
    assert ttft(plugin(TTFTEstimator, **EXACT), pool, 400) == [4, 2, 1, 2]


def test_a_new_endpoint_starts_slowly_but_when_all_are_new_nobody_is() -> None:
    estimator = plugin(TTFTEstimator, slow_start=40.0, **EXACT)
    assert ttft(estimator, candidates(3, ready_at=[0, 80, 100]), 1000) == [1, 2, 4]
    assert ttft(estimator, candidates(2, ready_at=[100, 100]), 1000) == [1, 1]


def test_cost_adds_the_delay_of_those_already_served_there() -> None:
    pool = candidates(in_flight=[0, 10])
    estimator = plugin(TTFTEstimator, **{**EXACT, "decode_weight": 0.1})
    estimator.produce(request(prompt_tokens=2000), pool)
    assert pool.expected_ttft is not None
    assert pool.expected_cost is not None
    assert pool.expected_ttft.tolist() == [2, 2]
    assert pool.expected_cost.tolist() == [2, 4]


def test_cost_adds_what_is_pushed_out_of_the_cache_that_turns_over_fastest() -> None:
    pool = candidates(recent_tokens=[0, 5000, 10_000])
    estimator = plugin(TTFTEstimator, **{**EXACT, "eviction_weight": 1.0})
    estimator.produce(request(prompt_tokens=2000), pool)
    assert pool.expected_cost is not None
    assert pool.expected_cost.tolist() == [2, 3, 4]


def test_turnover_counts_the_uncached_tokens_sent_and_fades_by_its_half_life() -> None:
    pool = candidates(2)
    pool.cached_tokens = np.array([400.0, 0.0])
    estimator = plugin(TTFTEstimator, turnover_half_life=10.0, **EXACT)
    for now in (100.0, 110.0):
        asked, later = request(prompt_tokens=1000), pool.pool.candidates(now)
        later.cached_tokens = pool.cached_tokens
        estimator.produce(asked, later)
        estimator.picked(asked, {"default": pool[0]})
    assert pool.column("recent_tokens").tolist() == [600 / 2 + 600, 0]


def run(estimator: TTFTEstimator, pool: Candidates, tokens: int, outcome: Outcome) -> None:
    asked = request(prompt_tokens=tokens)
    estimator.produce(asked, pool)
    estimator.picked(asked, {"default": pool[0]})
    estimator.finished(asked, pool[0], outcome)


def test_the_prefill_rate_of_an_endpoint_is_learned_from_its_first_token_times() -> None:
    pool, random = candidates(2), Random(3)
    estimator = plugin(TTFTEstimator)
    for _ in range(60):
        tokens = random.choice([20, 4000, 20_000])
        spike = 20.0 if random.random() < 0.05 else 1.0
        seconds = (0.1 + tokens / 40_000) * random.uniform(0.9, 1.1) * spike
        run(estimator, pool, tokens, Outcome(status=200, first_token_s=seconds))
    assert pool[0].get("prefill_rate") == pytest.approx(40_000, rel=0.3)
    assert pool[0].get("first_token_overhead") == pytest.approx(0.1, rel=0.4)
    assert math.isnan(pool[1].get("prefill_rate"))


def test_cached_tokens_that_the_worker_reports_correct_the_sample() -> None:
    pool = candidates(1)
    estimator = plugin(TTFTEstimator, **{**EXACT, "request_cost": 0.0})
    for _ in range(30):
        run(estimator, pool, 50_000, Outcome(status=200, first_token_s=2.0, prompt_tokens=50_000, cached_tokens=40_000))
    assert pool[0].get("prefill_rate") == pytest.approx(5000, rel=0.05)


@pytest.mark.parametrize(
    "outcome",
    [Outcome(status=503, first_token_s=1.0), Outcome(aborted=True), Outcome(first_token_s=1.0, served="10.9.9.9:1")],
)
def test_failures_aborts_and_other_endpoints_teach_nothing(outcome: Outcome) -> None:
    pool = candidates(1)
    run(plugin(TTFTEstimator), pool, 5000, outcome)
    assert math.isnan(pool[0].get("prefill_rate"))


def test_the_tokens_ahead_drain_by_the_rate_and_at_the_latest_with_the_first_token() -> None:
    pool = candidates(1)
    estimator = plugin(TTFTEstimator, **EXACT)
    asked = request(prompt_tokens=5000)
    estimator.produce(asked, pool)
    estimator.picked(asked, {"default": pool[0]})
    pool[0].count(requests=1, tokens=5000)
    assert ttft(estimator, pool, 0) == [5]
    later = pool.pool.candidates(103.0)
    assert ttft(estimator, later, 0) == [2]
    pool[0].count(requests=0, tokens=-5000)
    assert ttft(estimator, later, 0) == [0]


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(1e-9, 1e6))))
def test_the_model_stays_in_bounds_whatever_it_sees(samples: list[tuple[float, float]]) -> None:
    model = FirstTokenModel(8000.0, 0.03)
    for work, seconds in samples:
        model.observe(work_tokens=work, seconds=seconds)
    assert RATE_BOUNDS[0] <= model.rate <= RATE_BOUNDS[1]
    assert OVERHEAD_BOUNDS[0] <= model.overhead_s <= OVERHEAD_BOUNDS[1]


def test_one_absurd_sample_moves_a_settled_rate_by_less_than_a_fifth() -> None:
    model = FirstTokenModel(8000.0, 0.03)
    for _ in range(50):
        model.observe(work_tokens=10_000, seconds=1.28)
    settled = model.rate
    model.observe(work_tokens=10_000, seconds=3600.0)
    assert settled * 0.8 < model.rate < settled


def test_the_score_falls_with_cost_from_one() -> None:
    pool = candidates(3)
    pool.expected_cost = np.array([0.08, 0.18, 0.98])
    assert plugin(ExpectedTTFT).score(request(), pool).tolist() == pytest.approx([1, 0.5, 0.1])


def test_differences_below_the_resolution_hardly_show() -> None:
    pool = candidates(2)
    pool.expected_cost = np.array([0.0001, 0.0003])
    assert plugin(ExpectedTTFT).score(request(), pool).min() > 0.98
    assert plugin(ExpectedTTFT, resolution=0.0).score(request(), pool).min() == pytest.approx(1 / 3)
    pool.expected_cost = None
    assert plugin(ExpectedTTFT).score(request(), pool).tolist() == [0, 0]
