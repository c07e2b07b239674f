"""An HTTP/1.1 worker that tells what reached it: the far end of every end-to-end test.

In: any request; the header `x-echo` (JSON, see `Reply`) says how to answer. Out: by default a JSON object with the
worker's address, the method, path, headers and trailers, and the SHA-256 of the body as received. Raw asyncio, because
the tests need trailers, chunk boundaries, resets and upgrades that HTTP libraries hide.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

LIMIT = 1 << 20
SHOWN = 4096
"""Bytes up to which the account repeats a request body."""


@dataclass(slots=True)
class Reply:
    """How to answer one request; the fields of `x-echo`."""

    status: int = 200
    content_type: str = "application/json"
    body: str | None = None
    """The body to send instead of the account of the request."""
    chunks: int = 0
    """Answer chunked: this many server-sent events, then `data: [DONE]`."""
    pause: float = 0.0
    """Seconds before the answer, and between chunks."""
    hold: bool = False
    """Before the answer, wait for the worker's `gate`."""
    trailers: dict[str, str] = field(default_factory=dict)
    """Sent after a chunked body."""
    reset: str = ""
    """`before`: close without a word; `during`: close after the first chunk."""


@dataclass(slots=True)
class Worker:
    """One running worker and what it has seen of requests that came through Envoy."""

    name: str
    address: str = ""
    """`ip:port`."""
    requests: int = 0
    scrapes: int = 0
    """Answers to the picker's own requests."""
    running: int = 0
    most_running: int = 0
    connections: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: answers that hold may go."""
    metrics: bool = True
    """False: whoever asks for the metrics is left waiting."""

    async def now_running(self) -> int:
        return self.running

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = _fields(head[1:])
        if "x-request-id" not in headers:  # not from Envoy: the picker looks how we are
            if not self.metrics:
                await asyncio.Event().wait()
            self.scrapes += 1
            text = self._metrics() if path == "/metrics" else "{}"
            return await self._answer(writer, Reply(content_type="text/plain", body=text), {})
        self.running += 1
        self.requests += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if headers.get("upgrade", "").lower() == "websocket":
                await self._upgrade(reader, writer)
                return False
            body, trailers = await _body(reader, headers)
            reply = _reply(headers)
            account = {
                "worker": self.address,
                "method": method,
                "path": path,
                "headers": headers,
                "trailers": trailers,
                "length": len(body),
                "sha256": hashlib.sha256(body).hexdigest(),
                "body": body.decode("latin-1") if len(body) <= SHOWN else "",
            }
            return await self._answer(writer, reply, account)
        finally:
            self.running -= 1

    def _metrics(self) -> str:
        """What a vLLM with nothing cached would say."""
        gauges = {"num_requests_running": self.running, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.0}
        return "".join(f'vllm:{name}{{model_name="m"}} {value}\n' for name, value in gauges.items())

    async def _upgrade(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept, name this worker, then send back whatever comes."""
        head = (
            f"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\nx-worker: {self.address}"
        )
        writer.write(f"{head}\r\n\r\n".encode())
        while data := await reader.read(LIMIT):
            writer.write(data)
            await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, reply: Reply, account: dict[str, Any]) -> bool:
        await asyncio.sleep(reply.pause)
        if reply.hold:
            await self.gate.wait()
        if reply.reset == "before":
            return False
        head = f"HTTP/1.1 {reply.status} X\r\nx-worker: {self.address}\r\ncontent-type: {reply.content_type}\r\n"
        body = (json.dumps(account) if reply.body is None else reply.body).encode()
        if not reply.chunks and not reply.trailers:
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            return True
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        events = [f'data: {{"i":{i}}}\n\n'.encode() for i in range(reply.chunks)] + [b"data: [DONE]\n\n"]
        for chunk in events if reply.chunks else [body]:
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await writer.drain()
            if reply.reset == "during":
                return False
            if reply.chunks:
                await asyncio.sleep(reply.pause)
        trailers = "".join(f"{name}: {value}\r\n" for name, value in reply.trailers.items())
        writer.write(f"0\r\n{trailers}\r\n".encode())
        await writer.drain()
        return True


@asynccontextmanager
async def running_worker(name: str, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Worker]:
    """A worker on a port (0: a free one) of the loopback, stopped with its connections at the end."""
    worker = Worker(name)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await worker.serve(reader, writer)
        except asyncio.CancelledError:
            pass  # stopped at the end of the test; streams would log it as a fault
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(serve, host, port, limit=LIMIT, backlog=2048)
    port = server.sockets[0].getsockname()[1]
    worker.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        yield worker
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def echo(**reply: Any) -> dict[str, str]:
    """The request header that asks for `reply` (fields of `Reply`), as a keyword argument."""
    assert reply.keys() <= {f.name for f in fields(Reply)}, reply
    return {"x_echo": json.dumps(reply)}


def _reply(headers: dict[str, str]) -> Reply:
    return Reply(**json.loads(headers.get("x-echo", "{}")))


def _fields(lines: list[str]) -> dict[str, str]:
    split = (line.partition(":") for line in lines if line)
    return {name.lower(): value.strip() for name, _, value in split}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0"))), {}
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    trailers: list[str] = []
    while (line := (await reader.readuntil(b"\r\n")).decode("latin-1").strip()) != "":
        trailers.append(line)
    return bytes(body), _fields(trailers)
