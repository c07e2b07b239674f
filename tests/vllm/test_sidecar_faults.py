"""`kvsteer sidecar` before real decode workers: right tokens or a clear error, whatever happens to whom and when.

Each test asks two sidecars at once: of a worker that fails when it cannot have the blocks (vLLM's default), and of one
that computes them anew.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from itertools import count, cycle
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.envoy import until
from tests.vllm.gate import Gate
from tests.vllm.pairs import (
    EXPIRED_READS,
    Pairs,
    Prompt,
    Told,
    computed_by,
    holds_nothing,
    left_after,
    overwrite,
    prompt,
    prompts,
    right,
    stepped,
    stopped,
    transferred,
)
from tests.vllm.sidecars import Sidecar, Sidecars, running_sidecars, stalled
from tests.vllm.workers import Worker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]


@pytest.fixture
async def sidecars(pairs: Pairs, tmp_path: Path) -> AsyncIterator[Sidecars]:
    async with running_sidecars(tmp_path, pairs) as sidecars:
        yield sidecars


class Asking:
    """The same requests to both sidecars, and whether the answers are right."""

    def __init__(self, client: aiohttp.ClientSession, pairs: Pairs, sidecars: Sidecars, seed: int) -> None:
        self._client, self._pairs, self._sidecars = client, pairs, sidecars
        self._asked = list(prompts(seed, 2, words=(60, 160)))

    def start(self, *which: int) -> list[asyncio.Task[Told]]:
        """One request to each; the prefillers of these numbers are to be tried in this order."""
        prefillers = [self._sidecars.prefillers[n] for n in which]
        to = cycle(self._sidecars.running)
        return [asyncio.create_task(next(to).ask(self._client, asked, *prefillers)) for asked in self._asked]

    async def right(self, asked: list[asyncio.Task[Told]]) -> list[bool]:
        """Which are answered with a plain worker's tokens; all others are with an error."""
        told = await asyncio.gather(*asked)
        wanted = await asyncio.gather(*(right(self._client, self._pairs, one) for one in self._asked))
        assert all(one.tokens == tokens for one, tokens in zip(told, wanted, strict=True) if one.status == 200)
        assert all(one.status == 200 or '"error"' in one.text for one in told)
        return [one.status == 200 for one in told]


async def seen(gate: Gate, posts: int) -> None:
    await until(lambda: asyncio.sleep(0, gate.posts), lambda now: now == posts)


async def held(gate: Gate, count: int) -> None:
    await until(lambda: asyncio.sleep(0, gate.held), lambda now: now == count)


async def test_a_prefiller_killed_before_or_during_its_leg_is_passed_over(
    pairs: Pairs, sidecars: Sidecars, client: aiohttp.ClientSession
) -> None:
    """By the next one of the list, or when there is none by the decode worker itself."""
    lost = pairs.prefillers[0]
    before = sum(map(transferred, pairs.decoders))
    with stopped(lost):
        asking = Asking(client, pairs, sidecars, 12)
        asked = asking.start(0, 1)
        await seen(sidecars.prefillers[0], 2)
        lost.process.send(signal.SIGKILL)
    assert await asking.right(asked) == [True, True]
    lost.process.gone()
    asking = Asking(client, pairs, sidecars, 13)
    asked += asking.start(0, 1)
    assert await asking.right(asked[2:]) == [True, True]
    tokens = sum(task.result().usage["prompt_tokens"] for task in asked)
    assert sum(map(transferred, pairs.decoders)) - before == tokens
    computed = sum(map(computed_by, pairs.decoders))
    asking = Asking(client, pairs, sidecars, 14)
    asked = asking.start(0)
    assert await asking.right(asked) == [True, True]
    tokens = sum(task.result().usage["prompt_tokens"] for task in asked)
    assert sum(map(computed_by, pairs.decoders)) - computed == tokens


async def test_a_prefiller_killed_after_its_leg_is_a_clear_error_or_made_up_for_by_the_decoder(
    pairs: Pairs, sidecars: Sidecars, client: aiohttp.ClientSession
) -> None:
    prefiller, gate = pairs.prefillers[0], sidecars.prefillers[0]
    gate.hold("answer")
    asking = Asking(client, pairs, sidecars, 15)
    asked = asking.start(0)
    await held(gate, 2)
    prefiller.process.send(signal.SIGKILL)
    prefiller.process.gone()
    gate.release()
    assert await asking.right(asked) == [False, True]


async def test_a_side_channel_out_of_reach_is_a_clear_error_or_made_up_for_by_the_decoder(
    pairs: Pairs, sidecars: Sidecars, client: aiohttp.ClientSession
) -> None:
    sidecars.prefillers[0].edit = elsewhere
    asking = Asking(client, pairs, sidecars, 16)
    assert await asking.right(asking.start(0)) == [False, True]
    await holds_nothing(pairs.prefillers[0])


def elsewhere(answer: bytes) -> bytes:
    """The blocks are at a worker that nobody has met, at a port where nobody listens."""
    stranger = re.sub(rb'(?<="remote_engine_id":")[0-9a-f]{8}', b"stranger", answer)
    return re.sub(rb'(?<="remote_port":)\d+', lambda port: b"1".rjust(len(port[0])), stranger)


async def test_blocks_whose_lease_may_be_over_are_not_decoded(
    pairs: Pairs, sidecars: Sidecars, client: aiohttp.ClientSession
) -> None:
    """The sidecars had no time while the answer lay there. vLLM would give wrong tokens, with status 200."""
    prefiller, gate = pairs.prefillers[0], sidecars.prefillers[0]
    before = await stepped(client, prefiller, EXPIRED_READS)
    gate.hold("answer")
    asking = Asking(client, pairs, sidecars, 17)
    asked = asking.start(0)
    await held(gate, 2)
    with stalled(*sidecars.running):
        gate.release()
        await _lease_is_over(client, prefiller)
    assert await asking.right(asked) == [True, True]
    assert await stepped(client, prefiller, EXPIRED_READS) == before


async def _lease_is_over(client: aiohttp.ClientSession, worker: Worker) -> None:
    await holds_nothing(worker)
    await overwrite(client, worker)


async def test_a_decode_worker_killed_ends_its_answers_as_cut_off_and_refuses_then(
    pairs: Pairs, sidecars: Sidecars, client: aiohttp.ClientSession
) -> None:
    decoder, sidecar, gate = pairs.decoders[0], sidecars.running[0], sidecars.prefillers[0]
    asked = prompt("cut off " * 50, stream=True, max_tokens=2000)
    headers = {"x-prefiller-host-port": gate.address}
    async with client.post(sidecar.url + asked.path, json=asked.body, headers=headers) as response:
        assert response.status == 200
        assert await response.content.readline()
        decoder.process.send(signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    decoder.process.gone()
    sidecar.decoder.shut()
    told = await sidecar.ask(client, prompt("refused " * 50), gate)
    assert (told.status, "retry-after" in told.headers) == (503, True)
    assert '"error"' in told.text
    for worker in pairs.prefillers:
        await holds_nothing(worker)


async def test_a_client_that_leaves_leaves_nothing_behind(
    pairs: Pairs, sidecars: Sidecars, client: aiohttp.ClientSession
) -> None:
    """At six points: uploading, before and in the prefill leg, between the legs, in the transfer, in the answer."""
    sidecar, prefiller, decoder = sidecars.running[0], pairs.prefillers[0], pairs.decoders[0]
    gate, number = sidecars.prefillers[0], count()

    def new() -> Prompt:
        return prompt(f"gone {next(number)} " * 200, stream=True, max_tokens=1000)

    await _leave_while_uploading(sidecar, gate)
    gate.hold("request")
    await left_after(0.3, sidecar.ask(client, new(), gate))
    gate.release()
    with stopped(prefiller):
        await left_after(0.3, sidecar.ask(client, new(), gate))
    gate.hold("answer")
    await left_after(0.5, sidecar.ask(client, new(), gate))
    gate.release()
    await asyncio.sleep(0.5)
    assert sidecar.decoder.posts == 0, "nobody decodes for a client that has left"
    sidecar.decoder.hold("request")
    leaving = asyncio.create_task(left_after(0.8, sidecar.ask(client, new(), gate)))
    await held(sidecar.decoder, 1)
    with stopped(prefiller):
        sidecar.decoder.release()
        await leaving
    await left_after(0.4, sidecar.ask(client, new(), gate))
    for worker in (prefiller, decoder):
        await holds_nothing(worker)
    running = asyncio.to_thread(decoder.metric, "vllm:num_requests_running")
    assert await running == 0


async def _leave_while_uploading(sidecar: Sidecar, gate: Gate) -> None:
    host, _, port = sidecar.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    fields = ("host: x", f"x-prefiller-host-port: {gate.address}", "content-length: 1000")
    writer.write("\r\n".join(("POST /v1/completions HTTP/1.1", *fields, "", '{"model":')).encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
