"""What is known of the workers' caches, for people: metrics, and `/debug/index`, which `kvsteer index` shows.

In: `Knowledge` and the pool. Out: counters of what came and went wrong, gauges by endpoint, a summary of plain values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from epp.endpoint import Endpoint, Pool
from epp.knowledge import Knowledge
from epp.kvcache.events import follower, ledger, subscriber
from epp.kvcache.events.confidence import Level
from epp.kvcache.events.follower import Follower
from epp.kvcache.events.subscriber import Subscriber
from epp.kvcache.index import BlockIndex
from epp.kvcache.precise import PrecisePrefixCache
from epp.kvcache.tier import Tier
from epp.kvcache.tokens import Tokens
from epp.observe.exposition import gauge, labels

COUNTERS = (*subscriber.COUNTERS, *follower.COUNTERS, *ledger.COUNTERS)
NO_BLOCKS = (0,) * len(Tier)
SHOWN = ("batches", "gaps", "replays_answered", "lost_batches", "restarts", "agreed", "over", "under")
"""Counters of one worker that the summary has."""


def event_counters(knowledge: Knowledge) -> Mapping[str, float]:
    """Everything counted about KV events, over all workers, of those that left as well."""
    return {} if knowledge.subscriber is None else dict.fromkeys(COUNTERS, 0) | knowledge.subscriber.totals()


def summary(knowledge: Knowledge, pool: Pool) -> dict[str, Any]:
    """What is believed of each endpoint; `index` is None where no precise producer is configured."""
    producer, events = knowledge.producer, knowledge.subscriber
    if producer is None or events is None:
        return {"index": None, "endpoints": []}
    index, now = producer.index, events.now
    blocks = _blocks(index, events, pool)
    return {
        "index": {
            "bytes": index.nbytes,
            "max_bytes": index.max_bytes,
            "entries": len(index),
            "evicted": index.evicted,
            **producer.counters,
        },
        "endpoints": [_endpoint(e, events.followers.get(e), blocks.get(e, NO_BLOCKS), now) for e in pool.endpoints],
    }


def _endpoint(endpoint: Endpoint, followed: Follower | None, blocks: tuple[int, ...], now: float) -> dict[str, Any]:
    shown = {
        "address": endpoint.key,
        "name": endpoint.name,
        "confidence": _level(followed).value,
        "counts": 0.0 if followed is None else followed.confidence.factor,
        "blocks": {tier.name.lower(): count for tier, count in zip(Tier, blocks, strict=True)},
    }
    if followed is None:
        return {**shown, "model": None}
    age = now - followed.applied_at
    return {
        **shown,
        "model": followed.ledger.model,
        "block_size": followed.ledger.block_size,
        "parked": followed.ledger.waiting,
        "speculating": followed.ledger.holder.speculating,
        "last_batch_age_s": age if math.isfinite(age) else None,
        "lag_s": followed.lag_s,
        **{name: followed.counters[name] for name in SHOWN},
    }


def families(knowledge: Knowledge) -> Iterable[Metric]:
    """Metrics of the index as a whole and of token ids; none of what is not configured."""
    if knowledge.producer is not None:
        yield from _of_index(knowledge.producer)
    if knowledge.tokens is not None:
        yield from _of_tokens(knowledge.tokens)


def _of_index(producer: PrecisePrefixCache) -> Iterable[Metric]:
    index = producer.index
    yield GaugeMetricFamily("kvsteer_index_bytes", "Memory of the precise index", value=index.nbytes)
    yield GaugeMetricFamily("kvsteer_index_entries", "Blocks it knows anywhere", value=len(index))
    yield CounterMetricFamily("kvsteer_index_evicted", "Blocks forgotten for want of room", value=index.evicted)
    yield CounterMetricFamily("kvsteer_index_stale_writes", "Writes of an epoch that is over", value=index.stale_writes)
    lookups = CounterMetricFamily("kvsteer_index_lookups", "Requests by what scored their prefix", labels=["kind"])
    for kind, count in producer.counters.items():
        lookups.add_metric([kind], count)
    yield lookups


def by_endpoint(knowledge: Knowledge, pool: Pool, pool_name: str) -> Iterable[str]:
    """Gauges of every endpoint, as text. Lower tiers are shown where there is something on them."""
    producer, events = knowledge.producer, knowledge.subscriber
    if producer is None or events is None:
        return
    followers, endpoints = events.followers, pool.endpoints
    names = [labels(model_server_pod=e.key, name=pool_name) for e in endpoints]
    for name, text, unknown, read in _PER_ENDPOINT:
        values = (unknown if (f := followers.get(e)) is None else read(f) for e in endpoints)
        yield gauge(name, text, zip(names, values, strict=True))
    blocks = _blocks(producer.index, events, pool)
    held = [
        (f'{of},tier="{tier.name.lower()}"', count)
        for of, endpoint in zip(names, endpoints, strict=True)
        for tier, count in zip(Tier, blocks.get(endpoint, NO_BLOCKS), strict=True)
        if count or tier is Tier.GPU
    ]
    yield gauge("kvsteer_index_blocks", "Blocks known there", held)


_PER_ENDPOINT: tuple[tuple[str, str, float, Callable[[Follower], float]], ...] = (
    ("kvsteer_kv_events_confidence", "What a match there counts, 0..1", 0.0, lambda f: f.confidence.factor),
    ("kvsteer_kv_events_lag_seconds", "Age of the last batch when it came", math.nan, lambda f: f.lag_s),
    ("kvsteer_kv_events_parked_blocks", "Blocks that wait for what precedes", 0.0, lambda f: f.ledger.waiting),
)
"""Name, text, value where the endpoint is not followed, value."""


def _of_tokens(tokens: Tokens) -> Iterable[Metric]:
    requests = CounterMetricFamily(
        "kvsteer_tokens_requests", "Requests by where their token ids came from", labels=["source", "reason"]
    )
    for (source, reason), count in list(tokens.outcomes.items()):
        requests.add_metric([source, reason], count)
    seconds = CounterMetricFamily("kvsteer_tokens_work_seconds", "Time spent on token ids", labels=["source"])
    for source, spent in tokens.seconds.items():
        seconds.add_metric([source], spent)
    looked_up = CounterMetricFamily("kvsteer_tokens_cache_lookups", "Pieces of text looked up", labels=["kind"])
    looked_up.add_metric(["hit"], tokens.cache.hits)
    looked_up.add_metric(["miss"], tokens.cache.misses)
    memory = GaugeMetricFamily("kvsteer_tokens_cache_bytes", "Memory of token ids kept", labels=["kind"])
    memory.add_metric(["pieces"], tokens.cache.bytes)
    memory.add_metric(["turns"], tokens.turns.bytes)
    yield from (requests, seconds, looked_up, memory)


def _blocks(index: BlockIndex, events: Subscriber, pool: Pool) -> dict[Endpoint, tuple[int, ...]]:
    """Blocks of each followed endpoint by tier."""
    holders = {e: h for e, h in events.holders.items() if e.pool is pool}
    return dict(zip(holders, index.all_blocks(tuple(holders.values())), strict=True))


def _level(followed: Follower | None) -> Level:
    return Level.NONE if followed is None else followed.confidence.level
