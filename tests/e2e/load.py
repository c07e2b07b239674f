"""A load of many requests by raw HTTP/1.1 clients, some of which go away in the middle, and what came of it.

In: where to send, how many, how to make the n-th request's body. Out: a `Tally`. Keep-alive connections, one per
client; a client that goes away closes its connection, as real ones do. Nothing is retried.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

ABORTS = ("uploading", "waiting", "reading")
"""When a client goes away: half the body sent; all sent, no answer yet; the answer's head has come."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent."""

    host: str
    port: int
    requests: int
    in_flight: int
    body: Callable[[int], bytes]
    """The n-th request's JSON body."""
    path: str = "/v1/completions"
    abort_share: float = 0.0
    """Share of clients that go away."""
    patience_s: float = 5.0
    """A client that waits so long for a byte goes away."""
    seed: int = 1


@dataclass(slots=True)
class Tally:
    """What came back."""

    statuses: Counter[int] = field(default_factory=Counter)
    """Of answers whose head was read."""
    workers: Counter[str] = field(default_factory=Counter)
    """Answers by the worker that signed them (`x-served-by`)."""
    ended: int = 0
    """Requests that are over, however."""
    complete: int = 0
    """Answers that were read to their end."""
    cut_off: int = 0
    """Answers that ended before their end."""
    aborted: Counter[str] = field(default_factory=Counter)
    """Clients that went away, by when (`ABORTS`, or `patience`)."""
    unsigned: list[tuple[int, bytes]] = field(default_factory=list)
    """Answers of 500 and above that no worker signed: (status, the body's beginning)."""
    seconds: float = 0.0

    async def progress(self) -> int:
        return self.ended


class _CutOff(Exception):
    """The connection ended inside an answer."""


async def run(plan: Plan, tally: Tally | None = None) -> Tally:
    """Send everything. A `tally` that is given can be watched meanwhile."""
    tally = tally or Tally()
    started = time.monotonic()
    numbers = iter(range(plan.requests))
    random = Random(plan.seed)
    await asyncio.gather(*(_client(plan, tally, numbers, random) for _ in range(plan.in_flight)))
    tally.seconds = time.monotonic() - started
    return tally


async def _client(plan: Plan, tally: Tally, numbers: Iterator[int], random: Random) -> None:
    connection: _Connection | None = None
    try:
        for number in numbers:
            abort = random.choice(ABORTS) if random.random() < plan.abort_share else ""
            connection = connection or await _Connection.open(plan)
            try:
                async with asyncio.timeout(plan.patience_s):
                    stays = await connection.ask(plan.body(number), tally, abort, random)
            except TimeoutError:
                tally.aborted["patience"] += 1
                stays = False
            except (_CutOff, ConnectionError, asyncio.IncompleteReadError):
                tally.cut_off += 1
                stays = False
            tally.ended += 1
            if not stays:
                connection.close()
                connection = None
    finally:
        if connection is not None:
            connection.close()


class _Connection:
    """One client's connection."""

    def __init__(self, plan: Plan, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._plan = plan
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, plan: Plan) -> _Connection:
        return cls(plan, *await asyncio.open_connection(plan.host, plan.port))

    def close(self) -> None:
        self._writer.close()

    async def ask(self, body: bytes, tally: Tally, abort: str, random: Random) -> bool:
        """One request. False: the connection is of no more use."""
        head = f"POST {self._plan.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        if abort == "uploading":
            request = request[: -len(body) // 2]
        self._writer.write(request)
        if abort in ("uploading", "waiting"):
            await asyncio.sleep(random.random() * 0.05)
            tally.aborted[abort] += 1
            return False
        status, fields = await self._head()
        tally.statuses[status] += 1
        worker = fields.get("x-served-by", "")
        tally.workers[worker] += 1
        if abort == "reading":
            tally.aborted[abort] += 1
            return False
        answer = await self._body(fields)
        tally.complete += 1
        if status >= 500 and not worker:
            tally.unsigned.append((status, answer[:200]))
        return fields.get("connection", "").lower() != "close"

    async def _head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines[1:] if line)
        return int(lines[0].split(" ", 2)[1]), {name.lower(): value.strip() for name, _, value in fields}

    async def _body(self, fields: dict[str, str]) -> bytes:
        if "content-length" in fields:
            return await self._reader.readexactly(int(fields["content-length"]))
        if fields.get("transfer-encoding", "").lower() != "chunked":
            raise _CutOff("an answer without a length")
        body = bytearray()
        while size := int(await self._reader.readuntil(b"\r\n") or b"0", 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return bytes(body)
