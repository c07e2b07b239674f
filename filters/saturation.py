from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from epp.plugin import Candidates, Duration, Filter, InferenceRequest, Mask, Range


@dataclass(frozen=True, slots=True)
class UtilizationParameters:
    queue_depth_threshold: Annotated[float, Range(min=0.001)] = 5
    """Waiting requests at which an endpoint is saturated."""
    kv_cache_util_threshold: Annotated[float, Range(min=0.001, max=1)] = 0.8
    """Share of KV cache in use at which an endpoint is saturated."""
    metrics_staleness_threshold: Duration = 2.0
    """Age of a scrape from which it tells nothing."""
    headroom: Annotated[float, Range(min=0)] = 0.0
    """Share above the thresholds that is still let through."""


class UtilizationDetector(Filter[UtilizationParameters]):
    """Keeps endpoints below saturation: fresh metrics, waiting < T * (1 + headroom) and kv usage < T * (1 + headroom).

    The queue is the one scraped plus the requests sent since. Unknown metrics count as saturated. When nothing is left
    all stay; when all metrics are stale, staleness is ignored.
    """

    type = "utilization-detector"
    Parameters = UtilizationParameters

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Mask:
        p = self.parameters
        room = 1.0 + p.headroom
        keep = candidates.unsaturated(
            p.queue_depth_threshold * room, p.kv_cache_util_threshold * room, p.metrics_staleness_threshold
        )
        return keep if keep.any() else np.ones(len(candidates), dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class ConcurrencyParameters:
    concurrency_mode: Literal["requests", "tokens"] = "requests"
    """What is counted: requests in flight, or their uncached prompt tokens that await a first token."""
    max_concurrency: Annotated[int, Range(min=1)] = 100
    """Limit of requests per endpoint."""
    max_token_concurrency: Annotated[int, Range(min=1)] = 1_000_000
    """Limit of tokens per endpoint."""
    headroom: Annotated[float, Range(min=0)] = 0.0
    """Share above the limit that is still let through."""


class ConcurrencyDetector(Filter[ConcurrencyParameters]):
    """Keeps endpoints whose own in-flight count is below `limit * (1 + headroom)`; none left means no endpoint."""

    type = "concurrency-detector"
    Parameters = ConcurrencyParameters

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Mask:
        p = self.parameters
        by_tokens = p.concurrency_mode == "tokens"
        load = candidates.column("in_flight_tokens" if by_tokens else "in_flight")
        limit = p.max_token_concurrency if by_tokens else p.max_concurrency
        keep: Mask = load < limit * (1.0 + p.headroom)
        return keep
