"""The scheduler: what a decision is made of, and what a plugin at fault may cost."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from epp.config import read
from epp.decision import Decision
from epp.endpoint import Candidates, Pool
from epp.guard import Limits
from epp.plugin import Outcome
from epp.scheduler import ALL_FILTERED, NO_CANDIDATES, Scheduler, Unschedulable
from tests.pools import NOW, candidates, request
from tests.scheduler.faulty import (
    GivingFilter,
    GivingPicker,
    GivingProducer,
    GivingScorer,
    Hanging,
    LostHandler,
    Telling,
    config,
    registry,
    scheduler,
)

LIMITS = Limits(time_limit_s=0.1, retry_after_s=30)


def later(pool: Candidates, seconds: float) -> Candidates:
    return pool.pool.candidates(pool.now + seconds)


def test_the_highest_weighted_sum_wins_and_the_decision_shows_how() -> None:
    text = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: kv-cache-utilization-scorer}, {type: row}]
schedulingProfiles:
- name: p
  plugins:
  - {pluginRef: kv-cache-utilization-scorer, weight: 3}
  - {pluginRef: row, weight: 0.5}
"""
    pool = candidates(kv_usage=[0.5, 0.1, 0.2])
    decision = Scheduler(read(text, registry=registry())).schedule(request(b"x" * 400), pool, at=1e9)
    assert decision.endpoints == (pool[1],)
    (trace,) = decision.profiles
    assert trace.totals == pytest.approx([3 * 0.5, 3 * 0.9 + 0.5 / 3, 3 * 0.8 + 0.5 * 2 / 3])
    assert [(s.name, s.weight, s.fault) for s in trace.scorers] == [
        ("kv-cache-utilization-scorer", 3.0, ""),
        ("row", 0.5, ""),
    ]
    assert (decision.at, decision.estimate.prompt_tokens, decision.reasons) == (1e9, 100, ())
    assert set(decision.timing) == {"produce", "profiles", "total"}


def test_scores_outside_0_and_1_are_clipped() -> None:
    GivingScorer.gives = [7.0, -3.0, 0.5]
    decision = scheduler("giving-scorer").schedule(request(), candidates(3), at=0)
    assert decision.profiles[0].totals.tolist() == [1.0, 0.0, 0.5]
    assert decision.reasons == ()


def test_the_trace_keeps_the_scores_when_the_plugin_reuses_its_array() -> None:
    GivingScorer.gives = np.array([0.1, 0.9])
    decision = scheduler("giving-scorer").schedule(request(), candidates(2), at=0)
    GivingScorer.gives[:] = 0.0
    assert decision.profiles[0].scorers[0].raw.tolist() == [0.1, 0.9]


def test_filters_run_in_order_and_each_sees_what_the_one_before_left() -> None:
    pool = candidates(kv_usage=[0.1, 0.95, 0.2], waiting=[9, 0, 0])
    GivingFilter.gives = [False, True, True]
    trace = scheduler("giving-filter", "utilization-detector").schedule(request(), pool, at=0).profiles[0]
    assert [(f.name, f.before, f.kept) for f in trace.filters] == [
        ("giving-filter", 3, (pool[1], pool[2])),
        ("utilization-detector", 2, (pool[2],)),
    ]
    assert trace.candidates == (pool[2],)


def test_an_empty_pool_and_filters_that_leave_nothing_are_told_apart() -> None:
    with pytest.raises(Unschedulable) as empty:
        scheduler("row").schedule(request(), Pool().candidates(NOW), at=0)
    assert empty.value.reason == NO_CANDIDATES
    assert empty.value.decision.endpoints == ()
    GivingFilter.gives = [False, False]
    with pytest.raises(Unschedulable) as filtered:
        scheduler("giving-filter").schedule(request(), candidates(2), at=0)
    assert filtered.value.reason == ALL_FILTERED
    assert filtered.value.decision.profiles[0].filters[0].kept == ()


def test_the_estimate_is_that_of_the_destination_also_after_filters() -> None:
    pool = candidates(3)
    pool.expected_ttft = np.array([0.1, 0.2, 0.3])
    GivingProducer.gives = np.array([10.0, 20.0, 30.0])
    GivingFilter.gives = [True, False, True]
    decision = scheduler("giving-producer", "giving-filter", "row").schedule(request(b"x" * 400), pool, at=0)
    assert decision.endpoints == (pool[2],)
    assert (decision.estimate.cached_tokens, decision.estimate.ttft_s) == (30, 0.3)


# --- plugins at fault ---


def test_a_plugin_that_raises_everywhere_costs_its_own_contribution_only(caplog: pytest.LogCaptureFixture) -> None:
    picker = scheduler("raising", "row", limits=LIMITS)
    pool = candidates(3)
    with caplog.at_level(logging.ERROR):
        decisions = [picker.schedule(request(), pool, at=0) for _ in range(3)]
    for decision in decisions:
        assert decision.endpoints == (pool[2],)  # the row scorer and the fallback picker still count
        assert decision.reasons == ("plugin-fault:raising:raised",)
        trace = decision.profiles[0]
        assert trace.filters[0].kept == tuple(pool)
        assert "KeyError" in trace.filters[0].fault
        assert "KeyError" in next(s for s in trace.scorers if s.name == "raising").fault
    assert picker.faults.counts == {("raising", "raised"): 12}  # producer, filter, scorer, picker, three times
    assert len(caplog.records) == 1


def test_what_a_plugin_does_to_the_request_and_the_candidates_reaches_nobody_else() -> None:
    pool, asked = candidates(3), request(b"x" * 400)
    before = (asked.model, asked.prompts, asked.prompt_tokens)
    decision = scheduler("grabbing", "row").schedule(asked, pool, at=0)
    assert decision.endpoints == (pool[2],)
    assert decision.estimate.prompt_tokens == 100
    assert decision.reasons == ("plugin-fault:grabbing:raised",)
    assert (asked.model, asked.prompts, asked.prompt_tokens) == before
    assert len(pool) == len(pool.column("waiting")) == 3


@pytest.mark.parametrize(
    "gives",
    [
        None,
        "x",
        [],
        [0.5],
        [0.5, 0.5, 0.5, 0.5],
        np.ones((3, 3)),
        np.ones((3, 1)),
        ["a", "b", "c"],
        [None, {}, []],
        0.5,
        {"a": 1, "b": 2, "c": 3},
        object(),
    ],
    ids=repr,
)
def test_scores_of_a_wrong_shape_count_as_none(gives: Any) -> None:
    GivingScorer.gives = gives
    pool = candidates(3)
    decision = scheduler("giving-scorer", "row").schedule(request(), pool, at=0)
    assert decision.endpoints == (pool[2],)
    trace = decision.profiles[0].scorers[0]
    assert trace.raw.tolist() == [0, 0, 0]
    assert trace.fault
    assert decision.reasons == ("plugin-fault:giving-scorer:shape",)


def test_nan_and_infinity_count_as_no_opinion_for_that_endpoint_only() -> None:
    GivingScorer.gives = [math.nan, 0.9, math.inf]
    pool = candidates(3)
    decision = scheduler("giving-scorer").schedule(request(), pool, at=0)
    trace = decision.profiles[0].scorers[0]
    assert trace.raw.tolist() == [0.0, 0.9, 1.0]
    assert trace.fault == "nan: for 1 of 3 candidates"
    assert decision.reasons == ("plugin-fault:giving-scorer:nan",)


@pytest.mark.parametrize(
    "gives", [None, [], [True], [True] * 4, [1.0, 0.0, 1.0], ["a"] * 3, np.ones((3, 3), dtype=bool), 1], ids=repr
)
def test_a_filter_at_fault_keeps_all(gives: Any) -> None:
    GivingFilter.gives = gives
    pool = candidates(3)
    decision = scheduler("giving-filter", "row").schedule(request(), pool, at=0)
    assert decision.profiles[0].filters[0].kept == tuple(pool)
    assert decision.reasons == ("plugin-fault:giving-filter:shape",)


@pytest.mark.parametrize("gives", [None, [], [3], [-1], ["a"], [0.5j], 1, [math.nan]], ids=repr)
def test_a_picker_at_fault_is_replaced_by_the_highest_total(gives: Any) -> None:
    GivingPicker.gives = gives
    pool = candidates(3)
    decision = scheduler("giving-picker", "row").schedule(request(), pool, at=0)
    assert decision.endpoints == (pool[2],)
    assert decision.reasons == ("plugin-fault:giving-picker:shape",)


@pytest.mark.parametrize(
    "gives", [None, [1, 2, 3], np.ones(2), np.full(3, np.nan), np.array(["a", "b", "c"])], ids=repr
)
def test_a_producer_at_fault_leaves_no_cached_tokens(gives: Any) -> None:
    GivingProducer.gives = gives
    pool = candidates(3)
    decision = scheduler("giving-producer", "prefix-cache-scorer", "row").schedule(request(b"x" * 99), pool, at=0)
    assert decision.endpoints == (pool[2],)
    assert decision.estimate.cached_tokens == 0
    assert decision.reasons == ("plugin-fault:giving-producer:shape",)


def test_an_endless_list_of_picks_is_read_as_far_as_there_are_candidates() -> None:
    GivingPicker.gives = itertools.repeat(1)
    pool = candidates(3)
    assert scheduler("giving-picker").schedule(request(), pool, at=0).endpoints == (pool[1],)


@pytest.mark.parametrize("hook", ["next_profiles", "primary"])
def test_a_handler_cannot_change_what_the_profiles_found(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def clear(self: LostHandler, *args: Any) -> list[str]:
        args[-1].clear()
        return []

    monkeypatch.setattr(LostHandler, hook, clear)
    pool = candidates(3)
    decision = scheduler("lost-handler", "row").schedule(request(), pool, at=0)
    assert decision.endpoints == (pool[2],)


def test_a_handler_at_fault_is_replaced_by_running_every_profile() -> None:
    pool = candidates(3)
    decision = scheduler("lost-handler", "row").schedule(request(), pool, at=0)
    assert decision.endpoints == (pool[2],)
    assert decision.reasons == ("plugin-fault:lost-handler:shape",)


def test_a_scorer_cannot_write_into_the_live_state_of_the_pool() -> None:
    pool = candidates(waiting=[1, 2, 3])
    decision = scheduler("writing", "row").schedule(request(), pool, at=0)
    assert decision.reasons == ("plugin-fault:writing:raised",)
    assert pool.column("waiting").tolist() == [1, 2, 3]


@pytest.fixture
def hanging() -> Iterator[type[Hanging]]:
    Hanging.let_go = threading.Event()
    Hanging.calls = 0
    yield Hanging
    Hanging.let_go.set()


def test_a_plugin_that_hangs_costs_one_request_its_time_limit_then_is_left_out(hanging: type[Hanging]) -> None:
    picker = scheduler("hanging", "row", limits=LIMITS)
    pool = candidates(3)
    kinds = [picker.schedule(request(), later(pool, i), at=0).reasons for i in range(5)]
    assert kinds == [("plugin-fault:hanging:timeout",)] + [("plugin-fault:hanging:quarantined",)] * 4
    assert hanging.calls == 1


def test_a_hung_plugin_is_tried_again_after_its_quarantine_and_only_once_it_came_back(hanging: type[Hanging]) -> None:
    picker = scheduler("hanging", "row", limits=LIMITS)
    pool = candidates(3)
    picker.schedule(request(), pool, at=0)
    assert picker.schedule(request(), later(pool, 31), at=0).reasons == ("plugin-fault:hanging:quarantined",)
    hanging.let_go.set()
    decision = _until_good(picker, later(pool, 62))
    assert decision.profiles[0].totals.max() > 1
    assert hanging.calls == 2


def _until_good(picker: Scheduler, pool: Candidates) -> Decision:
    """The first decision without a fault: the hung thread needs a moment to come back."""
    for _ in range(1000):
        decision = picker.schedule(request(), pool, at=0)
        if not decision.reasons:
            return decision
        threading.Event().wait(0.01)
    raise AssertionError("the plugin was never tried again")


def test_a_foreign_plugin_thread_ends_with_its_scheduler() -> None:
    before = set(threading.enumerate())
    picker = scheduler("row")
    picker.schedule(request(), candidates(2), at=0)
    (thread,) = [t for t in threading.enumerate() if t not in before]
    del picker
    thread.join(10)
    assert not thread.is_alive()


# --- hooks ---


def test_hooks_reach_every_plugin_whatever_the_others_do() -> None:
    picker = scheduler("raising", "telling", limits=LIMITS)
    pool, asked = candidates(2), request()
    decision = picker.schedule(asked, pool, at=0)
    telling = picker.plugins["telling"]
    assert isinstance(telling, Telling)
    outcome = Outcome(status=200)
    picker.picked(asked, decision, NOW)
    assert picker.response_headers(asked, decision, NOW) == {"x-told": "yes"}
    picker.finished(asked, pool[0], outcome, NOW)
    picker.removed(pool[1], NOW)
    assert telling.told == [
        ("picked", {"default": decision.endpoints[0]}),
        ("finished", pool[0], outcome),
        ("removed", pool[1]),
    ]
    assert picker.faults.counts["raising", "raised"] == 4 + 4


def test_the_same_seed_gives_the_same_decisions() -> None:
    def run() -> list[str]:
        picker, pool = scheduler("telling"), candidates(5)
        return [picker.schedule(request(), pool, at=0).endpoints[0].address for _ in range(50)]

    first = run()
    assert first == run()
    assert len(set(first)) == 5


# --- a changed configuration ---


def test_unchanged_plugins_keep_their_state_and_changed_ones_start_anew() -> None:
    old = Scheduler(config(["telling", "row", "round-robin-picker"]), random=Random(1))
    changed = read(
        """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: telling}, {type: round-robin-picker, parameters: {maxNumOfEndpoints: 2}}]
""",
        registry=registry(),
    )
    new = Scheduler(changed, previous=old)
    assert new.plugins["telling"] is old.plugins["telling"]
    assert new.plugins["round-robin-picker"] is not old.plugins["round-robin-picker"]
    assert set(new.handle.plugins) == {"telling", "round-robin-picker", "single-profile-handler"}
    assert new.faults is old.faults


def test_a_request_picked_before_a_reload_still_tells_the_plugins_of_then() -> None:
    old = scheduler("telling")
    asked, pool = request(), candidates(2)
    old.schedule(asked, pool, at=0)
    Scheduler(config(["row"]), previous=old)
    old.finished(asked, pool[0], Outcome(), NOW)
    telling = old.plugins["telling"]
    assert isinstance(telling, Telling)
    assert telling.told == [("finished", pool[0], Outcome())]
