"""CPU time of a call in this process.

Least of several rounds by the thread's own clock: other load on the machine adds to a round and never takes away.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Effort:
    """How long everything is measured; `hurry` makes figures rougher and a run short."""

    rounds: int = 15
    round_s: float = 0.02
    scale: float = 1.0
    """Share of the usual number of requests, sessions or turns where those are counted."""

    def hurry(self) -> None:
        self.rounds, self.round_s, self.scale = 3, 0.003, 0.1

    def times(self, usual: int) -> int:
        return max(1, round(usual * self.scale))


EFFORT = Effort()
"""Of this process."""


def cpu_us(call: Callable[[], object], *, rounds: int | None = None, round_s: float | None = None) -> float:
    """Microseconds of one `call`. A round calls for about `round_s`, once at the least."""
    calls = max(1, int((round_s or EFFORT.round_s) / _seconds(call, 3)))
    return min(_seconds(call, calls) for _ in range(rounds or EFFORT.rounds)) * 1e6


def each_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of the median call, where each can be made only once; the first one warms up and does not count."""
    return statistics.median([_seconds(call, 1) for call in calls][1:]) * 1e6


def _seconds(call: Callable[[], object], calls: int) -> float:
    started = time.thread_time()
    for _ in range(calls):
        call()
    return max(time.thread_time() - started, 1e-7) / calls
