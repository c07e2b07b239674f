"""Who may read the admin port of a picker in a cluster: asked of the API server, remembered, closed in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from epp.discovery.kubernetes.client import ApiClient
from epp.discovery.kubernetes.credentials import Access
from epp.observe.authentication import MAX_KEPT, Authenticator, middleware
from tests.kube.server import Api, running_api

PROMETHEUS = {"username": "system:serviceaccount:monitoring:prometheus", "groups": ["system:authenticated"]}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def guarded(api: Api, clock: Clock) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    """A page behind the guard; `api` is asked."""
    kube = ApiClient(Access(api.url, tls=False))
    app = web.Application(middlewares=[middleware(Authenticator(kube, clock))])

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="figures")

    for path in ("/metrics", "/debug/pool", "/healthz", "/readyz"):
        app.router.add_get(path, page)
    async with TestClient(TestServer(app)) as client:
        yield client
    await kube.close()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_who_is_known_and_allowed_reads_and_the_others_are_told_what_is_missing() -> None:
    async with running_api() as api, guarded(api, Clock()) as client:
        api.users = {"good": PROMETHEUS, "other": {"username": "other"}}
        api.allowed = {(PROMETHEUS["username"], "/metrics")}  # type: ignore[arg-type]
        assert await (await client.get("/metrics", headers=bearer("good"))).text() == "figures"
        for headers, path, status, words in (
            ({}, "/metrics", 401, "a bearer token that the cluster knows is needed"),
            (bearer("unknown"), "/metrics", 401, "a bearer token"),
            ({"authorization": "Basic Z29vZA=="}, "/metrics", 401, "a bearer token"),
            (bearer(""), "/metrics", 401, "a bearer token"),
            (bearer("other"), "/metrics", 403, "may not get this path"),
            (bearer("good"), "/debug/pool", 403, "may not get this path"),
        ):
            response = await client.get(path, headers=headers)
            assert (response.status, words in await response.text()) == (status, True), path
            assert ("www-authenticate" in response.headers) == (status == 401)


async def test_probes_need_no_token() -> None:
    async with running_api() as api, guarded(api, Clock()) as client:
        for path in ("/healthz", "/readyz"):
            assert (await client.get(path)).status == 200
        assert api.requests.total() == 0


async def test_an_answer_is_kept_for_a_minute_and_a_refusal_for_ten_seconds() -> None:
    clock = Clock()
    async with running_api() as api, guarded(api, clock) as client:
        api.users = {"good": PROMETHEUS}
        api.allowed = {(PROMETHEUS["username"], "/metrics")}  # type: ignore[arg-type]
        for _ in range(5):
            assert (await client.get("/metrics", headers=bearer("good"))).status == 200
            assert (await client.get("/metrics", headers=bearer("bad"))).status == 401
        assert api.requests["create", "tokenreviews"] == 2
        api.users = {}
        clock.now = 59
        assert (await client.get("/metrics", headers=bearer("good"))).status == 200
        clock.now = 61
        assert (await client.get("/metrics", headers=bearer("good"))).status == 401
        api.users = {"bad": PROMETHEUS}
        clock.now = 62
        assert (await client.get("/metrics", headers=bearer("bad"))).status == 200


@pytest.mark.parametrize("code", [403, 500, 503])
async def test_an_api_server_that_cannot_say_lets_nobody_in_whom_it_has_not_let_in_before(code: int) -> None:
    clock = Clock()
    async with running_api() as api, guarded(api, clock) as client:
        api.users = {"good": PROMETHEUS}
        api.allowed = {(PROMETHEUS["username"], "/metrics")}  # type: ignore[arg-type]
        assert (await client.get("/metrics", headers=bearer("good"))).status == 200
        api.faults.refuse["*", "*"] = code
        assert (await client.get("/metrics", headers=bearer("good"))).status == 200
        assert (await client.get("/metrics", headers=bearer("new"))).status == 503
        api.faults.refuse.clear()
        api.users["new"] = PROMETHEUS
        assert (await client.get("/metrics", headers=bearer("new"))).status == 200, "a failure is not remembered"


async def test_what_is_remembered_is_bounded() -> None:
    async with running_api() as api:
        kube = ApiClient(Access(api.url, tls=False))
        authenticator = Authenticator(kube, Clock())
        for start in range(0, MAX_KEPT + 100, 50):
            await asyncio.gather(*(authenticator.refusal(f"Bearer t-{start + i}", "/metrics") for i in range(50)))
        assert len(authenticator._kept) == MAX_KEPT
        await kube.close()
