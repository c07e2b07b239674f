"""What is known of the workers' caches, for people: metrics, and `/debug/index`, which `kvsteer index` shows.

In: `Knowledge` and the pool. Out: counters of what came and went wrong, gauges by endpoint, a summary of plain values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from epp.endpoint import Endpoint, Pool
from epp.knowledge import Knowledge
from epp.kvcache.events import follower, ledger, subscriber
from epp.kvcache.events.confidence import Level
from epp.kvcache.events.follower import Follower
from epp.kvcache.tier import Tier
from epp.kvcache.tokens import Tokens

COUNTERS = (*subscriber.COUNTERS, *follower.COUNTERS, *ledger.COUNTERS)
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
    blocks = _blocks(knowledge, pool)
    return {
        "index": {
            "bytes": index.nbytes,
            "max_bytes": index.max_bytes,
            "entries": len(index),
            "evicted": index.evicted,
            **producer.counters,
        },
        "endpoints": [
            _endpoint(e, events.followers.get(e), blocks.get(e, (0,) * len(Tier)), now) for e in pool.endpoints
        ],
    }


def _endpoint(endpoint: Endpoint, followed: Follower | None, blocks: tuple[int, ...], now: float) -> dict[str, Any]:
    shown = {
        "address": endpoint.address,
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


def families(knowledge: Knowledge, pool: Pool, pool_name: str) -> Iterable[Metric]:
    """Metrics of the index and of token ids; none of what is not configured."""
    if knowledge.producer is not None and knowledge.subscriber is not None:
        yield from _of_index(knowledge, pool, pool_name)
    if knowledge.tokens is not None:
        yield from _of_tokens(knowledge.tokens)


def _of_index(knowledge: Knowledge, pool: Pool, pool_name: str) -> Iterable[Metric]:
    assert knowledge.producer is not None
    assert knowledge.subscriber is not None
    index, followers = knowledge.producer.index, knowledge.subscriber.followers
    yield GaugeMetricFamily("kvsteer_index_bytes", "Memory of the precise index", value=index.nbytes)
    yield GaugeMetricFamily("kvsteer_index_entries", "Blocks it knows anywhere", value=len(index))
    yield CounterMetricFamily("kvsteer_index_evicted", "Blocks forgotten for want of room", value=index.evicted)
    yield CounterMetricFamily("kvsteer_index_stale_writes", "Writes of an epoch that is over", value=index.stale_writes)
    lookups = CounterMetricFamily("kvsteer_index_lookups", "Requests by what scored their prefix", labels=["kind"])
    for kind, count in knowledge.producer.counters.items():
        lookups.add_metric([kind], count)
    yield lookups
    labels = ["name", "model_server_pod"]
    confidence = GaugeMetricFamily("kvsteer_kv_events_confidence", "What a match there counts, 0..1", labels=labels)
    lag = GaugeMetricFamily("kvsteer_kv_events_lag_seconds", "Age of the last batch when it came", labels=labels)
    parked = GaugeMetricFamily("kvsteer_kv_events_parked_blocks", "Blocks that wait for what precedes", labels=labels)
    held = GaugeMetricFamily("kvsteer_index_blocks", "Blocks known there", labels=[*labels, "tier"])
    blocks = _blocks(knowledge, pool)
    for endpoint in pool.endpoints:
        followed, names = followers.get(endpoint), [pool_name, endpoint.address]
        confidence.add_metric(names, 0.0 if followed is None else followed.confidence.factor)
        lag.add_metric(names, math.nan if followed is None else followed.lag_s)
        parked.add_metric(names, 0 if followed is None else followed.ledger.waiting)
        for tier, count in zip(Tier, blocks.get(endpoint, (0,) * len(Tier)), strict=True):
            held.add_metric([*names, tier.name.lower()], count)
    yield from (confidence, lag, parked, held)


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


def _blocks(knowledge: Knowledge, pool: Pool) -> dict[Endpoint, tuple[int, ...]]:
    """Blocks of each followed endpoint by tier."""
    assert knowledge.producer is not None
    assert knowledge.subscriber is not None
    holders = {e: h for e, h in knowledge.subscriber.holders.items() if e.pool is pool}
    return dict(zip(holders, knowledge.producer.index.all_blocks(tuple(holders.values())), strict=True))


def _level(followed: Follower | None) -> Level:
    return Level.NONE if followed is None else followed.confidence.level
