"""Two real vLLM workers behind a real Envoy and kvsteer: a conversation stays where its cache is."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epp.envoy_options import HostPort, Mode, Profile, defaults, parse_picker
from epp.sim.tokenizer import SHIPPED
from tests.e2e.envoy import running_envoy
from tests.e2e.serving import Picker, running_picker
from tests.vllm.workers import Fleet, Worker, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

HITS = "vllm:prefix_cache_hits_total"
TURNS = 4


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("vllm")
    script = Path(__file__).parent / "tiny_model.py"
    subprocess.run([vllm_python(), script, SHIPPED, folder / "model"], check=True, timeout=120)
    fleet = Fleet(folder / "model", folder)
    try:
        fleet.start(2)
        yield fleet
    finally:
        fleet.stop()


@asynccontextmanager
async def steered(fleet: Fleet, profile: Profile, folder: Path) -> AsyncIterator[tuple[str, Picker]]:
    """The URL of an Envoy that asks a picker over these workers, and the picker."""
    addresses = [w.address for w in fleet.workers]
    listen = f"unix:{folder}/picker.sock"
    options = defaults(
        Mode.SIDECAR, profile, picker=parse_picker(listen), endpoints=tuple(map(HostPort.parse, addresses))
    )
    told = [f"--endpoint={address}" for address in addresses]
    async with running_picker(folder, listen, *told) as picker, running_envoy(options) as envoy:
        yield envoy.url, picker


async def converse(client: aiohttp.ClientSession, url: str, opening: str) -> list[dict[str, Any]]:
    """A chat of `TURNS` turns that gives each answer back to the model; the usage of each turn."""
    messages = [{"role": "user", "content": opening}]
    usages = []
    for turn in range(TURNS):
        body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0}
        async with client.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        usages.append(answer["usage"])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"and then, in turn {turn}?"}]
        messages[-2] = {"role": "assistant", "content": messages[-2]["content"]}
    return usages


@pytest.mark.parametrize("profile", list(Profile))
async def test_later_turns_go_where_the_first_went_and_vllm_finds_its_cache(
    fleet: Fleet, profile: Profile, tmp_path: Path
) -> None:
    async with steered(fleet, profile, tmp_path) as (url, _), aiohttp.ClientSession() as client:
        for session in range(4):
            before = [requests_of(w) for w in fleet.workers]
            hits = sum(w.metric(HITS) for w in fleet.workers)
            opening = f"session {session} of {profile}: " + " ".join(f"fact {session * 1000 + n}" for n in range(150))
            usages = await converse(client, url, opening)
            served = [requests_of(w) - b for w, b in zip(fleet.workers, before, strict=True)]
            assert sorted(served) == [0, TURNS]
            assert sum(w.metric(HITS) for w in fleet.workers) > hits
            for earlier, later in pairwise(usages):
                # All whole blocks (of 32 tokens) of the turn before are found, its answer's among them.
                assert later["prompt_tokens_details"]["cached_tokens"] >= earlier["prompt_tokens"] // 32 * 32


async def test_new_conversations_are_spread_over_the_workers(fleet: Fleet, tmp_path: Path) -> None:
    async with steered(fleet, Profile.GATEWAY, tmp_path) as (url, picker), aiohttp.ClientSession() as client:
        before = [requests_of(w) for w in fleet.workers]
        for session in range(8):
            opening = f"spread {session}: " + " ".join(f"thing {session * 1000 + n}" for n in range(150))
            await converse(client, url, opening)
        served = [requests_of(w) - b for w, b in zip(fleet.workers, before, strict=True)]
        assert sum(served) == 8 * TURNS
        assert min(served) >= TURNS
        errors = await picker.gauges("kvsteer_cached_tokens_error_sum")
        assert errors, "cached tokens were reported and compared with what was expected"


def requests_of(worker: Worker) -> float:
    return worker.metric("vllm:request_success_total")
