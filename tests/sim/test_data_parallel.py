"""Several emulated engines behind one port, as `vllm serve --data-parallel-size` has them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from epp.signals import engines
from epp.sim.publisher import EventsConfig
from epp.sim.server import Worker

StartWorker = Callable[..., Awaitable[Worker]]
PROMPT = list(range(300, 364))


async def complete(session: aiohttp.ClientSession, worker: Worker, rank: str | None, **body: Any) -> int:
    """One request; its cached tokens."""
    headers = {} if rank is None else {"X-data-parallel-rank": rank}
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1} | body
    async with session.post(f"http://{worker.address}/v1/completions", json=asked, headers=headers) as response:
        assert response.status == 200, await response.text()
        return int((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_the_header_picks_the_rank_and_each_has_a_cache_of_its_own(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(data_parallel_size=2)
    cached = [await complete(session, worker, rank) for rank in ("1", "1", "0", "0")]
    assert cached == [0, 48, 0, 48]
    assert [core.stats.prompt_tokens for core in worker.cores] == [128, 128]


@pytest.mark.parametrize("rank", ["2", "-1"])
async def test_a_rank_that_is_not_there_is_refused(
    start_worker: StartWorker, session: aiohttp.ClientSession, rank: str
) -> None:
    worker = await start_worker(data_parallel_size=2)
    headers, body = {"X-data-parallel-rank": rank}, {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    async with session.post(f"http://{worker.address}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 400
        assert f"data_parallel_rank {rank} is out of range [0, 2)." in await response.text()


@pytest.mark.parametrize("rank", [None, "first"])
async def test_without_a_number_the_least_busy_rank_serves(
    start_worker: StartWorker, session: aiohttp.ClientSession, rank: str | None
) -> None:
    worker = await start_worker(data_parallel_size=2)
    busy = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    headers = {"X-data-parallel-rank": "0"}
    async with session.post(f"http://{worker.address}/v1/completions", json=busy, headers=headers) as running:
        await running.content.readany()
        await complete(session, worker, rank)
    assert worker.cores[1].stats.prompt_tokens == len(PROMPT)


async def test_metrics_have_series_of_each_rank(start_worker: StartWorker, session: aiohttp.ClientSession) -> None:
    worker = await start_worker(data_parallel_size=2)
    worker.cores[1].kv.block_pool.allocate(51)
    async with session.get(f"http://{worker.address}/metrics") as response:
        page = await response.read()
    reading = engines.read(page, "vllm", 2)
    assert [rank.kv_usage for rank in reading.by_rank] == [0, pytest.approx(0.2)]
    assert [rank.cache_blocks for rank in reading.by_rank] == [255, 255]
    assert page.count(b"# TYPE vllm:num_requests_running gauge") == 1


async def test_each_rank_tells_an_event_source_of_its_own(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(data_parallel_size=2, events=EventsConfig("tcp://*:0", "tcp://*:0"))
    async with session.get(f"http://{worker.address}/kv_event_sources") as response:
        told = await response.json()
    assert [source["data_parallel_rank"] for source in told] == [0, 1]
    assert len({source[key] for source in told for key in ("endpoint", "replay_endpoint")}) == 4


def test_a_rank_publishes_on_the_port_after_the_last_ones() -> None:
    config = EventsConfig("tcp://*:5557", "tcp://*:6557").of_rank(2)
    assert (config.endpoint, config.replay_endpoint, config.data_parallel_rank) == ("tcp://*:5559", "tcp://*:6559", 2)
    assert EventsConfig("tcp://10.0.0.1:5557").of_rank(1).endpoint == "tcp://10.0.0.1:5557"
