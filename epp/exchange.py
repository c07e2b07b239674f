"""One ext_proc RPC: the stream machine on one side, the director on the other, the reasons to wait between them.

In: whole ext_proc messages from whichever edge serves. Out: replies at once, or later through the writer when a big
body is read off the event loop. A decision has a deadline of our own (Envoy enforces none while a full-duplex picker
holds a request): when it passes, the request goes where own counts say, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from epp.api.errors import BadRequest
from epp.director import Director, Flight
from epp.gateway.errors import Rejection
from epp.gateway.ext_proc import ExtProcStream
from epp.gateway.ext_proc_events import (
    Event,
    Limits,
    ProtocolFault,
    RequestReady,
    RequestRejected,
    ResponseData,
    ResponseDone,
    ResponseHead,
    Steering,
)
from epp.gateway.session import GrpcStatus, Writer
from epp.request import InferenceRequest, RequestHead

T = TypeVar("T")


class Timer(Protocol):
    def cancel(self) -> None: ...


class Runtime(Protocol):
    """What an exchange needs of the event loop; tests give their own."""

    def now(self) -> float:
        """The picker's monotonic clock, seconds."""

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer: ...

    def offload(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        """Run `work` in a thread; `done` is called on the event loop."""


@dataclass(frozen=True, slots=True)
class Patience:
    """When reading leaves the event loop, and how long a decision may take."""

    offload_bytes: int = 1 << 20
    """Bodies above this are read in a thread: 1 MiB takes 0.3 ms, and other streams should not wait longer."""
    deadline_s: float = 0.25


class Exchange:
    """A `Session` (see `epp.gateway.session`): one HTTP request as Envoy tells it."""

    __slots__ = (
        "_director",
        "_flight",
        "_head",
        "_observing",
        "_patience",
        "_runtime",
        "_size",
        "_stream",
        "_timer",
        "_writer",
    )

    def __init__(
        self, director: Director, runtime: Runtime, limits: Limits, patience: Patience, writer: Writer
    ) -> None:
        self._director = director
        self._runtime = runtime
        self._patience = patience
        self._writer = writer
        self._stream = ExtProcStream(limits)
        self._flight: Flight | None = None
        self._observing = False
        """This stream shows the response of a request that another stream answers."""
        self._head: RequestHead | None = None
        """Set while a decision is awaited."""
        self._size = 0
        self._timer: Timer | None = None

    def receive(self, message: bytes) -> Sequence[bytes]:
        self._handle(self._stream.receive(message))
        return self._stream.take()

    def half_closed(self) -> bool:
        self._handle(self._stream.half_closed())
        return self._head is None

    def closed(self) -> None:
        self._handle(self._stream.closed())
        self._settle()
        self._over(complete=False)

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case ResponseData():
                    if self._flight is not None:
                        self._director.response_data(self._flight, event.data, self._runtime.now())
                case RequestReady():
                    self._request(event)
                case ResponseHead():
                    if self._flight is not None:
                        self._director.response_began(self._flight, event, self._runtime.now())
                case ResponseDone():
                    self._over(complete=event.complete)
                case RequestRejected():
                    self._director.metrics.reasons[event.rejection.reason] += 1
                case ProtocolFault():
                    self._director.metrics.reasons["protocol-fault"] += 1
                    self._writer.finish(GrpcStatus.INVALID_ARGUMENT, event.reason)

    def _over(self, *, complete: bool) -> None:
        if self._flight is not None:
            over = self._director.observed if self._observing else self._director.landed
            over(self._flight, complete=complete, now=self._runtime.now())

    def _request(self, ready: RequestReady) -> None:
        if ready.observing:
            self._observing = True
            self._flight = self._director.observe(ready.flight)
            return
        head, body = ready.head, ready.body
        started = self._runtime.now()
        if body is None or len(body) <= self._patience.offload_bytes:
            try:
                request = self._director.read(head, body)
            except BadRequest as fault:
                self._stream.reject(self._director.refuse(fault, head))
                return
            self._answer(self._director.decide(request, body, self._runtime.now()), started)
            return
        self._head, self._size = head, ready.size
        self._timer = self._runtime.call_later(self._patience.deadline_s, lambda: self._late(started))
        self._runtime.offload(lambda: self._director.read(head, body), lambda result: self._read(result, body, started))

    def _read(self, result: InferenceRequest | BaseException, body: bytes, started: float) -> None:
        """A big body was read in a thread; the stream may be gone or answered by now."""
        head = self._head
        if head is None:
            return
        self._settle()
        if isinstance(result, BadRequest):
            self._stream.reject(self._director.refuse(result, head))
        elif isinstance(result, BaseException):
            self._answer(self._director.decide_late(head, self._size, "reading-failed", self._runtime.now()), started)
        else:
            self._answer(self._director.decide(result, body, self._runtime.now()), started)
        self._writer.send(self._stream.take())

    def _late(self, started: float) -> None:
        head = self._head
        if head is None:
            return
        self._settle()
        self._answer(self._director.decide_late(head, self._size, "decision-deadline", self._runtime.now()), started)
        self._writer.send(self._stream.take())

    def _settle(self) -> None:
        self._head = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _answer(self, answer: tuple[Steering, Flight] | Rejection, started: float) -> None:
        if isinstance(answer, Rejection):
            self._stream.reject(answer)
            return
        steering, self._flight = answer
        self._stream.steer(steering)
        self._director.metrics.decision.observe(self._runtime.now() - started)
