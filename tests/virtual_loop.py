"""An event loop whose clock jumps: days of timers in seconds, over real loopback sockets within one process.

While a socket of this process has something to read, or a callback is due, time stands still; when nothing is left to
do, it moves to the next timer. All of asyncio's timers (sleep, timeouts, aiohttp's) follow it. What the process does
not hold in its hands (threads, other processes) is not waited for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
MOST_S = 30 * 86_400.0
SETTLE = 2
"""How often sockets are asked before time moves: what was written to loopback is there to be read at once."""


class _Selector(selectors.EpollSelector):
    """Never waits: what it would have waited is put on the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        for _ in range(SETTLE):
            if events := super().select(0):
                return events
        if timeout is None:
            # No timer at all: only a socket or a signal can bring more.
            return super().select(0.05)
        if timeout > 0:
            self.now += timeout
            if self.now > MOST_S:
                raise RuntimeError(f"{MOST_S / 86_400:.0f} days have gone by: what is waited for does not come")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._virtual.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a virtual loop. Time starts at 0; `asyncio.get_running_loop().time()` tells it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """For tests: an asynchronous one becomes one that runs on a virtual loop."""

    @wraps(test)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return wrapped
