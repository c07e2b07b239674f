from epp.plugin import Candidates, Floats, InferenceRequest, NoParameters, Scorer
from scorers._spread import least_is_best


class Queue(Scorer[NoParameters]):
    """Prefers the shortest queue: `(max - q) / (max - min)` over the candidates, 1 for all when the queues are equal.

    q is the queue last scraped plus the requests sent since that scrape began, which the gauge cannot show yet: a
    burst inside one scrape interval spreads. An unknown queue counts as the longest known one.
    """

    type = "queue-scorer"

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        return least_is_best(candidates.worst_if_unknown("waiting") + candidates.column("unseen"))
