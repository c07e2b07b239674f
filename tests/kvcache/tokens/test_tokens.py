"""One answer for every request: ids and where they came from, or why there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epp.api.requests import parse_request
from epp.kvcache.tokens import ModelFolderError, Tokens
from epp.kvcache.tokens.local import LocalModel
from epp.kvcache.tokens.render import Media, RenderClient, Rendered, RenderError
from epp.model_config import ModelConfig
from epp.request import Api, Headers, InferenceRequest, RequestHead
from tests.kvcache.tokens import models, templates

PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}


class Renderer(RenderClient):
    """Answers, or fails, as told."""

    def __init__(self, answer: list[Rendered] | RenderError) -> None:
        super().__init__()
        self.answer = answer
        self.asked: list[tuple[str, Api, float]] = []

    async def render(self, url: str, api: Api, body: bytes, timeout_s: float) -> list[Rendered]:
        self.asked.append((url, api, timeout_s))
        if isinstance(self.answer, RenderError):
            raise self.answer
        return self.answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    models.write(path, models.shipped().tokenizer_json, template=templates.CHATML)
    return path


def parsed(members: dict[str, Any], path: str = "") -> tuple[InferenceRequest, bytes]:
    body = json.dumps({"model": "base", **members}).encode()
    path = path or next(p for name, p in PATHS.items() if name in members)
    return parse_request(RequestHead("POST", path, Headers()), body, "r"), body


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def tokens(folder: Path) -> Tokens:
    known = {"adapter": "base", "stranger": "unknown"}
    return Tokens(
        [
            ModelConfig("base", aliases=("alias",), path=str(folder)),
            ModelConfig("remote", source="render", render_url="http://renderer:8000/", timeout=0.5),
            ModelConfig("own", path=str(folder), source="local"),
        ],
        parent=lambda name: known.get(name, ""),
    )


def test_ids_in_the_request_are_taken_as_they_are_whatever_the_model(tokens: Tokens) -> None:
    made = tokens.ready(*parsed({"model": "nobody's", "prompt": [[1, 2], [3]]}))
    assert made is not None
    assert ([ids.tolist() for ids in made.ids], made.source, made.reason) == ([[1, 2], [3]], "ids", "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("base", ("base", "")), ("alias", ("base", "")), ("adapter", ("base", "adapter")), ("stranger", ("", "")),
     ("nobody", ("", ""))],
)  # fmt: skip
def test_adapters_inherit_their_base_and_aliases_stand_for_it(
    tokens: Tokens, name: str, expected: tuple[str, str]
) -> None:
    assert tokens.base_of(parsed({**CHAT, "model": name})[0]) == expected


def test_a_rewritten_model_is_the_one_that_counts(tokens: Tokens) -> None:
    request, _ = parsed({**CHAT, "model": "nobody"})
    request.target_model = "alias"
    assert tokens.base_of(request) == ("base", "")


def test_work_gives_local_ids_and_ready_knows_them_afterwards(tokens: Tokens) -> None:
    request, body = parsed({**CHAT, "model": "adapter"})
    assert tokens.ready(request, body) is None
    worked = tokens.work(request, body)()
    ready = tokens.ready(request, body)
    assert worked.source == "local"
    assert ready is not None
    assert np.array_equal(ready.ids[0], worked.ids[0])


def test_a_short_completion_is_ready_at_once(tokens: Tokens) -> None:
    made = tokens.ready(*parsed({"prompt": ["def f():", "x"]}))
    assert made is not None
    assert (made.source, len(made.prompts)) == ("local", 2)
    assert tokens.ready(*parsed({"prompt": "a new text " * 2000})) is None


@pytest.mark.parametrize(
    ("members", "path", "reason"),
    [
        ({**CHAT, "model": "nobody"}, "", "model-not-registered"),
        ({**CHAT, "model": "remote"}, "", "not-local"),
        (CHAT, "/v1/messages", "no-template-for-api"),
        ({"input": "hi"}, "", "no-template-for-api"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "", "multimodal"),
        ({"prompt": ["a", [1]]}, "", "bad-prompt"),
        ({"prompt": "x", "suffix": "y"}, "", "unsupported-field"),
        ({}, "/v1/models", "no-prompt"),
    ],
)
def test_without_ids_there_is_a_reason_and_a_count(
    tokens: Tokens, members: dict[str, Any], path: str, reason: str
) -> None:
    if reason == "bad-prompt":
        request, body = parsed({"prompt": "x"})
        body = json.dumps({"model": "base", **members}).encode()
    else:
        request, body = parsed(members, path)
    before = tokens.outcomes["estimate", reason]
    made = tokens.work(request, body)()
    assert (made.prompts, made.source, made.reason) == ((), "estimate", reason)
    assert tokens.outcomes["estimate", reason] == before + 1


def test_a_tokenizer_that_fails_is_a_reason_not_an_error(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(LocalModel, "chat", fail)
    made = tokens.work(*parsed(CHAT))()
    assert (made.reason, made.detail) == ("tokenizer-failed", "RuntimeError: out of luck")


async def test_a_worker_is_asked_where_it_may_be(folder: Path) -> None:
    media = (Media(1, 2, "a"),)
    client = Renderer([Rendered(np.array([5], dtype=np.uint32), media)])
    tokens = Tokens(
        [
            ModelConfig("base"),
            ModelConfig("remote", source="render", render_url="http://renderer:8000/", timeout=0.5),
            ModelConfig("own", path=str(folder), source="local"),
        ],
        client=client,
    )
    asked = {name: parsed({**CHAT, "model": name}) for name in ("base", "remote", "own", "nobody")}
    assert [tokens.renders(request) for request, _ in asked.values()] == [True, True, False, False]
    made = await tokens.render(*asked["base"], "10.0.0.1:8000")
    assert ([ids.tolist() for ids in made.ids], made.source, made.media) == ([[5]], "render", (media,))
    await tokens.render(*asked["remote"], "10.0.0.1:8000")
    assert client.asked == [("http://10.0.0.1:8000", Api.CHAT, 0.25), ("http://renderer:8000", Api.CHAT, 0.5)]
    client.answer = RenderError("render-timeout", "late")
    late = await tokens.render(*asked["base"], "10.0.0.1:8000")
    assert (late.source, late.reason, late.detail) == ("estimate", "render-timeout", "late")
    assert (await tokens.render(*asked["nobody"], "x")).reason == "model-not-registered"
    assert tokens.outcomes["estimate", "render-timeout"] == 1


def test_a_folder_that_cannot_be_read_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="is not a folder"):
        Tokens([ModelConfig("base", path=str(tmp_path / "absent"))])
