"""The admin port: /metrics, /healthz, /readyz, /debug/decisions, /debug/pool, /debug/index.

Read-only; bind it to a trusted net.

In: functions that give the current state. Out: an aiohttp application, started and stopped by `kvsteer serve`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from epp.endpoint import COLUMNS, Pool

MAX_DECISIONS = 1000
"""Most decisions one call of /debug/decisions returns."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What the admin port shows."""

    metrics: Callable[[], bytes]
    not_ready: Callable[[], str]
    """Why the picker is not ready; empty when it is."""
    decisions: Callable[[int, str], Iterable[dict[str, Any]]]
    """The newest decisions, at most so many, of one request id when it is not empty."""
    pool: Pool
    index: Callable[[], dict[str, Any]]
    """What is known of the workers' caches (`epp.observe.caches`)."""


def application(sources: Sources, guards: Iterable[Any] = ()) -> web.Application:
    """Build the application; every handler answers from memory. `guards`: middlewares that every request passes."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=sources.metrics(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = sources.not_ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    async def decisions(request: web.Request) -> web.Response:
        text = request.query.get("limit", "50")
        if not (text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= MAX_DECISIONS):
            return web.json_response({"error": f"limit: a number from 1 to {MAX_DECISIONS}"}, status=400)
        found = list(sources.decisions(int(text), request.query.get("id", "")))
        return web.json_response(found, dumps=_dumps)

    async def pool(_: web.Request) -> web.Response:
        return web.json_response([_endpoint(sources.pool, i) for i in range(len(sources.pool))], dumps=_dumps)

    async def caches(_: web.Request) -> web.Response:
        return web.json_response(sources.index(), dumps=_dumps)

    async def index(_: web.Request) -> web.Response:
        return web.Response(text="/metrics /healthz /readyz /debug/decisions?limit=&id= /debug/pool /debug/index\n")

    app = web.Application(middlewares=tuple(guards))
    app.add_routes(
        [
            web.get("/", index),
            web.get("/metrics", metrics),
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/debug/decisions", decisions),
            web.get("/debug/pool", pool),
            web.get("/debug/index", caches),
        ]
    )
    return app


def _dumps(value: object) -> str:
    return json.dumps(value, default=str)


def _endpoint(pool: Pool, row: int) -> dict[str, Any]:
    """One endpoint with its columns; what is not a finite number is null, since JSON has no NaN."""
    endpoint = pool.endpoints[row]
    columns = {name: float(pool.columns[name][row]) for name in COLUMNS}
    return {
        "endpoint": endpoint.key,
        "address": endpoint.address,
        "rank": endpoint.rank,
        "name": endpoint.name,
        "available": endpoint.available,
        "labels": dict(endpoint.labels),
        "engine": endpoint.engine,
        "models": sorted(endpoint.models) if endpoint.models is not None else None,
        "block_size": endpoint.block_size,
        "cache_blocks": endpoint.cache_blocks,
        **{name: value if abs(value) < float("inf") else None for name, value in columns.items()},
    }
