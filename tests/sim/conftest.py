"""Workers on free ports for the tests of the HTTP interface, and a client session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from epp.sim.cost import PRESETS
from epp.sim.engine import EngineConfig
from epp.sim.server import Worker, WorkerConfig
from epp.sim.tokenizer import ChatTokenizer

StartWorker = Callable[..., Awaitable[Worker]]
CONFIG = WorkerConfig(model="tiny", engine=EngineConfig(num_gpu_blocks=256, cost=PRESETS["free"]))


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer()


@pytest.fixture
async def start_worker(tokenizer: ChatTokenizer) -> AsyncIterator[StartWorker]:
    """Start a worker with changes to a small default configuration; stopped after the test."""
    workers: list[Worker] = []

    async def start(**changes: Any) -> Worker:
        worker = Worker(replace(CONFIG, **changes), tokenizer)
        await worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        await worker.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        yield session
