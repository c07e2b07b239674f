"""grpc.health.v1: what load balancers, gateways and the kubelet ask (`Check`) or follow (`Watch`).

Names: "" and `readiness` and the ext_proc service tell whether requests can be steered; `liveness` is SERVING as long
as the process answers, whatever the pool looks like, so that no probe restarts a picker for want of workers.
Any other name: `Check` ends with NOT_FOUND, `Watch` streams SERVICE_UNKNOWN (both as the health protocol says).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from google.protobuf.message import DecodeError

from epp.gateway.pb import health_pb2
from epp.gateway.session import GrpcStatus, Session, Writer

READINESS: Final = frozenset(("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"))
LIVENESS: Final = "liveness"
CHECK_PATH: Final = "/grpc.health.v1.Health/Check"
WATCH_PATH: Final = "/grpc.health.v1.Health/Watch"
WATCHES: Final = frozenset((WATCH_PATH,))
"""For `Service.watches`."""

_Status = health_pb2.HealthCheckResponse


class Health:
    """The picker's health: not ready until `set_ready(True, ...)`."""

    def __init__(self) -> None:
        self.ready = False
        self.reason = "starting"
        self._watchers: set[_Watch] = set()

    def set_ready(self, ready: bool, reason: str) -> None:
        """Change readiness; every watcher of it is told. `reason` is for people (logs, debug pages)."""
        changed = ready != self.ready
        self.ready, self.reason = ready, reason
        if changed:
            for watcher in list(self._watchers):
                watcher.tell()

    def status(self, name: str) -> int | None:
        """The `ServingStatus` of a service name, None if the name is unknown."""
        if name == LIVENESS:
            return _Status.SERVING
        if name in READINESS:
            return _Status.SERVING if self.ready else _Status.NOT_SERVING
        return None

    def methods(self) -> Mapping[str, Callable[[Writer], Session]]:
        """For `Service.methods`."""
        return {CHECK_PATH: lambda writer: _Check(self, writer), WATCH_PATH: lambda writer: _Watch(self, writer)}


class _Check:
    """One unary call: a name in, its status out."""

    def __init__(self, health: Health, writer: Writer) -> None:
        self._health = health
        self._writer = writer

    def receive(self, message: bytes) -> Sequence[bytes]:
        name = _read_name(message)
        status = None if name is None else self._health.status(name)
        if name is None:
            self._writer.finish(GrpcStatus.INVALID_ARGUMENT, "not a HealthCheckRequest")
        elif status is None:
            self._writer.finish(GrpcStatus.NOT_FOUND, "unknown service")
        else:
            self._writer.finish()
            return (_response(status),)
        return ()

    def half_closed(self) -> bool:
        return True

    def closed(self) -> None:
        pass


class _Watch:
    """One stream: a name in, its status out now and after every change."""

    def __init__(self, health: Health, writer: Writer) -> None:
        self._health = health
        self._writer = writer
        self._name: str | None = None
        self._last: int | None = None

    def receive(self, message: bytes) -> Sequence[bytes]:
        if self._name is not None:
            self._writer.finish(GrpcStatus.INVALID_ARGUMENT, "Watch takes one message")
            return ()
        self._name = _read_name(message)
        if self._name is None:
            self._writer.finish(GrpcStatus.INVALID_ARGUMENT, "not a HealthCheckRequest")
            return ()
        self._health._watchers.add(self)
        self.tell()
        return ()

    def tell(self) -> None:
        """Send the status if it changed."""
        status = self._health.status(self._name or "")
        if status is None:
            status = _Status.SERVICE_UNKNOWN
        if status != self._last:
            self._last = status
            self._writer.send((_response(status),))

    def half_closed(self) -> bool:
        if self._name is None:
            self._writer.finish(GrpcStatus.INVALID_ARGUMENT, "Watch needs one message")
        return False

    def closed(self) -> None:
        self._health._watchers.discard(self)


def _read_name(message: bytes) -> str | None:
    try:
        return health_pb2.HealthCheckRequest.FromString(message).service
    except DecodeError:
        return None


def _response(status: int) -> bytes:
    return _Status(status=status).SerializeToString()  # type: ignore[arg-type]
