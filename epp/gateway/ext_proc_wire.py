"""ext_proc messages on the wire: reading what Envoy sends, writing what it gets.

In: serialised `ProcessingRequest`s. Out: serialised `ProcessingResponse`s. proto/ext_proc.proto is the schema; tests
check every writer here against the compiled schema.

The outer message and bodies are read by hand, because a body is then one slice of the message (parsing a 400 KB body
through upb and serialising it again costs 700 us, this 20 us) and a response chunk can be sent back without being
taken apart: the fields of `HttpBody` and of `StreamedBodyResponse` are the same, number by number. Headers and
metadata are parsed by upb, which is faster than Python there. Replies that depend on nothing are constants, those that
depend on the destination alone are cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final

import msgspec
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

from epp.gateway.errors import Rejection
from epp.gateway.pb import ext_proc_pb2 as pb
from epp.request import Headers

MAX_CHUNK: Final = 62_000
"""Body bytes in one streamed reply: Envoy's limit of 64 KiB less room for what is around them."""

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVED: Final = "x-gateway-destination-endpoint-served"
FLIGHT: Final = "x-kvsteer-flight"
DATA_PARALLEL_RANK: Final = "x-data-parallel-rank"
"""Picks the engine behind a port that has several (vLLM)."""

CONTROL_HEADERS: Final = (
    DESTINATION,
    SUBSET,
    SERVED,
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
    DATA_PARALLEL_RANK,
    "x-gateway-inference-fairness-id",
    "x-gateway-inference-objective",
    "x-gateway-model-name-rewrite",
)
"""Headers that steer: the picker may read a client's, a worker gets only the picker's own."""

# Field numbers of ProcessingRequest's oneof; those of ProcessingResponse's are one less.
REQUEST_HEADERS: Final = 2
RESPONSE_HEADERS: Final = 3
REQUEST_BODY: Final = 4
RESPONSE_BODY: Final = 5
REQUEST_TRAILERS: Final = 6
RESPONSE_TRAILERS: Final = 7


class MalformedMessage(ValueError):
    """The bytes are not the message they should be."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """Where the parts of one ProcessingRequest lie. `kind` is the oneof's field number, 0 when there is none."""

    kind: int
    start: int
    end: int
    metadata: tuple[int, int] | None
    config: tuple[int, int] | None
    observability: bool


# ---- reading


def read_message(message: bytes) -> Frame:
    """Find the parts of a ProcessingRequest; unknown fields are passed over."""
    i, size = 0, len(message)
    kind = start = end = 0
    metadata = config = None
    observability = False
    try:
        while i < size:
            tag = message[i]
            i += 1
            if tag & 0x87 != 2:  # not (one tag byte and length-delimited)
                if tag == 0x50:  # observability_mode
                    value, i = _varint(message, i)
                    observability = value != 0
                else:
                    i = _skip(message, i - 1)
                continue
            length = message[i]
            i += 1
            if length > 127:
                length, i = _varint(message, i - 1)
            stop = i + length
            if stop > size:
                raise MalformedMessage("a field is longer than its message")
            number = tag >> 3
            if 2 <= number <= 7:
                kind, start, end = number, i, stop
            elif number == 8:
                metadata = (i, stop)
            elif number == 11:
                config = (i, stop)
            i = stop
    except IndexError:
        raise MalformedMessage("the message is cut short") from None
    if i != size:
        raise MalformedMessage("a field is longer than its message")
    return Frame(kind, start, end, metadata, config, observability)


def read_body(message: bytes, start: int, end: int) -> tuple[int, int, bool]:
    """HttpBody at [start, end): where its bytes lie, and end_of_stream."""
    i = start
    first = last = start
    end_of_stream = False
    try:
        while i < end:
            tag = message[i]
            if tag == 0x0A:  # body
                first, i = i + 1, i + 1
                length, first = _varint(message, first)
                last = i = first + length
            elif tag == 0x10:  # end_of_stream
                value, i = _varint(message, i + 1)
                end_of_stream = value != 0
            else:
                i = _skip(message, i)
    except IndexError:
        raise MalformedMessage("the message is cut short") from None
    if i != end:
        raise MalformedMessage("a body is longer than its message")
    return first, last, end_of_stream


def read_headers(serialised: bytes) -> tuple[Headers, bool]:
    """HttpHeaders: the fields, and end_of_stream. Envoy fills `raw_value`, other proxies `value`."""
    try:
        message = pb.HttpHeaders.FromString(serialised)
    except DecodeError as error:
        raise MalformedMessage(f"headers: {error}") from None
    fields: dict[str, list[bytes]] = {}
    for header in message.headers.headers:
        value = header.raw_value or header.value.encode()
        name = header.key.lower()
        if name in fields:
            fields[name].append(value)
        else:
            fields[name] = [value]
    return Headers(fields), message.end_of_stream


@lru_cache(maxsize=16)
def read_config(serialised: bytes) -> tuple[int, int, bool]:
    """ProtocolConfiguration: request mode, response mode, whether bodies do not wait for the header reply."""
    try:
        config = pb.ProtocolConfiguration.FromString(serialised)
    except DecodeError as error:
        raise MalformedMessage(f"protocol_config: {error}") from None
    return config.request_body_mode, config.response_body_mode, config.send_body_without_waiting_for_header_response


def read_subset(serialised: bytes) -> frozenset[str] | None:
    """The gateway's subset hint in a serialised Metadata; None when it gives none.

    A list of strings or one string with commas. Entries are `ip:port`, IPv6 in brackets, or a bare address (IPv6 then
    without brackets), which stands for each of its ports. A hint that is there but names nothing is the empty set: no
    endpoint is allowed.
    """
    space = _filter_metadata(serialised, "envoy.lb.subset_hint")
    if space is None or SUBSET not in space.fields:
        return None
    hint = space.fields[SUBSET]
    match hint.WhichOneof("kind"):
        case "list_value":
            entries = [v.string_value for v in hint.list_value.values]
        case "string_value":
            entries = hint.string_value.split(",")
        case "null_value":
            return None
        case _:
            entries = []
    return frozenset(_canonical(entry) for entry in entries if entry.strip())


def read_served(serialised: bytes) -> str:
    """The endpoint that served, as the gateway reports it in a serialised Metadata; "" when it does not."""
    space = _filter_metadata(serialised, "envoy.lb")
    if space is None or SERVED not in space.fields:
        return ""
    return str(space.fields[SERVED].string_value).strip()


def read_flight(serialised: bytes) -> str:
    """The picker's own key of the request (`Steering.flight`) in a serialised Metadata; "" when there is none."""
    space = _filter_metadata(serialised, "envoy.lb")
    return str(space.fields[FLIGHT].string_value) if space is not None and FLIGHT in space.fields else ""


def _canonical(entry: str) -> str:
    entry = entry.strip().lower()
    return entry[1:-1] if entry.startswith("[") and entry.endswith("]") else entry


def _filter_metadata(serialised: bytes, namespace: str) -> Struct | None:
    try:
        spaces = pb.Metadata.FromString(serialised).filter_metadata
    except DecodeError as error:
        raise MalformedMessage(f"metadata_context: {error}") from None
    return spaces.get(namespace)


def _varint(message: bytes, i: int) -> tuple[int, int]:
    value = message[i]
    i += 1
    if value < 128:
        return value, i
    value &= 127
    for shift in range(7, 70, 7):
        byte = message[i]
        i += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, i
    raise MalformedMessage("a number is longer than ten bytes")


def _skip(message: bytes, i: int) -> int:
    """The index after the field whose tag is at `i`."""
    tag, i = _varint(message, i)
    if tag < 8:
        raise MalformedMessage("field number 0")
    match tag & 7:
        case 0:
            return _varint(message, i)[1]
        case 1:
            return i + 8
        case 2:
            length, i = _varint(message, i)
            return i + length
        case 5:
            return i + 4
        case wire_type:
            raise MalformedMessage(f"wire type {wire_type}")


# ---- writing


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, payload: bytes) -> bytes:
    """One length-delimited field (numbers below 16)."""
    return bytes((number << 3 | 2,)) + _number(len(payload)) + payload


CONTINUE: Final = {kind: _field(kind - 1, b"") for kind in range(REQUEST_HEADERS, RESPONSE_TRAILERS + 1)}
"""Kind of a message -> the reply that lets it pass unchanged."""

_OVERWRITE: Final = b"\x18\x02"  # HeaderValueOption.append_action = OVERWRITE_IF_EXISTS_OR_ADD
_CLEAR_ROUTE_CACHE: Final = b"\x28\x01"  # CommonResponse.clear_route_cache = true
_CLEAR_BODY: Final = b"\x10\x01"  # BodyMutation.clear_body = true
_END_OF_STREAM: Final = b"\x10\x01"  # StreamedBodyResponse.end_of_stream = true


def mutation(set_headers: Mapping[str, str], remove_headers: Iterable[str] = ()) -> bytes:
    """The payload of a HeaderMutation. A name that is set is not removed, in whatever order a proxy does the two."""
    parts = [
        _field(1, _field(1, _field(1, name.encode()) + _field(3, value.encode())) + _OVERWRITE)
        for name, value in set_headers.items()
    ]
    parts += [_field(2, name.encode()) for name in remove_headers if name not in set_headers]
    return b"".join(parts)


@lru_cache(maxsize=4096)
def steering_mutation(destination: str, rank: int | None = None) -> bytes:
    """The HeaderMutation of a request that goes to `destination` ("" = Envoy's choice) with nothing else to change."""
    return mutation(steering_headers(destination, rank), CONTROL_HEADERS)


def steering_headers(destination: str, rank: int | None) -> dict[str, str]:
    """What tells Envoy the destination, and the worker the rank."""
    headers = {DESTINATION: destination} if destination else {}
    if rank is not None:
        headers[DATA_PARALLEL_RANK] = str(rank)
    return headers


def lb_metadata(destination: str, told: Mapping[str, str]) -> bytes:
    """The dynamic_metadata field: in namespace `envoy.lb` what the destination header says, and what else is `told`."""
    fields = {**told, DESTINATION: destination} if destination else told
    return _field(
        8, _entry("envoy.lb", _field(5, b"".join(_entry(k, _field(3, v.encode())) for k, v in fields.items())))
    )


def _entry(key: str, value: bytes) -> bytes:
    """An entry of a google.protobuf.Struct's map; `value` is a serialised Value."""
    return _field(1, _field(1, key.encode()) + _field(2, value))


@lru_cache(maxsize=4096)
def destination_metadata(destination: str) -> bytes:
    """`lb_metadata` with nothing else told."""
    return lb_metadata(destination, {}) if destination else b""


@lru_cache(maxsize=4096)
def destination_reply(kind: int, destination: str, rank: int | None = None) -> bytes:
    """The whole reply to request headers or to a buffered body that sets the destination and changes nothing else."""
    return steered_reply(kind, destination, steering_mutation(destination, rank), None)


def steered_reply(
    kind: int, destination: str, headers: bytes, body: bytes | None, told: Mapping[str, str] | None = None
) -> bytes:
    """The reply to request headers or a buffered body; `headers` is a HeaderMutation, `body` replaces the body."""
    route = _CLEAR_ROUTE_CACHE if destination else b""
    metadata = lb_metadata(destination, told) if told else destination_metadata(destination)
    return common_reply(kind, headers, body, route) + metadata


def common_reply(kind: int, headers: bytes, body: bytes | None, tail: bytes = b"") -> bytes:
    """A reply with a CommonResponse: a HeaderMutation's payload, and a body in the place of the one that came."""
    mutated = _field(2, headers) if headers else b""
    if body is None:
        return _field(kind - 1, _field(1, mutated + tail))
    if not body:
        return _field(kind - 1, _field(1, mutated + _field(3, _CLEAR_BODY) + tail))
    prefix = b"\x0a" + _number(len(body))
    prefix = b"\x1a" + _number(len(prefix) + len(body)) + prefix
    length = len(mutated) + len(prefix) + len(body) + len(tail)
    inner = b"\x0a" + _number(length) + mutated + prefix
    outer = bytes(((kind - 1) << 3 | 2,)) + _number(len(inner) + len(body) + len(tail))
    return b"".join((outer, inner, body, tail))


def trailers_reply(kind: int, destination: str) -> bytes:
    """The reply to trailers that were all there was to answer: headers are gone, so only metadata can steer."""
    return CONTINUE[kind] + destination_metadata(destination)


def mode_override(request_mode: int, response_mode: int) -> bytes:
    """The mode_override field: body modes from here on (ProcessingMode fields 3 and 4); headers stay as they are."""
    return _field(9, b"\x18" + _number(request_mode) + b"\x20" + _number(response_mode))


def immediate_reply(rejection: Rejection) -> bytes:
    """An ImmediateResponse: Envoy answers the client with it and asks nothing more."""
    parts = [_field(1, b"\x08" + _number(rejection.status)), _field(2, mutation(rejection.headers))]
    parts.append(_field(3, rejection.body))
    if rejection.reason:
        parts.append(_field(5, rejection.reason.encode()))
    return _field(7, b"".join(parts))


def streamed_chunks(kind: int, body: bytes, *, end: bool) -> Iterator[bytes]:
    """Replies that stream `body` in full-duplex mode; `end` puts end_of_stream on the last, even on an empty one."""
    if 0 < len(body) <= MAX_CHUNK:
        tail = _END_OF_STREAM if end else b""
        prefix = b"\x0a" + _number(len(body))
        yield b"".join((_streamed_prefix(kind, len(prefix) + len(body) + len(tail)), prefix, body, tail))
        return
    view = memoryview(body)
    for start in range(0, len(body), MAX_CHUNK):
        piece = view[start : start + MAX_CHUNK]
        last = end and start + MAX_CHUNK >= len(body)
        tail = _END_OF_STREAM if last else b""
        prefix = b"\x0a" + _number(len(piece))
        size = len(prefix) + len(piece) + len(tail)
        yield b"".join((_streamed_prefix(kind, size), prefix, piece, tail))
    if end and not body:
        yield _streamed_prefix(kind, len(_END_OF_STREAM)) + _END_OF_STREAM


def echo_chunk(kind: int, message: bytes, start: int, end: int) -> bytes:
    """The reply that streams the HttpBody at [start, end) back as it came (it holds at most `MAX_CHUNK` bytes)."""
    return _streamed_prefix(kind, end - start) + message[start:end]


@lru_cache(maxsize=8192)
def _streamed_prefix(kind: int, size: int) -> bytes:
    """What precedes a serialised StreamedBodyResponse of `size` bytes in a reply to a body message."""
    streamed = b"\x1a" + _number(size)
    mutated = b"\x1a" + _number(len(streamed) + size) + streamed
    common = b"\x0a" + _number(len(mutated) + size) + mutated
    return bytes(((kind - 1) << 3 | 2,)) + _number(len(common) + size) + common
