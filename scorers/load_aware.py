from dataclasses import dataclass
from typing import Annotated

import numpy as np

from epp.plugin import Candidates, Floats, InferenceRequest, Range, Scorer


@dataclass(frozen=True, slots=True)
class Parameters:
    threshold: Annotated[int, Range(min=1)] = 128
    """Waiting requests at which the score reaches 0."""


class LoadAware(Scorer[Parameters]):
    """Half a point for an empty queue, falling to zero at `threshold` waiting: `0.5 * (1 - min(w, T) / T)`.

    w is the queue last scraped plus the requests sent since that scrape began; an unknown queue counts as the longest
    known one.
    """

    type = "load-aware-scorer"
    Parameters = Parameters

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        full = self.parameters.threshold
        waiting = candidates.worst_if_unknown("waiting") + candidates.column("unseen")
        return 0.5 * (1.0 - np.minimum(waiting, full) / full)
