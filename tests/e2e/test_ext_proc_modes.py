"""The ext_proc stream machine behind the real Envoy, in every pairing of body modes that differs.

The machine is driven by a dozen lines over grpc.aio; what it decides stands in headers of the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import pytest

from epp.envoy_options import HostPort, Mode, Profile, defaults, parse_picker
from epp.gateway import errors
from epp.gateway.ext_proc import (
    METHOD,
    BodyMode,
    Event,
    ExtProcStream,
    Limits,
    ProtocolFault,
    RequestReady,
    ResponseData,
    ResponseDone,
    ResponseHead,
    Steering,
)
from tests.e2e.backend import Worker, echo, running_worker
from tests.e2e.envoy import RunningEnvoy, running_envoy, until

LIMIT = 1_000_000

PAIRS = [
    (BodyMode.NONE, BodyMode.NONE),
    (BodyMode.STREAMED, BodyMode.STREAMED),
    (BodyMode.BUFFERED, BodyMode.NONE),
    (BodyMode.BUFFERED, BodyMode.BUFFERED),
    (BodyMode.BUFFERED, BodyMode.STREAMED),
    (BodyMode.BUFFERED_PARTIAL, BodyMode.BUFFERED_PARTIAL),
    (BodyMode.FULL_DUPLEX, BodyMode.STREAMED),
    (BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX),
]
every_pair = pytest.mark.parametrize(("request_mode", "response_mode"), PAIRS, ids=lambda mode: mode.name)
NAMES = {mode: mode.name.replace("FULL_DUPLEX", "FULL_DUPLEX_STREAMED") for mode in BodyMode}


class Replace:
    """A transform that gives the client `client-model` for `worker`'s key, and holds nothing back at the end."""

    def __init__(self) -> None:
        self.kept = b""

    def feed(self, data: bytes, end: bool) -> bytes | None:
        data = self.kept + data
        self.kept = b"" if end else data[-20:]
        return data[: len(data) - len(self.kept)].replace(b'"worker"', b'"the-worker"')


@dataclass(slots=True)
class Picker:
    """Steers to `address`; `x-ask` names more to do. Keeps the events of every stream."""

    address: str
    limits: Limits
    streams: list[list[Event]] = field(default_factory=list)

    async def process(self, messages: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        stream, events = ExtProcStream(self.limits), list[Event]()
        self.streams.append(events)
        try:
            async for message in messages:
                for event in stream.receive(message):
                    events.append(event)
                    if isinstance(event, RequestReady):
                        await asyncio.sleep(0.01)
                        self._decide(stream, event)
                for reply in stream.take():
                    yield reply
            events += stream.half_closed()
        finally:
            events += stream.closed()

    def _decide(self, stream: ExtProcStream, ready: RequestReady) -> None:
        match ready.head.headers.get("x-ask"):
            case "reject":
                stream.reject(errors.too_many_requests("rejected-saturated", "full"))
            case "rewrite":
                stream.steer(Steering((self.address,), body=b'{"model":"another one"}'))
            case "transform":
                stream.steer(Steering((self.address,), response_transform=Replace()))
            case _:
                stream.steer(
                    Steering((self.address,), set_headers={"x-added": "1"}, response_headers={"x-session-token": "t"})
                )


@dataclass(slots=True)
class Setup:
    envoy: RunningEnvoy
    picker: Picker
    workers: list[Worker]
    client: aiohttp.ClientSession

    async def ask(
        self, body: bytes | AsyncIterator[bytes] | None, /, *, method: str = "POST", **headers: str
    ) -> tuple[int, bytes, dict[str, str]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{self.envoy.url}/v1/completions"
        async with self.client.request(method, url, data=body, headers=named) as response:
            return response.status, await response.read(), {k.lower(): v for k, v in response.headers.items()}

    async def events(self) -> list[Event]:
        """Those of the newest stream, once it has ended."""

        async def look() -> list[Event]:
            return self.picker.streams[-1]

        return await until(look, lambda events: any(isinstance(e, ResponseDone) for e in events))


@asynccontextmanager
async def setup(
    request_mode: BodyMode, response_mode: BodyMode, *, response_bodies: bool = True
) -> AsyncIterator[Setup]:
    """Envoy in these modes with trailers sent, two workers, and the machine as the picker, which names the second."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running_worker(name)) for name in "ab"]
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-"))
        address = f"unix:{directory}/picker"
        picker = Picker(workers[1].address, Limits(max_request_bytes=LIMIT, response_bodies=response_bodies))
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        service, method = METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(picker.process)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        server.add_insecure_port(address)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        options = defaults(
            Mode.SIDECAR,
            Profile.FAST,
            picker=parse_picker(address),
            endpoints=tuple(HostPort.parse(worker.address) for worker in workers),
        )

        def edit(tree: Any) -> None:
            listener = tree["static_resources"]["listeners"][0]
            manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
            (ext_proc,) = [
                f["typed_config"] for f in manager["http_filters"] if "ExternalProcessor" in f["typed_config"]["@type"]
            ]
            ext_proc["allow_mode_override"] = True
            for upgrade in manager["upgrade_configs"]:
                upgrade.pop("filters")  # the shipped settings pick websockets in a mode of their own
            ext_proc["processing_mode"] = {
                "request_header_mode": "SEND",
                "response_header_mode": "SKIP" if response_mode is BodyMode.NONE else "SEND",
                "request_body_mode": NAMES[request_mode],
                "response_body_mode": NAMES[response_mode],
                "request_trailer_mode": "SEND",
                "response_trailer_mode": "SKIP" if response_mode is BodyMode.NONE else "SEND",
            }
            tree["static_resources"]["clusters"] = [
                {k: v for k, v in cluster.items() if k != "health_checks"}
                for cluster in tree["static_resources"]["clusters"]
            ]

        envoy = await stack.enter_async_context(running_envoy(options, edit))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Setup(envoy, picker, workers, client)


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """A chunked upload."""
    for start in range(0, len(body), 50_000):
        yield body[start : start + 50_000]


@every_pair
async def test_bodies_pass_unchanged_to_the_worker_that_was_picked(
    request_mode: BodyMode, response_mode: BodyMode
) -> None:
    async with setup(request_mode, response_mode) as s:
        for body in (b'{"model":"m"}', b"", bytes(range(256)) * 1600):
            for upload in (body, in_pieces(body)):
                status, answer, headers = await s.ask(upload, x_prefiller_host_port="10.0.0.9:22")
                account = json.loads(answer)
                assert (status, account["worker"]) == (200, s.workers[1].address)
                assert account["sha256"] == hashlib.sha256(body).hexdigest()
                assert account["headers"]["x-gateway-destination-endpoint"] == s.workers[1].address
                assert account["headers"]["x-added"] == "1"
                assert "x-prefiller-host-port" not in account["headers"]
                assert headers["x-session-token"] == "t"
                events = await s.events()
                (ready,) = [event for event in events if isinstance(event, RequestReady)]
                if request_mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX):
                    assert ready.body == body
                if response_mode is not BodyMode.NONE:
                    assert b"".join(e.data for e in events if isinstance(e, ResponseData)) == answer
                    assert [e.status for e in events if isinstance(e, ResponseHead)] == [200]
                    assert events[-1] == ResponseDone(complete=True)
        status, answer, _ = await s.ask(None, method="GET")
        assert (status, json.loads(answer)["worker"]) == (200, s.workers[1].address)
        assert not [event for events in s.picker.streams for event in events if isinstance(event, ProtocolFault)]


@every_pair
async def test_trailers_rewrites_transforms_and_refusals(request_mode: BodyMode, response_mode: BodyMode) -> None:
    async with setup(request_mode, response_mode) as s:
        for question in (b"5\r\nhello\r\n0\r\nx-question: why\r\n\r\n", b"0\r\nx-question: why\r\n\r\n"):
            answer = await with_trailers(s, question)
            assert b'"trailers": {"x-question": "why"}' in answer
            assert s.workers[1].address.encode() in answer
            assert answer.endswith(b"0\r\nx-answer: yes\r\n\r\n")

        if request_mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX):
            for upload in (b'{"model":"m"}', in_pieces(b'{"model":"m"}')):
                status, reply, _ = await s.ask(upload, x_ask="rewrite")
                assert (status, json.loads(reply)["length"]) == (200, len(b'{"model":"another one"}'))

        if response_mode not in (BodyMode.NONE, BodyMode.BUFFERED_PARTIAL):
            status, reply, _ = await s.ask(b"{}", x_ask="transform")
            assert (status, json.loads(reply)["the-worker"]) == (200, s.workers[1].address)
            status, reply, _ = await s.ask(b"{}", x_ask="transform", **echo(chunks=50))
            assert (status, reply.count(b"data: ")) == (200, 51)

        status, reply, headers = await s.ask(b"{}", x_ask="reject")
        assert (status, headers["content-type"], headers["retry-after"]) == (429, "application/json", "1")
        assert headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        assert json.loads(reply)["error"]["message"] == "full"

        status, reply, _ = await s.ask(bytes(LIMIT + 1))
        assert (status, json.loads(reply)["error"]["code"]) == (413, "request_too_large")
        if request_mode not in (BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL):
            assert (await s.ask(in_pieces(bytes(LIMIT + 1))))[0] == 413
        assert not [event for events in s.picker.streams for event in events if isinstance(event, ProtocolFault)]


@pytest.mark.parametrize("request_mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED], ids=lambda m: m.name)
async def test_response_bodies_that_nobody_reads_are_switched_off(request_mode: BodyMode) -> None:
    async with setup(request_mode, BodyMode.STREAMED, response_bodies=False) as s:
        status, answer, _ = await s.ask(b'{"model":"m"}')
        assert (status, json.loads(answer)["worker"]) == (200, s.workers[1].address)
        assert json.loads(answer)["length"] == 13
        kinds = [type(event) for event in await s.events()]
        assert kinds == [RequestReady, ResponseHead, ResponseDone]


@pytest.mark.parametrize(
    ("request_mode", "response_mode"),
    [(BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX), (BodyMode.BUFFERED, BodyMode.STREAMED)],
    ids=lambda mode: mode.name,
)
async def test_a_websocket_is_steered_where_the_filter_waits_for_bodies(
    request_mode: BodyMode, response_mode: BodyMode
) -> None:
    async with setup(request_mode, response_mode) as s:
        reader, writer = await asyncio.open_connection(s.envoy.host, s.envoy.port)
        try:
            writer.write(
                b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
                b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            )
            async with asyncio.timeout(10):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 101")
                assert s.workers[1].address.encode() in head
                for frame in (b"one", b"two"):
                    writer.write(frame)
                    assert await reader.readexactly(3) == frame
        finally:
            writer.close()


async def with_trailers(s: Setup, question: bytes) -> bytes:
    """A chunked request that ends by a trailer, and an answer that does."""
    reader, writer = await asyncio.open_connection(s.envoy.host, s.envoy.port)
    try:
        reply = echo(trailers={"x-answer": "yes"})["x_echo"]
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-echo: {reply}\r\nconnection: close\r\n"
            "trailer: x-question\r\ntransfer-encoding: chunked\r\n\r\n".encode()
            + question
        )
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()
