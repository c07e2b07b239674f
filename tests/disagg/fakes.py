"""A prefill and a decode worker that speak the hand-over and keep what they were asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

EVENTS = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % i for i in range(3)]
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":9}}}\n\n'


@dataclass(slots=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Worker:
    """One worker. `status`, `hold`, `reset` say how it answers from now on."""

    role: str
    address: str = ""
    asked: list[Asked] = field(default_factory=list)
    status: int = 200
    hold: asyncio.Event | None = None
    """Answers wait for it."""
    reset: bool = False
    left: int = 0
    """Clients that went away while they were waiting."""
    cached: int = 4

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=self.status)
        self.asked.append(
            Asked(request.path_qs, {k.lower(): v for k, v in request.headers.items()}, await request.read())
        )
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        if self.reset:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.status != 200:
            return web.json_response({"error": {"message": f"{self.role} says {self.status}"}}, status=self.status)
        body = self.asked[-1].json
        return self._prefilled(body) if self.role == "prefill" else await self._decoded(request, body)

    def _prefilled(self, body: dict[str, Any]) -> web.Response:
        assert body["kv_transfer_params"]["do_remote_decode"] is True
        assert body["stream"] is False
        assert not {"stream_options", "min_tokens", "n"} & body.keys()
        params = {"do_remote_prefill": True, "remote_block_ids": [[len(self.asked)]], "remote_host": self.address}
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": self.cached}}
        return web.json_response({"usage": usage, "kv_transfer_params": params})

    async def _decoded(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9}}
            return web.json_response({"choices": [{"text": "hi"}], "usage": usage}, headers={"x-worker": self.address})
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-worker": self.address})
        await response.prepare(request)
        for event in [*EVENTS, LAST, b"data: [DONE]\n\n"]:
            await response.write(event)
        return response


@asynccontextmanager
async def running(role: str) -> AsyncIterator[Worker]:
    worker = Worker(role)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", worker.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    worker.address = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield worker
    finally:
        await runner.cleanup()
