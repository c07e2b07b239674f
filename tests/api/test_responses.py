"""Usage and first content, from every API, whatever the pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epp.api.responses import ResponseReader, Usage
from epp.request import Api

SSE = "text/event-stream; charset=utf-8"
JSON = "application/json"


def chat_stream(events: int = 30, *, done: bool = True, repeated: int = 1) -> bytes:
    head: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "model": "m"}
    chunks = [{**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None}]
    for i in range(events - 1 - repeated - done):
        chunks.append({**head, "choices": [{"index": 0, "delta": {"content": f"wörd {i}"}}], "usage": None})
    details = {"cached_tokens": 384, "created_cache_tokens": None}
    usage = {"prompt_tokens": 401, "total_tokens": 428, "completion_tokens": 27, "prompt_tokens_details": details}
    chunks += [{**head, "choices": [], "usage": usage}] * repeated
    body = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks)
    return (body + ("data: [DONE]\n\n" if done else "")).encode()


def read(pieces: list[bytes], api: Api = Api.CHAT, content_type: str = SSE, status: int = 200) -> ResponseReader:
    reader = ResponseReader(api, content_type, status)
    for piece in pieces:
        reader.feed(piece)
    reader.finish()
    return reader


def test_usage_is_the_same_for_a_stream_cut_at_every_byte() -> None:
    body = chat_stream(30)
    assert body.count(b"\n\n") == 30
    for cut in range(len(body) + 1):
        reader = read([body[:cut], body[cut:]])
        assert reader.usage == Usage(401, 27, 384)
        assert reader.bytes_seen == len(body)
        assert reader.content_seen


def test_usage_split_from_done_is_counted_once() -> None:
    body = chat_stream(5)
    cut = body.index(b"data: [DONE]")
    assert read([body[:cut], body[cut:]]).usage == Usage(401, 27, 384)


def test_repeated_usage_and_missing_done_and_missing_blank_line_are_counted_once() -> None:
    assert read([chat_stream(6, repeated=3, done=False)]).usage == Usage(401, 27, 384)
    assert read([chat_stream(6, done=False).rstrip(b"\n")]).usage == Usage(401, 27, 384)


def test_running_totals_count_as_the_last_one() -> None:
    event = 'data: {"choices":[{"delta":{"content":"x"}}],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n'
    assert read([(event % n).encode() for n in range(1, 6)]).usage == Usage(9, 5, None)


def test_first_content_is_neither_the_role_nor_an_empty_text() -> None:
    reader = ResponseReader(Api.CHAT, SSE)
    for quiet in (
        b": ping\n\n",
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":null,"tool_calls":[]}}]}\n\n',
        b'data: {"choices":[{"text":""}]}\n\n',
        b'data: {"choices":[7]}\n\ndata: {"choices":"x"}\n\ndata: nonsense\n\n',
    ):
        reader.feed(quiet)
        assert not reader.content_seen
    reader.feed(b'data: {"choices":[{"delta":{"content":"h"}}]}\n')
    assert not reader.content_seen
    reader.feed(b"\n")
    assert reader.content_seen


@pytest.mark.parametrize(
    "delta", ['{"reasoning_content":"x"}', '{"reasoning":"x"}', '{"tool_calls":[{"index":0}]}', '{"refusal":"no"}']
)
def test_reasoning_and_tool_calls_are_content(delta: str) -> None:
    assert read([f'data: {{"choices":[{{"delta":{delta}}}]}}\n\n'.encode()]).content_seen


def test_responses_api_usage_comes_from_the_completed_event() -> None:
    usage = {"input_tokens": 50, "input_tokens_details": {"cached_tokens": 48}, "output_tokens": 6, "total_tokens": 56}
    events = [
        ("response.created", {"type": "response.created", "response": {"id": "r", "usage": None}}),
        ("response.output_text.delta", {"type": "response.output_text.delta", "delta": "x"}),
        ("response.completed", {"type": "response.completed", "response": {"id": "r", "usage": usage}}),
    ]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events).encode()
    for cut in range(len(body)):
        reader = read([body[:cut], body[cut:]], Api.RESPONSES)
        assert (reader.usage, reader.content_seen) == (Usage(50, 6, 48), True)
    document = json.dumps({"object": "response", "usage": usage}).encode()
    assert read([document], Api.RESPONSES, JSON).usage == Usage(50, 6, 48)


def test_anthropic_usage_adds_cached_tokens_and_takes_the_last_output_count() -> None:
    start = {"input_tokens": 5, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 3, "output_tokens": 1}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"model": "m", "usage": start}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 12}},
        {"type": "message_stop"},
    ]
    reader = ResponseReader(Api.MESSAGES, SSE)
    seen = []
    for event in events:
        reader.feed(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        seen.append(reader.content_seen)
    assert seen == [False, True, True, True]
    assert reader.finish() == Usage(98, 12, 90)


USAGE = '{"prompt_tokens":401,"total_tokens":409,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":384}}'


def test_usage_of_a_document_is_found_at_any_cut_and_only_on_top() -> None:
    choice = '{"text":"\\"usage\\":{","usage":{"prompt_tokens":1},"x":["}"]}'
    body = f'{{"choices":[{choice}], "usage" : {USAGE},"y":"\\\\"}}'.encode()
    for cut in range(len(body) + 1):
        assert read([body[:cut], body[cut:]], Api.COMPLETIONS, JSON).usage == Usage(401, 8, 384)


def test_what_follows_a_whole_document_counts_nothing() -> None:
    body = b' {"usage": {"prompt_tokens": 5}}\n'
    assert read([body, body[:20], b" "], content_type=JSON).usage == Usage(5)
    assert read([b"", body], content_type=JSON).usage == Usage(5)
    assert read([b'{"usage": null}'], content_type=JSON).usage is None


def test_large_answer_is_scanned_not_held() -> None:
    reader = ResponseReader(Api.EMBEDDINGS, JSON)
    row = b'{"object":"embedding","embedding":[' + b"0.0123," * 20_000 + b"1]},"
    reader.feed(b'{"data":[')
    for _ in range(20):
        reader.feed(row)
    reader.feed(b'{}],"usage":{"prompt_tokens":7,"total_tokens":7}}')
    assert reader.finish() == Usage(7, None, None)
    assert reader.content_seen


@pytest.mark.parametrize(
    "body",
    [
        b'{"usage":"oops"}',
        b'{"usage":{"prompt_tokens":"1024","completion_tokens":2}}',
        b'{"usage":{"prompt_tokens":1024,"completion_tokens":2,"prompt_tokens_details":0}}',
        b'{"usage":null}',
        b"[1,2]",
        b'{"usage":{"prompt_tokens":1e3,"completion_tokens":2}}',
        b'{"usage":{"prompt_tokens":-1}}',
        b'{"usage":{"prompt_tokens":%s}}' % (b"9" * 6000),
        b'{"usage":[1]}',
        b'{"usage":7}',
        b'{"usage":{}}',
        b'{"usage":{"x":"' + b"y" * 20_000 + b'"}}',
        b'{"usage":' + b"[" * 5000,
        b'{"usage',
        b'}}]],:"{{',
    ],
    ids=lambda value: repr(value[:50]),
)
def test_wrong_typed_usage_counts_nothing_and_never_raises(body: bytes) -> None:
    for cut in range(0, len(body), max(1, len(body) // 50)):
        assert read([body[:cut], body[cut:]], Api.CHAT, JSON).usage is None
    assert read([b"data: " + body + b"\n\ndata: {}\n\n"], Api.CHAT, SSE).usage is None


def test_malformed_usage_is_told_as_a_fault() -> None:
    assert read([b'{"usage":"oops"}'], Api.CHAT, JSON).faults == 1
    assert read([b'data: {"usage":"oops"}\n\n'], Api.CHAT, SSE).faults == 1
    assert read([b'data: {"usage":{"prompt_tokens":"1"}}\n\n'], Api.CHAT, SSE).faults == 1
    assert read([b'data: {"usage":null}\n\ndata: [DONE]\n\n'], Api.CHAT, SSE).faults == 0
    assert read([b"data: " + b"x" * (5 << 20)], Api.CHAT, SSE).faults == 1


def test_answer_without_tokens_has_no_content_and_divides_nothing() -> None:
    reader = read([b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}\n\ndata: [DONE]\n\n'])
    assert (reader.usage, reader.content_seen) == (Usage(3, 0, None), False)


@pytest.mark.parametrize("content_type", ["text/plain", "text/html", "", "application/octet-stream", JSON, SSE])
def test_error_and_foreign_answers_count_nothing(content_type: str) -> None:
    text = b"upstream connect error or disconnect/reset before headers"
    reader = read([text], Api.CHAT, content_type, 503)
    assert (reader.usage, reader.content_seen, reader.bytes_seen) == (None, False, len(text))
    assert read([text], Api.CHAT, content_type).usage is None


def test_compressed_answer_is_not_read() -> None:
    reader = ResponseReader(Api.CHAT, JSON, 200, "gzip")
    reader.feed(b'{"usage":{"prompt_tokens":1}}')
    assert reader.finish() is None
    assert reader.content_seen
