"""Three real vLLM workers with small caches, evicting: what the picker expects to be cached is what was cached.

Also after it started late, a worker came back, events were lost, and replays are refused: without a restart.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path

import aiohttp
import pytest

from tests.ports import free_port
from tests.vllm.following import BLOCK, EVENTS, Proxy, ask, following, new_fleet, requests
from tests.vllm.workers import Fleet

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

REQUESTS = 200
BLOCKS = 64
"""Of a worker, one of which vLLM keeps for itself."""
LOST = 3
"""Batches."""
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Addresses of their own, so that proxies can stand at equal ports of them."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = new_fleet(tmp_path_factory.mktemp("vllm"))
    small = (
        "--num-gpu-blocks-override",
        str(BLOCKS),
        "--max-model-len",
        "1536",
        "--kv-events-config",
        json.dumps(EVENTS),
    )
    try:
        fleet.launch(3, *small, hosts=HOSTS)
        fleet.wait()
        yield fleet
    finally:
        fleet.stop()


@asynccontextmanager
async def proxies(fleet: Fleet, *, refuse: bool = False) -> AsyncIterator[tuple[list[Proxy], str]]:
    """One before each worker, and the producer's parameters for them."""
    events, replay = free_port(), free_port()
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(Proxy(refuse).running(worker, events, replay)) for worker in fleet.workers
        ]
        yield running, f"{{eventsPort: {events}, replayPort: {replay}}}"


async def test_the_cached_tokens_expected_are_those_reported(fleet: Fleet, tmp_path: Path) -> None:
    async with following(fleet, tmp_path) as picker:
        await asyncio.sleep(3)  # the workers' models and event sources are asked for first
        found = await picker.ask(*islice(requests(1), REQUESTS))
        believed = await picker.index()
    equal = sum(not c.wrong for c in found)
    hits = sum(c.reported > 0 for c in found)
    over = [c for c in found if c.expected > c.reported + BLOCK]
    print(f"\n{equal} of {REQUESTS} equal, {hits} with cached tokens, {len(over)} over by more than a block")
    print("\n".join(f"{e['address']}: {e['confidence']}, {e['blocks']['gpu']} blocks" for e in believed))
    assert hits > REQUESTS / 4
    assert equal >= 0.95 * REQUESTS
    assert over == []
    assert sum(w.metric("vllm:prefix_cache_hits_total") for w in fleet.workers) > 0
    assert {(e["confidence"], e["model"], e["parked"]) for e in believed} == {("complete", "tiny", 0)}
    assert all(BLOCKS / 2 < e["blocks"]["gpu"] < BLOCKS for e in believed)  # small, and always full


async def test_a_picker_that_starts_late_knows_what_was_cached_before(fleet: Fleet, tmp_path: Path) -> None:
    traffic = requests(2)
    async with aiohttp.ClientSession() as client:
        for number, (path, body) in enumerate(islice(traffic, 60)):
            await ask(client, f"http://{fleet.workers[number % 3].address}", path, body)
    async with following(fleet, tmp_path) as picker:
        print(f"\nstarted late: {await picker.recovery(traffic)}")


async def test_a_worker_that_was_restarted_is_known_again(fleet: Fleet, tmp_path: Path) -> None:
    traffic, loop = requests(3), asyncio.get_running_loop()
    async with following(fleet, tmp_path) as picker:
        await picker.recovery(traffic)
        killed = loop.time()
        worker = await asyncio.to_thread(fleet.kill_and_restart, fleet.workers[0])
        print(f"\nworker restarted: it answers {loop.time() - killed:.1f} s after its end")
        for path, body in islice(traffic, 20):  # something that only this one holds, and that draws requests
            await ask(picker.client, f"http://{worker.address}", path, body)
        print(f"worker restarted: {await picker.recovery(traffic, of=worker)}")


async def test_lost_batches_are_had_by_replay(fleet: Fleet, tmp_path: Path) -> None:
    traffic = requests(4)
    async with proxies(fleet) as (between, parameters), following(fleet, tmp_path, parameters) as picker:
        await picker.recovery(traffic)
        before = sum(p.replays for p in between)
        for proxy in between:
            proxy.drop = LOST
        print(f"\n{LOST} batches of each worker lost: {await picker.recovery(traffic)}")
        assert [p.dropped for p in between] == [LOST] * 3
        assert sum(p.replays for p in between) >= before + 3


async def test_batches_lost_for_good_are_made_up_for_by_answers(fleet: Fleet, tmp_path: Path) -> None:
    traffic = requests(5)
    async with proxies(fleet, refuse=True) as (between, parameters), following(fleet, tmp_path, parameters) as picker:
        print(f"\nstarted late, replay refused: {await picker.recovery(traffic)}")
        for proxy in between:
            proxy.drop = LOST
        print(f"{LOST} batches of each worker lost, replay refused: {await picker.recovery(traffic)}")
        assert [p.dropped for p in between] == [LOST] * 3
