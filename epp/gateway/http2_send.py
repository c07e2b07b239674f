"""The sending half of an HTTP/2 connection: streams' windows, backlogs, frames out, and the windows we give in return.

What cannot go out (stream window, connection window, a paused transport) waits in the stream's backlog, in order. While
a backlog is above its bound, the peer is given no receive window for that stream (or, for the sum, for the connection),
so what a peer that does not read can make us hold is bounded by windows.
"""

from __future__ import annotations

from epp.gateway import http2_frames as f
from epp.gateway.http2_frames import FRAME_HEADER, ErrorCode
from epp.gateway.http2_limits import Limits


class Stream:
    """One open stream. Windows are what may still be sent (`window`) and what the peer may still send (`credit`)."""

    __slots__ = ("backlog", "closed", "credit", "id", "mark", "remote_ended", "sent", "trailers", "useful", "window")

    def __init__(self, stream_id: int, window: int, credit: int) -> None:
        self.id = stream_id
        self.window = window
        self.credit = credit
        self.remote_ended = False
        self.closed = False
        self.useful = False  # set by the layer above once a message went either way: its reset is no abuse
        self.backlog: bytearray | None = None
        self.trailers: bytes | None = None  # ends the stream when the backlog is out
        self.sent = 0  # bytes that left the backlog, for the stall check
        self.mark: tuple[float, int] | None = None  # when the stall check last saw progress, and `sent` then


class Sender:
    """Everything about going out. The receiving half, `epp.gateway.http2.Connection`, builds on it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.backlog = 0  # bytes in all backlogs
        self._out: list[bytes | memoryview] = []
        self._credit = limits.connection_window
        self._window = f.DEFAULT_WINDOW
        self._stream_window = f.DEFAULT_WINDOW
        self._peer_frame_size = f.DEFAULT_FRAME_SIZE
        self._frame_size = f.DEFAULT_FRAME_SIZE  # 0 while the transport is paused, so that one test stops the fast path
        self._frames_sent = 0  # DATA frames
        self._table_update = b""
        self._backlogged: dict[Stream, None] = {}
        self._starved: dict[Stream, None] = {}  # those of the backlogged that wait for the connection, in turn

    def take(self) -> bytes:
        """The bytes to write now, b"" if none."""
        out = self._out
        if not out:
            return b""
        data = b"".join(out) if len(out) > 1 else bytes(out[0])
        out.clear()
        return data

    def pause(self) -> None:
        """The transport's buffer is full: DATA waits in the backlogs until `resume`. Stop reading too."""
        self._frame_size = 0

    def resume(self) -> None:
        """The transport takes bytes again."""
        self._frame_size = self._peer_frame_size
        self._feed_starved()

    def send_block(self, stream: Stream, block: bytes) -> None:
        """Send a header block that does not end the stream."""
        self._write_block(stream, block, f.END_HEADERS)

    def send_data(self, stream: Stream, prefix: bytes, payload: bytes) -> None:
        """Send `prefix + payload` as soon as windows allow."""
        if stream.closed:
            return
        size = len(prefix) + len(payload)
        if stream.backlog is None and size <= self._frame_size and size <= self._window and size <= stream.window:
            self._window -= size
            stream.window -= size
            self._frames_sent += 1
            self._out += (FRAME_HEADER.pack(size >> 8, size & 255, 0, 0, stream.id), prefix, payload)
        else:
            self._send_large(stream, prefix, payload)

    def end(self, stream: Stream, block: bytes) -> None:
        """Send `block` as the last thing of the stream, after its backlog."""
        if stream.closed:
            return
        if stream.backlog is not None:
            stream.trailers = block
            return
        self._write_block(stream, block, f.END_HEADERS | f.END_STREAM)
        if not stream.remote_ended:
            self._out.append(f.rst_stream(stream.id, ErrorCode.NO_ERROR))
        self._remove(stream)

    def reset(self, stream_id: int, code: ErrorCode, kind: str) -> None:
        """End a stream for an error; defined by the receiving half."""
        raise NotImplementedError

    # ---- private

    def _remove(self, stream: Stream) -> None:
        raise NotImplementedError

    def _grant(self, stream: Stream) -> None:
        if not stream.closed and (stream.backlog is None or len(stream.backlog) <= self.limits.stream_backlog):
            self._out.append(f.window_update(stream.id, self.limits.stream_window - stream.credit))
            stream.credit = self.limits.stream_window

    def _grant_connection(self) -> None:
        if self.backlog <= self.limits.connection_backlog:
            self._out.append(f.window_update(0, self.limits.connection_window - self._credit))
            self._credit = self.limits.connection_window

    def _write_block(self, stream: Stream, block: bytes, flags: int) -> None:
        if self._table_update:
            block = self._table_update + block
            self._table_update = b""
        size = len(block)
        self._out += (FRAME_HEADER.pack(size >> 8, size & 255, f.HEADERS, flags, stream.id), block)

    def _send_large(self, stream: Stream, prefix: bytes, payload: bytes) -> None:
        """Send what goes now as frames that are views of the payload; the rest becomes backlog."""
        rest = memoryview(payload)
        if stream.backlog is None:
            while prefix or rest:
                size = min(self._frame_size, self._window, stream.window, len(prefix) + len(rest))
                if size <= 0 or size < len(prefix):
                    break
                cut = size - len(prefix)
                self._window -= size
                stream.window -= size
                self._frames_sent += 1
                self._out += (FRAME_HEADER.pack(size >> 8, size & 255, 0, 0, stream.id), prefix, rest[:cut])
                prefix, rest = b"", rest[cut:]
            else:
                return
            stream.backlog = bytearray()
            stream.mark = None
            self._backlogged[stream] = None
        self.backlog += len(prefix) + len(rest)
        stream.backlog += prefix
        stream.backlog += rest
        if self.backlog > self.limits.backlog_ceiling:
            self.reset(stream.id, ErrorCode.ENHANCE_YOUR_CALM, "backlog_ceiling")
        else:
            self._feed(stream)

    def _feed(self, stream: Stream) -> None:
        """Move a stream's backlog out as far as the windows allow."""
        backlog = stream.backlog
        if backlog is None:
            return
        while backlog:
            size = min(self._frame_size, self._window, stream.window, len(backlog))
            if size <= 0:
                break
            self._window -= size
            stream.window -= size
            stream.sent += size
            self.backlog -= size
            self._frames_sent += 1
            self._out += (FRAME_HEADER.pack(size >> 8, size & 255, 0, 0, stream.id), bytes(backlog[:size]))
            del backlog[:size]
        if backlog:
            if stream.window > 0:
                self._starved[stream] = None
            else:
                self._starved.pop(stream, None)
        else:
            self._unqueue(stream)
            stream.backlog = None
            if stream.trailers is not None:
                self.end(stream, stream.trailers)
        if stream.credit * 2 < self.limits.stream_window and not stream.remote_ended:
            self._grant(stream)
        if self._credit * 2 < self.limits.connection_window:
            self._grant_connection()

    def _feed_starved(self) -> None:
        """Serve those who wait for the connection's window, in turn: who got a part goes to the end of the line."""
        waiting = list(self._starved)
        self._starved = {}
        for index, stream in enumerate(waiting):
            if self._window <= 0 or not self._frame_size:
                self._starved = {s: None for s in waiting[index:] if not s.closed} | self._starved
                return
            self._feed(stream)

    def _unqueue(self, stream: Stream) -> None:
        self._backlogged.pop(stream, None)
        self._starved.pop(stream, None)
