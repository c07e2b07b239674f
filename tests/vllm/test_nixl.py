"""What real vLLM does, with real NIXL, when one worker prefills a prompt and another decodes it: both legs by hand.

The rules of the sidecar rest on this, and its tests on these workers.
"""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from itertools import product

import aiohttp
import pytest

from tests.e2e.envoy import until
from tests.vllm.following import BLOCK
from tests.vllm.pairs import (
    EXPIRED,
    EXPIRED_READS,
    USAGE,
    Pairs,
    Prompt,
    ask,
    computed_by,
    decoded,
    holds_nothing,
    left_after,
    overwrite,
    prefilled,
    prompt,
    prompts,
    right,
    stepped,
    stopped,
    transferred,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


async def test_each_pair_gives_a_plain_workers_tokens(pairs: Pairs, client: aiohttp.ClientSession) -> None:
    """What the rest builds on: the workers do transfer."""
    for (prefiller, decoder), asked in zip(product(pairs.prefillers, pairs.decoders), prompts(1, 4), strict=True):
        before = transferred(decoder)
        told = await decoded(client, decoder, asked, await prefilled(client, prefiller, asked))
        assert told.tokens == await right(client, pairs, asked)
        assert transferred(decoder) - before == told.usage["prompt_tokens"]


async def test_a_prefix_that_a_sibling_holds_is_sent_and_not_computed(
    pairs: Pairs, client: aiohttp.ClientSession
) -> None:
    """Any worker that may prefill can be the first leg: what it holds already, it computes on neither."""
    holder, idle = pairs.decoders
    asked = prompt("a prefix that one holds " * 30)
    assert (await ask(client, holder.url, asked)).status == 200
    before, computed = transferred(idle), computed_by(idle)
    params = await prefilled(client, holder, asked)
    told = await decoded(client, idle, asked, params)
    tokens = told.usage["prompt_tokens"]
    assert told.tokens == await right(client, pairs, asked)
    assert params["remote_prefill_cached_tokens"] == told.cached == (tokens - 1) // BLOCK * BLOCK
    assert transferred(idle) - before == tokens
    assert computed_by(idle) == computed


async def test_a_decode_after_the_lease_is_answered_200_with_whatever_is_in_the_blocks(
    pairs: Pairs, client: aiohttp.ClientSession
) -> None:
    """The control of the lease guard: wrong tokens, and nothing tells but a counter of the prefiller's."""
    (prefiller, _), (decoder, _) = pairs.prefillers, pairs.decoders
    asked, before = prompt("late " * 50), await stepped(client, prefiller, EXPIRED_READS)
    params = await prefilled(client, prefiller, asked)
    await holds_nothing(prefiller)
    await overwrite(client, prefiller)
    told = await decoded(client, decoder, asked, params)
    assert told.status == 200
    assert told.tokens != await right(client, pairs, asked)
    await until(lambda: stepped(client, prefiller, EXPIRED_READS), lambda seen: seen == before + 1)


@pytest.mark.parametrize("left", ["prefilling", "between", "refused", "transferring", "decoding"])
async def test_no_blocks_stay_behind_wherever_a_request_ends(
    pairs: Pairs, client: aiohttp.ClientSession, left: str
) -> None:
    """Those of a prefill that nobody decodes stay for the lease; all others are given back at once."""
    (prefiller, _), (decoder, _) = pairs.prefillers, pairs.decoders
    asked = prompt(f"{left}, and " + "gone " * 300, stream=True, max_tokens=1000)
    expired = await stepped(client, prefiller, EXPIRED)
    if left == "prefilling":
        with stopped(prefiller):
            await left_after(0.3, prefilled(client, prefiller, asked))
    else:
        params = await prefilled(client, prefiller, asked)
        assert await stepped(client, prefiller, USAGE) > 0
        if left == "refused":
            told = await decoded(client, decoder, Prompt(asked.path, asked.body | {"temperature": -1}), params)
            assert told.status == 400
        elif left == "transferring":
            with stopped(prefiller):
                await left_after(0.3, decoded(client, decoder, asked, params))
        elif left == "decoding":
            await left_after(0.3, decoded(client, decoder, asked, params))
    for worker in (prefiller, decoder):
        await holds_nothing(worker)
    assert await stepped(client, prefiller, EXPIRED) - expired == (left == "between")


async def test_blocks_out_of_reach_are_an_error_or_computed_anew_as_the_decoder_is_told(
    pairs: Pairs, client: aiohttp.ClientSession
) -> None:
    (lost, other), (failing, recomputing) = pairs.prefillers, pairs.decoders
    asked = list(prompts(2, 4))
    params = [
        await prefilled(client, worker, one) for worker, one in zip((lost, lost, other, other), asked, strict=True)
    ]
    for unreachable in params[2:]:
        unreachable |= {"remote_engine_id": "unknown", "remote_port": 1}
    lost.process.send(signal.SIGKILL)
    lost.process.gone()
    workers = (failing, recomputing) * 2
    told = await asyncio.gather(*map(partial(decoded, client), workers, asked, params))
    assert [one.status for one in told] == [500, 200] * 2
    for one, answer in list(zip(asked, told, strict=True))[1::2]:
        assert answer.tokens == await right(client, pairs, one)
