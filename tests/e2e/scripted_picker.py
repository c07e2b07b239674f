"""A picker that answers what a test told it to: for tests of the Envoy configuration alone.

It speaks ext_proc with the dataclasses of `envoy-data-plane` over grpc.aio, so it shares no code with the product.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from envoy_data_plane.envoy.config.core.v3 import HeaderValue, HeaderValueOption
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy_data_plane.google.protobuf import Struct, Value

DESTINATION = "x-gateway-destination-endpoint"
SERVED = f"{DESTINATION}-served"
CHUNK = 62_000


@dataclass(slots=True)
class ScriptedPicker:
    """Names `destinations` (comma list) for every request. Counters say what Envoy showed it."""

    destinations: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    """More keys for the namespace `envoy.lb`."""
    serving: bool = True
    """What its health check says."""
    hold: float = 0.0
    """Seconds before it names an endpoint."""
    streams: int = 0
    resets: int = 0
    """Streams that Envoy ended by a reset."""
    served: list[str] = field(default_factory=list)
    """The endpoint Envoy says it used, per response shown."""
    seen: list[dict[str, str]] = field(default_factory=list)
    """The request headers of every stream."""
    observed: bytearray = field(default_factory=bytearray)
    """Response bytes shown by observing streams."""

    async def shown(self) -> bytes:
        return bytes(self.observed)

    async def process(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        self.streams += 1
        try:
            async for reply in self._replies(requests):
                yield bytes(reply)
        except asyncio.CancelledError:
            self.resets += 1
            raise

    async def _replies(self, requests: AsyncIterator[bytes]) -> AsyncIterator[ProcessingResponse]:
        full_duplex = observing = False
        body = bytearray()
        async for raw in requests:
            message = ProcessingRequest.parse(raw)
            if message.protocol_config is not None:
                mode = message.protocol_config.request_body_mode
                full_duplex = mode == ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
            observing = observing or message.observability_mode
            if observing:
                if message.response_body is not None:
                    self.observed += message.response_body.body
                continue
            if message.request_headers is not None:
                fields = message.request_headers.headers.headers if message.request_headers.headers else []
                self.seen.append({h.key: h.raw_value.decode("latin-1") for h in fields})
                held = full_duplex and not message.request_headers.end_of_stream
                if not held:
                    last = mode == ProcessingModeBodySendMode.NONE or message.request_headers.end_of_stream
                    yield await self._pick() if last else ProcessingResponse(request_headers=HeadersResponse())
            elif message.request_body is not None and not full_duplex:
                pick = await self._pick()
                assert pick.request_headers is not None
                yield ProcessingResponse(
                    request_body=BodyResponse(response=pick.request_headers.response),
                    dynamic_metadata=pick.dynamic_metadata,
                )
            elif message.request_body is not None:
                body += message.request_body.body
                if message.request_body.end_of_stream:
                    yield await self._pick()
                    for chunk in _streamed(bytes(body), last=True):
                        yield ProcessingResponse(request_body=chunk)
            elif message.request_trailers is not None:
                yield await self._pick()
                for chunk in _streamed(bytes(body), last=False):
                    yield ProcessingResponse(request_body=chunk)
                yield ProcessingResponse(request_trailers=TrailersResponse())
            elif message.response_headers is not None:
                if message.metadata_context and (lb := message.metadata_context.filter_metadata.get("envoy.lb")):
                    self.served += [v.string_value for k, v in lb.fields.items() if k == SERVED and v.string_value]
                yield ProcessingResponse(response_headers=HeadersResponse())
            elif message.response_body is not None:
                for chunk in _streamed(message.response_body.body, last=message.response_body.end_of_stream):
                    yield ProcessingResponse(response_body=chunk)
            elif message.response_trailers is not None:
                yield ProcessingResponse(response_trailers=TrailersResponse())

    async def _pick(self) -> ProcessingResponse:
        await asyncio.sleep(self.hold)
        header = HeaderValueOption(header=HeaderValue(key=DESTINATION, raw_value=self.destinations.encode()))
        metadata = {DESTINATION: self.destinations, **self.metadata}
        lb = Struct(fields={key: Value(string_value=value) for key, value in metadata.items()})
        return ProcessingResponse(
            request_headers=HeadersResponse(
                response=CommonResponse(header_mutation=HeaderMutation(set_headers=[header]), clear_route_cache=True)
            ),
            dynamic_metadata=Struct(fields={"envoy.lb": Value(struct_value=lb)}),
        )

    async def check(self, request: bytes, context: object) -> bytes:
        """`grpc.health.v1.Health/Check`: field 1 is the status, 1 = SERVING, 2 = NOT_SERVING."""
        return b"\x08\x01" if self.serving else b"\x08\x02"


def _streamed(body: bytes, *, last: bool) -> list[BodyResponse]:
    cuts = range(0, max(len(body), 1), CHUNK)
    return [
        BodyResponse(
            response=CommonResponse(
                body_mutation=BodyMutation(
                    streamed_response=StreamedBodyResponse(
                        body=body[at : at + CHUNK], end_of_stream=last and at == cuts[-1]
                    )
                )
            )
        )
        for at in cuts
    ]


@asynccontextmanager
async def running_picker(address: str) -> AsyncIterator[ScriptedPicker]:
    """A picker on `address` (`unix:/path` or `ip:port`), stopped at the end."""
    picker = ScriptedPicker()
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_concurrent_streams", 100_000)]
    )
    process = grpc.stream_stream_rpc_method_handler(picker.process)
    check = grpc.unary_unary_rpc_method_handler(picker.check)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("envoy.service.ext_proc.v3.ExternalProcessor", {"Process": process}),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
        )
    )
    server.add_insecure_port(address)
    await server.start()
    try:
        yield picker
    finally:
        await server.stop(0)
