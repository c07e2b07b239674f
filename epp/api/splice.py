"""Changing one value of a JSON body and not one byte beside it.

In: a body and what a value should become. Out: the body with that value's bytes replaced (or the member put in).
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from epp.api.errors import BadRequest
from epp.api.fields import kind_of, read_fields, span_of

_OPENING = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{")
_EMPTY_OBJECT = re.compile(rb"\{[ \t\r\n]*\}")


class _StreamOptions(msgspec.Struct):
    include_usage: Raw = Raw()


_stream_options = msgspec.json.Decoder(_StreamOptions).decode


def model_span(body: bytes) -> tuple[int, int] | None:
    """Byte range of the top-level `model` value, quotes included; of duplicates the last, which parsers take.

    None when the body is no JSON object or has none.
    """
    try:
        return span_of(body, read_fields(body).model)
    except BadRequest:
        return None


def rewrite_model(body: bytes, model: str) -> bytes:
    """The body with `model` as its top-level model; unchanged when it names none."""
    span = model_span(body)
    return splice(body, span, msgspec.json.encode(model)) if span else body


def include_usage(body: bytes) -> bytes | None:
    """The body asking for a usage event at the stream's end (`stream_options.include_usage`).

    None when it asks already, so nothing is to be hidden from the client, or when `stream_options` is nothing a
    worker would take. An explicit false is overruled: the caller hides what it brings.
    """
    options = read_fields(body).stream_options
    span = span_of(body, options)
    if span is None:
        opening = _OPENING.match(body)
        assert opening is not None  # read_fields saw an object
        separator = b"" if _EMPTY_OBJECT.match(body, opening.end() - 1) else b","
        member = b'"stream_options":{"include_usage":true}' + separator
        return splice(body, (opening.end(), opening.end()), member)
    if not kind_of(options):
        return splice(body, span, b'{"include_usage":true}')
    try:
        asked = _stream_options(options).include_usage
    except (msgspec.DecodeError, RecursionError):
        return None
    if bytes(asked) == b"true":
        return None
    inner = span_of(body, asked)
    if inner is not None:
        return splice(body, inner, b"true")
    separator = b"" if _EMPTY_OBJECT.match(body, span[0]) else b","
    return splice(body, (span[0] + 1, span[0] + 1), b'"include_usage":true' + separator)


def splice(body: bytes, span: tuple[int, int], value: bytes) -> bytes:
    """`body` with the bytes of `span` replaced."""
    start, end = span
    return b"".join((memoryview(body)[:start], value, memoryview(body)[end:]))
