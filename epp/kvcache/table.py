"""A compact hash table from 64-bit numbers to 64-bit numbers, for millions of entries without an object each.

In: arrays of keys (and values), or one of each as plain integers. Out: arrays of values, 0 where a key is absent; so 0
is no value to store. 16 bytes a slot and half a byte of bookkeeping, between 53 and 66 % of the slots in use: 25 to 31
bytes an entry, all of it in arrays that the garbage collector never looks into.

Slots lie in buckets of four. A key goes into its home bucket, or when that is full into the next that is not; every
bucket counts the entries that passed it by, so a search knows whether to go on, and a removal only empties a slot and
takes the counts back: no tombstones, nothing to clean up. When the slots run short a table larger by a quarter is
begun, and every write moves some buckets over: no write waits for the whole. `bench/index_micro.py` measures it.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

U64s = NDArray[np.uint64]
Slots = NDArray[np.intp]

_GOLDEN = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1
_HALF = np.uint64(32)
_WAY = 4
"""Slots of a bucket."""
_LOAD = 0.66
"""Share of the slots in use at which a table grows; by a quarter, so more than half stay in use."""
_SMALLEST = 16
"""Buckets of an empty table."""
_MOVE = 512
"""Buckets moved at once while a table grows: a fraction of a millisecond."""
_FEW = 24
"""So many keys are handled faster one by one than by another round of numpy's calls."""
_WHICH_BYTE = np.uint32(1 << 22 | 2 << 14 | 3 << 6)
"""Times 1, 1 << 8, 1 << 16 or 1 << 24 it has 0, 1, 2 or 3 in its two highest bits."""
_WINDOW = np.arange(4, dtype=np.intp)
"""What a search looks at behind the home bucket, at once."""


class U64Table:
    """Keys and values are any 64-bit numbers; the value 0 means absent."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all entries and give the memory back."""
        self._new = _Slab(_SMALLEST)
        self._old: _Slab | None = None
        """Being emptied into `_new`, from its first bucket on."""
        self._moved = 0
        self._debt = 0
        """Buckets that writes owe to the move."""
        self._hand = 0

    def __len__(self) -> int:
        return self._new.used + (self._old.used if self._old else 0)

    @property
    def nbytes(self) -> int:
        return self._new.nbytes + (self._old.nbytes if self._old else 0)

    @property
    def buckets(self) -> int:
        """Buckets that `scan` goes through."""
        return self._new.buckets

    @property
    def growing(self) -> bool:
        return self._old is not None

    def get(self, key: int) -> int:
        """The value of one key, 0 if absent."""
        key = key or _GOLDEN
        slot = self._new.find(key)
        if slot >= 0:
            return self._new.value_view[slot]
        if self._old is not None and (slot := self._old.find(key)) >= 0:
            return self._old.value_view[slot]
        return 0

    def put(self, key: int, value: int) -> None:
        """Store one value, not 0."""
        key = key or _GOLDEN
        slab = self._new
        slot = slab.find(key)
        if slot < 0 and self._old is not None and (slot := self._old.find(key)) >= 0:
            slab = self._old
        if slot >= 0:
            slab.value_view[slot] = value
            return
        self._make_room(1)
        self._new.add(key, value)

    def pop(self, key: int) -> int:
        """Remove one key; its value, 0 if it was absent."""
        key = key or _GOLDEN
        for slab in (self._new, self._old):
            if slab is not None and (slot := slab.find(key)) >= 0:
                value = slab.value_view[slot]
                slab.remove(key, slot)
                return value
        return 0

    def get_many(self, keys: U64s) -> U64s:
        """Values of `keys`, same shape, 0 where absent."""
        keys = _nonzero(keys)
        slots = self._new.find_many(keys)
        values: U64s = self._new.values.take(slots, mode="wrap")
        absent = (slots < 0).nonzero()[0]
        if len(absent):
            values[absent] = 0
            if self._old is not None:
                slots = self._old.find_many(keys[absent])
                found = slots >= 0
                values[absent[found]] = self._old.values[slots[found]]
        return values

    def put_many(self, keys: U64s, values: U64s) -> None:
        """Store `values`, none of them 0, under `keys`, of the same shape; of equal keys the last one counts."""
        keys = _nonzero(keys)
        for slab in (self._new, self._old):
            if slab is None or not len(keys):
                continue
            slots = slab.find_many(keys)
            found = slots >= 0
            slab.values[slots[found]] = values[found]
            if found.any():
                keys, values = keys[~found], values[~found]
        if len(keys):
            once, last = np.unique(keys[::-1], return_index=True)
            if len(once) < len(keys):
                keys, values = once, values[::-1][last]
            self.add_many(keys, values)

    def add_many(self, keys: U64s, values: U64s) -> None:
        """Like `put_many`, for keys that are known to be absent and to differ from each other."""
        self._make_room(len(keys))
        self._new.add_many(_nonzero(keys), values)

    def pop_many(self, keys: U64s) -> None:
        """Remove `keys`; those that are absent do not matter."""
        keys = _nonzero(keys)
        for slab in (self._new, self._old):
            if slab is not None:
                slots = slab.find_many(keys)
                found = slots >= 0
                if found.any():
                    slab.remove_many(keys[found], slots[found])
                    keys = keys[~found]

    def settle(self) -> None:
        """Finish growing now."""
        if self._old is not None:
            self._move(self._old.buckets)

    def scan(self, buckets: int) -> tuple[U64s, U64s]:
        """Keys and values of the next `buckets` buckets, going round and round: an arbitrary sample of the entries.

        While the table grows, entries that have not been moved yet are not seen.
        """
        slab = self._new
        start = self._hand if self._hand < slab.buckets else 0
        self._hand = min(start + buckets, slab.buckets)
        part = slice(start * _WAY, self._hand * _WAY)
        taken = np.flatnonzero(slab.keys[part])
        return slab.keys[part][taken], slab.values[part][taken]

    def _make_room(self, entries: int) -> None:
        """Before `entries` are added: begin to grow if they are too many, and move on if already growing."""
        if self._old is not None:
            self._debt += 8 * entries
            if self._debt >= _MOVE:
                self._move(self._debt)
        wanted = len(self) + entries
        if wanted > self._new.buckets * _WAY * _LOAD:
            self.settle()
            self._old, self._moved, self._debt = self._new, 0, 0
            self._new = _Slab(max(self._old.buckets * 5 // 4, int(wanted / (_WAY * _LOAD)) + 1))
            if not self._old.used:
                self._old = None

    def _move(self, buckets: int) -> None:
        old = self._old
        assert old is not None
        self._debt = 0
        end = min(self._moved + buckets, old.buckets)
        part = slice(self._moved * _WAY, end * _WAY)
        taken = np.flatnonzero(old.keys[part]) + part.start
        self._new.add_many(old.keys[taken], old.values[taken])
        old.keys[taken] = 0  # the counts stay: what passed these buckets by is still to be found
        old.used -= len(taken)
        self._moved = end
        if end == old.buckets:
            self._old = None


class _Slab:
    """One array of buckets of fixed number. Keys are not 0 here: 0 marks a free slot."""

    __slots__ = ("buckets", "key_view", "keys", "passed", "passed_view", "rows", "used", "value_view", "values")

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.used = 0
        self.keys: U64s = _zeros(buckets * _WAY)
        self.rows = self.keys.reshape(buckets, _WAY)
        self.values: U64s = _zeros(buckets * _WAY)
        self.passed = np.zeros(buckets, dtype=np.uint16)
        """Of each bucket, how many entries lie behind it because it was full."""
        self.key_view, self.value_view, self.passed_view = self.keys.data, self.values.data, self.passed.data

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.passed.nbytes

    def find(self, key: int) -> int:
        """The slot of a key, -1 if absent. Plain integers: 0.6 us, where one call of numpy takes as long."""
        keys, passed = self.key_view, self.passed_view
        bucket = ((key * _GOLDEN & _U64) >> 32) * self.buckets >> 32
        while True:
            slot = bucket * _WAY
            if keys[slot] == key:
                return slot
            if keys[slot + 1] == key:
                return slot + 1
            if keys[slot + 2] == key:
                return slot + 2
            if keys[slot + 3] == key:
                return slot + 3
            if not passed[bucket]:
                return -1
            bucket = bucket + 1 if bucket + 1 < self.buckets else 0

    def add(self, key: int, value: int, bucket: int = -1) -> None:
        """Store an absent key; there must be room. `bucket`, if given, is where the search for a free slot goes on."""
        keys = self.key_view
        if bucket < 0:
            bucket = ((key * _GOLDEN & _U64) >> 32) * self.buckets >> 32
            self.used += 1
        while True:
            for slot in range(bucket * _WAY, bucket * _WAY + _WAY):
                if not keys[slot]:
                    keys[slot] = key
                    self.value_view[slot] = value
                    return
            self.passed_view[bucket] += 1
            bucket = bucket + 1 if bucket + 1 < self.buckets else 0

    def remove(self, key: int, slot: int) -> None:
        """Empty the slot in which `key` lies."""
        self.key_view[slot] = 0
        self.used -= 1
        bucket = ((key * _GOLDEN & _U64) >> 32) * self.buckets >> 32
        while bucket != slot // _WAY:
            self.passed_view[bucket] -= 1
            bucket = bucket + 1 if bucket + 1 < self.buckets else 0

    def homes(self, keys: U64s) -> Slots:
        """Home buckets. The product spreads keys that are small or in sequence over all of them."""
        hashed = keys * np.uint64(_GOLDEN)
        hashed >>= _HALF
        hashed *= np.uint64(self.buckets)
        hashed >>= _HALF
        return hashed.view(np.intp)

    def find_many(self, keys: U64s) -> Slots:
        """Slots of `keys`, same shape, -1 where absent."""
        slots = self.homes(keys)
        rows = self.rows.take(slots, axis=0, mode="wrap")
        equal = (rows.ravel() == keys.repeat(_WAY)).view(np.uint32)  # of each word at most one byte is 1
        missing = (equal == 0).nonzero()[0]
        bucket = slots[missing]
        equal *= _WHICH_BYTE
        equal >>= np.uint32(30)
        slots *= _WAY
        slots += equal
        if len(missing):
            slots[missing] = -1
            self._find_further(keys, missing[self.passed[bucket] > 0], slots)
        return slots

    def _find_further(self, keys: U64s, rest: Slots, slots: Slots) -> None:
        """Put the slots of those of the keys at `rest` that lie behind their home bucket into `slots`."""
        bucket = self.homes(keys[rest]) + 1 if len(rest) > _FEW else rest
        while len(rest) > _FEW:
            rows = self.rows.take(bucket[:, None] + _WINDOW, axis=0, mode="wrap")
            hits = (rows == keys[rest][:, None, None]).ravel().nonzero()[0]
            at = hits // (_WAY * len(_WINDOW))
            slots[rest[at]] = (bucket[at] * _WAY + hits % (_WAY * len(_WINDOW))) % len(self.keys)
            left = (slots[rest] < 0).nonzero()[0]
            passed = self.passed.take(bucket[left][:, None] + _WINDOW, mode="wrap").all(axis=1)
            rest, bucket = rest[left[passed]], bucket[left[passed]] + len(_WINDOW)
        for i in rest.tolist():
            slots[i] = self.find(keys.item(i))

    def add_many(self, keys: U64s, values: U64s) -> None:
        """Store keys that are absent and differ; there must be room."""
        self.used += len(keys)
        bucket = self.homes(keys)
        while len(keys):
            slot = (self.rows.take(bucket, axis=0) == 0).argmax(axis=1)
            slot += bucket * _WAY
            room = self.keys.take(slot) == 0
            ready = room.nonzero()[0]
            self.keys[slot[ready]] = keys[ready]
            won = self.keys.take(slot) == keys  # of several that chose one slot, the last one written has it
            done = won.nonzero()[0]
            self.values[slot[done]] = values[done]
            lost = (~won).nonzero()[0]
            if len(lost) <= _FEW:
                for i in lost.tolist():
                    self.add(keys.item(i), values.item(i), bucket.item(i))
                return
            full = (~room).nonzero()[0]
            np.add.at(self.passed, bucket[full], 1)
            bucket[full] += 1
            keys, values, bucket = keys[lost], values[lost], bucket[lost] % self.buckets

    def remove_many(self, keys: U64s, slots: Slots) -> None:
        """Empty the slots in which `keys` lie; equal keys may be repeated."""
        away = np.flatnonzero(self.homes(keys) != slots // _WAY)
        self.used -= int(np.count_nonzero(self.keys[np.unique(slots)]))
        self.keys[slots] = 0
        for key, slot in set(zip(keys[away].tolist(), slots[away].tolist(), strict=True)):
            bucket = ((key * _GOLDEN & _U64) >> 32) * self.buckets >> 32
            while bucket != slot // _WAY:
                self.passed_view[bucket] -= 1
                bucket = bucket + 1 if bucket + 1 < self.buckets else 0


def _zeros(count: int) -> U64s:
    """Zeros, in small pages that are cleared when first touched.

    numpy asks for huge pages, and then a new table's first writes, which are all over it, clear 2 MB each: 60 ms for a
    batch of 64 where small pages take 1.
    """
    if count * 8 < 1 << 22:
        return np.zeros(count, dtype=np.uint64)
    memory = mmap.mmap(-1, count * 8)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint64)


def _nonzero(keys: U64s) -> U64s:
    """The key 0 is kept under another number, which no key is but by a 64-bit accident."""
    return keys if keys.all() else np.where(keys == 0, np.uint64(_GOLDEN), keys)
