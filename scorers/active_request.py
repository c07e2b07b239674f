from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from epp.plugin import Candidates, Floats, InferenceRequest, Range, Scorer


@dataclass(frozen=True, slots=True)
class Parameters:
    idle_threshold: Annotated[int, Range(min=0)] = 0
    """Endpoints with at most so many requests in flight are idle and score 1."""
    max_busy_score: Annotated[float, Range(min=0, max=1)] = 1.0
    """What the least busy of the others would score at no load; below 1 keeps a gap between idle and busy."""


class ActiveRequest(Scorer[Parameters]):
    """Prefers few requests in flight by the picker's own count c: idle ones 1, else `(max - c) / max * maxBusyScore`.

    max is the greatest count among the candidates. No scrape is needed.
    """

    type = "active-request-scorer"
    Parameters = Parameters
    ignored_parameters: ClassVar[Mapping[str, str]] = {
        "requestTimeout": "a request leaves the count when it ends, on every path"
    }

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        p = self.parameters
        count = candidates.column("in_flight")
        most = max(1.0, float(np.maximum.reduce(count, initial=0.0)))
        share = (most - count) / most
        if p.idle_threshold == 0 and p.max_busy_score == 1.0:  # no load scores 1 already
            return share
        return np.where(count <= p.idle_threshold, 1.0, share * p.max_busy_score)
