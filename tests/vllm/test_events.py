"""What real vLLM says of its cache by events, over its own sockets, is what its next answer finds cached."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import aiohttp
import numpy as np
import pytest

from epp.endpoint import Endpoint
from epp.kvcache.blocks import extend, token_root
from epp.kvcache.events.subscriber import EventsSettings, Subscriber
from epp.kvcache.index import BlockIndex
from tests.vllm.workers import Fleet, Worker, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
BLOCK = 32
EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:0",
    "replay_endpoint": "tcp://*:0",
    "topic": "kv@worker@tiny",
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "model"
    script = ROOT / "tests" / "vllm" / "tiny_model.py"
    subprocess.run([vllm_python(), script, ROOT / "epp" / "sim" / "data", model], check=True, timeout=120)
    fleet = Fleet(model, folder)
    try:
        fleet.start(
            1,
            "--kv-events-config",
            json.dumps(EVENTS),
            *("--num-gpu-blocks-override", "64", "--max-model-len", "1024"),
        )
        yield fleet.workers[0]
    finally:
        fleet.stop()


async def test_predicted_cached_tokens_are_those_that_the_answers_report(worker: Worker) -> None:
    """With eviction all the time, a picker that starts late, and equal requests at once."""
    random = Random(1)
    shared = [[random.randrange(300, 2000) for _ in range(7 * BLOCK)] for _ in range(4)]
    endpoint = Endpoint("127.0.0.1", worker.port)
    index = BlockIndex()
    subscriber = Subscriber(index, EventsSettings(), model=lambda endpoint: "tiny")
    wrong: list[tuple[int, int]] = []

    def predict(prompt: list[int]) -> int:
        keys = extend(token_root(model="tiny", adapter="", salt=""), np.array(prompt, dtype=np.uint32), BLOCK)
        found = int(index.match(keys, [subscriber.holders[endpoint]]).device[0])
        return min(found, (len(prompt) - 1) // BLOCK) * BLOCK

    async with aiohttp.ClientSession() as session:

        async def serve(prompt: list[int]) -> int:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            async with session.post(f"http://{endpoint.address}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                usage = (await response.json())["usage"]
                return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

        async def settled() -> None:
            """Events come with the step, or just after the answer."""
            batches = -1
            while subscriber.totals()["batches"] != batches:
                batches = subscriber.totals()["batches"]
                await asyncio.sleep(0.05)

        await serve(shared[0])
        subscriber.start()
        try:
            subscriber.changed([endpoint], [])
            async with asyncio.timeout(20):
                while subscriber.totals()["replays_answered"] == 0:  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.05)
            for turn in range(100):
                prompt = random.choice(shared)[: random.randrange(1, 8) * BLOCK]
                prompt = prompt + [random.randrange(300, 2000) for _ in range(random.choice((0, 0, 1, 40, 300)))]
                await settled()
                predicted = predict(prompt)
                if turn % 10 == 0:
                    await asyncio.gather(*(serve(prompt) for _ in range(3)))
                    continue
                actual = await serve(prompt)
                if predicted != actual:
                    wrong.append((predicted, actual))
            assert not wrong
            totals = subscriber.totals()
            assert totals["removed_blocks"] > 100
            assert totals["unknown_removals"] == totals["lost_batches"] == totals["orphans_dropped"] == 0
            assert subscriber.followers[endpoint].confidence.level == "complete"
        finally:
            await subscriber.stop()
