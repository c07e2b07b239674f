"""What one worker's events say, written into the block index. Without I/O.

In: decoded events, in order; the prompts we sent to the worker. Out: blocks stored and removed in the index under our
own keys, which are chained from the events' token ids (`extend`), so a worker's way of hashing does not matter.

The ledger remembers which key each engine hash stands for, as long as the worker holds the block in any *place* (tier
and attention group), and how many copies of it there are: vLLM tells of every copy that comes or goes, and two requests
may fill the same block. Only a run of blocks from the beginning of a prompt that is wholly there already counts as told
again (`kv_cache_report_mode=full`): a prompt that repeats one finds its blocks, it does not compute them once more. But
for the last, so a single block is a copy: were it none, losing one would hide every prompt that begins with it.

An event may name a parent that is not known, when another one was lost or comes later in the batch. Its blocks are

- anchored, if their tokens lie in exactly one way in a prompt that we sent there; else
- parked, and adopted when the parent appears. Bounded: the oldest are dropped and counted.

Events by hash alone (a CPU tier's) are joined by the engine hash, and wait likewise if it is unknown.

Source: vllm/v1/core/block_pool.py, vllm/distributed/kv_events.py (0.32); events captured from it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from epp.endpoint import Endpoint
from epp.kvcache.blocks import Keys, block_extras, extend, extend_each, token_root
from epp.kvcache.events.decoder import Cleared, Event, Hashes, Ids, Removed, Stored
from epp.kvcache.index import BlockIndex, Holder, blocks_needed
from epp.kvcache.table import U64Table
from epp.kvcache.tier import Tier

COUNTERS = (
    "stored_blocks",
    "removed_blocks",
    "cleared",
    "parked",  # blocks that wait for their parent, or for their tokens
    "adopted",  # parked blocks whose parent or tokens came
    "anchored",  # blocks of unknown parent found in a prompt we sent
    "orphans_dropped",  # parked blocks dropped for want of room
    "unknown_removals",  # blocks removed that were not known to be there
    "rekeyed",  # engine hashes told with other tokens than before
    "too_many_places",  # blocks of more groups and tiers than are kept
)

_PLACES = 16
"""Tiers times groups: a place has four bits of a record."""
_COPIES = 15
_MAX_SENT = 64
_BUNDLE = 4
"""So few events are as quick one by one."""


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Bounds of what waits for something unknown."""

    parked_blocks: int = 65_536
    parked_bytes: int = 32 << 20
    sent_tokens: int = 1 << 20
    """Token ids of prompts we sent that are remembered, four bytes each and more for keys; at least the last prompt."""
    departed: int = 16_384
    """Engine hashes remembered (twice as many at most) after their last copy went: children may yet name them."""


class ServedAdapters:
    """The adapters an endpoint serves, as they are known when asked."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __contains__(self, name: object) -> bool:
        return name in self._endpoint.parents


@dataclass(slots=True, eq=False)
class _Parked:
    event: Stored
    gone: set[int] = field(default_factory=set)
    """Hashes removed while the event waited."""

    @property
    def nbytes(self) -> int:
        return self.event.ids.nbytes + self.event.hashes.nbytes


@dataclass(slots=True, eq=False)
class _Sent:
    """A prompt we sent: block i has the key `keys[i]` and the tokens whose sum is `sums[i]`."""

    ids: Ids
    keys: Keys
    block_size: int
    adapter: str
    sums: Keys | None = None


@dataclass(frozen=True, slots=True)
class Singles:
    """Single blocks that entered a tier, alike in all but hash, parent and tokens: what a decoding step fills."""

    events: tuple[Stored, ...]


def bundled(events: Iterable[Event]) -> list[Event | Singles]:
    """The same events in order, those that follow each other and can be applied at once put together.

    A step of a worker stores or evicts a block for each of many requests; one by one they cost three times as much.
    """
    out: list[Event | Singles] = []
    for key, group in groupby(events, _kind):
        run = list(group)
        if key is None or len(run) < _BUNDLE:
            out += run
        elif isinstance(run[0], Removed):
            gone = np.concatenate([e.hashes for e in run if isinstance(e, Removed)])
            out.append(Removed(gone, run[0].tier, run[0].group))
        else:
            out.append(Singles(tuple(e for e in run if isinstance(e, Stored))))
    return out


def _kind(event: Event) -> tuple[object, ...] | None:
    """What events have in common that may be put together; None: by itself."""
    match event:
        case Removed():
            return event.tier, event.group
        case Stored() if len(event.hashes) == 1 and event.parent is not None and len(event.ids) and not event.extras:
            return event.tier, event.group, event.block_size, event.kind, event.window, event.adapter
    return None


class Ledger:
    """One worker's blocks. `model` is the registered name of its base model, `adapters` names it serves besides."""

    def __init__(
        self,
        index: BlockIndex,
        holder: Holder,
        model: str,
        *,
        adapters: Container[str] = (),
        settings: LedgerSettings | None = None,
    ) -> None:
        self.holder = holder
        self.adapters = adapters
        """Names that mean an adapter where an event of an older worker tells only a bare string."""
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.block_size = 0
        """Tokens of a block, as the last event of group 0 told; 0 before any."""
        self._index = index
        self.model = model
        self._settings = settings or LedgerSettings()
        self._epoch = holder.epoch
        self._roots: dict[str, int] = {}
        self._keys = U64Table()
        """Engine hash -> our key."""
        self._copies = U64Table()
        """Engine hash -> four bits of copies by place; absent = one copy in the first place (device, group 0)."""
        self._places: dict[tuple[Tier, int], int] = {(Tier.GPU, 0): 0}
        self._needs: dict[int, int] = {}
        self._exact = True
        """Copies are counted only while nothing was lost; after a loss the first removal takes a block out."""
        self._departed: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._parked: OrderedDict[_Parked, None] = OrderedDict()
        self._parked_blocks = 0
        self._parked_bytes = 0
        self._by_parent: dict[int, list[_Parked]] = {}
        self._by_hash: dict[int, list[_Parked]] = {}
        self._nameless: OrderedDict[tuple[int, Tier, int], None] = OrderedDict()
        """Told by hash alone, the hash unknown."""
        self._sent: deque[_Sent] = deque()
        self._sent_tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what the ledger remembers of blocks in place."""
        return self._keys.nbytes + self._copies.nbytes

    def __len__(self) -> int:
        """Blocks (engine hashes) the worker holds anywhere."""
        return len(self._keys)

    @property
    def waiting(self) -> int:
        """Blocks parked or told by an unknown hash alone."""
        return self._parked_blocks + len(self._nameless)

    def apply(self, event: Event | Singles, now: float) -> None:
        """Do what one event says, or a bundle of them. `now`: the picker's clock, seconds."""
        match event:
            case Stored():
                self._store(event, now)
            case Singles(events):
                self._store_singles(events, now)
            case Removed():
                self._remove(event)
            case Cleared():
                self.counters["cleared"] += 1
                self.clear()

    def clear(self) -> None:
        """The worker holds nothing: it says so, or it is a new process.

        vLLM's AllBlocksCleared names no tier. What survives on a lower tier is forgotten too: it is not announced
        again, but a promise that is not kept costs more than a match that is missed.
        """
        self._index.clear(self.holder)
        self._epoch = self.holder.epoch
        self._keys.clear()
        self._copies.clear()
        self._departed = ({}, {})
        self._parked.clear()
        self._by_parent.clear()
        self._by_hash.clear()
        self._nameless.clear()
        self._parked_blocks = self._parked_bytes = 0
        self._exact = True

    def lost(self) -> None:
        """Events were lost: removals may be among them, so the copies counted so far may be too many."""
        self._exact = self._exact and not len(self._keys)

    def sent(self, ids: Ids, keys: Keys, block_size: int, adapter: str = "") -> None:
        """A prompt goes to this worker: its token ids and the keys of its whole blocks. The last 64 are remembered,
        fewer of long ones (`sent_tokens`).
        """
        if len(self._sent) == _MAX_SENT:
            self._sent_tokens -= len(self._sent.popleft().ids)
        self._sent.append(_Sent(ids, keys, block_size, adapter))
        self._sent_tokens += len(ids)
        while self._sent_tokens > self._settings.sent_tokens and len(self._sent) > 1:
            self._sent_tokens -= len(self._sent.popleft().ids)

    def hold(self, keys: Keys, now: float, tier: Tier = Tier.GPU, group: int = 0) -> None:
        """The worker is known to hold these blocks, though no event told (its answer did, or another replica)."""
        if self._place(tier, group) is not None:
            self._index.store(self.holder, self._epoch, keys, tier, now, group)

    def drop(self, keys: Keys) -> None:
        """The worker is known not to hold these blocks on any tier, though no event told."""
        for tier, group in self._places:
            self._index.remove(self.holder, self._epoch, keys, tier, group)

    # -- stored ---------------------------------------------------------------------------------------------------

    def _store(self, event: Stored, now: float) -> None:
        if not len(event.ids):
            self._store_by_hash(event, now)
            return
        if event.group == 0:
            self.block_size = event.block_size
        if event.kind:
            self._learn_group(event)
        parent = self._parent_key(event)
        if parent is not None:
            self._write(event, self._chain(parent, event), now)
        elif (keys := self._anchor(event, now)) is not None:
            self.counters["anchored"] += len(keys)
            self._write(event, keys, now)
        else:
            self._park(event)

    def _store_singles(self, events: tuple[Stored, ...], now: float) -> None:
        """All at once, where all are new and their parents are known."""
        first = events[0]
        hashes = np.concatenate([e.hashes for e in events])
        parents = self._keys.get_many(np.array([e.parent for e in events], dtype=np.uint64))
        new = not self._keys.get_many(hashes).any() and len(set(hashes.tolist())) == len(hashes)
        if not new or not parents.all():
            for event in events:
                self._store(event, now)
            return
        if first.group == 0:
            self.block_size = first.block_size
        if first.kind:
            self._learn_group(first)
        ids = np.concatenate([e.ids for e in events]).reshape(len(events), first.block_size)
        self._enter(hashes, extend_each(parents, ids), first.tier, first.group, now, whole=False)
        if self._by_parent or self._nameless:
            for event in events:
                self._reunite(event, now)

    def _parent_key(self, event: Stored) -> int | None:
        """The key that the event's blocks follow; None if it is not known."""
        if event.parent is not None:
            key = self._keys.get(event.parent) or self._departed[0].get(event.parent)
            return key or self._departed[1].get(event.parent)
        adapter = self._adapter(event)
        root = self._roots.get(adapter)
        if root is None:
            if len(self._roots) > 1024:
                self._roots.clear()
            root = self._roots[adapter] = token_root(model=self.model, adapter=adapter, salt="")
        return root

    def _adapter(self, event: Stored) -> str:
        """The adapter's name; workers that tell none have it as the first extra of every block."""
        if event.adapter or not event.extras:
            return event.adapter
        name = event.extras[0][0] if event.extras[0] else ""
        return name if name in self.adapters and all(e and e[0] == name for e in event.extras) else ""

    def _chain(self, parent: int, event: Stored) -> Keys:
        if not event.extras:
            return extend(parent, event.ids, event.block_size)
        skip = 1 if not event.adapter and self._adapter(event) else 0
        extras = {i: block_extras(e[skip:]) for i, e in enumerate(event.extras) if len(e) > skip}
        return extend(parent, event.ids, event.block_size, extras)

    def _write(self, event: Stored, keys: Keys, now: float, gone: set[int] | None = None) -> None:
        """Store the blocks of `event`, but for those in `gone`, and whatever waited for them."""
        hashes = event.hashes
        if gone:
            kept = np.array([h not in gone for h in hashes.tolist()])
            hashes, keys = hashes[kept], keys[kept]
        if len(hashes):
            self._enter(hashes, keys, event.tier, event.group, now, whole=event.parent is None and len(hashes) > 1)
        if self._by_parent or self._nameless:
            self._reunite(event, now)

    def _enter(self, hashes: Hashes, keys: Keys, tier: Tier, group: int, now: float, *, whole: bool) -> None:
        """Blocks come into a place. `whole`: the run begins a prompt."""
        place = self._place(tier, group)
        if place is None:
            self.counters["too_many_places"] += len(hashes)
            return
        self.counters["stored_blocks"] += len(hashes)
        if len(hashes) == 1:
            self._enter_one(hashes.item(0), keys.item(0), place)
        else:
            known = self._keys.get_many(hashes)
            if not known.any():
                if len(set(hashes.tolist())) == len(hashes):
                    self._keys.add_many(hashes, keys)
                else:
                    self._keys.put_many(hashes, keys)
                if place:
                    self._copies.put_many(hashes, np.full(len(hashes), 1 << 4 * place, dtype=np.uint64))
            else:
                self._enter_known(hashes, keys, known, place, whole=whole)
        self._index.store(self.holder, self._epoch, keys, tier, now, group)

    def _enter_one(self, engine_hash: int, key: int, place: int) -> None:
        known = self._keys.get(engine_hash)
        if known != key:
            if known:
                self._rekey(_array(known))
            self._keys.put(engine_hash, key)
        if not known:
            if place:
                self._copies.put(engine_hash, 1 << 4 * place)
            return
        copies = self._copies.get(engine_hash) or 1
        here = copies >> 4 * place & _COPIES
        if not here or (self._exact and here < _COPIES):
            self._copies.put(engine_hash, copies + (1 << 4 * place))

    def _enter_known(self, hashes: Hashes, keys: Keys, known: Keys, place: int, *, whole: bool) -> None:
        """Some of the blocks are known already."""
        old = known != 0
        changed = old & (known != keys)
        if changed.any():
            self._rekey(known[changed])
        self._keys.put_many(hashes, keys)
        copies = self._copies.get_many(hashes)
        shift = np.uint64(4 * place)
        copies[old & (copies == 0)] = 1
        here = (copies >> shift) & np.uint64(_COPIES)
        again = whole and bool((here > 0).all())
        more = (here < _COPIES) if self._exact and not again else (here == 0)
        copies[more] += np.uint64(1) << shift
        unusual = copies != 1
        self._copies.put_many(hashes[unusual], copies[unusual])

    def _rekey(self, keys: Keys) -> None:
        """An engine hash stood for other blocks: a wrong anchor, or what hash functions may do once in an age."""
        self.counters["rekeyed"] += len(keys)
        self.drop(keys)

    def _place(self, tier: Tier, group: int) -> int | None:
        place = self._places.get((tier, group))
        if place is None and len(self._places) < _PLACES:
            place = self._places[tier, group] = len(self._places)
        return place

    def _learn_group(self, event: Stored) -> None:
        needed = blocks_needed(event.kind, event.window or None, event.block_size)
        if self._needs.get(event.group) != needed and (event.group in self._needs or len(self._needs) < _PLACES):
            self._needs[event.group] = needed
            self._index.set_groups(self.holder, self._needs)

    # -- what waits -------------------------------------------------------------------------------------------------

    def _store_by_hash(self, event: Stored, now: float) -> None:
        known = self._keys.get_many(event.hashes)
        for i in (known == 0).nonzero()[0].tolist():
            engine_hash = event.hashes.item(i)
            known[i] = self._departed[0].get(engine_hash) or self._departed[1].get(engine_hash) or 0
        there = known != 0
        if there.any():
            self._enter(event.hashes[there], known[there], event.tier, event.group, now, whole=False)
        for engine_hash in event.hashes[~there].tolist():
            self._nameless[engine_hash, event.tier, event.group] = None
            self.counters["parked"] += 1
            if len(self._nameless) > self._settings.parked_blocks:
                self._nameless.popitem(last=False)
                self.counters["orphans_dropped"] += 1

    def _park(self, event: Stored) -> None:
        assert event.parent is not None
        parked = _Parked(event)
        self.counters["parked"] += len(event.hashes)
        self._parked[parked] = None
        self._parked_blocks += len(event.hashes)
        self._parked_bytes += parked.nbytes
        self._by_parent.setdefault(event.parent, []).append(parked)
        for engine_hash in event.hashes.tolist():
            self._by_hash.setdefault(engine_hash, []).append(parked)
        settings = self._settings
        while self._parked_blocks > settings.parked_blocks or self._parked_bytes > settings.parked_bytes:
            oldest = next(iter(self._parked))
            self.counters["orphans_dropped"] += len(oldest.event.hashes)
            self._unpark(oldest)

    def _unpark(self, parked: _Parked) -> None:
        event = parked.event
        assert event.parent is not None
        del self._parked[parked]
        self._parked_blocks -= len(event.hashes)
        self._parked_bytes -= parked.nbytes
        _discard(self._by_parent, event.parent, parked)
        for engine_hash in event.hashes.tolist():
            _discard(self._by_hash, engine_hash, parked)

    def _reunite(self, event: Stored, now: float) -> None:
        """The blocks of `event` are known now: whatever waited for them need wait no more."""
        for engine_hash in event.hashes.tolist() if self._nameless else ():
            for tier in Tier:
                name, key = (engine_hash, tier, event.group), self._keys.get(engine_hash)
                if key and name in self._nameless:
                    del self._nameless[name]
                    self.counters["adopted"] += 1
                    self._enter(_array(engine_hash), _array(key), tier, event.group, now, whole=False)
        ready = [p for h in event.hashes.tolist() for p in self._by_parent.get(h, ())]
        while ready:
            parked = ready.pop()
            child = parked.event
            parent = self._parent_key(child)
            if parent is None or parked not in self._parked:
                continue
            self._unpark(parked)
            self.counters["adopted"] += len(child.hashes) - len(parked.gone)
            keys = self._chain(parent, child)
            # Known before its children look for it, even where the blocks themselves are gone.
            for engine_hash in parked.gone:
                self._depart(engine_hash, keys.item(int((child.hashes == np.uint64(engine_hash)).argmax())))
            kept = np.array([h not in parked.gone for h in child.hashes.tolist()])
            if kept.any():
                self._enter(child.hashes[kept], keys[kept], child.tier, child.group, now, whole=False)
            ready += [p for h in child.hashes.tolist() for p in self._by_parent.get(h, ())]

    def _anchor(self, event: Stored, now: float) -> Keys | None:
        """Keys of the event's blocks, if its tokens lie in the prompts we sent in one way only."""
        if event.extras or not self._sent:
            return None
        blocks, size = len(event.hashes), event.block_size
        wanted = _sums(event.ids, size)
        found: Keys | None = None
        before = 0
        for sent in self._sent:
            if sent.adapter != event.adapter or sent.block_size != size:
                continue
            if sent.sums is None:
                sent.sums = _sums(sent.ids, size)[: len(sent.keys)]
            for at in (sent.sums[1:] == wanted[0]).nonzero()[0].tolist():
                start = at + 1  # an orphan is never the first block of a prompt
                if not np.array_equal(sent.sums[start : start + blocks], wanted):
                    continue
                keys = sent.keys[start : start + blocks]
                if found is not None and keys[0] != found[0]:
                    return None
                found, before = keys, sent.keys.item(start - 1)
        if found is not None and event.parent is not None and event.tier is Tier.GPU:
            # A block that was just computed has its parent beside it.
            self._enter(_array(event.parent), _array(before), Tier.GPU, event.group, now, whole=False)
        return found

    # -- removed ----------------------------------------------------------------------------------------------------

    def _remove(self, event: Removed) -> None:
        place = self._place(event.tier, event.group)
        if place is None:
            self.counters["too_many_places"] += len(event.hashes)
            return
        gone = [key for h in event.hashes.tolist() if (key := self._take(h, event, place))]
        if gone:
            self.counters["removed_blocks"] += len(gone)
            keys = np.array(gone, dtype=np.uint64)
            self._index.remove(self.holder, self._epoch, keys, event.tier, event.group)

    def _take(self, engine_hash: int, event: Removed, place: int) -> int:
        """One copy of a block leaves a place. Its key if it was the last copy there, else 0."""
        key = self._keys.get(engine_hash)
        copies = (self._copies.get(engine_hash) or 1) if key else 0
        here = copies >> 4 * place & _COPIES
        if not here:
            self._take_waiting(engine_hash, event)
            return 0
        left = copies - ((1 if self._exact else here) << 4 * place)
        if not left:
            self._keys.pop(engine_hash)
            self._depart(engine_hash, key)
        if copies != 1:
            if left > 1:
                self._copies.put(engine_hash, left)
            else:
                self._copies.pop(engine_hash)
        return 0 if self._exact and here > 1 else key

    def _take_waiting(self, engine_hash: int, event: Removed) -> None:
        """A block goes that was not known to be there: one that waits, or one never heard of."""
        name = (engine_hash, event.tier, event.group)
        if name in self._nameless:
            del self._nameless[name]
            return
        for parked in self._by_hash.get(engine_hash, ()):
            if (parked.event.tier, parked.event.group) == name[1:] and engine_hash not in parked.gone:
                parked.gone.add(engine_hash)
                return
        self.counters["unknown_removals"] += 1

    def _depart(self, engine_hash: int, key: int) -> None:
        young, _ = self._departed
        if len(young) >= self._settings.departed:
            self._departed = ({}, young)
            young = self._departed[0]
        young[engine_hash] = key


def _array(number: int) -> NDArray[np.uint64]:
    return np.array([number], dtype=np.uint64)


def _discard(lists: dict[int, list[_Parked]], at: int, parked: _Parked) -> None:
    entries = lists.get(at)
    if entries is not None and parked in entries:
        entries.remove(parked)
        if not entries:
            del lists[at]


def _sums(ids: Ids, block_size: int) -> NDArray[np.uint64]:
    """One number for the tokens of each whole block, shape (blocks,), wherever it lies."""
    blocks = len(ids) // block_size
    weights = (np.arange(1, block_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
    matrix = ids[: blocks * block_size].reshape(blocks, block_size).astype(np.uint64)
    # Tokens are spread first: sums of small numbers with few bits would meet too often.
    matrix *= np.uint64(0xD1342543DE82EF95)
    matrix ^= matrix >> np.uint64(29)
    return matrix @ weights
