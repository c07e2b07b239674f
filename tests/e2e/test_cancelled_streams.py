"""Streams that Envoy gives up, thousands of them, at a running `kvsteer serve`: no memory, no count, no error stays."""

from __future__ import annotations

import asyncio
import resource
import tempfile
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

import pytest

from epp.gateway import http2_frames as f
from epp.gateway.ext_proc import METHOD
from epp.gateway.pb import ext_proc_pb2 as pb
from tests.e2e.backend import running_worker
from tests.e2e.envoy import until
from tests.e2e.serving import Picker, running_picker
from tests.gateway import wire
from tests.gateway.ext_proc_peer import CHAT, http_headers

BATCH = 100
HEAD = pb.ProcessingRequest(
    request_headers=http_headers(CHAT),
    protocol_config=pb.ProtocolConfiguration(
        request_body_mode=pb.ProcessingMode.FULL_DUPLEX_STREAMED,
        response_body_mode=pb.ProcessingMode.FULL_DUPLEX_STREAMED,
    ),
).SerializeToString()


def body(text: bytes, *, end: bool) -> bytes:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=text, end_of_stream=end)).SerializeToString()


HALF = body(b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 100, end=False)
REST = body(b'"}]}', end=True)
KINDS = ((HEAD,), (HEAD, HALF), (HEAD, HALF, REST))
"""A third of the streams waits for a body, a third for its end, and a third was picked for."""


class Canceller:
    """The client's end of one HTTP/2 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = count(1, 2)
        writer.write(f.PREFACE + f.settings({}) + f.window_update(0, 1 << 30))

    async def cancel(self, streams: int) -> None:
        """Open streams, a batch at a time; reset each batch once its answers are there."""
        for _ in range(0, streams, BATCH):
            batch = [next(self._ids) for _ in range(BATCH)]
            for i, stream in enumerate(batch):
                self._writer.write(wire.headers(stream, wire.fields(METHOD)))
                for message in KINDS[i % 3]:
                    self._writer.write(wire.data(stream, wire.message(message)))
            await self._answered(set(batch[2::3]))
            self._writer.write(b"".join(wire.rst(stream) for stream in batch))

    async def _answered(self, streams: set[int]) -> None:
        while streams:
            high, low, kind, flags, stream = f.FRAME_HEADER.unpack(await self._reader.readexactly(9))
            payload = await self._reader.readexactly(high << 8 | low)
            assert kind != f.GOAWAY
            if kind == f.DATA:
                streams.discard(stream)
            elif kind == f.PING and not flags & f.ACK:
                self._writer.write(f.frame(f.PING, f.ACK, 0, payload))


def memory(picker: Picker) -> int:
    """Resident bytes of the picker's process."""
    return int(Path(f"/proc/{picker.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("edge", ["lean", "grpcio"])
async def test_twenty_thousand_cancelled_streams_leave_nothing_behind(edge: str) -> None:
    """grpc.aio leaks a call whose handler swallows its cancellation (grpc #43360)."""
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-"))
        worker = await stack.enter_async_context(running_worker("w"))
        args = (f"unix:{directory}/picker", f"--endpoint={worker.address}", "--edge", edge)
        picker = await stack.enter_async_context(running_picker(Path(directory), *args))
        reader, writer = await asyncio.open_unix_connection(f"{directory}/picker")
        stack.callback(writer.close)
        client = Canceller(reader, writer)
        await client.cancel(4_000)
        before = memory(picker)
        await client.cancel(20_000)

        async def in_flight() -> float:
            return sum((await picker.gauges("kvsteer_endpoint_in_flight_requests")).values())

        await until(in_flight, lambda n: n == 0)
        assert memory(picker) - before < 10_000_000
        assert sum((await picker.gauges("inference_objective_request_total")).values()) == 24_000 // BATCH * 33
        log = picker.log.read_text()
        assert " ERROR " not in log
        assert "Traceback" not in log
