"""A closed loop of HTTP/1.1 clients: each keeps one connection and sends its next request when the answer is whole.

In: an address, one source of bodies per client, seconds. Out: `Sent`: how many requests, how long each took.
An answer other than 200 ends the run with `LoadError`: a figure over failed requests would mean nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

Bodies = Callable[[], bytes]
"""Gives a client its next body."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class LoadError(Exception):
    """A request was not answered 200; the text has the answer's beginning."""


@dataclass(slots=True)
class Sent:
    """What one run sent. `seconds` of wall time for it all; `latencies` in seconds, one per request."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's inherits from no class

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection was closed")

    async def ask(self, request: bytes) -> None:
        """Send one request and wait for the end of its answer. Raises LoadError."""
        self._buffer = b""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0 or self._answer is None or self._answer.done():
            return
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            self._fail(self._buffer[:300].decode("latin-1"))
            return
        length = _LENGTH.search(self._buffer, 0, head_end)
        whole = len(self._buffer) >= head_end + 4 + int(length[1]) if length else self._buffer.endswith(_LAST_CHUNK)
        if whole:
            self._answer.set_result(None)

    def _fail(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(LoadError(why))


async def run(port: int, clients: Sequence[Bodies], seconds: float, *, chunks: int = 0) -> Sent:
    """Send from each of `clients` for `seconds`, at least one request each. Raises LoadError, OSError."""
    loop = asyncio.get_running_loop()
    connections = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in clients]
    sent = Sent()
    begin = time.perf_counter()
    try:
        loops = (_send(c, b, begin + seconds, chunks, sent) for c, b in zip(connections, clients, strict=True))
        await asyncio.gather(*loops)
    finally:
        for connection in connections:
            connection.transport.abort()
    sent.seconds = time.perf_counter() - begin
    return sent


async def _send(client: Client, bodies: Bodies, end: float, chunks: int, sent: Sent) -> None:
    while True:
        request = encode(bodies(), chunks)
        begin = time.perf_counter()
        async with asyncio.timeout(30):
            await client.ask(request)
        now = time.perf_counter()
        sent.latencies.append(now - begin)
        if now >= end:
            return


def encode(body: bytes, chunks: int) -> bytes:
    """The request with headers about as an SDK sends them; `chunks` asks the backend for a stream."""
    return b"".join(
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench.local\r\nuser-agent: bench/1.0\r\naccept: */*\r\n",
            b"accept-encoding: gzip, deflate\r\nauthorization: Bearer sk-0123456789\r\n",
            b"content-type: application/json\r\n",
            b"x-chunks: %d\r\n" % chunks if chunks else b"",
            b"content-length: %d\r\n\r\n" % len(body),
            body,
        )
    )
