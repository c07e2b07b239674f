"""A circuit breaker: who fails three times in a row is left alone, for longer each time, then tried once.

Pure: time is passed in.
"""

from __future__ import annotations

FAILURES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Breaker:
    __slots__ = ("_failures", "_pause_s", "_until", "opened")

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0
        self.opened = 0
        """How often it has opened."""

    def allows(self, now: float) -> bool:
        """Whether to try. After a pause one try is let through; the next waits for its outcome or the next pause."""
        if self._failures < FAILURES:
            return True
        if now < self._until:
            return False
        self._until = now + self._pause_s
        return True

    def succeeded(self) -> None:
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._failures == FAILURES:
            self.opened += 1
        elif self._failures > FAILURES:
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        self._until = now + self._pause_s
