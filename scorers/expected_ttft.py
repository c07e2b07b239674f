from dataclasses import dataclass

import numpy as np

from epp.plugin import Candidates, Duration, Floats, InferenceRequest, Scorer


@dataclass(frozen=True, slots=True)
class Parameters:
    resolution: Duration = 0.02
    """Differences well below this time hardly show in the score, so that another scorer's weight can decide there."""


class ExpectedTTFT(Scorer[Parameters]):
    """Prefers the endpoint where the request costs least time: `(best + resolution) / (cost + resolution)`, in 0..1.

    cost is the expected time to the first token there (work ahead of it, its own uncached tokens over the endpoint's
    prefill rate) plus what it delays the requests that endpoint already serves. The estimate, its learning and its
    parameters are those of the `ttft-estimator` producer.
    """

    type = "expected-ttft-scorer"
    Parameters = Parameters
    reads = ("expected_cost",)

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        cost = candidates.expected_cost
        if cost is None or not len(cost):
            return np.zeros(len(candidates))
        floor = self.parameters.resolution
        best = float(np.minimum.reduce(cost))
        return np.ones(len(cost)) if best + floor <= 0 else (best + floor) / (cost + floor)
