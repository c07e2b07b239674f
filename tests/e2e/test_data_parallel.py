"""Emulated workers of two data-parallel ranks each behind the real Envoy: sessions keep their rank, all ranks work."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epp.envoy_options import HostPort, Mode, Profile, defaults, parse_picker
from tests.e2e.emulated import running_workers, set_faults
from tests.e2e.envoy import running_envoy
from tests.e2e.serving import Picker, running_picker

both_profiles = pytest.mark.parametrize("profile", Profile)
RANKS, TURNS = 2, 3


@dataclass(slots=True)
class Setup:
    url: str
    picker: Picker
    workers: list[str]
    client: aiohttp.ClientSession

    async def ask(self, messages: list[dict[str, Any]], **headers: str) -> dict[str, Any]:
        body = {"model": "m", "messages": messages, "max_tokens": 16}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body, headers=named) as response:
            assert response.status == 200, await response.text()
            return dict(await response.json())

    async def converse(self, opening: str) -> list[dict[str, Any]]:
        """The usage of each turn. The client's own rank would be refused if it came through."""
        messages, usages = [{"role": "user", "content": opening}], []
        for turn in range(TURNS):
            answer = await self.ask(messages, x_data_parallel_rank="9")
            usages.append(answer["usage"])
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and {turn}?"}]
        return usages

    async def served(self) -> list[float]:
        """Requests ended so far, by worker and rank."""
        counts = []
        for worker in self.workers:
            async with self.client.get(f"http://{worker}/metrics") as response:
                page = await response.text()
            found = re.findall(r'^vllm:request_success_total\{engine="(\d+)".*\} (\S+)$', page, re.M)
            counts += [sum(float(value) for rank, value in found if rank == str(r)) for r in range(RANKS)]
        return counts


@asynccontextmanager
async def setup(profile: Profile, folder: Path) -> AsyncIterator[Setup]:
    listen = f"unix:{folder}/picker.sock"
    async with running_workers(2, "--model", "m", "--cost", "free", "--data-parallel-size", str(RANKS)) as workers:
        options = defaults(
            Mode.SIDECAR, profile, picker=parse_picker(listen), endpoints=tuple(map(HostPort.parse, workers))
        )
        told = [f"--endpoint={worker}=dp={RANKS}" for worker in workers]
        async with (
            running_picker(folder, listen, *told) as picker,
            running_envoy(options) as envoy,
            aiohttp.ClientSession() as client,
        ):
            yield Setup(envoy.url, picker, workers, client)


@both_profiles
async def test_sessions_stay_on_their_rank_and_use_all_ranks(profile: Profile, tmp_path: Path) -> None:
    async with setup(profile, tmp_path) as s:
        for session in range(12):
            before = await s.served()
            usages = await s.converse(f"session {session} " + f"fact {session} " * 200)
            served = [now - then for now, then in zip(await s.served(), before, strict=True)]
            assert sorted(served) == [0, 0, 0, TURNS]
            for earlier, later in pairwise(usages):
                assert later["prompt_tokens_details"]["cached_tokens"] >= earlier["prompt_tokens"] // 16 * 16
        assert min(await s.served()) >= TURNS
        assert len(await s.picker.gauges("kvsteer_endpoint_in_flight_requests")) == 2 * RANKS


@both_profiles
async def test_a_retry_at_another_worker_goes_to_the_rank_of_that_number(profile: Profile, tmp_path: Path) -> None:
    """The header stays on the request when Envoy goes elsewhere."""
    async with setup(profile, tmp_path) as s:
        await set_faults(s.workers[0], refuse="close")
        for number in range(6):
            await s.ask([{"role": "user", "content": f"{number} " * 100}])
        s.workers = s.workers[1:]
        assert sum(await s.served()) == 6
