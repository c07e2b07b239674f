"""The response side of an ext_proc stream, in every body mode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.gateway.ext_proc import (
    BodyMode,
    Event,
    ExtProcStream,
    ProtocolFault,
    ResponseData,
    ResponseDone,
    ResponseHead,
    Steering,
)
from epp.gateway.pb import ext_proc_pb2 as pb
from tests.gateway.ext_proc_peer import CHAT, OK, Peer, cut, http_headers, metadata

MODES = [BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL, BodyMode.FULL_DUPLEX]
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


class Shout:
    """A transform that holds back an `a` until it knows what follows: `ab` becomes `[AB]`."""

    def __init__(self) -> None:
        self.kept = b""

    def feed(self, data: bytes, end: bool) -> bytes | None:
        data = self.kept + data
        self.kept = b"a" if data.endswith(b"a") and not end else b""
        return data[: len(data) - len(self.kept)].replace(b"ab", b"[AB]")


def steered(mode: BodyMode, steering: Steering | None = None) -> Peer:
    """A stream whose request is through."""
    answer = steering or Steering(("10.0.0.1:8000",))
    envoy = Peer(ExtProcStream(), BodyMode.BUFFERED, mode, decide=lambda _: answer)
    envoy.request(CHAT, [b"{}"])
    envoy.events.clear()
    envoy.replies.clear()
    return envoy


def seen(events: list[Event]) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, ResponseData))


@given(
    body=st.binary(max_size=200),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    mode=st.sampled_from(MODES),
    trailers=st.booleans(),
)
def test_however_a_response_is_cut_client_and_picker_see_the_same(
    body: bytes, cuts: list[int], mode: BodyMode, trailers: bool
) -> None:
    envoy = steered(mode)
    envoy.response(OK, cut(body, cuts), trailers=trailers)
    assert envoy.body["response"] == body
    assert seen(envoy.events) == body
    assert envoy.ends["response"] == (mode is BodyMode.FULL_DUPLEX and not trailers)
    assert envoy.trailers_answered["response"] == trailers
    assert [event for event in envoy.events if isinstance(event, ResponseDone)] == [ResponseDone(complete=True)]
    assert sum(event.end for event in envoy.events if isinstance(event, ResponseData)) == 1
    assert envoy.stream.closed() == ()


@given(
    body=st.text("ab\n", max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    mode=st.sampled_from(MODES),
    trailers=st.booleans(),
)
def test_a_transformed_response_is_the_same_however_it_is_cut(
    body: str, cuts: list[int], mode: BodyMode, trailers: bool
) -> None:
    if trailers and mode in (BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL):
        trailers = False  # their own tests below
    data = body.encode()
    envoy = steered(mode, Steering(("10.0.0.1:8000",), response_transform=Shout()))
    envoy.response(
        [*OK, ("content-length", b"%d" % len(data))],
        cut(data, cuts),
        trailers=trailers,
    )
    assert envoy.body["response"] == data.replace(b"ab", b"[AB]")
    assert seen(envoy.events) == data
    assert envoy.ends["response"] == (mode is BodyMode.FULL_DUPLEX and not trailers)


def test_what_a_transform_kept_back_cannot_follow_streamed_trailers_and_is_not_lost_in_silence() -> None:
    envoy = steered(BodyMode.STREAMED, Steering(("10.0.0.1:8000",), response_transform=Shout()))
    envoy.send(response_headers=http_headers(OK))
    envoy._streamed_whole = b"xa"
    envoy.send(response_body=pb.HttpBody(body=b"xa"))
    envoy.send(response_trailers=pb.HttpTrailers())
    assert isinstance(envoy.events[-1], ProtocolFault)


def test_a_partly_buffered_response_is_left_alone() -> None:
    envoy = steered(BodyMode.BUFFERED_PARTIAL, Steering(("10.0.0.1:8000",), response_transform=Shout()))
    envoy.send(response_headers=http_headers(OK))
    (reply,) = envoy.send(response_body=pb.HttpBody(body=b"ab", end_of_stream=False))
    assert reply.response_body == pb.BodyResponse()


def test_a_streamed_response_that_will_be_changed_has_no_content_length() -> None:
    envoy = steered(BodyMode.STREAMED, Steering(("10.0.0.1:8000",), response_transform=Shout()))
    envoy.response([*OK, ("content-length", b"2")], [b"ab"])
    assert "content-length" not in envoy.headers["response"]
    assert envoy.body["response"] == b"[AB]"


@every_mode
def test_an_unchanged_response_keeps_its_headers_and_gets_those_of_the_decision(mode: BodyMode) -> None:
    envoy = steered(mode, Steering(("10.0.0.1:8000",), response_headers={"x-session-token": "t"}))
    envoy.response([*OK, ("content-length", b"2")], [b"ab"])
    assert envoy.headers["response"]["x-session-token"] == [b"t"]
    assert envoy.headers["response"]["content-length"] == [b"2"]


@pytest.mark.parametrize("size", [61_999, 62_000, 62_001, 400_000])
def test_long_response_chunks_are_sent_on_in_pieces(size: int) -> None:
    envoy = steered(BodyMode.FULL_DUPLEX)
    envoy.response(OK, [b"x" * size])
    assert envoy.body["response"] == b"x" * size


@every_mode
def test_a_response_of_headers_only_is_complete(mode: BodyMode) -> None:
    envoy = steered(mode)
    envoy.response([(":status", b"204")])
    (head, done) = envoy.events
    assert isinstance(head, ResponseHead)
    assert head.status == 204
    assert done == ResponseDone(complete=True)


def test_the_endpoint_that_served_is_told() -> None:
    envoy = steered(BodyMode.STREAMED)
    envoy.metadata_context = metadata(envoy__lb={"x-gateway-destination-endpoint-served": "10.0.0.2:8000"})
    envoy.send(response_headers=http_headers(OK))
    (head,) = envoy.events
    assert isinstance(head, ResponseHead)
    assert head.served == "10.0.0.2:8000"
    assert head.headers.get("content-type") == "text/event-stream"


@pytest.mark.parametrize("status", [b"", b"abc", b"9" * 5000, b"\xff"])
def test_a_status_that_is_no_number_is_zero(status: bytes) -> None:
    envoy = steered(BodyMode.STREAMED)
    envoy.send(response_headers=http_headers([(":status", status)]))
    assert isinstance(envoy.events[0], ResponseHead)
    assert envoy.events[0].status == 0


@every_mode
@pytest.mark.parametrize("observability", [False, True])
def test_a_response_without_a_request_phase_is_followed(mode: BodyMode, observability: bool) -> None:
    envoy = Peer(ExtProcStream(), BodyMode.NONE, mode, observability=observability)
    envoy.response(OK, [b"ab", b"cd"])
    assert [type(event) for event in envoy.events[:2]] == [ResponseHead, ResponseData]
    assert seen(envoy.events) == b"abcd"
    assert envoy.events[-1] == ResponseDone(complete=True)
    assert bool(envoy.replies) != observability


def test_a_response_body_without_response_headers_is_let_pass() -> None:
    envoy = steered(BodyMode.STREAMED)
    envoy._streamed_whole = b"ab"
    envoy.send(response_body=pb.HttpBody(body=b"ab", end_of_stream=True))
    assert envoy.events == [ResponseData(b"ab", True), ResponseDone(complete=True)]


def test_with_response_phases_off_the_end_of_the_stream_is_the_end_of_the_request() -> None:
    for end in ("half_closed", "closed"):
        envoy = steered(BodyMode.NONE)
        assert list(getattr(envoy.stream, end)()) == [ResponseDone(complete=False)]
        assert envoy.stream.closed() == ()


def test_a_stream_that_ends_before_the_request_is_whole_asks_for_no_release() -> None:
    envoy = Peer(ExtProcStream())
    envoy.send(request_headers=http_headers(CHAT))
    assert envoy.stream.closed() == ()


def test_an_end_seen_in_the_middle_of_a_response_is_not_complete() -> None:
    envoy = steered(BodyMode.STREAMED)
    envoy.send(response_headers=http_headers(OK))
    envoy._streamed_whole = b"ab"
    envoy.send(response_body=pb.HttpBody(body=b"ab"))
    assert list(envoy.stream.closed()) == [ResponseDone(complete=False)]


def test_the_reply_that_lets_a_chunk_pass_is_there_before_the_event_is_handled() -> None:
    stream = ExtProcStream()
    chunk = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"ab"))
    events = stream.receive(chunk.SerializeToString())
    assert len(stream.take()) == 1
    assert events == (ResponseData(b"ab", False),)
