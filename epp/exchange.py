"""One ext_proc RPC: the stream machine on one side, the director on the other, the reasons to wait between them.

In: whole ext_proc messages from whichever edge serves. Out: replies at once, or later through the writer when a big
body is read off the event loop. A decision has a deadline of our own (Envoy enforces none while a full-duplex picker
holds a request): when it passes, the request goes where own counts say, with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from epp.api.errors import BadRequest
from epp.director import DECISION_DEADLINE, NOT_SHOWN, READING_FAILED, Director, Flight
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
)
from epp.gateway.session import GrpcStatus, Writer
from epp.request import InferenceRequest

log = logging.getLogger(__name__)

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
    """Ends the wait for a body's reading, unless its model may have to be rewritten."""


class Exchange:
    """A `Session` (see `epp.gateway.session`): one HTTP request as Envoy tells it."""

    __slots__ = (
        "_awaited",
        "_director",
        "_flight",
        "_observing",
        "_patience",
        "_runtime",
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
        self._awaited: _Awaited | None = None
        self._timer: Timer | None = None

    def receive(self, message: bytes) -> Sequence[bytes]:
        for event in self._stream.receive(message):
            self._handle(event)
        return self._stream.take()

    def half_closed(self) -> bool:
        self._end()
        return True

    def closed(self) -> None:
        self._end()

    def _end(self) -> None:
        """The stream tells of its end exactly when a decision or a response is still due."""
        for event in self._stream.closed():
            self._handle(event)

    def _handle(self, event: Event) -> None:
        director, flight = self._director, self._flight
        if self._awaited is not None:  # what still waits for a decision, Envoy answers by itself or gives up
            self._settle()
        match event:
            case ResponseData():
                if flight is not None:
                    director.response_data(flight, event.data, self._runtime.now())
            case RequestReady():
                if event.observing:
                    self._observing = True
                    self._flight = director.observe(event.flight)
                else:
                    self._request(event)
            case ResponseHead():
                if flight is not None:
                    director.response_began(flight, event, self._runtime.now())
            case ResponseDone():
                if flight is not None:
                    over = director.observed if self._observing else director.landed
                    over(flight, complete=event.complete, now=self._runtime.now())
            case RequestRejected():
                director.metrics.reasons[event.rejection.reason] += 1
            case ProtocolFault():
                director.metrics.reasons["protocol-fault"] += 1
                self._writer.finish(GrpcStatus.INVALID_ARGUMENT, event.reason)
                self._end()

    def _request(self, ready: RequestReady) -> None:
        started = self._runtime.now()
        head, body, director = ready.head, ready.body, self._director
        if body is None:
            self._decide(director.unread(head, ready.size, NOT_SHOWN), ready, started, NOT_SHOWN)
        elif len(body) <= self._patience.offload_bytes:
            self._decide_read(_caught(lambda: director.read(head, body)), ready, started)
        else:
            awaited = self._awaited = _Awaited(ready, started)
            if not director.must_read(head):
                self._timer = self._runtime.call_later(self._patience.deadline_s, self._late)
            self._runtime.offload(lambda: director.read(head, body), lambda result: self._read(awaited, result))

    def _read(self, awaited: _Awaited, result: InferenceRequest | BaseException) -> None:
        """A big body was read in a thread; the stream may be gone or answered by now."""
        if self._awaited is awaited:
            self._answer_later(lambda: self._decide_read(result, awaited.ready, awaited.started))

    def _late(self) -> None:
        awaited = self._awaited
        if awaited is not None:
            ready = awaited.ready
            request = self._director.unread(ready.head, ready.size, DECISION_DEADLINE)
            self._answer_later(lambda: self._decide(request, ready, awaited.started, DECISION_DEADLINE))

    def _answer_later(self, answer: Callable[[], None]) -> None:
        """Outside `receive`, where the edge cannot see a failure: it ends the RPC all the same."""
        self._settle()
        try:
            answer()
        except Exception:
            log.exception("a decision failed; its RPC ends with INTERNAL")
            self._writer.finish(GrpcStatus.INTERNAL, "internal error")
        else:
            self._writer.send(self._stream.take())

    def _settle(self) -> None:
        """No decision is awaited any more."""
        self._awaited = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _decide_read(self, result: InferenceRequest | BaseException, ready: RequestReady, started: float) -> None:
        director = self._director
        if isinstance(result, BadRequest):
            self._stream.reject(director.refuse(result))
        elif isinstance(result, BaseException):
            director.note_unreadable(result)
            self._decide(director.unread(ready.head, ready.size, READING_FAILED), ready, started, READING_FAILED)
        else:
            self._decide(result, ready, started)

    def _decide(self, request: InferenceRequest, ready: RequestReady, started: float, reason: str = "") -> None:
        answer = self._director.decide(
            request, ready.body, self._runtime.now(), response_shown=ready.response_shown, reason=reason
        )
        if isinstance(answer, Rejection):
            self._stream.reject(answer)
            return
        steering, self._flight = answer
        self._stream.steer(steering)
        self._director.metrics.decision.observe(self._runtime.now() - started)


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A request whose body is being read in a thread."""

    ready: RequestReady
    started: float


def _caught(work: Callable[[], T]) -> T | BaseException:
    """What `work` gives or raises, as `Runtime.offload` tells it."""
    try:
        return work()
    except Exception as error:
        return error
