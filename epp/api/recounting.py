"""Putting the prefiller's count of cached tokens into a usage object.

In: the bytes of one `usage` value as the decoder wrote it, and how many prompt tokens the prefiller had cached. Out:
the same bytes but for that number. A decoder that pulled the prompt's KV from a prefiller counts what it pulled, or its
own cache, and neither is what the client's prompt cost.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from epp.api.fields import kind_of, span_of
from epp.api.splice import splice


class _Usage(msgspec.Struct):
    prompt_tokens: Raw = Raw()
    prompt_tokens_details: Raw = Raw()
    input_tokens: Raw = Raw()
    input_tokens_details: Raw = Raw()
    cache_read_input_tokens: Raw = Raw()


class _Details(msgspec.Struct):
    cached_tokens: Raw = Raw()


_usage = msgspec.json.Decoder(_Usage).decode
_details = msgspec.json.Decoder(_Details).decode
_INTEGER = re.compile(rb"\d{1,15}")
_OPENING = re.compile(rb"\{([ \t\r\n]*\})?")


def recount(usage: bytes, cached: int, *, create: bool) -> bytes:
    """`usage` with `cached` as its cached tokens. Raises msgspec.DecodeError or RecursionError for no JSON object.

    OpenAI's APIs have it in `prompt_tokens_details` or `input_tokens_details`, Anthropic's in `cache_read_input_tokens`
    where `input_tokens` is the rest of the prompt and changes too. `create`: put the member in where it is missing, as
    vLLM leaves it out without `--enable-prompt-tokens-details` and in usage beside each token.
    """
    wire = _usage(usage)
    if (read := _number(wire.cache_read_input_tokens)) is not None:
        rest = _number(wire.input_tokens)
        if rest is None:
            return usage
        new = min(cached, rest + read)
        values = [(wire.cache_read_input_tokens, new), (wire.input_tokens, rest + read - new)]
        edits = [(span, b"%d" % value) for raw, value in values if (span := span_of(usage, raw)) is not None]
        for edit in sorted(edits, reverse=True):
            usage = splice(usage, *edit)
        return usage
    for total, details, name in (
        (wire.prompt_tokens, wire.prompt_tokens_details, b"prompt_tokens_details"),
        (wire.input_tokens, wire.input_tokens_details, b"input_tokens_details"),
    ):
        if (place := span_of(usage, details)) is not None:
            return splice(usage, place, _recounted(bytes(details), cached))
        if create and name == b"prompt_tokens_details" and _number(total) is not None:
            return _inserted(usage, b'"%s":{"cached_tokens":%d}' % (name, cached))
    return usage


def _recounted(details: bytes, cached: int) -> bytes:
    if details == b"null":
        return b'{"cached_tokens":%d}' % cached
    if details[:1] != b"{":
        return details
    value = _details(details).cached_tokens
    span = span_of(details, value)
    if span is None:
        return _inserted(details, b'"cached_tokens":%d' % cached)
    return splice(details, span, b"%d" % cached) if not kind_of(value) or _number(value) is not None else details


def _inserted(value: bytes, member: bytes) -> bytes:
    """An object with one more member, in front of the others."""
    opening = _OPENING.search(value)
    assert opening is not None  # it was decoded as an object
    at = opening.start() + 1
    return splice(value, (at, at), member if opening[1] else member + b",")


def _number(raw: Raw) -> int | None:
    text = bytes(raw)
    return int(text) if _INTEGER.fullmatch(text) else None
