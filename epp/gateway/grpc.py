"""gRPC over one HTTP/2 connection, without I/O (the gRPC "HTTP/2 protocol mapping" and its status rules).

Comes in: bytes of the connection, through `Connection.receive`. Goes out: bytes (`take`), and one `Session` per RPC
made by the `Service`, fed whole messages. One `Call` is the HTTP/2 stream, the RPC and its `Writer` in one object,
since there may be thousands.

How an RPC may end, and what the client sees:

    content-type is not gRPC's, method is not POST, head above the advertised size    HTTP 415, 405, 431
    method not served                                                                 UNIMPLEMENTED
    grpc-encoding other than identity                  UNIMPLEMENTED, with grpc-accept-encoding: identity
    compressed flag without an encoding, message cut short, unreadable grpc-timeout   INTERNAL
    message above the limit                                                           RESOURCE_EXHAUSTED
    grpc-timeout over                                                                 DEADLINE_EXCEEDED
    exception in the session                                                          INTERNAL
    the session or the server ends it                                                 the status given
"""

from __future__ import annotations

import heapq
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from epp.gateway.http2 import Connection
from epp.gateway.http2_frames import STATUS_200, literal
from epp.gateway.http2_head import Head
from epp.gateway.http2_limits import EdgeCounters, Limits
from epp.gateway.http2_send import Stream
from epp.gateway.session import GrpcStatus, Service, Session, Writer

log = logging.getLogger(__name__)

PREFIX: Final = Struct(">BI")
"""The five octets before each message: compressed flag and length."""
_TIMEOUT_UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_CONTENT_TYPE = re.compile(rb"application/grpc([+;].*)?")


@dataclass(frozen=True, slots=True)
class Method:
    """What a request head asks for: a factory of sessions, or the block that refuses it and the word to count."""

    factory: Callable[[Writer], Session] | None = None
    watch: bool = False
    timeout_s: float | None = None
    refusal: bytes = b""
    status: str = ""


class Call(Stream):
    """One RPC: its stream, the message it is receiving, its session; a `Writer` for that session."""

    __slots__ = ("connection", "needed", "outcome", "partial", "receiving", "session", "started", "watch")

    def __init__(self, connection: GrpcConnection, stream_id: int, window: int, credit: int) -> None:
        super().__init__(stream_id, window, credit)
        self.connection = connection
        self.session: Session | None = None
        self.partial: bytearray | None = None
        self.needed = PREFIX.size  # bytes that `partial` must have before it is worth a look
        self.started = False  # response headers are sent
        self.receiving = False  # inside a call of the session: its `finish` waits for the messages it returns
        self.outcome: tuple[GrpcStatus, str] | None = None
        self.watch = False

    def send(self, messages: Sequence[bytes]) -> None:
        """Queue whole messages (`Writer`)."""
        if self.closed or (self.outcome is not None and not self.receiving):
            return
        for message in messages:
            self.connection.send_message(self, message)
        self.connection.wake()

    def finish(self, status: GrpcStatus = GrpcStatus.OK, message: str = "") -> None:
        """End the RPC after what is queued (`Writer`)."""
        if self.closed or self.outcome is not None:
            return
        self.outcome = (status, message)
        if not self.receiving:
            self.connection.conclude(self)
            self.connection.wake()


class GrpcConnection(Connection):
    """An HTTP/2 connection that serves a `Service`.

    `wake` is called when there is something to `take` although the transport called nothing. `next_deadline` is when
    `expire` must be called next, None if no RPC has a timeout.
    """

    streams: dict[int, Call]  # type: ignore[assignment]

    def __init__(
        self, service: Service, limits: Limits, counters: EdgeCounters, now: float, wake: Callable[[], None]
    ) -> None:
        super().__init__(limits, counters, now)
        self.service = service
        self.wake = wake
        self.partial_bytes = 0
        self._deadlines: list[tuple[float, int]] = []
        self._response = STATUS_200 + literal(b"content-type", b"application/grpc")
        for name, value in service.metadata.items():
            self._response += literal(name.encode(), value.encode())

    # ---- what the transport calls

    @property
    def next_deadline(self) -> float | None:
        """When the next RPC times out."""
        while self._deadlines and self._deadlines[0][1] not in self.streams:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> None:
        """End the RPCs whose grpc-timeout is over."""
        self.now = now
        while self._deadlines and self._deadlines[0][0] <= now:
            call = self.streams.get(heapq.heappop(self._deadlines)[1])
            if call is not None:
                call.finish(GrpcStatus.DEADLINE_EXCEEDED, "deadline exceeded")

    def end_watches(self) -> None:
        """End the RPCs that nobody waits for when the server drains."""
        for call in [call for call in self.streams.values() if call.watch]:
            call.finish(GrpcStatus.UNAVAILABLE, "draining")

    def end_all(self, status: GrpcStatus, message: str) -> None:
        """End every RPC now."""
        for call in list(self.streams.values()):
            call.finish(status, message)

    # ---- from Connection

    def make_stream(self, stream_id: int, window: int, credit: int) -> Call:
        return Call(self, stream_id, window, credit)

    def interpret(self, head: Head) -> Method:
        return interpret(head, self.service, self.limits.header_list_bytes)

    def on_request(self, stream: Stream, head: Head) -> None:
        assert isinstance(stream, Call)
        method: Method = head.meaning
        if method.factory is None:
            stream.outcome = (GrpcStatus.UNIMPLEMENTED, "")
            self.counters.statuses[method.status] += 1
            self.end(stream, method.refusal)
            return
        if method.timeout_s is not None:
            self._add_deadline(self.now + method.timeout_s, stream.id)
        stream.watch = method.watch
        stream.receiving = True
        try:
            stream.session = method.factory(stream)
        except Exception:
            self._session_failed(stream)
        if method.watch and self.draining and stream.outcome is None:
            stream.outcome = (GrpcStatus.UNAVAILABLE, "draining")
        self._received(stream)

    def on_data(self, stream: Stream, data: bytes, start: int, end: int) -> None:
        assert isinstance(stream, Call)
        if stream.outcome is not None:
            return
        partial = stream.partial
        if partial is not None:
            partial += memoryview(data)[start:end]
            self.partial_bytes += end - start
            if len(partial) >= stream.needed or self.partial_bytes > self.limits.partial_ceiling:
                self._continue(stream, partial)
            return
        while end - start >= 5:
            flag, size = PREFIX.unpack_from(data, start)
            if flag or size > self.service.max_message_bytes:
                self._refuse(stream, flag, size)
                return
            stop = start + 5 + size
            if stop > end:
                break
            self.deliver(stream, data[start + 5 : stop])
            if stream.outcome is not None or stream.closed:
                return
            start = stop
        if start < end:
            stream.partial = bytearray(memoryview(data)[start:end])
            self.partial_bytes += end - start
            self._bound_partial(stream)

    def on_end(self, stream: Stream) -> None:
        assert isinstance(stream, Call)
        session = stream.session
        if stream.outcome is not None or session is None:
            return
        if stream.partial is not None:
            stream.finish(GrpcStatus.INTERNAL, "the stream ended inside a message")
            return
        stream.receiving = True
        try:
            if session.half_closed() and stream.outcome is None:
                stream.outcome = (GrpcStatus.OK, "")
        except Exception:
            self._session_failed(stream)
        self._received(stream)

    def on_closed(self, stream: Stream) -> None:
        assert isinstance(stream, Call)
        if stream.partial is not None:
            self.partial_bytes -= len(stream.partial)
            stream.partial = None
        session, stream.session = stream.session, None
        if session is not None:
            try:
                session.closed()
            except Exception:
                self.counters.session_errors += 1
                log.exception("a session failed while it was closed")

    # ---- messages

    def deliver(self, call: Call, message: bytes) -> None:
        """One whole message came."""
        session = call.session
        if session is None:
            return
        call.useful = True
        call.receiving = True
        try:
            for reply in session.receive(message):
                self.send_message(call, reply)
        except Exception:
            self._session_failed(call)
        call.receiving = False
        if call.outcome is not None:
            self.conclude(call)

    def send_message(self, call: Call, message: bytes) -> None:
        """Send one message, response headers first if it is the first."""
        if not call.started:
            if call.closed:
                return
            call.started = call.useful = True
            self.send_block(call, self._response)
        self.send_data(call, PREFIX.pack(0, len(message)), message)

    def conclude(self, call: Call) -> None:
        """Send the trailers of `call.outcome` after what is queued."""
        if call.closed or call.outcome is None:
            return
        status, message = call.outcome
        self.counters.statuses[status.name] += 1
        self.end(call, trailers(status, message) if call.started else self._response + trailers(status, message))

    # ---- private

    def _received(self, call: Call) -> None:
        call.receiving = False
        if call.outcome is not None:
            self.conclude(call)
        if call.closed and call.session is not None:  # ended inside its own factory
            self.on_closed(call)

    def _add_deadline(self, when: float, stream_id: int) -> None:
        if len(self._deadlines) > 2 * len(self.streams) + 1_000:  # most are of RPCs that ended in time
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.streams]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (when, stream_id))

    def _continue(self, call: Call, partial: bytearray) -> None:
        """A message that came in several frames has grown; deliver it once it is whole."""
        if len(partial) < PREFIX.size:
            self._bound_partial(call)
            return
        flag, size = PREFIX.unpack_from(partial)
        stop = PREFIX.size + size
        if flag or size > self.service.max_message_bytes:
            self._refuse(call, flag, size)
        elif len(partial) >= stop:
            call.partial, call.needed = None, PREFIX.size
            self.partial_bytes -= len(partial)
            with memoryview(partial) as view:
                message, rest = bytes(view[PREFIX.size : stop]), bytes(view[stop:])
            self.deliver(call, message)
            if rest and not call.closed:
                self.on_data(call, rest, 0, len(rest))
        else:
            call.needed = stop
            self._bound_partial(call)

    def _bound_partial(self, call: Call) -> None:
        if self.partial_bytes > self.limits.partial_ceiling:
            call.finish(GrpcStatus.RESOURCE_EXHAUSTED, "too many bytes of unfinished messages")

    def _refuse(self, call: Call, flag: int, size: int) -> None:
        if flag:
            call.finish(
                GrpcStatus.INTERNAL, "compressed message without grpc-encoding" if flag == 1 else "bad message flag"
            )
        else:
            limit = self.service.max_message_bytes
            call.finish(GrpcStatus.RESOURCE_EXHAUSTED, f"message of {size} bytes, the limit is {limit}")

    def _session_failed(self, call: Call) -> None:
        """Inside an exception of the session: INTERNAL, counted, logged, nobody else harmed."""
        self.counters.session_errors += 1
        log.exception("a session failed; its RPC ends with INTERNAL")
        call.outcome = (GrpcStatus.INTERNAL, "internal error")


def interpret(head: Head, service: Service, header_list_bytes: int) -> Method:
    """What a well-formed request head asks of `service`."""
    fields: Mapping[bytes, bytes] = dict(head.fields)
    if head.size > header_list_bytes:
        return _http_status("431")
    if fields[b":method"] != b"POST":
        return _http_status("405")
    if not _CONTENT_TYPE.fullmatch(fields.get(b"content-type", b"")):
        return _http_status("415")
    path = fields[b":path"].decode("latin-1")
    factory = service.methods.get(path)
    if factory is None:
        return _trailers_only(GrpcStatus.UNIMPLEMENTED, f"unknown method {path[:200]}")
    encoding = fields.get(b"grpc-encoding", b"identity")
    if encoding != b"identity":
        text = f"grpc-encoding {encoding[:40].decode('latin-1')} is not supported"
        return _trailers_only(GrpcStatus.UNIMPLEMENTED, text, literal(b"grpc-accept-encoding", b"identity"))
    timeout_s = None
    if b"grpc-timeout" in fields:
        match = _TIMEOUT.fullmatch(fields[b"grpc-timeout"])
        if match is None:
            return _trailers_only(GrpcStatus.INTERNAL, "malformed grpc-timeout")
        timeout_s = int(match[1]) * _TIMEOUT_UNITS[match[2]]
    return Method(factory=factory, watch=path in service.watches, timeout_s=timeout_s)


def trailers(status: GrpcStatus, message: str = "") -> bytes:
    """The header block that ends an RPC."""
    block = literal(b"grpc-status", str(int(status)).encode())
    return block + literal(b"grpc-message", percent_encode(message)) if message else block


def percent_encode(message: str) -> bytes:
    """`grpc-message` on the wire: UTF-8 with all but printable ASCII (and with `%`) percent-encoded."""
    return b"".join(
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        for byte in message.encode("utf-8", "replace")
    )


def _trailers_only(status: GrpcStatus, message: str, extra: bytes = b"") -> Method:
    block = STATUS_200 + literal(b"content-type", b"application/grpc") + extra + trailers(status, message)
    return Method(refusal=block, status=status.name)


def _http_status(status: str) -> Method:
    return Method(refusal=literal(b":status", status.encode()), status=f"HTTP_{status}")
