from dataclasses import dataclass

from epp.plugin import Candidates, Duration, Filter, InferenceRequest, Mask


@dataclass(frozen=True, slots=True)
class Parameters:
    stale_after: Duration = 10.0
    """Age of the last good scrape at which an endpoint counts as silent."""


class Health(Filter[Parameters]):
    """Drops endpoints whose metrics have fallen silent, while others still answer.

    Endpoints that fail requests are out of the candidates already. When no candidate has fresh metrics, silence tells
    nothing between them and all stay: a pool whose scraping stopped goes on serving.
    """

    type = "health-filter"
    Parameters = Parameters

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Mask:
        return candidates.fresh(self.parameters.stale_after)
