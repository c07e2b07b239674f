"""The request side of an ext_proc stream, in every body mode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.gateway import errors
from epp.gateway.ext_proc import (
    BodyMode,
    ExtProcStream,
    Limits,
    ProtocolFault,
    RequestReady,
    RequestRejected,
    ResponseDone,
    Steering,
)
from epp.gateway.ext_proc_wire import CONTROL_HEADERS
from epp.gateway.pb import ext_proc_pb2 as pb
from tests.gateway.ext_proc_peer import CHAT, OK, Peer, cut, header_map, http_headers, subset_hint

HERE = "10.0.0.1:8000"
DESTINATION = "x-gateway-destination-endpoint"

MODES = [BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL, BodyMode.FULL_DUPLEX]
SEEN = [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL, BodyMode.FULL_DUPLEX]

every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
every_seen_mode = pytest.mark.parametrize("mode", SEEN, ids=lambda mode: mode.name)


def peer(mode: BodyMode = BodyMode.FULL_DUPLEX, limits: Limits | None = None, **options: object) -> Peer:
    return Peer(ExtProcStream(limits), mode, **options)  # type: ignore[arg-type]


def ready(peer: Peer) -> RequestReady:
    (event,) = [event for event in peer.events if isinstance(event, RequestReady)]
    return event


def kinds(replies: list[pb.ProcessingResponse]) -> list[str | None]:
    return [reply.WhichOneof("response") for reply in replies]


@every_mode
def test_the_request_reaches_the_destination_with_its_body_unchanged(mode: BodyMode) -> None:
    envoy = peer(mode)
    envoy.request(CHAT, [b'{"model":', b'"m"}'])
    assert envoy.headers["request"][DESTINATION] == [HERE.encode()]
    assert envoy.body["request"] == b'{"model":"m"}'
    assert envoy.ends["request"] == (mode is BodyMode.FULL_DUPLEX)


@every_mode
@pytest.mark.parametrize("chunks", [None, [b"{}"]], ids=["headers only", "with body"])
def test_header_and_metadata_name_the_same_destination_on_the_same_reply(
    mode: BodyMode, chunks: list[bytes] | None
) -> None:
    envoy = peer(mode, decide=lambda _: Steering((HERE, "[fd00::2]:8000")))
    envoy.request(CHAT, chunks)
    (steered,) = [reply for reply in envoy.replies if reply.HasField("dynamic_metadata")]
    common = getattr(steered, steered.WhichOneof("response") or "").response
    assert common.clear_route_cache
    (option,) = common.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value.decode()) == (DESTINATION, f"{HERE},[fd00::2]:8000")
    assert envoy.destination_metadata == f"{HERE},[fd00::2]:8000"


@every_seen_mode
def test_the_body_is_shown_whole(mode: BodyMode) -> None:
    envoy = peer(mode)
    envoy.request(CHAT, [b"ab", b"", b"cd"])
    assert (ready(envoy).body, ready(envoy).size) == (b"abcd", 4)


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED], ids=lambda mode: mode.name)
def test_a_mode_that_does_not_hold_the_body_is_decided_on_the_headers(mode: BodyMode) -> None:
    envoy = peer(mode)
    envoy.request([*CHAT, ("content-length", b"4")], [b"ab", b"cd"])
    assert (ready(envoy).body, ready(envoy).size) == (None, 4)
    assert envoy.replies[0].HasField("dynamic_metadata")


def test_a_full_duplex_header_reply_waits_for_the_body_and_the_decision() -> None:
    envoy = peer(decide=lambda _: None)
    envoy.request(CHAT, [b"ab"])
    assert envoy.replies == []
    envoy.answer(Steering((HERE,)))
    assert kinds(envoy.collect()) == ["request_headers", "request_body"]


def test_buffered_headers_are_answered_before_the_decision_and_the_body_carries_it() -> None:
    envoy = peer(BodyMode.BUFFERED, decide=lambda _: None)
    assert kinds(envoy.send(request_headers=http_headers(CHAT))) == ["request_headers"]
    assert envoy.send(request_body=pb.HttpBody(body=b"{}", end_of_stream=True)) == []
    envoy.answer(Steering((HERE,)))
    (reply,) = envoy.collect()
    assert reply.WhichOneof("response") == "request_body"
    assert not reply.request_body.response.HasField("body_mutation")
    assert envoy.headers["request"][DESTINATION] == [HERE.encode()]


def test_a_partly_buffered_body_is_not_taken_for_the_whole() -> None:
    envoy = peer(BodyMode.BUFFERED_PARTIAL)
    envoy.send(request_headers=http_headers(CHAT))
    envoy.send(request_body=pb.HttpBody(body=b'{"mod', end_of_stream=False))
    assert (ready(envoy).body, ready(envoy).size) == (None, 5)
    assert envoy.headers["request"][DESTINATION] == [HERE.encode()]


@every_mode
def test_a_request_of_headers_only_is_steered_by_the_header_reply(mode: BodyMode) -> None:
    envoy = peer(mode)
    envoy.request([(":method", b"GET"), (":path", b"/v1/models?x=1")])
    assert kinds(envoy.replies) == ["request_headers"]
    assert (ready(envoy).head.method, ready(envoy).head.path) == ("GET", "/v1/models?x=1")
    assert (ready(envoy).body, ready(envoy).size) == (b"", 0)


@every_seen_mode
def test_headers_and_one_empty_end_chunk_are_the_same_as_no_body(mode: BodyMode) -> None:
    envoy = peer(mode)
    envoy.request(CHAT, [])
    assert ready(envoy).body == b""
    assert envoy.headers["request"][DESTINATION] == [HERE.encode()]
    assert envoy.ends["request"] == (mode is BodyMode.FULL_DUPLEX)


@every_mode
@pytest.mark.parametrize("chunks", [[b"ab"], None], ids=["with body", "without body"])
def test_a_request_that_ends_by_trailers_is_steered_and_its_trailers_are_answered_once(
    mode: BodyMode, chunks: list[bytes] | None
) -> None:
    envoy = peer(mode)
    envoy.request(CHAT, chunks, trailers=True)
    assert envoy.trailers_answered["request"]
    assert envoy.ends["request"] == 0, "end_of_stream before the trailers"
    assert envoy.body["request"] == b"".join(chunks or ())
    assert envoy.destination_metadata == HERE
    assert kinds(envoy.replies)[-1] == "request_trailers"


@every_mode
def test_no_trailers_reply_is_invented(mode: BodyMode) -> None:
    envoy = peer(mode)
    envoy.request(CHAT, [b"ab"])
    envoy.response(OK, [b"cd"])
    assert envoy.trailers_answered == {"request": False, "response": False}


@pytest.mark.parametrize("size", [0, 1, 61_999, 62_000, 62_001, 124_000, 20 << 20])
def test_long_bodies_are_sent_back_in_chunks_with_one_end_of_stream_on_the_last(size: int) -> None:
    body = (b"0123456789" * (size // 10 + 1))[:size]
    envoy = peer()
    envoy.request(CHAT, [body])
    assert envoy.body["request"] == body
    ends = [reply.request_body.response.body_mutation.streamed_response.end_of_stream for reply in envoy.replies[1:]]
    assert ends == [False] * (len(ends) - 1) + [True]
    assert len(ends) == max(1, -(-size // 62_000))


def test_a_buffered_body_of_five_mebibytes_gets_a_normal_answer() -> None:
    envoy = peer(BodyMode.BUFFERED)
    envoy.request(CHAT, [b"x" * (5 << 20)])
    assert ready(envoy).size == 5 << 20
    assert envoy.destination_metadata == HERE


@given(
    body=st.binary(max_size=400),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    mode=st.sampled_from(MODES),
    trailers=st.booleans(),
    later=st.booleans(),
    rewrite=st.booleans(),
)
def test_however_a_body_is_cut_worker_and_picker_see_the_same(
    body: bytes, cuts: list[int], mode: BodyMode, trailers: bool, later: bool, rewrite: bool
) -> None:
    replace = b"new" if rewrite and mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX) else None
    answer = Steering((HERE,), body=replace)
    late = later and mode is BodyMode.FULL_DUPLEX
    envoy = peer(mode, decide=lambda _: None if late else answer)
    envoy.request(CHAT, cut(body, cuts), trailers=trailers)
    if late:
        envoy.answer(answer)
        envoy.collect()
    assert envoy.body["request"] == (body if replace is None else replace)
    assert ready(envoy).body == (body if mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX) else ready(envoy).body)
    assert envoy.destination_metadata == HERE
    assert envoy.trailers_answered["request"] == trailers
    assert envoy.ends["request"] == (mode is BodyMode.FULL_DUPLEX and not trailers)


@every_mode
def test_control_headers_of_a_client_are_readable_but_do_not_reach_the_worker(mode: BodyMode) -> None:
    envoy = peer(mode)
    envoy.request([*CHAT, *((name, b"10.0.0.9:22") for name in CONTROL_HEADERS), ("x-other", b"stays")], [b"{}"])
    assert ready(envoy).head.headers.get("x-gateway-inference-objective") == "10.0.0.9:22"
    left = envoy.headers["request"]
    assert {name: left[name] for name in CONTROL_HEADERS if name in left} == {DESTINATION: [HERE.encode()]}
    assert left["x-other"] == [b"stays"]


def test_without_a_pick_of_ours_a_clients_destination_is_removed_all_the_same() -> None:
    envoy = peer(decide=lambda _: Steering(()))
    envoy.request([*CHAT, (DESTINATION, b"10.0.0.9:22")], [b"{}"])
    assert DESTINATION not in envoy.headers["request"]
    assert envoy.destination_metadata is None


def test_a_control_header_that_the_decision_sets_is_set_and_not_removed() -> None:
    steering = Steering((HERE,), set_headers={"x-prefiller-host-port": "10.0.0.2:8000"}, remove_headers=("x-secret",))
    envoy = peer(decide=lambda _: steering)
    envoy.request([*CHAT, ("x-prefiller-host-port", b"10.0.0.9:22"), ("x-secret", b"s")], [b"{}"])
    assert envoy.headers["request"]["x-prefiller-host-port"] == [b"10.0.0.2:8000"]
    assert "x-secret" not in envoy.headers["request"]


@pytest.mark.parametrize(
    "name", [":authority", "host", "x-envoy-upstream-rq-timeout-ms", "content-length", "Host", "a\r\nb"]
)
def test_headers_that_are_envoys_own_cannot_be_changed(name: str) -> None:
    with pytest.raises(ValueError, match="must not be changed"):
        Steering((HERE,), set_headers={name: "x"})
    with pytest.raises(ValueError, match="must not be changed"):
        Steering((HERE,), remove_headers=(name,))


def test_a_line_break_in_a_header_value_is_refused() -> None:
    with pytest.raises(ValueError, match="x-a"):
        Steering((HERE,), response_headers={"x-a": "1\r\nx-b: 2"})


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX], ids=lambda mode: mode.name)
def test_a_rewritten_body_has_a_valid_length_whatever_the_client_said(mode: BodyMode) -> None:
    envoy = peer(mode, decide=lambda _: Steering((HERE,), body=b'{"model":"longer"}'))
    envoy.request([*CHAT, ("content-length", b"13")], [b'{"model":"m"}'])
    assert envoy.body["request"] == b'{"model":"longer"}'
    if mode is BodyMode.BUFFERED:
        assert envoy.headers["request"]["content-length"] == [b"18"]


def test_a_buffered_body_may_be_rewritten_to_nothing() -> None:
    envoy = peer(BodyMode.BUFFERED, decide=lambda _: Steering((HERE,), body=b""))
    envoy.request(CHAT, [b"{}"])
    assert envoy.body["request"] == b""
    assert envoy.headers["request"]["content-length"] == [b"0"]


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED], ids=lambda mode: mode.name)
def test_a_body_that_was_not_seen_cannot_be_rewritten(mode: BodyMode) -> None:
    envoy = peer(mode, decide=lambda _: Steering((HERE,), body=b"{}"))
    with pytest.raises(ValueError, match="not seen"):
        envoy.send(request_headers=http_headers(CHAT))


@every_mode
def test_a_rejection_is_the_last_reply_and_is_openai_shaped(mode: BodyMode) -> None:
    envoy = peer(mode, decide=lambda _: errors.unavailable("no-endpoints", "no endpoint", retry_after_s=2.5))
    envoy.request(CHAT, [b"{}"])
    assert envoy.immediate is not None
    assert envoy.immediate.status.code == 503
    headers = {o.header.key: o.header.raw_value for o in envoy.immediate.headers.set_headers}
    assert headers["content-type"] == b"application/json"
    assert headers["retry-after"] == b"3"
    assert envoy.immediate.body.startswith(b'{"error": {"message": "no endpoint"')
    assert envoy.immediate.details == "no-endpoints"
    assert envoy.send(request_body=pb.HttpBody(body=b"more")) == []


def test_a_rejection_before_the_buffered_body_waits_for_the_reply_that_is_due() -> None:
    envoy = peer(BodyMode.BUFFERED)
    envoy.send(request_headers=http_headers(CHAT))
    envoy.answer(errors.unavailable("draining", "draining"))
    assert envoy.collect() == []
    envoy.send(request_body=pb.HttpBody(body=b"{}", end_of_stream=True))
    assert envoy.immediate is not None
    assert envoy.events == []
    assert envoy.stream.closed() == ()


def test_a_rejection_before_the_full_duplex_body_has_come_goes_out_at_once() -> None:
    envoy = peer()
    envoy.send(request_headers=http_headers(CHAT))
    envoy.send(request_body=pb.HttpBody(body=b"{"))
    envoy.answer(errors.unavailable("draining", "draining"))
    assert kinds(envoy.collect()) == ["immediate_response"]


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, *SEEN], ids=lambda mode: mode.name)
def test_a_body_over_the_limit_is_refused_as_soon_as_it_is_exceeded(mode: BodyMode) -> None:
    envoy = peer(mode, Limits(max_request_bytes=10))
    envoy.request(CHAT, [b"12345", b"67890", b"1", b"never sent"])
    assert envoy.immediate is not None
    assert envoy.immediate.status.code == 413
    assert [event for event in envoy.events if isinstance(event, RequestRejected)]


@every_mode
def test_a_content_length_over_the_limit_is_refused_on_the_headers(mode: BodyMode) -> None:
    envoy = peer(mode, Limits(max_request_bytes=10))
    assert kinds(envoy.send(request_headers=http_headers([*CHAT, ("content-length", b"11")]))) == ["immediate_response"]


@pytest.mark.parametrize("length", [b"-1", b"1e9", b"9" * 5000, b"\xff", b"\xc2\xb2"])
def test_a_content_length_that_is_no_number_is_not_believed(length: bytes) -> None:
    envoy = peer(limits=Limits(max_request_bytes=10))
    envoy.request([*CHAT, ("content-length", length)], [b"{}"])
    assert ready(envoy).size == 2


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        ([], set()),
        ("", set()),
        (["10.0.0.1:8000"], {"10.0.0.1:8000"}),
        (["10.0.0.1:8000", " 10.0.0.2:8000 "], {"10.0.0.1:8000", "10.0.0.2:8000"}),
        ("10.0.0.1:8000, 10.0.0.2:8000,", {"10.0.0.1:8000", "10.0.0.2:8000"}),
        (["[FD00::1]:8000"], {"[fd00::1]:8000"}),
        (["10.0.0.1", "fd00::1", "[fd00::2]"], {"10.0.0.1", "fd00::1", "fd00::2"}),
        (["nonsense", 7, None, {"a": 1}, ""], {"nonsense"}),
        (7, set()),
        ({"a": 1}, set()),
        (None, None),
    ],
)
def test_the_subset_hint_is_read_in_every_form(hint: object, subset: set[str] | None) -> None:
    envoy = peer(metadata_context=subset_hint(hint))
    envoy.request(CHAT, [b"{}"])
    assert ready(envoy).head.subset == subset


def test_without_a_hint_there_is_no_subset_and_the_newest_hint_counts() -> None:
    assert ready_subset(peer()) is None
    envoy = peer(metadata_context=subset_hint(["10.0.0.1:8000"]))
    envoy.send(request_headers=http_headers(CHAT))
    envoy.metadata_context = subset_hint(["10.0.0.2:8000"])
    envoy.send(request_body=pb.HttpBody(end_of_stream=True))
    assert ready(envoy).head.subset == frozenset({"10.0.0.2:8000"})


def ready_subset(envoy: Peer) -> frozenset[str] | None:
    envoy.request(CHAT, [b"{}"])
    return ready(envoy).head.subset


@pytest.mark.parametrize("filled", ["value", "raw_value", "mixed"])
def test_header_values_are_read_from_value_and_raw_value(filled: str) -> None:
    fields = header_map([*CHAT, ("x-request-id", b"r-1"), ("x-odd", b"\xff"), ("X-Twice", b"1"), ("x-twice", b"2")])
    for index, header in enumerate(fields.headers):
        if header.key != "x-odd" and (filled == "value" or (filled == "mixed" and index % 2)):
            header.value, header.raw_value = header.raw_value.decode(), b""
    envoy = peer()
    envoy.send(request_headers=pb.HttpHeaders(headers=fields, end_of_stream=True))
    headers = ready(envoy).head.headers
    assert ready(envoy).head.path == "/v1/chat/completions"
    assert headers.get("x-request-id") == "r-1"
    assert headers.get("x-odd") == "�"
    assert headers.get_all("x-twice") == [b"1", b"2"]


def test_streams_that_share_a_request_id_do_not_touch_each_other() -> None:
    fields = [*CHAT, ("x-request-id", b"a")]
    peers = [peer(decide=lambda _: None) for _ in range(50)]
    for number, envoy in enumerate(peers):
        envoy.request(fields, [b"%d" % number])
    for envoy in peers[::2]:
        envoy.events += envoy.stream.closed()
    for number, envoy in enumerate(peers):
        envoy.answer(Steering((f"10.0.0.1:{number + 1}",)))
        envoy.collect()
    for number, envoy in enumerate(peers):
        cancelled = number % 2 == 0
        assert envoy.destination_metadata == (None if cancelled else f"10.0.0.1:{number + 1}")
        assert envoy.body["request"] == (b"" if cancelled else b"%d" % number)
        assert envoy.events.count(ResponseDone(complete=False)) == cancelled


def test_observed_requests_give_the_same_events_and_no_reply() -> None:
    for mode in MODES:
        watched, served = peer(mode, observability=True), peer(mode)
        for envoy in (watched, served):
            envoy.request(CHAT, [b"ab", b"cd"])
            envoy.response(OK, [b"ef"])
        shapes = [[type(event) for event in envoy.events] for envoy in (watched, served)]
        assert shapes[0] == shapes[1]
        assert ready(watched).body == ready(served).body
        assert watched.replies == []


def test_an_observed_body_over_the_limit_is_dropped_and_not_refused() -> None:
    envoy = peer(observability=True, limits=Limits(max_request_bytes=3))
    envoy.request(CHAT, [b"ab", b"cd", b"ef"])
    assert (ready(envoy).body, ready(envoy).size) == (None, 6)


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED], ids=lambda mode: mode.name)
def test_response_bodies_are_switched_off_by_the_reply_to_the_request_headers(mode: BodyMode) -> None:
    envoy = Peer(ExtProcStream(Limits(response_bodies=False)), mode, BodyMode.STREAMED)
    envoy.request(CHAT, [b"{}"])
    assert [reply.HasField("mode_override") for reply in envoy.replies] == [True] + [False] * (len(envoy.replies) - 1)
    override = envoy.replies[0].mode_override
    assert (override.request_body_mode, override.response_body_mode) == (int(mode), pb.ProcessingMode.NONE)


@pytest.mark.parametrize(
    ("request_mode", "response_mode", "eager"),
    [
        (BodyMode.FULL_DUPLEX, BodyMode.STREAMED, False),
        (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX, False),
        (BodyMode.BUFFERED, BodyMode.NONE, False),
        (BodyMode.BUFFERED, BodyMode.STREAMED, True),
    ],
)
def test_no_mode_override_where_envoy_ignores_it(
    request_mode: BodyMode, response_mode: BodyMode, *, eager: bool
) -> None:
    envoy = Peer(ExtProcStream(Limits(response_bodies=False)), request_mode, response_mode, eager=eager)
    envoy.request(CHAT, [b"{}"])
    assert not any(reply.HasField("mode_override") for reply in envoy.replies)


def test_streamed_chunks_that_do_not_wait_are_answered_after_the_decision() -> None:
    envoy = peer(BodyMode.STREAMED, eager=True, decide=lambda _: None)
    envoy.send(request_headers=http_headers(CHAT))
    envoy.send(request_body=pb.HttpBody(body=b"ab"))
    envoy.send(request_body=pb.HttpBody(end_of_stream=True))
    assert envoy.replies == []
    envoy._streamed_whole = b""
    envoy.answer(Steering((HERE,)))
    assert kinds(envoy.collect()) == ["request_headers", "request_body", "request_body"]


WEBSOCKET = [(":method", b"GET"), (":path", b"/v1/realtime"), ("upgrade", b"WebSocket")]


def test_a_full_duplex_websocket_is_steered_by_its_headers_and_its_bytes_flow_as_they_come() -> None:
    envoy = peer(limits=Limits(max_request_bytes=100))
    assert kinds(envoy.send(request_headers=http_headers(WEBSOCKET))) == ["request_headers"]
    assert (ready(envoy).body, envoy.destination_metadata) == (None, HERE)
    for _ in range(10):
        envoy.send(request_body=pb.HttpBody(body=b"x" * 70_000))
    assert envoy.body["request"] == b"x" * 700_000
    assert envoy.ends["request"] == 0
    envoy.send(request_body=pb.HttpBody(end_of_stream=True))
    assert envoy.ends["request"] == 1


def test_what_a_websocket_sends_before_the_decision_follows_it_in_order_and_is_bounded() -> None:
    envoy = peer(limits=Limits(max_request_bytes=100), decide=lambda _: None)
    envoy.send(request_headers=http_headers(WEBSOCKET))
    envoy.send(request_body=pb.HttpBody(body=b"ab"))
    envoy.send(request_body=pb.HttpBody(body=b"cd"))
    envoy.answer(Steering((HERE,)))
    assert kinds(envoy.collect()) == ["request_headers", "request_body", "request_body"]
    assert envoy.body["request"] == b"abcd"
    flooded = peer(limits=Limits(max_request_bytes=100), decide=lambda _: None)
    flooded.send(request_headers=http_headers(WEBSOCKET))
    assert kinds(flooded.send(request_body=pb.HttpBody(body=bytes(101)))) == ["immediate_response"]


def test_a_websocket_in_buffered_mode_asks_envoy_not_to_wait_for_its_body() -> None:
    envoy = Peer(ExtProcStream(), BodyMode.BUFFERED, BodyMode.STREAMED)
    (reply,) = envoy.send(request_headers=http_headers(WEBSOCKET))
    assert reply.mode_override.request_body_mode == pb.ProcessingMode.NONE
    assert reply.mode_override.response_body_mode == pb.ProcessingMode.STREAMED
    assert envoy.headers["request"][DESTINATION] == [HERE.encode()]


def test_a_proxy_that_names_no_mode_gets_the_full_duplex_of_the_inference_pool_contract() -> None:
    envoy = peer()
    envoy.config = None
    envoy.request(CHAT, [b"ab"])
    assert (envoy.body["request"], envoy.ends["request"]) == (b"ab", 1)


def test_a_decision_after_envoy_answered_by_itself_is_dropped() -> None:
    envoy = peer(decide=lambda _: None)
    envoy.request(CHAT, [b"ab"])
    envoy.response([(":status", b"504")])
    envoy.answer(Steering((HERE,)))
    envoy.answer(errors.unavailable("late", "late"))
    assert kinds(envoy.collect()) == []
    assert kinds(envoy.replies) == ["response_headers"]


def test_a_request_that_ends_after_envoy_answered_it_asks_for_no_decision() -> None:
    envoy = peer()
    envoy.send(request_headers=http_headers(CHAT))
    envoy.response([(":status", b"408")])
    envoy.send(request_body=pb.HttpBody(end_of_stream=True))
    assert [type(event).__name__ for event in envoy.events] == ["ResponseHead", "ResponseDone"]
    assert envoy.stream.closed() == ()


def test_deciding_twice_is_an_error_of_the_caller() -> None:
    envoy = peer()
    envoy.request(CHAT, [b"ab"])
    with pytest.raises(RuntimeError, match="no request waits"):
        envoy.answer(Steering((HERE,)))
    with pytest.raises(RuntimeError, match="no request waits"):
        envoy.answer(errors.unavailable("x", "x"))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (["request_headers", "request_headers"], "request headers came twice"),
        (["request_body"], "request_header_mode must be SEND"),
        (["request_trailers"], "request trailers out of turn"),
        (["request_headers", "request_body_end", "request_body_end"], "a request body after its end"),
        (["request_headers", "request_trailers", "request_body_end"], "a request body after its end"),
        (["request_headers", "request_trailers", "request_trailers"], "request trailers out of turn"),
        (["response_headers", "response_headers"], "response headers came twice"),
        (["response_headers", "response_body_end", "response_body_end"], "a response body after its end"),
        (["response_headers", "response_trailers", "response_trailers"], "response trailers came twice"),
        (["nothing"], "a message without content"),
    ],
)
def test_messages_out_of_turn_end_the_stream_with_a_reason(messages: list[str], reason: str) -> None:
    contents: dict[str, dict[str, Any]] = {
        "request_headers": {"request_headers": http_headers(CHAT)},
        "response_headers": {"response_headers": http_headers(OK)},
        "request_body": {"request_body": pb.HttpBody(body=b"x")},
        "request_body_end": {"request_body": pb.HttpBody(end_of_stream=True)},
        "response_body_end": {"response_body": pb.HttpBody(end_of_stream=True)},
        "request_trailers": {"request_trailers": pb.HttpTrailers()},
        "response_trailers": {"response_trailers": pb.HttpTrailers()},
        "nothing": {},
    }
    envoy = peer()
    for message in messages:
        envoy.send(**contents[message])
    assert isinstance(envoy.events[-1], ProtocolFault)
    assert reason in envoy.events[-1].reason
    assert envoy.send(request_headers=http_headers(CHAT)) == []


def test_the_grpc_body_mode_is_refused_with_its_name() -> None:
    stream = ExtProcStream()
    message = pb.ProcessingRequest(
        request_headers=http_headers(CHAT),
        protocol_config=pb.ProtocolConfiguration(request_body_mode=pb.ProcessingMode.GRPC),
    )
    (fault,) = stream.receive(message.SerializeToString())
    assert isinstance(fault, ProtocolFault)
    assert "5" in fault.reason
