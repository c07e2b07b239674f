"""A request whose prompt another worker computes, on its way through the picker: headers, loads, record, metrics."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from epp.disagg import headers
from epp.endpoint import Endpoint
from epp.explain import explain
from epp.gateway.pb import ext_proc_pb2 as pb
from epp.request import InferenceRequest
from tests.disagg.test_handler import BY_DECIDER, HEAD
from tests.exchanges import Rig, Stream
from tests.gateway.ext_proc_peer import CHAT, Fields, http_headers

JSON: Fields = ((":status", b"200"), ("content-type", b"text/event-stream"))
LONG = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"' + b"tell me " * 2000 + b'"}]}'
SHORT = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
TOKEN = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
FOREIGN: Fields = tuple((name, b"10.0.0.9:22") for name in headers.CONTROL)


def rig() -> Rig:
    """One prefill worker at port 8000, one that decodes at 8001."""
    made = Rig(2, config=HEAD % BY_DECIDER)
    for endpoint, role in zip(made.pool.endpoints, ("prefill", "decode"), strict=True):
        endpoint.labels = {"llm-d.ai/role": role}
    return made


def ask(made: Rig, body: bytes, fields: Fields = CHAT) -> Stream:
    stream = made.open()
    stream.request(fields, [body])
    return stream


def test_the_worker_is_told_who_prefills_and_a_clients_own_word_for_it_never_arrives() -> None:
    """Bug case: a client that names a prefiller makes the sidecar ask any address of the network."""
    made = rig()
    for body, told in ((LONG, b"10.0.0.1:8000"), (SHORT, None)):
        stream = ask(made, body, (*CHAT, *FOREIGN))
        sent = stream.headers["request"]
        assert stream.destination == "10.0.0.1:8001"
        assert sent.get(headers.PREFILLER) == ([told] if told else None)
        assert not {headers.ENCODERS, headers.DATA_PARALLEL, headers.KV_SOURCE} & sent.keys()
        stream.reset()


def test_a_clients_control_headers_are_removed_where_the_body_is_not_read_either() -> None:
    made = Rig(2)
    stream = made.open()
    stream.request(((":method", b"POST"), (":path", b"/other"), *FOREIGN), [b"\x00not json"])
    assert not set(headers.CONTROL) & stream.headers["request"].keys()
    stream.reset()


def test_the_prompt_weighs_where_it_is_computed_until_the_first_token_and_the_request_until_its_end() -> None:
    made = rig()
    prefill, decode = made.pool.endpoints
    stream = ask(made, LONG)
    assert (prefill.in_flight, decode.in_flight) == (1, 1)
    assert prefill.in_flight_tokens > 3000
    assert decode.in_flight_tokens == 0
    stream.send(response_headers=http_headers(JSON, end=False))
    stream.send(response_body=pb.HttpBody(body=TOKEN))
    assert (prefill.in_flight, prefill.in_flight_tokens, decode.in_flight) == (0, 0, 1)
    stream.send(response_body=pb.HttpBody(end_of_stream=True))
    stream.end()
    made.assert_idle()


@pytest.mark.parametrize("when", ["at once", "after the head", "after a token"])
def test_both_are_released_exactly_once_however_it_ends(when: str) -> None:
    made = rig()
    stream = ask(made, LONG)
    if when != "at once":
        stream.send(response_headers=http_headers(JSON, end=False))
    if when == "after a token":
        stream.send(response_body=pb.HttpBody(body=TOKEN))
    stream.reset()
    made.assert_idle()
    assert [e.in_flight for e in made.pool.endpoints] == [0, 0]


def test_the_record_the_table_and_the_metrics_say_who_prefilled() -> None:
    made = rig()
    for body in (LONG, SHORT):
        ask(made, body).reset()
    record = made.decisions.made[0].as_dict()
    assert (record["prefill"], record["kind"]) == ("10.0.0.1:8000", "prefill-decode")
    assert made.decisions.made[1].as_dict()["kind"] == "decode-only"
    console = Console(width=100, file=io.StringIO())
    console.print(explain(record))
    assert "prefill-decode  prefill at 10.0.0.1:8000" in console.file.getvalue()  # type: ignore[attr-defined]
    page = made.metrics.render().decode()
    for kind in ("prefill-decode", "decode-only"):
        name = f'disagg_decision_total{{decision_type="{kind}",model_name="m"}} 1.0'
        assert f"llm_d_inference_scheduler_{name}" in page


def test_a_prefiller_is_not_blamed_for_what_the_decoding_worker_answers() -> None:
    made = rig()
    stream = ask(made, LONG)
    stream.response(((":status", b"503"),), [b"{}"])
    stream.end()
    assert made.health.counters["failures"] == 1
    assert made.pool.endpoints[0].available


class Told:
    """What other replicas are told."""

    reason = ""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.count = 0

    def picked(self, request: InferenceRequest, endpoint: Endpoint) -> int:
        self.count += 1
        self.open[self.count] = endpoint.address
        return self.count

    def ended(self, number: int) -> None:
        self.open.pop(number, None)


def test_other_replicas_are_told_of_both_and_of_the_end_of_each() -> None:
    made, told = rig(), Told()
    made.director.shared = told
    stream = ask(made, LONG)
    assert sorted(told.open.values()) == ["10.0.0.1:8000", "10.0.0.1:8001"]
    stream.send(response_headers=http_headers(JSON, end=False))
    stream.send(response_body=pb.HttpBody(body=TOKEN))
    assert list(told.open.values()) == ["10.0.0.1:8001"]
    stream.reset()
    assert told.open == {}
