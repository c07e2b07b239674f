"""Sources of a cluster followed in tests, in virtual time, with the real client over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from epp.discovery.kubernetes.client import ApiClient
from epp.discovery.kubernetes.credentials import Access, Token
from epp.discovery.kubernetes.policy import PoolPolicy
from epp.discovery.kubernetes.sources import PoolDiscovery, SelectorDiscovery, SliceDiscovery
from epp.discovery.membership import EndpointSpec
from tests.kube.server import Api

Source = PoolDiscovery | SelectorDiscovery | SliceDiscovery


@dataclass(slots=True)
class Followed:
    """A source at work, and what it published last."""

    api: Api
    source: Source
    client: ApiClient
    specs: list[EndpointSpec] = field(default_factory=list)
    published: Callable[[], object] = lambda: None
    """Called after each publication."""

    @property
    def addresses(self) -> list[str]:
        return [f"{spec.host}:{spec.port}" for spec in self.specs]

    @property
    def names(self) -> set[str]:
        """Of the pods."""
        return {spec.name.rpartition("-rank-")[0] for spec in self.specs}


@asynccontextmanager
async def following(
    api: Api, make: Callable[..., Any], *args: Any, token: Token | None = None
) -> AsyncIterator[Followed]:
    """`make(client, "default", *args, clock=..., random=...)` is the source."""
    client = ApiClient(Access(api.url, tls=False, token=token or Token()))
    clock = asyncio.get_running_loop().time
    source = make(client, "default", *args, clock=clock, random=Random(1))
    followed = Followed(api, source, client)

    def publish(specs: Iterable[EndpointSpec]) -> None:
        followed.specs = list(specs)
        followed.published()

    await source.start(publish)
    try:
        yield followed
    finally:
        await source.stop()
        await client.close()


def pool_of(api: Api, group: str = "", name: str = "pool", token: Token | None = None) -> Any:
    return following(api, PoolDiscovery, name, group, token=token)


@asynccontextmanager
async def policy_of(api: Api) -> AsyncIterator[PoolPolicy]:
    client = ApiClient(Access(api.url, tls=False))
    policy = PoolPolicy(client, "default", "pool", clock=asyncio.get_running_loop().time, random=Random(1))
    policy.start()
    try:
        yield policy
    finally:
        await policy.stop()
        await client.close()


async def settle(seconds: float = 1.0) -> None:
    """Let what is on its way arrive."""
    await asyncio.sleep(seconds)
