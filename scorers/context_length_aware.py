from dataclasses import dataclass

import numpy as np

from epp.plugin import Candidates, Endpoint, Filter, Floats, InferenceRequest, Mask, Scorer


@dataclass(frozen=True, slots=True)
class Parameters:
    label: str = "llm-d.ai/context-length-range"
    """The endpoint's label with the prompt lengths it is meant for: `min-max`, in tokens, both inclusive."""
    enable_filtering: bool = False
    """As a filter, drop endpoints whose range does not hold the prompt."""


class ContextLengthAware(Filter[Parameters], Scorer[Parameters]):
    """Sends prompts to endpoints meant for their length: a scorer, and with `enableFiltering` a filter as well.

    Score for a prompt of L tokens and a label `min-max` of width W: inside the range
    `0.3 + 0.7 * (0.7 / (1 + W / 10000) + 0.3 * (max - L) / W)` (narrow ranges and room to grow are better; 1 when W is
    0), outside `0.3 / (1 + distance / 1000)`, no label 0.5, a label that cannot be read 0. The filter keeps endpoints
    in range and unlabelled ones.
    """

    type = "context-length-aware"
    Parameters = Parameters

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Mask:
        if not self.parameters.enable_filtering:
            return np.ones(len(candidates), dtype=np.bool_)
        return np.array([self._keeps(request.prompt_tokens, e) for e in candidates], dtype=np.bool_)

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        return np.array([self._score(request.prompt_tokens, e) for e in candidates], dtype=np.float64)

    def _keeps(self, length: int, endpoint: Endpoint) -> bool:
        text = endpoint.labels.get(self.parameters.label)
        if text is None:
            return True
        bounds = parse_range(text)
        return bounds is not None and bounds[0] <= length <= bounds[1]

    def _score(self, length: int, endpoint: Endpoint) -> float:
        text = endpoint.labels.get(self.parameters.label)
        if text is None:
            return 0.5
        bounds = parse_range(text)
        if bounds is None:
            return 0.0
        low, high = bounds
        if not low <= length <= high:
            return 0.3 / (1 + max(low - length, length - high) / 1000)
        width = high - low
        return 0.3 + 0.7 * (0.7 / (1 + width / 10_000) + 0.3 * (high - length) / width) if width else 1.0


def parse_range(text: str) -> tuple[int, int] | None:
    """`"0-2048"` -> (0, 2048); None for anything that is not two whole numbers in order."""
    low, dash, high = text.partition("-")
    if not dash or not (_whole(low) and _whole(high)) or int(low) > int(high):
        return None
    return int(low), int(high)


def _whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 12
