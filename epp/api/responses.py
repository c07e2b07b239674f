"""Reading a response while it passes: token usage, and when the first content came.

In: the pieces of a response body, which the caller has already forwarded. Out: `usage` and `content_seen`. Nothing a
worker sends makes this raise; what cannot be read counts nothing and is told by `faults`.

Event streams are read event by event. Of any other JSON only the top-level `usage` value is kept (at most
`MAX_USAGE_BYTES`), whatever the size of the body: a 10 MB embedding is scanned, never held. A small answer that comes
in one piece is decoded at once, in a tenth of the scan's time (2 us against 20 us for 300 bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Raw

from epp.api.fields import kind_of
from epp.api.grpc_engine import GenerateReader
from epp.api.scan import MemberScanner
from epp.api.sse import Event, EventReader
from epp.request import Api

MAX_USAGE_BYTES = 16_384

Count = Annotated[int, Meta(ge=0, le=1 << 53)] | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the worker tells them; None = not told. `prompt_tokens` includes the cached ones."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class ResponseReader:
    """Reads one response. `status` 400 and above is an error answer: nothing is counted."""

    def __init__(self, api: Api, content_type: str, status: int = 200, content_encoding: str = "") -> None:
        self.bytes_seen = 0
        self._body: _Body | None = None
        kind = content_type.partition(";")[0].strip().lower()
        if status < 400 and content_encoding.strip().lower() in ("", "identity"):
            if kind == "text/event-stream":
                self._body = _Stream(api)
            elif kind == "application/json" or kind.endswith("+json"):
                self._body = _Document(api)
            elif api in (Api.GRPC_GENERATE, Api.GRPC_EMBED):
                self._body = _Grpc(api)
        self._any_byte_is_content = status < 400 and not isinstance(self._body, _Stream)

    def feed(self, data: bytes) -> None:
        self.bytes_seen += len(data)
        if self._body is not None:
            self._body.feed(data)

    def finish(self) -> Usage | None:
        """The body is over (also when it was cut off). What it told, or None."""
        if self._body is not None:
            self._body.finish()
        return self.usage

    @property
    def usage(self) -> Usage | None:
        """As of now; of repeated usage the latest, because workers repeat totals."""
        return self._body.usage if self._body is not None else None

    @property
    def streamed(self) -> bool:
        """Whether content comes piece by piece; of an answer in one piece the first byte tells of the last token."""
        return isinstance(self._body, (_Stream, _Grpc))

    @property
    def content_seen(self) -> bool:
        """Whether generated content has come; of other good answers than event streams: any byte."""
        if self._any_byte_is_content:
            return self.bytes_seen > 0
        return self._body is not None and self._body.content_seen

    @property
    def faults(self) -> int:
        """How many pieces of usage were malformed, and streams given up because an event was too long."""
        return self._body.faults if self._body is not None else 0


class _Body(Protocol):
    usage: Usage | None
    content_seen: bool
    faults: int

    def feed(self, data: bytes) -> None: ...

    def finish(self) -> None: ...


class _Details(msgspec.Struct):
    cached_tokens: Count = None


class _WireUsage(msgspec.Struct):
    """Usage of all APIs together: OpenAI completions and chat, OpenAI Responses, Anthropic messages."""

    prompt_tokens: Count = None
    completion_tokens: Count = None
    prompt_tokens_details: _Details | None = None
    input_tokens: Count = None
    output_tokens: Count = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: Count = None
    cache_creation_input_tokens: Count = None


class _Choice(msgspec.Struct):
    text: Raw = Raw()
    delta: Raw = Raw()


class _Delta(msgspec.Struct):
    content: Raw = Raw()
    reasoning_content: Raw = Raw()
    reasoning: Raw = Raw()
    refusal: Raw = Raw()
    tool_calls: Raw = Raw()
    function_call: Raw = Raw()


class _Holder(msgspec.Struct):
    """The object that holds usage one level down: Responses' `response`, Anthropic's `message`."""

    usage: Raw = Raw()


class _WireEvent(msgspec.Struct):
    type: Raw = Raw()
    usage: Raw = Raw()
    choices: Raw = Raw()
    response: Raw = Raw()
    message: Raw = Raw()


_usage = msgspec.json.Decoder(_WireUsage).decode
_event = msgspec.json.Decoder(_WireEvent).decode
_holder = msgspec.json.Decoder(_Holder).decode
_choices = msgspec.json.Decoder(list[_Choice]).decode
_delta = msgspec.json.Decoder(_Delta).decode
_UNREADABLE = (msgspec.DecodeError, RecursionError)
_EMPTY = (b"", b"null", b'""', b"[]")


class _Counter:
    """Keeps the latest usage of one response."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.usage: Usage | None = None
        self.content_seen = False
        self.faults = 0

    def count(self, raw: Raw | bytes) -> None:
        """Take one `usage` value. One wrong type in it and all of it counts nothing."""
        try:
            wire = _usage(raw)
        except _UNREADABLE:
            self.faults += 1
            return
        prompt = wire.prompt_tokens if wire.prompt_tokens is not None else wire.input_tokens
        completion = wire.completion_tokens if wire.completion_tokens is not None else wire.output_tokens
        details = wire.prompt_tokens_details or wire.input_tokens_details
        cached = details.cached_tokens if details else wire.cache_read_input_tokens
        if self.api is Api.MESSAGES and prompt is not None:  # Anthropic counts the cached ones apart
            prompt += (wire.cache_read_input_tokens or 0) + (wire.cache_creation_input_tokens or 0)
        before = self.usage or Usage()
        after = Usage(
            prompt if prompt is not None else before.prompt_tokens,
            completion if completion is not None else before.completion_tokens,
            cached if cached is not None else before.cached_tokens,
        )
        if after != Usage():
            self.usage = after


class _Stream(_Counter):
    """An event stream."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self._events = EventReader()

    def feed(self, data: bytes) -> None:
        for event in self._events.feed(data):
            if event.spans:
                self._take(event)

    def finish(self) -> None:
        self.faults += self._events.overflowed
        pending = self._events.rest()
        if pending is not None and pending.spans:
            self._take(pending)

    def _take(self, event: Event) -> None:
        data = event.data
        if self.content_seen and b"usage" not in data:
            return
        try:
            wire = _event(data)
            if not self.content_seen:
                self.content_seen = _has_content(wire)
            for raw in (wire.usage, wire.response, wire.message):
                if kind_of(raw) == b"{":
                    usage = raw if raw is wire.usage else _holder(raw).usage
                    if kind_of(usage):
                        self.count(usage)
                elif raw is wire.usage and kind_of(raw):
                    self.faults += 1
        except _UNREADABLE:  # `[DONE]`, or nothing that is ours to understand
            pass


class _Document(_Counter):
    """One JSON object."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self._scanner: MemberScanner | None = None
        self._whole = False
        self._value: bytearray | None = None

    def feed(self, data: bytes) -> None:
        if self._whole or not data:
            return
        if self._scanner is None:
            if len(data) <= MAX_USAGE_BYTES and self._decode(data):
                self._whole = True
                return
            self._scanner = MemberScanner()
        self._scan(self._scanner, data)

    def _decode(self, data: bytes) -> bool:
        """Read `data` if it is the whole document."""
        try:
            value = bytes(_holder(data).usage)
        except _UNREADABLE:
            return False
        if value not in (b"", b"null"):
            self.count(value)
        return True

    def _scan(self, scanner: MemberScanner, data: bytes) -> None:
        start = 0 if self._value is not None else -1
        for mark in scanner.feed(data):
            if mark.name != "usage":
                continue
            if mark.begins:
                self._value, start = bytearray(), mark.offset
            elif self._value is not None:
                self._keep(data[start : mark.offset])
                value, self._value, start = bytes(self._value), None, -1
                if value != b"null":
                    self.count(value)
        if start >= 0:
            self._keep(data[start:])

    def finish(self) -> None:
        pass

    def _keep(self, data: bytes) -> None:
        if self._value is not None and len(self._value) <= MAX_USAGE_BYTES:  # a longer one ends up cut, hence malformed
            self._value += data[: MAX_USAGE_BYTES + 1]


class _Grpc(_Counter):
    """Messages of vLLM's gRPC engine API."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self._reader = GenerateReader(embed=api is Api.GRPC_EMBED)

    def feed(self, data: bytes) -> None:
        counts = self._reader.feed(data)
        if counts is not None:
            self.usage = Usage(*counts)

    def finish(self) -> None:
        self.faults += self._reader.faults


def _has_content(wire: _WireEvent) -> bool:
    if kind_of(wire.choices) == b"[":
        return any(
            bytes(choice.text) not in _EMPTY or (kind_of(choice.delta) == b"{" and _says_something(choice.delta))
            for choice in _choices(wire.choices)
        )
    return bytes(wire.type).endswith(b'delta"') and bytes(wire.type) != b'"message_delta"'


def _says_something(raw: Raw) -> bool:
    delta = _delta(raw)
    parts = (
        delta.content,
        delta.reasoning_content,
        delta.reasoning,
        delta.refusal,
        delta.tool_calls,
        delta.function_call,
    )
    return any(bytes(part) not in _EMPTY for part in parts)
