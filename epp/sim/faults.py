"""What can go wrong with a worker, switched on by hand. Rates are probabilities per request, drawn from one seed."""

from __future__ import annotations

import asyncio
import socket
import struct
from random import Random
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta, Struct

Rate = Annotated[float, Meta(ge=0, le=1)]


class Faults(Struct, forbid_unknown_fields=True, frozen=True):
    """All off by default."""

    refuse: Literal["", "close", "reset"] = ""
    """`close`: the port is closed and open connections are reset, as if the process had died; it opens again after
    `duration_s`, or when asked over the connection that switched this on. `reset`: a connection is accepted and reset
    at once."""
    hang: Rate = 0.0
    """The request is read and never answered."""
    reset_mid_stream: Rate = 0.0
    """The connection is reset after a part of the answer (an unstreamed one: before it)."""
    error_rate: Rate = 0.0
    error_status: Annotated[int, Meta(ge=400, le=599)] = 503
    bad_json: Rate = 0.0
    """The answer's JSON is cut off in its middle; of a stream, that of the first event."""
    slow: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Every engine step takes so many times longer."""
    stale_metrics: bool = False
    """/metrics goes on answering what it answered when this was switched on."""
    hung_metrics: bool = False
    """/metrics does not answer."""
    event_loss: Rate = 0.0
    """Of the KV-event batches: their sequence number is used, they are not sent (replay still has them)."""
    duration_s: Annotated[float, Meta(gt=0)] | None = None
    """All faults end after so many seconds."""
    seed: int = 0


def read_faults(body: bytes) -> Faults:
    """Raises ValueError that names the field."""
    try:
        return msgspec.json.decode(body, type=Faults)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


class FaultDice:
    """The faults in force, and the draws."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._random = Random(faults.seed)

    def strikes(self, rate: float) -> bool:
        return rate > 0 and self._random.random() < rate

    def between(self, low: int, high: int) -> int:
        return self._random.randint(low, max(low, high))


def reset_connection(transport: asyncio.BaseTransport) -> None:
    """End a connection with RST instead of FIN: what a socket does that is closed while it lingers for 0 seconds."""
    if transport.is_closing():  # its socket may be gone
        return
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    cast(asyncio.WriteTransport, transport).abort()  # uvloop's transports are none by inheritance
