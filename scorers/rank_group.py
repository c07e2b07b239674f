from dataclasses import dataclass
from typing import Annotated

import numpy as np

from epp.plugin import Candidates, Endpoint, Floats, Handle, InferenceRequest, Range, Scorer
from scorers._spread import least_is_best


@dataclass(frozen=True, slots=True)
class RankGroupParameters:
    label: str = ""
    """Endpoints with the same value of this label are a group, those without it one group more; empty: those of the
    same host. Name the deployment by a label where an expert-parallel group spans hosts."""
    slowest: Annotated[float, Range(min=0, max=1)] = 0.5
    """Share of the group's busiest rank in its load; the rest is the mean of all its ranks."""
    tokens_per_request: Annotated[float, Range(min=1)] = 2048
    """Uncached prompt tokens not yet computed that weigh as much as one more request in flight."""


class RankGroup(Scorer[RankGroupParameters]):
    """Prefers groups of data-parallel ranks with little to do: 1 for the least loaded group, 0 for the most, linear.

    With wide expert parallelism the ranks of a group step together: a rank that prefills a long prompt stalls them all.
    A rank's load is its requests in flight and their tokens to compute, and a group's is its busiest rank's, mixed with
    the mean. Ranks that are no candidates of this request (filtered out, unhealthy) weigh in their group all the same.
    All ranks of a group score alike: beside this, use a scorer that tells them apart (cache, queue).
    """

    type = "rank-group-scorer"
    Parameters = RankGroupParameters

    def __init__(self, parameters: RankGroupParameters, handle: Handle, name: str) -> None:
        super().__init__(parameters, handle, name)
        self._known: tuple[object, int] = (None, -1)
        self._group = np.zeros(0, dtype=np.intp)
        self._sizes = np.zeros(0, dtype=np.intp)

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        pool = candidates.pool
        if self._known != (pool, pool.version):  # addresses and labels change with the version only
            names = [self._group_of(endpoint) for endpoint in pool.endpoints]
            numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
            self._group = np.array([numbers[name] for name in names], dtype=np.intp)
            self._sizes = np.bincount(self._group)
            self._known = (pool, pool.version)
        p, groups = self.parameters, len(self._sizes)
        load = pool.whole_column("in_flight") + pool.whole_column("in_flight_tokens") / p.tokens_per_request
        busiest = np.zeros(groups)
        np.maximum.at(busiest, self._group, load)
        mean = np.bincount(self._group, load, groups) / self._sizes
        of_group = p.slowest * busiest + (1.0 - p.slowest) * mean
        return least_is_best(of_group[self._group[candidates.rows]])

    def _group_of(self, endpoint: Endpoint) -> str:
        return endpoint.labels.get(self.parameters.label, "") if self.parameters.label else endpoint.host
