"""A running edge for tests: every kind of it, on a loop of its own in a thread, so that a client may block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import uvloop

from epp.gateway.edge import EdgeServer, serve
from epp.gateway.http2_limits import Limits
from epp.gateway.session import Service
from epp.gateway.tls import Tls
from tests.gateway.wire import ECHO, Ledger

Kind = Literal["lean", "lean-uvloop", "grpcio"]
KINDS: tuple[Kind, ...] = ("lean", "lean-uvloop", "grpcio")
T = TypeVar("T")


class Running:
    """An edge that listens, its loop, and what its echo sessions saw."""

    def __init__(self, loop: asyncio.AbstractEventLoop, edge: EdgeServer, ledger: Ledger) -> None:
        self.loop = loop
        self.edge = edge
        self.ledger = ledger

    @property
    def address(self) -> str:
        return self.edge.addresses[0]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def drain(self, grace_s: float) -> None:
        self.run(self.edge.drain(grace_s))


@contextmanager
def running(
    kind: Kind,
    addresses: Sequence[str] = ("127.0.0.1:0",),
    service: Service | None = None,
    tls: Tls | None = None,
    limits: Limits | None = None,
) -> Iterator[Running]:
    ledger = Ledger()
    loop = uvloop.new_event_loop() if kind == "lean-uvloop" else asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        start = serve(
            "grpcio" if kind == "grpcio" else "lean", addresses, service or Service({ECHO: ledger.echo}), tls, limits
        )
        edge = asyncio.run_coroutine_threadsafe(start, loop).result(20)
        server = Running(loop, edge, ledger)
        try:
            yield server
        finally:
            server.drain(0)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
