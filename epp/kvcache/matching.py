"""How much of a prompt each holder has, from the sets of holders along it: the rules of vLLM's cache look-up, at once.

In: the prompt as *stretches*, runs of blocks that have the same set of holders (see `sets`). Out: for every holder the
leading blocks by tier. Most prompts have a handful of stretches (a system prompt, a session, a new turn), so what is
computed here does not depend on their length.

- `leading_match`: one group of full attention. An AND along the stretches says who still has all; below the device, the
  run goes on from the device's end on the lower tiers.
- `group_match`: several attention groups, each of which needs so many blocks before a point (`blocks_needed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epp.kvcache.sets import HolderSets, U64s, unpack
from epp.kvcache.tier import Tier

Counts = NDArray[np.int64]
Planes = Mapping[tuple[int, int], int]
"""(group, tier) -> plane of the sets; those that never occurred are missing."""


ALL_BLOCKS = 1 << 40
"""What full attention needs before a point: every block."""

_LOWER = (Tier.CPU, Tier.DISK, Tier.PEER)
_AT_ONCE = 128
"""Stretches looked at in one go before it is asked whether anybody is left."""


def blocks_needed(kind: str, window: int | None, block_size: int) -> int:
    """How many blocks before a point an attention group must hold for a prompt to go on from there.

    `kind` and `window` (tokens) are what a worker's events say (`kv_cache_spec_kind`, `kv_cache_spec_sliding_window`).
    vLLM asks for a sliding window's `ceil((window - 1) / block_size)` blocks, and of mamba for one. A kind that is not
    known counts as full attention: it promises least.
    """
    if kind == "mamba":
        return 1
    if kind == "sliding_window" and window:
        return max(-(-(window - 1) // block_size), 1)
    return ALL_BLOCKS


@dataclass(slots=True, frozen=True)
class Stretches:
    """Runs of blocks of a prompt with the same set; arrays of shape (stretches,)."""

    sets: NDArray[np.uint32]
    begins: NDArray[np.intp]
    ends: NDArray[np.intp]
    """Exclusive."""

    @classmethod
    def of(cls, sets: NDArray[np.uint32]) -> Stretches:
        """From the set of each block; at least one."""
        changes = (sets[1:] != sets[:-1]).nonzero()[0]
        bounds = np.empty(len(changes) + 2, dtype=np.intp)
        bounds[0], bounds[-1] = 0, len(sets)
        np.add(changes, 1, out=bounds[1:-1])
        return cls(sets[bounds[:-1]], bounds[:-1], bounds[1:])


def leading_match(
    sets: HolderSets, planes: Planes, speculative: int, stretches: Stretches, found: NDArray[np.int64]
) -> None:
    """Fill `found`, zeros of shape (tiers + 1, slots): blocks by tier, and their sum."""
    device = sets.planes[planes[0, Tier.GPU]]
    guess = sets.planes[speculative]
    lower = [(tier, sets.planes[plane]) for tier in _LOWER if (plane := planes.get((0, tier))) is not None]
    lengths = stretches.ends - stretches.begins
    on_device = usable = np.full(sets.words, (1 << 64) - 1, dtype=np.uint64)
    for at in range(0, len(lengths), _AT_ONCE):
        part, length = stretches.sets[at : at + _AT_ONCE], lengths[at : at + _AT_ONCE]
        rows = device[part] | guess[part]
        rows[0] &= on_device
        run: U64s = np.bitwise_and.accumulate(rows, axis=0)
        on_device = usable_now = run[-1]
        found[Tier.GPU] += length @ unpack(run)
        if lower:
            below = [plane[part] for _, plane in lower]
            rows = run | np.bitwise_or.reduce(below)
            rows[0] &= usable
            reach: U64s = np.bitwise_and.accumulate(rows, axis=0)
            usable = usable_now = reach[-1]
            left: U64s = reach & ~run
            for (tier, _), rows in zip(lower, below, strict=True):
                found[tier] += length @ unpack(left & rows)
                left &= ~rows
        if not usable_now.any():
            break
    np.sum(found[:-1], axis=0, out=found[-1])


def group_match(
    sets: HolderSets,
    planes: Planes,
    speculative: int,
    groups: Sequence[tuple[int, int]],
    slots: list[int],
    stretches: Stretches,
) -> NDArray[np.int64]:
    """As `leading_match`, for holders `slots` whose attention groups are `groups`: (group, blocks needed).

    On lower tiers a group goes on from where the device's match ends. A block counts for the fastest tier on which the
    group that needs most has it, and for the slowest if that has it on none: its state alone makes it usable.
    """

    def held(plane: int | None) -> NDArray[np.bool_]:
        if plane is None:
            return np.zeros((len(stretches.sets), len(slots)), dtype=np.bool_)
        return unpack(sets.planes[plane][stretches.sets])[:, slots].astype(np.bool_)

    guess = held(speculative)
    device = [held(planes.get((group, Tier.GPU))) | guess for group, _ in groups]
    below = [[held(planes.get((group, tier))) for tier in _LOWER] for group, _ in groups]
    needs = [need for _, need in groups]
    ends = stretches.ends
    on_device = _last_usable(device, needs, ends)
    before = ends[:, None] <= on_device
    either = [(rows & before) | np.logical_or.reduce(tiers) for rows, tiers in zip(device, below, strict=True)]
    usable = _last_usable(either, needs, ends)
    found = np.zeros((len(Tier) + 1, len(slots)), dtype=np.int64)
    found[Tier.GPU], found[-1] = on_device, usable
    left = ~before & (ends[:, None] <= usable)
    for tier, has in zip(_LOWER, below[needs.index(max(needs))], strict=True):
        here = left if tier == _LOWER[-1] else left & has
        found[tier] = (ends - stretches.begins) @ here
        left = left & ~here
    return found


def _last_usable(present: list[NDArray[np.bool_]], needs: list[int], ends: NDArray[np.intp]) -> Counts:
    """The most blocks of a prompt that all groups can go on from, shape (holders,).

    Group i holds the stretches `present[i]`, of shape (stretches, holders). The prompt can go on from the end of a
    stretch if, in each group, the unbroken run that leads there is as long as needed or begins with the prompt. (Within
    a stretch all groups' runs grow alike, so its end is its best point.)
    """
    usable = np.ones(present[0].shape, dtype=np.bool_)
    for rows, need in zip(present, needs, strict=True):
        begin = np.maximum.accumulate(np.where(rows, 0, ends[:, None]), axis=0)  # of the run that leads here
        usable &= rows & ((begin == 0) | (begin + need <= ends[:, None]))
    most: Counts = np.where(usable, ends[:, None], 0).max(axis=0, initial=0).astype(np.int64)
    return most
