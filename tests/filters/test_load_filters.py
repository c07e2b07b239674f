import math

import numpy as np

from filters.health import Health
from filters.prefix_cache_affinity import PrefixCacheAffinity
from filters.saturation import ConcurrencyDetector, UtilizationDetector
from tests.pools import candidates, plugin, request


def test_silent_endpoints_are_dropped_while_others_answer() -> None:
    pool = candidates(3, scraped_at=[95, 80, -math.inf])
    assert plugin(Health).filter(request(), pool).tolist() == [True, False, False]


def test_a_pool_whose_metrics_all_stopped_goes_on_serving() -> None:
    pool = candidates(2, scraped_at=[10, -math.inf])
    assert plugin(Health).filter(request(), pool).all()
    assert plugin(UtilizationDetector).filter(request(), pool).all()


def test_saturated_endpoints_are_dropped_and_headroom_raises_the_limits() -> None:
    pool = candidates(waiting=[0, 5, 0, 5.5], kv_usage=[0.1, 0.1, 0.85, 0.1])
    assert plugin(UtilizationDetector).filter(request(), pool).tolist() == [True, False, False, False]
    assert plugin(UtilizationDetector, headroom=0.1).filter(request(), pool).tolist() == [True, True, True, False]


def test_unknown_utilisation_counts_as_saturated_and_own_burst_as_queue() -> None:
    pool = candidates(waiting=[0, 0, math.nan], kv_usage=[math.nan, 0.1, 0.1], unseen=[0, 4, 0])
    assert plugin(UtilizationDetector).filter(request(), pool).tolist() == [False, True, False]
    pool = candidates(waiting=[0, 0], kv_usage=[0.1, 0.1], unseen=[5, 4])
    assert plugin(UtilizationDetector).filter(request(), pool).tolist() == [False, True]


def test_all_saturated_keeps_all() -> None:
    assert plugin(UtilizationDetector).filter(request(), candidates(waiting=[9, 9], kv_usage=[0.5, 0.5])).all()


def test_concurrency_is_limited_by_requests_or_by_tokens() -> None:
    pool = candidates(in_flight=[99, 100, 0], in_flight_tokens=[0, 0, 2_000_000])
    assert plugin(ConcurrencyDetector).filter(request(), pool).tolist() == [True, False, True]
    by_tokens = plugin(ConcurrencyDetector, concurrency_mode="tokens")
    assert by_tokens.filter(request(), pool).tolist() == [True, True, False]


def test_sticky_endpoints_are_kept_unless_waiting_there_costs_too_much() -> None:
    pool = candidates(3)
    pool.cached_tokens = np.array([800.0, 799.0, 0.0])
    sticky = plugin(PrefixCacheAffinity, exploration_probability=0.0)
    asked = request(prompt_tokens=1000)
    assert sticky.filter(asked, pool).tolist() == [True, False, False]
    pool.expected_ttft = np.array([6.0, 1.0, 2.0])
    assert sticky.filter(asked, pool).tolist() == [True, False, False]
    pool.expected_ttft = np.array([6.1, 1.0, 2.0])
    assert sticky.filter(asked, pool).all()
    always = plugin(PrefixCacheAffinity, exploration_probability=0.0, max_ttft_penalty_ms=0.0)
    assert always.filter(asked, pool).tolist() == [True, False, False]
    off = plugin(PrefixCacheAffinity, affinity_threshold=0.0)
    assert off.filter(asked, pool).all()


def test_exploration_lets_other_endpoints_in_at_its_rate() -> None:
    pool = candidates(2)
    pool.cached_tokens = np.array([1000.0, 0.0])
    explorer = plugin(PrefixCacheAffinity, exploration_probability=0.1)
    explored = sum(explorer.filter(request(prompt_tokens=1000), pool).all() for _ in range(2000))
    assert 140 < explored < 260
