import math

import numpy as np
import pytest

from epp.endpoint import LoraState
from scorers.active_request import ActiveRequest
from scorers.context_length_aware import ContextLengthAware, parse_range
from scorers.kv_cache_utilization import KVCacheUtilization
from scorers.load_aware import LoadAware
from scorers.lora_affinity import LoraAffinity
from scorers.no_hit_lru import NoHitLRU
from scorers.prefix_cache import PrefixCache
from scorers.queue import Queue
from scorers.running_requests_size import RunningRequestsSize
from scorers.session_affinity import HEADER, SessionAffinity
from scorers.token_load import TokenLoad
from tests.pools import candidates, plugin, request


@pytest.mark.parametrize(("cls", "column"), [(Queue, "waiting"), (RunningRequestsSize, "running")])
def test_least_load_scores_one_and_greatest_zero(cls: type[Queue], column: str) -> None:
    assert list(plugin(cls).score(request(), candidates(**{column: [0, 5, 10]}))) == [1, 0.5, 0]
    assert list(plugin(cls).score(request(), candidates(**{column: [7, 7]}))) == [1, 1]


@pytest.mark.parametrize(("cls", "column"), [(Queue, "waiting"), (RunningRequestsSize, "running")])
def test_requests_sent_since_the_scrape_count_as_load(cls: type[Queue], column: str) -> None:
    assert list(plugin(cls).score(request(), candidates(**{column: [0, 2], "unseen": [4, 0]}))) == [0, 1]


@pytest.mark.parametrize(
    ("cls", "column"),
    [
        (Queue, "waiting"),
        (RunningRequestsSize, "running"),
        (KVCacheUtilization, "kv_usage"),
        (LoadAware, "waiting"),
    ],
)
def test_an_unknown_gauge_never_wins_over_a_known_one(cls: type[Queue], column: str) -> None:
    unknown, light, heavy = plugin(cls).score(request(), candidates(**{column: [math.nan, 0.2, 0.7]}))
    assert unknown == heavy < light


@pytest.mark.parametrize("cls", [Queue, RunningRequestsSize, KVCacheUtilization, LoadAware])
def test_gauges_unknown_everywhere_prefer_nobody(cls: type[Queue]) -> None:
    scores = np.asarray(plugin(cls).score(request(), candidates(3)))
    assert np.isfinite(scores).all()
    assert len(set(scores)) == 1


def test_free_kv_cache_scores_its_share() -> None:
    assert plugin(KVCacheUtilization).score(request(), candidates(kv_usage=[0, 0.25, 1])).tolist() == [1, 0.75, 0]


def test_load_aware_halves_at_an_empty_queue_and_is_zero_from_the_threshold() -> None:
    assert plugin(LoadAware).score(request(), candidates(waiting=[0, 64, 128, 500])).tolist() == [0.5, 0.25, 0, 0]
    assert plugin(LoadAware, threshold=10).score(request(), candidates(waiting=[0, 5, 10])).tolist() == [0.5, 0.25, 0]


def test_busy_endpoints_keep_their_order_by_default() -> None:
    assert plugin(ActiveRequest).score(request(), candidates(in_flight=[0, 1, 4])).tolist() == [1, 0.75, 0]


def test_idle_threshold_and_busy_score_leave_a_gap() -> None:
    scorer = plugin(ActiveRequest, idle_threshold=1, max_busy_score=0.5)
    assert scorer.score(request(), candidates(in_flight=[1, 2, 4])).tolist() == [1, 0.25, 0]
    assert scorer.score(request(), candidates(in_flight=[0, 0])).tolist() == [1, 1]


def test_token_load_falls_linearly_to_its_threshold() -> None:
    scorer = plugin(TokenLoad, queue_threshold_tokens=1000)
    assert scorer.score(request(), candidates(in_flight_tokens=[0, 250, 1000, 9000])).tolist() == [1, 0.75, 0, 0]


def test_prefix_score_is_the_cached_share_of_the_prompt() -> None:
    pool = candidates(3)
    pool.cached_tokens = np.array([0.0, 50.0, 200.0])
    assert plugin(PrefixCache).score(request(prompt_tokens=100), pool).tolist() == [0, 0.5, 1]
    assert plugin(PrefixCache).score(request(prompt_tokens=0), pool).tolist() == [0, 0, 0]


def test_cold_prompts_go_to_the_endpoint_least_recently_used_for_one() -> None:
    scorer, pool = plugin(NoHitLRU), candidates(3)
    order = []
    for _ in range(6):
        cold = request()
        index = int(np.argmax(scorer.score(cold, pool)))
        scorer.picked(cold, {"default": pool[index]})
        order.append(index)
    assert order == [0, 1, 2, 0, 1, 2]
    pool.cached_tokens = np.array([16.0, 0.0, 0.0])
    warm = request()
    assert scorer.score(warm, pool).tolist() == [0.5, 0.5, 0.5]
    scorer.picked(warm, {"default": pool[0]})
    pool.cached_tokens = np.zeros(3)
    assert scorer.score(request(), pool).tolist() == [1, 0.5, 0]


def test_removed_endpoints_are_forgotten_by_the_cold_order() -> None:
    scorer, pool = plugin(NoHitLRU), candidates(2)
    cold = request()
    scorer.score(cold, pool)
    scorer.picked(cold, {"default": pool[0]})
    scorer.removed(pool[0])
    assert scorer.score(request(), pool).tolist() == [1, 0]


def test_the_session_token_given_to_the_client_brings_it_back() -> None:
    scorer, pool = plugin(SessionAffinity), candidates(3)
    given = scorer.response_headers(request(), {"default": pool[2]})
    assert scorer.score(request(headers={HEADER: given[HEADER]}), pool).tolist() == [0, 0, 1]
    assert scorer.score(request(), pool).tolist() == [0, 0, 0]
    assert scorer.score(request(headers={HEADER: "%%% not base64"}), pool).tolist() == [0, 0, 0]


def test_ranks_of_one_pod_have_different_session_tokens() -> None:
    scorer, pool = plugin(SessionAffinity), candidates(2)
    for rank, endpoint in enumerate(pool):
        endpoint.name, endpoint.rank = "default/pod-0", rank
    given = scorer.response_headers(request(), {"prefill": pool[0], "decode": pool[1]})
    assert scorer.score(request(headers={HEADER: given[HEADER]}), pool).tolist() == [0, 1]


def test_adapters_rank_running_then_free_slot_then_waiting() -> None:
    pool = candidates(5)
    states = [
        LoraState(frozenset({"a"}), frozenset(), 1),
        LoraState(frozenset({"b"}), frozenset(), 2),
        LoraState(frozenset({"b"}), frozenset({"a"}), 2),
        LoraState(frozenset({"b"}), frozenset({"c"}), 2),
        None,
    ]
    for endpoint, state in zip(pool, states, strict=True):
        endpoint.lora = state
    assert plugin(LoraAffinity).score(request(model="a"), pool).tolist() == [1, 0.8, 0.6, 0, 0]


def test_context_length_scores_follow_the_field() -> None:
    pool = candidates(6)
    for endpoint, label in zip(pool, ["0-10000", "500-500", "1000-2000", None, "wide", "0-400"], strict=True):
        endpoint.labels = {} if label is None else {"llm-d.ai/context-length-range": label}
    scorer = plugin(ContextLengthAware)
    expected = [0.3 + 0.7 * (0.7 / 2 + 0.3 * 0.95), 1.0, 0.3 / 1.5, 0.5, 0.0, 0.3 / 1.1]
    assert scorer.score(request(prompt_tokens=500), pool).tolist() == pytest.approx(expected)
    assert scorer.filter(request(prompt_tokens=500), pool).all()
    strict = plugin(ContextLengthAware, enable_filtering=True)
    assert strict.filter(request(prompt_tokens=500), pool).tolist() == [True, True, False, True, False, False]


@pytest.mark.parametrize("text", ["", "-", "5", "5-", "-5", "9-5", "1-2-3", "a-b", "1.5-2", "٣-٤"])
def test_a_range_label_that_is_not_two_ordered_numbers_is_no_range(text: str) -> None:
    assert parse_range(text) is None
