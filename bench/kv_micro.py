"""Time and memory of block keys, the approximate history and all scorers.

A *warm turn* is a prompt of 6,250 blocks that one endpoint holds but for its last 32 blocks, in a history where every
endpoint holds 100 such sessions of which the first 500 blocks are common to all.
"""

from __future__ import annotations

import time
import tracemalloc
from itertools import count
from random import Random

import numpy as np

from bench.timing import EFFORT, cpu_us, each_us
from epp.endpoint import Candidates, Endpoint, Pool
from epp.figures import Figure, figure
from epp.kvcache.blocks import Keys, block_keys
from epp.kvcache.history import History
from epp.plugin import Handle, Scorer
from epp.registry import default_registry
from epp.request import Api, InferenceRequest

COMMON, BLOCKS, NEW = 500, 6250, 32
CAPACITY = 1 << 22
ALL = 1 << 31


def figures() -> list[Figure]:
    text = np.random.default_rng(1).integers(32, 127, 400_000, dtype=np.uint8).tobytes()
    seeds = count()  # another chain each time: none is known
    new = cpu_us(lambda: block_keys(text, 16, next(seeds), limit=ALL))
    out = [figure("kv/block keys of 400 KB never seen", new, "us")]
    turns = [text[:end] for end in range(len(text) - 100_000, len(text), 4_000)]
    grown = each_us([lambda t=turn: block_keys(t, 16, 7, limit=ALL) for turn in turns])  # type: ignore[misc]
    out.append(figure("kv/block keys of 400 KB that grew by a turn", grown, "us"))
    for endpoints in (64, 544):
        history, sessions = _history(endpoints)
        out.append(figure(f"kv/match, warm turn, {endpoints} endpoints", _match(history, sessions), "us"))
        out.append(figure(f"kv/match and insert, warm turn, {endpoints} endpoints", _turns(history, sessions), "us"))
    out.append(figure("kv/memory per block and endpoint, 64 endpoints", _bytes_per_block(), "B"))
    return out + [figure(f"kv/{name}, 544 endpoints", us, "us") for name, us in _scorers(544)]


def _session(number: int, length: int = BLOCKS) -> Keys:
    words = np.arange(length, dtype=np.uint32)
    words[COMMON:] += np.uint32((number + 1) * 10_000)
    return block_keys(words, 1, 0, limit=length)


def _history(endpoints: int) -> tuple[History[int], list[int]]:
    """Sessions go round the endpoints; those that are timed exist in full, the rest share a shorter tail."""
    sessions = EFFORT.times(100)
    history = History[int](1 << 34)
    numbers = list(range(0, endpoints * sessions, endpoints * sessions // 50))
    for number in range(endpoints * sessions):
        length = BLOCKS if number in set(numbers) else COMMON + 200
        history.insert(number % endpoints, _session(number, length), CAPACITY)
    return history, numbers


def _match(history: History[int], sessions: list[int]) -> float:
    keys = [_session(n, BLOCKS + NEW) for n in sessions]
    return cpu_us(lambda: [history.match(k) for k in keys]) / len(keys)


def _turns(history: History[int], sessions: list[int]) -> float:
    """Every round is one more turn of each session: each time NEW blocks are new."""
    best = float("inf")
    for turn in range(1, EFFORT.times(40)):
        keys = [_session(n, BLOCKS + turn * NEW) for n in sessions]
        started = time.thread_time()
        for k in keys:
            matched = history.match(k)
            history.insert(max(matched, key=matched.__getitem__), k, CAPACITY)
        best = min(best, (time.thread_time() - started) / len(keys))
    return best * 1e6


def _bytes_per_block() -> float:
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    history = History[int](1 << 34)
    for number in range(64 * 2):
        history.insert(number % 64, _session(number), CAPACITY)
    used = tracemalloc.get_traced_memory()[0] - base
    tracemalloc.stop()
    return used / len(history)


def _scorers(count: int) -> list[tuple[str, float]]:
    rng = np.random.default_rng(2)
    pool = Pool(Endpoint("10.0.0.1", 8000 + i) for i in range(count))
    for endpoint in pool.endpoints:
        for column in ("waiting", "running", "in_flight", "in_flight_tokens", "unseen"):
            endpoint.set(column, float(rng.integers(0, 50)))
        endpoint.set("kv_usage", rng.random())
        endpoint.set("scraped_at", 100.0)
        endpoint.set("prefill_rate", 5000 + 5000 * rng.random())
    request = InferenceRequest("r", Api.CHAT, model="m", target_model="m", prompt_tokens=100_000)
    request.headers.add("x-session-token", b"of nobody")
    handle = Handle(random=Random(1))
    candidates: Candidates = pool.candidates(100.0)
    candidates.cached_tokens = rng.integers(0, 100_000, count).astype(np.float64)
    timed = []
    for cls in default_registry().classes():
        if cls.type == "ttft-estimator":
            estimator = cls(cls.Parameters(), handle, cls.type)
            timed.append((cls.type, cpu_us(lambda e=estimator: e.produce(request, candidates))))  # type: ignore[misc]
    for cls in default_registry().classes():
        if issubclass(cls, Scorer):
            scorer = cls(cls.Parameters(), handle, cls.type)
            timed.append((cls.type, cpu_us(lambda s=scorer: s.score(request, candidates))))  # type: ignore[misc]
    return timed
