"""Real vLLM, real NIXL: a prompt is prefilled by one worker and decoded by another, to a plain worker's very tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import product

import aiohttp
import pytest

from tests.e2e.envoy import until
from tests.vllm import pairs as paired
from tests.vllm.pairs import (
    EXPIRED_READS,
    Pairs,
    Prompt,
    ask,
    by_hand,
    holds_nothing,
    overwrite,
    prefilled,
    prompt,
    prompts,
    right,
    stepped,
    transferred,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    started = paired.start(tmp_path_factory.mktemp("vllm"))
    try:
        yield started
    finally:
        started.fleet.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


@pytest.fixture
async def pairs(fleet: Pairs, client: aiohttp.ClientSession) -> Pairs:
    """With all workers running, whatever the test before did to them."""
    await fleet.ready(client)
    return fleet


async def test_by_hand_each_pair_gives_a_plain_workers_tokens(pairs: Pairs, client: aiohttp.ClientSession) -> None:
    """What the rest builds on: the workers do transfer, and another prompt's blocks would show."""
    for (prefiller, decoder), asked in zip(product(pairs.prefillers, pairs.decoders), prompts(1, 4), strict=True):
        before = transferred(decoder)
        told = await by_hand(client, prefiller, decoder, asked)
        assert told.tokens == await right(client, pairs, asked)
        assert transferred(decoder) - before == told.usage["prompt_tokens"]


async def test_vllm_itself_answers_with_whatever_is_in_blocks_whose_lease_is_over(
    pairs: Pairs, client: aiohttp.ClientSession
) -> None:
    """The control of the lease guard: status 200, wrong tokens, and nothing but a counter of the prefiller's."""
    (prefiller, _), (decoder, _) = pairs.prefillers, pairs.decoders
    asked, before = prompt("late " * 50), await stepped(client, prefiller, EXPIRED_READS)
    params = await prefilled(client, prefiller, asked)
    await holds_nothing(client, prefiller)
    await overwrite(client, prefiller)
    told = await ask(client, decoder.url, Prompt(asked.path, asked.body | {"kv_transfer_params": params}))
    assert told.status == 200
    assert told.tokens != await right(client, pairs, asked)
    await until(lambda: stepped(client, prefiller, EXPIRED_READS), lambda seen: seen == before + 1)
