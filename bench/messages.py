"""What Envoy sends over one ext_proc stream, as serialized messages."""

from __future__ import annotations

from epp.gateway.ext_proc import BodyMode
from epp.gateway.pb import ext_proc_pb2 as pb


def request(mode: BodyMode, body: bytes) -> list[bytes]:
    """A chat request: its headers, its body, in full duplex an empty end of it."""
    config = pb.ProtocolConfiguration()
    config.request_body_mode = int(mode)  # type: ignore[assignment]
    if mode is BodyMode.FULL_DUPLEX:
        config.response_body_mode = int(mode)  # type: ignore[assignment]
    duplex = mode is BodyMode.FULL_DUPLEX
    messages = [pb.ProcessingRequest(request_headers=_request_headers(), protocol_config=config)]
    messages.append(pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=not duplex)))
    if duplex:
        messages.append(pb.ProcessingRequest(request_body=pb.HttpBody(end_of_stream=True)))
    return [message.SerializeToString() for message in messages]


def response_head(content_type: bytes = b"text/event-stream") -> bytes:
    """The head of an answer."""
    fields = [(":status", b"200"), ("content-type", content_type), *_filler(4)]
    return pb.ProcessingRequest(response_headers=_headers(fields)).SerializeToString()


def response_chunk(data: bytes, *, end: bool = False) -> bytes:
    """A piece of the response body."""
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=end)).SerializeToString()


def _request_headers() -> pb.HttpHeaders:
    """About what Envoy sends for a chat request: 20 headers, 700 bytes."""
    fields = [(":method", b"POST"), (":path", b"/v1/chat/completions"), ("content-type", b"application/json")]
    fields.append(("x-request-id", b"0d3e8b6a-51f5-4a43-9b3a-3d1b0f0c9a11"))  # Envoy gives one to every request
    return _headers([*fields, *_filler(16)])


def _filler(count: int) -> list[tuple[str, bytes]]:
    return [(f"x-header-{n:02}", b"0123456789abcdefghij") for n in range(count)]


def _headers(fields: list[tuple[str, bytes]]) -> pb.HttpHeaders:
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=[pb.HeaderValue(key=k, raw_value=v) for k, v in fields]))
