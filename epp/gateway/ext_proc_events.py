"""What the ext_proc stream machine tells its driver (events) and what it is told (limits, steering).

Frozen records without behaviour; `epp.gateway.ext_proc` explains the protocol. Those made for every message are msgspec
Structs, which take a fifth of the time of frozen dataclasses to make.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import msgspec

from epp.gateway.errors import Rejection
from epp.request import Headers, RequestHead


class BodyMode(IntEnum):
    """How Envoy sends bodies (`ProcessingMode.BodySendMode`)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds for every stream of one server."""

    max_request_bytes: int = 32 << 20
    """A longer request body is answered with 413."""
    assumed_mode: BodyMode = BodyMode.FULL_DUPLEX
    """The body mode of both directions when the proxy names none; full duplex is the InferencePool contract."""
    response_bodies: bool = True
    """False: ask Envoy (`mode_override`) not to send response bodies, where it honours that."""


class ResponseTransform(Protocol):
    """Changes a response body as it passes, for example to give the client the model name it asked for."""

    def feed(self, data: bytes, end: bool) -> bytes | None:
        """What to send in the place of `data`; None leaves it as it is, b"" sends nothing yet.

        `end` marks the last call, which must give up all that was kept back.
        """


MAX_HEADER = 8_192
"""Characters of a header that is set, name and value: Envoy's default for all headers together is 60 KiB."""
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_NOT_A_VALUE = re.compile("[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_UNTOUCHABLE = frozenset({"host", "content-length", "transfer-encoding", "connection"})


class Steering(msgspec.Struct, frozen=True):
    """The answer to a `RequestReady`.

    Raises ValueError for header names that are Envoy's own (pseudo-headers, host, `x-envoy-*`, those that frame the
    body), for what is no name in lower case, and for values with control characters or beyond `MAX_HEADER`: Envoy would
    fail the whole request for one of these.
    """

    addresses: tuple[str, ...]
    """Destination `ip:port`, then ordered fallbacks; empty leaves the choice to Envoy's cluster."""
    rank: int | None = None
    """The data-parallel rank meant, of several behind the destination's port; None: there are none to choose from."""
    set_headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Request headers toward the worker, overwriting what the client sent."""
    remove_headers: tuple[str, ...] = ()
    body: bytes | None = None
    """The body toward the worker; None: as it came. Only for a request whose body was seen."""
    response_headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Response headers toward the client. Where the response may not be shown they are also told to Envoy as metadata
    (`envoy.lb`), from which its configuration can set them."""
    flight: str = ""
    """The picker's own key of this request, given to Envoy as metadata; comes back in `RequestReady.flight`."""
    response_transform: ResponseTransform | None = None

    def __post_init__(self) -> None:
        for fields in (self.set_headers, self.response_headers):
            for name, value in fields.items():
                if not settable(name, value):
                    raise ValueError(f"header {name!r} must not be changed, or not to this value")
        for name in self.remove_headers:
            if not settable(name):
                raise ValueError(f"header {name!r} must not be changed")


def settable(name: str, value: str = "") -> bool:
    """Whether a header may be set to a value, by the rules of `Steering`."""
    return (
        _NAME.fullmatch(name) is not None
        and name not in _UNTOUCHABLE
        and not name.startswith("x-envoy-")
        and len(name) + len(value) <= MAX_HEADER
        and _NOT_A_VALUE.search(value) is None
    )


class RequestReady(msgspec.Struct, frozen=True):
    """The request is there as far as it will be seen: answer with `steer` or `reject`, now or later."""

    head: RequestHead
    body: bytes | None
    """The whole body; None when this mode does not show it (or shows a part)."""
    size: int
    """Bytes of the body; when it is not shown, what `content-length` says, else 0."""
    response_shown: bool = True
    """Whether the response's body will be shown, so that it can be changed."""
    observing: bool = False
    """Envoy only shows this stream (observability mode) and takes no answer."""
    flight: str = ""
    """On an observing stream: the `Steering.flight` of the request it shows; "" when the gateway does not tell."""


class RequestRejected(msgspec.Struct, frozen=True):
    """The machine refused the request by itself; the answer is in the outbox."""

    rejection: Rejection


class ResponseHead(msgspec.Struct, frozen=True):
    """The worker's (or Envoy's own) response begins."""

    status: int
    headers: Headers
    served: str
    """`ip:port` that served, as the gateway tells it; empty when it does not."""


class ResponseData(msgspec.Struct, frozen=True):
    """A piece of the response body as the worker sent it; the outbox already holds what lets it pass."""

    data: bytes
    end: bool


class ResponseDone(msgspec.Struct, frozen=True):
    """The exchange is over. Comes once if a `RequestReady` or a part of a response came before, else never."""

    complete: bool
    """True: the response's end was seen. False: the stream ended first, which is how Envoy says "over" when it does
    not send response bodies, and also how it says that the client or the worker went away."""


class ProtocolFault(msgspec.Struct, frozen=True):
    """The peer broke the protocol: end the RPC with an error. Nothing more is taken from it or sent."""

    reason: str


Event = RequestReady | RequestRejected | ResponseHead | ResponseData | ResponseDone | ProtocolFault
