"""Changing a response on its way to the client, and only what our own changes to the request brought about.

In: pieces of the response body, cut anywhere, and whether the body ends. Out: the bytes for the client.

* *Model*: where the request's model was rewritten, the response names the target; the client's name is put back in the
  top-level `model` (of event streams also `response.model` of the Responses API and `message.model` of Anthropic's)
  when its value is the target's name. No other byte changes.
* *Usage*: where `stream_options.include_usage` was injected, the client did not ask for usage. The event that carries
  only usage (`choices` empty) is taken out whole. On an event with choices a usage object becomes `null`, which
  OpenAI's schema allows there; a `null` that is there stays. So the client sees what it would have seen, but for
  `"usage":null` from workers that write it.
* *Cached tokens*: where another worker computed the prompt, the number in `usage` is replaced by that worker's
  (`epp.api.recounting`).

The length changes: whoever sends the result drops `content-length`. Event streams are held back to the end of each
event, which is when clients look at it; other JSON only within the `model` and `usage` values. What is not understood,
or exceeds the bounds, passes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Raw

from epp.api.fields import kind_of, span_of
from epp.api.recounting import recount
from epp.api.scan import MemberScanner
from epp.api.splice import splice
from epp.api.sse import Event, EventReader

MAX_VALUE_BYTES = 16_384
"""Longest `model` or `usage` value of a document that is looked at; it is held until it is whole."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """The worker's model name and the client's."""

    target: str
    client: str


class Rewriter(Protocol):
    """One response's transformation."""

    def feed(self, data: bytes, end: bool) -> bytes:
        """Bytes to send now; with `end`, all that were held back."""


def response_rewriter(
    content_type: str,
    *,
    renaming: Renaming | None = None,
    hide_usage: bool = False,
    cached_tokens: int | None = None,
    content_encoding: str = "",
) -> Rewriter | None:
    """The rewriter a response needs; None: it passes as it is, content-length included.

    `cached_tokens`: what usage shall tell; None leaves it.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if content_encoding.strip().lower() not in ("", "identity"):
        return None
    changes_usage = cached_tokens is not None
    if kind == "text/event-stream" and (renaming or hide_usage or changes_usage):
        return _StreamRewriter(renaming, hide_usage=hide_usage, cached_tokens=cached_tokens)
    if (kind == "application/json" or kind.endswith("+json")) and (renaming or changes_usage):
        return _DocumentRewriter(renaming, cached_tokens)
    return None


class _Holder(msgspec.Struct):
    """What has a model and usage one level down: Responses' `response`, Anthropic's `message`."""

    model: Raw = Raw()
    usage: Raw = Raw()


class _WireEvent(msgspec.Struct):
    model: Raw = Raw()
    usage: Raw = Raw()
    choices: Raw = Raw()
    response: Raw = Raw()
    message: Raw = Raw()


_holder = msgspec.json.Decoder(_Holder).decode
_event = msgspec.json.Decoder(_WireEvent).decode
_text = msgspec.json.Decoder(str).decode
_UNREADABLE = (msgspec.DecodeError, RecursionError)


class _StreamRewriter:
    def __init__(self, renaming: Renaming | None, *, hide_usage: bool, cached_tokens: int | None) -> None:
        self._renaming = renaming
        self._hide_usage = hide_usage
        self._cached_tokens = cached_tokens
        self._events = EventReader()
        self._given_up = False

    def feed(self, data: bytes, end: bool) -> bytes:
        if self._given_up:
            return data
        out = [self._rewritten(event) for event in self._events.feed(data)]
        if self._events.overflowed or end:
            self._given_up = self._events.overflowed
            rest = self._events.rest()
            if rest is not None:
                out.append(self._rewritten(rest))
        return b"".join(out)

    def _rewritten(self, event: Event) -> bytes:
        if not event.spans:
            return event.raw
        data = event.data
        if self._renaming is None and b"usage" not in data:  # nothing of a token's event can change
            return event.raw
        try:
            wire = _event(data)
            if self._hide_usage and kind_of(wire.usage) == b"{" and bytes(wire.choices) == b"[]":
                return b""
            edits = self._edits(data, wire)
        except _UNREADABLE:
            return event.raw
        raw = event.raw
        for (start, stop), value in sorted(edits, reverse=True):
            raw = splice(raw, (_in_raw(event, start), _in_raw(event, stop)), value)
        return raw

    def _edits(self, data: bytes, wire: _WireEvent) -> list[tuple[tuple[int, int], bytes]]:
        edits = []
        holders = [_holder(holder) for holder in (wire.response, wire.message) if kind_of(holder) == b"{"]
        if self._hide_usage and kind_of(wire.usage) == b"{" and kind_of(wire.choices) == b"[":
            edits.append((span_of(data, wire.usage), b"null"))
        elif self._cached_tokens is not None:
            last = bytes(wire.choices) == b"[]"
            for usage in (wire.usage, *(holder.usage for holder in holders)):
                if kind_of(usage) == b"{":
                    edits.append((span_of(data, usage), recount(bytes(usage), self._cached_tokens, create=last)))
        if self._renaming is not None:
            for model in (wire.model, *(holder.model for holder in holders)):
                if _is(model, self._renaming.target):
                    edits.append((span_of(data, model), msgspec.json.encode(self._renaming.client)))
        return [(span, value) for span, value in edits if span is not None]


def _in_raw(event: Event, offset: int) -> int:
    """Where a byte of `event.data` stands in `event.raw`; data lines are joined by one line feed each."""
    for start, end in event.spans:
        if offset <= end - start:
            return start + offset
        offset -= end - start + 1
    raise ValueError("offset outside the event's data")


class _DocumentRewriter:
    def __init__(self, renaming: Renaming | None, cached_tokens: int | None) -> None:
        self._changes: dict[str, Callable[[bytes], bytes]] = {}
        if renaming is not None:
            self._changes["model"] = lambda value: _renamed(value, renaming)
        if cached_tokens is not None:
            self._changes["usage"] = lambda value: _recounted(value, cached_tokens)
        self._scanner = MemberScanner()
        self._held: bytearray | None = None

    def feed(self, data: bytes, end: bool) -> bytes:
        out = bytearray()
        position = 0
        for mark in self._scanner.feed(data):
            change = self._changes.get(mark.name)
            if change is None:
                continue
            if mark.begins:
                out += data[position : mark.offset]
                self._held = bytearray()
            elif self._held is not None:
                out += change(bytes(self._held + data[position : mark.offset]))
                self._held = None
            else:
                continue
            position = mark.offset
        if self._held is None:
            out += data[position:]
        else:
            self._held += data[position:]
            if end or len(self._held) > MAX_VALUE_BYTES:
                out += self._held
                self._held = None
        return bytes(out)


def _renamed(value: bytes, renaming: Renaming) -> bytes:
    return msgspec.json.encode(renaming.client) if _is(value, renaming.target) else value


def _recounted(usage: bytes, cached_tokens: int) -> bytes:
    try:
        return recount(usage, cached_tokens, create=True) if usage[:1] == b"{" else usage
    except _UNREADABLE:
        return usage


def _is(raw: Raw | bytes, name: str) -> bool:
    try:
        return bytes(raw[:1] if isinstance(raw, bytes) else memoryview(raw)[:1]) == b'"' and _text(raw) == name
    except _UNREADABLE:
        return False
