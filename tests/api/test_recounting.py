"""The prefiller's count of cached tokens is in the client's usage, and no other byte of the response has changed."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.api.recounting import recount
from epp.api.rewriting import Renaming, response_rewriter

SSE = "text/event-stream"
JSON = "application/json"


def run(body: bytes, cuts: list[int], kind: str, cached: int = 96, renaming: Renaming | None = None) -> bytes:
    rewriter = response_rewriter(kind, cached_tokens=cached, renaming=renaming)
    assert rewriter is not None
    edges = [0, *sorted(cuts), len(body)]
    out = b"".join(rewriter.feed(body[a:b], False) for a, b in itertools.pairwise(edges))
    return out + rewriter.feed(b"", True)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            b'{"prompt_tokens":100,"prompt_tokens_details":{"x":1, "cached_tokens" : 99 },"n":-0.0}',
            b'{"prompt_tokens":100,"prompt_tokens_details":{"x":1, "cached_tokens" : 96 },"n":-0.0}',
        ),
        (
            b'{ "prompt_tokens_details": null, "prompt_tokens":100}',
            b'{ "prompt_tokens_details": {"cached_tokens":96}, "prompt_tokens":100}',
        ),
        (
            b'{"prompt_tokens":100,"prompt_tokens_details":{}}',
            b'{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":96}}',
        ),
        (
            b'{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":null}}',
            b'{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":96}}',
        ),
        (
            b'{"prompt_tokens":100}',
            b'{"prompt_tokens_details":{"cached_tokens":96},"prompt_tokens":100}',
        ),
        (
            b'{"input_tokens":100,"input_tokens_details":{"cached_tokens":0}}',
            b'{"input_tokens":100,"input_tokens_details":{"cached_tokens":96}}',
        ),
        (
            b'{"input_tokens":1,"cache_read_input_tokens":99,"output_tokens":5}',
            b'{"input_tokens":4,"cache_read_input_tokens":96,"output_tokens":5}',
        ),
        (
            b'{"cache_read_input_tokens":40,"input_tokens":10}',  # never more than the prompt has
            b'{"cache_read_input_tokens":50,"input_tokens":0}',
        ),
    ],
)
def test_each_api_tells_cached_tokens_in_its_own_place(usage: bytes, expected: bytes) -> None:
    assert recount(usage, 96, create=True) == expected
    json.loads(expected)


@pytest.mark.parametrize(
    "usage",
    [
        b'{"prompt_tokens":"100"}',
        b'{"prompt_tokens":100,"prompt_tokens_details":0}',
        b'{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":"many"}}',
        b'{"input_tokens":100}',
        b'{"cache_read_input_tokens":3}',
        b'{"input_tokens":1e2,"cache_read_input_tokens":3}',
        b"{}",
    ],
)
def test_usage_of_another_shape_stays_as_it_is(usage: bytes) -> None:
    assert recount(usage, 96, create=True) == usage


def usage_of(cached: int) -> str:
    return (
        f'{{"prompt_tokens": 100, "prompt_tokens_details":{{"cached_tokens":{cached}, "a":[]}},"completion_tokens":3}}'
    )


def test_document_changes_in_its_top_level_usage_only_at_every_cut() -> None:
    frame = '{"id":"c","choices":[{"usage":%s,"text":"\\"usage\\":{}"}],\n "usage" : %s, "seed":9007199254740993}\n'
    body, expected = ((frame % (usage_of(99), usage_of(n))).encode() for n in (99, 96))
    for cut in range(len(body) + 1):
        assert run(body, [cut], JSON) == expected
    assert run(body, list(range(len(body))), JSON) == expected


def stream(cached: int) -> bytes:
    return (
        b": ping\n\n"
        b'data: {"choices":[{"delta":{"content":"usage"}}],"usage":{"prompt_tokens":100,"completion_tokens":1}}\r\n\r\n'
        b'data: {"choices":[{"text":"x"}],"usage":null}\n\n'
        b'data: {"choices":[],"usage":%s}\n\n'
        b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":9,"input_tokens_details":'
        b'{"cached_tokens":%d}}}}\n\n'
        b"data: [DONE]\n\n"
    ) % (usage_of(cached).encode(), cached)


def test_stream_changes_in_that_number_only_at_every_cut() -> None:
    body, expected = stream(99), stream(7)
    for cut in range(len(body) + 1):
        assert run(body, [cut], SSE, cached=7) == expected
    assert run(body, list(range(len(body))), SSE, cached=7) == expected


def test_the_last_event_gets_the_member_that_the_worker_left_out() -> None:
    body = b'data: {"choices":[],"usage":{"prompt_tokens":100}}\n\n'
    expected = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":96},"prompt_tokens":100}}\n\n'
    assert run(body, [], SSE) == expected


def test_anthropic_usage_changes_at_the_begin_of_the_stream() -> None:
    frame = 'event: message_start\ndata: {"message":{"usage":{"input_tokens":%d,"cache_read_input_tokens":%d}}}\n\n'
    assert run((frame % (0, 100)).encode(), [], SSE) == (frame % (4, 96)).encode()


def test_model_and_usage_of_one_event_change_together() -> None:
    renaming = Renaming(target="t", client="client")
    frame = '{"model":"%s","choices":[],"usage":%s}'
    body, expected = frame % ("t", usage_of(9)), frame % ("client", usage_of(96))
    assert run(f"data: {body}\n\n".encode(), [], SSE, renaming=renaming) == f"data: {expected}\n\n".encode()
    assert run(body.encode(), [], JSON, renaming=renaming) == expected.encode()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["prompt_tokens", "prompt_tokens_details", "input_tokens", "input_tokens_details", "cache_read_input_tokens", "x"]
)
DETAILS = st.dictionaries(st.sampled_from(["cached_tokens", "y"]), JSON_VALUES, max_size=2)


@given(st.dictionaries(NAMES, JSON_VALUES | DETAILS, max_size=5), st.booleans(), st.sampled_from([None, 2]))
def test_any_usage_stays_json_and_differs_in_the_counts_alone(value: Any, create: bool, indent: int | None) -> None:
    counts = {"cached_tokens", "input_tokens", "cache_read_input_tokens"}
    before = json.dumps(value, indent=indent).encode()
    after = json.loads(recount(before, 96, create=create))
    for name in value.keys() | after.keys():
        if name.endswith("_details") and isinstance(after[name], dict):
            old = value.get(name) or {}
            assert {k: v for k, v in after[name].items() if k not in counts} == {
                k: v for k, v in old.items() if k not in counts
            }
        elif name not in counts:
            assert after[name] == value[name]


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:\\ usage\n\rdata', max_size=80).map(str.encode), st.data())
def test_anything_else_passes_unchanged(body: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=4))
    for kind in (JSON, SSE):
        assert run(body, cuts, kind) == body


def test_usage_beyond_the_bounds_passes_unchanged() -> None:
    body = b'{"usage":{"prompt_tokens":1,"x":"' + b"x" * (1 << 20) + b'"}}'
    assert run(body, list(range(0, len(body), 1 << 16)), JSON) == body
