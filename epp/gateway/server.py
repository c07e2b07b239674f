"""The lean edge: `GrpcConnection`s on asyncio or uvloop sockets.

One write per batch of input; answers that come later share a write per turn of the loop. Back-pressure both ways: while
the socket's buffer is full nothing is read, and DATA waits in the stream backlogs, which in turn withhold windows. One
timer a second for the whole server drives all limits of time and the look at the TLS files.

Measured by bench/edge_micro.py with a session that does nothing, saturated, uvloop, 2-core VM: 6-8 us CPU a request of
two messages where grpc.aio takes 235; 0.4 KB for an open stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import socket
from collections.abc import Sequence
from typing import Any, Final, cast

from epp.gateway.grpc import GrpcConnection
from epp.gateway.http2_frames import ErrorCode
from epp.gateway.http2_limits import EdgeCounters, Limits
from epp.gateway.listen import BACKLOG, Address, close_socket, open_sockets
from epp.gateway.session import GrpcStatus, Service
from epp.gateway.tls import Tls

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1_024
WRITE_HIGH: Final = 4 << 20
"""Bytes in the transport's own buffer above which we stop reading and sending; back below a quarter of it."""
CLOSE_S: Final = 2.0
"""How long a connection may take to flush its last bytes."""


def tune_malloc() -> None:
    """Keep glibc from giving large buffers back to the kernel and faulting them in again for every message.

    Measured on 400 KB bodies: 394 -> 98 us CPU a request. M_MMAP_THRESHOLD (-3) and M_TOP_PAD (-2) 32 MiB,
    M_TRIM_THRESHOLD (-1) 512 MiB. Other C libraries have no mallopt or ignore it.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-3, 32 << 20), (-1, 512 << 20), (-2, 32 << 20)):
            mallopt(option, value)


class LeanServer:
    """A running lean edge (`EdgeServer`)."""

    def __init__(self, service: Service, tls: Tls | None, limits: Limits) -> None:
        self.service = service
        self.limits = limits
        self.counters = EdgeCounters()
        self.addresses: tuple[str, ...] = ()
        self.open: set[_Transport] = set()
        self.draining = False
        self.idle = asyncio.Event()  # set whenever a connection is lost or the drain is to end sooner
        self._tls = tls
        self._listening: list[tuple[Address, socket.socket, asyncio.Server]] = []
        self._ticker: asyncio.Task[None] | None = None
        self._drained: asyncio.Task[None] | None = None
        self._drain_until = math.inf

    @classmethod
    async def start(cls, addresses: Sequence[str], service: Service, tls: Tls | None, limits: Limits) -> LeanServer:
        """Listen and serve; see `epp.gateway.edge.serve`."""
        tune_malloc()
        server = cls(service, tls, limits)
        loop = asyncio.get_running_loop()
        tls_options: dict[str, Any] = {}
        if tls is not None:
            tls_options = {"ssl": tls.context, "ssl_handshake_timeout": limits.handshake_s}
        for address, sock in open_sockets(addresses):
            listen = loop.create_unix_server if address.path else loop.create_server
            started = await listen(lambda: _Transport(server, loop), sock=sock, backlog=BACKLOG, **tls_options)
            server._listening.append((address, sock, started))
        server.addresses = tuple(str(address) for address, _, _ in server._listening)
        server._ticker = loop.create_task(server._tick())
        return server

    async def drain(self, grace_s: float) -> None:
        """See `EdgeServer`."""
        loop = asyncio.get_running_loop()
        self._drain_until = min(self._drain_until, loop.time() + grace_s)
        self.idle.set()
        if self._drained is None:
            self._drained = loop.create_task(self._drain())
        await asyncio.shield(self._drained)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        self.draining = True
        for address, sock, started in self._listening:
            started.close()
            close_socket(address, sock)
        for transport in list(self.open):
            transport.drain()
        await self._wait_closed()
        for transport in list(self.open):
            transport.end_all()
        self._drain_until = loop.time() + CLOSE_S
        await self._wait_closed()
        for transport in list(self.open):
            transport.abort()
        if self._ticker is not None:
            self._ticker.cancel()

    async def _wait_closed(self) -> None:
        loop = asyncio.get_running_loop()
        while self.open and (left := self._drain_until - loop.time()) > 0:
            self.idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.idle.wait()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            try:
                if self._tls is not None:
                    self._tls.refresh()
                for transport in list(self.open):
                    transport.tick(loop.time())
            except Exception:
                log.exception("a fault in the edge's timer; it goes on")


class _Transport(asyncio.Protocol):
    """The glue between one socket and its `GrpcConnection`."""

    def __init__(self, server: LeanServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._busy = False  # inside `data_received`, which writes at its end
        self._flush_scheduled = False
        self._paused_at: float | None = None
        self._closing_at: float | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._connection = GrpcConnection(server.service, server.limits, server.counters, loop.time(), self._wake)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connected = cast(asyncio.Transport, transport)  # uvloop's transports are none by inheritance
        server = self._server
        if len(server.open) >= MAX_CONNECTIONS or server.draining:
            server.counters.connections_refused += 1
            connected.abort()
            return
        self._transport = connected
        server.open.add(self)
        server.counters.connections += 1
        server.counters.connections_open += 1
        connected.set_write_buffer_limits(high=WRITE_HIGH, low=WRITE_HIGH // 4)
        _keep_alive(connected.get_extra_info("socket"))
        self._flush()

    def data_received(self, data: bytes) -> None:
        connection = self._connection
        self._busy = True
        try:
            connection.receive(data, self._loop.time())
        except Exception:
            log.exception("a fault in the HTTP/2 connection; it is closed")
            connection.fail(ErrorCode.INTERNAL_ERROR, "internal", "internal error")
        self._busy = False
        self._flush()
        if connection.next_deadline is not None:
            self._arm()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:
            return
        self._transport = None
        self._connection.shut()
        if self._deadline is not None:
            self._deadline.cancel()
        self._server.open.discard(self)
        self._server.counters.connections_open -= 1
        self._server.idle.set()

    def pause_writing(self) -> None:
        self._paused_at = self._loop.time()
        self._connection.pause()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused_at = None
        self._connection.resume()
        if self._transport is not None:
            self._transport.resume_reading()
            self._wake()

    # ---- the server

    def tick(self, now: float) -> None:
        """Limits of time: ours on the socket, and the connection's own."""
        stalled = self._paused_at is not None and now - self._paused_at > self._server.limits.stall_s
        if stalled and self._closing_at is None:
            self._server.counters.connection_errors["write_stalled"] += 1
        if stalled or (self._closing_at is not None and now - self._closing_at > CLOSE_S):
            self.abort()
            return
        self._connection.tick(now)
        self._flush()

    def drain(self) -> None:
        """Begin the graceful end."""
        self._connection.end_watches()
        self._connection.drain(self._loop.time())
        self._flush()

    def end_all(self) -> None:
        """The grace is over."""
        self._connection.end_all(GrpcStatus.UNAVAILABLE, "draining")
        self._connection.fail(ErrorCode.NO_ERROR, "drained", "draining")
        self._flush()

    def abort(self) -> None:
        """Drop the socket."""
        if self._transport is not None:
            self._transport.abort()

    # ---- private

    def _wake(self) -> None:
        if not (self._busy or self._flush_scheduled):
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        transport = self._transport
        if transport is None:
            return
        data = self._connection.take()
        if data:
            transport.write(data)
        if self._connection.closing and self._closing_at is None:
            self._closing_at = self._loop.time()
            transport.close()

    def _arm(self) -> None:
        """Be called when the next RPC times out."""
        due = self._connection.next_deadline
        if due is None or (self._deadline is not None and self._deadline.when() <= due):
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self._deadline = None
        self._connection.expire(self._loop.time())
        self._flush()
        self._arm()


def _keep_alive(sock: socket.socket | None) -> None:
    """Notice within a minute that a peer's machine is gone: what it had in flight must be released."""
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux has all three
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
