"""Sets of holders, each kept once under a number: what the index stores of a block instead of a list of endpoints.

All blocks of a system prompt have the same holders, and all blocks of a session too: millions of blocks, few sets. A
set is a row of bits, one bit a *place*: a holder's tier and attention group. In: a set's number and the places to add
or drop. Out: the number of the set that results. A holder or a tier is taken out of all sets at once (`strip`), which
is how an endpoint leaves the index without a look at its blocks.

Rows are kept by *plane* (one array for each tier and group that occurs), so that the leading run of a prompt is an AND
of rows. Sets are found by a hash of their own, the XOR of their places' stamps (Zobrist 1970): adding a place is one
XOR. A set counts its blocks and is reused when no block has it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

U64s = NDArray[np.uint64]
Bits = NDArray[np.uint8]

EMPTY = 0
"""The number of the set without holders. Others may become empty by `strip`; their hash is 0 too."""
OBJECT_BYTES = 150
"""A set's entry in the dictionary with its two integers (measured, CPython 3.11)."""


class Place(NamedTuple):
    """One bit of a set: `mask` in word `word` of plane `plane`."""

    plane: int
    word: int
    mask: int
    stamp: int


class HolderSets:
    """Numbers 0.. -> rows of bits, for as many holders as `words` * 64."""

    def __init__(self) -> None:
        self.words = 1
        self.planes: list[U64s] = []
        """Each of shape (room, words)."""
        self.blocks: NDArray[np.int64] = np.zeros(16, dtype=np.int64)
        """Blocks that have the set, shape (room,)."""
        self.hashes: U64s = np.zeros(16, dtype=np.uint64)
        self._numbers = {0: EMPTY}
        """Hash -> number."""
        self._free: list[int] = []
        self._next = 1

    def __len__(self) -> int:
        """Sets in use, the empty one included."""
        return self._next - len(self._free)

    @property
    def bytes_per_set(self) -> int:
        return 8 * self.words * len(self.planes) + 16 + OBJECT_BYTES

    @property
    def nbytes(self) -> int:
        rows = sum(plane.nbytes for plane in self.planes)
        return rows + self.blocks.nbytes + self.hashes.nbytes + OBJECT_BYTES * len(self._numbers) + 8 * len(self._free)

    def add_plane(self) -> int:
        self.planes.append(np.zeros((len(self.blocks), self.words), dtype=np.uint64))
        return len(self.planes) - 1

    def widen(self, words: int) -> None:
        """Make rows of `words` words."""
        self.planes = [np.pad(plane, ((0, 0), (0, words - self.words))) for plane in self.planes]
        self.words = words

    def derive(self, number: int, add: Place | None, drop: tuple[Place, ...]) -> int:
        """The set like `number` with the place `add` and without those of `drop`: often `number` itself.

        A new set has no blocks yet: count them (`recount`) before anything else is derived or released.
        """
        flips = [place for place in drop if self.planes[place.plane].item(number, place.word) & place.mask]
        if add is not None and not self.planes[add.plane].item(number, add.word) & add.mask:
            flips.append(add)
        if not flips:
            return number
        hashed = self.hashes.item(number)
        for place in flips:
            hashed ^= place.stamp
        known = self._numbers.get(hashed)
        return self._create(number, flips, hashed) if known is None else known

    def recount(self, number: int, blocks: int) -> None:
        """`blocks` more, or fewer, blocks have the set. Without any it is free for reuse."""
        if number == EMPTY:
            return
        self.blocks[number] += blocks
        if not self.blocks.item(number):
            hashed = self.hashes.item(number)
            if self._numbers.get(hashed) == number:
                del self._numbers[hashed]
            self._free.append(number)

    def strip(self, places: list[Place]) -> None:
        """Take places out of every set, as if no block had ever been there."""
        for place in places:
            column = self.planes[place.plane][:, place.word]
            having = np.flatnonzero((column & np.uint64(place.mask)) != 0)
            column[having] &= np.uint64(~place.mask & (1 << 64) - 1)
            old = self.hashes[having]
            self.hashes[having] = new = old ^ np.uint64(place.stamp)
            for number, before, after in zip(having.tolist(), old.tolist(), new.tolist(), strict=True):
                if self._numbers.get(before) == number:
                    del self._numbers[before]
                    self._numbers.setdefault(after, number)

    def empty(self, numbers: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of the sets have no holder."""
        empty: NDArray[np.bool_] = self.hashes[numbers] == 0
        return empty

    def totals(self, plane: int) -> NDArray[np.int64]:
        """Blocks of every holder in one plane, shape (words * 64,)."""
        total = np.zeros(self.words * 64, dtype=np.int64)
        for start in range(0, self._next, 4096):
            end = min(start + 4096, self._next)
            total += self.blocks[start:end] @ unpack(self.planes[plane][start:end])
        return total

    def _create(self, number: int, flips: list[Place], hashed: int) -> int:
        if self._free:
            new = self._free.pop()
        else:
            new = self._next
            self._next += 1
            if new == len(self.blocks):
                self._grow(2 * new)
        for plane in self.planes:
            plane[new] = plane[number]
        for place in flips:
            self.planes[place.plane][new, place.word] ^= np.uint64(place.mask)
        self.hashes[new] = hashed
        self._numbers[hashed] = new
        return new

    def _grow(self, room: int) -> None:
        more = room - len(self.blocks)
        self.planes = [np.pad(plane, ((0, more), (0, 0))) for plane in self.planes]
        self.blocks = np.pad(self.blocks, (0, more))
        self.hashes = np.pad(self.hashes, (0, more))


def unpack(rows: U64s) -> Bits:
    """Rows of words, shape (n, words), as 0 and 1, shape (n, words * 64); bit i of the row is column i."""
    return np.unpackbits(np.ascontiguousarray(rows, dtype="<u8").view(np.uint8), axis=1, bitorder="little")
