"""The sidecar as a reverse proxy in front of one vLLM: streams both ways, and has prompts computed elsewhere first.

In: `ProxySettings`; HTTP from the gateway. Out: HTTP to the local worker, whose answer is passed as it comes, and,
through `caller`, to prefill workers. Every request waits for its own client: a client that leaves closes the connection
of whichever leg is running, so that the worker aborts and frees its blocks. An answer's bytes pass through without
being looked at (but for usage, where another worker's count belongs into it).
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from epp.api.rewriting import response_rewriter
from epp.disagg.sidecar.caller import HOP_BY_HOP, TOLD, Caller, onward, told
from epp.disagg.sidecar.exchange import REQUEST_ID, Exchange, Refuse

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProxySettings:
    decoder: str = "127.0.0.1:8001"
    """The local worker."""
    decoder_tls: ssl.SSLContext | None = None
    """None: plain HTTP."""
    max_body_bytes: int = 32 << 20
    recount: bool = True
    """Put the prefill worker's count of cached tokens into the client's usage."""


class Proxy:
    """One proxy. `application` is served by the caller."""

    def __init__(self, settings: ProxySettings, legs: Caller) -> None:
        self.settings = settings
        self._legs = legs

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self.settings.max_body_bytes)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """The worker's own, and 503 while this ends: vLLM says 200 while it refuses requests."""
        if self._legs.draining:
            return web.Response(status=503, text="draining\n")
        request[REQUEST_ID] = str(uuid4())
        return await self._forward(request, b"", "GET", None, {})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        with self._legs.counted():
            return await self._serve(request)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than {self.settings.max_body_bytes} bytes")
        request[REQUEST_ID] = str(uuid4())  # the same on both legs, where the client gave none
        exchange = Exchange(self._legs.settings.rules, request.path, request.headers, body)
        action = await self._legs.settle(exchange, request.raw_path, _onward(request))
        if isinstance(action, Refuse):
            return web.Response(status=action.status, body=action.body, headers={"content-type": action.content_type})
        headers = {TOLD: told(action)} if TOLD in request.headers else {}
        cached = action.cached_tokens if self.settings.recount else None
        return await self._forward(request, action.body, request.method, cached, headers)

    async def _forward(
        self, request: web.Request, body: bytes, method: str, cached: int | None, more: Mapping[str, str]
    ) -> web.StreamResponse:
        """Ask the local worker, and pass its answer piece by piece as the client takes it."""
        tls = self.settings.decoder_tls
        url = f"{'https' if tls else 'http'}://{self.settings.decoder}{request.raw_path}"
        response: web.StreamResponse | None = None
        try:
            async with self._legs.session.request(
                method,
                URL(url, encoded=True),
                data=body or None,
                headers=_onward(request),
                ssl=tls or True,
                allow_redirects=False,
            ) as answer:
                rewriter = response_rewriter(
                    answer.headers.get("content-type", ""),
                    cached_tokens=cached,
                    content_encoding=answer.headers.get("content-encoding", ""),
                )
                response = web.StreamResponse(status=answer.status, headers={**_passed(answer), **more})
                if rewriter is None and answer.content_length is not None:
                    response.content_length = answer.content_length
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(rewriter.feed(data, False) if rewriter is not None else data)
                if rewriter is not None:
                    await response.write(rewriter.feed(b"", True))
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError:
            return _error(503, "the worker does not take connections", {"retry-after": "1"})
        except (aiohttp.ClientError, OSError) as error:
            if response is None:
                return _error(502, "the worker broke off before it answered")
            log.warning("an answer of the worker broke off: %s", error)
            if request.transport is not None:
                request.transport.abort()  # what the client has is not all, and must not look like it
            return response


def _onward(request: web.Request) -> CIMultiDict[str]:
    headers = onward(request.headers.items())
    headers.setdefault(REQUEST_ID, request[REQUEST_ID])
    return headers


def _passed(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": str(status)}}
    return web.json_response(body, status=status, headers=headers)
