"""One ext_proc stream as a state machine without I/O: messages in, events out, replies in an outbox.

    stream = ExtProcStream(limits)
    for event in stream.receive(message): ...     # after sending stream.take()
    stream.steer(Steering(("10.0.0.7:8000",)))    # answers RequestReady, now or later; then send stream.take()

One stream is one HTTP request and its response. Theory of operation:

The first message's `protocol_config` says how bodies come; one server serves every mode. The mode decides what the
picker sees and which reply carries its decision:

    request body      RequestReady comes with         the decision goes into
    none at all         the headers                   the reply to the headers
    NONE, STREAMED      the headers, body not seen    the reply to the headers; each streamed chunk is just let pass
    BUFFERED(_PARTIAL)  the body                      the reply to the body; that to the headers went out at once
    FULL_DUPLEX         the body's end or trailers    the reply to the headers, held until now; then the body again in
                                                      chunks, then the trailers' reply if there were trailers
    a tunnel            the headers, body not seen    the reply to the headers: its body has no end to wait for

    COLLECT --(enough is there: RequestReady)--> DECIDE --(steer)--> ANSWERED          reject ends it in any of them

Replies leave in the order headers, body, trailers. A full-duplex stream must never be ended before its body has been
sent back: Envoy would pass an empty body to the worker. Response messages are let pass at once, chunk by chunk, and
become events after their reply is in the outbox. Messages in observability mode give the same events and no reply.
Whatever breaks the protocol gives one `ProtocolFault`, after which the stream is deaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from epp.gateway import errors
from epp.gateway import ext_proc_wire as wire
from epp.gateway.errors import Rejection
from epp.gateway.ext_proc_events import (
    BodyMode,
    Event,
    Limits,
    ProtocolFault,
    RequestReady,
    RequestRejected,
    ResponseData,
    ResponseDone,
    ResponseHead,
    ResponseTransform,
    Steering,
)
from epp.request import Headers, RequestHead

__all__ = [
    "BodyMode",
    "Event",
    "ExtProcStream",
    "Limits",
    "ProtocolFault",
    "RequestReady",
    "RequestRejected",
    "ResponseData",
    "ResponseDone",
    "ResponseHead",
    "ResponseTransform",
    "Steering",
]

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
"""The RPC that speaks this protocol."""


class _Request(Enum):
    """How far the request is."""

    IDLE = auto()
    COLLECT = auto()
    DECIDE = auto()
    ANSWERED = auto()


class _Answer(Enum):
    """Which reply carries the decision."""

    HEADERS = auto()
    BODY = auto()
    DUPLEX = auto()
    TRAILERS = auto()


class _Response(Enum):
    """How far the response is."""

    IDLE = auto()
    BODY = auto()
    DONE = auto()


class _Broken(Exception):
    """The peer broke the protocol."""


_WHOLE = (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)


class ExtProcStream:
    """One ext_proc RPC. `receive` gives events; `outbox` holds serialised ProcessingResponses to send, in order."""

    __slots__ = (
        "_answer",
        "_chunks",
        "_complete",
        "_configured",
        "_deferred",
        "_eager_body",
        "_fields",
        "_limits",
        "_metadata",
        "_open",
        "_over",
        "_rejection",
        "_request",
        "_request_end",
        "_request_mode",
        "_request_trailers_seen",
        "_response",
        "_response_mode",
        "_response_trailers_seen",
        "_silent",
        "_size",
        "_steering",
        "_tunnel",
        "outbox",
    )

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self.outbox: list[bytes] = []
        self._configured = self._silent = self._eager_body = False
        self._request_mode = self._response_mode = self._limits.assumed_mode
        self._over = False  # nothing more is taken or sent
        self._open = False  # a ResponseDone is due
        self._request = _Request.IDLE
        self._request_end = False  # end_of_stream was seen
        self._request_trailers_seen = self._response_trailers_seen = False
        self._answer = _Answer.HEADERS
        self._fields = Headers()
        self._metadata: bytes | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._complete = True  # the body seen is the whole body
        self._tunnel = False  # the body has no end
        self._deferred: list[bytes] = []  # replies that follow the decision's
        self._rejection: Rejection | None = None
        self._steering: Steering | None = None
        self._response = _Response.IDLE

    # ---- the driver's side

    def receive(self, message: bytes) -> Sequence[Event]:
        """Take one serialised ProcessingRequest."""
        if self._over:
            return ()
        try:
            frame = wire.read_message(message)
            if not self._configured:
                self._configure(message, frame)
            handler = _HANDLERS.get(frame.kind)
            if handler is None:
                raise _Broken("a message without content")
            return handler(self, message, frame)
        except (_Broken, wire.MalformedMessage) as error:
            self._stop()
            return (ProtocolFault(str(error)),)

    def steer(self, steering: Steering) -> None:
        """Answer the `RequestReady`. Without effect once the stream is over or Envoy began a response of its own."""
        if self._over or self._response is not _Response.IDLE:
            return
        if self._request is not _Request.DECIDE:
            raise RuntimeError("no request waits for a decision")
        if steering.body is not None and (not self._complete or self._answer not in (_Answer.BODY, _Answer.DUPLEX)):
            raise ValueError("a body that was not seen cannot be replaced")
        self._request, self._steering = _Request.ANSWERED, steering
        if not self._silent:
            self.outbox.extend(self._steered(steering))
            self.outbox.extend(self._deferred)
        self._chunks, self._deferred = [], []

    def reject(self, rejection: Rejection) -> None:
        """Let Envoy answer the client with `rejection`, as soon as a reply is due. Otherwise as `steer`."""
        if self._over or self._response is not _Response.IDLE:
            return
        if self._request in (_Request.IDLE, _Request.ANSWERED):
            raise RuntimeError("no request waits for a decision")
        if self._request is _Request.COLLECT and self._request_mode in _WHOLE:
            self._rejection = rejection  # the headers are answered; the body's reply is the next that is due
        else:
            self._refuse(rejection)

    def take(self) -> list[bytes]:
        """The replies to send now; empties the outbox."""
        taken, self.outbox = self.outbox, []
        return taken

    def half_closed(self) -> Sequence[Event]:
        """The peer sends no more: the HTTP exchange is over for Envoy. The RPC may be ended with OK."""
        return self.closed()

    def closed(self) -> Sequence[Event]:
        """The RPC is over, however that came."""
        self._stop()
        return self._done(complete=False)

    # ---- the request

    def _configure(self, message: bytes, frame: wire.Frame) -> None:
        self._configured = True
        self._silent = frame.observability
        if frame.config is None:
            if self._silent:  # Envoy 1.40 names no modes where it only shows; the body may come or not
                self._request_mode, self._response_mode = BodyMode.NONE, BodyMode.STREAMED
            return
        request, response, self._eager_body = wire.read_config(message[slice(*frame.config)])
        try:
            self._request_mode, self._response_mode = BodyMode(request), BodyMode(response)
        except ValueError:
            raise _Broken(f"body modes {request} and {response}: this picker serves 0 to 4") from None

    def _request_headers(self, message: bytes, frame: wire.Frame) -> Sequence[Event]:
        if self._request is not _Request.IDLE:
            raise _Broken("request headers came twice")
        self._fields, self._request_end = wire.read_headers(message[frame.start : frame.end])
        self._request = _Request.COLLECT
        self._note_metadata(message, frame)
        if self._claimed_size() > self._limits.max_request_bytes and not self._silent:
            return self._too_large()
        if self._request_end:
            return self._ready(_Answer.HEADERS, b"")
        self._tunnel = _is_tunnel(self._fields)
        if self._tunnel or self._request_mode in (BodyMode.NONE, BodyMode.STREAMED):
            self._complete = False
            return self._ready(_Answer.HEADERS, None)
        if self._request_mode in _WHOLE:
            self._send(wire.CONTINUE[wire.REQUEST_HEADERS] + self._override())
        return ()

    def _request_body(self, message: bytes, frame: wire.Frame) -> Sequence[Event]:
        if self._request is _Request.IDLE:
            raise _Broken("a request body without request headers: request_header_mode must be SEND")
        if self._request_end or self._request_trailers_seen:
            raise _Broken("a request body after its end")
        start, stop, self._request_end = wire.read_body(message, frame.start, frame.end)
        self._note_metadata(message, frame)
        self._size += stop - start
        if self._size > self._limits.max_request_bytes and not (self._tunnel and self._request is _Request.ANSWERED):
            self._chunks, self._complete = [], False
            if not self._silent and self._response is _Response.IDLE:
                return self._too_large()
        if self._request is not _Request.COLLECT:
            if self._request_mode is BodyMode.FULL_DUPLEX:
                self._send_in_turn(*wire.streamed_chunks(wire.REQUEST_BODY, message[start:stop], end=self._request_end))
            else:
                self._send_in_turn(wire.CONTINUE[wire.REQUEST_BODY])
            return ()
        if self._complete:
            self._chunks.append(message[start:stop])
        if self._request_mode is BodyMode.FULL_DUPLEX:
            return self._ready(_Answer.DUPLEX, self._body()) if self._request_end else ()
        if self._request_mode is BodyMode.BUFFERED_PARTIAL and not self._request_end:
            self._complete = False
        return self._ready(_Answer.BODY, self._body())

    def _request_trailers(self, message: bytes, frame: wire.Frame) -> Sequence[Event]:
        if self._request is _Request.IDLE or self._request_trailers_seen:
            raise _Broken("request trailers out of turn")
        self._request_trailers_seen = True
        if self._request is not _Request.COLLECT:
            self._send_in_turn(wire.CONTINUE[wire.REQUEST_TRAILERS])
            return ()
        self._note_metadata(message, frame)
        if self._request_mode is BodyMode.FULL_DUPLEX:
            self._deferred.append(wire.CONTINUE[wire.REQUEST_TRAILERS])
            return self._ready(_Answer.DUPLEX, self._body())
        return self._ready(_Answer.TRAILERS, self._body())

    def _note_metadata(self, message: bytes, frame: wire.Frame) -> None:
        if frame.metadata is not None:
            self._metadata = message[slice(*frame.metadata)]

    def _body(self) -> bytes | None:
        if not self._complete:
            return None
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = [body]
        return body

    def _ready(self, answer: _Answer, body: bytes | None) -> Sequence[Event]:
        if self._rejection is not None:
            self._refuse(self._rejection)
            return ()
        if self._response is not _Response.IDLE:  # Envoy has answered by itself; nothing is left to decide
            self._request, self._chunks = _Request.ANSWERED, []
            return ()
        subset = wire.read_subset(self._metadata) if self._metadata is not None else None
        head = RequestHead(self._fields.get(":method"), self._fields.get(":path"), self._fields, subset)
        size = self._claimed_size() if body is None and not self._size else self._size
        self._request, self._answer, self._open = _Request.DECIDE, answer, True
        if not self._silent:
            shown = self._response_mode is not BodyMode.NONE and self._limits.response_bodies
            return (RequestReady(head, body, size, response_shown=shown),)
        flight = wire.read_flight(self._metadata) if self._metadata is not None else ""
        return (RequestReady(head, body, size, observing=True, flight=flight),)

    def _claimed_size(self) -> int:
        return _count(self._fields.get("content-length"))

    def _too_large(self) -> Sequence[Event]:
        rejection = errors.too_large(self._limits.max_request_bytes)
        self._refuse(rejection)
        return (RequestRejected(rejection),)

    def _refuse(self, rejection: Rejection) -> None:
        self._send(wire.immediate_reply(rejection))
        self._stop()

    def _steered(self, steering: Steering) -> list[bytes]:
        destination = ",".join(steering.addresses)
        kind = wire.REQUEST_BODY if self._answer is _Answer.BODY else wire.REQUEST_HEADERS
        if self._answer is _Answer.TRAILERS:
            return [wire.trailers_reply(wire.REQUEST_TRAILERS, destination)]
        replace = steering.body if self._answer is _Answer.BODY else None
        told = {} if self._response_mode is BodyMode.FULL_DUPLEX else dict(steering.response_headers)
        if steering.flight:
            told[wire.FLIGHT] = steering.flight
        plain = not steering.set_headers and not steering.remove_headers and replace is None
        if plain and not told:
            reply = wire.destination_reply(kind, destination, steering.rank)
        elif plain:
            reply = wire.steered_reply(
                kind, destination, wire.steering_mutation(destination, steering.rank), None, told
            )
        else:
            set_headers = {**steering.set_headers, **wire.steering_headers(destination, steering.rank)}
            if replace is not None and len(replace) != self._size:
                set_headers["content-length"] = str(len(replace))
            headers = wire.mutation(set_headers, (*wire.CONTROL_HEADERS, *steering.remove_headers))
            reply = wire.steered_reply(kind, destination, headers, replace, told)
        if self._answer is _Answer.HEADERS:
            return [reply + self._override()]
        if self._answer is _Answer.BODY:
            return [reply]
        body = self._chunks[0] if steering.body is None else steering.body
        return [reply, *wire.streamed_chunks(wire.REQUEST_BODY, body, end=self._request_end)]

    def _override(self) -> bytes:
        """mode_override for the reply to request headers, the one place where Envoy takes it (never in full duplex)."""
        request, response = self._request_mode, self._response_mode
        if self._eager_body or BodyMode.FULL_DUPLEX in (request, response):
            return b""
        if self._tunnel and request in _WHOLE:
            request = BodyMode.NONE  # else Envoy waits for the whole of a body that has no end
        if not self._limits.response_bodies:
            response = BodyMode.NONE
        changed = (request, response) != (self._request_mode, self._response_mode)
        return wire.mode_override(request, response) if changed else b""

    # ---- the response

    def _response_headers(self, message: bytes, frame: wire.Frame) -> Sequence[Event]:
        if self._response is not _Response.IDLE:
            raise _Broken("response headers came twice")
        fields, end = wire.read_headers(message[frame.start : frame.end])
        served = wire.read_served(message[slice(*frame.metadata)]) if frame.metadata is not None else ""
        self._response, self._open = _Response.BODY, True
        self._send(self._response_headers_reply(end))
        head = ResponseHead(_count(fields.get(":status")), fields, served)
        return (head, *self._done(complete=True)) if end else (head,)

    def _response_headers_reply(self, end: bool) -> bytes:
        steering = self._steering
        if steering is None or (not steering.response_headers and steering.response_transform is None):
            return wire.CONTINUE[wire.RESPONSE_HEADERS]
        lengthless = steering.response_transform is not None and self._response_mode is BodyMode.STREAMED and not end
        headers = wire.mutation(steering.response_headers, ("content-length",) if lengthless else ())
        return wire.common_reply(wire.RESPONSE_HEADERS, headers, None)

    def _response_body(self, message: bytes, frame: wire.Frame) -> Sequence[Event]:
        if self._response is _Response.DONE:
            raise _Broken("a response body after its end")
        start, stop, end = wire.read_body(message, frame.start, frame.end)
        data = message[start:stop]
        self._response, self._open = _Response.BODY, True
        mode = self._response_mode
        transform = self._steering.response_transform if self._steering is not None else None
        if not self._silent:
            if mode is BodyMode.FULL_DUPLEX:
                if transform is not None:
                    changed = transform.feed(data, end)
                    self._stream_response(data if changed is None else changed, end)
                elif len(data) <= wire.MAX_CHUNK:
                    self.outbox.append(wire.echo_chunk(wire.RESPONSE_BODY, message, frame.start, frame.end))
                else:
                    self._stream_response(data, end)
            elif transform is None or (mode is BodyMode.BUFFERED_PARTIAL and not end):
                self.outbox.append(wire.CONTINUE[wire.RESPONSE_BODY])
            else:
                self.outbox.append(self._changed_response(transform, data, end=end or mode in _WHOLE))
        if end or mode is BodyMode.BUFFERED:
            return (ResponseData(data, True), *self._done(complete=True))
        return (ResponseData(data, False),)

    def _stream_response(self, data: bytes, end: bool) -> None:
        self.outbox.extend(wire.streamed_chunks(wire.RESPONSE_BODY, data, end=end))

    def _changed_response(self, transform: ResponseTransform, data: bytes, *, end: bool) -> bytes:
        changed = transform.feed(data, end)
        if changed is None or changed == data:
            return wire.CONTINUE[wire.RESPONSE_BODY]
        whole = self._response_mode in _WHOLE and len(changed) != len(data)
        headers = wire.mutation({"content-length": str(len(changed))}) if whole else b""
        return wire.common_reply(wire.RESPONSE_BODY, headers, changed)

    def _response_trailers(self, message: bytes, frame: wire.Frame) -> Sequence[Event]:
        if self._response_trailers_seen:
            raise _Broken("response trailers came twice")
        self._response_trailers_seen = True
        events: list[Event] = []
        if self._response is not _Response.DONE:
            self._open = True
            transform = self._steering.response_transform if self._steering is not None else None
            rest = transform.feed(b"", True) if transform is not None else None
            if rest:
                if self._response_mode is not BodyMode.FULL_DUPLEX:
                    raise _Broken("the response ended by trailers: what its transform kept back cannot be sent")
                self._stream_response(rest, False)
            events = [ResponseData(b"", True), *self._done(complete=True)]
        self._send(wire.CONTINUE[wire.RESPONSE_TRAILERS])
        return events

    # ---- common

    def _send(self, reply: bytes) -> None:
        if not self._silent:
            self.outbox.append(reply)

    def _send_in_turn(self, *replies: bytes) -> None:
        """Send the replies to a later part of the request, after the decision's when that is still due."""
        if self._silent:
            return
        if self._request is _Request.DECIDE:
            self._deferred.extend(replies)
        else:
            self.outbox.extend(replies)

    def _stop(self) -> None:
        self._over = True
        self._chunks, self._deferred, self._metadata = [], [], None

    def _done(self, *, complete: bool) -> Sequence[Event]:
        self._response = _Response.DONE
        if not self._open:
            return ()
        self._open = False
        return (ResponseDone(complete),)


def _is_tunnel(fields: Headers) -> bool:
    """Whether a request opens a tunnel (a websocket, CONNECT)."""
    return fields.get("upgrade").lower() == "websocket" or fields.get(":method") == "CONNECT"


def _count(text: str) -> int:
    """A header's decimal number; 0 when it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


_HANDLERS: dict[int, Callable[[ExtProcStream, bytes, wire.Frame], Sequence[Event]]] = {
    wire.REQUEST_HEADERS: ExtProcStream._request_headers,
    wire.REQUEST_BODY: ExtProcStream._request_body,
    wire.REQUEST_TRAILERS: ExtProcStream._request_trailers,
    wire.RESPONSE_HEADERS: ExtProcStream._response_headers,
    wire.RESPONSE_BODY: ExtProcStream._response_body,
    wire.RESPONSE_TRAILERS: ExtProcStream._response_trailers,
}
