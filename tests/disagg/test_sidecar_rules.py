"""The sidecar's rules without a network: bodies of both legs, who is asked next, what the client is told, the lease."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.disagg.sidecar import bodies
from epp.disagg.sidecar.exchange import MAX_NAMED, Call, Exchange, Proceed, Refuse, Rules
from epp.request import Api

CHAT = "/v1/chat/completions"
BODY = b'{ "model":"m", "stream":true, "max_tokens": 64,"messages":[{"role":"user","content":"\\u00e9 x"}] }'
PARAMS = b'{"do_remote_prefill":true,"remote_block_ids":[[1, 2]],"remote_host":"10.0.0.7","remote_port":5600}'
ANSWER = b'{"id":"x","usage":{"prompt_tokens":9},"kv_transfer_params":' + PARAMS + b"}"
P1, P2 = "10.0.0.1:8000", "10.0.0.2:8000"


def exchange(named: str = f"{P1},{P2}", body: bytes = BODY, path: str = CHAT, allowed: Any = (P1, P2)) -> Exchange:
    rules = Rules(allowed=lambda address: address in allowed)
    return Exchange(rules, path, {"x-prefiller-host-port": named}, body)


@pytest.mark.parametrize(
    ("api", "limits"),
    [
        (Api.CHAT, {"max_tokens": 1, "max_completion_tokens": 1}),
        (Api.COMPLETIONS, {"max_tokens": 1}),
        (Api.RESPONSES, {"max_output_tokens": 1}),
        (Api.MESSAGES, {"max_tokens": 1}),
    ],
)
def test_the_prefill_leg_asks_one_token_at_once_and_nothing_that_one_token_cannot_keep(
    api: Api, limits: Mapping[str, int]
) -> None:
    """Bug cases: vLLM answers 400 to stream_options without stream, and to min_tokens above max_tokens."""
    asked = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 5,
        "n": 3,
        "best_of": 4,
        "logprobs": True,
        "top_logprobs": 5,
        "temperature": 0.5,
        "messages": [{"role": "user", "content": "é"}],
    }
    leg = json.loads(bodies.prefill_body(json.dumps(asked).encode(), api))
    params = leg.pop("kv_transfer_params")
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    kept = {name: asked[name] for name in ("model", "temperature", "messages")}
    assert leg == {**kept, **limits, "stream": False}


text = st.text(max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(text.filter(lambda t: t != bodies.KV), values, max_size=5), st.booleans(), st.booleans())
def test_the_decode_leg_is_the_clients_bytes_but_for_what_was_handed_over(
    body: dict[str, Any], spaced: bool, ascii_only: bool
) -> None:
    client = json.dumps(body, indent=1 if spaced else None, ensure_ascii=ascii_only).encode()
    leg = bodies.decode_body(client, PARAMS)
    assert json.loads(leg) == {**body, bodies.KV: json.loads(PARAMS)}
    member = b'"kv_transfer_params":' + PARAMS
    assert leg.replace(member + b",", b"", 1).replace(member, b"", 1) == client
    assert bodies.decode_body(client, None) == client


def test_a_client_cannot_name_where_the_worker_fetches_from() -> None:
    client = b'{"model":"m","kv_transfer_params":{"remote_host":"10.9.9.9"},"prompt":"x"}'
    assert b"10.9.9.9" not in bodies.decode_body(client, None)
    assert json.loads(bodies.decode_body(client, PARAMS))["kv_transfer_params"] == json.loads(PARAMS)
    alone = exchange(named="", body=client).start()
    assert isinstance(alone, Proceed)
    assert json.loads(alone.body)["kv_transfer_params"] is None


def test_a_peers_prefill_leg_passes_as_it_is() -> None:
    """Workers that do both are each behind a sidecar: the leg of one goes through the other's."""
    leg = bodies.prefill_body(BODY, Api.CHAT)
    assert bodies.decode_body(leg, None) == leg
    for fetching in (b"true", b"1", b'"x"'):
        changed = leg.replace(b'"do_remote_prefill":false', b'"do_remote_prefill":' + fetching)
        assert json.loads(bodies.decode_body(changed, None))["kv_transfer_params"] is None
    for bad in (b"[]", b'"x"', b"7"):
        body = b'{"kv_transfer_params":' + bad + b"}"
        assert bodies.decode_body(body, None) == b'{"kv_transfer_params":null}'


def test_what_the_prefiller_hands_over_goes_on_byte_for_byte_with_its_count_of_cached_tokens() -> None:
    asked = exchange()
    call = asked.start()
    assert isinstance(call, Call)
    assert call.address == P1
    answer = ANSWER.replace(b'"prompt_tokens":9', b'"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}')
    proceed = asked.answered(200, answer, "application/json", 100.0)
    assert isinstance(proceed, Proceed)
    assert (proceed.outcome, proceed.cached_tokens, proceed.not_after) == ("prefill-decode", 8, 125.0)
    assert b'"kv_transfer_params":' + PARAMS in proceed.body


@pytest.mark.parametrize(
    ("named", "path", "body"),
    [("", CHAT, BODY), (P1, "/v1/embeddings", BODY), (P1, CHAT, b"{not json"), (P1, CHAT, b"[1]"), (P1, CHAT, b"")],
)
def test_what_is_not_to_be_handed_over_goes_on_as_it_is(named: str, path: str, body: bytes) -> None:
    action = exchange(named, body, path).start()
    assert isinstance(action, Proceed)
    assert (action.body, action.outcome) == (body, "decode-only")


@pytest.mark.parametrize("named", ["10.0.0.9:22", f"{P1},10.0.0.9:22", "10.0.0.1:8001", "localhost:8000", "x"])
def test_who_is_not_in_the_pool_is_never_asked(named: str) -> None:
    action = exchange(named).start()
    assert isinstance(action, Refuse)
    assert action.status == 403
    assert b"10.0.0.9" not in action.body


def test_addresses_are_compared_in_their_shortest_form_and_their_number_is_bounded() -> None:
    action = exchange("[fd00:0:0::1]:8000", allowed=("[fd00::1]:8000",)).start()
    assert isinstance(action, Call)
    many = exchange(",".join(f"10.0.0.{i}:1" for i in range(MAX_NAMED + 1))).start()
    assert isinstance(many, Refuse)
    assert many.status == 400


@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_the_clients_own_fault_is_told_to_the_client(status: int) -> None:
    asked = exchange()
    asked.start()
    action = asked.answered(status, b'{"error":"no"}', "application/json", 0.0)
    assert action == Refuse(status, b'{"error":"no"}', "application/json")


@pytest.mark.parametrize("how", [502, 503, 504, "unreachable", "reset", "timeout"])
def test_a_prefiller_that_fails_is_followed_by_the_next_and_then_by_nobody(how: int | str) -> None:
    asked = exchange()
    seen = [asked.start()]
    for _ in range(2):
        seen.append(asked.failed(how) if isinstance(how, str) else asked.answered(how, b"", "", 0.0))
    assert [a.address for a in seen if isinstance(a, Call)] == [P1, P2]
    last = seen[-1]
    assert isinstance(last, Proceed)
    assert (last.outcome, last.why, last.body) == ("decode-only", f"prefill-{how}", BODY)


@pytest.mark.parametrize(
    ("status", "answer", "why"),
    [
        (500, b"boom", "prefill-5xx"),
        (200, b"{}", "nothing-handed-over"),
        (200, b'{"kv_transfer_params":null}', "nothing-handed-over"),
        (200, b"not json", "nothing-handed-over"),
    ],
)
def test_a_prefiller_that_hands_nothing_over_is_not_tried_again(status: int, answer: bytes, why: str) -> None:
    asked = exchange()
    asked.start()
    action = asked.answered(status, answer, "", 0.0)
    assert isinstance(action, Proceed)
    assert (action.why, action.body) == (why, BODY)


def test_blocks_whose_lease_is_over_are_computed_again_once_and_then_not_counted_on() -> None:
    asked = exchange()
    asked.start()
    first = asked.answered(200, ANSWER, "", 0.0)
    assert isinstance(first, Proceed)
    again = asked.late()
    assert isinstance(again, Call)
    assert again.address == P1
    second = asked.answered(200, ANSWER, "", 100.0)
    assert isinstance(second, Proceed)
    assert second.not_after == 125.0
    last = asked.late()
    assert isinstance(last, Proceed)
    assert (last.why, last.body, last.not_after) == ("lease", BODY, None)
