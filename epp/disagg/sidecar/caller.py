"""What both flavours of the sidecar share: prefill legs over HTTP until the request may go on, and what is counted.

In: an `Exchange`, the request's path and headers. Out: `Proceed`, with its lease not yet over, or `Refuse`. Whoever
cancels `settle` closes the connection of the leg that runs, so that the worker aborts and frees its blocks. aiohttp: it
is a dependency already, and has no cap on connections here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from epp.disagg.headers import CONTROL
from epp.disagg.sidecar.exchange import Call, Exchange, Proceed, Refuse, Rules

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
IDLE_S = 4.0
"""Shorter than uvicorn's keep-alive of 5 s, so that no request leaves on a connection that the worker is closing."""
MAX_ANSWER_BYTES = 32 << 20
"""Of a prefill leg: one token, and what says where its blocks are."""


@dataclass(frozen=True, slots=True)
class CallerSettings:
    rules: Rules
    tls: ssl.SSLContext | None = None
    """Toward prefill workers; None: plain HTTP."""
    max_prefills: int = 256
    """Prefill legs at a time; further requests wait."""
    connect_timeout_s: float = 2.0
    """Part of `Rules.margin_s`: a request that is sent in time may still have to connect."""


class Caller:
    """The legs of one sidecar. `start` before, `close` after."""

    def __init__(self, settings: CallerSettings) -> None:
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
        self._last = 0.0
        self._stall = (0.0, -math.inf)
        """Beginning and end of the last time in which this process did nothing: stopped, or starved."""

    async def start(self) -> None:
        self._last = time.monotonic()
        self._ticker = asyncio.create_task(self._tick())
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S), timeout=timeout, auto_decompress=False
        )

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "started"
        return self._session

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A request runs."""
        self.running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def settle(self, exchange: Exchange, path: str, headers: CIMultiDict[str]) -> Proceed | Refuse:
        """Ask prefill workers until it is known how the request goes on. `path` with its query, as it came."""
        action = exchange.start()
        while not isinstance(action, Refuse):
            if isinstance(action, Call):
                action = await self._prefill(exchange, action, path, headers)
            elif action.not_after is not None and time.monotonic() > action.not_after:
                self.prefills["lease-over"] += 1
                action = exchange.late()
            else:
                if action.outcome != "decode-only" or action.why:
                    self.outcomes[action.outcome, action.why] += 1
                return action
        return action

    async def _prefill(
        self, exchange: Exchange, call: Call, path: str, headers: CIMultiDict[str]
    ) -> Call | Proceed | Refuse:
        """One prefill leg, to its end."""
        tls = self.settings.tls
        url = URL(f"{'https' if tls else 'http'}://{call.address}{path}", encoded=True)
        asked_at = time.monotonic()
        try:
            async with (
                self._slots,
                asyncio.timeout(call.timeout_s),
                self.session.post(url, data=call.body, headers=headers, ssl=tls or True) as answer,
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

    async def _tick(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(TICK_S)

    def _look(self) -> float:
        """See that time went on here, or did not; gives the time."""
        now = time.monotonic()
        if now - self._last > 2 * TICK_S:
            self._stall = self._last, now
        self._last = now
        return now

    def _answered_at(self, asked_at: float) -> float:
        """When an answer that is read now may have come: it lay unread if this process has only just gone on.

        Looks for itself: an answer may be read before the ticker runs again.
        """
        now = self._look()
        began, ended = self._stall
        return began if asked_at < ended and now - ended < 4 * TICK_S else now


def onward(headers: Iterable[tuple[str, str]]) -> CIMultiDict[str]:
    """A client's headers toward a worker, without those that are the sidecar's or the connection's."""
    return CIMultiDict(
        (name, value)
        for name, value in headers
        if (lower := name.lower()) not in HOP_BY_HOP and lower not in CONTROL and lower != TOLD
    )


def told(proceed: Proceed) -> str:
    """The value of `TOLD` for a client."""
    return f"{proceed.outcome}; {proceed.why}" if proceed.why else proceed.outcome


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for data in answer.content.iter_any():
        body += data
        if len(body) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
