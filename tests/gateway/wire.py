"""A peer made of bytes for sans-IO tests: frames in, frames out, sessions that keep the books of their own lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpack import Decoder

from epp.gateway import http2_frames as f
from epp.gateway.grpc import PREFIX, GrpcConnection
from epp.gateway.http2_limits import EdgeCounters, Limits
from epp.gateway.session import GrpcStatus, Service, Session, Writer

ECHO = "/test.Test/Echo"
GREETING = f.PREFACE + f.settings({})


class Ledger:
    """Every session made and how often it was closed."""

    def __init__(self) -> None:
        self.sessions: list[EchoSession] = []

    def echo(self, writer: Writer) -> EchoSession:
        session = EchoSession(writer)
        self.sessions.append(session)
        return session

    @property
    def closings(self) -> list[int]:
        return [session.closings for session in self.sessions]


class EchoSession:
    """Answers each message with itself; ends when the peer does. Some messages are commands."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.received: list[bytes] = []
        self.closings = 0
        self.ends = True

    def receive(self, message: bytes) -> Sequence[bytes]:
        self.received.append(message)
        if message == b"!raise":
            raise RuntimeError("asked to fail")
        if message == b"!finish":
            self.writer.finish(GrpcStatus.NOT_FOUND, "100 % gone\n")
        if message == b"!silent":
            return ()
        if message.startswith(b"!stay"):
            self.ends = False
        return (message,)

    def half_closed(self) -> bool:
        return self.ends

    def closed(self) -> None:
        self.closings += 1


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream_id: int
    payload: bytes


class Peer:
    """The client's side of a `GrpcConnection` under test."""

    def __init__(
        self,
        limits: Limits | None = None,
        methods: dict[str, Callable[[Writer], Session]] | None = None,
        *,
        max_message_bytes: int = 64 << 20,
        watches: frozenset[str] = frozenset(),
        greet: bool = True,
    ) -> None:
        self.ledger = Ledger()
        self.counters = EdgeCounters()
        self.wakes = 0
        service = Service(methods or {ECHO: self.ledger.echo}, max_message_bytes=max_message_bytes, watches=watches)
        self.connection = GrpcConnection(service, limits or Limits(), self.counters, 0.0, self._wake)
        self.decoder = Decoder()
        self.now = 0.0
        if greet:
            self.send(GREETING)
            self.frames()

    def _wake(self) -> None:
        self.wakes += 1

    def send(self, *data: bytes) -> None:
        for piece in data:
            self.connection.receive(piece, self.now)

    def frames(self) -> list[Frame]:
        """What the server wrote since the last call."""
        return parse(self.connection.take())

    def answer(self) -> tuple[list[bytes], dict[str, str]]:
        """Messages and header fields (later blocks over earlier ones) of one stream's frames."""
        data = b""
        fields: dict[str, str] = {}
        for frame in self.frames():
            if frame.kind == f.HEADERS:
                fields |= {str(k): str(v) for k, v in self.decoder.decode(frame.payload)}
            elif frame.kind == f.DATA:
                data += frame.payload
        return unframe(data), fields

    @property
    def goaway(self) -> f.ErrorCode | None:
        """The code of the last GOAWAY written since the last look."""
        codes = [frame.payload[4:8] for frame in self.frames() if frame.kind == f.GOAWAY]
        return f.ErrorCode(int.from_bytes(codes[-1], "big")) if codes else None

    def resets(self) -> dict[int, f.ErrorCode]:
        return {
            frame.stream_id: f.ErrorCode(int.from_bytes(frame.payload, "big"))
            for frame in self.frames()
            if frame.kind == f.RST_STREAM
        }


def parse(data: bytes) -> list[Frame]:
    frames = []
    while data:
        high, low, kind, flags, stream_id = f.FRAME_HEADER.unpack_from(data)
        end = 9 + (high << 8 | low)
        assert end <= len(data)
        frames.append(Frame(kind, flags, stream_id, data[9:end]))
        data = data[end:]
    return frames


def unframe(data: bytes) -> list[bytes]:
    messages = []
    while data:
        flag, size = PREFIX.unpack_from(data)
        assert flag == 0
        messages.append(data[5 : 5 + size])
        data = data[5 + size :]
    return messages


def message(payload: bytes) -> bytes:
    return PREFIX.pack(0, len(payload)) + payload


def fields(path: str | None = ECHO, **changes: str | None) -> bytes:
    """A header block of a gRPC request; `name=None` leaves a field out, `_` in a name stands for `-`."""
    head: dict[str, str | None] = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "picker",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    for name, value in changes.items():
        pseudo = f":{name}"
        head[pseudo if pseudo in head else name.replace("_", "-")] = value
    return b"".join(f.literal(k.encode(), v.encode()) for k, v in head.items() if v is not None)


def headers(stream_id: int, block: bytes | None = None, flags: int = f.END_HEADERS) -> bytes:
    return f.frame(f.HEADERS, flags, stream_id, fields() if block is None else block)


def data(stream_id: int, payload: bytes, *, end: bool = False) -> bytes:
    return f.frame(f.DATA, f.END_STREAM if end else 0, stream_id, payload)


def rst(stream_id: int) -> bytes:
    return f.rst_stream(stream_id, f.ErrorCode.CANCEL)
