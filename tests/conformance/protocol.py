"""A gateway as the endpoint-picker protocol has it, to drive a picker from outside: gRPC, and nothing of ours.

`Gateway.ask` plays one HTTP exchange over ext_proc in FULL_DUPLEX_STREAMED mode and gives what the picker told: the
destination in the header and in the metadata, or its own answer; the body that goes to the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from epp.gateway.pb import ext_proc_pb2 as pb
from epp.gateway.pb import health_pb2
from tests.gateway.ext_proc_peer import Fields, http_headers

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
POST: Fields = ((":method", b"POST"), (":path", b"/v1/completions"), ("content-type", b"application/json"))
PROMPT = b'{"model": "m", "prompt": "Hello"}'
FULL_DUPLEX = pb.ProtocolConfiguration(request_body_mode=4, response_body_mode=4)  # type: ignore[arg-type]
WITHIN_S = 20.0


@dataclass(slots=True)
class Told:
    """What a picker told about one request."""

    headers: dict[str, list[str]] = field(default_factory=dict)
    """Request headers it sets, each with its values."""
    removed: list[str] = field(default_factory=list)
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)
    body: bytes = b""
    ends: int = 0
    """How often it said that the request's body ends."""
    replies: int = 0
    response_headers: dict[str, list[str]] = field(default_factory=dict)
    """Response headers it sets; filled by `Gateway.respond`."""
    immediate: pb.ImmediateResponse | None = None

    @property
    def status(self) -> int:
        """Of the picker's own answer; 0: it let the request go on."""
        return int(self.immediate.status.code) if self.immediate is not None else 0

    @property
    def header(self) -> list[str]:
        """The destinations in the header, in order."""
        (value,) = self.headers[DESTINATION]
        return value.split(",")

    @property
    def dynamic(self) -> list[str]:
        """The destinations in the dynamic metadata, in order."""
        return str(self.metadata["envoy.lb"][DESTINATION]).split(",")

    def take(self, reply: pb.ProcessingResponse) -> None:
        self.replies += 1
        kind = reply.WhichOneof("response")
        if kind == "immediate_response":
            self.immediate = reply.immediate_response
            return
        for space, values in reply.dynamic_metadata.fields.items():
            self.metadata.setdefault(space, {}).update(dict(values.struct_value.items()))
        common = getattr(reply, str(kind)).response if kind in HEADS | BODIES else None
        if common is None:
            return
        headers = self.response_headers if kind == "response_headers" else self.headers
        for option in common.header_mutation.set_headers:
            value = option.header.raw_value.decode() or option.header.value
            headers.setdefault(option.header.key.lower(), []).append(value)
        self.removed += common.header_mutation.remove_headers
        if kind == "request_body":
            chunk = common.body_mutation.streamed_response
            self.body += chunk.body
            self.ends += chunk.end_of_stream


HEADS = {"request_headers", "response_headers"}
BODIES = {"request_body", "response_body"}


class Gateway:
    """One channel to a picker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._process = channel.stream_stream(METHOD)
        self._channel = channel

    async def health(self, name: str) -> int:
        """`grpc.health.v1` Check: 1 serving, 2 not serving; raises grpc.RpcError for an unknown name."""
        check = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        answer = await check(health_pb2.HealthCheckRequest(service=name).SerializeToString(), timeout=WITHIN_S)
        return int(health_pb2.HealthCheckResponse.FromString(answer).status)

    async def ask(
        self,
        chunks: Iterable[bytes] | None = (PROMPT,),
        *,
        fields: Fields = POST,
        metadata: pb.Metadata | None = None,
        served: str = "",
    ) -> Told:
        """One exchange: the request whole (`chunks` None: headers only), then a response that `served` gave."""
        call, told = self._process(timeout=WITHIN_S), Told()
        messages = [pb.ProcessingRequest(request_headers=http_headers(fields, end=chunks is None))]
        if chunks is not None:
            pieces = list(chunks)
            messages += [pb.ProcessingRequest(request_body=pb.HttpBody(body=piece)) for piece in pieces]
            messages.append(pb.ProcessingRequest(request_body=pb.HttpBody(end_of_stream=True)))
        messages[0].protocol_config.CopyFrom(FULL_DUPLEX)
        for message in messages:
            if metadata is not None:
                message.metadata_context.CopyFrom(metadata)
            await call.write(message.SerializeToString())
        while told.immediate is None and not (told.ends or (chunks is None and told.replies)):
            told.take(pb.ProcessingResponse.FromString(await call.read()))
        if told.immediate is None:
            await self._respond(call, told, served)
        await call.done_writing()
        while (rest := await call.read()) is not grpc.aio.EOF:
            told.take(pb.ProcessingResponse.FromString(rest))
        return told

    async def _respond(self, call: Any, told: Told, served: str) -> None:
        head = pb.ProcessingRequest(response_headers=http_headers(((":status", b"200"),), end=True))
        if served:
            head.metadata_context.filter_metadata["envoy.lb"].update({SERVED: served})
        await call.write(head.SerializeToString())
        told.take(pb.ProcessingResponse.FromString(await call.read()))


@asynccontextmanager
async def gateway(address: str) -> AsyncIterator[Gateway]:
    """A gateway that speaks to the picker at `address` in plain text."""
    async with grpc.aio.insecure_channel(address) as channel:
        async with asyncio.timeout(WITHIN_S):
            await channel.channel_ready()
        yield Gateway(channel)


def subset(value: Any) -> pb.Metadata:
    """Metadata with the subset hint: a list, or whatever a gateway may write in its place."""
    message = pb.Metadata()
    message.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: value})
    return message
