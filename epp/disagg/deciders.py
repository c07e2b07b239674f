"""The field's rules for when a stage gets a worker of its own. Without one of them, `disagg-profile-handler` decides by
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from epp.plugin import Decider, Endpoint, InferenceRequest, NoParameters, Range


@dataclass(frozen=True, slots=True)
class Threshold:
    non_cached_tokens: Annotated[int, Range(min=0)] = 0
    """Prompt tokens which the decoding endpoint lacks, from which on they are computed elsewhere; 0: never."""


class PrefixBasedPdDecider(Decider[Threshold]):
    """A prefill worker computes the prompt when the decoding endpoint lacks `nonCachedTokens` of it or more.

    Tokens are real ones where the model is registered, else bytes over a learned rate; llm-d counts a quarter of the
    characters.
    """

    type = "prefix-based-pd-decider"
    Parameters = Threshold

    def splits(self, request: InferenceRequest, endpoint: Endpoint, cached_tokens: float) -> bool:
        threshold = self.parameters.non_cached_tokens
        return 0 < threshold <= request.prompt_tokens - cached_tokens


class AlwaysDisaggPdDecider(Decider[NoParameters]):
    """A prefill worker computes every prompt."""

    type = "always-disagg-pd-decider"

    def splits(self, request: InferenceRequest, endpoint: Endpoint, cached_tokens: float) -> bool:
        return True


class AlwaysDisaggMultimodalDecider(Decider[NoParameters]):
    """Encode workers get every prompt with images, audio or video."""

    type = "always-disagg-multimodal-decider"

    def splits(self, request: InferenceRequest, endpoint: Endpoint, cached_tokens: float) -> bool:
        return request.multimodal
