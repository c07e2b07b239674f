"""One ext_proc RPC: the stream machine on one side, the director on the other, the reasons to wait between them.

In: whole ext_proc messages from whichever edge serves. Out: replies at once, or later through the writer when a big
body is read off the event loop. A decision has a deadline of our own (Envoy enforces none while a full-duplex picker
holds a request): when it passes, the request goes where own counts say, with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from epp.api.errors import BadRequest
from epp.director import DECISION_DEADLINE, NOT_SHOWN, READING_FAILED, TOKENS_LATE, Director, Flight
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
from epp.kvcache.tokens import Tokenized
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

    def spawn(self, work: Coroutine[Any, Any, T], done: Callable[[T | BaseException], None]) -> None:
        """Run a coroutine on the event loop; `done` is called there."""

    def offload(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        """Run `work` in a thread; `done` is called on the event loop."""


@dataclass(frozen=True, slots=True)
class Patience:
    """When reading leaves the event loop, and how long a decision may take."""

    offload_bytes: int = 1 << 20
    """Bodies above this are read in a thread: 1 MiB takes 0.3 ms, and other streams should not wait longer."""
    deadline_s: float = 0.25
    """Ends the wait for a body's reading (unless its model may have to be rewritten) and for its token ids."""


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
        if awaited is None:
            return
        ready, request, reason = awaited.ready, awaited.request, TOKENS_LATE
        if request is None:
            request, reason = self._director.unread(ready.head, ready.size, DECISION_DEADLINE), DECISION_DEADLINE
        late = request
        self._answer_later(lambda: self._decide(late, ready, awaited.started, reason))

    def _tokenise(self, request: InferenceRequest, ready: RequestReady, started: float) -> None:
        """Find the prompts' token ids: at once where that is cheap, else in a thread or from a worker; then decide."""
        tokens, body = self._director.tokens, ready.body
        if tokens is None or body is None or not request.prompts:
            self._decide(request, ready, started)
            return
        found = tokens.ready(request, body)
        if found is not None and (found.prompts or not tokens.renders(request)):
            self._director.tokenised(request, found)
            self._decide(request, ready, started)
            return
        awaited = self._awaited = _Awaited(ready, started, request)
        left = self._patience.deadline_s - (self._runtime.now() - started)
        self._timer = self._runtime.call_later(max(left, 0.0), self._late)
        if found is not None:
            self._render(awaited, found)
        else:
            self._runtime.offload(tokens.work(request, body), lambda result: self._tokenised(awaited, result))

    def _tokenised(self, awaited: _Awaited, result: Tokenized | BaseException) -> None:
        """Tokenising in a thread has ended; the decision may have been made without it."""
        request, tokens = awaited.request, self._director.tokens
        if self._awaited is not awaited or request is None:
            return
        if isinstance(result, Tokenized) and not result.prompts and tokens is not None and tokens.renders(request):
            self._render(awaited, result)
            return
        self._director.tokenised(request, result)
        self._answer_later(lambda: self._decide(request, awaited.ready, awaited.started))

    def _render(self, awaited: _Awaited, without: Tokenized) -> None:
        """Ask a worker for the ids; `without` is what there is if nobody can be asked."""
        request, tokens, body = awaited.request, self._director.tokens, awaited.ready.body
        assert request is not None
        assert tokens is not None
        assert body is not None
        worker = self._director.renderer(request, self._runtime.now())

        def done(result: Tokenized | BaseException) -> None:
            if self._awaited is awaited:
                self._director.tokenised(request, result)
                self._answer_later(lambda: self._decide(request, awaited.ready, awaited.started))

        if worker:
            self._runtime.spawn(tokens.render(request, body, worker), done)
        else:
            done(without)

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
            self._tokenise(result, ready, started)

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
    """A request that waits for its body to be read, or, when it was, for its token ids."""

    ready: RequestReady
    started: float
    request: InferenceRequest | None = None


def _caught(work: Callable[[], T]) -> T | BaseException:
    """What `work` gives or raises, as `Runtime.offload` tells it."""
    try:
        return work()
    except Exception as error:
        return error
