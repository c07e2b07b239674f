"""What bodies do on their way through the real Envoy and `kvsteer serve`: read, rewritten, given back, counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from epp.envoy_options import Profile
from tests.e2e.backend import echo
from tests.e2e.serving import Stack, running_stack
from tests.e2e.test_steering import NASTY

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAIRINGS = [(Profile.GATEWAY, "lean"), (Profile.FAST, "lean"), (Profile.GATEWAY, "grpcio"), (Profile.FAST, "grpcio")]
TARGET = "org/a-much-longer-name"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PAIRINGS, ids=lambda p: f"{p[0]}-{p[1]}")
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """The model `alias` is a name for `TARGET`; usage is asked for. `m` is served by its own name."""
    profile, edge = request.param
    args = ("--model-rewrite", f"alias={TARGET}", "--inject-usage")
    async with running_stack(profile, edge, args=args) as running:
        yield running


def dumps(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


# Rewriting


async def test_a_rewritten_body_differs_in_its_model_alone_and_has_its_own_length(stack: Stack) -> None:
    """Envoy answers 500 where a buffered body changes and content-length does not (envoy #28515)."""
    bodies = [body.replace(b'"model":"m"', b'"model":"alias"') for body in NASTY]
    answers = [await stack.ask(body) for body in bodies]
    for body, answer in zip(bodies, answers, strict=True):
        assert (answer.status, answer.account["body"].encode("latin-1")) == (
            200,
            body.replace(b'"alias"', f'"{TARGET}"'.encode()),
        )
        headers = answer.account["headers"]
        assert headers.get("content-length", str(answer.account["length"])) == str(answer.account["length"])


async def test_a_long_body_is_rewritten_too(stack: Stack) -> None:
    body = b'{"prompt":"' + b"long " * 800_000 + b'","model":"alias"}'
    answer = await stack.ask(body)
    assert (answer.status, answer.account["length"]) == (200, len(body) + len(TARGET) - len("alias"))


async def test_a_header_names_the_model_for_the_worker(stack: Stack) -> None:
    answer = await stack.ask(dumps(model="m", prompt="x"), x_gateway_model_name_rewrite="other")
    assert json.loads(answer.account["body"]) == {"model": "other", "prompt": "x"}


ANSWER = '{{"id":"1", "model" : "{0}","choices":[{{"text":"{1}"}}],"usage":{{"prompt_tokens":3}}}}'
EVENT = 'data: {{"model":"{0}","choices":[{{"text":"{1}"}}]}}\r\n\r\n'


async def test_the_client_is_answered_in_the_name_it_asked_for_where_the_response_passes_the_picker(
    stack: Stack,
) -> None:
    name = "alias" if stack.profile is Profile.GATEWAY else TARGET
    for stream, kind, form in ((False, "application/json", ANSWER), (True, "text/event-stream", EVENT * 40)):
        reply = echo(content_type=kind, body=form.format(TARGET, TARGET))
        answer = await stack.ask(dumps(model="alias", prompt="x", stream=stream), **reply)
        assert (answer.status, answer.body.decode()) == (200, form.format(name, TARGET))


# Usage

USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":120,"completion_tokens":7}}\n\n'
TEXT = 'data: {"choices":[{"text":"a"}]}\n\n'
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_is_asked_for_and_hidden_where_the_response_passes_the_picker(stack: Stack, path: str) -> None:
    body = dumps(model="usage-" + path[-4:], prompt="x", messages=[], stream=True)
    asked = stack.profile is Profile.GATEWAY
    answer = await stack.ask(body, path=path)
    assert ("stream_options" in json.loads(answer.account["body"])) is asked
    answer = await stack.ask(body, path=path, **echo(content_type="text/event-stream", body=TEXT + USAGE + DONE))
    assert answer.body.decode() == (TEXT + DONE if asked else TEXT + USAGE + DONE)


async def test_usage_that_the_client_asked_for_reaches_it(stack: Stack) -> None:
    body = dumps(model="m", prompt="x", stream=True, stream_options={"include_usage": True})
    answer = await stack.ask(body, **echo(content_type="text/event-stream", body=TEXT + USAGE + DONE))
    assert answer.body.decode() == TEXT + USAGE + DONE


WRONG_USAGE = [
    '{"usage":"oops"}',
    '{"usage":{"prompt_tokens":"1024"}}',
    '{"usage":{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":0}}',
    '{"usage":null}',
    '[{"usage":{"prompt_tokens":5}}]',
    '{"usage":{"prompt_tokens":1e3,"completion_tokens":-1}}',
]


async def test_usage_of_a_wrong_type_passes_untouched_and_harms_no_later_request(stack: Stack) -> None:
    """A string for an object crashed a picker elsewhere (llm-d-router #981)."""
    body = dumps(model="wrong-usage", prompt="x")
    for text in WRONG_USAGE:
        answer = await stack.ask(body, **echo(body=text))
        assert (answer.status, answer.body.decode()) == (200, text)
    assert (await stack.ask(body)).status == 200
    await stack.idle()
    log = stack.picker.log.read_text()
    assert "Traceback" not in log


async def test_sizes_and_tokens_are_those_of_the_traffic(stack: Stack) -> None:
    body, text = dumps(model="sizes", prompt="x" * 500), ANSWER.format("sizes", "y" * 700)
    for _ in range(5):
        await stack.ask(body, **echo(body=text))
    await stack.idle()
    sums = {name: await total(stack, name, "sizes") for name in ("request_sizes", "response_sizes", "input_tokens")}
    seen = stack.profile is Profile.GATEWAY
    assert sums == {
        "request_sizes": 5 * len(body),
        "response_sizes": 5 * len(text) if seen else 0,
        "input_tokens": 5 * 3 if seen else 0,
    }


async def total(stack: Stack, name: str, model: str) -> float:
    samples = await stack.picker.gauges(f"inference_objective_{name}_sum")
    return sum(value for labels, value in samples.items() if f'model_name="{model}"' in labels)


# Shapes and paths

WORDS = "The quick brown fox jumps over the lazy dog. " * 250
IDS = list(range(1, 3000))
PARTS = [{"type": "text", "text": WORDS}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": WORDS},
    {"prompt": [WORDS]},
    {"prompt": IDS},
    {"prompt": [IDS]},
    {"prompt": ["hi", WORDS]},
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": WORDS}],
    [{"role": "user", "content": PARTS[:1]}],
    [{"role": "user", "content": PARTS}],
    [{"role": "user", "content": [*PARTS, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
    [{"role": "developer", "content": WORDS}, {"role": "user", "content": "go"}],
    [{"role": "system", "content": WORDS}, {"role": "user", "content": None}],
    [{"role": "user", "content": WORDS}, {"role": "assistant"}],
    [{"role": "user", "content": WORDS}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    [{"role": "user", "content": WORDS}, {"role": "tool", "tool_call_id": "c", "content": "42"}],
    [{"role": "user", "content": WORDS}, {"role": "tool", "tool_call_id": "c", "content": PARTS[:1]}],
    [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "", "reasoning_content": "hm"}],
    [{"role": "user", "content": [], "name": "u"}, {"role": "user", "content": WORDS}],
    [{"role": "user", "content": [WORDS, "bare strings"]}],
    [{"role": "user", "content": WORDS}, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "Sure,", "prefix": True}],
]
SHAPES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", shape) for shape in COMPLETIONS),
    *(("/v1/chat/completions", {"messages": chat}) for chat in CHATS),
    ("/v1/embeddings", {"input": WORDS}),
    ("/v1/embeddings", {"input": [WORDS, "b"]}),
    ("/v1/embeddings", {"input": IDS}),
    ("/v1/embeddings", {"input": [IDS]}),
    ("/v1/responses", {"input": WORDS}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": WORDS}]}]}),
    ("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": WORDS}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": WORDS}], "system": "s", "max_tokens": 5}),
]


async def repeat(stack: Stack, body: bytes, *paths: str) -> tuple[set[int], set[str]]:
    """The same body to each path, one after the other: all statuses, and all workers that served."""
    answers = [await stack.ask(body, path=path) for path in paths]
    return {a.status for a in answers}, {a.account.get("worker", "") for a in answers}


async def test_every_shape_of_prompt_is_served_and_goes_where_it_went_before(stack: Stack) -> None:
    for number, (path, shape) in enumerate(SHAPES):
        statuses, workers = await repeat(stack, dumps(model=f"shape-{number}", **shape), *[path] * 6)
        assert (statuses, len(workers)) == ({200}, 1), (path, str(shape)[:80])


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [1.5], [-1], [[1], ["a"]], {}, 7], ids=str)
async def test_a_prompt_that_no_worker_takes_is_refused_with_an_openai_error(stack: Stack, prompt: Any) -> None:
    answer = await stack.ask(dumps(model="m", prompt=prompt))
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    error = json.loads(answer.body)["error"]
    assert error["param"].startswith("prompt")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions?api-version=2024-06-01",
        "/v1/chat/completions/",
        "//v1//chat/completions",
        "/vertex/v1/projects/p/chat/completions",
        "/v1/chat%2Fcompletions",
    ],
)
async def test_a_query_a_slash_or_a_prefix_does_not_change_what_a_path_means(stack: Stack, path: str) -> None:
    body = dumps(model=f"path {path}", messages=CHATS[0])
    statuses, workers = await repeat(stack, body, "/v1/chat/completions", *[path] * 5)
    assert (statuses, len(workers)) == ({200}, 1)
    assert (await stack.ask(b'{"model":1}', path=path)).status == 400


FORM = b"--b\r\ncontent-disposition: form-data\r\n\r\nx\r\n--b--"


async def test_unknown_paths_and_bodies_pass(stack: Stack) -> None:
    for path, body, kind in (
        ("/v1/audio/transcriptions", FORM, "multipart/form-data; boundary=b"),
        ("/v1/rerank", dumps(model="m", query="q", documents=["a"]), "application/json"),
        ("/score", dumps(text_1="a", text_2="b"), "application/json"),
        ("/tokenize", b"{not json", "application/json"),
        ("/v1/images/generations", dumps(prompt={"odd": 1}), "application/json"),
        ("/anything", b"\x00\xff", "application/octet-stream"),
    ):
        answer = await stack.ask(body, path=path, content_type=kind)
        assert (answer.status, answer.account["path"]) == (200, path)
        assert answer.account["body"].encode("latin-1") == body


async def test_a_compressed_body_passes_as_it_came(stack: Stack) -> None:
    answer = await stack.ask(b"\x1f\x8b\x08\x00odd", content_encoding="gzip")
    assert (answer.status, answer.account["body"].encode("latin-1")) == (200, b"\x1f\x8b\x08\x00odd")


async def test_requests_that_share_an_id_do_not_touch_each_other(stack: Stack) -> None:
    """State kept by request id made them crash each other elsewhere (llm-d-router #1147)."""
    body = dumps(model="m", prompt="x")
    slow = echo(chunks=5, pause=0.02, content_type="text/event-stream")
    tasks = [asyncio.create_task(stack.ask(body, x_request_id="a", **slow)) for _ in range(50)]
    await asyncio.sleep(0.05)
    for task in tasks[::2]:
        task.cancel()
    answers = await asyncio.gather(*tasks[1::2])
    assert {a.status for a in answers} == {200}
    assert {a.body.endswith(DONE.encode()) for a in answers} == {True}
    await asyncio.gather(*tasks, return_exceptions=True)
    await stack.idle()
