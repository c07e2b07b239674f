"""Texts that grow: which of the texts seen before a new one begins with, without keeping any of them.

In: the bytes of a text and what was found out about its beginning. Out: for a later text, the longest beginning known
and what was found out about it. Agents send their whole conversation with every turn; whoever looked at the last turn
then only looks at what is new.

A beginning is kept as its length and a 128-bit hash (XXH3: 400 KB take 3 us out of the cache), under the bytes before
its last multiple of `STRIDE`. A new text looks up the bytes before its own multiples, from its end backwards. Equal
hashes of equal length are taken for equal texts; their seed is this process's secret, so that nobody can prepare two
texts with the same. May be used from several threads.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

import xxhash

T = TypeVar("T")

STRIDE = 1 << 14
"""Texts below this size are not remembered: they are read in the time it takes to look."""
WORTHWHILE = 1 << 13
"""Growth from which a longer beginning is worth its hash; until then the one known before serves."""
_WINDOW = 64
_MAX_COMPARED = 4
"""Beginnings whose hash is taken for one text; texts that repeat themselves could ask for any number."""
_ENTRY_BYTES = 500
_SECRET = int.from_bytes(os.urandom(8))


class Growing(Generic[T]):
    """Beginnings of texts -> what is known of them, the least recently used forgotten beyond `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._known: OrderedDict[tuple[int, int, bytes], tuple[int, int, T, int]] = OrderedDict()
        """(seed, multiple, bytes before it) -> length, hash, what is known, bytes all that takes."""
        self._lock = Lock()

    def find(self, text: bytes, seed: int = 0) -> tuple[int, T] | None:
        """Length of the longest known beginning of `text`, and what is known of it. Only of the same `seed`."""
        compared = 0
        for at in range(len(text) // STRIDE * STRIDE, 0, -STRIDE):
            name = (seed, at, text[at - _WINDOW : at])
            entry = self._known.get(name)
            if entry is None or entry[0] > len(text):
                continue
            length, digest, known, _ = entry
            if _digest(text, length) == digest:
                with self._lock:
                    if name in self._known:
                        self._known.move_to_end(name)
                return length, known
            compared += 1
            if compared == _MAX_COMPARED:
                break
        return None

    def remember(self, text: bytes, length: int, known: T, size: int, seed: int = 0) -> None:
        """Keep what is known of the first `length` bytes of `text`; `size`: bytes that `known` takes."""
        at = length // STRIDE * STRIDE
        if not at:
            return
        digest, size = _digest(text, length), size + _ENTRY_BYTES
        name = (seed, at, text[at - _WINDOW : at])
        with self._lock:
            before = self._known.pop(name, None)
            self._known[name] = (length, digest, known, size)
            self.bytes += size - (before[3] if before is not None else 0)
            while self.bytes > self.max_bytes:
                self.bytes -= self._known.popitem(last=False)[1][3]


def _digest(text: bytes, length: int) -> int:
    return xxhash.xxh3_128_intdigest(memoryview(text)[:length], _SECRET)
