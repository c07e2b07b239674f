"""The plain edge: the same services and sessions under grpc.aio, `--edge grpcio`.

Slower by an order of magnitude (225-400 us CPU a request against 13-25 us), and the reference the lean edge is checked
against. Messages pass as raw bytes. One task per RPC reads, the handler's own task writes, in order, from one queue;
while the client leaves too much of it unread, nothing is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc

from epp.gateway.http2_limits import EdgeCounters
from epp.gateway.listen import UNIX_SOCKET_MODE, Address, AddressError, parse_address, remove_stale_socket
from epp.gateway.session import GrpcStatus, Service, Session, Writer
from epp.gateway.tls import Tls

log = logging.getLogger(__name__)

UNREAD_BYTES: Final = 1 << 20
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_Outcome = tuple[GrpcStatus, str]


class GrpcioServer:
    """A running grpc.aio edge (`EdgeServer`). It counts streams, statuses, session errors; grpc hides connections."""

    def __init__(self, service: Service, tls: Tls | None) -> None:
        self.counters = EdgeCounters()
        self.addresses: tuple[str, ...] = ()
        self.service = service
        self.watching: set[_Rpc] = set()
        self.running: set[_Rpc] = set()
        self._tls = tls
        self._drained: asyncio.Task[None] | None = None
        self._server: Any = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", service.max_message_bytes),
                ("grpc.max_send_message_length", -1),  # the default of 4 MiB cuts off long prompts
                ("grpc.so_reuseport", 0),
            )
        )
        self._server.add_generic_rpc_handlers((_Handlers(self),))

    @classmethod
    async def start(cls, addresses: Sequence[str], service: Service, tls: Tls | None) -> GrpcioServer:
        """Listen and serve; see `epp.gateway.edge.serve`."""
        server = cls(service, tls)
        server.addresses = tuple([server._listen(text) for text in addresses])
        await server._server.start()
        for address in server.addresses:
            if address.startswith("unix:"):
                os.chmod(address.removeprefix("unix:"), UNIX_SOCKET_MODE)
        return server

    def _listen(self, text: str) -> str:
        address = parse_address(text)
        try:
            if address.path:
                remove_stale_socket(address.path)
            target = str(address) if address.path or address.host else f"[::]:{address.port}"
            if self._tls is None:
                port = self._server.add_insecure_port(target)
            else:
                port = self._server.add_secure_port(target, _credentials(self._tls))
        except (OSError, RuntimeError) as error:
            raise AddressError(f"cannot listen on {text}: {error}") from error
        return str(address) if address.path else str(Address(host=address.host, port=port))

    async def drain(self, grace_s: float) -> None:
        """See `EdgeServer`."""
        loop = asyncio.get_running_loop()
        loop.call_later(grace_s, self._end_running)
        if self._drained is None:
            self._drained = loop.create_task(self._drain(grace_s))
        await asyncio.shield(self._drained)

    async def _drain(self, grace_s: float) -> None:
        for rpc in list(self.watching):
            rpc.finish(GrpcStatus.UNAVAILABLE, "draining")
        await self._server.stop(grace_s + 2.0)

    def _end_running(self) -> None:
        for rpc in list(self.running):
            rpc.finish(GrpcStatus.UNAVAILABLE, "draining")


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc carries no types
    """Finds the session factory of a path; grpc answers UNIMPLEMENTED where there is none."""

    def __init__(self, server: GrpcioServer) -> None:
        self._server = server
        self._found: dict[str, Any] = {}
        for path, factory in server.service.methods.items():
            self._found[path] = grpc.stream_stream_rpc_method_handler(self._handler(path, factory))

    def service(self, handler_call_details: Any) -> Any:
        return self._found.get(handler_call_details.method)

    def _handler(self, path: str, factory: Callable[[Writer], Session]) -> Callable[[Any, Any], Any]:
        watch = path in self._server.service.watches

        async def handle(_: Any, context: Any) -> None:
            rpc = _Rpc(self._server, context)
            group = self._server.watching if watch else self._server.running
            group.add(rpc)
            try:
                await rpc.run(factory)
            finally:
                group.discard(rpc)

        return handle


class _Rpc:
    """One RPC and its `Writer`."""

    def __init__(self, server: GrpcioServer, context: Any) -> None:
        self._server = server
        self._context = context
        self._out: asyncio.Queue[bytes | _Outcome] = asyncio.Queue()
        self._queued_bytes = 0
        self._room = asyncio.Event()
        self._over = False
        self._receiving = False
        self._outcome: _Outcome | None = None

    def send(self, messages: Sequence[bytes]) -> None:
        """`Writer`."""
        if not self._over and (self._outcome is None or self._receiving):
            for message in messages:
                self._queued_bytes += len(message)
                self._out.put_nowait(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, message: str = "") -> None:
        """`Writer`."""
        if self._outcome is None:
            self._outcome = (status, message)
            if not self._receiving:
                self._out.put_nowait(self._outcome)

    async def run(self, factory: Callable[[Writer], Session]) -> None:
        """Serve until the session's or the server's outcome, or cancellation by the client.

        CancelledError must leave here after the cleanup: grpc leaks the call where a handler swallows it (grpc #43360).
        """
        counters = self._server.counters
        counters.streams += 1
        counters.streams_open += 1
        session: Session | None = None
        reader: asyncio.Task[None] | None = None
        try:
            self._receiving = True
            with self._guard():
                session = factory(self)
            self._settle()
            if session is not None:
                if metadata := self._server.service.metadata:
                    await self._context.send_initial_metadata(tuple(metadata.items()))
                reader = asyncio.get_running_loop().create_task(self._read(session))
            while isinstance(item := await self._out.get(), bytes):
                await self._context.write(item)
                self._queued_bytes -= len(item)
                self._room.set()
            status, text = item
            counters.statuses[status.name] += 1
            self._context.set_code(_CODES[int(status)])
            self._context.set_details(text)
        except asyncio.CancelledError:
            counters.resets_received += 1
            raise
        finally:
            self._over = True
            if reader is not None:
                reader.cancel()
            counters.streams_open -= 1
            if session is not None:
                with self._guard():
                    session.closed()

    async def _read(self, session: Session) -> None:
        while not self._is_settled():
            message = await self._context.read()
            if self._is_settled():
                return
            self._receiving = True
            with self._guard():
                if message is grpc.aio.EOF:
                    if session.half_closed() and self._outcome is None:
                        self._outcome = (GrpcStatus.OK, "")
                else:
                    self.send(session.receive(message))
            self._settle()
            if message is grpc.aio.EOF:
                return
            while self._queued_bytes > UNREAD_BYTES:
                self._room.clear()
                await self._room.wait()

    def _settle(self) -> None:
        """After a call of the session: its outcome goes behind the messages it returned."""
        self._receiving = False
        if self._outcome is not None:
            self._out.put_nowait(self._outcome)

    def _is_settled(self) -> bool:
        return self._outcome is not None

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """An exception of the session ends its RPC with INTERNAL and harms no other."""
        try:
            yield
        except Exception:
            self._server.counters.session_errors += 1
            log.exception("a session failed; its RPC ends with INTERNAL")
            self._outcome = (GrpcStatus.INTERNAL, "internal error")


def _credentials(tls: Tls) -> Any:
    """Server credentials that ask for the newest good pair at each handshake."""

    def configuration() -> Any:
        tls.refresh()
        return grpc.ssl_server_certificate_configuration([(tls.pair.key, tls.pair.certificate)])

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=False)
