"""The sidecar as a reverse proxy in front of one vLLM: streams both ways, and has prompts computed elsewhere first.

In: `ProxySettings`; HTTP from the gateway. Out: HTTP to the local worker, whose answer is passed as it comes, and to
prefill workers. Every request waits for its own client: a client that leaves closes the connection of whichever leg is
running, so that the worker aborts and frees its blocks. aiohttp on both sides: it is a dependency already, and an
answer's bytes pass through it without being looked at (but for usage, where another worker's count belongs into it).
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from epp.api.rewriting import response_rewriter
from epp.disagg.headers import CONTROL
from epp.disagg.sidecar.exchange import REQUEST_ID, Call, Exchange, Proceed, Refuse, Rules

log = logging.getLogger(__name__)

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length", "expect"),
    }
)
TOLD = "x-kvsteer-disaggregation"
"""Request header with which a client asks how its request was spread, and the response header that tells."""
TICK_S = 0.25
"""How often it is seen that time goes on here."""
MAX_ANSWER_BYTES = 32 << 20
"""Of a prefill leg: one token, and what says where its blocks are."""


@dataclass(frozen=True, slots=True)
class ProxySettings:
    rules: Rules
    decoder: str = "127.0.0.1:8001"
    """The local worker."""
    decoder_tls: ssl.SSLContext | None = None
    prefiller_tls: ssl.SSLContext | None = None
    """None: plain HTTP."""
    max_body_bytes: int = 32 << 20
    max_prefills: int = 256
    """Prefill legs at a time; further requests wait."""
    recount: bool = True
    """Put the prefill worker's count of cached tokens into the client's usage."""
    connect_timeout_s: float = 2.0
    """Part of `Rules.margin_s`: a request that is sent in time may still have to connect."""


class Proxy:
    """One proxy. `application` is served by the caller; `start` before, `close` after."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.draining = False
        self.running = 0
        self.idle = asyncio.Event()
        """Nothing runs."""
        self.idle.set()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """(outcome, why) of requests that may be handed over."""
        self.prefills: Counter[str] = Counter()
        """Prefill legs by how they ended."""
        self._slots = asyncio.Semaphore(settings.max_prefills)
        self._session: aiohttp.ClientSession | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._stall = (0.0, -math.inf)
        """Beginning and end of the last time in which this process did nothing: stopped, or starved."""

    async def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick())
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=False
        )

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - last > 2 * TICK_S:
                self._stall = last, now
            last = now

    def _answered_at(self, asked_at: float) -> float:
        """When an answer that is read now may have come: it lay unread if this process has only just gone on."""
        began, ended = self._stall
        now = time.monotonic()
        return began if asked_at < ended and now - ended < 4 * TICK_S else now

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._session is not None:
            await self._session.close()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self.settings.max_body_bytes)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """The worker's own, and 503 while this ends: vLLM says 200 while it refuses requests."""
        if self.draining:
            return web.Response(status=503, text="draining\n")
        request[REQUEST_ID] = str(uuid4())
        return await self._forward(request, b"", "GET", None, {})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        self.idle.clear()
        try:
            return await self._serve(request)
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than {self.settings.max_body_bytes} bytes")
        request[REQUEST_ID] = str(uuid4())  # the same on both legs, where the client gave none
        exchange = Exchange(self.settings.rules, request.path, request.headers, body)
        action = exchange.start()
        while not isinstance(action, Refuse):
            if isinstance(action, Call):
                action = await self._prefill(exchange, action, request)
                continue
            if action.not_after is not None and time.monotonic() > action.not_after:
                self.prefills["lease-over"] += 1
                action = exchange.late()
                continue
            return await self._decode(request, action)
        return web.Response(status=action.status, body=action.body, headers={"content-type": action.content_type})

    async def _prefill(self, exchange: Exchange, call: Call, request: web.Request) -> Call | Proceed | Refuse:
        """One prefill leg, to its end; a client that leaves cancels it, which closes its connection."""
        assert self._session is not None
        tls = self.settings.prefiller_tls
        url = f"{'https' if tls else 'http'}://{call.address}{request.raw_path}"
        asked_at = time.monotonic()
        try:
            async with (
                self._slots,
                asyncio.timeout(call.timeout_s),
                self._session.post(
                    URL(url, encoded=True), data=call.body, headers=_onward(request), ssl=tls or True
                ) as answer,
            ):
                body = await _whole(answer)
                kind = answer.headers.get("content-type", "")
                self.prefills[str(answer.status)] += 1
                return exchange.answered(answer.status, body, kind, self._answered_at(asked_at))
        except TimeoutError:
            failure = "timeout"
        except aiohttp.ClientConnectorError:
            failure = "unreachable"
        except (aiohttp.ClientError, OSError):
            failure = "reset"
        self.prefills[failure] += 1
        log.warning("prefill at %s: %s", call.address, failure)
        return exchange.failed(failure)

    async def _decode(self, request: web.Request, proceed: Proceed) -> web.StreamResponse:
        if proceed.outcome != "decode-only" or proceed.why:
            self.outcomes[proceed.outcome, proceed.why] += 1
        told = {}
        if TOLD in request.headers:
            told[TOLD] = f"{proceed.outcome}; {proceed.why}" if proceed.why else proceed.outcome
        cached = proceed.cached_tokens if self.settings.recount else None
        return await self._forward(request, proceed.body, request.method, cached, told)

    async def _forward(
        self, request: web.Request, body: bytes, method: str, cached: int | None, told: Mapping[str, str]
    ) -> web.StreamResponse:
        """Ask the local worker, and pass its answer piece by piece as the client takes it."""
        assert self._session is not None
        tls = self.settings.decoder_tls
        url = f"{'https' if tls else 'http'}://{self.settings.decoder}{request.raw_path}"
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
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
                response = web.StreamResponse(status=answer.status, headers={**_passed(answer), **told})
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


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for data in answer.content.iter_any():
        body += data
        if len(body) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _onward(request: web.Request) -> CIMultiDict[str]:
    """The client's headers toward a worker, without those that are the sidecar's or the connection's."""
    onward = CIMultiDict(
        (name, value)
        for name, value in request.headers.items()
        if (lower := name.lower()) not in HOP_BY_HOP and lower not in CONTROL and lower != TOLD
    )
    onward.setdefault(REQUEST_ID, request[REQUEST_ID])
    return onward


def _passed(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": str(status)}}
    return web.json_response(body, status=status, headers=headers)
