"""The admin port answers from memory and says why the picker is not ready."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from epp.endpoint import Endpoint, Pool
from epp.observe.admin import Sources, application


def decisions(limit: int, request_id: str) -> Iterable[dict[str, Any]]:
    return [{"request_id": request_id or "any"}] * min(limit, 2)


async def test_the_admin_port_shows_metrics_readiness_decisions_and_the_pool() -> None:
    reason = "no endpoint yet"
    sources = Sources(
        metrics=lambda: b"up 1\n",
        not_ready=lambda: reason,
        decisions=decisions,
        pool=Pool([Endpoint("::1", 8000)]),
        index=lambda: {"endpoints": []},
    )
    async with TestClient(TestServer(application(sources))) as client:
        assert await (await client.get("/metrics")).read() == b"up 1\n"
        assert (await client.get("/healthz")).status == 200
        not_ready = await client.get("/readyz")
        assert (not_ready.status, await not_ready.text()) == (503, "no endpoint yet\n")
        reason = ""
        assert (await client.get("/readyz")).status == 200
        found = await (await client.get("/debug/decisions?id=r1&limit=1")).json()
        assert found == [{"request_id": "r1"}]
        (endpoint,) = await (await client.get("/debug/pool")).json()
        assert endpoint["address"] == "[::1]:8000"
        assert endpoint["waiting"] is None
        assert await (await client.get("/debug/index")).json() == {"endpoints": []}


async def test_a_limit_out_of_range_is_refused_with_the_range() -> None:
    sources = Sources(metrics=bytes, not_ready=str, decisions=decisions, pool=Pool(), index=dict)
    async with TestClient(TestServer(application(sources))) as client:
        for limit in ("0", "-1", "x", "99999999999999999999", "9" * 5_000):
            response = await client.get(f"/debug/decisions?limit={limit}")
            assert response.status == 400
            assert "from 1 to" in (await response.json())["error"]
