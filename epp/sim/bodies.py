"""Request bodies of the emulated worker: what it reads of them, and how chat content becomes template messages.

Unknown fields are ignored, as the emulated model has no use for them. Bad ones raise `ApiError` with status 400 and a
message that names the field, in the shape the caller's API has for errors.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Positive = Annotated[int, Meta(ge=1, le=1 << 31)]


class ApiError(Exception):
    """An answer other than 200. `kind` is vLLM's error type, `param` the field at fault."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


class StreamOptions(Struct):
    include_usage: bool = False


class Common(Struct, kw_only=True):
    """What all generation bodies share."""

    model: str | None = None
    stream: bool | None = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def reports_cached_blocks(self) -> bool:
        return (self.vllm_xargs or {}).get("kv_cache_report_mode") == "full"


class CompletionBody(Common, kw_only=True):
    prompt: str | list[Any]
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and all(type(p) is int for p in prompt):
            return [_token_ids(prompt)]
        if prompt and all(isinstance(p, str) for p in prompt):
            return list(prompt)
        if prompt and all(isinstance(p, list) and p for p in prompt):
            return [_token_ids(p) for p in prompt]
        raise ApiError(400, "prompt must be text, a list of texts, token ids or lists of token ids", param="prompt")


class ChatBody(Common, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stream_options: StreamOptions | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    return_token_ids: bool | None = None


class MessagesBody(Common, kw_only=True):
    """Anthropic's `/v1/messages`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Positive
    system: str | list[Any] | None = None
    tools: list[Any] | None = None

    def as_chat(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.messages


class ResponsesBody(Common, kw_only=True):
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: list[Any] | None = None

    def as_chat(self) -> list[dict[str, Any]]:
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = [item if isinstance(item, dict) else {"content": item} for item in items]
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return system + messages


class TokenizeBody(Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(Struct):
    tokens: list[Count]
    model: str | None = None


class LoraBody(Struct):
    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_path: str = ""


T = TypeVar("T")


def read_body(body: bytes, kind: type[T]) -> T:
    """Raises ApiError (400) for what is not JSON or not of this shape."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, str(error)) from None


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their content as text, which is what a chat template of a text model takes."""
    return [{**message, "role": _role(message), "content": _text(_content(message))} for message in messages]


def _role(message: dict[str, Any]) -> str:
    role = message.get("role") or ("tool" if "output" in message else "assistant")
    if not isinstance(role, str):
        raise ApiError(400, "the role of a message must be text", param="messages")
    return role


def _content(message: dict[str, Any]) -> Any:
    """Of a message, or of an item of the Responses API: a tool's output, or a call's arguments."""
    return message.get("content", message.get("output", message.get("arguments")))


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, "the content of a message must be text or a list of parts", param="messages")
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ApiError(400, "a content part must be text or an object", param="messages")
    if isinstance(text := part.get("text", part.get("thinking")), str):
        return text
    if part.get("type") == "tool_result":
        return _text(part.get("content"))
    if part.get("type") == "tool_use":
        return json.dumps({"name": part.get("name"), "input": part.get("input")}, ensure_ascii=False)
    kind = part.get("type")
    raise ApiError(400, f"the emulated model reads text only, not a part of type {kind!r}", param="messages")


def _token_ids(prompt: list[Any]) -> list[int]:
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
        raise ApiError(400, "token ids must be integers from 0 to 2^32 - 1", param="prompt")
    return prompt
