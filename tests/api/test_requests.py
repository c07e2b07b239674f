"""Reading requests: what is taken, what is refused and with what words."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.api.errors import BadRequest
from epp.api.requests import LOAD_ONLY, MAX_PROMPTS, parse_request
from epp.request import Api, Headers, InferenceRequest, RequestHead

CHAT = "/v1/chat/completions"


def head(path: str = CHAT, method: str = "POST", **headers: str) -> RequestHead:
    return RequestHead(method, path, Headers({k.replace("_", "-"): [v.encode()] for k, v in headers.items()}))


def parse(
    body: bytes | dict[str, Any] | None, path: str = CHAT, method: str = "POST", **headers: str
) -> InferenceRequest:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    return parse_request(head(path, method, **headers), data, "r-1")


def refusal(body: bytes | dict[str, Any] | None, path: str = CHAT) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(body, path)
    return caught.value


def completions(prompt: str) -> bytes:
    return b'{"model": "m", "prompt": %s}' % prompt.encode()


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "multimodal"),
    [
        ({"role": "user", "content": "hi"}, False),
        ({"role": "user", "content": ""}, False),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, False),
        ({"role": "assistant", "tool_calls": [CALL]}, False),
        ({"role": "assistant", "content": [], "tool_calls": [CALL]}, False),
        ({"role": "developer", "content": "be brief"}, False),
        ({"role": "tool", "tool_call_id": "c1", "content": "a.py"}, False),
        ({"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a.py"}]}, False),
        ({"role": "assistant", "content": "x", "reasoning_content": "because", "name": "bot"}, False),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, False),
        ({"role": "user", "content": ["bare text", {"type": "text", "text": '"image_url"'}]}, False),
        ({"role": "user", "content": [{"type": "text", "text": "what is this?"}, IMAGE]}, True),
        ({"role": "user", "content": [{"image_url": "https://example.com/a.png"}]}, True),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}, True),
        ({"role": "user", "content": [{"type": "video_url", "video_url": {"url": "https://example.com/v"}}]}, True),
    ],
)
def test_every_chat_content_shape_that_vllm_takes_is_read(message: dict[str, Any], multimodal: bool) -> None:
    messages = [{"role": "system", "content": "s"}, message]
    request = parse({"model": "m", "messages": messages})
    assert request.prompts == (json.dumps(messages)[:-1].encode(),)
    assert request.multimodal is multimodal


def test_next_turn_begins_with_the_bytes_of_the_former() -> None:
    turn = b'{"model":"m","messages":[ {"role":"user","content":"a"} \n ],"tools":[1]}'
    following = b'{"tools":[1],"messages":[ {"role":"user","content":"a"},{"role":"user","content":"b"}],"model":"m"}'
    former, later = parse(turn), parse(following)
    assert isinstance(former.prompts[0], bytes)
    assert isinstance(later.prompts[0], bytes)
    assert later.prompts[0].startswith(former.prompts[0])
    assert former.prompts[0] == b'[ {"role":"user","content":"a"}'
    assert former.prompt_seed == later.prompt_seed != b""


def test_seed_tells_tools_from_system() -> None:
    base = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    seeds = {parse({**base, key: "s"}, "/v1/messages").prompt_seed for key in ("tools", "system", "instructions")}
    assert len(seeds) == 3
    assert parse({**base, "tools": None}).prompt_seed == b""


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ('"say \\u0041 \\"hi\\""', (b'say \\u0041 \\"hi\\"',)),
        ('["a", "b"]', (b"a", b"b")),
        ("[1, 2, 3]", ([1, 2, 3],)),
        ("[[1, 2], [4294967295]]", ([1, 2], [4294967295])),
    ],
)
@pytest.mark.parametrize(("path", "key"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
def test_every_prompt_shape_is_read(prompt: str, prompts: tuple[Any, ...], path: str, key: str) -> None:
    request = parse(b'{"model":"m","%s":%s}' % (key.encode(), prompt.encode()), path)
    got = tuple(p if isinstance(p, bytes) else p.tolist() for p in request.prompts)
    assert got == prompts
    assert request.tokens_exact is not isinstance(prompts[0], bytes)


def test_token_ids_are_uint32_and_counted_exactly() -> None:
    request = parse({"model": "m", "prompt": [list(range(500)), [7]]}, "/v1/completions")
    assert [p.dtype for p in request.prompts if not isinstance(p, bytes)] == [np.uint32, np.uint32]
    assert (request.prompt_tokens, request.tokens_exact) == (501, True)


def test_text_is_counted_as_bytes_over_four_seed_included() -> None:
    request = parse({"model": "m", "prompt": "x" * 400}, "/v1/completions")
    assert (request.prompt_tokens, request.tokens_exact) == (100, False)
    with_tools = parse({"model": "m", "messages": [{"content": "x" * 400}], "tools": ["y" * 400]})
    assert 200 <= with_tools.prompt_tokens <= 210


@pytest.mark.parametrize(
    ("prompt", "path"),
    [
        ("[]", "prompt"),
        ("[ ]", "prompt"),
        ("[[]]", "prompt[0]"),
        ("[[1], []]", "prompt[1]"),
        ('[1, "a"]', "prompt[1]"),
        ('["a", 1]', "prompt[1]"),
        ("[[1], 2]", "prompt[1]"),
        ("[[1, 2], [3, null]]", "prompt[1][1]"),
        ("[1.5]", "prompt[0]"),
        ("[-1]", "prompt[0]"),
        ("[1, 2, -3]", "prompt[2]"),
        ("[4294967296]", "prompt[0]"),
        ("[" + "9" * 5000 + "]", "prompt[0]"),
        ("[true]", "prompt[0]"),
        ("[null]", "prompt[0]"),
        ("7", "prompt"),
        ("{}", "prompt"),
        ("null", "prompt"),
        ("[NaN]", "prompt"),
    ],
)
def test_malformed_prompt_is_refused_by_its_place(prompt: str, path: str) -> None:
    error = refusal(completions(prompt), "/v1/completions")
    assert error.path == path
    assert str(error) == f"{path}: {error.reason}"


@pytest.mark.parametrize("prompt", ['["\\ud800"]', '["a", NaN]', "[[1], [NaN]]", '["a", -Infinity]', '[{"text": NaN}]'])
def test_list_that_only_python_parses_goes_by_load_alone(prompt: str) -> None:
    request = parse(completions(prompt), "/v1/completions")
    assert (request.model, request.prompts, request.attributes[LOAD_ONLY]) == ("m", (), "no-prompt")


@pytest.mark.parametrize("item", [b"[1]", b"[]", b'""', b'"a" ', b' "\\", \\""'])
def test_endless_list_of_prompts_goes_by_load_alone_without_being_taken_apart(item: bytes) -> None:
    body = completions("[" + ",".join([item.decode()] * 200_000) + "]")
    tracemalloc.start()
    try:
        request = parse(body, "/v1/completions")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (request.prompts, request.attributes[LOAD_ONLY]) == ((), "too-many-prompts")
    assert peak < 8 * len(body)


def test_as_many_prompts_as_are_looked_at_pass_whatever_is_in_them() -> None:
    prompts = ['he said "a", "b", \\', 'x",', ""] * 682
    request = parse(completions(json.dumps(prompts)), "/v1/completions")
    assert len(request.prompts) == len(prompts)


def test_tolerant_reader_bounds_the_members() -> None:
    members = b"".join(b',"k%d":1' % i for i in range(2_000))
    body = b'{"model":"m","prompt":"a","x":NaN' + members + b"}"
    assert refusal(body, "/v1/completions").reason == "has more than 1024 members"


def test_tolerant_reader_refuses_what_is_cut_or_followed_by_more() -> None:
    good = b'{"model": "m", "prompt": "a", "x": [NaN]}'
    assert parse(good + b" \n", "/v1/completions").model == "m"
    for end in range(len(good)):
        assert "JSON" in refusal(good[:end], "/v1/completions").reason or not end
    for more in (b"x", b"{}", b",", b"}"):
        assert "Extra data" in refusal(good + more, "/v1/completions").reason
    for comma in (b'{"model":"m",}', b'{,"model":"m"}', b'{"x":NaN,}', b'{"x" NaN}', b"{NaN:1}"):
        assert "is not valid JSON" in refusal(comma, "/v1/completions").reason


def test_text_with_a_lone_surrogate_is_a_prompt() -> None:
    assert parse(completions('"a\\ud800"'), "/v1/completions").prompts == (b"a\\ud800",)


def test_prompt_embeds_stand_for_a_prompt() -> None:
    request = parse({"model": "m", "prompt_embeds": "AAAA"}, "/v1/completions")
    assert (request.prompts, request.attributes[LOAD_ONLY]) == ((), "no-prompt")


def test_more_prompts_than_are_scored_go_by_load_alone() -> None:
    request = parse({"model": "m", "input": ["word"] * (MAX_PROMPTS + 1)}, "/v1/embeddings")
    assert (request.prompts, request.attributes[LOAD_ONLY]) == ((), "too-many-prompts")
    assert request.prompt_tokens > MAX_PROMPTS


def test_embeddings_of_a_chat_are_read_as_a_chat() -> None:
    request = parse({"model": "m", "messages": [{"role": "user", "content": [IMAGE]}]}, "/v1/embeddings")
    assert request.multimodal
    assert len(request.prompts) == 1
    assert refusal({"model": "m"}, "/v1/embeddings").path == "input"


def test_responses_input_is_text_or_items() -> None:
    text = parse({"model": "m", "input": "hello", "instructions": "be brief", "max_output_tokens": 9}, "/v1/responses")
    assert (text.prompts, text.max_tokens) == ((b"hello",), 9)
    assert b"be brief" in text.prompt_seed
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, {"type": "function_call_output"}]
    listed = parse({"model": "m", "input": items}, "/v1/responses")
    assert listed.prompts == (json.dumps(items)[:-1].encode(),)
    assert listed.multimodal
    assert refusal({"model": "m"}, "/v1/responses").path == "input"


def test_conversations_need_neither_model_nor_items() -> None:
    items = [{"type": "message", "role": "user", "content": "hi"}]
    assert parse({"items": items}, "/v1/conversations").prompts == (json.dumps(items)[:-1].encode(),)
    assert parse({"metadata": {}}, "/v1/conversations").attributes[LOAD_ONLY] == "no-prompt"


def test_anthropic_messages_are_read_with_system_and_nested_images() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}
    body = {
        "model": "m",
        "system": [{"type": "text", "text": "s"}],
        "messages": [{"role": "user", "content": [result]}],
        "max_tokens": 5,
    }
    request = parse(body, "/v1/messages")
    assert (request.api, request.max_tokens, request.multimodal) == (Api.MESSAGES, 5, True)
    assert b'"text": "s"' in request.prompt_seed
    body["messages"] = [{"role": "user", "content": [{**result, "content": [{"type": "text", "text": "x"}]}]}]
    assert not parse(body, "/v1/messages").multimodal


@pytest.mark.parametrize(
    "messages", ["[7]", "[{}, null]", '[{"content": [1]}]', '[{"content": {"type": "image"}}]', "[NaN]"]
)
def test_messages_only_the_worker_can_judge_are_passed_on(messages: str) -> None:
    request = parse(b'{"model":"m","messages":%s}' % messages.encode())
    assert (request.prompts, request.multimodal) == ((messages[:-1].encode(),), False)


def test_limits_salt_and_streaming_are_read() -> None:
    base = {"model": "m", "messages": [], "max_tokens": 7, "cache_salt": "tenant", "stream": True}
    request = parse(base)
    assert (request.max_tokens, request.cache_salt, request.stream) == (7, "tenant", True)
    assert parse({**base, "max_completion_tokens": 3}).max_tokens == 3
    odd = parse({**base, "max_tokens": "many", "cache_salt": 5, "stream": None})
    assert (odd.max_tokens, odd.cache_salt, odd.stream) == (None, "", False)


@pytest.mark.parametrize(
    ("hints", "session"),
    [
        ({"conversation": "conv_1", "user": "u"}, "conv_1"),
        ({"conversation": {"id": "conv_2"}}, "conv_2"),
        ({"prompt_cache_key": "k", "previous_response_id": "resp_1"}, "k"),
        ({"previous_response_id": "resp_1"}, "resp_1"),
        ({"user": "u" * 999}, "u" * 256),
        ({"conversation": 5, "user": None}, ""),
    ],
)
def test_session_is_named_by_the_surest_hint(hints: dict[str, Any], session: str) -> None:
    body = {"model": "m", "input": "x", **hints}
    assert parse(body, "/v1/responses").session_id == session
    assert parse(body, "/v1/responses", x_session_token="tok").session_id == "tok"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b"{", ""),
        (b"[]", ""),
        (b'"x"', ""),
        (b"NaN", ""),
        (b'{"model":"m",}', ""),
        (b'{"model":"m"} x', ""),
        (b'{"model":1}', "model"),
        (b'{"model":""}', "model"),
        (b'{"model":null}', "model"),
        (b"{}", "model"),
        (b'{"model":"\\ud800"}', "model"),
        (b'{"model":"m","messages":[{"content":"\xff"}]}', ""),
        (b'{"model":"m\xff"' + b" " * 20_000 + b"}", "model"),
        (b"\xff\xfe{\x00}\x00", ""),
        (b'{"model":"m","x":' + b"[" * 10_000 + b"]" * 10_000 + b"}", ""),
        (b'{"model":"m","x":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}", ""),
        (b'{"model":"m","x":NaN,"y":' + b"[" * 6_000 + b"]" * 6_000 + b"}", ""),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":"hi"}', "messages"),
        (b'{"model":"m","messages":' + b"1" * 1_000_000 + b"}", "messages"),
        (b"", ""),
        (None, ""),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_malformed_body_is_refused_and_never_echoed(body: bytes | None, path: str) -> None:
    error = refusal(body)
    assert error.path == path
    assert len(str(error)) < 120


@pytest.mark.parametrize(
    "odd",
    [
        "NaN",
        "-Infinity",
        "1e400",
        "-0.0",
        "9007199254740993",
        "1" * 1_000_000,
        '"\\ud800"',
        '{"a": 1, "a": 2}',
        '"\\u0041\\/"',
        '"a,]}\\\\\\"{["',
        "[" * 200 + "]" * 200,
        "0.10000000000000000555",
    ],
    ids=lambda value: value[:20],
)
def test_odd_values_that_python_takes_do_not_hinder_reading(odd: str) -> None:
    body = f'{{"seed":{odd}, "model" : "first", "messages":[{{"content":"é"}}],"model":"m" ,"x":{odd}}}'
    for prefix in ("", "\ufeff"):
        request = parse((prefix + body).encode())
        assert (request.model, request.prompts) == ("m", ('[{"content":"é"}'.encode(),))


def test_only_post_reaches_an_inference_api() -> None:
    for method, body in (("GET", None), ("GET", b""), ("DELETE", b""), ("HEAD", None)):
        request = parse(body, CHAT, method)
        assert (request.api, request.prompts, request.attributes[LOAD_ONLY]) == (Api.OTHER, (), "no-body")
    assert parse(None, "/v1/models", "GET").model == ""


@pytest.mark.parametrize("body", [b"", b"\x00\xff", b"{", b"[]", b'{"model":5}', b'{"a":' * 5000, b"model=m"])
def test_unknown_paths_are_never_refused(body: bytes) -> None:
    request = parse(body, "/v1/rerank")
    assert (request.api, request.model, request.prompts) == (Api.OTHER, "", ())


def test_unknown_paths_tell_their_model_when_they_name_one() -> None:
    request = parse({"model": "reranker", "query": "q", "documents": ["d"]}, "/v1/rerank")
    assert (request.model, request.target_model, request.attributes[LOAD_ONLY]) == (
        "reranker",
        "reranker",
        "unknown-path",
    )


def test_compressed_and_multipart_bodies_are_left_alone() -> None:
    compressed = parse(b"\x1f\x8b\x08", content_encoding="gzip")
    assert (compressed.api, compressed.attributes[LOAD_ONLY]) == (Api.CHAT, "compressed-body")
    form = parse(b"--x\r\n", "/v1/audio/transcriptions", content_type="Multipart/Form-Data; boundary=x")
    assert form.attributes[LOAD_ONLY] == "multipart-body"
    assert parse({"model": "m", "messages": []}, content_encoding="identity").model == "m"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["model", "messages", "prompt", "input", "items", "tools", "conversation", "stream", "max_tokens"]
)


@given(
    st.dictionaries(KEYS, JSON, max_size=5),
    st.sampled_from([CHAT, "/v1/completions", "/v1/responses", "/v1/conversations", "/v1/messages", "/v1/embeddings"]),
)
def test_any_json_object_is_read_or_refused(body: dict[str, Any], path: str) -> None:
    try:
        parse(body, path)
    except BadRequest:
        pass


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        parse(body)
    except BadRequest:
        pass
