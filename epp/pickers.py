"""Pickers: the last step of a profile, from scored candidates to the pick and its ordered fallbacks.

In: candidates and their weighted totals, shape (n,). Out: indices, best first. `maxNumOfEndpoints` says how many; the
first is the destination, the rest are fallbacks a gateway may try in order.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from epp.plugin import Candidates, Floats, Handle, InferenceRequest, Picker, Range

TIE = 1e-9
"""Totals closer than this are equal: sums of the same scores in another order differ in the last digits."""


@dataclass(frozen=True, slots=True)
class HowMany:
    max_num_of_endpoints: Annotated[int, Range(min=1, max=64)] = 1
    """How many endpoints a decision names: the destination and its ordered fallbacks."""


class MaxScorePicker(Picker[HowMany]):
    """The highest total. Ties go to the endpoint with the fewest requests of ours in flight, then by seeded random."""

    type = "max-score-picker"
    Parameters = HowMany

    def pick(self, request: InferenceRequest, candidates: Candidates, scores: Floats) -> Sequence[int] | NDArray[Any]:
        count = min(self.parameters.max_num_of_endpoints, len(candidates))
        if count == 1:
            ties = (scores >= np.maximum.reduce(scores) - TIE).nonzero()[0]
            if len(ties) > 1:
                in_flight = candidates.column("in_flight")[ties]
                ties = ties[in_flight == np.minimum.reduce(in_flight)]
            return (ties.item(self.handle.random.randrange(len(ties)) if len(ties) > 1 else 0),)
        rounded = np.round(scores / TIE)
        order = np.lexsort((_uniform(self.handle, len(scores)), candidates.column("in_flight"), -rounded))
        return order[:count]


class RandomPicker(Picker[HowMany]):
    """Any candidate, all equally likely, whatever the scores."""

    type = "random-picker"
    Parameters = HowMany

    def pick(self, request: InferenceRequest, candidates: Candidates, scores: Floats) -> Sequence[int]:
        return _random(self.handle, len(candidates), self.parameters.max_num_of_endpoints)


class WeightedRandomPicker(Picker[HowMany]):
    """Random in proportion to the total (A-Res: the largest `u ** (1 / score)` win); a total of 0 only when all are.

    A-Res: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.
    """

    type = "weighted-random-picker"
    Parameters = HowMany

    def pick(self, request: InferenceRequest, candidates: Candidates, scores: Floats) -> Sequence[int] | NDArray[Any]:
        positive = scores > 0
        count = min(self.parameters.max_num_of_endpoints, len(candidates))
        if not positive.any():
            return _random(self.handle, len(candidates), count)
        uniform = _uniform(self.handle, len(scores))
        # In logarithms, because u ** (1 / score) is 0 for every small score. The zeros keep a random order among them.
        keys = np.where(positive, np.log(uniform) / np.where(positive, scores, 1.0), -math.inf)
        return np.lexsort((uniform, keys))[::-1][:count]


class RoundRobinPicker(Picker[HowMany]):
    """Strict rotation in the order of addresses and ranks, for each target model on its own, whatever the scores."""

    type = "round-robin-picker"
    Parameters = HowMany
    models = 1024
    """Models whose place is remembered; clients choose names, so the number is bounded (least recent go first)."""

    def __init__(self, parameters: HowMany, handle: Handle, name: str) -> None:
        super().__init__(parameters, handle, name)
        self._last: OrderedDict[str, str] = OrderedDict()

    def pick(self, request: InferenceRequest, candidates: Candidates, scores: Floats) -> Sequence[int]:
        last = self._last.pop(request.target_model, "")
        # Addresses after the last one come first; what joined or left in between does not disturb the order.
        order = sorted((e.key <= last, e.key, i) for i, e in enumerate(candidates))
        self._last[request.target_model] = order[0][1]
        if len(self._last) > self.models:
            self._last.popitem(last=False)
        return [i for _, _, i in order[: self.parameters.max_num_of_endpoints]]


def _uniform(handle: Handle, count: int) -> Floats:
    """Random numbers in (0, 1]."""
    random = handle.random.random
    return np.array([1.0 - random() for _ in range(count)])


def _random(handle: Handle, candidates: int, count: int) -> Sequence[int]:
    if count == 1:
        return (handle.random.randrange(candidates),)
    return handle.random.sample(range(candidates), min(count, candidates))
