"""What a peer may cost: the bounds of one HTTP/2 connection, the meters that find floods, and the counters of an edge.

A flood is anything that costs us work or memory and gets the peer nothing: streams opened and reset before they
carried a message (CVE-2023-44487), streams it makes us reset (CVE-2025-8671), CONTINUATION chains (CVE-2024-27316),
PING, SETTINGS and empty frames (CVE-2019-9512, -9515, -9518), tiny window updates, windows at zero (CVE-2019-9517).
Each is held by a token bucket or a bound here; passing it ends the connection with ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from epp.gateway.http2_frames import ErrorCode


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection. Sizes in bytes, rates per second, times in seconds."""

    streams: int = 16_384
    """SETTINGS_MAX_CONCURRENT_STREAMS. Envoy opens a connection per worker and 1,024 streams unless told otherwise."""
    streams_in_all: int = 131_072
    """Open streams of all connections of an edge together."""
    frame_bytes: int = 65_536
    """SETTINGS_MAX_FRAME_SIZE. Envoy sends 16 KiB frames whatever is allowed; a peer can park one partial frame."""
    header_list_bytes: int = 16_384
    """SETTINGS_MAX_HEADER_LIST_SIZE; a longer list fails its stream with 431. Four times this fails the connection."""
    continuations: int = 16
    """CONTINUATION frames of one header block."""
    stream_window: int = 1 << 20
    """Receive window of a stream: a 400 KB prompt arrives without one WINDOW_UPDATE."""
    connection_window: int = 64 << 20
    stream_backlog: int = 1 << 20
    """Unsent bytes of one stream above which it gets no more receive window: who does not read cannot go on writing."""
    connection_backlog: int = 64 << 20
    """The same for the connection as a whole."""
    backlog_ceiling: int = 512 << 20
    """Unsent bytes of the connection above which the stream that adds to them is reset."""
    partial_ceiling: int = 512 << 20
    """Bytes of incomplete messages of one connection; the stream that passes it ends with RESOURCE_EXHAUSTED."""
    stall_s: float = 30.0
    """A stream (or the socket) that holds unsent bytes and moves less than `stall_bytes` in this time is given up."""
    stall_bytes: int = 16_384
    handshake_s: float = 10.0
    """From the connection's start to the client's preface and SETTINGS."""
    wasted_streams: tuple[float, float] = (100.0, 1_000.0)
    """Rate and burst of streams that got nothing done: reset by the peer before a whole message had come or gone, or
    reset by us for an error of the peer's. Envoy ends every ext_proc stream by RST_STREAM: those served never count."""
    pings: tuple[float, float] = (1_000.0, 1_000.0)
    """gRPC clients measure their bandwidth with a PING per round trip, and a round trip may be short."""
    settings: tuple[float, float] = (50.0, 100.0)
    idle_frames: tuple[float, float] = (100.0, 2_000.0)
    """PRIORITY, unknown types, empty DATA without END_STREAM, frames of streams that are over. A RST_STREAM that
    crosses the end of its stream is free, once for each stream."""
    window_updates: tuple[float, float] = (1_000.0, 5_000.0)
    """On top of `window_updates_per_frame` for each DATA frame sent and two for each stream opened."""
    window_updates_per_frame: int = 4


class Bucket:
    """A token bucket on a clock that is passed in."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate_and_burst: tuple[float, float], now: float) -> None:
        self._rate, self._burst = rate_and_burst
        self._level = self._burst
        self._at = now

    def take(self, now: float) -> bool:
        """Take one token; False: none was left."""
        self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._rate) - 1.0
        self._at = now
        return self._level >= 0.0


class Violation(Exception):
    """The peer broke the protocol or a bound: the connection ends with GOAWAY. `kind` is a fixed word for counters."""

    def __init__(self, code: ErrorCode, kind: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.kind = kind


@dataclass(slots=True)
class EdgeCounters:
    """What an edge counts, for all its connections together. Plain numbers, read by the metrics at any time."""

    connections: int = 0
    """Accepted since the start."""
    connections_open: int = 0
    connections_refused: int = 0
    """Beyond the limit of open connections."""
    connection_errors: Counter[str] = field(default_factory=Counter)
    """Connections ended for an error or a flood, by kind."""
    streams: int = 0
    streams_open: int = 0
    stream_errors: Counter[str] = field(default_factory=Counter)
    """Streams reset by this side, by kind."""
    resets_received: int = 0
    """RST_STREAM from peers; the normal end of a stream with Envoy."""
    statuses: Counter[str] = field(default_factory=Counter)
    """gRPC statuses sent, by name."""
    session_errors: int = 0
    """Exceptions out of sessions."""
