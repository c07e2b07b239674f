"""What the picker changes in a request and takes back in its response, what it learns from it, and what it counts."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from epp.director import Options
from epp.endpoint import Endpoint
from epp.gateway.ext_proc import BodyMode
from epp.gateway.ext_proc_events import ResponseHead
from epp.gateway.pb import ext_proc_pb2 as pb
from epp.observe.metrics import Histogram
from epp.request import Headers, InferenceRequest, RequestHead
from tests.exchanges import Rig, Stream
from tests.gateway.ext_proc_peer import CHAT, OK, Fields, http_headers, metadata

JSON: Fields = ((":status", b"200"), ("content-type", b"application/json"))
ASK = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
ASK_STREAM = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'
USAGE = b'"usage":{"prompt_tokens":20,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":16}}'
ANSWER = b'{"id":"1","model":"m","choices":[{"message":{"content":"hi"}}],' + USAGE + b"}"
ROLE = b'data: {"model":"m","choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"model":"m","choices":[{"delta":{"content":"hi"}}]}\n\n'
LAST = b'data: {"model":"m","choices":[],' + USAGE + b"}\n\n"
DONE = b"data: [DONE]\n\n"

MODES = [
    (request, response)
    for request in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX)
    for response in (BodyMode.BUFFERED, BodyMode.STREAMED, BodyMode.FULL_DUPLEX)
]
every_mode = pytest.mark.parametrize("modes", MODES, ids=lambda m: f"{m[0].name}-{m[1].name}".lower())


def total(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), histogram.total


def exchange(
    rig: Rig,
    body: bytes = ASK,
    answer: Sequence[bytes] = (ANSWER,),
    *,
    modes: tuple[BodyMode, BodyMode] = (BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX),
    fields: Fields = CHAT,
    head: Fields = JSON,
) -> Stream:
    stream = rig.open(*modes)
    stream.request(fields, [body])
    stream.response(head, answer)
    stream.end()
    rig.assert_idle()
    return stream


# --- changes and their undoing ---


@every_mode
@pytest.mark.parametrize("by", ["option", "header"])
def test_a_model_is_rewritten_on_the_way_and_given_back(modes: tuple[BodyMode, BodyMode], by: str) -> None:
    rig = Rig(options=Options(model_rewrites={"m": "longer-name"} if by == "option" else {}))
    fields = CHAT if by == "option" else (*CHAT, ("x-gateway-model-name-rewrite", b"longer-name"))
    fields = (*fields, ("content-length", str(len(ASK)).encode()))
    theirs = ANSWER.replace(b'"m"', b'"longer-name"')
    stream = exchange(rig, answer=[theirs[:20], theirs[20:]], modes=modes, fields=fields)
    assert stream.body == {"request": ASK.replace(b'"m"', b'"longer-name"'), "response": ANSWER}
    assert list(rig.metrics.models) == [("m", "longer-name")]


@every_mode
def test_a_model_is_given_back_in_events_cut_anywhere(modes: tuple[BodyMode, BodyMode]) -> None:
    rig = Rig(options=Options(model_rewrites={"m": "n"}))
    ours = ROLE + TOKEN + LAST + DONE
    theirs = ours.replace(b'"m"', b'"n"')
    for cut in range(0, len(theirs), 13):
        stream = exchange(rig, ASK_STREAM, [theirs[:cut], theirs[cut:]], modes=modes, head=OK)
        assert stream.body["response"] == ours
    (stats,) = rig.metrics.models.values()
    count = len(range(0, len(theirs), 13))
    assert total(stats.output_tokens) == (count, 4.0 * count)


@every_mode
def test_usage_is_asked_for_counted_and_hidden(modes: tuple[BodyMode, BodyMode]) -> None:
    rig = Rig(options=Options(inject_usage=True))
    stream = exchange(rig, ASK_STREAM, [ROLE + TOKEN, LAST, DONE], modes=modes, head=OK)
    assert b'"stream_options":{"include_usage":true}' in stream.body["request"]
    assert stream.body["response"] == ROLE + TOKEN + DONE
    assert rig.decisions.outcome.cached_tokens == 16


def test_usage_that_the_client_asked_for_is_not_hidden() -> None:
    rig = Rig(options=Options(inject_usage=True))
    body = ASK_STREAM.replace(b'"stream":true', b'"stream":true,"stream_options":{"include_usage":true}')
    stream = exchange(rig, body, [ROLE, LAST, DONE], head=OK)
    assert stream.body == {"request": body, "response": ROLE + LAST + DONE}


def test_usage_is_not_asked_for_where_it_could_not_be_hidden() -> None:
    rig = Rig(options=Options(inject_usage=True))
    stream = rig.open(BodyMode.BUFFERED, BodyMode.NONE)
    stream.request(chunks=[ASK_STREAM])
    stream.end()
    assert stream.body["request"] == ASK_STREAM


@pytest.mark.parametrize(("name", "value"), [("content-encoding", b"gzip"), ("content-type", b"multipart/form-data")])
def test_a_body_that_cannot_be_read_is_not_touched(name: str, value: bytes) -> None:
    rig = Rig(options=Options(model_rewrites={"m": "n"}, inject_usage=True))
    fields = [f for f in CHAT if f[0] != name] + [(name, value)]
    assert exchange(rig, ASK_STREAM, fields=fields).body["request"] == ASK_STREAM


def test_what_is_not_json_is_given_back_as_it_came() -> None:
    rig = Rig(options=Options(model_rewrites={"m": "n"}))
    text = b'upstream connect error: {"model":"n"}'
    for head in (((":status", b"503"), ("content-type", b"text/plain")), ((":status", b"200"),)):
        assert exchange(rig, answer=[text], head=head).body["response"] == text


def test_a_request_without_an_id_gets_one_and_one_with_an_id_keeps_it() -> None:
    rig = Rig()
    (given,) = exchange(rig).headers["request"]["x-request-id"]
    assert given.decode() == rig.decisions.made[-1].request_id
    kept = exchange(rig, fields=(*CHAT, ("x-request-id", b"mine")))
    assert kept.headers["request"]["x-request-id"] == [b"mine"]
    assert rig.decisions.made[-1].request_id == "mine"


# --- what is learned ---


def test_the_first_token_is_the_first_content_of_an_event_stream() -> None:
    rig = Rig()
    stream = rig.open()
    stream.request(chunks=[ASK_STREAM])
    (endpoint,) = [e for e in rig.pool.endpoints if e.in_flight]
    assert endpoint.in_flight_tokens > 0
    for after_s, data in ((0.5, ROLE), (0.25, TOKEN), (1.0, TOKEN)):
        rig.clock.advance(after_s)
        if data is ROLE:
            stream.send(response_headers=http_headers(OK))
        stream.send(response_body=pb.HttpBody(body=data))
        assert (endpoint.in_flight, endpoint.in_flight_tokens > 0) == (1, data is ROLE)
    stream.send(response_body=pb.HttpBody(body=LAST + DONE, end_of_stream=True))
    assert (rig.decisions.outcome.first_token_s, rig.decisions.outcome.duration_s) == (0.75, 1.75)
    stream.end()
    rig.assert_idle()


@pytest.mark.parametrize(
    ("body", "answer", "head"),
    [
        (ASK, ANSWER, JSON),
        (ASK_STREAM, ANSWER, JSON),
        (ASK_STREAM, b'{"error":{}}', ((":status", b"500"), ("content-type", b"application/json"))),
    ],
    ids=["not asked to stream", "answered in one piece", "an error"],
)
def test_an_answer_in_one_piece_tells_no_first_token(body: bytes, answer: bytes, head: Fields) -> None:
    rig = Rig()
    exchange(rig, body, [answer], head=head)
    assert rig.decisions.outcome.first_token_s is None
    assert total(next(iter(rig.metrics.models.values())).ttft) == (0, 0.0)


@pytest.mark.parametrize("path", [b"/v1/rerank", b"/v1/audio/speech", b"/anything"])
def test_requests_of_other_apis_teach_no_first_token(path: bytes) -> None:
    rig = Rig(config=None)
    fields = tuple((name, path if name == ":path" else value) for name, value in CHAT)
    for _ in range(5):
        exchange(rig, ASK_STREAM, [ROLE, TOKEN, LAST, DONE], fields=fields, head=OK)
        rig.clock.advance(1)
    assert rig.decisions.outcome.first_token_s is None
    for column in ("prefill_rate", "first_token_overhead"):
        assert [e.get(column) == e.get(column) for e in rig.pool.endpoints] == [False] * 3


def test_an_answer_without_tokens_is_counted_and_divides_nothing() -> None:
    rig = Rig()
    empty = b'{"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":0}}'
    exchange(rig, answer=[empty])
    (stats,) = rig.metrics.models.values()
    assert (total(stats.output_tokens), total(stats.per_token)) == ((1, 0.0), (0, 0.0))


@pytest.mark.parametrize(
    ("body", "answer", "head"),
    [
        (ASK, b'{"usage":"oops"}', JSON),
        (ASK, b'{"usage":{"prompt_tokens":"1024"}}', JSON),
        (ASK_STREAM, b'data: {"choices":[],"usage":[1]}\n\n', OK),
    ],
)
def test_usage_that_cannot_be_read_is_told_once_and_counted_each_time(
    body: bytes, answer: bytes, head: Fields, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong type crashed a picker elsewhere (llm-d-router #981); passing it over in silence would hide the worker."""
    rig = Rig()
    for _ in range(3):
        stream = exchange(rig, body, [answer], head=head)
        assert stream.body["response"] == answer
    exchange(rig)
    assert rig.metrics.reasons["usage-unreadable"] == 3
    assert len([record for record in caplog.records if "usage" in record.message]) == 1


def test_an_answer_cut_off_is_an_abort() -> None:
    rig = Rig()
    stream = rig.open()
    stream.request(chunks=[ASK_STREAM])
    stream.send(response_headers=http_headers(OK))
    stream.send(response_body=pb.HttpBody(body=TOKEN))
    stream.reset()
    rig.assert_idle()
    assert rig.decisions.outcome.aborted
    assert rig.metrics.models["m", "m"].errors == {"aborted": 1}


# --- health ---


def failing(rig: Rig, status: bytes = b"503", served: str = "") -> str:
    """One request that ends with `status`; where it was sent."""
    stream = rig.open()
    stream.request(chunks=[ASK])
    if served:
        space = {"x-gateway-destination-endpoint-served": served}
        stream.metadata_context = metadata(envoy__lb=space)
    stream.response(((":status", status), ("content-type", b"text/plain")), [b"no"])
    stream.end()
    return stream.destination.split(",")[0]


def test_server_errors_push_an_endpoint_out_and_client_errors_do_not() -> None:
    rig = Rig(endpoints=2)
    for _ in range(20):
        failing(rig, b"429")
        failing(rig, b"404")
    assert all(e.available for e in rig.pool.endpoints)
    for _ in range(6):
        failing(rig)
    assert sum(e.available for e in rig.pool.endpoints) == 1
    assert rig.health.counters["ejected"] == 1
    rig.assert_idle()


def test_of_the_requests_after_a_backoff_one_alone_is_the_trial() -> None:
    rig = Rig(endpoints=2)
    out = rig.pool.endpoints[0]
    for _ in range(3):
        rig.health.failed(out, rig.clock.time, "status 503")
    assert [e.available for e in rig.pool.endpoints] == [False, True]
    rig.clock.advance(5)
    rig.health.tick(rig.clock.time)
    streams = [rig.open() for _ in range(10)]
    for stream in streams:
        stream.request(chunks=[ASK])
    assert (out.in_flight, rig.health.counters["trials"]) == (1, 1)
    for stream in streams:
        stream.response(JSON, [ANSWER])
        stream.end()
    assert out.available
    rig.assert_idle()


def test_a_failure_from_before_the_backoff_ends_no_trial() -> None:
    rig = Rig(endpoints=2)
    old = rig.open()
    old.request(chunks=[ASK])
    out = rig.pool.by_key[old.destination.split(",")[0]]
    for _ in range(3):
        rig.health.failed(out, rig.clock.time, "status 503")
    rig.clock.advance(5)
    rig.health.tick(rig.clock.time)
    old.response(((":status", b"503"),), [b"no"])
    old.end()
    assert (out.available, rig.health.counters["ejected"]) == (True, 1)


def test_an_endpoint_that_served_in_anothers_place_bears_the_load_and_the_other_the_blame() -> None:
    rig = Rig(endpoints=2)
    stream = rig.open()
    stream.request(chunks=[ASK])
    picked = rig.pool.by_key[stream.destination.split(",")[0]]
    (other,) = (e for e in rig.pool.endpoints if e is not picked)
    tokens = picked.in_flight_tokens
    stream.metadata_context = metadata(envoy__lb={"x-gateway-destination-endpoint-served": other.address})
    stream.send(response_headers=http_headers(OK))
    assert (picked.in_flight, picked.in_flight_tokens) == (0, 0)
    assert (other.in_flight, other.in_flight_tokens) == (1, tokens)
    assert rig.reasons == {"served-elsewhere": 1}
    assert rig.health.counters["failures"] == 1
    stream.end()
    rig.assert_idle()
    assert rig.decisions.outcome.served == other.address


def test_an_error_of_the_endpoint_that_served_in_anothers_place_counts_for_both() -> None:
    rig = Rig(endpoints=2)
    stream = rig.open()
    stream.request(chunks=[ASK])
    (other,) = (e for e in rig.pool.endpoints if not e.in_flight)
    stream.metadata_context = metadata(envoy__lb={"x-gateway-destination-endpoint-served": other.address})
    stream.response(((":status", b"503"),), [b"no"])
    stream.end()
    assert rig.health.counters["failures"] == 2


def test_a_server_that_is_not_in_the_pool_takes_no_load_and_no_blame() -> None:
    rig = Rig(endpoints=2)
    failing(rig, served="10.9.9.9:1")
    assert rig.health.counters["failures"] == 1
    rig.assert_idle()


# --- metrics ---


@pytest.mark.parametrize("modes", MODES, ids=lambda m: f"{m[0].name}-{m[1].name}".lower())
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_counts_the_same_streamed_or_not(modes: tuple[BodyMode, BodyMode], streamed: bool) -> None:
    rig = Rig()
    answer = [TOKEN, LAST, DONE] if streamed else [ANSWER[:9], ANSWER[9:]]
    exchange(rig, ASK_STREAM if streamed else ASK, answer, modes=modes, head=OK if streamed else JSON)
    assert list(rig.metrics.models) == [("m", "m")]
    stats = rig.metrics.models["m", "m"]
    assert (stats.requests, stats.running, dict(stats.errors)) == (1, 0, {})
    assert total(stats.request_bytes) == (1, float(len(ASK_STREAM if streamed else ASK)))
    assert total(stats.response_bytes) == (1, float(len(b"".join(answer))))
    assert (total(stats.input_tokens), total(stats.output_tokens)) == ((1, 20.0), (1, 4.0))
    assert (total(stats.cached_tokens), total(stats.cached_error)) == ((1, 16.0), (1, 16.0))
    assert total(stats.cached_expected) == (1, 0.0)
    assert (total(stats.duration)[0], total(stats.per_token)[0]) == (1, 1)
    assert sum(rig.metrics.decision.counts) == 1
    assert rig.metrics.attempts == {"success": 1}


def test_errors_are_counted_by_status() -> None:
    rig = Rig()
    for status in (b"503", b"429", b"503"):
        failing(rig, status)
    assert rig.metrics.models["m", "m"].errors == {"503": 2, "429": 1}


# --- plugins ---

PLUGIN = '''
from epp.plugin import NoParameters, Scorer

CALLS = []


class Nosy(Scorer[NoParameters]):
    """Notes every hook and says what it should not."""

    type = "nosy"

    def score(self, request, candidates):
        return [0.5] * len(candidates)

    def picked(self, request, endpoints):
        CALLS.append(("picked", endpoints["default"].in_flight))

    def response_headers(self, request, endpoints):
        return {
            "x-good": "1 é\\t2",
            "X-Bad": "2",
            "content-length": "3",
            "x-split": "a\\r\\nb",
            "": "4",
            ":status": "200",
            "a b": "5",
            "ü": "6",
            "x-bell": "\\a",
            "x-half": "\\ud800",
            "x-long": "7" * 100_000,
        }

    def finished(self, request, endpoint, outcome):
        CALLS.append(("finished", outcome.status))

    def removed(self, endpoint):
        CALLS.append(("removed", endpoint.address))
'''
NOSY = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: "nosy_plugin:Nosy", name: nosy}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: nosy
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, object]]]:
    (tmp_path / "nosy_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("nosy_plugin")
    yield module.CALLS
    del sys.modules["nosy_plugin"]


def test_every_hook_is_called_once_and_the_pick_is_counted_before(calls: list[tuple[str, object]]) -> None:
    rig = Rig(endpoints=1, config=NOSY)
    exchange(rig)
    assert calls == [("picked", 1), ("finished", 200)]
    stream = rig.open()
    stream.request(chunks=[ASK])
    rig.remove(rig.pool.endpoints[0])
    stream.reset()
    assert calls[2:] == [("picked", 1), ("removed", "10.0.0.1:8000"), ("finished", None)]
    rig.assert_idle()


def test_a_plugins_header_that_cannot_be_set_costs_nothing_else(
    calls: list[tuple[str, object]], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(config=NOSY)
    for _ in range(2):
        headers: Mapping[str, list[bytes]] = exchange(rig).headers["response"]
        assert {name: value for name, value in headers.items() if name not in dict(JSON)} == {
            "x-good": ["1 é\t2".encode()]
        }
    assert rig.reasons == {"response-header-refused": 20}
    assert len(caplog.records) == 1


AFFINITY = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: session-affinity-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: session-affinity-scorer
"""


def test_a_session_token_reaches_the_client_and_brings_it_back() -> None:
    rig = Rig(config=AFFINITY)
    first = exchange(rig)
    (token,) = first.headers["response"]["x-session-token"]
    assert base64.b64decode(token).decode() == first.destination.split(",")[0]
    for _ in range(5):
        again = exchange(rig, fields=(*CHAT, ("x-session-token", token)))
        assert again.destination.split(",")[0] == first.destination.split(",")[0]
        assert again.headers["response"]["x-session-token"] == [token]


def test_a_session_token_is_told_as_metadata_where_no_response_is_shown() -> None:
    rig = Rig(config=AFFINITY)
    stream = rig.open(BodyMode.BUFFERED, BodyMode.NONE)
    stream.request(chunks=[ASK])
    told = stream.replies[-1].dynamic_metadata.fields["envoy.lb"].struct_value
    assert base64.b64decode(told.fields["x-session-token"].string_value).decode() == stream.destination.split(",")[0]
    stream.end()
    rig.assert_idle()


def test_a_decision_and_its_release_hold_for_an_endpoint_with_an_ipv6_address() -> None:
    rig = Rig(endpoints=0)
    rig.add(Endpoint("::1", 8000))
    stream = rig.open()
    stream.request(chunks=[ASK])
    assert stream.destination == "[::1]:8000"
    stream.metadata_context = metadata(envoy__lb={"x-gateway-destination-endpoint-served": "[::1]:8000"})
    stream.response(JSON, [ANSWER])
    stream.end()
    rig.assert_idle()
    assert rig.reasons == {}


def test_a_prompt_is_let_go_once_it_was_sent_and_still_teaches_its_rate() -> None:
    rig = Rig()
    body = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 8_000 + b'"}]}'
    stream = rig.open()
    stream.request(chunks=[body])
    flight = stream.exchange._flight
    assert flight is not None
    assert (flight.request.prompts, flight.request.prompt_seed) == ((), b"")
    stream.response(JSON, [b'{"usage":{"prompt_tokens":4000,"completion_tokens":1}}'])
    assert rig.director.rates.of("m") == pytest.approx(2.0, rel=0.05)


# --- other replicas ---


class Others:
    """Notes what other replicas are told."""

    def __init__(self) -> None:
        self.reason = ""
        self.open: dict[int, str] = {}
        self.told = 0

    def picked(self, request: InferenceRequest, endpoint: Endpoint) -> int:
        self.told += 1
        self.open[self.told] = endpoint.address
        return self.told

    def ended(self, number: int) -> None:
        del self.open[number]


def test_other_replicas_are_told_of_a_pick_and_once_of_its_end() -> None:
    rig, others = Rig(), Others()
    rig.director.shared = others
    stream = rig.open()
    stream.request(CHAT, [ASK])
    assert list(others.open.values()) == [e.address for e in rig.pool.endpoints if e.in_flight]
    stream.response(JSON, [ANSWER])
    stream.end()
    stream.end()
    assert (others.open, others.told) == ({}, 1)


def test_other_replicas_are_told_when_another_endpoint_served() -> None:
    rig, others = Rig(endpoints=2), Others()
    rig.director.shared = others
    request = rig.director.read(RequestHead("POST", "/v1/chat/completions", Headers()), ASK)
    answer = rig.director.decide(request, ASK, rig.clock.time)
    assert isinstance(answer, tuple)
    flight = answer[1]
    other = next(e for e in rig.pool.endpoints if e is not flight.endpoint)
    rig.director.response_began(
        flight, ResponseHead(status=200, headers=Headers(), served=other.address), rig.clock.time
    )
    assert list(others.open.values()) == [other.address]
    rig.director.landed(flight, complete=True, now=rig.clock.time)
    assert others.open == {}


def test_a_decision_made_alone_says_so() -> None:
    rig, others = Rig(), Others()
    rig.director.shared = others
    exchange(rig)
    others.reason = "shared-state-lost"
    exchange(rig)
    assert [decision.reasons for decision in rig.decisions.made] == [(), ("shared-state-lost",)]
    assert rig.metrics.reasons["shared-state-lost"] == 1
