"""CPU time of a call in this process.

Least of several rounds by the thread's own clock: other load on the machine adds to a round and never takes away.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

ROUNDS = 15
ROUND_S = 0.02


def cpu_us(call: Callable[[], object], *, rounds: int = ROUNDS, round_s: float = ROUND_S) -> float:
    """Microseconds of one `call`. A round calls for about `round_s`, once at the least."""
    calls = max(1, int(round_s / _seconds(call, 3)))
    return min(_seconds(call, calls) for _ in range(rounds)) * 1e6


def each_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of the median call, where each can be made only once; the first one warms up and does not count."""
    return statistics.median([_seconds(call, 1) for call in calls][1:]) * 1e6


def _seconds(call: Callable[[], object], calls: int) -> float:
    started = time.thread_time()
    for _ in range(calls):
        call()
    return max(time.thread_time() - started, 1e-7) / calls
