"""A chat request as its template is given it: what vLLM's API layer makes of messages and tools.

In: parsed JSON. Out: plain dicts and lists in vLLM's own order of keys (templates print them), or `Unrenderable` with a
reason. Followed are vLLM 0.32's `entrypoints/openai/chat_completion/protocol.py` (fields declared by OpenAI's types
come first, in their order, then what the client added) and `renderers/chat_utils.py` (contents joined or wrapped,
arguments of tool calls parsed, empty ones dropped). `tests/vllm/test_token_parity.py` holds it to the real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from epp.kvcache.tokens.template import ContentFormat

Message = dict[str, Any]

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Type of a content part -> the member that holds its text."""

PART_FIELDS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    }
)
"""Members of content parts that vLLM knows; others are handed to templates that take parts."""

BILLING_HEADER = "x-anthropic-billing-header"
"""A line of a coding agent that changes with every request; vLLM drops it from system messages."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class Unrenderable(Exception):
    """The chat cannot be rendered here; `reason` is a word for counters, the text says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


def conversation(messages: Sequence[Any], content_format: ContentFormat) -> list[Message]:
    """Raises Unrenderable: `multimodal`, or `bad-message` for what the worker refuses too."""
    return [_message(m, content_format) for m in messages]


def without_developer(messages: list[Message]) -> list[Message]:
    """For templates that do not know the role: developers speak as the system, and all systems speak first, as one."""
    if not any(m["role"] == "developer" for m in messages):
        return messages
    turned = []
    for message in messages:
        if message["role"] == "developer":
            message = {k: v for k, v in message.items() if k != "tools"} | {"role": "system"}
        turned.append(message)
    systems = [m for m in turned if m["role"] == "system"]
    if systems == [turned[0]]:
        return turned
    texts = [_joined(m.get("content", "")) for m in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(m for m in turned if m["role"] != "system")]


def tools(raw: Any) -> list[dict[str, Any]]:
    """Tool definitions with the members, and in the order, in which vLLM writes them out."""
    if not isinstance(raw, list):
        raise Unrenderable("bad-message", "tools must be a list")
    return [_tool(tool) for tool in raw]


def _tool(raw: Any) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or raw.get("type", "function") != "function" or "name" not in function:
        raise Unrenderable("bad-message", "a tool must be a function with a name")
    deferred = raw.get("defer_loading")
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        made["strict"] = function["strict"]
    loading = function.get("defer_loading") if function.get("defer_loading") is not None else deferred
    if loading is not None:
        made["defer_loading"] = loading
    whole: dict[str, Any] = {"type": "function", "function": made}
    if deferred is not None:
        whole["defer_loading"] = deferred
    return whole


def _message(raw: Any, content_format: ContentFormat) -> Message:
    role = raw.get("role") if isinstance(raw, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise Unrenderable("bad-message", "a message must be an object with a known role")
    parts = _parts(raw.get("content"))
    if role == "system":
        parts = _without_billing_header(parts)
    message: Message = {"role": role, "content": _content(parts, content_format)}
    if role == "assistant":
        _assistant(message, raw)
    elif role == "tool":
        if "tool_call_id" in raw:
            message["tool_call_id"] = raw["tool_call_id"]
        message["content"] = _tool_result(message["content"])
    for name in ("name", "task"):
        if isinstance(raw.get(name), str):
            message[name] = raw[name]
    if role == "developer":
        message["tools"] = raw.get("tools")
    return message


def _assistant(message: Message, raw: Mapping[str, Any]) -> None:
    calls = raw.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Unrenderable("bad-message", "tool_calls must be a list")
        message["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = raw.get("reasoning")
    if reasoning is None:
        reasoning = raw.get("reasoning_content")
    if reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = reasoning


def _tool_call(raw: Any) -> dict[str, Any]:
    """Declared members first and in their order; arguments parsed, what is no object becomes an empty one."""
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or raw.get("type") != "function":
        raise Unrenderable("bad-message", "a tool call must be a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    ordered = {"arguments": arguments if isinstance(arguments, dict) else {}}
    ordered |= _rest({"name": function.get("name")}, function, "arguments")
    return _rest({"id": raw.get("id"), "function": ordered, "type": "function"}, raw)


def _rest(first: dict[str, Any], raw: Mapping[str, Any], *handled: str) -> dict[str, Any]:
    return first | {k: v for k, v in raw.items() if k not in first and k not in handled}


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise Unrenderable("bad-message", "content must be text or a list of parts")


def _content(parts: Iterable[Any], content_format: ContentFormat) -> Any:
    taken: list[Any] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_reference":
            taken.append({"type": kind, "name": part.get("name")} if content_format == "openai" else part.get("name"))
            continue
        member = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if member is None or part.get("uuid") is not None:
            raise Unrenderable("multimodal" if isinstance(part, dict) else "bad-message", "a part is not text")
        text = part.get(member)
        if text is None and kind in ("text", "refusal"):
            continue
        if not isinstance(text, str):
            raise Unrenderable("bad-message", "a part's text must be a string")
        if content_format == "openai":
            extra = {k: v for k, v in part.items() if k not in PART_FIELDS}
            taken.append({"type": "text", "text": text, **extra})
        elif text:
            taken.append(text)
    return taken if content_format == "openai" else "\n".join(taken)


def _tool_result(content: Any) -> Any:
    """Most templates take only text from tools, so parts are joined for all of them, unless there is more than text."""
    if not isinstance(content, list) or any(part["type"] != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def _joined(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return str(content)


def _without_billing_header(parts: list[Any]) -> list[Any]:
    kept = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if isinstance(text, str) and text.startswith(BILLING_HEADER):
            rest = text.partition("\n")[2]
            if not rest:
                continue
            part = {**part, "text": rest}
        kept.append(part)
    return kept
