"""A body that begins like an earlier one is read from where the two part.

In: bodies as bytes. Out: where the earlier body's messages lie in this one. JSON of 400 KB takes 0.1-0.5 ms to walk
through (text full of escapes the longest); comparing it takes 0.03 ms.

Every 16 KiB a body leaves the hash of all before that point; the last such hash that a new body shares names the
earlier one, and one more hash says whether it holds all its messages. Bodies are not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Any

import xxhash

STEP = 16_384
TRIES = 3
MAX_STEPS = 1 << 16
"""Points kept: 160 bytes each, beside one `Earlier` a body."""

_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class Earlier:
    """What is known of an earlier body."""

    opening: int
    """Offset of its first message."""
    end: int
    """Offset after its last message."""
    digest: bytes
    """Of `body[:end]`."""
    root: bytes
    """What else decided about its ids."""
    name: bytes
    """Of the chat up to its last message."""
    naming: Any
    """The running hash that gave `name`, to be copied and gone on with."""


class Bodies:
    """Safe from several threads."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._steps: OrderedDict[bytes, Earlier] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._steps)

    def find(self, body: bytes) -> Earlier | None:
        """The earlier body, of those that share most with this one, whose messages it all holds."""
        steps = self._digests(body, len(body))
        tries = 0
        for digest in reversed(steps):
            earlier = self._steps.get(digest)
            if earlier is not None:
                tries += 1
                if earlier.end <= len(body) and self.digest(body, earlier.end) == earlier.digest:
                    return earlier
                if tries == TRIES:
                    break
        return None

    def digest(self, body: bytes, end: int) -> bytes:
        return xxhash.xxh3_128_digest(memoryview(body)[:end], self._seed)

    def remember(self, body: bytes, earlier: Earlier) -> None:
        """Bodies shorter than one step are not worth it."""
        steps = self._digests(body, earlier.end)
        with self._lock:
            for digest in steps:
                self._steps[digest] = earlier
                self._steps.move_to_end(digest)
            while len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)

    def _digests(self, body: bytes, end: int) -> list[bytes]:
        running = xxhash.xxh3_128(seed=self._seed)
        view = memoryview(body)
        digests = []
        for start in range(0, end - STEP + 1, STEP):
            running.update(view[start : start + STEP])
            digests.append(running.digest())
        return digests


def without_known(body: bytes, earlier: Earlier) -> bytes | None:
    """The body without the messages it shares with an earlier one; None when no message ends there.

    Where nothing but those is in the list, `null` stands for them: a list that is read must be the one that was cut.
    """
    at = earlier.end
    while at < len(body) and body[at] in _SPACE:
        at += 1
    following = body[at : at + 1]
    if following == b",":
        return body[: earlier.opening] + body[at + 1 :]
    if following == b"]":
        return body[: earlier.opening] + b"null" + body[at:]
    return None
