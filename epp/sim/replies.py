"""Response bodies of the emulated worker, by API: whole, as a stream of server-sent events, and as errors.

One `Reply` per request knows the API's shapes. A stream is `opening`, then `delta` for every piece, then `closing`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from epp.sim.bodies import ApiError

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Choice:
    text: str
    finish_reason: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def anthropic(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "output_tokens": self.completion_tokens,
            "cache_read_input_tokens": self.cached_tokens,
            "cache_creation_input_tokens": 0,
        }

    def responses(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(slots=True)
class Reply(ABC):
    """`request_id` without the API's prefix; `created` in seconds since the epoch."""

    request_id: str
    model: str
    created: int
    include_usage: bool = False
    with_token_ids: bool = False

    def whole_json(self, choices: list[Choice], usage: Usage) -> bytes:
        return _dumps(self.whole(choices, usage)).encode()

    @abstractmethod
    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an unstreamed answer."""

    @abstractmethod
    def opening(self, count: int, prompt_tokens: int) -> bytes:
        """What a stream of `count` choices begins with."""

    @abstractmethod
    def delta(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """The next piece of a choice; `finish_reason` with its last."""

    @abstractmethod
    def closing(self, choices: list[Choice], usage: Usage) -> bytes:
        """What a stream ends with."""


class CompletionReply(Reply):
    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        return {
            **self._head("text_completion"),
            "choices": [
                {
                    "index": index,
                    "text": choice.text,
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": None,
                    "token_ids": choice.token_ids if self.with_token_ids else None,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage.openai(),
        }

    def opening(self, count: int, prompt_tokens: int) -> bytes:
        return b""

    def delta(self, index: int, text: str, finish_reason: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return sse({**self._head("text_completion"), "choices": [choice]})

    def closing(self, choices: list[Choice], usage: Usage) -> bytes:
        return _openai_end(self._head("text_completion"), usage if self.include_usage else None)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"cmpl-{self.request_id}", "object": kind, "created": self.created, "model": self.model}


class ChatReply(Reply):
    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None, "tool_calls": []},
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": None,
                    "token_ids": choice.token_ids if self.with_token_ids else None,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage.openai(),
        }

    def opening(self, count: int, prompt_tokens: int) -> bytes:
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}, None) for index in range(count))

    def delta(self, index: int, text: str, finish_reason: str | None) -> bytes:
        return self._chunk(index, {"content": text}, finish_reason)

    def closing(self, choices: list[Choice], usage: Usage) -> bytes:
        return _openai_end(self._head("chat.completion.chunk"), usage if self.include_usage else None)

    def _chunk(self, index: int, delta: dict[str, str], finish_reason: str | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.request_id}", "object": kind, "created": self.created, "model": self.model}


class MessagesReply(Reply):
    """Anthropic's shapes."""

    _STOP: ClassVar = {"stop": "end_turn", "length": "max_tokens"}

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        [choice] = choices
        content = [{"type": "text", "text": choice.text}]
        return self._message(content, self._STOP[choice.finish_reason], usage)

    def opening(self, count: int, prompt_tokens: int) -> bytes:
        message = self._message([], None, Usage(prompt_tokens, 0, 0))
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return typed_sse({"type": "message_start", "message": message}) + typed_sse(block)

    def delta(self, index: int, text: str, finish_reason: str | None) -> bytes:
        delta = {"type": "text_delta", "text": text}
        return typed_sse({"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self, choices: list[Choice], usage: Usage) -> bytes:
        delta = {"stop_reason": self._STOP[choices[0].finish_reason], "stop_sequence": None}
        return (
            typed_sse({"type": "content_block_stop", "index": 0})
            + typed_sse({"type": "message_delta", "delta": delta, "usage": usage.anthropic()})
            + typed_sse({"type": "message_stop"})
        )

    def _message(self, content: list[Any], stop_reason: str | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage.anthropic(),
        }


class ResponsesReply(Reply):
    """OpenAI's Responses API."""

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        [choice] = choices
        return self._response(choice, usage)

    def opening(self, count: int, prompt_tokens: int) -> bytes:
        return typed_sse({"type": "response.created", "response": self._response(None, None)})

    def delta(self, index: int, text: str, finish_reason: str | None) -> bytes:
        event = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0}
        return typed_sse({**event, "item_id": f"msg_{self.request_id}", "delta": text})

    def closing(self, choices: list[Choice], usage: Usage) -> bytes:
        response = self._response(choices[0], usage)
        return typed_sse({"type": f"response.{response['status']}", "response": response})

    def _response(self, choice: Choice | None, usage: Usage | None) -> dict[str, Any]:
        status = "in_progress" if choice is None else "completed" if choice.finish_reason == "stop" else "incomplete"
        item = choice and {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [{"type": "output_text", "text": choice.text, "annotations": []}],
        }
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item] if item else [],
            "usage": usage and usage.responses(),
        }


def sse(payload: dict[str, Any]) -> bytes:
    return f"data: {_dumps(payload)}\n\n".encode()


def typed_sse(payload: dict[str, Any]) -> bytes:
    return f"event: {payload['type']}\ndata: {_dumps(payload)}\n\n".encode()


def error_body(error: ApiError, *, anthropic: bool = False) -> dict[str, Any]:
    if anthropic:
        kind = {404: "not_found_error", 503: "overloaded_error"}.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.status}}


def model_list(models: Iterable[tuple[str, str | None]], created: int, max_model_len: int) -> dict[str, Any]:
    """`models` are (name, parent); a parent makes it a LoRA adapter."""
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": name,
                "parent": parent,
                "max_model_len": None if parent else max_model_len,
                "permission": [],
            }
            for name, parent in models
        ],
    }


def _openai_end(head: dict[str, Any], usage: Usage | None) -> bytes:
    final = sse({**head, "choices": [], "usage": usage.openai()}) if usage else b""
    return final + b"data: [DONE]\n\n"
