"""Precise prefix cache: the share of the prompt that an endpoint holds, as its KV events tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from epp.plugin import Candidates, Floats, InferenceRequest, NoParameters, Scorer


class PrecisePrefixCacheScorer(Scorer[NoParameters]):
    """Prefers the endpoint that holds most of the prompt: `cached tokens / prompt tokens`; 0 for all when unknown.

    What is cached is what the workers' KV events say (`precise-prefix-cache-producer`, added when not configured), or
    the approximate history where there are none. Weigh it against a load scorer, or use `expected-ttft-scorer`, which
    also counts what lower tiers cost.
    """

    type = "precise-prefix-cache-scorer"
    reads = ("cached_tokens", "precise_match")
    ignored_parameters: ClassVar[Mapping[str, str]] = {
        "tokenProcessorConfig": "block sizes come from the workers' events, and no hash is computed again",
        "indexerConfig": "see maxPreciseIndexMegabytes of precise-prefix-cache-producer, and `models` for tokenizers",
        "kvEventsConfig": "see the parameters of precise-prefix-cache-producer",
        "speculativeIndexing": "it is always on",
        "speculativeTTL": "an entry lives as long as its request, and a grace after it",
    }

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        if request.prompt_tokens <= 0:
            return np.zeros(len(candidates))
        return np.minimum(candidates.cached_tokens / request.prompt_tokens, 1.0)
