"""The members of a request body that matter, as raw byte ranges; nothing is decoded, copied or changed here.

In: a JSON object as bytes. Out: `Fields`, each member's value exactly as it stands in the body. One pass of msgspec
(75 us for 400 KB) reads what strict JSON allows. What it refuses but Python's parser, and with it vLLM, takes (NaN,
Infinity, lone surrogates, a byte order mark) goes through `_tolerant`, which is slower and just as safe.

Depth is bounded by the interpreter's recursion guard, which both parsers heed. Numbers of any length pass: they are
skipped, not converted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.decoder import JSONDecodeError

import msgspec
import numpy as np
from msgspec import Raw

from epp.api.errors import BadRequest

MAX_MEMBERS = 1_024
"""Top-level members of a body that needs the tolerant reader; requests have a few dozen."""

UTF8_CHECKED_BYTES = 16_384
_WHITE = re.compile(r"[ \t\n\r]*")


ABSENT = Raw()


class Fields(msgspec.Struct):
    """Top-level members of a request, of all APIs together; an absent one is empty. The last of duplicates counts."""

    model: Raw = ABSENT
    prompt: Raw = ABSENT
    prompt_embeds: Raw = ABSENT
    messages: Raw = ABSENT
    input: Raw = ABSENT
    items: Raw = ABSENT
    tools: Raw = ABSENT
    system: Raw = ABSENT
    instructions: Raw = ABSENT
    stream: Raw = ABSENT
    stream_options: Raw = ABSENT
    cache_salt: Raw = ABSENT
    max_tokens: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    conversation: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    user: Raw = ABSENT


decode_strict = msgspec.json.Decoder(Fields).decode
"""Raises msgspec.DecodeError or RecursionError."""


def read_fields(body: bytes) -> Fields:
    """Raises BadRequest when the body is not a JSON object in UTF-8.

    msgspec does not look into the strings it skips, so bodies up to `UTF8_CHECKED_BYTES` are checked apart;
    in longer ones bad UTF-8 outside the members read here is left to the worker (the check takes about 1 us a KB).
    """
    if len(body) <= UTF8_CHECKED_BYTES and not body.isascii():
        _decode_utf8(body)
    try:
        return decode_strict(body)
    except msgspec.ValidationError:
        raise BadRequest("", "must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError):
        return _tolerant(body)


def kind_of(raw: Raw) -> bytes:
    """The first byte of a member's value, which tells its JSON type; empty when it is absent or null."""
    if raw is ABSENT:
        return b""
    first = memoryview(raw)[:1].tobytes()
    return b"" if first == b"n" else first


def span_of(body: bytes, raw: Raw) -> tuple[int, int] | None:
    """Where in `body` a value lies that `read_fields` found there; None when it is absent.

    msgspec documents `Raw` as a view of its input; the difference of the addresses is the offset.
    """
    if not memoryview(raw).nbytes or not body:
        return None
    start = _address(raw) - _address(body)
    end = start + memoryview(raw).nbytes
    return (start, end) if start >= 0 and end <= len(body) else None


def _address(data: bytes | Raw) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


def _tolerant(body: bytes) -> Fields:
    text = _decode_utf8(body)
    known = Fields.__struct_fields__
    view = memoryview(body)
    found: dict[str, Raw] = {}
    at, offset = 0, len(body) - _size(text)  # a byte order mark is not in the text
    try:
        for name, start, end in _members(text):
            if name in known:
                offset += _size(text[at:start])
                at, size = end, _size(text[start:end])
                found[name] = Raw(view[offset : offset + size])
                offset += size
    except JSONDecodeError as error:
        raise BadRequest("", f"is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BadRequest("", "is nested too deeply") from None
    return Fields(**found)


def _members(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of every top-level member's value, checked as Python's own parser does; raises what it raises.

    Only the top level is walked here, and bounded: the time goes into Python's scanner, which is C.
    """
    at = _black(text, 0)
    if text[at : at + 1] != "{":
        _LENIENT.decode(text)  # raises if it is no JSON at all
        raise BadRequest("", "must be a JSON object")
    at = _black(text, at + 1)
    count = 0
    while text[at : at + 1] != "}" or count:
        count += 1
        if count > MAX_MEMBERS:
            raise BadRequest("", f"has more than {MAX_MEMBERS} members")
        if text[at : at + 1] != '"':
            raise JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        name, at = _LENIENT.raw_decode(text, at)
        at = _black(text, at)
        if text[at : at + 1] != ":":
            raise JSONDecodeError("Expecting ':' delimiter", text, at)
        start = _black(text, at + 1)
        _, end = _LENIENT.raw_decode(text, start)
        yield name, start, end
        at = _black(text, end)
        if text[at : at + 1] == "}":
            break
        if text[at : at + 1] != ",":
            raise JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _black(text, at + 1)
    at = _black(text, at + 1)
    if at < len(text):
        raise JSONDecodeError("Extra data", text, at)


def _black(text: str, at: int) -> int:
    match = _WHITE.match(text, at)
    assert match is not None  # it matches nothing, too
    return match.end()


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _decode_utf8(body: bytes) -> str:
    """As Python's `json.loads` does, which takes a byte order mark and encoded surrogates."""
    try:
        return body.decode("utf-8-sig", "surrogatepass")
    except UnicodeDecodeError as error:
        raise BadRequest("", f"is not valid UTF-8 at byte {error.start}") from None


def _skipped(_: str) -> None:
    """Numbers are not wanted, and converting a long integer is refused by Python (4,300 digits) or quadratic."""


_LENIENT = json.JSONDecoder(parse_int=_skipped, parse_float=_skipped, parse_constant=_skipped)
