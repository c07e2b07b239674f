"""Whether messages carry images, audio, video or files.

In: the bytes of a list of messages (chat, Responses items, Anthropic messages). Out: yes or no.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from epp.api.fields import kind_of

_TEXT_TYPES = frozenset(
    {"text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "reasoning", "tool_use"}
)


class _Message(msgspec.Struct):
    content: Raw = Raw()


class _Part(msgspec.Struct):
    type: str = ""
    text: Raw = Raw()
    content: Raw = Raw()


_messages = msgspec.json.Decoder(list[_Message]).decode
_parts = msgspec.json.Decoder(list[_Part | str]).decode


def has_media(turns: bytes) -> bool:
    """`turns`: a JSON list without its closing bracket. What cannot be read, the worker's to judge, holds no media."""
    try:
        return any(_holds_media(message.content) for message in _messages(turns + b"]"))
    except (msgspec.DecodeError, RecursionError):
        return False


def _holds_media(content: Raw) -> bool:
    if kind_of(content) != b"[":
        return False
    try:
        parts = _parts(content)
    except (msgspec.DecodeError, RecursionError):
        return False
    return any(_is_media(part) for part in parts if isinstance(part, _Part))


def _is_media(part: _Part) -> bool:
    """vLLM also takes parts without a type, told by their key; `tool_result` parts hold parts of their own."""
    if part.type in _TEXT_TYPES:
        return False
    if kind_of(part.content):
        return _holds_media(part.content)
    return not kind_of(part.text)
