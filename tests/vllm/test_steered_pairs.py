"""Real workers, NIXL and Envoy: the picker names the pair, sidecars hand over, and the tokens are the right ones."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from epp.envoy_options import Mode, Profile, defaults, parse_picker
from tests.e2e.envoy import RunningEnvoy, running_envoy, until
from tests.e2e.serving import Picker, running_picker
from tests.ports import free_port
from tests.vllm.following import BLOCK
from tests.vllm.pairs import (
    LEASE_S,
    Pairs,
    Told,
    ask,
    computed_by,
    holds_nothing,
    left_after,
    prompt,
    prompts,
    right,
    stopped,
    transferred,
)
from tests.vllm.workers import Worker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

ALWAYS = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: prefill-filter}
- {type: decode-filter}
- {type: expected-ttft-scorer}
- {type: always-disagg-pd-decider}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: expected-ttft-scorer}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: expected-ttft-scorer}]}
"""
PULL = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: decode-filter}
- {type: expected-ttft-scorer}
- {type: ttft-estimator, parameters: {prefillTokensPerSecond: 1000}}
- {type: disagg-profile-handler, parameters: {peerPull: prefill, minTokens: 64, kvBytesPerToken: 512, decodeLoad: 50ms}}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: expected-ttft-scorer}]}
"""
TOLD = "x-kvsteer-disaggregation"


@dataclass(slots=True)
class Steered:
    """Envoy, the picker, and a sidecar before each decode worker."""

    pairs: Pairs
    envoy: RunningEnvoy
    picker: Picker
    sidecars: list[str]
    """`ip:port`, in the order of the decode workers."""

    async def ask(self, client: aiohttp.ClientSession, *args: object, **options: object) -> Told:
        asked = prompt(*args, **options)  # type: ignore[arg-type]
        return await ask(client, self.envoy.url, asked, x_kvsteer_disaggregation="?")

    async def idle(self) -> None:
        """Nothing is in flight any more, as the picker counts."""

        async def running() -> float:
            return sum((await self.picker.gauges("kvsteer_endpoint_in_flight_requests")).values())

        await until(running, lambda n: n == 0)


@asynccontextmanager
async def sidecar(folder: Path, port: int, worker: Worker, allowed: list[str]) -> AsyncIterator[None]:
    """`kvsteer sidecar` on a port before a worker."""
    log = folder / f"sidecar-{port}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "epp.cli", "sidecar", "--listen", f"127.0.0.1:{port}"),
            *("--decoder", worker.address, f"--lease={LEASE_S}", "--lease-margin=3"),
            *(f"--prefiller={address}" for address in allowed),
            stdout=output,
            stderr=output,
        )
    try:
        await until(lambda: asyncio.sleep(0, log.read_text()), lambda text: "serving on" in text)
        yield
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def steered(pairs: Pairs, folder: Path, config: str, *, peers: bool = False) -> AsyncIterator[Steered]:
    """`peers`: no prefill workers, each decode worker may prefill for the other."""
    ports = [free_port() for _ in pairs.decoders]
    sidecars = [f"127.0.0.1:{port}" for port in ports]
    prefillers = [] if peers else [worker.address for worker in pairs.prefillers]
    async with AsyncExitStack() as stack:
        for port, worker in zip(ports, pairs.decoders, strict=True):
            await stack.enter_async_context(sidecar(folder, port, worker, sidecars if peers else prefillers))
        (folder / "epp.yaml").write_text(config)
        told = [f"--endpoint={address}=role=prefill" for address in prefillers]
        told += [f"--endpoint={address}=role={'both' if peers else 'decode'}" for address in sidecars]
        listen = f"unix:{folder}/picker.sock"
        args = (*told, f"--config-file={folder / 'epp.yaml'}")
        picker = await stack.enter_async_context(running_picker(folder, listen, *args))
        options = defaults(Mode.SIDECAR, Profile.GATEWAY, picker=parse_picker(listen), endpoints=())
        envoy = await stack.enter_async_context(running_envoy(options))
        yield Steered(pairs, envoy, picker, sidecars)


async def test_forty_prompts_over_pairs_give_a_plain_workers_tokens(
    pairs: Pairs, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with steered(pairs, tmp_path, ALWAYS) as made:
        sent = sum(map(transferred, pairs.decoders))
        tokens = 0
        for asked in prompts(7, 40):
            told = await ask(client, made.envoy.url, asked, x_kvsteer_disaggregation="?")
            assert (told.status, told.headers[TOLD]) == (200, "prefill-decode"), told.text
            assert told.tokens == await right(client, pairs, asked)
            assert told.cached == 0, "the prefill worker's count: it had none of this prompt"
            tokens += told.usage["prompt_tokens"]
        assert sum(map(transferred, pairs.decoders)) - sent == tokens
        await made.idle()


async def test_the_second_turn_prefers_the_prefiller_that_holds_the_first(
    pairs: Pairs, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with steered(pairs, tmp_path, ALWAYS) as made:
        for session in range(4):
            text = f"session {session}: " + "what was said " * 100
            computed = list(map(computed_by, pairs.prefillers))
            first = await made.ask(client, text)
            second = await made.ask(client, text + "and then")
            assert (first.headers[TOLD], second.headers[TOLD]) == ("prefill-decode",) * 2
            assert first.cached == 0
            assert second.cached >= (first.usage["prompt_tokens"] - 1) // BLOCK * BLOCK
            worked = [computed_by(p) - c for p, c in zip(pairs.prefillers, computed, strict=True)]
            assert sorted(worked)[0] == 0, "both turns went to one prefiller"


async def test_a_prefix_that_a_busy_peer_holds_is_pulled_by_an_idle_one(
    pairs: Pairs, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with steered(pairs, tmp_path, PULL, peers=True) as made:
        text, earlier = "a long history " * 200, list(map(computed_by, pairs.decoders))
        assert (await made.ask(client, text)).status == 200
        worked = [computed_by(worker) > e for worker, e in zip(pairs.decoders, earlier, strict=True)]
        assert sorted(worked) == [False, True]
        holder, idle = (pairs.decoders[worked.index(did)] for did in (True, False))
        before, computed = transferred(idle), computed_by(idle)
        going = prompt("busy", stream=True, max_tokens=1000)
        busy = [asyncio.create_task(ask(client, holder.url, going)) for _ in range(8)]
        await until(
            lambda: asyncio.to_thread(holder.metric, "vllm:num_requests_running"), lambda n: n == 8, within_s=30
        )
        await asyncio.sleep(1.5)  # the picker reads it
        told = await made.ask(client, text + " and now?")
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        assert (told.status, told.headers[TOLD]) == (200, "prefill-decode"), told.text
        assert told.tokens == await right(client, pairs, prompt(text + " and now?"))
        assert transferred(idle) - before == told.usage["prompt_tokens"]
        assert computed_by(idle) == computed, "nothing of it was computed again"
        await made.idle()


async def test_workers_that_die_or_hang_cost_no_request_its_right_answer(
    pairs: Pairs, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Before its leg, during it, and after it with the blocks not yet fetched."""
    lost, other = pairs.prefillers
    async with steered(pairs, tmp_path, ALWAYS) as made:
        asked = list(prompts(11, 6))
        with stopped(lost):
            running = [asyncio.create_task(ask(client, made.envoy.url, one)) for one in asked]
            await asyncio.sleep(0.5)
            lost.process.send(signal.SIGKILL)
        for one, told in zip(asked, await asyncio.gather(*running), strict=True):
            assert told.status == 200, told.text
            assert told.tokens == await right(client, pairs, one)
        lost.process.gone()
        for one in prompts(12, 6):
            told = await ask(client, made.envoy.url, one, x_kvsteer_disaggregation="?")
            assert (told.status, told.tokens) == (200, await right(client, pairs, one))
        await made.idle()
        await holds_nothing(other)


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.3, 0.6, 1.0, 1.5])
async def test_a_client_that_leaves_at_any_time_leaves_nothing_behind(
    pairs: Pairs, client: aiohttp.ClientSession, tmp_path: Path, seconds: float
) -> None:
    async with steered(pairs, tmp_path, ALWAYS) as made:
        going = prompt(f"leaving after {seconds}: " + "gone " * 400, stream=True, max_tokens=3000)
        await left_after(seconds, ask(client, made.envoy.url, going))
        await made.idle()
        for worker in (*pairs.prefillers, *pairs.decoders):
            await holds_nothing(worker)
