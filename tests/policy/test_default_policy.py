"""What the default policy does to a fleet, in virtual time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from epp.plugin import Endpoint
from tests.policy.fleet import Fleet, Prompt, agent_sessions, mooncake_rows

ROUND_ROBIN = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: round-robin-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: round-robin-picker
"""


def counts(fleet: Fleet) -> list[int]:
    return [worker.requests for worker in fleet.workers.values()]


def prompt(number: int, blocks: int = 20) -> Prompt:
    return Prompt(tuple(range(number * 1000, number * 1000 + blocks)), 64, blocks * 64, 100)


@pytest.mark.parametrize("kind", ["all different", "all the same", "shorter than a block"])
def test_a_burst_inside_one_scrape_interval_spreads_evenly(kind: str) -> None:
    fleet = Fleet(4, scrape_s=1.0)
    asked = {
        "all different": [prompt(i) for i in range(200)],
        "all the same": [prompt(1)] * 200,
        "shorter than a block": [Prompt((7,), 64, 5, 100)] * 200,
    }[kind]
    for one in asked:
        fleet.at(0.1, lambda one=one: fleet.send(one))  # type: ignore[misc]
    fleet.run()
    assert max(counts(fleet)) <= 1.5 * min(counts(fleet))


@pytest.mark.parametrize("seen", [True, False], ids=["responses seen", "responses not seen"])
@pytest.mark.parametrize("rate", [4000.0, 8000.0, 16_000.0])
def test_a_first_block_common_to_all_starves_neither_balance_nor_hits(rate: float, seen: bool) -> None:
    """Conversation trace, all of whose requests share block 0; at most 32 % of its tokens can be hits."""
    fleet = Fleet(10, cache_tokens=3_000_000, rate=rate, first_tokens_seen=seen)
    for at, asked in mooncake_rows():
        fleet.at(at, lambda asked=asked: fleet.send(asked))  # type: ignore[misc]
    fleet.run()
    assert fleet.hit_share >= 0.25
    assert fleet.imbalance(lambda worker: worker.uncached_tokens) <= 1.2


def agents(config: str = "") -> Fleet:
    """Sessions that send the next turn three seconds after the last answer, started a second apart."""
    fleet = Fleet(4, config=config, cache_tokens=1_000_000)

    def turn(session: list[Prompt], number: int) -> None:
        if number < len(session):
            fleet.send(session[number], then=lambda: fleet.at(fleet.now + 3.0, lambda: turn(session, number + 1)))

    for start, session in enumerate(agent_sessions()):
        fleet.at(float(start), lambda session=session: turn(session, 0))  # type: ignore[misc]
    fleet.run()
    return fleet


def test_agent_sessions_find_at_least_twice_the_cached_share_of_round_robin_and_answer_sooner() -> None:
    default, rotation = agents(), agents(ROUND_ROBIN)
    assert len(default.picks) == len(rotation.picks) == 24 * 16
    assert default.hit_share >= 2 * rotation.hit_share
    assert float(np.mean(default.first_token_s)) < 0.5 * float(np.mean(rotation.first_token_s))
    assert default.imbalance(lambda worker: worker.uncached_tokens) <= 1.2


def test_the_expected_first_token_time_is_close_to_what_happens() -> None:
    fleet = Fleet(4, rate=20_000.0)
    errors = []
    for i in range(400):
        fleet.at(0.05 * i, lambda i=i: fleet.send(prompt(i, 100)))  # type: ignore[misc]
    schedule = fleet.scheduler.schedule

    def watched(*args: object) -> object:
        decision = schedule(*args)  # type: ignore[arg-type]
        errors.append(decision.estimate.ttft_s)
        return decision

    fleet.scheduler.schedule = watched  # type: ignore[method-assign, assignment]
    fleet.run()
    predicted, actual = np.array(errors[200:]), np.array(fleet.first_token_s[200:])
    assert np.median(np.abs(predicted - actual) / actual) < 0.25


def test_a_full_endpoint_whose_metrics_are_missing_is_not_preferred() -> None:
    fleet = Fleet(2)
    known, unknown = fleet.pool.endpoints
    known.set("waiting", 5)
    known.set("running", 20)
    known.set("scraped_at", 0.0)
    for column in ("waiting", "running", "kv_usage"):
        unknown.set(column, math.nan)
    picks = [send_one(fleet, i) for i in range(40)]
    assert picks.count(unknown) <= 20


def send_one(fleet: Fleet, number: int) -> Endpoint:
    fleet.send(prompt(number, 1))
    return fleet.picks[-1]
