"""The approximate prefix index: what each endpoint should hold, judged by what this picker sent there.

In: block keys (see `blocks`) of a request and the endpoint it went to. Out: for new block keys, how many leading blocks
each endpoint holds, for all endpoints at once. Each endpoint forgets by its own LRU, sized like its cache.

A radix tree of *runs*. Keys are chained, so equal keys at one place mean that all keys before are equal: a run of
thousands of blocks is compared by its last key, and where prompts part is found by bisection. A session that grows
extends its run in place; a prompt that parts from another splits one. Cost follows the new part and the number of
branches, not the length. Per run and endpoint there is one *holding*: how much of the run the endpoint holds and when
it was last used. Invariants:

- an endpoint that holds a block of a run holds all of the runs before it (leading matches only);
- the key of every 64th block from the root leads to the run that has it (`chain`);
- in an endpoint's list of holdings, oldest first, a run comes before the runs that lead to it; so eviction takes blocks
  from the end of the least recently used prompt, in the very order of a per-block LRU that frees last blocks first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np

from epp.kvcache.blocks import Keys

E = TypeVar("E", bound=Hashable)

RUN_BYTES = 700
"""A run without its keys: object, array header, its entry in the parent, its two dicts (measured, CPython 3.11)."""
HOLDING_BYTES = 200
LANDMARK = 64
"""Every so many blocks from the root a key is a landmark, by which its chain is found."""
LANDMARK_BYTES = 100


class History(Generic[E]):
    """Keys -> endpoints, bounded per endpoint in blocks and altogether in bytes (an estimate kept as runs change)."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evicted_blocks = 0
        """Block holdings dropped for want of room, of either kind."""
        self._root: _Run[E] = _Run(np.empty(0, dtype=np.uint64), None)
        self._owners: dict[E, _Owner[E]] = {}
        self._landmarks: dict[int, _Run[E]] = {}
        """Key of every `LANDMARK`th block -> its run."""
        self._uses = 0

    def __len__(self) -> int:
        """Blocks held, counted once per endpoint."""
        return sum(owner.blocks for owner in self._owners.values())

    def held(self, endpoint: E) -> int:
        """Blocks the endpoint holds."""
        owner = self._owners.get(endpoint)
        return owner.blocks if owner is not None else 0

    def match(self, keys: Keys) -> dict[E, int]:
        """Endpoint -> leading blocks of `keys` it holds, for every endpoint that holds at least one."""
        matched: dict[E, int] = {}
        for run, start, length in reversed(self._walk(keys)):
            if len(run.holders) == len(matched):
                continue  # all holders of this run hold a later one too
            for endpoint, holding in run.holders.items():
                if endpoint not in matched:
                    held = holding.length
                    matched[endpoint] = start + (held if held < length else length)  # min() takes twice as long
        return matched

    def insert(self, endpoint: E, keys: Keys, capacity: int) -> int:
        """Note that `endpoint` was sent `keys`; it holds at most `capacity` blocks. Returns a token for `retract`."""
        if not len(keys) or capacity <= 0:
            return 0
        owner = self._owners.get(endpoint)
        if owner is None:
            owner = self._owners[endpoint] = _Owner(endpoint)
        self._uses += 1
        for run, _, length in reversed(self._lay(owner, keys)):
            self._touch(owner, run, length)
        while owner.blocks > capacity:
            oldest = owner.oldest()
            self._evict(oldest, min(oldest.length, owner.blocks - capacity))
        while self.bytes > self.max_bytes and (aged := self._oldest()) is not None:
            self._evict(aged, aged.length)
        return self._uses

    def retract(self, endpoint: E, keys: Keys, token: int, *, keep: int) -> None:
        """Take back the insertion that returned `token`, but for the first `keep` blocks, known before it.

        Blocks that were used again since stay: another request has put them there.
        """
        for run, start, _ in reversed(self._walk(keys)):
            holding = run.holders.get(endpoint)
            if holding is None:
                continue
            surplus = min(start + holding.length - keep, holding.length)
            if holding.used != token or surplus <= 0:
                return
            self._shrink(holding, surplus)

    def remove(self, endpoint: E) -> None:
        """Forget an endpoint and all it held."""
        owner = self._owners.pop(endpoint, None)
        while owner is not None and owner.blocks:
            oldest = owner.oldest()
            self._shrink(oldest, oldest.length)

    def chain(self, depth: int, key: int) -> Keys | None:
        """The keys from the root to `key`, the `depth`th of its chain, a landmark; None if it is not known."""
        run = self._landmarks.get(key)
        if run is None or not run.start < depth <= run.start + run.size or run.keys.item(depth - run.start - 1) != key:
            return None
        return run.chain(depth - run.start)

    def endpoints(self) -> tuple[E, ...]:
        """Those that hold something, or did."""
        return tuple(self._owners)

    def chains(self, endpoint: E) -> Iterator[Keys]:
        """What an endpoint holds, as chains from the root, used longest ago first. Nothing may change meanwhile."""
        owner = self._owners.get(endpoint)
        holding = owner.end.newer if owner is not None else None
        while owner is not None and holding is not None and holding is not owner.end:
            deeper = [child.holders.get(endpoint) for child in holding.run.children.values()]
            if all(other is None or other.used != holding.used for other in deeper):  # its own use, not a part of one
                yield holding.run.chain(holding.length)
            holding = holding.newer

    def _walk(self, keys: Keys) -> list[tuple[_Run[E], int, int]]:
        """The runs along `keys` from the root: (run, its place in `keys`, how much of it equals `keys`)."""
        path = []
        run, at, end = self._root, 0, len(keys)
        while at < end:
            child = run.children.get(keys.item(at))
            if child is None:
                break
            length = min(child.size, end - at)
            if child.keys.item(length - 1) != keys.item(at + length - 1):
                length = _common(child.keys, keys, at, length)
            path.append((child, at, length))
            at += length
            if length < child.size:
                break
            run = child
        return path

    def _lay(self, owner: _Owner[E], keys: Keys) -> list[tuple[_Run[E], int, int]]:
        """Make the runs along `keys` so that each is covered from its start; like `_walk`, and to the end of `keys`."""
        path = self._walk(keys)
        last, at, length = path[-1] if path else (self._root, 0, 0)
        rest = keys[at + length :]
        if length < last.size:
            holding = last.holders.get(owner.endpoint)
            if len(rest) or (holding is not None and holding.length > length):
                self._split(last, length)
        if not len(rest):
            return path
        if last is self._root or last.children:
            run = last.children[rest.item(0)] = _Run(rest.copy(), last, at + length)
            self.bytes += RUN_BYTES + run.keys.nbytes
            self._mark(run, 0)
            path.append((run, at + length, len(rest)))
        else:
            self._extend(last, rest)
            path[-1] = (last, at, last.size)
        return path

    def _touch(self, owner: _Owner[E], run: _Run[E], length: int) -> None:
        """The first `length` blocks of `run` were used now by `owner`."""
        holding = run.holders.get(owner.endpoint)
        if holding is None:
            holding = run.holders[owner.endpoint] = _Holding(run, owner, 0, self._uses)
            self.bytes += HOLDING_BYTES
        else:
            holding.unlink()
        if length > holding.length:
            owner.blocks += length - holding.length
            holding.length = length
        holding.used = self._uses
        holding.link(before=owner.end)

    def _extend(self, run: _Run[E], rest: Keys) -> None:
        """Append keys to a run without children; its buffer grows by an eighth more than needed."""
        size = run.size + len(rest)
        if size > len(run.keys):
            buffer = np.empty(size + size // 8, dtype=np.uint64)
            buffer[: run.size] = run.keys[: run.size]
            self._replace(run, buffer)
        run.keys[run.size : size] = rest
        before, run.size = run.size, size
        self._mark(run, before)

    def _split(self, run: _Run[E], at: int) -> None:
        """Cut a run in two: it keeps its first `at` keys, a new child takes the rest with all that hangs on it."""
        tail = _Run(run.keys[at : run.size].copy(), run, run.start + at)
        tail.children, run.children = run.children, {tail.keys.item(0): tail}
        for child in tail.children.values():
            child.parent = tail
        self.bytes += RUN_BYTES + tail.keys.nbytes
        self._unmark(run, at)
        self._mark(tail, 0)
        run.size = at
        self._replace(run, run.keys[:at].copy())
        for endpoint, holding in run.holders.items():
            if holding.length > at:
                rest = tail.holders[endpoint] = _Holding(tail, holding.owner, holding.length - at, holding.used)
                rest.link(before=holding)
                holding.length = at
                self.bytes += HOLDING_BYTES

    def _evict(self, holding: _Holding[E], blocks: int) -> None:
        self.evicted_blocks += blocks
        self._shrink(holding, blocks)

    def _shrink(self, holding: _Holding[E], blocks: int) -> None:
        """Drop the last `blocks` of a holding, and the keys that nobody holds any more."""
        run, before = holding.run, holding.length
        holding.length -= blocks
        holding.owner.blocks -= blocks
        if not holding.length:
            holding.unlink()
            del run.holders[holding.owner.endpoint]
            self.bytes -= HOLDING_BYTES
        if not run.holders:
            assert run.parent is not None
            del run.parent.children[run.keys.item(0)]
            self.bytes -= RUN_BYTES + run.keys.nbytes
            self._unmark(run, 0)
        elif before == run.size and not run.children:
            size = max(other.length for other in run.holders.values())
            self._unmark(run, size)
            run.size = size
            if run.size < len(run.keys) // 2:
                self._replace(run, run.keys[: run.size].copy())

    def _mark(self, run: _Run[E], offset: int) -> None:
        """Landmarks of a run, from its block `offset` on."""
        for key in run.landmarks(offset):
            if key not in self._landmarks:
                self.bytes += LANDMARK_BYTES
            self._landmarks[key] = run

    def _unmark(self, run: _Run[E], offset: int) -> None:
        for key in run.landmarks(offset):
            if self._landmarks.get(key) is run:
                del self._landmarks[key]
                self.bytes -= LANDMARK_BYTES

    def _replace(self, run: _Run[E], buffer: Keys) -> None:
        self.bytes += buffer.nbytes - run.keys.nbytes
        run.keys = buffer

    def _oldest(self) -> _Holding[E] | None:
        """The least recently used holding of all endpoints."""
        return min((o.oldest() for o in self._owners.values() if o.blocks), key=lambda h: h.used, default=None)


class _Run(Generic[E]):
    """Consecutive keys without a branch: `keys[:size]` (the rest of the buffer is room to grow)."""

    __slots__ = ("children", "holders", "keys", "parent", "size", "start")

    def __init__(self, keys: Keys, parent: _Run[E] | None, start: int = 0) -> None:
        self.keys = keys
        self.size = len(keys)
        self.parent = parent
        self.start = start
        """Blocks before it."""
        self.children: dict[int, _Run[E]] = {}
        """By first key."""
        self.holders: dict[E, _Holding[E]] = {}

    def landmarks(self, offset: int) -> list[int]:
        """Those of its keys from `offset` on that are landmarks."""
        first = offset + (-(self.start + offset + 1)) % LANDMARK
        keys: list[int] = self.keys[first : self.size : LANDMARK].tolist()
        return keys

    def chain(self, length: int) -> Keys:
        """The keys from the root to its first `length`."""
        parts, run = [self.keys[:length]], self.parent
        while run is not None:
            parts.append(run.keys[: run.size])
            run = run.parent
        return np.concatenate(parts[::-1])


class _Holding(Generic[E]):
    """The first `length` blocks of a run at one endpoint; a link in that endpoint's list, oldest first."""

    __slots__ = ("length", "newer", "older", "owner", "run", "used")

    def __init__(self, run: _Run[E], owner: _Owner[E], length: int, used: int) -> None:
        self.run = run
        self.owner = owner
        self.length = length
        self.used = used
        self.older: _Holding[E] | None = None
        self.newer: _Holding[E] | None = None

    def link(self, *, before: _Holding[E]) -> None:
        """Take the place just older than `before`."""
        older = before.older
        assert older is not None
        self.older, self.newer = older, before
        older.newer = before.older = self

    def unlink(self) -> None:
        older, newer = self.older, self.newer
        assert older is not None
        assert newer is not None
        older.newer, newer.older = newer, older


class _Owner(Generic[E]):
    """An endpoint's list of holdings, a ring closed by `end`, and how many blocks they sum up to."""

    __slots__ = ("blocks", "end", "endpoint")

    def __init__(self, endpoint: E) -> None:
        self.endpoint = endpoint
        self.blocks = 0
        self.end: _Holding[E] = _Holding(_Run(np.empty(0, dtype=np.uint64), None), self, 0, 0)
        self.end.older = self.end.newer = self.end

    def oldest(self) -> _Holding[E]:
        """Only while `blocks` > 0."""
        assert self.end.newer is not None
        return self.end.newer


def _common(run: Keys, keys: Keys, at: int, length: int) -> int:
    """How many of the first `length` keys of `run` equal those of `keys` from `at`: at least 1, fewer than `length`.

    Bisection is exact because the keys are chained: once different, always different.
    """
    same, different = 1, length
    while different - same > 1:
        middle = (same + different) // 2
        if run.item(middle - 1) == keys.item(at + middle - 1):
            same = middle
        else:
            different = middle
    return same
