"""How requests spread over real workers through the real Envoy: bursts, workers that hang, metrics that stop."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from epp.envoy_options import FailureMode, Profile
from tests.e2e.backend import echo
from tests.e2e.envoy import until
from tests.e2e.serving import Stack, running_stack

both_profiles = pytest.mark.parametrize("profile", Profile)


def prompt(text: str) -> bytes:
    return json.dumps({"model": "m", "prompt": text}).encode()


async def burst(stack: Stack, count: int) -> Counter[str]:
    """`count` requests at once, each with its own prompt, answered once all are there: requests per worker."""
    for worker in stack.workers:
        worker.gate.clear()
    tasks = [asyncio.create_task(stack.ask(prompt(f"{i} " * 500), **echo(hold=True))) for i in range(count)]
    try:
        await until(stack.running, lambda n: n == count)
    finally:
        for worker in stack.workers:
            worker.gate.set()
    answers = await asyncio.gather(*tasks)
    assert {a.status for a in answers} == {200}
    return Counter(a.account["worker"] for a in answers)


@pytest.mark.parametrize(
    ("profile", "edge"), [(Profile.GATEWAY, "lean"), (Profile.FAST, "lean"), (Profile.GATEWAY, "grpcio")]
)
async def test_a_burst_within_one_scrape_interval_spreads_evenly(profile: Profile, edge: str) -> None:
    """All saw the same snapshot and went to the same worker elsewhere (GIE #1700)."""
    args = ("--scrape-interval", "60")
    async with running_stack(profile, edge, workers=4, failure_mode=FailureMode.CLOSED, args=args) as stack:
        served = await burst(stack, 200)
        assert len(served) == 4
        assert max(served.values()) <= 1.5 * min(served.values())


@both_profiles
async def test_a_worker_whose_metrics_hang_gets_no_requests_once_it_is_silent_for_long(profile: Profile) -> None:
    """It accepts connections and never answers a scrape; the other three are scraped and picked as ever."""
    args = ("--scrape-interval", "0.05", "--scrape-timeout", "0.05")
    async with running_stack(profile, workers=4, args=args) as stack:
        hung, *good = stack.workers
        hung.metrics = False

        async def ready() -> float:
            return sum((await stack.picker.gauges("inference_pool_ready_pods")).values())

        await until(ready, lambda n: n == 3)
        before = [w.scrapes for w in good]
        served = await burst(stack, 60)
        assert set(served) == {w.address for w in good}
        assert max(served.values()) <= 1.5 * min(served.values())
        await until(lambda: least(stack, before), lambda n: n >= 10)
        hung.metrics = True
        await until(ready, lambda n: n == 4)


async def least(stack: Stack, before: list[int]) -> int:
    """Scrapes since `before` of the good worker that had the fewest."""
    return min(w.scrapes - count for w, count in zip(stack.workers[1:], before, strict=True))


@pytest.mark.parametrize(("profile", "workers"), [(Profile.GATEWAY, 1), (Profile.FAST, 3)])
async def test_a_pool_whose_metrics_all_stopped_goes_on_serving(profile: Profile, workers: int) -> None:
    """Failing closed on stale metrics stopped whole pools elsewhere (llm-d-router #2547)."""
    args = ("--scrape-interval", "0.05", "--scrape-timeout", "0.05")
    async with running_stack(profile, workers=workers, failure_mode=FailureMode.CLOSED, args=args) as stack:
        for worker in stack.workers:
            worker.metrics = False

        async def spared() -> float:
            return sum((await stack.picker.gauges("kvsteer_health_spared_total")).values())

        await until(spared, lambda n: n >= 1)
        assert (await burst(stack, 30)).total() == 30
