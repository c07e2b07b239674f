"""Messages reach the template as vLLM's API layer hands them over; `tests/vllm` compares with the real one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epp.kvcache.tokens.messages import Unrenderable, conversation, tools, without_developer


def one(message: dict[str, Any], content_format: Any = "string") -> dict[str, Any]:
    (made,) = conversation([message], content_format)
    return made


def test_content_parts_are_joined_or_wrapped() -> None:
    parts = [{"text": "a", "type": "text", "cache_control": 1}, {"type": "text", "text": ""}]
    parts += [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": None}]
    message = {"role": "user", "content": parts}
    assert one(message) == {"role": "user", "content": "a\nno"}
    assert one(message, "openai")["content"] == [
        {"type": "text", "text": "a", "cache_control": 1},
        {"type": "text", "text": ""},
        {"type": "text", "text": "no"},
    ]


@pytest.mark.parametrize("content", [None, "", []])
def test_absent_content_is_empty_never_none(content: object) -> None:
    assert one({"role": "assistant", "content": content})["content"] == ""


def test_text_is_wrapped_for_templates_that_take_parts_but_not_for_tools() -> None:
    assert one({"role": "user", "content": "x"}, "openai")["content"] == [{"type": "text", "text": "x"}]
    assert one({"role": "tool", "content": "x"}, "openai")["content"] == "x"
    assert one({"role": "tool", "content": []}, "openai")["content"] == ""


def test_a_tool_calls_members_are_in_vllms_order_and_its_arguments_parsed() -> None:
    call = {"type": "function", "index": 0, "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}, "id": "c"}
    made = one({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert json.dumps(made) == json.dumps(
        [{"id": "c", "function": {"arguments": {"b": 1, "a": 2}, "name": "f"}, "type": "function", "index": 0}]
    )


@pytest.mark.parametrize("arguments", ["", "[1]", "null", "{broken", None])
def test_arguments_that_are_no_object_become_an_empty_one(arguments: str | None) -> None:
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": arguments}}
    assert one({"role": "assistant", "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"] == {}


def test_empty_tool_calls_are_dropped_and_reasoning_goes_under_both_names() -> None:
    made = one({"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "r"})
    assert made == {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"}
    assert one({"role": "assistant", "reasoning": "new", "reasoning_content": "old"})["reasoning"] == "new"


def test_only_members_that_templates_are_given_are_kept() -> None:
    assert one({"role": "user", "content": "x", "name": "bob", "extra": 1}) == {
        "role": "user",
        "content": "x",
        "name": "bob",
    }
    assert one({"role": "tool", "content": "x", "tool_call_id": "c"})["tool_call_id"] == "c"


def test_a_line_that_changes_with_every_request_is_dropped_from_system_messages() -> None:
    header = "x-anthropic-billing-header: cch=abc"
    assert one({"role": "system", "content": f"{header}\nrest"})["content"] == "rest"
    assert one({"role": "system", "content": header})["content"] == ""
    assert one({"role": "user", "content": header})["content"] == header


def test_developers_speak_as_one_system_where_the_template_does_not_know_them() -> None:
    chat = conversation(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "developer", "content": [{"type": "text", "text": "d"}], "tools": []},
        ],
        "openai",
    )
    assert without_developer(chat) == [{"role": "system", "content": "s\n\nd"}, chat[1]]
    assert without_developer(chat[:2]) == chat[:2]
    alone = conversation([{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}], "string")
    assert without_developer(alone)[0] == {"role": "system", "content": "d"}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "multimodal"),
        ({"role": "user", "content": [{"text": "x"}]}, "multimodal"),
        ({"role": "user", "content": ["x"]}, "bad-message"),
        ({"role": "user", "content": 3}, "bad-message"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "bad-message"),
        ({"role": "wizard", "content": "x"}, "bad-message"),
        ({"role": ["user"], "content": "x"}, "bad-message"),
        ("text", "bad-message"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "bad-message"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "bad-message"),
    ],
)
def test_what_only_the_worker_can_judge_has_a_reason(message: Any, reason: str) -> None:
    with pytest.raises(Unrenderable) as caught:
        conversation([message], "string")
    assert caught.value.reason == reason


def test_tools_are_written_out_as_vllm_does() -> None:
    given = {"function": {"parameters": {"z": 1, "a": 2}, "strict": True, "name": "f", "extra": 1}, "more": 2}
    assert json.dumps(tools([given])) == json.dumps(
        [
            {
                "type": "function",
                "function": {"name": "f", "description": None, "parameters": {"z": 1, "a": 2}, "strict": True},
            }
        ]
    )
    deferred = {"type": "function", "function": {"name": "f"}, "defer_loading": True}
    assert tools([deferred])[0]["function"]["defer_loading"] is True
    assert tools([deferred])[0]["defer_loading"] is True


@pytest.mark.parametrize("raw", [{}, [1], [{"type": "function"}], [{"type": "web", "function": {"name": "f"}}]])
def test_tools_that_are_no_functions_are_left_to_the_worker(raw: Any) -> None:
    with pytest.raises(Unrenderable):
        tools(raw)
