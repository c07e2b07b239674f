"""The engine in real time: steps are slept, not computed.

The engine has its own time: a step begins when the last one ended, not when the loop woke up, so that a busy machine
does not slow the emulated one. `speed` is engine seconds per real second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from epp.sim.engine import EngineCore, EngineOutput
from epp.sim.events import KVCacheEvent
from epp.sim.sequence import Sequence


class OutputStream:
    """The outputs of one request's sequences. Leaving the `with` block aborts what has not ended."""

    def __init__(self, engine: AsyncEngine, sequences: list[Sequence]) -> None:
        self._engine = engine
        self.sequences = sequences
        self._outputs: deque[EngineOutput] = deque()
        self._unfinished = len(sequences)
        self._wanted = 1
        self._wake = asyncio.Event()

    async def read(self, at_least: int = 1) -> list[EngineOutput]:
        """The outputs since the last call, waiting for `at_least` of them or the end; empty when all have been read."""
        self._wanted = at_least
        while self._unfinished and len(self._outputs) < at_least:
            self._wake.clear()
            await self._wake.wait()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    async def wait(self) -> None:
        """Until every sequence has ended; the tokens are in the sequences."""
        while self._unfinished:
            self._wanted = 1 << 62
            self._wake.clear()
            await self._wake.wait()

    def put(self, output: EngineOutput) -> None:
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._unfinished -= 1
        if not self._unfinished or len(self._outputs) >= self._wanted:
            self._wake.set()

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._engine.abort(self.sequences)


class AsyncEngine:
    """Runs an `EngineCore` as a task of the running event loop."""

    def __init__(self, core: EngineCore, *, speed: float = 1.0) -> None:
        if speed <= 0:
            raise ValueError(f"speed must be above 0, not {speed}")
        self.core = core
        self.slow_factor = 1.0
        """Every step takes so many times longer: a fault that can be switched on."""
        self.on_events: Callable[[list[KVCacheEvent]], None] | None = None
        """Gets each step's KV-cache events."""
        self._speed = speed
        self._streams: dict[Sequence, OutputStream] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._step_end: float | None = None

    @property
    def load(self) -> int:
        """Sequences that have not ended."""
        return len(self._streams)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_report_death)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Let running sequences end for up to `grace_s` seconds, then stop stepping."""
        if self._task is not None:
            if self._streams and grace_s > 0:
                self._idle.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self._idle.wait()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, sequences: list[Sequence]) -> OutputStream:
        """Raises ValueError, with nothing added, for a prompt that is too long."""
        stream = OutputStream(self, sequences)
        # When the loop is late, the engine's time is behind: a request is never younger than the step that takes it.
        now = self._now() if self._step_end is None else min(self._now(), self._step_end)
        try:
            for sequence in sequences:
                self.core.add_request(sequence, now)
                self._streams[sequence] = stream
        except ValueError:
            self.abort(sequences)
            raise
        self._work.set()
        return stream

    def abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if self._streams.pop(sequence, None) is not None:
                self.core.abort(sequence)

    def wake_up(self) -> None:
        self.core.wake_up()
        self._work.set()

    def _now(self) -> float:
        return time.monotonic() * self._speed

    async def _run(self) -> None:
        now = self._now()
        while True:
            duration = self.core.begin_step(now)
            if duration is None:
                self._step_end = None
                self._work.clear()
                self._idle.set()
                await self._work.wait()
                now = self._now()
                continue
            now = self._step_end = now + duration * self.slow_factor
            # Also when late, let the loop do other work between two steps.
            await asyncio.sleep(max(0.0, (now - self._now()) / self._speed))
            self._deliver(now)

    def _deliver(self, now: float) -> None:
        step = self.core.end_step(now)
        if step.events and self.on_events is not None:
            self.on_events(step.events)
        for output in step.outputs:
            stream = self._streams.get(output.sequence)
            if output.finish_reason is not None:
                self._streams.pop(output.sequence, None)
            if stream is not None:
                stream.put(output)


def _report_death(task: asyncio.Task[None]) -> None:
    """An engine that has died answers nobody; that must not go unseen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logging.getLogger(__name__).critical("the engine has died", exc_info=error)
