"""A gate of TCP before a worker: a test stops an exchange at a point of its choice, does its mischief, lets it go on.

Only exchanges that begin with POST are stopped; what watches the worker passes. Ends of connections pass at once, both
ways, behind what was sent before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

Point = Literal["request", "answer"]


@dataclass
class Gate:
    """Stands at `address` for the worker at `target`."""

    target: str
    address: str = ""
    stop: Point | None = None
    """Where the next exchanges are held: before the worker has the request, or before the client has the answer."""
    edit: Callable[[bytes], bytes] = bytes
    """What becomes of answers, which keep their length."""
    posts: int = 0
    """Requests that came so far."""
    held: int = 0
    """Exchanges that wait here now."""
    _server: asyncio.Server | None = None
    _go: asyncio.Event = field(default_factory=asyncio.Event)

    def hold(self, point: Point) -> None:
        self.stop = point
        self._go.clear()

    def release(self) -> None:
        self.stop = None
        self._go.set()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    def shut(self) -> None:
        """Refuse connections, as the host of a worker does that has ended."""
        if self._server is not None:
            self._server.close()

    async def _at(self, point: Point) -> None:
        if self.stop == point:
            self.held += 1
            try:
                await self._go.wait()
            finally:
                self.held -= 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        posting = False

        async def asked(data: bytes) -> bytes:
            nonlocal posting
            if data.startswith(b"POST "):
                posting = True
                self.posts += 1
                await self._at("request")
            return data

        async def answered(data: bytes) -> bytes:
            if not posting:
                return data
            await self._at("answer")
            return self.edit(data)

        there: asyncio.StreamWriter | None = None
        try:
            host, _, port = self.target.rpartition(":")
            their_reader, there = await asyncio.open_connection(host, int(port))
            pipes = [
                asyncio.create_task(_pipe(reader, there, asked)),
                asyncio.create_task(_pipe(their_reader, writer, answered)),
            ]
            try:
                await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pipe in pipes:
                    pipe.cancel()
                await asyncio.gather(*pipes, return_exceptions=True)
        except OSError:
            pass
        finally:
            for end in (writer, there):
                if end is not None:
                    end.close()


async def _pipe(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, through: Callable[[bytes], Awaitable[bytes]]
) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(await through(data))
            await writer.drain()
    except ConnectionError:
        pass


@asynccontextmanager
async def running_gate(target: str) -> AsyncIterator[Gate]:
    gate = Gate(target)
    await gate.listen()
    try:
        yield gate
    finally:
        gate.release()
        gate.shut()
