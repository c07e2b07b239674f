"""Pickers: who is chosen from given totals."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from epp.endpoint import Endpoint
from epp.pickers import MaxScorePicker, RandomPicker, RoundRobinPicker, WeightedRandomPicker
from tests.pools import NOW, candidates, plugin, request


def test_ties_go_to_the_fewest_in_flight_and_then_to_chance() -> None:
    pool = candidates(4)
    for endpoint, busy in zip(pool, [0, 2, 1, 1], strict=True):
        endpoint.count(requests=busy, tokens=0)
    picker = plugin(MaxScorePicker)
    totals = np.array([0.1, 0.5, 0.5, 0.5 - 1e-12])
    picks = {int(picker.pick(request(), pool, totals)[0]) for _ in range(50)}
    assert picks == {2, 3}


def test_fallbacks_follow_in_the_order_of_totals_then_load() -> None:
    pool = candidates(5)
    pool[1].count(requests=1, tokens=0)
    picker = plugin(MaxScorePicker, max_num_of_endpoints=4)
    totals = np.array([0.2, 0.5, 0.9, 0.5, 0.1])
    assert list(picker.pick(request(), pool, totals)) == [2, 3, 1, 0]


@pytest.mark.parametrize("cls", [MaxScorePicker, RandomPicker, WeightedRandomPicker, RoundRobinPicker])
def test_more_fallbacks_than_candidates_gives_each_candidate_once(
    cls: type[MaxScorePicker | RandomPicker | WeightedRandomPicker | RoundRobinPicker],
) -> None:
    picks = plugin(cls, max_num_of_endpoints=9).pick(request(), candidates(3), np.array([0.1, 0.0, 0.3]))
    assert sorted(int(i) for i in picks) == [0, 1, 2]


def test_random_picks_are_uniform_whatever_the_totals() -> None:
    picker, pool = plugin(RandomPicker), candidates(4)
    seen = Counter(int(picker.pick(request(), pool, np.array([1.0, 0, 0, 0]))[0]) for _ in range(4000))
    assert min(seen.values()) > 850


def test_weighted_random_picks_are_in_proportion_to_the_totals() -> None:
    picker, pool = plugin(WeightedRandomPicker), candidates(4)
    totals = np.array([0.6, 0.3, 0.1, 0.0])
    seen = Counter(int(picker.pick(request(), pool, totals)[0]) for _ in range(10_000))
    assert [seen[i] / 10_000 for i in range(4)] == pytest.approx([0.6, 0.3, 0.1, 0.0], abs=0.02)


def test_weighted_random_works_with_tiny_totals_and_with_none_above_zero() -> None:
    picker, pool = plugin(WeightedRandomPicker), candidates(2)
    tiny = Counter(int(picker.pick(request(), pool, np.array([3e-9, 1e-9]))[0]) for _ in range(2000))
    assert tiny[0] / 2000 == pytest.approx(0.75, abs=0.05)
    none = Counter(int(picker.pick(request(), pool, np.array([0.0, -1.0]))[0]) for _ in range(2000))
    assert none[0] / 2000 == pytest.approx(0.5, abs=0.05)


def test_each_model_sees_its_own_strict_rotation() -> None:
    picker, pool = plugin(RoundRobinPicker), candidates(3)
    picks: dict[str, list[int]] = {"a": [], "b": []}
    for model in "aabababbab":
        picks[model].append(picker.pick(request(model=model), pool, np.zeros(3))[0])
    assert picks == {"a": [0, 1, 2, 0, 1], "b": [0, 1, 2, 0, 1]}


def test_rotation_goes_on_where_it_was_when_endpoints_come_and_go() -> None:
    picker, view = plugin(RoundRobinPicker), candidates(4)
    pool = view.pool

    def turn() -> str:
        now = pool.candidates(NOW)
        return now[picker.pick(request(), now, np.zeros(len(now)))[0]].address.rpartition(":")[2]

    assert [turn(), turn()] == ["8000", "8001"]
    pool.update(remove=[pool.by_key["10.0.0.1:8001"], pool.by_key["10.0.0.1:8000"]])
    assert [turn(), turn()] == ["8002", "8003"]
    pool.update(add=[Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.1", 8009)])
    assert [turn(), turn(), turn(), turn()] == ["8009", "8000", "8002", "8003"]


def test_rotation_remembers_a_bounded_number_of_models() -> None:
    picker, pool = plugin(RoundRobinPicker), candidates(2)
    for i in range(3 * picker.models):
        picker.pick(request(model=f"m{i}"), pool, np.zeros(2))
    assert len(picker._last) == picker.models
