"""The engine in virtual time: an event queue instead of a clock, no sockets, the same result every time.

    clock = VirtualClock()
    worker = VirtualWorker("a", EngineCore(EngineConfig()), clock)
    worker.submit(Sequence("r1", prompt), at=0.5, on_output=lambda output, now: ...)
    clock.run(until=60.0)

Anything else that happens in time (arrivals, a picker's decision, a scrape) is a `clock.call_at(at, callback)`.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from epp.sim.engine import EngineCore, EngineOutput
from epp.sim.events import KVCacheEvent
from epp.sim.sequence import Sequence

OnOutput = Callable[[EngineOutput, float], None]
OnEvents = Callable[[list[KVCacheEvent], float], None]


class VirtualClock:
    """Callbacks in order of time; those of one moment in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def call_at(self, at: float, callback: Callable[[], None]) -> None:
        """Raises ValueError for a moment that has passed."""
        if at < self.now:
            raise ValueError(f"{at} has passed, it is {self.now}")
        heappush(self._queue, (at, next(self._order), callback))

    def run(self, until: float | None = None) -> None:
        """Run until nothing is left to happen, or until `until` (seconds; what happens later stays queued)."""
        while self._queue and (until is None or self._queue[0][0] <= until):
            self.now, _, callback = heappop(self._queue)
            callback()
        if until is not None:
            self.now = max(self.now, until)


class VirtualWorker:
    """One engine driven by a clock. `on_events` gets every step's KV-cache events, at the step's end."""

    def __init__(self, name: str, engine: EngineCore, clock: VirtualClock, on_events: OnEvents | None = None) -> None:
        self.name = name
        self.engine = engine
        self._clock = clock
        self._on_events = on_events
        self._on_output: dict[Sequence, OnOutput] = {}
        self._stepping = False

    def submit(self, sequence: Sequence, at: float | None = None, on_output: OnOutput | None = None) -> None:
        """The sequence arrives at `at` (default: now); `on_output` gets each of its tokens."""
        self._clock.call_at(self._clock.now if at is None else at, lambda: self._arrive(sequence, on_output))

    def abort(self, sequence: Sequence) -> None:
        self._on_output.pop(sequence, None)
        self.engine.abort(sequence)

    def wake_up(self) -> None:
        self.engine.wake_up()
        self._begin_step()

    def _arrive(self, sequence: Sequence, on_output: OnOutput | None) -> None:
        self.engine.add_request(sequence, self._clock.now)
        if on_output is not None:
            self._on_output[sequence] = on_output
        self._begin_step()

    def _begin_step(self) -> None:
        if self._stepping:
            return
        duration = self.engine.begin_step(self._clock.now)
        if duration is not None:
            self._stepping = True
            self._clock.call_at(self._clock.now + duration, self._end_step)

    def _end_step(self) -> None:
        self._stepping = False
        step = self.engine.end_step(self._clock.now)
        if step.events and self._on_events is not None:
            self._on_events(step.events, self._clock.now)
        for output in step.outputs:
            on_output = self._on_output.get(output.sequence)
            if output.finish_reason is not None:
                self._on_output.pop(output.sequence, None)
            if on_output is not None:
                on_output(output, self._clock.now)
        self._begin_step()
