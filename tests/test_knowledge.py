"""What the configuration wants known is loaded, followed and replaced with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import aiohttp
import pytest

from epp.config import read
from epp.endpoint import Endpoint, Pool
from epp.knowledge import Knowledge
from epp.kvcache.precise import PrecisePrefixCache
from epp.kvcache.tokens import ModelFolderError, Tokens
from epp.scheduler import Scheduler
from epp.sim.publisher import EventsConfig
from epp.sim.server import Worker, WorkerConfig
from epp.sim.tokenizer import SHIPPED, ChatTokenizer

PRECISE = f"""
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
models:
- name: m
  path: {SHIPPED}
plugins:
- type: precise-prefix-cache-scorer
"""
PLAIN = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
"""


def scheduler(text: str) -> Scheduler:
    return Scheduler(read(text), random=Random(1))


@asynccontextmanager
async def emulated() -> AsyncIterator[tuple[Worker, Endpoint]]:
    """A worker that publishes events, and the endpoint that a scrape has told of its model."""
    worker = Worker(
        WorkerConfig(model="m", events=EventsConfig(endpoint="tcp://*:0", replay_endpoint="tcp://*:0"), speed=100),
        ChatTokenizer(),
    )
    await worker.start()
    endpoint = Endpoint("127.0.0.1", worker.port)
    endpoint.models = frozenset({"m"})
    try:
        yield worker, endpoint
    finally:
        await worker.stop()


async def held(producer: PrecisePrefixCache, endpoint: Endpoint, *, some: bool) -> None:
    """Wait until the index knows of some blocks of the endpoint, or of none."""
    async with asyncio.timeout(15):
        while True:
            follower = producer.followers.get(endpoint)
            if follower is not None and bool(sum(producer.index.blocks(follower.ledger.holder))) is some:
                return
            await asyncio.sleep(0.02)


async def complete(worker: Worker) -> None:
    body = {"model": "m", "prompt": "a text of some length " * 40, "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"http://{worker.address}/v1/completions", json=body) as response,
    ):
        assert response.status == 200


async def test_a_worker_that_went_to_sleep_holds_nothing_before_it_says_so() -> None:
    async with emulated() as (worker, endpoint):
        knowledge = Knowledge(Pool([endpoint]), lambda tokens: None)
        await knowledge.configure(scheduler(PRECISE))
        try:
            producer = knowledge.producer
            assert producer is not None
            await complete(worker)
            await held(producer, endpoint, some=True)
            knowledge.scraped(endpoint)
            await held(producer, endpoint, some=True)
            endpoint.asleep = True
            knowledge.scraped(endpoint)
            await held(producer, endpoint, some=False)
            knowledge.scraped(endpoint)  # still asleep: nothing is dropped twice
            endpoint.asleep = False
            knowledge.scraped(endpoint)
            await complete(worker)
        finally:
            await knowledge.stop()


async def test_a_changed_configuration_ends_what_it_does_not_want_known() -> None:
    seen: list[Tokens | None] = []
    async with emulated() as (_, endpoint):
        knowledge = Knowledge(Pool([endpoint]), seen.append)
        precise = scheduler(PRECISE)
        await knowledge.configure(precise)
        first = knowledge.subscriber
        await knowledge.configure(Scheduler(read(PRECISE), random=Random(1), previous=precise))
        assert knowledge.subscriber is first, "the producer is the same: its subscriptions stay"
        await knowledge.configure(scheduler(PLAIN))
        assert (knowledge.subscriber, knowledge.producer, knowledge.tokens) == (None, None, None)
        assert [tokens is None for tokens in seen] == [False, True]
        await knowledge.stop()


async def test_a_model_that_cannot_be_loaded_leaves_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    knowledge = Knowledge(Pool(), lambda tokens: None)
    await knowledge.configure(scheduler(PRECISE))
    before = knowledge.tokens
    bad = scheduler(PRECISE.replace(str(SHIPPED), "/nonexistent"))
    with pytest.raises(ModelFolderError):
        await knowledge.configure(bad)
    knowledge.reconfigure(bad)
    async with asyncio.timeout(10):
        while "cannot be had" not in caplog.text:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.02)
    assert knowledge.tokens is before
    await knowledge.stop()
