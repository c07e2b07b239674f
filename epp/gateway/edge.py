"""The one way to start an edge: `edge = await serve("lean", ["0.0.0.0:9002"], service)`.

Two edges serve the same `Service`: "lean", this project's own HTTP/2 and gRPC on asyncio or uvloop, and "grpcio", the
plain way on grpc.aio, which the fast one is checked against. Both give an `EdgeServer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from epp.gateway.http2_limits import EdgeCounters, Limits
from epp.gateway.session import Service
from epp.gateway.tls import Tls

EdgeName = Literal["lean", "grpcio"]


class EdgeServer(Protocol):
    """A running edge."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, in the order asked for: `host:port` with the port really bound, or `unix:/path`."""

    @property
    def counters(self) -> EdgeCounters:
        """What it counts, live."""

    async def drain(self, grace_s: float) -> None:
        """Take no more connections or streams, give running streams `grace_s` seconds, end the rest with UNAVAILABLE.

        Watches end at once. Returns when everything is closed. A second call waits for the first, and can only
        shorten its grace.
        """


async def serve(
    edge: EdgeName, addresses: Sequence[str], service: Service, tls: Tls | None = None, limits: Limits | None = None
) -> EdgeServer:
    """Listen on every address (`host:port`, `[v6]:port`, `:port` for all interfaces, `unix:/path`) and serve `service`.

    Raises `AddressError` with a line for the user if an address is wrong, in use or not allowed; then nothing listens.
    """
    if edge == "grpcio":
        from epp.gateway.grpcio_edge import GrpcioServer  # grpcio is an extra

        return await GrpcioServer.start(addresses, service, tls)
    from epp.gateway.server import LeanServer

    return await LeanServer.start(addresses, service, tls, limits or Limits())
