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
from collections.abc import Iterator

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
_MOVE_PER_ENTRY = 8
"""Buckets moved for each entry added while a table grows."""
_PAGE = mmap.PAGESIZE
_PAGED = 1 << 18 if hasattr(mmap, "MADV_NOHUGEPAGE") else 1 << 62
"""Bytes of keys from which on a table asks the system for pages, where that can take single ones back (Linux)."""
MOST_BYTES = 33 if _PAGED < 1 << 62 else 57
"""Of an entry of a table of some ten thousand or more, at any time: while growing, old and new count where the system
cannot take single pages back."""
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
        """While growing: it has the entries whose home in it is not before `_moved`, `_new` has the others."""
        self._moved = 0
        self._debt = 0
        """Buckets that writes owe to the move."""
        self._hand = 0

    def __len__(self) -> int:
        return self._new.used + (self._old.used if self._old else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory. While growing, what has been moved is given back, and the new part is filled in order."""
        if self._old is None:
            return self._new.nbytes
        whole = self._old.nbytes + self._new.nbytes
        if not self._old.paged:
            return whole
        moved = self._moved / self._old.buckets
        return whole - int(moved * self._old.nbytes + (1 - moved) * self._new.nbytes)

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
        slab = self._slab(key)
        slot = slab.find(key)
        return slab.value_view[slot] if slot >= 0 else 0

    def put(self, key: int, value: int) -> None:
        """Store one value, not 0."""
        key = key or _GOLDEN
        slab = self._slab(key)
        slot = slab.find(key)
        if slot >= 0:
            slab.value_view[slot] = value
        else:
            self._make_room(1)
            self._slab(key).add(key, value)

    def pop(self, key: int) -> int:
        """Remove one key; its value, 0 if it was absent."""
        key = key or _GOLDEN
        slab = self._slab(key)
        slot = slab.find(key)
        if slot < 0:
            return 0
        value = slab.value_view[slot]
        slab.remove(key, slot)
        return value

    def get_many(self, keys: U64s) -> U64s:
        """Values of `keys`, same shape, 0 where absent."""
        keys = _nonzero(keys)
        if self._old is None:
            return self._new.get_many(keys)
        values = np.empty_like(keys)
        for slab, part in self._parts(keys):
            values[part] = slab.get_many(keys[part])
        return values

    def put_many(self, keys: U64s, values: U64s) -> None:
        """Store `values`, none of them 0, under `keys`, of the same shape; of equal keys the last one counts."""
        keys = _nonzero(keys)
        absent = []
        for slab, part in self._parts(keys):
            slots = slab.find_many(keys[part])
            found = slots >= 0
            slab.values[slots[found]] = values[part][found]
            absent.append(np.arange(len(keys))[part][~found])
        new = np.concatenate(absent)
        if len(new):
            keys, values = keys[new], values[new]
            once, last = np.unique(keys[::-1], return_index=True)
            if len(once) < len(keys):
                keys, values = once, values[::-1][last]
            self.add_many(keys, values)

    def add_many(self, keys: U64s, values: U64s) -> None:
        """Like `put_many`, for keys that are known to be absent and to differ from each other."""
        self._make_room(len(keys))
        keys = _nonzero(keys)
        for slab, part in self._parts(keys):
            slab.add_many(keys[part], values[part])

    def pop_many(self, keys: U64s) -> None:
        """Remove `keys`; those that are absent do not matter."""
        keys = _nonzero(keys)
        for slab, part in self._parts(keys):
            slots = slab.find_many(keys[part])
            slab.remove_many(np.unique(slots[slots >= 0]))

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

    def parts(self, buckets: int) -> Iterator[tuple[U64s, U64s]]:
        """Keys and values of all entries, so many buckets at a time. Of what changes meanwhile some may be missed, or
        be seen twice."""
        for slab in (self._old, self._new):
            for start in range(0, slab.buckets if slab is not None else 0, buckets):
                assert slab is not None
                part = slice(start * _WAY, (start + buckets) * _WAY)
                taken = np.flatnonzero(slab.keys[part])
                yield slab.keys[part][taken], slab.values[part][taken]

    def _slab(self, key: int) -> _Slab:
        old = self._old
        return old if old is not None and old.home(key) >= self._moved else self._new

    def _parts(self, keys: U64s) -> list[tuple[_Slab, slice | Slots]]:
        """Which of `keys` belong where."""
        if self._old is None:
            return [(self._new, slice(None))]
        in_old = self._old.homes(keys) >= self._moved
        return [(self._old, in_old.nonzero()[0]), (self._new, (~in_old).nonzero()[0])]

    def _make_room(self, entries: int) -> None:
        """Before `entries` are added: begin to grow if they are too many, and move on if already growing."""
        if self._old is not None:
            self._debt += _MOVE_PER_ENTRY * entries
            if self._debt >= _MOVE:
                self._move(self._debt)
        wanted = len(self) + entries
        if wanted > self._new.buckets * _WAY * _LOAD:
            self.settle()
            if self._new.used:
                self._old, self._moved, self._debt = self._new, 0, 0
            self._new = _Slab(max(self._new.buckets * 5 // 4, int(wanted / (_WAY * _LOAD)) + 1))
            if entries > self._new.buckets // _MOVE_PER_ENTRY:
                self.settle()

    def _move(self, buckets: int) -> None:
        old = self._old
        assert old is not None
        self._debt = 0
        end = min(self._moved + buckets, old.buckets)
        slots = old.at_home(self._moved, end)
        self._new.add_many(old.keys[slots], old.values[slots])
        old.keys[slots] = 0  # counts of passers-by stay too high until `old` goes: searches are longer, not wrong
        old.used -= len(slots)
        old.release(self._moved, end)
        self._moved = end
        if end == old.buckets:
            self._old = None


class _Slab:
    """One array of buckets of fixed number. Keys are not 0 here: 0 marks a free slot."""

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.used = 0
        self.paged = buckets * _WAY * 8 >= _PAGED
        """Memory comes from the system page by page, and can be given back so."""
        self._memory = [_map(buckets * _WAY * 8) for _ in range(2)] if self.paged else []
        if self._memory:
            self.keys, self.values = (np.frombuffer(memory, dtype=np.uint64) for memory in self._memory)
        else:
            self.keys, self.values = (np.zeros(buckets * _WAY, dtype=np.uint64) for _ in range(2))
        self.rows = self.keys.reshape(buckets, _WAY)
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
            bucket = self.home(key)
            self.used += 1
        slot = bucket * _WAY
        while keys[slot] and keys[slot + 1] and keys[slot + 2] and keys[slot + 3]:
            self.passed_view[bucket] += 1
            bucket = bucket + 1 if bucket + 1 < self.buckets else 0
            slot = bucket * _WAY
        while keys[slot]:
            slot += 1
        keys[slot] = key
        self.value_view[slot] = value

    def remove(self, key: int, slot: int) -> None:
        """Empty the slot in which `key` lies."""
        self.key_view[slot] = 0
        self.used -= 1
        bucket = self.home(key)
        while bucket != slot // _WAY:
            self.passed_view[bucket] -= 1
            bucket = bucket + 1 if bucket + 1 < self.buckets else 0

    def home(self, key: int) -> int:
        return ((key * _GOLDEN & _U64) >> 32) * self.buckets >> 32

    def homes(self, keys: U64s) -> Slots:
        """Home buckets. The product spreads keys that are small or in sequence over all of them."""
        hashed = keys * np.uint64(_GOLDEN)
        hashed >>= _HALF
        hashed *= np.uint64(self.buckets)
        hashed >>= _HALF
        return hashed.view(np.intp)

    def get_many(self, keys: U64s) -> U64s:
        """Values of `keys`, same shape, 0 where absent."""
        slots = self.find_many(keys)
        values: U64s = self.values.take(slots, mode="wrap")
        absent = (slots < 0).nonzero()[0]
        if len(absent):
            values[absent] = 0
        return values

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

    def remove_many(self, slots: Slots) -> None:
        """Empty these slots, all of them taken and each named once."""
        bucket, end = self.homes(self.keys[slots]), slots // _WAY
        self.keys[slots] = 0
        self.used -= len(slots)
        while len(behind := (bucket != end).nonzero()[0]):
            bucket, end = bucket[behind], end[behind]
            np.subtract.at(self.passed, bucket, 1)
            bucket = (bucket + 1) % self.buckets

    def at_home(self, start: int, end: int) -> Slots:
        """The slots of all entries whose home is one of these buckets; some lie behind them."""
        last = end
        while self.passed_view[(last - 1) % self.buckets] and last < start + self.buckets:
            last += 1
        slots = np.arange(start * _WAY, last * _WAY) % len(self.keys)
        slots = slots[self.keys.take(slots) != 0]
        home = self.homes(self.keys[slots])
        there: Slots = slots[(home >= start) & (home < end)]
        return there

    def release(self, start: int, end: int) -> None:
        """Give back the memory of these buckets, emptied like all before, unless an entry wrapped round to them."""
        first, last = (bucket * _WAY * 8 // _PAGE * _PAGE for bucket in (start, end))
        if last > first and not self.keys[first // 8 : last // 8].any():
            for memory in self._memory:
                memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def _map(size: int) -> mmap.mmap:
    """Zeros, in small pages that are cleared when first touched.

    numpy asks for huge pages, and then a new table's first writes, which are all over it, clear 2 MB each: 60 ms for a
    batch of 64.
    """
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _nonzero(keys: U64s) -> U64s:
    """The key 0 is kept under another number, which no key is but by a 64-bit accident."""
    return keys if keys.all() else np.where(keys == 0, np.uint64(_GOLDEN), keys)
