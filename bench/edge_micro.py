"""What the lean edge costs by itself: a session that does nothing, fed frames as Envoy sends them.

"connection" rows feed the sans-IO connection in this process; "socket" rows run the whole server on uvloop in a child
process behind a Unix socket, kept saturated by this one, and read the child's CPU time from the kernel. Requests are
sent whole, without waiting for windows, so grpcio gets only small ones.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from bench.cpu import cpu_seconds
from bench.timing import EFFORT
from epp.figures import Figure, figure
from epp.gateway import http2_frames as f
from epp.gateway.edge import serve
from epp.gateway.grpc import PREFIX, GrpcConnection
from epp.gateway.http2_limits import EdgeCounters, Limits
from epp.gateway.server import tune_malloc
from epp.gateway.session import Service, Writer

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ROUNDS = 5
HEAD_BYTES = 700
REPLY = bytes(110)
FIELDS = b"".join(
    f.literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", PATH.encode()),
        (b":authority", b"ext_proc"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"x-envoy-internal", b"true"),
        (b"x-forwarded-for", b"10.0.0.1"),
    )
)


class Nothing:
    """Headers in: one reply; every body message in: one reply. `echo`: bodies go back, as in full duplex."""

    def __init__(self, _: Writer) -> None:
        self._headers = True

    def receive(self, message: bytes) -> Sequence[bytes]:
        if self._headers:
            self._headers = False
            return (REPLY,)
        return (message,) if ECHO else (REPLY,)

    def half_closed(self) -> bool:
        return True

    def closed(self) -> None:
        pass


ECHO = False


def request(stream_id: int, bodies: Sequence[int], *, graceful: bool) -> bytes:
    """One ext_proc stream: HEADERS, the header message, the body messages in 16 KiB frames, the end."""
    out = [f.frame(f.HEADERS, f.END_HEADERS, stream_id, FIELDS)]
    for size in (HEAD_BYTES, *bodies):
        message = PREFIX.pack(0, size) + bytes(size)
        out += [f.frame(f.DATA, 0, stream_id, message[at : at + 16_384]) for at in range(0, len(message), 16_384)]
    out.append(f.frame(f.DATA, f.END_STREAM, stream_id) if graceful else f.rst_stream(stream_id, f.ErrorCode.NO_ERROR))
    return b"".join(out)


def greeting() -> bytes:
    window = f.settings({f.Setting.INITIAL_WINDOW_SIZE: 1 << 28})
    return f.PREFACE + window + f.window_update(0, 1 << 30)


def batches(count: int, together: int, bodies: Sequence[int], *, graceful: bool) -> list[bytes]:
    """`count` requests, `together` in one read, with the window the peer would give back."""
    size = sum(bodies) + 2 * HEAD_BYTES
    return [
        b"".join(request(2 * n + 1, bodies, graceful=graceful) for n in range(start, start + together))
        + f.window_update(0, together * size)
        for start in range(0, count, together)
    ]


def connection_cost(together: int, bodies: Sequence[int], *, graceful: bool) -> float:
    count = 16 * EFFORT.times(200 if sum(bodies) < 10_000 else 6)
    reads = batches(count, together, bodies, graceful=graceful)
    rounds = []
    for _ in range(EFFORT.times(ROUNDS)):
        connection = GrpcConnection(Service({PATH: Nothing}), Limits(), EdgeCounters(), 0.0, lambda: None)
        connection.receive(greeting(), 0.0)
        connection.take()
        start = time.process_time()
        for n, data in enumerate(reads):
            connection.receive(data, n * 0.001)
            connection.take()
        rounds.append((time.process_time() - start) / count * 1e6)
        assert not connection.closing
        assert connection.counters.streams == count
    return statistics.median(rounds)


def socket_cost(edge: str, together: int, bodies: Sequence[int], *, graceful: bool) -> float:
    """CPU of the serving process per request, its own system calls included."""
    count = 16 * EFFORT.times(500 if sum(bodies) < 10_000 else 20)
    reads = batches(count, together, bodies, graceful=graceful)
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "edge"))
        child = os.fork()
        if child == 0:
            try:
                _serve_forever(edge, path)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        try:
            with _connect(path) as client:
                client.sendall(greeting())
                before = cpu_seconds(child)
                for data in reads:
                    client.sendall(data)
                    _read_ends(client, together if graceful else 0, together * (1 + len(bodies)))
                return (cpu_seconds(child) - before) / count * 1e6
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def memory_per_stream() -> float:
    """Bytes of an open stream after its header message, without the session's own."""
    import tracemalloc

    count = EFFORT.times(5_000)
    connection = GrpcConnection(Service({PATH: Nothing}), Limits(), EdgeCounters(), 0.0, lambda: None)
    connection.receive(greeting(), 0.0)
    connection.take()
    tracemalloc.start()
    for n in range(count):
        message = PREFIX.pack(0, HEAD_BYTES) + bytes(HEAD_BYTES)
        stream = 2 * n + 1
        connection.receive(f.frame(f.HEADERS, f.END_HEADERS, stream, FIELDS) + f.frame(f.DATA, 0, stream, message), 0.0)
        connection.take()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / count


def _serve_forever(edge: str, path: str) -> None:
    import uvloop

    async def run() -> None:
        await serve("grpcio" if edge == "grpcio" else "lean", [f"unix:{path}"], Service({PATH: Nothing}))
        await asyncio.Event().wait()

    uvloop.run(run())


def _connect(path: str) -> socket.socket:
    for _ in range(500):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.connect(path)
            return client
        except OSError:
            client.close()
            time.sleep(0.01)
    raise SystemExit("the server did not start")


def _read_ends(client: socket.socket, ends: int, messages: int) -> None:
    """Read until so many streams have ended (or, where they end by reset, so many messages have come)."""
    pending = b""
    while ends > 0 or messages > 0:
        data = client.recv(1 << 20)
        if not data:
            raise SystemExit("the server closed the connection")
        pending += data
        at = 0
        while len(pending) - at >= 9:
            high, low, kind, flags, _ = f.FRAME_HEADER.unpack_from(pending, at)
            size = high << 8 | low
            if at + 9 + size > len(pending):
                break
            ends -= kind == f.HEADERS and flags & f.END_STREAM
            messages -= kind == f.DATA and size == len(REPLY) + PREFIX.size
            at += 9 + size
        pending = pending[at:]


def figures() -> list[Figure]:
    """The lean edge, and grpc.aio where it can be compared."""
    global ECHO
    tune_malloc()
    out: list[Figure] = []

    def add(name: str, value: float, unit: str = "us", base: Figure | None = None) -> Figure:
        ratio, to = (value / base["value"], base["name"]) if base else (None, "")
        out.append(figure(f"edge/{name}", value, unit, ratio=ratio, to=to))
        return out[-1]

    for graceful, ending in ((False, "RST"), (True, "half-close")):
        add(f"connection BUFFERED 200 B, 16 a read, {ending}", connection_cost(16, (200,), graceful=graceful))
        lean = add(f"socket BUFFERED 200 B, 16 at once, {ending}", socket_cost("lean", 16, (200,), graceful=graceful))
    cost = socket_cost("grpcio", 16, (200,), graceful=True)  # grpc.aio drops answers that a reset overtakes
    add("socket BUFFERED 200 B, 16 at once, half-close, grpc.aio", cost, base=lean)
    add("connection BUFFERED 200 B, 1 a read, RST", connection_cost(1, (200,), graceful=False))
    add("connection BUFFERED 400 KB, 1 a read, RST", connection_cost(1, (400_000,), graceful=False))
    add("socket BUFFERED 400 KB, 1 at once, half-close", socket_cost("lean", 1, (400_000,), graceful=True))
    ECHO = True
    add("connection FULL_DUPLEX 200 B + end, 16 a read, RST", connection_cost(16, (200, 2), graceful=False))
    add("connection FULL_DUPLEX 400 KB + end, 1 a read, RST", connection_cost(1, (400_000, 2), graceful=False))
    ECHO = False
    add("open stream, session included", memory_per_stream(), "bytes")
    return out
