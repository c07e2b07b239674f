"""Two real vLLM workers with a tier of KV blocks on the host: what is evicted from the device still draws its request.

One tells of the host's blocks with their tokens, the other by hash alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import aiohttp
import pytest

from tests.vllm.following import BLOCK, EVENTS, Compared, Request, ask, following, new_fleet, requests
from tests.vllm.workers import Fleet, Worker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

HOST_BLOCKS = 160
BLOCK_BYTES = 16_384
"""Of the tiny model: 32 tokens, 2 layers, keys and values of 2 heads of 32 numbers of 2 bytes."""
REQUESTS = 100
ANSWERED = ("self-describing", "by-hash")
"""What the workers' events are like, in their order."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = new_fleet(tmp_path_factory.mktemp("vllm"))
    fleet.environment["PYTHONPATH"] = str(Path(__file__).parent / "plugins")
    small = ("--num-gpu-blocks-override", "64", "--max-model-len", "1536", "--kv-events-config", json.dumps(EVENTS))
    try:
        for style in ANSWERED:
            fleet.launch(1, *small, "--kv-transfer-config", json.dumps(connector(style == "self-describing")))
        fleet.wait()
        yield fleet
    finally:
        fleet.stop()


def connector(self_describing: bool) -> dict[str, object]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloading",
            "spec_module_path": "host_offload",
            "cpu_bytes_to_use": HOST_BLOCKS * BLOCK_BYTES,
            "self_describing_kv_events": self_describing,
        },
    }


numbers = count()


def prompt(words: int) -> Request:
    """A prompt that nobody has sent before."""
    text = " ".join(f"item {next(numbers) * 31} of {n}" for n in range(words))
    return "/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": 1, "temperature": 0}


@pytest.mark.parametrize("which", [0, 1], ids=ANSWERED)
async def test_a_prefix_evicted_from_the_device_and_kept_on_the_host_draws_its_request(
    fleet: Fleet, tmp_path: Path, which: int
) -> None:
    worker = fleet.workers[which]
    async with following(fleet, tmp_path) as picker:
        await asyncio.sleep(3)
        wanted = prompt(100)
        before = worker.metric("vllm:external_prefix_cache_hits_total")
        await send(picker.client, worker, wanted)
        for _ in range(4):  # over the device's 64 blocks, not over the host's
            await send(picker.client, worker, prompt(100))
        (found,) = await picker.ask(wanted)
        (again,) = await picker.ask(wanted)
    print(f"\n{ANSWERED[which]}: {found}, again {again}")
    assert found.endpoint == worker.address
    assert found.by_tier["cpu"] > 0
    assert found.expected == found.reported > 5 * BLOCK
    assert worker.metric("vllm:external_prefix_cache_hits_total") - before == found.by_tier["cpu"]
    assert again.by_tier["gpu"] == again.expected == again.reported == found.expected


async def send(client: aiohttp.ClientSession, worker: Worker, request: Request) -> None:
    """To this worker, past the picker."""
    await ask(client, f"http://{worker.address}", *request)


async def test_blocks_are_right_by_tier_while_both_tiers_evict(fleet: Fleet, tmp_path: Path) -> None:
    async with following(fleet, tmp_path) as picker:
        await asyncio.sleep(3)
        found = await picker.ask(*islice(requests(6), REQUESTS))
    for style, worker in zip(ANSWERED, fleet.workers, strict=True):
        own = [c for c in found if c.endpoint == worker.address]
        print(f"\n{style}: {report(own)}")
        assert sum(not c.wrong for c in own) >= 0.95 * len(own)
        assert sum(c.by_tier["cpu"] > 0 for c in own) >= 3


def report(found: list[Compared]) -> str:
    equal, host = sum(not c.wrong for c in found), sum(c.by_tier["cpu"] > 0 for c in found)
    return f"{equal} of {len(found)} equal, {host} with blocks on the host"
