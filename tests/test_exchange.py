"""One ext_proc RPC from its first message to its end: when it decides, and that each pick is released exactly once."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epp.director import Options
from epp.endpoint import Endpoint
from epp.exchange import Exchange, Patience
from epp.gateway.ext_proc import BodyMode, Limits
from epp.gateway.pb import ext_proc_pb2 as pb
from epp.gateway.session import GrpcStatus
from tests.exchanges import Rig, Stream
from tests.gateway.ext_proc_peer import CHAT, OK, http_headers, metadata, subset_hint

ASK = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
ANSWER = b'{"model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}'
JSON = ((":status", b"200"), ("content-type", b"application/json"))
BIG = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 2_000 + b'"}]}'
IMPATIENT = Patience(offload_bytes=1_000, deadline_s=0.25)

FAST = (BodyMode.BUFFERED, BodyMode.NONE)
DUPLEX = (BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX)
both = pytest.mark.parametrize("modes", [DUPLEX, FAST], ids=["duplex", "fast"])


def asked(rig: Rig, modes: tuple[BodyMode, BodyMode] = DUPLEX, body: bytes = ASK, **options: Any) -> Stream:
    stream = rig.open(*modes, **options)
    stream.request(chunks=[body])
    return stream


# --- the load of a pick ---


@both
def test_a_pick_is_counted_before_the_next_decision(modes: tuple[BodyMode, BodyMode]) -> None:
    rig = Rig(endpoints=4)
    streams = [asked(rig, modes) for _ in range(200)]
    assert rig.in_flight == [50, 50, 50, 50]
    for stream in streams:
        stream.end()
    rig.assert_idle()


def test_the_end_of_the_response_releases() -> None:
    rig = Rig()
    stream = asked(rig)
    stream.response(JSON, [ANSWER])
    rig.assert_idle()
    stream.end()
    rig.assert_idle()
    assert not rig.decisions.outcome.aborted


def test_without_a_response_phase_the_end_of_the_stream_releases_and_is_no_abort() -> None:
    rig = Rig()
    stream = asked(rig, FAST)
    assert sum(rig.in_flight) == 1
    stream.end()
    rig.assert_idle()
    assert (rig.decisions.outcome.aborted, rig.decisions.outcome.status) == (False, None)


@both
@pytest.mark.parametrize("moment", ["headers", "body", "decided", "response", "data"])
def test_a_client_that_goes_away_releases_at_every_moment(moment: str, modes: tuple[BodyMode, BodyMode]) -> None:
    rig = Rig()
    stream = rig.open(*modes)
    stream.send(request_headers=http_headers(CHAT))
    if moment == "body" and modes is DUPLEX:
        stream.send(request_body=pb.HttpBody(body=ASK[:10]))
    if moment in ("decided", "response", "data"):
        stream.send(request_body=pb.HttpBody(body=ASK, end_of_stream=True))
        assert sum(rig.in_flight) == 1
    if moment in ("response", "data") and modes is DUPLEX:
        stream.send(response_headers=http_headers(OK))
    if moment == "data" and modes is DUPLEX:
        stream.send(response_body=pb.HttpBody(body=b'data: {"choices":[{"text":"a"}]}\n\n'))
    stream.reset()
    rig.assert_idle()


def test_an_abort_while_a_body_is_read_leaves_no_pick_behind() -> None:
    rig = Rig(patience=IMPATIENT)
    stream = asked(rig, body=BIG)
    stream.reset()
    rig.clock.run_thread()
    rig.clock.advance(1)
    assert rig.decisions.made == []
    rig.assert_idle()


def test_a_half_close_while_a_body_is_read_ends_the_rpc_and_leaves_no_pick_behind() -> None:
    rig = Rig(patience=IMPATIENT)
    stream = asked(rig, body=BIG)
    assert stream.exchange.half_closed()
    rig.clock.run_thread()
    assert rig.decisions.made == []
    rig.assert_idle()


def test_a_fault_of_protocol_releases_at_once_and_ends_the_rpc() -> None:
    rig = Rig()
    stream = asked(rig)
    stream.send(request_headers=http_headers(CHAT))
    assert stream.status is GrpcStatus.INVALID_ARGUMENT
    assert rig.reasons == {"protocol-fault": 1}
    rig.assert_idle()
    stream.reset()
    rig.assert_idle()


def test_a_fault_of_protocol_while_a_body_is_read_leaves_no_pick_behind() -> None:
    rig = Rig(patience=IMPATIENT)
    stream = asked(rig, body=BIG)
    stream.send_bytes(b"\xff")
    rig.clock.run_thread()
    rig.clock.advance(1)
    assert (stream.status, rig.decisions.made) == (GrpcStatus.INVALID_ARGUMENT, [])
    rig.assert_idle()


@pytest.mark.parametrize(
    "content",
    [
        {"response_headers": http_headers(((":status", b"408"),))},
        {"response_body": pb.HttpBody(body=b"timeout", end_of_stream=True)},
        {"response_trailers": pb.HttpTrailers()},
    ],
    ids=lambda content: next(iter(content)),
)
def test_a_response_of_envoys_own_while_a_body_is_read_makes_a_decision_pointless(content: dict[str, Any]) -> None:
    rig = Rig(patience=IMPATIENT)
    stream = asked(rig, body=BIG)
    stream.send(**content)
    rig.clock.run_thread()
    rig.clock.advance(1)
    assert rig.decisions.made == []
    stream.reset()
    rig.assert_idle()


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """One message as a peer might send it that knows the parts and not their order."""
    end = draw(st.booleans())
    part: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"request_headers": http_headers(CHAT, end=end)},
                {"request_body": pb.HttpBody(body=BIG if end else b"{", end_of_stream=end)},
                {"request_trailers": pb.HttpTrailers()},
                {"response_headers": http_headers(OK, end=end)},
                {"response_body": pb.HttpBody(body=ANSWER, end_of_stream=end)},
                {"response_trailers": pb.HttpTrailers()},
                {},
            ]
        )
    )
    return pb.ProcessingRequest(**part, observability_mode=draw(st.integers(0, 9)) == 0).SerializeToString()


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(BodyMode),
    st.sampled_from(BodyMode),
    st.lists(st.one_of(messages(), st.sampled_from(["read", "late", "half-close"])), max_size=8),
)
def test_a_peer_that_keeps_to_no_order_leaves_nothing_behind(
    request: BodyMode, response: BodyMode, steps: list[bytes | str]
) -> None:
    rig = Rig(patience=IMPATIENT)
    writer = Silent()
    exchange = Exchange(rig.director, rig.clock, rig.limits, rig.patience, writer)
    modes: Any = {"request_body_mode": request.value, "response_body_mode": response.value}
    begin = pb.ProcessingRequest(request_headers=http_headers(CHAT), protocol_config=modes)
    exchange.receive(begin.SerializeToString())
    for step in steps:
        if isinstance(step, bytes):
            exchange.receive(step)
        elif step == "read":
            rig.clock.run_thread()
        elif step == "late":
            rig.clock.advance(0.3)
        else:
            exchange.half_closed()
    exchange.closed()
    rig.clock.run_thread()
    rig.clock.advance(1)
    assert writer.status in (None, GrpcStatus.INVALID_ARGUMENT)
    rig.assert_idle()


class Silent:
    """A `Writer` that looks at nothing but how the RPC ends."""

    def __init__(self) -> None:
        self.status: GrpcStatus | None = None

    def send(self, messages: Sequence[bytes]) -> None:
        pass

    def finish(self, status: GrpcStatus = GrpcStatus.OK, message: str = "") -> None:
        self.status = status


def test_fifty_streams_with_one_request_id_do_not_know_of_each_other() -> None:
    rig = Rig(endpoints=5)
    fields = (*CHAT, ("x-request-id", b"a"))
    streams = [rig.open() for _ in range(50)]
    for stream in streams:
        stream.request(fields, [ASK])
    assert rig.in_flight == [10] * 5
    for stream in streams[::2]:
        stream.reset()
    assert sum(rig.in_flight) == 25
    for stream in streams[1::2]:
        stream.response(JSON, [ANSWER])
        assert stream.body["response"] == ANSWER
        stream.end()
    rig.assert_idle()
    assert len(rig.decisions.ended) == 50


def test_an_endpoint_that_left_and_came_back_keeps_apart_what_it_was_sent_before() -> None:
    rig = Rig(endpoints=1)
    (old,) = rig.pool.endpoints
    first = asked(rig)
    rig.remove(old)
    rig.add(new := Endpoint("10.0.0.1", 8000))
    second = asked(rig)
    assert (old.in_flight, new.in_flight) == (1, 1)
    first.end()
    assert (old.in_flight, new.in_flight) == (0, 1)
    second.end()
    rig.assert_idle()


def test_a_generation_may_run_for_hours() -> None:
    rig = Rig()
    stream = asked(rig)
    stream.send(response_headers=http_headers(OK))
    rig.clock.advance(36_000)
    rig.health.tick(rig.clock.time)
    assert sum(rig.in_flight) == 1
    stream.send(response_body=pb.HttpBody(body=b"data: [DONE]\n\n", end_of_stream=True))
    rig.assert_idle()


# --- when it decides ---


def test_a_big_body_is_read_in_a_thread_and_answered_from_there() -> None:
    rig = Rig(patience=IMPATIENT)
    stream = asked(rig, body=BIG)
    assert stream.replies == []
    rig.clock.run_thread()
    assert stream.destination.split(",")[0] == "10.0.0.1:8000"
    assert stream.body["request"] == BIG
    assert rig.reasons == {}
    rig.clock.advance(1)
    stream.end()
    rig.assert_idle()
    assert len(rig.decisions.made) == 1


def test_a_decision_past_its_deadline_goes_by_load_with_the_reason_and_what_was_read_later_is_ignored() -> None:
    rig = Rig(patience=IMPATIENT)
    busy = asked(rig)
    stream = asked(rig, body=BIG)
    rig.clock.advance(0.24)
    assert stream.replies == []
    rig.clock.advance(0.01)
    assert stream.destination.split(",")[0] != busy.destination.split(",")[0]
    assert stream.body["request"] == BIG
    assert rig.decisions.made[-1].reasons == ("decision-deadline",)
    assert rig.reasons == {"decision-deadline": 1}
    (picked,) = [e for e in rig.pool.endpoints if e.address == stream.destination.split(",")[0]]
    assert picked.in_flight_tokens == len(BIG) // 4
    replies = len(stream.replies)
    rig.clock.run_thread()
    assert (len(stream.replies), len(rig.decisions.made)) == (replies, 2)
    stream.end()
    busy.end()
    rig.assert_idle()


def test_a_request_whose_model_may_be_rewritten_waits_for_its_reading() -> None:
    rig = Rig(patience=IMPATIENT, options=Options(model_rewrites={"m": "n"}))
    stream = asked(rig, body=BIG)
    rig.clock.advance(10)
    assert stream.replies == []
    rig.clock.run_thread()
    assert stream.body["request"] == BIG.replace(b'"m"', b'"n"')
    stream.end()
    rig.assert_idle()


def test_a_big_body_that_is_no_request_is_refused_from_the_thread() -> None:
    rig = Rig(patience=IMPATIENT)
    stream = asked(rig, body=b"[" + BIG)
    rig.clock.run_thread()
    assert stream.immediate is not None
    assert stream.immediate.status.code == 400
    rig.assert_idle()


@pytest.mark.parametrize("body", [ASK, BIG], ids=["on the loop", "in a thread"])
def test_a_reading_that_fails_costs_the_request_nothing_but_its_prefix(
    body: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("boom")

    rig = Rig(patience=IMPATIENT)
    monkeypatch.setattr("epp.director.parse_request", broken)
    streams = [asked(rig, body=body) for _ in range(3)]
    rig.clock.run_thread()
    assert all(stream.body["request"] == body for stream in streams)
    assert rig.reasons == {"reading-failed": 3}
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    for stream in streams:
        stream.end()
    rig.assert_idle()


def test_a_decision_that_fails_after_a_wait_ends_its_rpc(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(patience=IMPATIENT)
    stream = asked(rig, body=BIG)
    monkeypatch.setattr(rig.scheduler, "schedule", lambda *args, **kwargs: 1 / 0)
    rig.clock.run_thread()
    assert stream.status is GrpcStatus.INTERNAL
    assert "a decision failed" in caplog.text
    stream.reset()
    rig.assert_idle()


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
def test_a_body_that_is_not_shown_is_steered_by_load(mode: BodyMode) -> None:
    rig = Rig()
    fields = (*CHAT, ("content-length", b"4000"))
    streams = []
    for _ in range(3):
        streams.append(rig.open(mode, BodyMode.NONE))
        streams[-1].request(fields, [b"x" * 4000])
    assert {stream.immediate for stream in streams} == {None}
    assert rig.in_flight == [1, 1, 1]
    assert [e.in_flight_tokens for e in rig.pool.endpoints] == [1000] * 3
    assert rig.reasons == {"body-not-shown": 3}
    for stream in streams:
        stream.end()
    rig.assert_idle()


@pytest.mark.parametrize("chunks", [None, [b""]], ids=["no body", "an empty body"])
def test_a_request_without_a_body_is_steered_with_its_headers(chunks: list[bytes] | None) -> None:
    rig = Rig()
    stream = rig.open()
    stream.request(((":method", b"GET"), (":path", b"/v1/models")), chunks)
    assert stream.destination
    assert rig.reasons == {}
    stream.end()
    rig.assert_idle()


def test_an_observing_stream_shows_the_response_of_the_request_that_another_decided() -> None:
    rig = Rig(options=Options(observe_responses=True))
    stream = asked(rig, FAST, ASK.replace(b"{", b'{"stream":true,', 1))
    space = dict(stream.replies[-1].dynamic_metadata.fields["envoy.lb"].struct_value)
    watch = rig.open(BodyMode.NONE, BodyMode.STREAMED, observability=True, metadata_context=metadata(envoy__lb=space))
    watch.request(chunks=[ASK])
    assert sum(rig.in_flight) == 1
    rig.clock.advance(0.5)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n'
    watch.send(response_headers=http_headers(OK))
    watch.send(response_body=pb.HttpBody(body=b'data: {"choices":[{"text":"a"}]}\n\n'))
    stream.end()
    assert sum(rig.in_flight) == 0
    watch.send(response_body=pb.HttpBody(body=usage, end_of_stream=True))
    watch.end()
    rig.assert_idle()
    outcome = rig.decisions.outcome
    assert (outcome.status, outcome.prompt_tokens, outcome.first_token_s, outcome.aborted) == (200, 9, 0.5, False)


def test_an_observing_stream_alone_decides_nothing() -> None:
    rig = Rig()
    watch = rig.open(observability=True)
    watch.request(chunks=[ASK])
    watch.response(JSON, [ANSWER])
    watch.end()
    assert rig.decisions.made == []
    rig.assert_idle()


# --- refusals ---


def refused(stream: Stream) -> tuple[int, dict[str, Any], dict[str, str]]:
    answer = stream.immediate
    assert answer is not None
    headers = {o.header.key: o.header.raw_value.decode() for o in answer.headers.set_headers}
    return int(answer.status.code), json.loads(answer.body)["error"], headers


@both
@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b'{"model":1}', b"\xff\xfe", b"[" * 900, b""])
def test_a_body_that_is_no_request_gets_an_openai_error(body: bytes, modes: tuple[BodyMode, BodyMode]) -> None:
    rig = Rig()
    stream = asked(rig, modes, body)
    status, error, headers = refused(stream)
    assert (status, error["type"], headers["content-type"]) == (400, "invalid_request_error", "application/json")
    assert rig.reasons == {"bad-request": 1}
    stream.end()
    rig.assert_idle()


@both
def test_a_body_over_the_limit_is_refused_and_counted(modes: tuple[BodyMode, BodyMode]) -> None:
    rig = Rig(limits=Limits(max_request_bytes=20))
    stream = asked(rig, modes)
    assert refused(stream)[0] == 413
    assert rig.reasons == {"request_too_large": 1}
    stream.end()
    rig.assert_idle()


@pytest.mark.parametrize(
    ("subset", "reason"),
    [(None, "no-endpoint"), ([], "no-endpoint-in-subset"), (["10.9.9.9:1"], "no-endpoint-in-subset")],
)
def test_nobody_to_ask_is_503(subset: list[str] | None, reason: str) -> None:
    rig = Rig(endpoints=0 if subset is None else 2)
    stream = asked(rig, metadata_context=None if subset is None else subset_hint(subset))
    status, error, headers = refused(stream)
    assert (status, error["type"]) == (503, "server_error")
    assert (headers["x-llm-d-request-dropped-reason"], headers["retry-after"]) == (reason, "1")
    assert rig.reasons == {reason: 1}
    assert [d.endpoints for d in rig.decisions.made] == [()]
    stream.end()
    rig.assert_idle()


ONLY_BLUE = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: by-label
  parameters: {label: color, validValues: [blue]}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: by-label
"""


@pytest.mark.parametrize("body", [ASK, BIG], ids=["read", "past its deadline"])
def test_a_pool_that_is_filtered_out_is_429_with_the_reason(body: bytes) -> None:
    rig = Rig(config=ONLY_BLUE, options=Options(retry_after_s=2.5), patience=IMPATIENT)
    stream = asked(rig, body=body)
    rig.clock.advance(1)
    status, error, headers = refused(stream)
    assert (status, error["type"]) == (429, "rate_limit_error")
    assert error["message"] == "every endpoint is filtered out for this request (by by-label)"
    assert headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert headers["retry-after"] == "3"
    assert rig.metrics.attempts == {"failure": 1}
    stream.end()
    rig.assert_idle()


# --- any order of events ---


class AnyOrder(RuleBasedStateMachine):
    """Streams, threads, deadlines and the pool in any order: when all is over nothing is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(endpoints=2, patience=IMPATIENT, options=Options(observe_responses=True))
        self.streams: list[Stream] = []
        self.progress: dict[int, int] = {}
        self.port = 9000

    def _one(self, number: int) -> Stream:
        return self.streams[number % len(self.streams)]

    has_streams = precondition(lambda self: self.streams)

    @rule(modes=st.sampled_from([DUPLEX, FAST, (BodyMode.STREAMED, BodyMode.STREAMED)]))
    def open(self, modes: tuple[BodyMode, BodyMode]) -> None:
        stream = self.rig.open(*modes)
        stream.send(request_headers=http_headers((*CHAT, ("x-request-id", b"same"))))
        self.streams.append(stream)

    @rule(key=st.sampled_from(["1", "2", "3", ""]))
    def observe(self, key: str) -> None:
        told = metadata(envoy__lb={"x-kvsteer-flight": key})
        stream = self.rig.open(BodyMode.NONE, BodyMode.STREAMED, observability=True, metadata_context=told)
        stream.send(request_headers=http_headers(CHAT))
        self.streams.append(stream)

    @has_streams
    @rule(number=st.integers(0, 99), body=st.sampled_from([ASK, BIG, b"{", b""]), end=st.booleans())
    def upload(self, number: int, body: bytes, end: bool) -> None:
        self._one(number).exchange.receive(
            pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=end)).SerializeToString()
        )

    @has_streams
    @rule(number=st.integers(0, 99), status=st.sampled_from([b"200", b"503"]), served=st.sampled_from(["", "one", "x"]))
    def respond(self, number: int, status: bytes, served: str) -> None:
        message = pb.ProcessingRequest(
            response_headers=http_headers(((":status", status), ("content-type", b"text/event-stream")))
        )
        if served:
            address = self.rig.known[-1].address if served == "one" else "10.9.9.9:1"
            space = message.metadata_context.filter_metadata["envoy.lb"]
            space.update({"x-gateway-destination-endpoint-served": address})
        self._one(number).exchange.receive(message.SerializeToString())

    @has_streams
    @rule(number=st.integers(0, 99), end=st.booleans())
    def answer(self, number: int, end: bool) -> None:
        body = pb.HttpBody(body=b'data: {"choices":[{"text":"a"}]}\n\n', end_of_stream=end)
        self._one(number).exchange.receive(pb.ProcessingRequest(response_body=body).SerializeToString())

    @has_streams
    @rule(number=st.integers(0, 99))
    def half_close(self, number: int) -> None:
        assert self._one(number).exchange.half_closed()

    @has_streams
    @rule(number=st.integers(0, 99))
    def close(self, number: int) -> None:
        self.streams.pop(number % len(self.streams)).reset()

    @rule()
    def threads_end(self) -> None:
        self.rig.clock.run_thread()

    @rule(seconds=st.sampled_from([0.1, 0.3, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.rig.health.tick(self.rig.clock.time)

    @rule(number=st.integers(0, 9))
    def scrape(self, number: int) -> None:
        if self.rig.pool.endpoints:
            endpoint = self.rig.pool.endpoints[number % len(self.rig.pool)]
            endpoint.scrape_began()
            endpoint.scrape_succeeded(self.rig.clock.time)

    @rule()
    def pool_changes(self) -> None:
        if len(self.rig.pool) > 1:
            self.rig.remove(self.rig.pool.endpoints[0])
        self.port += 1
        self.rig.add(Endpoint("10.0.0.2", self.port))

    @invariant()
    def every_flight_is_counted_once(self) -> None:
        not_ended = len(self.rig.decisions.made) - len(self.rig.decisions.ended)
        assert sum(e.in_flight for e in self.rig.known) <= not_ended
        assert min((e.in_flight for e in self.rig.known), default=0) >= 0
        assert min((e.in_flight_tokens for e in self.rig.known), default=0) >= 0

    def teardown(self) -> None:
        for stream in self.streams:
            stream.reset()
        self.rig.clock.run_thread()
        self.rig.clock.advance(100)
        self.rig.assert_idle()
        assert self.rig.director._observable == {}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
