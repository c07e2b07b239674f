"""Chains of block keys told in parts: only what is new of a prompt goes out, and is put together again.

In: whole chains to tell, passages heard. Out: passages, whole chains. A prompt of 100,000 tokens has 6,250 keys, 50 KB;
the next turn of its session tells some dozens. A passage names the block it follows, which is always a landmark: one in
64 blocks, so that few keys need remembering. No I/O and no clock.
"""

from __future__ import annotations

import numpy as np

from epp.kvcache.blocks import Keys
from epp.kvcache.history import LANDMARK, History
from epp.shared.messages import MAX_KEYS, Passage, passage

MAX_TOLD = 1 << 18
"""Landmarks remembered as told; beyond it all are forgotten, and chains are told anew."""
UNBOUNDED = 1 << 62


class Told:
    """What all listeners should know, for it was told by us or by others since the last `forget`."""

    def __init__(self) -> None:
        self._landmarks: set[int] = set()

    def forget(self) -> None:
        """Somebody may have missed something: tell everything from its beginning."""
        self._landmarks.clear()

    def untold(self, space: str, keys: Keys) -> Passage:
        """What of a chain is to be told, at most `MAX_KEYS` keys of it; told from now on. Possibly without any key."""
        landmarks = keys[LANDMARK - 1 :: LANDMARK]
        low, high = 0, len(landmarks)
        while low < high:  # told chains are told from their beginning, so what is told of a chain leads it
            middle = (low + high) // 2
            if landmarks.item(middle) in self._landmarks:
                low = middle + 1
            else:
                high = middle
        depth = low * LANDMARK
        part = keys[depth : depth + MAX_KEYS]
        self._add(part)
        return passage(space, part, depth=depth, anchor=keys.item(depth - 1) if depth else 0)

    def all_untold(self, space: str, keys: Keys) -> list[Passage]:
        """What of a chain is to be told, to its end."""
        passages = [self.untold(space, keys)]
        while passages[-1].depth + len(passages[-1].keys) // 8 < len(keys):
            passages.append(self.untold(space, keys))
        return passages

    def heard(self, heard: Passage) -> None:
        if not heard.depth or heard.anchor in self._landmarks:
            self._add(heard.array())

    def _add(self, keys: Keys) -> None:
        """Keys that begin after a landmark."""
        if len(self._landmarks) > MAX_TOLD:
            self._landmarks.clear()
            return
        self._landmarks.update(keys[LANDMARK - 1 :: LANDMARK].tolist())


class Chains:
    """Chains known here, bounded in bytes; those not used for longest go first."""

    def __init__(self, max_bytes: int) -> None:
        self._known: History[str] = History(max_bytes)

    def add(self, keys: Keys) -> None:
        self._known.insert("", keys, UNBOUNDED)

    def whole(self, heard: Passage) -> Keys | None:
        """The chain from its root that a passage ends; None if what it follows is not known here."""
        keys = heard.array()
        if heard.depth:
            before = self._known.chain(heard.depth, heard.anchor)
            if before is None:
                return None
            keys = np.concatenate([before, keys])
        self.add(keys)
        return keys
