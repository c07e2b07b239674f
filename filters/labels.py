"""What the filters over an endpoint's labels share: the answer is worked out once per change of the pool.

Labels change only together with `Pool.version` (discovery applies both in one stroke), so a mask over the whole pool
stays true until then, and a request only takes its rows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from epp.plugin import Candidates, Filter, Handle, InferenceRequest, Mask

P = TypeVar("P")


class LabelFilter(Filter[P]):
    """Keeps the endpoints whose labels `matches` says yes to."""

    def __init__(self, parameters: P, handle: Handle, name: str) -> None:
        super().__init__(parameters, handle, name)
        self._known: tuple[object, int] = (None, -1)
        self._mask: Mask = np.zeros(0, dtype=np.bool_)

    def matches(self, labels: Mapping[str, str]) -> bool:
        raise NotImplementedError

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Mask:
        pool = candidates.pool
        if self._known != (pool, pool.version):
            self._mask = np.fromiter((self.matches(e.labels) for e in pool.endpoints), np.bool_, len(pool))
            self._known = (pool, pool.version)
        mask: Mask = self._mask[candidates.rows]
        return mask
