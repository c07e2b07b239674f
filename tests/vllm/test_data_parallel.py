"""One real vLLM with `--data-parallel-size 2` behind a real Envoy and kvsteer: the picker chooses the rank."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from epp.endpoint import Endpoint
from epp.envoy_options import HostPort, Mode, Profile, defaults, parse_picker
from epp.kvcache.blocks import extend, token_root
from epp.kvcache.events.subscriber import EventsSettings, Subscriber
from epp.kvcache.index import BlockIndex
from epp.sim.tokenizer import SHIPPED
from tests.e2e.envoy import running_envoy, until
from tests.e2e.serving import Picker, running_picker
from tests.ports import quiet_ports
from tests.vllm.following import CONFIG
from tests.vllm.test_steering import TURNS, converse
from tests.vllm.workers import Fleet, Worker, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

RANKS = 2
SERVED, HITS = "vllm:request_success_total", "vllm:prefix_cache_hits_total"


@pytest.fixture(scope="module")
def events_port() -> int:
    """Of rank 0; then come the other rank's and the replay ports."""
    return quiet_ports(2 * RANKS)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, events_port: int) -> Iterator[Fleet]:
    """Of one worker."""
    folder = tmp_path_factory.mktemp("vllm")
    script = Path(__file__).parent / "tiny_model.py"
    subprocess.run([vllm_python(), script, SHIPPED, folder / "model"], check=True, timeout=120)
    fleet = Fleet(folder / "model", folder)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",
        "replay_endpoint": f"tcp://*:{events_port + RANKS}",
    }
    try:
        fleet.start(1, "--data-parallel-size", str(RANKS), "--kv-events-config", json.dumps(events))
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture
def worker(fleet: Fleet) -> Worker:
    return fleet.workers[0]


@asynccontextmanager
async def steered(worker: Worker, profile: Profile, folder: Path, *args: str) -> AsyncIterator[tuple[str, Picker]]:
    """The URL of an Envoy that asks a picker over the worker's ranks, and the picker."""
    listen = f"unix:{folder}/picker.sock"
    options = defaults(Mode.SIDECAR, profile, picker=parse_picker(listen), endpoints=(HostPort.parse(worker.address),))
    async with (
        running_picker(folder, listen, f"--endpoint={worker.address}=dp={RANKS}", *args) as picker,
        running_envoy(options) as envoy,
    ):
        yield envoy.url, picker


def by_rank(worker: Worker, metric: str) -> list[float]:
    """A counter of the worker's, by engine."""
    values = [0.0] * RANKS
    for engine, value in re.findall(rf'^{metric}\{{[^}}]*engine="(\d+)"[^}}]*\}} (\S+)$', worker.get("/metrics"), re.M):
        values[int(engine)] += float(value)
    return values


def opening(session: str) -> str:
    return f"{session}: " + " ".join(f"fact {session} {n}" for n in range(150))


@pytest.mark.parametrize("profile", list(Profile))
async def test_the_turns_of_a_session_stay_on_their_rank(worker: Worker, profile: Profile, tmp_path: Path) -> None:
    """The client's own header would be answered with status 400 if it came through."""
    headers = {"x-data-parallel-rank": "9"}
    async with steered(worker, profile, tmp_path) as (url, _), aiohttp.ClientSession(headers=headers) as client:
        for session in range(3):
            served, hits = by_rank(worker, SERVED), by_rank(worker, HITS)
            usages = await converse(client, url, opening(f"{profile}-{session}"))
            served = [now - before for now, before in zip(by_rank(worker, SERVED), served, strict=True)]
            hits = [now - before for now, before in zip(by_rank(worker, HITS), hits, strict=True)]
            assert sorted(served) == [0, TURNS]
            assert [hit > 0 for hit in hits] == [count > 0 for count in served]
            for earlier, later in pairwise(usages):
                # All whole blocks (of 32 tokens) of the turn before are found.
                assert later["prompt_tokens_details"]["cached_tokens"] >= earlier["prompt_tokens"] // 32 * 32


async def test_sessions_are_spread_over_the_ranks(worker: Worker, tmp_path: Path) -> None:
    async with steered(worker, Profile.GATEWAY, tmp_path) as (url, picker), aiohttp.ClientSession() as client:
        before = by_rank(worker, SERVED)
        for session in range(8):
            await converse(client, url, opening(f"spread-{session}"))
        served = [now - then for now, then in zip(by_rank(worker, SERVED), before, strict=True)]
        assert sum(served) == 8 * TURNS
        assert min(served) >= TURNS
        assert await picker.gauges("kvsteer_cached_tokens_error_sum")


async def test_each_rank_has_gauges_and_blocks_of_its_own(worker: Worker, tmp_path: Path) -> None:
    async with steered(worker, Profile.GATEWAY, tmp_path) as (_, picker), aiohttp.ClientSession() as client:
        async with asyncio.timeout(20):
            while True:
                async with client.get(f"{picker.admin}/debug/pool") as response:
                    pool = await response.json()
                if all(endpoint["waiting"] is not None and endpoint["models"] for endpoint in pool):
                    break
                await asyncio.sleep(0.1)
    assert [e["endpoint"] for e in pool] == [f"{worker.address}@{rank}" for rank in range(RANKS)]
    assert [(e["models"], e["block_size"], e["cache_blocks"]) for e in pool] == [(["tiny"], 32, 511)] * RANKS


@pytest.mark.parametrize("told", [False, True], ids=["configured", "told"])
async def test_events_of_each_rank_are_followed(worker: Worker, events_port: int, told: bool) -> None:
    """By ports counted from rank 0's, or by those the worker tells; a prompt's blocks are at its rank alone."""
    settings = EventsSettings() if told else EventsSettings(events_port=events_port, replay_port=events_port + RANKS)
    index = BlockIndex()
    host, _, port = worker.address.rpartition(":")
    endpoints = [Endpoint(host, int(port), rank=rank, ranks=RANKS) for rank in range(RANKS)]
    subscriber = Subscriber(index, settings, model=lambda endpoint: "tiny")
    subscriber.start()
    try:
        subscriber.changed(endpoints, [])
        async with aiohttp.ClientSession(f"http://{worker.address}") as client, asyncio.timeout(60):
            for rank in range(RANKS):
                prompt = opening(f"events of rank {rank}, {told}")
                async with client.post("/tokenize", json={"model": "tiny", "prompt": prompt}) as response:
                    ids = np.array((await response.json())["tokens"], dtype=np.uint32)
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
                head = {"x-data-parallel-rank": str(rank)}
                async with client.post("/v1/completions", json=body, headers=head) as response:
                    assert response.status == 200, await response.text()
                keys = extend(token_root(model="tiny", adapter="", salt=""), ids, 32)
                holders = [subscriber.holders[endpoint] for endpoint in endpoints]
                while not (device := index.match(keys, holders).device)[rank]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                assert device.tolist() == [len(ids) // 32 if here == rank else 0 for here in range(RANKS)]
            # What came before the subscription is replayed.
            while {subscriber.followers[e].confidence.level for e in endpoints} != {"complete"}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    finally:
        await subscriber.stop()


async def test_what_a_rank_was_sent_without_the_picker_draws_requests_there(fleet: Fleet, tmp_path: Path) -> None:
    """The events of the rank alone tell of it."""
    (worker,) = fleet.workers
    config, log = tmp_path / "config.yaml", tmp_path / "decisions.jsonl"
    config.write_text(CONFIG.format(model=fleet.model, parameters="{}"))
    told = (f"--config-file={config}", f"--decision-log={log}")
    async with steered(worker, Profile.GATEWAY, tmp_path, *told) as (url, _), aiohttp.ClientSession() as client:
        await asyncio.sleep(3)  # the worker's models and event sources are asked for first

        async def complete(url: str, prompt: str, **headers: str) -> int:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            async with client.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                return int((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])

        reported, ranks = [], (0, 1, 1, 0, 1)
        for number, rank in enumerate(ranks):
            prompt = opening(f"precise-{number}")
            await complete(f"http://{worker.address}", prompt, **{"x-data-parallel-rank": str(rank)})
            await asyncio.sleep(0.3)
            reported.append(await complete(url, f"{prompt} and more"))
        lines = await until(
            lambda: asyncio.to_thread(lambda: log.read_text().splitlines()), lambda seen: len(seen) == len(ranks)
        )
    decisions = [json.loads(line) for line in lines]
    assert [d["endpoints"][0] for d in decisions] == [f"{worker.address}@{rank}" for rank in ranks]
    assert [d["reasons"] for d in decisions] == [[]] * len(ranks)
    assert [d["estimate"]["cached_tokens"] for d in decisions] == reported
    assert min(reported) > 500
