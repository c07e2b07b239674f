from dataclasses import dataclass
from typing import Annotated

import numpy as np

from epp.plugin import Candidates, Floats, InferenceRequest, Range, Scorer


@dataclass(frozen=True, slots=True)
class Parameters:
    queue_threshold_tokens: Annotated[int, Range(min=1)] = 4_194_304
    """Tokens in flight at which the score reaches 0 (128 requests of 32,768 tokens)."""


class TokenLoad(Scorer[Parameters]):
    """Prefers few prompt tokens in flight: `1 - min(t, T) / T`.

    t counts the uncached prompt tokens of the requests this picker sent whose first token has not been seen: work that
    is ahead of a new request, not tokens that lie in a cache.
    """

    type = "token-load-scorer"
    Parameters = Parameters

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        full = self.parameters.queue_threshold_tokens
        return 1.0 - np.minimum(candidates.column("in_flight_tokens"), full) / full
