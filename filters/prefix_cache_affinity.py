from dataclasses import dataclass
from typing import Annotated

import numpy as np

from epp.plugin import Candidates, Filter, InferenceRequest, Mask, Range, Unit


@dataclass(frozen=True, slots=True)
class Parameters:
    affinity_threshold: Annotated[float, Range(max=1)] = 0.8
    """Share of the prompt cached from which an endpoint is one to stick to; 0 or less switches the filter off."""
    exploration_probability: Annotated[float, Range(min=0, max=1)] = 0.01
    """Share of requests for which all candidates stay, so that other endpoints get to know the prefix."""
    max_ttft_penalty_ms: Annotated[float, Range(min=0), Unit("ms")] = 5000.0
    """How much later the first token may be expected for the sake of sticking; 0 = always stick."""


class PrefixCacheAffinity(Filter[Parameters]):
    """Keeps the endpoints that hold nearly all of the prompt, unless sticking to them costs too much time.

    Sticky are those with `cached / prompt >= affinityThreshold`. All stay when there is one candidate, none is sticky,
    the exploration coin says so, or the best sticky endpoint's expected first token comes more than `maxTTFTPenaltyMs`
    after that of the best other.
    """

    type = "prefix-cache-affinity-filter"
    Parameters = Parameters
    reads = ("cached_tokens", "expected_ttft")

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Mask:
        p = self.parameters
        everyone = np.ones(len(candidates), dtype=np.bool_)
        if len(candidates) < 2 or p.affinity_threshold <= 0 or request.prompt_tokens <= 0:
            return everyone
        sticky: Mask = candidates.cached_tokens >= p.affinity_threshold * request.prompt_tokens
        if not sticky.any() or sticky.all() or self.handle.random.random() < p.exploration_probability:
            return everyone
        ttft = candidates.expected_ttft
        if ttft is not None and p.max_ttft_penalty_ms > 0:
            penalty_s = ttft[sticky].min() - ttft[~sticky].min()
            if penalty_s * 1000.0 > p.max_ttft_penalty_ms:
                return everyone
        return sticky
