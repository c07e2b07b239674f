"""Requests through `Exchange` and `Director` without sockets: a manual clock, a thread by hand, Envoy's side played.

rig = Rig(endpoints=2)
peer = rig.open()                       # one ext_proc stream
peer.request(chunks=[rig.body()])       # ... as Envoy sends it
peer.response(chunks=[b"..."])
peer.end()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, TypeVar

from epp.config import PickerConfig, load_default, read
from epp.decision import Decision
from epp.director import Director, Options
from epp.endpoint import Endpoint, Pool
from epp.exchange import Exchange, Patience
from epp.gateway.ext_proc import BodyMode, ExtProcStream, Limits
from epp.gateway.pb import ext_proc_pb2 as pb
from epp.gateway.session import GrpcStatus
from epp.observe.metrics import Metrics
from epp.plugin import Outcome
from epp.scheduler import Scheduler
from epp.signals.health import Health
from tests.gateway.ext_proc_peer import Peer

T = TypeVar("T")

BY_LOAD = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: active-request-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: active-request-scorer
"""


class Clock:
    """`Runtime` with a hand-moved clock. Offloaded work waits for `run_thread`."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._timers: list[_Timer] = []
        self.offloaded: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(self.time + delay_s, call)
        self._timers.append(timer)
        return timer

    def offload(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        self.offloaded.append((work, done))

    def spawn(self, work: Coroutine[Any, Any, T], done: Callable[[T | BaseException], None]) -> None:
        self.offload(lambda: asyncio.run(work), done)

    def run_thread(self) -> None:
        """Finish all that was offloaded or spawned."""
        waiting, self.offloaded = self.offloaded, []
        for work, done in waiting:
            try:
                result = work()
            except Exception as error:
                result = error
            done(result)

    def advance(self, seconds: float) -> None:
        self.time += seconds
        due = [t for t in self._timers if t.due <= self.time]
        self._timers = [t for t in self._timers if t.due > self.time]
        for timer in due:
            if not timer.cancelled:
                timer.call()

    @property
    def armed(self) -> int:
        return sum(not t.cancelled for t in self._timers)


class _Timer:
    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due, self.call, self.cancelled = due, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Decisions:
    """Every decision and how it turned out."""

    def __init__(self) -> None:
        self.made: list[Decision] = []
        self.ended: list[tuple[Decision, Outcome | None]] = []

    def decided(self, decision: Decision) -> None:
        self.made.append(decision)

    def finished(self, decision: Decision, outcome: Outcome | None = None) -> None:
        self.ended.append((decision, outcome))

    @property
    def outcome(self) -> Outcome:
        """Of the request that ended last."""
        outcome = self.ended[-1][1]
        assert outcome is not None
        return outcome


class Rig:
    """A picker's inner half: pool, scheduler, director; streams are opened by hand."""

    def __init__(
        self,
        endpoints: int = 3,
        *,
        config: str | None = BY_LOAD,
        options: Options | None = None,
        limits: Limits | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.clock = Clock()
        self.pool = Pool(Endpoint("10.0.0.1", 8000 + i) for i in range(endpoints))
        for endpoint in self.pool.endpoints:
            endpoint.set("scraped_at", self.clock.time)
        self.known = list(self.pool.endpoints)
        """Every endpoint that ever was in the pool."""
        parsed: PickerConfig = load_default() if config is None else read(config, source="test")
        self.scheduler = Scheduler(parsed, random=Random(1))
        self.health = Health(self.pool, Random(1))
        self.metrics = Metrics(self.pool)
        self.decisions = Decisions()
        self.limits = limits or Limits()
        self.patience = patience or Patience()
        self.director = Director(
            pool=self.pool,
            scheduler=lambda: self.scheduler,
            health=self.health,
            metrics=self.metrics,
            decisions=self.decisions,
            wall=lambda: 1.7e9,
            options=options,
        )

    def open(
        self,
        request_mode: BodyMode = BodyMode.FULL_DUPLEX,
        response_mode: BodyMode = BodyMode.FULL_DUPLEX,
        *,
        observability: bool = False,
        metadata_context: pb.Metadata | None = None,
    ) -> Stream:
        return Stream(self, request_mode, response_mode, observability=observability, metadata_context=metadata_context)

    def add(self, endpoint: Endpoint) -> None:
        self.pool.update(add=[endpoint])
        self.known.append(endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        self.pool.update(remove=[endpoint])
        self.director.endpoints_left([endpoint], self.clock.time)

    @property
    def in_flight(self) -> list[int]:
        return [e.in_flight for e in self.pool.endpoints]

    @property
    def reasons(self) -> dict[str, int]:
        return {reason: count for reason, count in self.metrics.reasons.items() if count}

    def assert_idle(self) -> None:
        """Nothing is in flight, of whatever unit, and every decision that was made has ended once."""
        for endpoint in self.known:
            assert (endpoint.in_flight, endpoint.in_flight_tokens, endpoint.unseen) == (0, 0, 0), endpoint
        for column in ("in_flight", "in_flight_tokens", "unseen"):
            assert not self.pool.columns[column][: len(self.pool)].any()
        assert {stats.running for stats in self.metrics.models.values()} <= {0}
        assert sorted(map(id, self.decisions.made)) == sorted(id(decision) for decision, _ in self.decisions.ended)
        assert self.clock.armed == 0


class Stream(Peer):
    """Envoy's side of one `Exchange`: a `Peer` whose other end is the whole picker, the edge included."""

    def __init__(self, rig: Rig, *modes: BodyMode, **options: Any) -> None:
        super().__init__(ExtProcStream(), *modes, **options)
        self.status: GrpcStatus | None = None
        self.closed = False
        self.exchange = Exchange(rig.director, rig.clock, rig.limits, rig.patience, _Writer(self))

    def send_bytes(self, message: bytes) -> list[pb.ProcessingResponse]:
        return self.take_replies(self.exchange.receive(message))

    def take_replies(self, messages: Sequence[bytes]) -> list[pb.ProcessingResponse]:
        replies = [pb.ProcessingResponse.FromString(message) for message in messages]
        assert not (replies and self.observability), "a message in observability mode was answered"
        for reply in replies:
            self._apply(reply)
        self.replies += replies
        return replies

    def end(self) -> None:
        """The exchange is over for Envoy: it half-closes, the edge ends the RPC."""
        assert self.exchange.half_closed()
        self.reset()

    def reset(self) -> None:
        """The RPC is over without a word: client gone, upstream reset, connection lost, drained."""
        if not self.closed:
            self.closed = True
            self.exchange.closed()

    @property
    def destination(self) -> str:
        """Where the worker-bound request goes; header and metadata agree."""
        (value,) = self.headers["request"]["x-gateway-destination-endpoint"]
        assert self.destination_metadata == value.decode()
        return value.decode()


class _Writer:
    """The `Writer` of a stream's RPC."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def send(self, messages: Sequence[bytes]) -> None:
        assert not self._stream.closed, "a message after the end of the RPC"
        self._stream.take_replies(messages)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, message: str = "") -> None:
        self._stream.status = status
