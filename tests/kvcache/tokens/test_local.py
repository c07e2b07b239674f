"""A chat that goes on costs its new part, and its ids are those of the whole chat, whatever the template does."""

from __future__ import annotations

import dataclasses
import json
from random import Random
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epp.kvcache.tokens import local as module
from epp.kvcache.tokens.local import LocalModel
from epp.kvcache.tokens.messages import Unrenderable
from epp.kvcache.tokens.pieces import PieceCache
from epp.kvcache.tokens.turns import Turns
from tests.kvcache.tokens import models, templates

TEMPLATES = {
    "chatml": templates.CHATML,
    "thinking": templates.THINKING,
    "alternating": templates.ALTERNATING,
    "parts": templates.PARTS,
    "dated": templates.DATED,
    "counting": templates.COUNTING,
}


def model(template: str, **defaults: Any) -> LocalModel:
    folder = dataclasses.replace(models.shipped(), templates={"default": template})
    return LocalModel(folder, PieceCache(1 << 24), Turns(1 << 24), template_defaults=defaults)


def body(messages: list[dict[str, Any]], **members: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **members}).encode()


def whole(like: LocalModel, request: bytes) -> list[int]:
    """The ids without any memory."""
    like._turns = Turns(0)
    prompt = like.chat(request)
    assert prompt is not None
    return list(prompt.ids.tolist())


MODELS = {name: model(template) for name, template in TEMPLATES.items()}
PLAIN = {name: model(template) for name, template in TEMPLATES.items()}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    seed=st.integers(0, 10_000),
    rounds=st.integers(1, 14),
    reasoning=st.booleans(),
    tools=st.booleans(),
    think=st.sampled_from([None, True, False]),
)
def test_every_turn_of_a_session_has_the_ids_of_the_whole_chat(
    name: str, seed: int, rounds: int, reasoning: bool, tools: bool, think: bool | None
) -> None:
    chat = templates.agent_chat(Random(seed), rounds, words=8, reasoning=reasoning)
    if name == "alternating":
        chat = [{"role": m["role"], "content": m["content"]} for m in chat if m["role"] != "tool"]
        chat = [m for i, m in enumerate(chat) if i == 0 or m["role"] != chat[i - 1]["role"]]
    members: dict[str, Any] = {"tools": templates.TOOLS} if tools else {}
    if think is not None:
        members["chat_template_kwargs"] = {"enable_thinking": think}
    for end in range(2, len(chat) + 1):
        request = body(chat[:end], **members)
        prompt = MODELS[name].chat(request)
        assert prompt is not None
        assert prompt.ids.tolist() == whole(PLAIN[name], request)


@pytest.mark.parametrize("name", ["chatml", "thinking", "dated", "parts"])
def test_an_agents_next_turn_is_answered_quickly_with_what_it_shares(name: str) -> None:
    served = model(TEMPLATES[name])
    chat = templates.agent_chat(Random(5), 30)
    ends = [i + 1 for i, m in enumerate(chat) if m["role"] in ("user", "tool") and i > 40]
    before = served.chat(body(chat[: ends[0]]))
    served.chat(body(chat[: ends[1]]))  # here the template is tried out
    assert before is not None
    quick = 0
    for end in ends[2:]:
        prompt = served.chat(body(chat[:end]), quick=True)
        if prompt is not None:
            quick += 1
            assert prompt.shared > 0.8 * len(prompt.ids)
            assert prompt.earlier is not None
        else:
            served.chat(body(chat[:end]))
    assert quick > len(ends) / 2
    assert served.counts.whole <= 3


def test_the_same_request_again_is_known_as_a_whole() -> None:
    served = model(templates.CHATML)
    chat = body(templates.agent_chat(Random(1), 3))
    first, again = served.chat(chat), served.chat(chat, quick=True)
    assert first is not None
    assert again is not None
    assert np.shares_memory(again.ids, first.ids)
    assert again.shared == len(first.ids)
    first.notes["keys"] = 1
    assert again.earlier == {"keys": 1}


def test_notes_of_a_turn_are_found_by_the_next() -> None:
    served = model(templates.CHATML)
    chat = templates.agent_chat(Random(1), 6)
    first = served.chat(body(chat[:4]))
    assert first is not None
    first.notes["keys"] = "of the first turn"
    second = served.chat(body(chat))
    assert second is not None
    assert second.earlier == {"keys": "of the first turn"}
    assert np.array_equal(second.ids[: second.shared], first.ids[: second.shared])


def test_a_template_that_is_not_local_is_never_taken_the_short_way() -> None:
    served = model(templates.COUNTING)
    chat = templates.agent_chat(Random(2), 12)
    for end in range(4, len(chat), 2):
        served.chat(body(chat[:end]))
    assert served.counts.short == 0


def test_a_difference_found_by_an_audit_ends_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AUDIT_EVERY", 1)
    served = model(templates.COUNTING)
    monkeypatch.setattr(served._locality["default"], "holds", lambda *_: True)
    chat = templates.agent_chat(Random(2), 6)
    served.chat(body(chat[:5]))
    prompt = served.chat(body(chat[:7]))
    assert prompt is not None
    assert prompt.ids.tolist() == whole(model(templates.COUNTING), body(chat[:7]))
    assert (served.counts.audits, served.counts.audits_failed) == (1, 1)
    assert served._locality["default"].known(b"", frozenset()) is False


@pytest.mark.parametrize(
    "change",
    [
        {"tools": templates.TOOLS[:1]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"reasoning_effort": "none"},
    ],
)
def test_other_settings_are_another_chat(change: dict[str, Any]) -> None:
    served = model(templates.THINKING)
    chat = templates.agent_chat(Random(3), 3)
    served.chat(body(chat[:4]))
    prompt = served.chat(body(chat, **change))
    assert prompt is not None
    assert prompt.shared == 0
    assert prompt.ids.tolist() == whole(model(templates.THINKING), body(chat, **change))


def test_a_branch_from_the_middle_of_a_session_starts_at_what_it_shares() -> None:
    served = model(templates.CHATML)
    chat = templates.agent_chat(Random(4), 8)
    served.chat(body(chat[:6]))
    served.chat(body(chat))
    other = [*chat[:6], {"role": "user", "content": "something else"}]
    prompt = served.chat(body(other))
    assert prompt is not None
    assert prompt.shared > 0
    assert prompt.ids.tolist() == whole(model(templates.CHATML), body(other))


def test_the_day_is_part_of_the_chat_when_the_template_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    served = model(templates.DATED)
    chat = body(templates.agent_chat(Random(1), 2))
    served.chat(chat)
    monkeypatch.setattr(type(served._templates["default"]), "clock", lambda *_: "another day")
    assert served.chat(chat, quick=True) is None


def test_completions_are_encoded_with_special_tokens_unless_told_otherwise() -> None:
    served = LocalModel(
        dataclasses.replace(models.shipped(), add_bos=True, add_eos=False, special_tokens={"bos_token": "<|bos|>"}),
        PieceCache(1 << 20),
        Turns(1 << 20),
    )
    tokenizer = tokenizers.Tokenizer.from_str(models.shipped().tokenizer_json)
    bare = tokenizer.encode("def f(x):").ids
    request = {"prompt": ["def f(x):", ""]}
    made = served.completion(json.dumps(request).encode())
    assert made is not None
    assert [p.ids.tolist() for p in made] == [[1, *bare], [1]]
    made = served.completion(json.dumps({**request, "add_special_tokens": False}).encode(), quick=True)
    assert made is not None
    assert [p.ids.tolist() for p in made] == [bare, []]


HALF_A_PAIR = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "x\\ud800"}'}}],
}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "multimodal"),
        ({"messages": []}, "bad-message"),
        ({"chat_template": "{{ 1 }}"}, "unsupported-field"),
        ({"truncate_prompt_tokens": 5}, "unsupported-field"),
        ({"chat_template_kwargs": {"tokenize": True}}, "unsupported-field"),
        ({"chat_template_kwargs": 3}, "bad-message"),
        ({"continue_final_message": True}, "bad-message"),
        ({"tools": "x"}, "bad-message"),
        ({"messages": [{"role": "user", "content": "\\ud800"}]}, "unreadable-body"),
        ({"messages": [HALF_A_PAIR]}, "bad-message"),
        ({"messages": {"role": "user"}}, "unreadable-body"),
    ],
)
def test_what_is_not_rendered_here_has_a_reason(members: dict[str, Any], reason: str) -> None:
    request = json.dumps({"messages": [{"role": "user", "content": "x"}], **members}).replace('"\\\\ud', '"\\ud')
    with pytest.raises(Unrenderable) as caught:
        model(templates.CHATML).chat(request.encode())
    assert caught.value.reason == reason


def test_a_refusing_template_and_a_missing_one_have_reasons() -> None:
    twice = body([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(Unrenderable, match="Roles must alternate") as caught:
        model(templates.ALTERNATING).chat(twice)
    assert caught.value.reason == "template-refused"
    bare = LocalModel(dataclasses.replace(models.shipped(), templates={}), PieceCache(1), Turns(1))
    with pytest.raises(Unrenderable, match="no chat template"):
        bare.chat(twice)
    harmony = LocalModel(dataclasses.replace(models.shipped(), renderer="harmony"), PieceCache(1), Turns(1))
    with pytest.raises(Unrenderable, match="rendered by harmony"):
        harmony.chat(twice)


def test_turns_are_bounded_in_bytes() -> None:
    served = model(templates.CHATML)
    served._turns.max_bytes = 60_000
    for number in range(30):
        chat = templates.agent_chat(Random(number), 4)
        served.chat(body(chat[:4]))
        served.chat(body(chat))
    assert 30_000 < served._turns.bytes <= 60_000
    assert 2 < len(served._turns) < 20
    served._turns.max_bytes = 0
    served.chat(body(templates.agent_chat(Random(1), 1)))
    assert (len(served._turns), served._turns.bytes) == (0, 0)
