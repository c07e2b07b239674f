"""Time and memory of the precise index: keys of tokens, events applied, matches, at a million and ten million blocks.

Every endpoint holds 500 blocks that all share and sessions of its own after them. A *warm turn* is a prompt of 6,250
blocks and 32 new ones that one endpoint holds and that was just looked up; a *cold* one is another session each time,
so that the table has to be fetched from memory. `published` is the shape for which llm-d published 674 ms and 13 GB of
allocations a request (llm-d-router issue 2390): 240,000 tokens in blocks of 64, 96 endpoints; here each holds another
length of it, which is the hardest case.
"""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np

from bench.timing import cpu_us
from epp.figures import Figure, figure
from epp.kvcache.blocks import Keys, extend, token_root
from epp.kvcache.index import BlockIndex, Holder, Tier
from epp.kvcache.table import U64Table

COMMON, BLOCKS, NEW = 500, 6250, 32
APPLIED = 1 << 18
ROOT = token_root(model="m", adapter="", salt="")


def figures() -> list[Figure]:
    ids = np.random.default_rng(1).integers(0, 150_000, 100_000, dtype=np.uint32)
    out = [
        figure("index/keys of 100,000 tokens", cpu_us(lambda: extend(ROOT, ids, 16)), "us"),
        figure("index/keys of one block of 16 tokens", cpu_us(lambda: extend(ROOT, ids[:16], 16)), "us"),
    ]
    out += _applied()
    for endpoints, blocks, name in ((64, 1 << 20, "1 M"), (544, 1 << 20, "1 M"), (64, 10_000_000, "10 M")):
        out += _matched(endpoints, blocks, f"{endpoints} endpoints, {name} blocks")
    return out + _published()


def _random(count: int, seed: int) -> Keys:
    """Keys of a chain are random numbers to the index."""
    return np.random.default_rng(seed).integers(1, 1 << 64, count, dtype=np.uint64)


def _session(number: int, length: int = BLOCKS) -> Keys:
    words = np.arange(length, dtype=np.uint32)
    words[COMMON:] += np.uint32((number + 1) * 10_000)
    return extend(ROOT, words, 1)


def _applied() -> list[Figure]:
    """Events of a fleet of 64 while its blocks come, are renewed and go."""
    index = BlockIndex(1 << 32)
    holders = [index.join(i) for i in range(64)]
    keys = _random(APPLIED, seed=2)
    engine_hashes, engine_map = _random(APPLIED, seed=3), U64Table()
    events = [(holders[i % 64], keys[64 * i : 64 * i + 64]) for i in range(len(keys) // 64)]
    index.store(holders[0], 0, _random(64, seed=4), Tier.GPU, 1.0)  # numpy loads some of itself on first use
    longest = 0.0
    began = time.thread_time()
    for holder, some in events:
        one = time.thread_time()
        index.store(holder, 0, some, Tier.GPU, 1.0)
        longest = max(longest, time.thread_time() - one)
    stored = (time.thread_time() - began) / len(keys)
    began = time.thread_time()
    for i in range(0, len(keys), 64):
        engine_map.put_many(engine_hashes[i : i + 64], keys[i : i + 64])
    mapped = (time.thread_time() - began) / len(keys)
    singles = [(holder, some[i : i + 1]) for holder, some in events[:400] for i in range(64)]
    began = time.thread_time()
    for holder, single in singles:
        index.remove(holder, 0, single, Tier.GPU)
    removed = (time.thread_time() - began) / len(singles)
    began = time.thread_time()
    for holder, single in singles:
        index.store(holder, 0, single, Tier.GPU, 2.0)
    stored_single = (time.thread_time() - began) / len(singles)
    began = time.thread_time()
    for holder in holders[:32]:
        index.leave(holder)
    left = (time.thread_time() - began) / 32
    return [
        figure("index/store, a block of a 64-block event", stored * 1e6, "us"),
        figure("index/store, a single-block event", stored_single * 1e6, "us"),
        figure("index/remove, a single-block event", removed * 1e6, "us"),
        figure("index/engine hash noted, a block of a 64-block event", mapped * 1e6, "us"),
        figure("index/longest 64-block event while the index fills", longest * 1e3, "ms"),
        figure("index/an endpoint leaves with its 4,096 blocks", left * 1e6, "us"),
    ]


def _filled(endpoints: int, blocks: int) -> tuple[BlockIndex, list[Holder], list[Keys]]:
    """Sixty sessions, and other blocks up to that number."""
    index = BlockIndex(1 << 33)
    holders = [index.join(i) for i in range(endpoints)]
    sessions = [_session(number) for number in range(60)]
    for holder in holders:
        index.store(holder, 0, sessions[0][:COMMON], Tier.GPU, 0.0)
    for number, keys in enumerate(sessions):
        index.store(holders[number % endpoints], 0, keys, Tier.GPU, 0.0)
    rest = itertools.cycle(holders)
    for seed in itertools.count(10):
        if (missing := blocks - len(index)) <= 0:
            index._table.settle()  # a fleet's caches are full as a rule, and the table does not grow
            return index, holders, sessions
        index.store(next(rest), 0, _random(min(missing, 20_000), seed), Tier.GPU, 0.0)
    raise AssertionError


def _matched(endpoints: int, blocks: int, name: str) -> list[Figure]:
    before = cpu_us(gc.collect, rounds=3)
    index, holders, sessions = _filled(endpoints, blocks)
    after = cpu_us(gc.collect, rounds=3)
    turns = [np.concatenate([keys, _random(NEW, 4)]) for keys in sessions]
    others: Iterator[Keys] = itertools.cycle(turns)
    warm = cpu_us(lambda: index.match(turns[0], holders))
    cold = cpu_us(lambda: index.match(next(others), holders))
    out = [
        figure(f"index/match, warm turn, {name}", warm, "us"),
        figure(f"index/match, cold turn, {name}", cold, "us"),
        figure(f"index/memory per block, {name}", index.nbytes / len(index), "B"),
    ]
    if blocks > 1 << 20:
        one_map, hashes = U64Table(), _random(blocks // endpoints, 5)
        for at in range(0, len(hashes), 4096):
            one_map.put_many(hashes[at : at + 4096], hashes[at : at + 4096])
        total = (index.nbytes + endpoints * one_map.nbytes) / len(index)
        out.append(figure(f"index/memory per block with the map of engine hashes, {name}", total, "B"))
        out.append(figure(f"index/a full collection of garbage, {name}", after / 1e3, "ms"))
        out.append(figure("index/a full collection of garbage, no index", before / 1e3, "ms"))
    return out


def _published() -> list[Figure]:
    index, keys = BlockIndex(1 << 30), _random(3750, seed=6)
    holders = [index.join(i) for i in range(96)]
    for i, holder in enumerate(holders):
        index.store(holder, 0, keys[: 39 * (i + 1)], Tier.GPU, 0.0)
    taken = cpu_us(lambda: index.match(keys, holders))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index.match(keys, holders)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return [
        figure("index/published: 3,750 blocks, 96 endpoints (llm-d: 674,000 us)", taken, "us"),
        figure("index/published: memory at most during the match (llm-d: 13 GB allocated)", peak, "B"),
    ]
