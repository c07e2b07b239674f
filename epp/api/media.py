"""Whether messages carry images, audio, video or files.

In: the raw bytes of a list of messages (chat, Responses items, Anthropic messages). Out: yes or no.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from epp.api.errors import BadRequest
from epp.api.fields import kind_of

_FAULT_INDEX = re.compile(r"\$\[(\d+)\]")
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


def has_media(messages: Raw, path: str) -> bool:
    """Reads the messages' content parts only (80 us for 400 KB).

    Raises BadRequest when a message is not an object, `path` being the name of the list. Everything inside a message
    is the worker's to judge: parts that cannot be read count as no media.
    """
    try:
        decoded = _messages(messages)
    except msgspec.ValidationError as error:
        index = _FAULT_INDEX.search(str(error))
        raise BadRequest(f"{path}[{index[1]}]" if index else path, "must be an object") from None
    except (msgspec.DecodeError, RecursionError):
        return False
    return any(_holds_media(message.content) for message in decoded)


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
