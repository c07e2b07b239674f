"""Cutting a text before its special tokens, and the ids of each piece, kept by content.

Why this is exact: a tokenizer takes its added tokens out of the text before it normalises, splits or merges anything,
so what stands between two of them never meets. A piece that begins with its special token is therefore encoded alone
as it is within the whole (its token also keeps a sentencepiece tokenizer from treating the piece as the start of a
text). `epp.kvcache.tokens.encoder` proves it anew for each tokenizer at load.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

Ids = NDArray[np.uint32]
"""Token ids, shape (tokens,)."""

ENTRY_BYTES = 320
"""What an entry of the cache costs beside its ids: key, array header, link of the order (measured, CPython 3.11)."""


class Cutter:
    """Finds the places before special tokens. `added`: `added_tokens` of a tokenizer.json."""

    def __init__(self, added: Sequence[Mapping[str, Any]]) -> None:
        plain = [t for t in added if not t.get("normalized") and t.get("content")]
        contents = sorted((str(t["content"]) for t in plain), key=len, reverse=True)
        """Longest first, as the tokenizer's own search prefers (Aho-Corasick, leftmost-longest)."""
        self._search = re.compile("|".join(map(re.escape, contents))) if contents else None
        self._whole = frozenset(str(t["content"]) for t in plain if t.get("lstrip") or t.get("single_word"))
        """Tokens that depend on what stands before them; no cut there."""

    def cut(self, text: str, start: int = 0) -> list[int]:
        """Where pieces begin, ascending, `start` first (`text[:start]` is taken to end at a cut)."""
        if self._search is None:
            return [start]
        whole = self._whole
        cuts = [m.start() for m in self._search.finditer(text, start) if not whole or m[0] not in whole]
        if not cuts or cuts[0] != start:
            cuts.insert(0, start)
        return cuts

    def pieces(self, text: str, start: int = 0) -> list[str]:
        """The pieces of `text[start:]`; joined they are it. Empty text has none."""
        cuts = self.cut(text, start)
        return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True) if a < b]


class PieceCache:
    """Ids by content, bounded in bytes, the least recently used forgotten first. Safe from several threads."""

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._seed = seed
        """Unknown to clients, so that nobody can prepare two texts with one name (128 bits, but not cryptographic)."""
        self._ids: OrderedDict[bytes, Ids] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, name: bytes) -> bool:
        return name in self._ids

    def name(self, piece: str) -> bytes:
        """Raises UnicodeEncodeError for lone surrogates, which no tokenizer takes."""
        return xxhash.xxh3_128_digest(piece.encode(), self._seed)

    def get_many(self, names: Iterable[bytes]) -> list[Ids | None]:
        with self._lock:
            found = []
            for name in names:
                ids = self._ids.get(name)
                if ids is not None:
                    self._ids.move_to_end(name)
                    self.hits += 1
                else:
                    self.misses += 1
                found.append(ids)
            return found

    def put_many(self, items: Iterable[tuple[bytes, Ids]]) -> None:
        with self._lock:
            for name, ids in items:
                if name not in self._ids:
                    self._ids[name] = ids
                    self.bytes += ids.nbytes + ENTRY_BYTES
            while self.bytes > self.max_bytes and self._ids:
                _, ids = self._ids.popitem(last=False)
                self.bytes -= ids.nbytes + ENTRY_BYTES
