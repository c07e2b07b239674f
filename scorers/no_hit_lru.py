from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from epp.plugin import Candidates, Endpoint, Floats, Handle, InferenceRequest, Range, Scorer


@dataclass(frozen=True, slots=True)
class NoHitLRUParameters:
    lru_size: Annotated[int, Range(min=1)] = 1024
    """Endpoints remembered."""


class NoHitLRU(Scorer[NoHitLRUParameters]):
    """Spreads cold prompts: among n candidates, `1 - rank / (n - 1)`, never used ones first, then least recently used.

    Applies to requests of which no candidate holds anything; any other request scores 0.5 everywhere. Only cold
    requests move an endpoint in the order.
    """

    type = "no-hit-lru-scorer"
    Parameters = NoHitLRUParameters
    reads = ("cached_tokens",)
    ignored_parameters: ClassVar[Mapping[str, str]] = {
        "prefixPluginType": "cached tokens come with the candidates, from any prefix producer",
        "prefixPluginName": "cached tokens come with the candidates, from any prefix producer",
    }

    def __init__(self, parameters: NoHitLRUParameters, handle: Handle, name: str) -> None:
        super().__init__(parameters, handle, name)
        self._used: OrderedDict[Endpoint, int] = OrderedDict()
        self._clock = 0

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        n = len(candidates)
        if candidates.cached_tokens.any():
            return np.full(n, 0.5)
        request.attributes[self.name] = "cold"
        if n == 1:
            return np.ones(1)
        last = np.array([self._used.get(e, 0) for e in candidates])
        rank = np.empty(n)
        rank[np.argsort(last, kind="stable")] = np.arange(n)
        return 1.0 - rank / (n - 1)

    def picked(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> None:
        if request.attributes.get(self.name) != "cold":
            return
        self._clock += 1
        for endpoint in endpoints.values():
            self._used[endpoint] = self._clock
            self._used.move_to_end(endpoint)
        while len(self._used) > self.parameters.lru_size:
            self._used.popitem(last=False)

    def removed(self, endpoint: Endpoint) -> None:
        self._used.pop(endpoint, None)
