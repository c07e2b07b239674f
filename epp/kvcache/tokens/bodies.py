"""What a request body says about its prompt, read once into raw members.

In: body bytes. Out: `PromptBody`, and for chats `ChatSettings`: everything besides the messages that decides how they
are rendered. Settings are remembered by their bytes: the tools of a coding agent are parsed once, not every turn.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import msgspec
import xxhash
from msgspec import Raw

from epp.kvcache.tokens.messages import Unrenderable, tools

MAX_SETTINGS_BYTES = 16 << 20
"""Raw bytes whose parsed settings are kept."""

UNSUPPORTED_KWARGS = frozenset(
    {
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "conversation",
    }
)
"""Arguments of transformers' own function that a client can smuggle in; what they do is left to the worker."""


class _Members(msgspec.Struct):
    """Members that shape a prompt; absent ones are empty. The last of duplicates counts, as everywhere."""

    prompt: Raw = Raw()
    tools: Raw = Raw()
    tool_choice: Raw = Raw()
    add_generation_prompt: Raw = Raw()
    continue_final_message: Raw = Raw()
    add_special_tokens: Raw = Raw()
    documents: Raw = Raw()
    reasoning_effort: Raw = Raw()
    chat_template: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    truncate_prompt_tokens: Raw = Raw()
    suffix: Raw = Raw()
    prompt_embeds: Raw = Raw()


class ChatBody(_Members):
    messages: list[Raw] = []


class CompletionBody(_Members):
    pass


_chat = msgspec.json.Decoder(ChatBody).decode
_completion = msgspec.json.Decoder(CompletionBody).decode

_SETTINGS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "documents",
    "reasoning_effort",
    "chat_template_kwargs",
)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How messages are rendered, besides the template itself."""

    variables: Mapping[str, Any]
    """What the template is given, without the messages."""
    continued: bool
    """The final message is to be gone on with."""
    add_special_tokens: bool
    digest: bytes
    """Names these settings, 128 bits."""
    kind: bytes
    """Names them but for what the tools are."""

    @property
    def short_variables(self) -> Mapping[str, Any]:
        """For rendering the end of a chat only: the first tool stands for all, which are rendered before it."""
        tools = self.variables["tools"]
        return self.variables if not tools else {**self.variables, "tools": tools[:1]}


def read_chat(body: bytes) -> ChatBody:
    """Raises Unrenderable when the body asks for what only the worker can do, or is beyond strict JSON."""
    try:
        members = _chat(body)
    except (msgspec.DecodeError, RecursionError):
        raise Unrenderable("unreadable-body") from None
    _refuse(members, "chat_template", "truncate_prompt_tokens")
    if not members.messages:
        raise Unrenderable("bad-message", "there are no messages")
    return members


def read_completion(body: bytes) -> tuple[list[str], bool]:
    """The prompts of a completion that are text, and whether special tokens surround them. Raises Unrenderable."""
    try:
        members = _completion(body)
    except (msgspec.DecodeError, RecursionError):
        raise Unrenderable("unreadable-body") from None
    _refuse(members, "truncate_prompt_tokens", "suffix", "prompt_embeds")
    prompts = _value(members.prompt)
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise Unrenderable("bad-prompt")
    return prompts, _value(members.add_special_tokens, default=True) is True


def _refuse(members: _Members, *names: str) -> None:
    for name in names:
        if _given(getattr(members, name)):
            raise Unrenderable("unsupported-field", f"{name} is left to the worker")


def _given(raw: Raw) -> bool:
    return bytes(memoryview(raw)[:1]) not in (b"", b"n")


def _value(raw: Raw, *, default: Any = None) -> Any:
    """By Python's parser, because the worker uses it: it decides what a number becomes."""
    if not _given(raw):
        return default
    try:
        return json.loads(bytes(raw))
    except (ValueError, RecursionError):
        raise Unrenderable("unreadable-body") from None


class SettingsReader:
    """Parses settings, and remembers them by their bytes. Safe from several threads.

    `variables`: what every template is given, the model's special tokens. `defaults`: the worker's
    `--default-chat-template-kwargs`.
    """

    def __init__(self, special_tokens: Mapping[str, str], defaults: Mapping[str, Any] | None = None) -> None:
        self._special_tokens = dict(special_tokens)
        self._defaults = dict(defaults or {})
        self._known: OrderedDict[bytes, tuple[ChatSettings, int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def read(self, members: ChatBody) -> ChatSettings:
        """Raises Unrenderable."""
        digest, size = _digest(members)
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
                return known[0]
        settings = self._parse(members, digest)
        with self._lock:
            if digest not in self._known:
                self._known[digest] = (settings, size)
                self._bytes += size
            while self._bytes > MAX_SETTINGS_BYTES:
                self._bytes -= self._known.popitem(last=False)[1][1]
        return settings

    def _parse(self, members: ChatBody, digest: bytes) -> ChatSettings:
        """The merging of vLLM's `build_chat_params` and `preprocess_chat`, then of transformers' function."""
        given = _value(members.chat_template_kwargs, default={})
        if not isinstance(given, dict):
            raise Unrenderable("bad-message", "chat_template_kwargs must be an object")
        asked = UNSUPPORTED_KWARGS & given.keys()
        if asked:
            raise Unrenderable("unsupported-field", f"chat_template_kwargs.{min(asked)} is left to the worker")
        generation = _value(members.add_generation_prompt, default=True)
        continued = _value(members.continue_final_message, default=False)
        effort = _value(members.reasoning_effort)
        own = {
            "add_generation_prompt": generation,
            "continue_final_message": continued,
            "documents": _value(members.documents),
            "reasoning_effort": effort,
        }
        if effort is not None and "enable_thinking" not in given:
            own["enable_thinking"] = effort != "none"
        merged: dict[str, Any] = {**self._defaults}
        if _given(members.tools):
            merged["tools"] = tools(_value(members.tools))
        asked_for = {**given, **{k: v for k, v in own.items() if v is not None}}
        merged |= {k: v for k, v in asked_for.items() if v is not None and v != "auto"}
        continued = merged.pop("continue_final_message", False)
        if not isinstance(continued, bool) or (continued and merged.get("add_generation_prompt")):
            raise Unrenderable("bad-message", "continue_final_message excludes add_generation_prompt")
        merged.setdefault("tools", None)
        merged.setdefault("documents", None)
        kind = json.dumps({**merged, "tools": bool(merged["tools"])}, sort_keys=True).encode()
        return ChatSettings(
            variables={**self._special_tokens, **merged},
            continued=continued,
            add_special_tokens=_value(members.add_special_tokens, default=False) is True,
            digest=digest,
            kind=xxhash.xxh3_128_digest(kind),
        )


def _digest(members: ChatBody) -> tuple[bytes, int]:
    digest = xxhash.xxh3_128()
    size = 0
    for name in _SETTINGS:
        raw = memoryview(getattr(members, name))
        digest.update(b"%d:" % len(raw))
        digest.update(raw)
        size += len(raw)
    return digest.digest(), size
