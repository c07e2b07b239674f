"""The wire level of ext_proc: hand-written readers and writers against the compiled schema, and hostile bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.gateway import errors
from epp.gateway import ext_proc_wire as wire
from epp.gateway.ext_proc import (
    ExtProcStream,
    Limits,
    ProtocolFault,
    RequestReady,
    ResponseData,
    ResponseDone,
    ResponseHead,
    Steering,
)
from epp.gateway.pb import ext_proc_pb2 as pb
from tests.gateway.ext_proc_peer import CHAT, OK, http_headers, metadata, subset_hint

names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12)
values = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)


def parsed(reply: bytes) -> pb.ProcessingResponse:
    message = pb.ProcessingResponse.FromString(reply)
    size = message.ByteSize()
    message.DiscardUnknownFields()
    assert message.ByteSize() == size, "a field the schema does not know"
    return message


def option(name: str, value: str) -> pb.HeaderValueOption:
    action = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return pb.HeaderValueOption(header=pb.HeaderValue(key=name, raw_value=value.encode()), append_action=action)


@given(
    set_headers=st.dictionaries(names, values, max_size=5),
    remove=st.lists(names, max_size=5),
    body=st.none() | st.binary(max_size=70_000),
    destination=st.sampled_from(["", "10.0.0.1:8000", "10.0.0.1:8000,[fd00::1]:8000"]),
    kind=st.sampled_from([wire.REQUEST_HEADERS, wire.REQUEST_BODY]),
)
def test_steered_replies_are_what_the_schema_says(
    set_headers: dict[str, str], remove: list[str], body: bytes | None, destination: str, kind: int
) -> None:
    reply = parsed(wire.steered_reply(kind, destination, wire.mutation(set_headers, remove), body))
    field = "request_headers" if kind == wire.REQUEST_HEADERS else "request_body"
    expected = pb.CommonResponse(
        header_mutation=pb.HeaderMutation(
            set_headers=[option(*item) for item in set_headers.items()],
            remove_headers=[name for name in remove if name not in set_headers],
        ),
        clear_route_cache=bool(destination),
    )
    if not expected.header_mutation.ByteSize():
        expected.ClearField("header_mutation")
    if body:
        expected.body_mutation.body = body
    elif body is not None:
        expected.body_mutation.clear_body = True
    assert reply.WhichOneof("response") == field
    assert getattr(reply, field).response == expected
    assert reply.HasField("dynamic_metadata") == bool(destination)


@given(body=st.binary(max_size=300) | st.integers(61_990, 130_000).map(bytes), end=st.booleans())
def test_streamed_chunks_are_what_the_schema_says(body: bytes, end: bool) -> None:
    for kind, field in ((wire.REQUEST_BODY, "request_body"), (wire.RESPONSE_BODY, "response_body")):
        replies = [parsed(reply) for reply in wire.streamed_chunks(kind, body, end=end)]
        assert {reply.WhichOneof("response") for reply in replies} <= {field}
        chunks = [getattr(reply, field).response.body_mutation.streamed_response for reply in replies]
        assert b"".join(chunk.body for chunk in chunks) == body
        assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(chunks) - 1) + [end] * bool(chunks)


@given(body=st.binary(max_size=70_000), end=st.booleans(), compressed=st.booleans())
def test_an_echoed_chunk_is_the_body_message_with_all_its_fields(body: bytes, end: bool, compressed: bool) -> None:
    content = pb.HttpBody(body=body, end_of_stream=end, grpc_message_compressed=compressed)
    message = pb.ProcessingRequest(response_body=content).SerializeToString()
    frame = wire.read_message(message)
    echoed = parsed(wire.echo_chunk(frame.kind, message, frame.start, frame.end))
    streamed = echoed.response_body.response.body_mutation.streamed_response
    assert streamed == pb.StreamedBodyResponse(body=body, end_of_stream=end, grpc_message_compressed=compressed)


@pytest.mark.parametrize("kind", range(2, 8))
def test_the_reply_that_lets_a_message_pass_is_an_empty_one_of_its_kind(kind: int) -> None:
    oneof = pb.ProcessingRequest.DESCRIPTOR.oneofs_by_name["request"]
    (name,) = [field.name for field in oneof.fields if field.number == kind]
    assert parsed(wire.CONTINUE[kind]).WhichOneof("response") == name


def test_an_immediate_reply_carries_the_whole_rejection() -> None:
    rejection = errors.too_many_requests("rejected-saturated", "full", retry_after_s=2)
    reply = parsed(wire.immediate_reply(rejection)).immediate_response
    assert (reply.status.code, reply.body, reply.details) == (429, rejection.body, "rejected-saturated")
    assert list(reply.headers.set_headers) == [option(*item) for item in rejection.headers.items()]


@pytest.mark.parametrize("mode", range(5))
def test_a_mode_override_says_both_body_modes(mode: int) -> None:
    override = parsed(wire.mode_override(mode, 4 - mode)).mode_override
    assert (override.request_body_mode, override.response_body_mode) == (mode, 4 - mode)


@given(
    body=st.binary(max_size=300),
    end=st.booleans(),
    observed=st.booleans(),
    config=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()),
)
def test_messages_are_read_as_the_schema_reads_them(
    body: bytes, end: bool, observed: bool, config: tuple[int, int, bool] | None
) -> None:
    message = pb.ProcessingRequest(
        request_body=pb.HttpBody(body=body, end_of_stream=end),
        observability_mode=observed,
        metadata_context=subset_hint(["10.0.0.1:8000"]),
    )
    if config is not None:
        message.protocol_config.SetInParent()
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode, eager = config  # type: ignore[assignment]
        message.protocol_config.send_body_without_waiting_for_header_response = eager
    data = message.SerializeToString()
    frame = wire.read_message(data)
    assert (frame.kind, frame.observability) == (wire.REQUEST_BODY, observed)
    start, stop, ended = wire.read_body(data, frame.start, frame.end)
    assert (data[start:stop], ended) == (body, end)
    assert frame.metadata is not None
    assert wire.read_subset(data[slice(*frame.metadata)]) == frozenset({"10.0.0.1:8000"})
    assert config == (None if frame.config is None else wire.read_config(data[slice(*frame.config)]))


def test_fields_of_a_newer_protocol_are_passed_over() -> None:
    body = pb.HttpBody(body=b"ab", end_of_stream=True).SerializeToString()
    newer = b"\x98\x06\x01" + b"\xa2\x06\x02xy" + b"\xa9\x06" + bytes(8) + b"\xad\x06" + bytes(4)  # fields 99 to 101
    inner = newer + body
    frame = wire.read_message(newer + b"\x2a" + bytes((len(inner),)) + inner + newer)
    assert frame.kind == wire.RESPONSE_BODY
    message = newer + b"\x2a" + bytes((len(inner),)) + inner + newer
    start, stop, end = wire.read_body(message, frame.start, frame.end)
    assert (message[start:stop], end) == (b"ab", True)


@pytest.mark.parametrize(
    "message",
    [
        b"\x22",  # no length
        b"\x22\x05ab",  # longer than the message
        b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of more than ten bytes
        b"\x22\x03\x0a\x05a",  # a body longer than its message
        b"\x22\x02\x10\x80\x50\x01",  # a flag that runs on into the next field
        b"\x0b",  # a group
        b"\x00\x00",  # field number 0
        b"\x12\x02\xff\xff",  # headers that are none
        b"\x12\x06\x0a\x04\x0a\x02\x0a\x05",  # a header cut short
        b"\x12\x00\x42\x02\xff\xff",  # metadata that is none
        b"\x12\x02\x18\x01\x5a\x02\xff\xff",  # a configuration that is none
        b"\x12\x07\x0a\x05\x0a\x03\x12\x01\xff",  # a `value` outside UTF-8, which a string may not hold
    ],
)
def test_malformed_messages_are_a_protocol_fault_and_nothing_else(message: bytes) -> None:
    stream = ExtProcStream()
    stream.receive(pb.ProcessingRequest(request_headers=http_headers(CHAT)).SerializeToString())
    if message[0] == 0x12:
        stream = ExtProcStream()
    events = list(stream.receive(message))
    if message.startswith(b"\x12\x00\x42"):
        events += stream.receive(pb.ProcessingRequest(request_body=pb.HttpBody(end_of_stream=True)).SerializeToString())
    assert [type(event) for event in events] == [ProtocolFault]
    assert stream.take() == []
    assert stream.receive(message) == ()


def recording() -> list[bytes]:
    """The messages of one exchange."""
    served = metadata(envoy__lb={"x-gateway-destination-endpoint-served": "10.0.0.2:8000"})
    config = pb.ProtocolConfiguration(
        request_body_mode=pb.ProcessingMode.FULL_DUPLEX_STREAMED,
        response_body_mode=pb.ProcessingMode.FULL_DUPLEX_STREAMED,
    )
    messages = [
        pb.ProcessingRequest(
            request_headers=http_headers(CHAT), protocol_config=config, metadata_context=subset_hint(["10.0.0.1:8000"])
        ),
        pb.ProcessingRequest(request_body=pb.HttpBody(body=b'{"model":"m"}')),
        pb.ProcessingRequest(request_body=pb.HttpBody(end_of_stream=True)),
        pb.ProcessingRequest(response_headers=http_headers(OK), metadata_context=served),
        pb.ProcessingRequest(response_body=pb.HttpBody(body=b"data: 1\n\n" * 20)),
        pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
    ]
    return [message.SerializeToString() for message in messages]


def mutated(random_: random.Random, message: bytes) -> bytes:
    data = bytearray(message)
    for _ in range(random_.randrange(1, 4)):
        place = random_.randrange(len(data) + 1)
        match random_.randrange(4):
            case 0:
                data[place : place + random_.randrange(4)] = random_.randbytes(random_.randrange(4))
            case 1:
                data = data[:place]
            case 2 if data:
                data[place % len(data)] ^= 1 << random_.randrange(8)
            case _:
                data += data[:place]
    return bytes(data)


def test_mutated_and_shuffled_messages_never_raise_and_every_pick_is_released_once() -> None:
    random_ = random.Random(20)
    messages = recording()
    faults = 0
    for _ in range(30_000):
        stream = ExtProcStream(Limits(max_request_bytes=100))
        events = []
        for message in messages if random_.random() < 0.7 else random_.sample(messages, len(messages)):
            new = list(stream.receive(mutated(random_, message) if random_.random() < 0.3 else message))
            if any(isinstance(event, RequestReady) for event in new):
                stream.steer(Steering(("10.0.0.1:8000",)))
            events += new
            for reply in stream.take():
                pb.ProcessingResponse.FromString(reply)
        events += [*stream.half_closed(), *stream.closed()]
        kinds = [type(event) for event in events]
        faults += ProtocolFault in kinds
        assert kinds.count(RequestReady) <= 1
        assert kinds.count(ProtocolFault) <= 1
        begun = not {RequestReady, ResponseHead, ResponseData}.isdisjoint(kinds)
        assert kinds.count(ResponseDone) == begun
    assert 3_000 < faults < 27_000
