"""What the scraper reads from a real vLLM, and at what price for it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from epp.endpoint import Endpoint, Pool
from epp.signals import engines
from epp.signals.outcome import Outcome
from epp.signals.scraper import Scraper, ScrapeSettings
from tests.vllm.workers import Fleet, Worker, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "model"
    script = ROOT / "tests" / "vllm" / "tiny_model.py"
    subprocess.run([vllm_python(), script, ROOT / "epp" / "sim" / "data", model], check=True, timeout=120)
    fleet = Fleet(model, folder)
    try:
        fleet.start(1)
        yield fleet.workers[0]
    finally:
        fleet.stop()


def test_the_narrow_page_tells_what_the_whole_page_tells(worker: Worker) -> None:
    whole, narrow = worker.get("/metrics"), worker.get(engines.BY_NAME["vllm"].narrow_url)
    assert engines.read(narrow.encode(), "vllm") == engines.read(whole.encode(), "vllm")
    assert len(narrow) * 5 < len(whole)


async def test_a_running_request_is_seen(worker: Worker) -> None:
    endpoint = Endpoint("127.0.0.1", worker.port)
    pool = Pool([endpoint])
    running: list[float] = []

    def listener(endpoint: Endpoint, now: float, outcome: Outcome) -> None:
        running.append(endpoint.get("running"))

    loop = asyncio.get_running_loop()
    scraper = Scraper(ScrapeSettings(interval_s=0.05), clock=loop.time, random=Random(1), listener=listener)
    scraper.changed(pool.endpoints, [])
    try:
        await asyncio.to_thread(complete, worker, tokens=400)
        async with asyncio.timeout(30):
            while running[-1:] != [0.0] or endpoint.models is None:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.05)
    finally:
        await scraper.stop()
    assert 1.0 in running
    assert (endpoint.engine, endpoint.block_size, endpoint.cache_blocks) == ("vllm", 32, 511)
    assert endpoint.models == frozenset({"tiny"})
    assert scraper.counters[Outcome.GOOD] == len(running)


def complete(worker: Worker, tokens: int) -> None:
    body = json.dumps({"model": "tiny", "prompt": "def f(x):", "max_tokens": tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"http://{worker.address}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.status == 200
