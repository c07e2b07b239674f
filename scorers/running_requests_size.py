from epp.plugin import Candidates, Floats, InferenceRequest, NoParameters, Scorer
from scorers._spread import least_is_best


class RunningRequestsSize(Scorer[NoParameters]):
    """Prefers the smallest running batch: `(max - r) / (max - min)` over the candidates, 1 for all when equal.

    r is the batch last scraped plus the requests sent since that scrape began. An unknown batch counts as the largest
    known one.
    """

    type = "running-requests-size-scorer"

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        return least_is_best(candidates.worst_if_unknown("running") + candidates.column("unseen"))
