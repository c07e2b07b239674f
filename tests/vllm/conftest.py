"""The workers that hand KV blocks to each other, started once for all tests that use them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.vllm import pairs as paired
from tests.vllm.pairs import Pairs


@pytest.fixture(scope="session")
def fleet_of_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    started = paired.start(tmp_path_factory.mktemp("vllm"))
    try:
        yield started
    finally:
        started.fleet.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """Its connections are used once: the worker ends idle ones after seconds, perhaps as the next request leaves."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


@pytest.fixture
async def pairs(fleet_of_pairs: Pairs, client: aiohttp.ClientSession) -> Pairs:
    """With all workers running, whatever the test before did to them."""
    await fleet_of_pairs.ready(client)
    return fleet_of_pairs
