"""The seam between a gRPC server and one RPC's logic: what every edge implements and every service is written against.

A server (the lean HTTP/2 edge or grpc.aio) creates one `Session` per RPC through the `Service` registered for the
method's path, feeds it whole messages and sends the messages it returns. A session never sees frames, sockets or an
event loop; answers that come later (a decision that had to wait) go out through its `Writer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol


class GrpcStatus(IntEnum):
    """The gRPC status codes this project sends (numbers from the gRPC protocol)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class Writer(Protocol):
    """The sending side of one RPC, usable at any time from the event loop; calls after the RPC ended do nothing."""

    def send(self, messages: Sequence[bytes]) -> None:
        """Queue whole messages, in order."""

    def finish(self, status: GrpcStatus = GrpcStatus.OK, message: str = "") -> None:
        """End the RPC once everything queued has gone out. `Session.closed` follows."""


class Session(Protocol):
    """One RPC. Calls come one at a time, in the order of the wire; none may block."""

    def receive(self, message: bytes) -> Sequence[bytes]:
        """Take one whole message; return the messages to send now, in order (often none).

        An exception ends this RPC with INTERNAL, is counted and logged, and harms no other RPC.
        """

    def half_closed(self) -> bool:
        """The peer will send no more. True: end the RPC with OK once all is sent; False: `finish` comes."""

    def closed(self) -> None:
        """The RPC is over (ended, reset, connection lost, shutdown). Called exactly once; release everything here."""


@dataclass(frozen=True, slots=True)
class Service:
    """What is served: RPC path (`/package.Service/Method`) -> factory of sessions."""

    methods: Mapping[str, Callable[[Writer], Session]]
    max_message_bytes: int = 64 << 20
    """Longest message taken from a peer; a longer one ends the RPC with RESOURCE_EXHAUSTED."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    watches: frozenset[str] = frozenset()
    """Paths whose RPCs hold no work (a health Watch): a drain ends them at once instead of waiting for them."""
