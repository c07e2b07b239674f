"""The client sees its own model name and no usage it did not ask for; all else is byte for byte the worker's."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.api.rewriting import Renaming, response_rewriter

SSE = "text/event-stream"
JSON = "application/json"
NAMES = Renaming(target="base/v2", client='my "model"')
CLIENT = json.dumps(NAMES.client).encode()


def run(body: bytes, cuts: list[int], kind: str, renaming: Renaming | None = NAMES, hide_usage: bool = False) -> bytes:
    rewriter = response_rewriter(kind, renaming=renaming, hide_usage=hide_usage)
    assert rewriter is not None
    edges = [0, *sorted(cuts), len(body)]
    out = b"".join(rewriter.feed(body[a:b], False) for a, b in itertools.pairwise(edges))
    return out + rewriter.feed(b"", True)


DOCUMENT = (
    b'{"id":"x", "choices":[{"model":"base/v2","text":"\\"model\\":\\"base/v2\\" \\\\"}],\r\n "model" :\t"base\\/v2" ,'
    b'"logprob":-0.0,"n":1E5,"usage":{"model":"base/v2"}}\n'
)
EVENTS = (
    b": ping\n\n"
    b'data: {"model":"base/v2","choices":[{"delta":{"content":"\\"model\\":\\"base/v2\\""}}],"usage":null}\r\n\r\n'
    b"event: response.created\n"
    b'data: {"type":"response.created","response":{"x":{"model":"base/v2"},"model":"base/v2"}}\n\n'
    b'data: {"type":"message_start","message":{"model":"base/v2"}}\r\r'
    b'data: {"model":\ndata: "base/v2","choices":[]\ndata: }\n\n'
    b'data: {"model":"other","choices":[]}\n\n'
    b"data: [DONE]\n\n"
    b'data: {"model":"base/v2"}'
)


def expected_events() -> bytes:
    renamed = EVENTS.replace(b'"model":"base/v2","choices":[{', b'"model":%s,"choices":[{' % CLIENT)
    renamed = renamed.replace(b'},"model":"base/v2"}}\n\n', b'},"model":%s}}\n\n' % CLIENT)
    renamed = renamed.replace(b'"message":{"model":"base/v2"}', b'"message":{"model":%s}' % CLIENT)
    renamed = renamed.replace(b'data: "base/v2","choices"', b'data: %s,"choices"' % CLIENT)
    return renamed.removesuffix(b'"base/v2"}') + CLIENT + b"}"


def test_document_changes_in_its_top_level_model_only_at_every_cut() -> None:
    expected = DOCUMENT.replace(b'"base\\/v2"', CLIENT)
    for cut in range(len(DOCUMENT) + 1):
        assert run(DOCUMENT, [cut], JSON) == expected
    assert run(DOCUMENT, list(range(len(DOCUMENT))), JSON) == expected


def test_stream_changes_in_its_models_only_at_every_cut() -> None:
    expected = expected_events()
    assert expected.count(CLIENT) == 5
    for cut in range(len(EVENTS) + 1):
        assert run(EVENTS, [cut], SSE) == expected
    assert run(EVENTS, list(range(len(EVENTS))), SSE) == expected


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:\\ model\n\rdata', max_size=80).map(str.encode), st.data())
def test_anything_else_passes_unchanged(body: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=4))
    for kind in (JSON, SSE):
        assert run(body, cuts, kind, hide_usage=True) == body


def test_nothing_to_change_needs_no_rewriter() -> None:
    assert response_rewriter(SSE) is None
    assert response_rewriter(JSON, hide_usage=True) is None
    assert response_rewriter("text/plain", renaming=NAMES, hide_usage=True) is None
    assert response_rewriter(SSE, renaming=NAMES, content_encoding="br") is None
    assert response_rewriter("application/problem+json", renaming=NAMES) is not None


def test_injected_usage_event_is_taken_out_whole() -> None:
    content = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    usage = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":1}}\n\n'
    filtered = b'data: {"choices":[],"prompt_filter_results":[]}\n\n'
    done = b"data: [DONE]\n\n"
    body = filtered + content + usage + done
    for cut in range(len(body) + 1):
        assert run(body, [cut], SSE, renaming=None, hide_usage=True) == filtered + content + done


def test_usage_beside_choices_becomes_null() -> None:
    body = b'data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":1},"model":"base/v2"}\n\n'
    expected = b'data: {"choices":[{"text":"x"}],"usage":null,"model":%s}\n\n' % CLIENT
    assert run(body, [], SSE, hide_usage=True) == expected


def test_events_leave_as_soon_as_they_are_whole() -> None:
    rewriter = response_rewriter(SSE, renaming=NAMES)
    assert rewriter is not None
    assert rewriter.feed(b'data: {"a":1}\n', False) == b""
    assert rewriter.feed(b"\ndata: {", False) == b'data: {"a":1}\n\n'


@pytest.mark.parametrize("kind", [JSON, SSE])
def test_value_beyond_the_bounds_passes_unchanged(kind: str) -> None:
    body = b'{"model":"' + b"x" * (5 << 20) + b'","model":"y"}'
    if kind == SSE:
        body = b"data: " + body + b'\n\ndata: {"model":"base/v2"}\n\n'
    assert run(body, list(range(0, len(body), 1 << 20)), kind) == body
