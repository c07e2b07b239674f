"""The precise index: which endpoint holds which blocks, on which tier, as told by the workers' own KV events.

In: block keys (see `blocks`) stored and removed by *holders* (one per endpoint, handed out by `join`), and speculative
ones of requests just sent there. Out: for the keys of a prompt, how much of its beginning every holder has, for all at
once. No I/O and no clock; one thread.

A block is one entry of a `U64Table`: key -> number of its set of holders (see `sets`), and when it was last stored or
used. So a block costs 16 bytes a slot however many hold it, a match is one vectorised look-up of all keys followed by
an AND over the few stretches whose set is the same, and a holder or a tier goes in one stroke, by taking its bit out of
the sets. All keys are looked up, not probed here and there: what an endpoint holds of a prompt has holes (eviction
takes early blocks, sliding windows drop them, events get lost), and the leading run must be exact.

Rules:
- **Epochs.** Every `clear` begins a new epoch of the holder; a write that names another one never lands.
- **Tiers.** As vLLM looks a prompt up: the leading run on the device, then from its end the run that a connector finds
  on the lower tiers. A block on the device only does not continue a run of the lower tiers.
- **Groups.** Models with several kinds of attention hold each block once a group, and a prompt's first n blocks count
  if every group can go on from there: full attention (and sink) needs all n, a sliding window those of the window
  before n, mamba the state at n alone (vLLM, `HybridKVCacheCoordinator`). `set_groups` says what a holder's groups are;
  without it, group 0 is full attention and others do not matter.
- **Speculation.** A request's blocks count as on the device from the moment it is sent until some grace after its end;
  an event that stores them makes them real, one that removes them takes them back.
- **Bound.** Above `max_bytes`, the entries not stored or used for longest go first: an eighth of each of a sequence of
  samples, so the order is that of age but for samples' noise. `evicted` counts them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epp.kvcache.blocks import Keys
from epp.kvcache.matching import ALL_BLOCKS, Counts, Stretches, blocks_needed, group_match, leading_match
from epp.kvcache.sets import EMPTY, HolderSets, Place
from epp.kvcache.table import MOST_BYTES, U64Table
from epp.kvcache.tier import Tier

__all__ = ["ALL_BLOCKS", "BlockIndex", "Holder", "Matches", "Speculation", "Tier", "blocks_needed"]


_NUMBER = (1 << 32) - 1
"""The low half of a table's value is the set's number, the high half its age in ticks."""
_TICKS_PER_S = 8
_FRESH_TICKS = 60 * _TICKS_PER_S
"""A prompt's blocks are marked as used again when their last use is a minute ago: most turns of a session skip it."""
_SCALAR = 5
"""Fewer keys than this are written one by one: faster than numpy's calls."""
_EXPORT = 1 << 12
"""Buckets exported at once."""
_SAMPLE = 1024
"""Buckets looked at in one step of eviction or of sweeping: some tenths of a millisecond."""


@dataclass(slots=True, eq=False)
class Holder:
    """An endpoint as the index knows it."""

    endpoint: Hashable
    slot: int
    """Its bit's place; -1 once it has left."""
    salt: int
    """Tells its speculative claims from others'."""
    epoch: int = 0
    groups: tuple[tuple[int, int], ...] | None = None
    """(group, blocks needed), or None for one group of full attention."""
    speculating: int = 0
    """Live speculations."""


@dataclass(slots=True, eq=False)
class Speculation:
    """The blocks that a request in flight is expected to bring to its endpoint; `keys` are those not there before."""

    holder: Holder
    epoch: int
    request: str
    keys: Keys
    live: bool = True


@dataclass(slots=True, frozen=True)
class Matches:
    """What each of `holders` has of a prompt's beginning, in blocks; arrays of shape (holders,)."""

    holders: tuple[Holder, ...]
    device: Counts
    """Leading blocks on the device, speculative ones included."""
    usable: Counts
    """Leading blocks that need no computing: `device`, and what follows on lower tiers."""
    by_tier: NDArray[np.int64]
    """Shape (tiers, holders): `usable` by the fastest tier that has the block; row 0 is `device`."""


class BlockIndex:
    """Keys -> holders by tier and group, bounded in bytes."""

    def __init__(self, max_bytes: int = 1 << 30, *, grace_s: float = 5.0) -> None:
        """Raises ValueError for a bound below 2 MiB. `grace_s`: how long speculation outlives its request."""
        if max_bytes < 1 << 21:
            raise ValueError(f"max_bytes {max_bytes} is below 2 MiB")
        self.max_bytes = max_bytes
        self.grace_s = grace_s
        self.evicted = 0
        """Entries dropped for want of room."""
        self.stale_writes = 0
        """Writes refused because they named an epoch that is over."""
        self._table = U64Table()
        self._sets = HolderSets()
        self._planes: dict[tuple[int, int], int] = {}
        """(group, tier) -> plane of the sets."""
        self._speculative = self._sets.add_plane()
        self._device = self._plane(0, Tier.GPU)
        self._holders: list[Holder | None] = []
        """By slot."""
        self._places: dict[tuple[int, int], Place] = {}
        """(slot, plane) -> place."""
        self._joined = 0
        self._windowed = 0
        """Holders with `groups`."""
        self._claims = U64Table()
        """Key and holder -> live speculations that name it."""
        self._speculated_bytes = 0
        self._ending: deque[tuple[float, Speculation]] = deque()
        self._started: float | None = None
        self._to_sweep = 0
        """Buckets yet to be searched for entries that nobody holds."""
        self._sweep_debt = 0

    # -- holders ----------------------------------------------------------------------------------------------------

    def join(self, endpoint: Hashable) -> Holder:
        """A new holder, which holds nothing. One object that joins twice is two holders."""
        slot = next((i for i, h in enumerate(self._holders) if h is None), len(self._holders))
        if slot == len(self._holders):
            self._holders.append(None)
            if slot >= 64 * self._sets.words:
                self._sets.widen(2 * self._sets.words)
        self._joined += 1
        holder = self._holders[slot] = Holder(endpoint, slot, _spread(self._joined))
        return holder

    def leave(self, holder: Holder) -> None:
        """Forget a holder and all that it held. Its later writes are refused."""
        if holder.slot < 0:
            return
        self.set_groups(holder, None)
        self.clear(holder)
        self._holders[holder.slot] = None
        holder.slot = -1

    def clear(self, holder: Holder, tier: Tier | None = None) -> None:
        """Forget all that a holder held, on one tier or on all, and begin a new epoch of it."""
        holder.epoch += 1
        if holder.slot < 0:
            return
        planes = [plane for (_, t), plane in self._planes.items() if tier is None or t == tier]
        if tier is None or tier == Tier.GPU:
            planes.append(self._speculative)
        self._sets.strip([self._place(holder, plane) for plane in planes])
        self._to_sweep = self._table.buckets + _SAMPLE

    def set_groups(self, holder: Holder, needs: Mapping[int, int] | None) -> None:
        """The attention groups of a holder's model: group -> blocks needed before a point (see `blocks_needed`)."""
        groups = tuple(sorted(needs.items())) if needs else None
        if groups == ((0, ALL_BLOCKS),):
            groups = None
        self._windowed += (groups is not None) - (holder.groups is not None)
        holder.groups = groups

    # -- what workers say -------------------------------------------------------------------------------------------

    def store(self, holder: Holder, epoch: int, keys: Keys, tier: Tier, now: float, group: int = 0) -> bool:
        """A holder has these blocks now, on `tier`, for attention group `group`. False if the epoch is over."""
        if not self._writable(holder, epoch):
            return False
        place = self._place(holder, self._plane(group, tier))
        drop = self._speculated(holder) if place.plane == self._device else ()
        self._change(keys, place, drop, self._ticks(now))
        return True

    def remove(self, holder: Holder, epoch: int, keys: Keys, tier: Tier, group: int = 0) -> bool:
        """A holder no longer has these blocks on `tier` for `group`. False if the epoch is over."""
        if not self._writable(holder, epoch):
            return False
        place = self._place(holder, self._plane(group, tier))
        drop = (place, *self._speculated(holder)) if place.plane == self._device else (place,)
        self._change(keys, None, drop, None)
        return True

    # -- what requests will bring ----------------------------------------------------------------------------------

    def speculate(self, holder: Holder, keys: Keys, request: str, now: float, *, held: int = 0) -> Speculation:
        """A request with these block keys goes to `holder`: count those that it does not hold as held, until `finish`.

        `held`: how many leading blocks `match` has just found on the device; only the others are looked up. Each
        speculation is ended once, by `finish`, `confirm` or `contradict`.
        """
        claimed = keys[:0]
        if holder.slot >= 0 and len(keys):
            ticks = self._ticks(now)
            if held and (self._table.get(keys.item(held - 1)) >> 32) + _FRESH_TICKS < ticks:
                self._age(keys[:held], ticks)
            place = self._place(holder, self._device)
            rows = self._sets.planes[self._device][_numbers(self._table.get_many(keys[held:]))]
            claimed = _once(keys[held:][(rows[:, place.word] & np.uint64(place.mask)) == 0])
        speculation = Speculation(holder, holder.epoch, request, claimed)
        if len(claimed):
            claims = claimed ^ np.uint64(holder.salt)
            self._claims.put_many(claims, self._claims.get_many(claims) + np.uint64(1))
            self._change(claimed, self._place(holder, self._speculative), (), ticks)
        holder.speculating += 1
        self._speculated_bytes += claimed.nbytes
        return speculation

    def finish(self, speculation: Speculation, now: float) -> None:
        """Its request is over: what no event has made real by `now` + grace goes then (`expire`)."""
        self._ending.append((now + self.grace_s, speculation))

    def expire(self, now: float) -> None:
        """Take back speculations whose grace is over. Call it now and then; the cost is that of what goes."""
        while self._ending and self._ending[0][0] <= now:
            self._end(self._ending.popleft()[1])

    def confirm(self, speculation: Speculation, now: float) -> None:
        """The worker is known to hold the blocks (its answer counted them as cached, say): they become real."""
        if speculation.live:
            self.store(speculation.holder, speculation.epoch, speculation.keys, Tier.GPU, now)
            self._end(speculation)

    def contradict(self, speculation: Speculation) -> None:
        """The worker does not hold the blocks (the request failed, say): they go at once, but for others' claims."""
        self._end(speculation)

    # -- what a prompt finds ----------------------------------------------------------------------------------------

    def match(self, keys: Keys, holders: Sequence[Holder] | None = None) -> Matches:
        """How much of the prompt's beginning each of `holders` has; of all that have joined if None."""
        chosen = tuple(holders) if holders is not None else tuple(h for h in self._holders if h is not None)
        width = 64 * self._sets.words
        found = np.zeros((len(Tier) + 1, width + 1), dtype=np.int64)  # a last column for holders that have left
        if len(keys) and (self._windowed or self._table.get(keys.item(0))):
            stretches = Stretches.of(_numbers(self._table.get_many(keys)))
            leading_match(self._sets, self._planes, self._speculative, stretches, found[:, :width])
            for groups, slots in self._kinds().items() if self._windowed else ():
                found[:, slots] = group_match(self._sets, self._planes, self._speculative, groups, slots, stretches)
        columns = found.take([h.slot for h in chosen], axis=1, mode="wrap")
        return Matches(chosen, columns[0], columns[-1], columns[:-1])

    def _kinds(self) -> dict[tuple[tuple[int, int], ...], list[int]]:
        """The slots of holders with several attention groups, by what these are."""
        kinds: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for holder in self._holders:
            if holder is not None and holder.groups is not None:
                kinds.setdefault(holder.groups, []).append(holder.slot)
        return kinds

    # -- what it costs ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Entries of the table, those that nobody holds any more and that have not been swept yet included."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables and sets."""
        return self._table.nbytes + self._claims.nbytes + self._sets.nbytes + self._speculated_bytes

    def blocks(self, holder: Holder, group: int = 0) -> tuple[int, ...]:
        """Blocks of a holder by tier, without speculative ones."""
        return self.all_blocks((holder,), group)[0]

    def all_blocks(self, holders: Sequence[Holder], group: int = 0) -> list[tuple[int, ...]]:
        """`blocks` of several holders: one pass over the sets."""
        totals = []
        for tier in Tier:
            plane = self._planes.get((group, tier))
            total = self._sets.totals(plane) if plane is not None else np.zeros(64 * self._sets.words, dtype=np.int64)
            totals.append([total.item(h.slot) if h.slot >= 0 else 0 for h in holders])
        return list(zip(*totals, strict=True))

    # -- what others may be told -----------------------------------------------------------------------------------

    def export(self) -> Iterator[list[tuple[Holder, Tier, int, Keys]]]:
        """All blocks without speculative ones, as (holder, tier, group, keys), in lots of some milliseconds' work.

        Between two lots anything may change; of what does, some may be missed or be told twice.
        """
        for keys, values in self._table.parts(_EXPORT):
            numbers, lot = _numbers(values), []
            for (group, tier), plane in list(self._planes.items()):
                rows = self._sets.planes[plane][numbers]
                some = np.bitwise_or.reduce(rows, axis=0)
                for holder in self._holders:
                    if holder is None:
                        continue
                    place = self._place(holder, plane)
                    mask = np.uint64(place.mask)
                    if some[place.word] & mask:
                        lot.append((holder, Tier(tier), group, keys[(rows[:, place.word] & mask) != 0]))
            yield lot

    # -- writing ----------------------------------------------------------------------------------------------------

    def _writable(self, holder: Holder, epoch: int) -> bool:
        if epoch == holder.epoch and holder.slot >= 0:
            return True
        self.stale_writes += 1
        return False

    def _plane(self, group: int, tier: Tier) -> int:
        plane = self._planes.get((group, tier))
        if plane is None:
            plane = self._planes[group, tier] = self._sets.add_plane()
        return plane

    def _place(self, holder: Holder, plane: int) -> Place:
        place = self._places.get((holder.slot, plane))
        if place is None:
            word, bit = divmod(holder.slot, 64)
            place = Place(plane, word, 1 << bit, _spread((holder.slot << 16) + plane + 1))
            self._places[holder.slot, plane] = place
        return place

    def _speculated(self, holder: Holder) -> tuple[Place, ...]:
        return (self._place(holder, self._speculative),) if holder.speculating else ()

    def _ticks(self, now: float) -> int:
        """Age of an entry written now, from the first write on; at least 1."""
        if self._started is None:
            self._started = now
        return min(max(int((now - self._started) * _TICKS_PER_S), 0) + 1, _NUMBER)

    def _change(self, keys: Keys, add: Place | None, drop: tuple[Place, ...], ticks: int | None) -> None:
        """Give the blocks a place and take places from them. With `ticks` their age is set; absent ones need `add`."""
        if add is not None:
            self._bound(len(keys))
        if self._to_sweep:
            self._sweep(len(keys))
        if len(keys) < _SCALAR:
            for key in keys.tolist():
                self._change_one(key, add, drop, ticks)
            return
        table, sets = self._table, self._sets
        keys = _once(keys)
        values = table.get_many(keys)
        numbers = _numbers(values)
        parts: list[tuple[int, NDArray[np.intp] | None]]
        if (numbers == numbers[0]).all():
            parts = [(numbers.item(0), None)]
        else:
            distinct, which = np.unique(numbers, return_inverse=True)
            parts = [(number, np.flatnonzero(which == i)) for i, number in enumerate(distinct.tolist())]
        released = []
        for number, part in parts:
            if number == EMPTY and add is None:
                continue
            some = keys if part is None else keys[part]
            new = sets.derive(number, add, drop)
            if new != number:
                sets.recount(new, len(some))
                released.append((number, -len(some)))
            if new == EMPTY:
                table.pop_many(some)
            elif ticks is not None:
                value = np.full(len(some), ticks << 32 | new, dtype=np.uint64)
                (table.add_many if number == EMPTY else table.put_many)(some, value)
            elif new != number:
                old = values if part is None else values[part]
                table.put_many(some, old ^ np.uint64(number ^ new))
        for number, count in released:
            sets.recount(number, count)

    def _change_one(self, key: int, add: Place | None, drop: tuple[Place, ...], ticks: int | None) -> None:
        value = self._table.get(key)
        number = value & _NUMBER
        if number == EMPTY and add is None:
            return
        new = self._sets.derive(number, add, drop)
        if new != number:
            self._sets.recount(new, 1)
            self._sets.recount(number, -1)
        if new == EMPTY:
            self._table.pop(key)
        elif ticks is not None:
            self._table.put(key, ticks << 32 | new)
        elif new != number:
            self._table.put(key, value ^ number ^ new)

    def _age(self, keys: Keys, ticks: int) -> None:
        """Mark those of the blocks that have an entry as used now."""
        values = self._table.get_many(keys)
        known = values.nonzero()[0]
        young = (values[known] & np.uint64(_NUMBER)) | np.uint64(ticks << 32)
        self._table.put_many(keys[known], young)

    def _end(self, speculation: Speculation) -> None:
        if not speculation.live:
            return
        speculation.live = False
        holder, keys = speculation.holder, speculation.keys
        self._speculated_bytes -= keys.nbytes
        if len(keys):
            claims = keys ^ np.uint64(holder.salt)
            left = self._claims.get_many(claims) - np.uint64(1)
            over = left == 0
            self._claims.pop_many(claims[over])
            self._claims.put_many(claims[~over], left[~over])
            if holder.slot >= 0 and over.any():
                self._change(keys[over], None, (self._place(holder, self._speculative),), None)
        holder.speculating -= 1

    # -- the bound --------------------------------------------------------------------------------------------------

    def _bound(self, entries: int) -> None:
        """Before `entries` more are written: evict until there is room for them. Sets may take a fifth of the bytes."""
        most_entries = self.max_bytes * 3 // 5 // MOST_BYTES - entries
        most_sets = self.max_bytes // 10 // self._sets.bytes_per_set
        while (len(self._table) > most_entries or len(self._sets) > most_sets) and len(self._table):
            keys, values = self._table.scan(_SAMPLE)
            if not len(keys):
                self._table.settle()
                continue
            dead = self._sets.empty(_numbers(values))
            age = np.where(dead, 0, values >> np.uint64(32))
            goes = np.argpartition(age, len(keys) // 8)[: len(keys) // 8 + 1]
            self.evicted += int(np.count_nonzero(~dead[goes]))
            self._drop(keys[goes], values[goes])

    def _sweep(self, written: int) -> None:
        """After a holder's places were taken out of the sets: drop entries nobody holds, a few with each write."""
        self._sweep_debt += written
        if self._sweep_debt < 64:
            return
        self._sweep_debt = 0
        if self._table.growing:  # a scan would not see all: begin afterwards
            self._to_sweep = self._table.buckets + _SAMPLE
            return
        self._to_sweep = max(self._to_sweep - _SAMPLE, 0)
        keys, values = self._table.scan(_SAMPLE)
        dead = np.flatnonzero(self._sets.empty(_numbers(values)))
        self._drop(keys[dead], values[dead])

    def _drop(self, keys: Keys, values: Keys) -> None:
        numbers, counts = np.unique(_numbers(values), return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._sets.recount(number, -count)
        self._table.pop_many(keys)


def _numbers(values: Keys) -> NDArray[np.uint32]:
    """The low halves of a table's values."""
    return values.astype(np.uint32)


def _once(keys: Keys) -> Keys:
    """The keys without repetition; there is none as a rule."""
    return keys if len(set(keys.tolist())) == len(keys) else np.unique(keys)


def _spread(number: int) -> int:
    """A 64-bit number that looks random, of a small one (the mixer of splitmix64)."""
    number = number * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & (1 << 64) - 1
    return number ^ (number >> 31)
