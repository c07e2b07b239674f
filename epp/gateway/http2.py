"""One HTTP/2 server connection without I/O (RFC 9113): bytes in, calls and bytes out.

Theory of operation. `receive(data, now)` cuts the bytes into frames and hands each to a small reader picked from the
table `_READERS` by its type. A reader changes the state of the connection or of one stream, appends frames to the
output, and tells the layer above through five methods that a subclass defines: `on_request`, `on_data`, `on_end`,
`on_closed`, and `interpret` for header blocks. That layer answers with `send_block`, `send_data`, `end` and `reset`, at
any time. `take()` gives the bytes to write. There are no event objects: a stream costs one object, a frame none.

A stream exists in `streams` while it is open; `last_id` tells idle ids from closed ones:

    state               peer may send                        we may send  leaves by
    idle                HEADERS, PRIORITY                    nothing      HEADERS -> open
    open                DATA, trailers, any other            anything     END_STREAM in -> half closed
    half closed         WINDOW_UPDATE, RST_STREAM, PRIORITY  anything     END_STREAM out, RST either way -> closed
    closed by us early  anything, for a while (lingering)    nothing      END_STREAM in, RST in -> closed
    closed              PRIORITY, WINDOW_UPDATE, RST_STREAM  nothing

When we end a stream that the peer has not ended, RST_STREAM(NO_ERROR) follows at once (section 8.1), so "half closed
(local)" does not occur. A peer's error that concerns one stream resets that stream; any other raises `Violation`,
which sends GOAWAY and sets `closing`: write what `take()` gives, then close the transport.

Flow control and all sending are in `epp.gateway.http2_send`, heads and HPACK in `http2_head`, bounds in `http2_limits`.
`tick(now)`, about once a second, ends what stalls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from epp.gateway import http2_frames as f
from epp.gateway.http2_frames import FRAME_HEADER, ErrorCode, Setting
from epp.gateway.http2_head import Head, HeadReader, not_http2
from epp.gateway.http2_limits import Bucket, EdgeCounters, Limits, Violation
from epp.gateway.http2_send import Sender, Stream

LINGERING: Final = 4_096
DRAIN_PING: Final = b"kvsdrain"


class Connection(Sender):
    """The state of one connection. Subclass it, define the `on_` methods; see the theory of operation above."""

    def __init__(self, limits: Limits, counters: EdgeCounters, now: float) -> None:
        super().__init__(limits)
        self.counters = counters
        self.now = now
        self.streams: dict[int, Stream] = {}
        self.last_id = 0
        self.closing = False
        self.peer_going_away = False
        # receiving
        self._partial = b""
        self._greeted = False
        self._only = f.SETTINGS  # the one frame type allowed next, -1: any
        self._fragments: tuple[int, int, bytearray] | None = None  # stream, flags and begin of an unfinished block
        self._continuations = 0
        self._heads = HeadReader(4 * limits.header_list_bytes, self.interpret)
        self._lingering: dict[int, None] = {}
        self._lingering_floor = 0
        # draining
        self._drain_at: float | None = None
        self._refusing = False  # the second GOAWAY is sent
        # abuse
        self._started_at = now
        self._wasted = Bucket(limits.wasted_streams, now)
        self._pings = Bucket(limits.pings, now)
        self._settings_seen = Bucket(limits.settings, now)
        self._idle_frames = Bucket(limits.idle_frames, now)
        self._updates = Bucket(limits.window_updates, now)
        self._updates_seen = 0
        self._late_resets = 0
        self._out.append(
            f.settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: limits.streams,
                    Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
                    Setting.MAX_FRAME_SIZE: limits.frame_bytes,
                    Setting.MAX_HEADER_LIST_SIZE: limits.header_list_bytes,
                }
            )
            + f.window_update(0, limits.connection_window - f.DEFAULT_WINDOW)
        )

    # ---- what the layer above defines

    def make_stream(self, stream_id: int, window: int, credit: int) -> Stream:
        """A fresh stream object; a subclass returns its own kind."""
        return Stream(stream_id, window, credit)

    def interpret(self, head: Head) -> Any:
        """What a well-formed request head means above; kept in `head.meaning` and shared by equal blocks."""

    def on_request(self, stream: Stream, head: Head) -> None:
        """A stream was opened. `stream.remote_ended` is already right; `on_end` follows if it is set."""
        raise NotImplementedError

    def on_data(self, stream: Stream, data: bytes, start: int, end: int) -> None:
        """Payload `data[start:end]` (not empty) came. The buffer is not copied: keep a slice, not the buffer."""
        raise NotImplementedError

    def on_end(self, stream: Stream) -> None:
        """The peer ended its side."""
        raise NotImplementedError

    def on_closed(self, stream: Stream) -> None:
        """The stream is over, whatever the way. Called exactly once for each `on_request`."""
        raise NotImplementedError

    # ---- what the transport calls

    def receive(self, data: bytes, now: float) -> None:
        """Take what came from the peer, cut anywhere. Errors of the peer set `closing`, none are raised."""
        self.now = now
        if self.closing:
            return
        try:
            self._receive(data)
        except Violation as violation:
            self.fail(violation.code, violation.kind, str(violation))

    def tick(self, now: float) -> None:
        """Enforce the limits of time. Call about once a second."""
        self.now = now
        if self.closing:
            return
        if self._only == f.SETTINGS and now - self._started_at > self.limits.handshake_s:
            self.fail(ErrorCode.SETTINGS_TIMEOUT, "handshake_timeout", "no preface and SETTINGS in time")
            return
        for stream in list(self._backlogged):
            mark = stream.mark
            if mark is None or stream.sent - mark[1] >= self.limits.stall_bytes:
                stream.mark = (now, stream.sent)
            elif now - mark[0] > self.limits.stall_s:
                self.reset(stream.id, ErrorCode.ENHANCE_YOUR_CALM, "stalled")
        if self._drain_at is not None and now - self._drain_at >= 1.0:
            self._finish_goaway()

    def drain(self, now: float) -> None:
        """Begin a graceful end: announce it, serve what was already under way, then set `closing`.

        Two steps, so that no request that crosses the announcement is lost: GOAWAY with the highest id and a PING; when
        the PING is answered (or a second has passed) GOAWAY with the last id really taken.
        """
        if self.closing or self.draining:
            return
        self._drain_at = now
        self._out.append(f.goaway(f.MAX_WINDOW, ErrorCode.NO_ERROR) + f.frame(f.PING, 0, 0, DRAIN_PING))

    @property
    def draining(self) -> bool:
        """A graceful end has begun."""
        return self._drain_at is not None or self._refusing

    def fail(self, code: ErrorCode, kind: str, text: str) -> None:
        """End the connection at once, for an error or not: GOAWAY, every stream closed, `closing` set."""
        if not self.closing:
            if code != ErrorCode.NO_ERROR:
                self.counters.connection_errors[kind] += 1
            self._out.append(f.goaway(self.last_id, code, text.encode()))
            self.shut()

    def shut(self) -> None:
        """The transport is gone or about to go: close every stream, exactly once each."""
        self.closing = True
        while self.streams:
            self._remove(next(iter(self.streams.values())))

    # ---- what the layer above calls

    def reset(self, stream_id: int, code: ErrorCode, kind: str) -> None:
        """Reset a stream for an error of the peer's; too many of these are a flood (CVE-2025-8671)."""
        self.counters.stream_errors[kind] += 1
        self._out.append(f.rst_stream(stream_id, code))
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._remove(stream)
        if not self._wasted.take(self.now):
            self.fail(ErrorCode.ENHANCE_YOUR_CALM, "reset_flood", "too many streams in error")

    # ---- reading

    def _receive(self, data: bytes) -> None:
        if self._partial:
            data = self._partial + data
            self._partial = b""
        position, size = 0, len(data)
        if not self._greeted:
            if data[: len(f.PREFACE)] != f.PREFACE[:size]:
                raise Violation(ErrorCode.PROTOCOL_ERROR, *not_http2(data))
            if size < len(f.PREFACE):
                self._partial = data
                return
            self._greeted = True
            position = len(f.PREFACE)
        unpack, readers, longest = FRAME_HEADER.unpack_from, _READERS, self.limits.frame_bytes
        while size - position >= 9:
            high, low, kind, flags, stream_id = unpack(data, position)
            start = position + 9
            position = start + (high << 8 | low)
            if position - start > longest:
                raise Violation(ErrorCode.FRAME_SIZE_ERROR, "frame_size", f"frame of {position - start} bytes")
            if position > size:
                position = start - 9
                break
            if self._only >= 0 and kind != self._only:
                raise Violation(ErrorCode.PROTOCOL_ERROR, "frame_order", f"frame type {kind}, expected {self._only}")
            readers[kind if kind < 10 else 10](self, flags, stream_id & f.MAX_WINDOW, data, start, position)
            if self.closing:
                return
        if position < size:
            self._partial = data[position:]

    def _read_data(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        length = end - start
        self._credit -= length
        if self._credit < 0:
            raise Violation(ErrorCode.FLOW_CONTROL_ERROR, "flow_control", "DATA beyond the connection's window")
        if flags & f.PADDED:
            start, end = _unpad(data, start, end)
        stream = self.streams.get(stream_id)
        if stream is None:
            self._late(stream_id, "DATA", over=bool(flags & f.END_STREAM))
            if start == end:
                self._meter(self._idle_frames, "empty_frame_flood")
        elif stream.remote_ended:
            self.reset(stream_id, ErrorCode.STREAM_CLOSED, "data_after_end")
        elif length > stream.credit:
            self.reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "flow_control")
        else:
            stream.credit -= length
            if start < end:
                self.on_data(stream, data, start, end)
            elif not flags & f.END_STREAM:
                self._meter(self._idle_frames, "empty_frame_flood")
            if flags & f.END_STREAM:
                if not stream.closed:
                    stream.remote_ended = True
                    self.on_end(stream)
                else:
                    self._lingering.pop(stream_id, None)
            elif stream.credit * 2 < self.limits.stream_window:
                self._grant(stream)
        if self._credit * 2 < self.limits.connection_window:
            self._grant_connection()

    def _read_headers(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if not stream_id & 1:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "stream_id", f"HEADERS on stream {stream_id}")
        if flags & f.PADDED:
            start, end = _unpad(data, start, end)
        if flags & f.HAS_PRIORITY:
            start += 5
            if start > end:
                raise Violation(ErrorCode.FRAME_SIZE_ERROR, "frame_size", "HEADERS without room for its priority")
        block = data[start:end]
        if flags & f.END_HEADERS:
            self._read_block(stream_id, flags, block)
        else:
            self._fragments = (stream_id, flags, bytearray(block))
            self._continuations = 0
            self._only = f.CONTINUATION

    def _read_continuation(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        fragments = self._fragments
        if fragments is None or fragments[0] != stream_id:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "frame_order", f"CONTINUATION on stream {stream_id}")
        block = fragments[2]
        block += memoryview(data)[start:end]
        self._continuations += 1
        if self._continuations > self.limits.continuations or len(block) > 4 * self.limits.header_list_bytes:
            raise Violation(ErrorCode.ENHANCE_YOUR_CALM, "continuation_flood", "header block too long")
        if flags & f.END_HEADERS:
            self._fragments = None
            self._only = -1
            self._read_block(stream_id, fragments[1], bytes(block))

    def _read_block(self, stream_id: int, flags: int, block: bytes) -> None:
        head = self._heads.read(block)  # always: the dynamic table must follow the peer's, whoever the block is for
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self.last_id:
                self._open(stream_id, flags, head)
            else:
                self._late(stream_id, "HEADERS", over=bool(flags & f.END_STREAM))
        elif stream.remote_ended:
            self.reset(stream_id, ErrorCode.STREAM_CLOSED, "headers_after_end")
        elif not flags & f.END_STREAM or any(name[:1] == b":" for name, _ in head.fields):
            self.reset(stream_id, ErrorCode.PROTOCOL_ERROR, "bad_trailers")
        else:
            stream.remote_ended = True
            self.on_end(stream)

    def _open(self, stream_id: int, flags: int, head: Head) -> None:
        self.last_id = stream_id
        limits = self.limits
        full = len(self.streams) >= limits.streams or self.counters.streams_open >= limits.streams_in_all
        if full or self._refusing:
            self._linger(stream_id, flags)
            self.reset(stream_id, ErrorCode.REFUSED_STREAM, "refused")
        elif head.malformed:
            self._linger(stream_id, flags)
            self.reset(stream_id, ErrorCode.PROTOCOL_ERROR, "malformed_request")
        else:
            self.counters.streams += 1
            self.counters.streams_open += 1
            stream = self.make_stream(stream_id, self._stream_window, self.limits.stream_window)
            self.streams[stream_id] = stream
            if flags & f.END_STREAM:
                stream.remote_ended = True
                self.on_request(stream, head)
                if not stream.closed:
                    self.on_end(stream)
            else:
                self.on_request(stream, head)

    def _read_priority(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if stream_id == 0:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "stream_id", "PRIORITY on stream 0")
        if end - start != 5:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "frame_size", "PRIORITY not of 5 bytes")
        self._meter(self._idle_frames, "idle_frame_flood")

    def _read_rst_stream(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if end - start != 4:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "frame_size", "RST_STREAM not of 4 bytes")
        self._refuse_idle(stream_id, "RST_STREAM")
        stream = self.streams.get(stream_id)
        if stream is None:
            self._lingering.pop(stream_id, None)
            self._late_resets += 1
            if self._late_resets > (self.last_id + 1) // 2:  # more than streams there were
                self._meter(self._idle_frames, "idle_frame_flood")
            return
        self.counters.resets_received += 1
        useful = stream.useful
        stream.remote_ended = True
        self._remove(stream)
        if not useful:
            self._meter(self._wasted, "rapid_reset")

    def _read_settings(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if stream_id:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "stream_id", "SETTINGS on a stream")
        if (end - start) % 6 or (flags & f.ACK and start < end):
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "frame_size", f"SETTINGS of {end - start} bytes")
        self._meter(self._settings_seen, "settings_flood")
        if flags & f.ACK:
            if self._only == f.SETTINGS:
                raise Violation(ErrorCode.PROTOCOL_ERROR, "frame_order", "the first SETTINGS is an acknowledgement")
            return
        self._only = -1
        for at in range(start, end, 6):
            self._apply(int.from_bytes(data[at : at + 2], "big"), int.from_bytes(data[at + 2 : at + 6], "big"))
        self._out.append(f.SETTINGS_ACK)

    def _apply(self, key: int, value: int) -> None:
        if key == Setting.INITIAL_WINDOW_SIZE:
            if value > f.MAX_WINDOW:
                raise Violation(ErrorCode.FLOW_CONTROL_ERROR, "bad_setting", f"initial window of {value}")
            change = value - self._stream_window
            self._stream_window = value
            if change:
                for stream in list(self.streams.values()):
                    stream.window += change
                    if stream.window > f.MAX_WINDOW:
                        raise Violation(ErrorCode.FLOW_CONTROL_ERROR, "flow_control", "window above 2^31-1")
                    if change > 0 and stream.backlog is not None:
                        self._feed(stream)
        elif key == Setting.MAX_FRAME_SIZE:
            if not f.DEFAULT_FRAME_SIZE <= value < 1 << 24:
                raise Violation(ErrorCode.PROTOCOL_ERROR, "bad_setting", f"frame size of {value}")
            self._peer_frame_size = value
            if self._frame_size:
                self._frame_size = value
        elif key == Setting.ENABLE_PUSH:
            if value > 1:
                raise Violation(ErrorCode.PROTOCOL_ERROR, "bad_setting", f"ENABLE_PUSH of {value}")
        elif key == Setting.HEADER_TABLE_SIZE and value < 4_096:
            # Our blocks never use the table, but a peer that shrinks it must be told so (RFC 7541 section 4.2).
            self._table_update = b"\x20"

    def _read_push_promise(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        raise Violation(ErrorCode.PROTOCOL_ERROR, "push_promise", "PUSH_PROMISE from a client")

    def _read_ping(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if stream_id:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "stream_id", "PING on a stream")
        if end - start != 8:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "frame_size", "PING not of 8 bytes")
        self._meter(self._pings, "ping_flood")
        if not flags & f.ACK:
            self._out.append(f.frame(f.PING, f.ACK, 0, data[start:end]))
        elif data[start:end] == DRAIN_PING and self._drain_at is not None:
            self._finish_goaway()

    def _read_goaway(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if stream_id:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "stream_id", "GOAWAY on a stream")
        if end - start < 8:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "frame_size", "GOAWAY shorter than 8 bytes")
        self._meter(self._idle_frames, "idle_frame_flood")
        self.peer_going_away = True
        if not self.streams:
            self.closing = True

    def _read_window_update(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if end - start != 4:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "frame_size", "WINDOW_UPDATE not of 4 bytes")
        self._updates_seen += 1
        paid = self._frames_sent * self.limits.window_updates_per_frame + self.last_id
        if self._updates_seen > paid:
            self._updates_seen = paid
            self._meter(self._updates, "window_update_flood")
        increment = int.from_bytes(data[start:end], "big") & f.MAX_WINDOW
        if stream_id == 0:
            self._window += increment
            if increment == 0:
                raise Violation(ErrorCode.PROTOCOL_ERROR, "window_update", "WINDOW_UPDATE of 0")
            if self._window > f.MAX_WINDOW:
                raise Violation(ErrorCode.FLOW_CONTROL_ERROR, "flow_control", "connection window above 2^31-1")
            if self._starved:
                self._feed_starved()
            return
        self._refuse_idle(stream_id, "WINDOW_UPDATE")
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        stream.window += increment
        if increment == 0:
            self.reset(stream_id, ErrorCode.PROTOCOL_ERROR, "window_update")
        elif stream.window > f.MAX_WINDOW:
            self.reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "flow_control")
        elif stream.backlog is not None:
            self._feed(stream)

    def _read_unknown(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        self._meter(self._idle_frames, "idle_frame_flood")

    # ---- helpers of the readers

    def _meter(self, bucket: Bucket, kind: str) -> None:
        if not bucket.take(self.now):
            raise Violation(ErrorCode.ENHANCE_YOUR_CALM, kind, kind.replace("_", " "))

    def _refuse_idle(self, stream_id: int, what: str) -> None:
        if stream_id > self.last_id or not stream_id & 1:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "stream_id", f"{what} on stream {stream_id}")

    def _late(self, stream_id: int, what: str, *, over: bool) -> None:
        """A frame for a stream that is not open: fine, within bounds, where we were the ones who closed it."""
        self._refuse_idle(stream_id, what)
        if stream_id not in self._lingering and stream_id > self._lingering_floor:
            raise Violation(ErrorCode.STREAM_CLOSED, "stream_closed", f"{what} on closed stream {stream_id}")
        if over:
            self._lingering.pop(stream_id, None)
        if what == "HEADERS":
            self._meter(self._idle_frames, "idle_frame_flood")

    def _linger(self, stream_id: int, flags: int) -> None:
        if not flags & f.END_STREAM:
            self._remember(stream_id)

    def _remember(self, stream_id: int) -> None:
        self._lingering[stream_id] = None
        if len(self._lingering) > LINGERING:
            oldest = next(iter(self._lingering))
            del self._lingering[oldest]
            self._lingering_floor = max(self._lingering_floor, oldest)

    def _remove(self, stream: Stream) -> None:
        del self.streams[stream.id]
        stream.closed = True
        self.counters.streams_open -= 1
        if not stream.remote_ended:
            self._remember(stream.id)
        if stream.backlog is not None:
            self.backlog -= len(stream.backlog)
            stream.backlog = None
            self._unqueue(stream)
        self.on_closed(stream)
        if not self.streams and (self._refusing or self.peer_going_away):
            self.closing = True

    def _finish_goaway(self) -> None:
        self._drain_at = None
        self._refusing = True
        self._out.append(f.goaway(self.last_id, ErrorCode.NO_ERROR))
        if not self.streams:
            self.closing = True


_Reader = Callable[[Connection, int, int, bytes, int, int], None]
_READERS: tuple[_Reader, ...] = (
    Connection._read_data,
    Connection._read_headers,
    Connection._read_priority,
    Connection._read_rst_stream,
    Connection._read_settings,
    Connection._read_push_promise,
    Connection._read_ping,
    Connection._read_goaway,
    Connection._read_window_update,
    Connection._read_continuation,
    Connection._read_unknown,
)


def _unpad(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Where the payload of a padded frame lies."""
    if start == end or data[start] > end - start - 1:
        raise Violation(ErrorCode.PROTOCOL_ERROR, "padding", "padding longer than its frame")
    return start + 1, end - data[start]
