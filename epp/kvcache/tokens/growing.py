"""Ids that grow at their end without being copied: the turns of one session share one buffer.

A turn's ids are a view of the buffer's beginning. The next turn writes behind them, so older views stay what they were.
Only one continuation can have the room behind a turn; a second one, or one that changes the end, gets a buffer of its
own. Copying 100,000 ids costs 150-300 us (most of it page faults), appending 2,000 costs 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np

from epp.kvcache.tokens.pieces import Ids


class GrowingIds:
    """`view(n)` for the first n ids. Safe from several threads."""

    __slots__ = ("_buffer", "_lock", "_used", "holders")

    def __init__(self, parts: Sequence[Ids], room: float = 0.125) -> None:
        """Copy `parts`, and leave room for this fraction more."""
        used = sum(map(len, parts))
        self._buffer = np.empty(used + int(used * room) + 256, dtype=np.uint32)
        if parts:
            np.concatenate(parts, out=self._buffer[:used])
        self._used = used
        self._lock = Lock()
        self.holders = 0
        """How many remembered turns lie here; kept by `Turns`."""

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def __len__(self) -> int:
        return self._used

    def view(self, length: int) -> Ids:
        return self._buffer[:length]

    def continued(self, length: int, kept: int, parts: Sequence[Ids]) -> tuple[GrowingIds, int]:
        """The ids `view(length)[:kept]` and then `parts`: in which buffer, and how many in all."""
        new = np.concatenate(parts) if parts else self._buffer[:0]
        total, again = kept + len(new), length - kept
        if total >= length and np.array_equal(new[:again], self._buffer[kept:length]):
            with self._lock:
                if self._used == length and total <= len(self._buffer):
                    self._buffer[length:total] = new[again:]
                    self._used = total
                    return self, total
        return GrowingIds([self._buffer[:kept], new]), total
