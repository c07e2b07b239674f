from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from epp.plugin import Candidates, Floats, InferenceRequest, Range, Scorer


@dataclass(frozen=True, slots=True)
class Parameters:
    """All of them are the producer's: set here, they go to an `approx-prefix-cache-producer` that is not configured."""

    auto_tune: bool | None = None
    block_size_tokens: Annotated[int | None, Range(min=1, max=65_536)] = None
    max_prefix_blocks_to_match: Annotated[int | None, Range(min=0)] = None
    max_prefix_tokens_to_match: Annotated[int | None, Range(min=0)] = None
    lru_capacity_per_server: Annotated[int | None, Range(min=1)] = None


class PrefixCache(Scorer[Parameters]):
    """Prefers the endpoint that holds most of the prompt: `cached tokens / prompt tokens`; 0 for all when unknown.

    What is cached is what the prefix producer believes. Alone, this sends every request with a common first block to
    one endpoint: weigh it against a load scorer, or use `expected-ttft-scorer`.
    """

    type = "prefix-cache-scorer"
    Parameters = Parameters
    reads = ("cached_tokens",)
    ignored_parameters: ClassVar[Mapping[str, str]] = {
        "blockSize": "it counted characters; set blockSizeTokens",
        "hashBlockSize": "it counted characters; set blockSizeTokens",
    }

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        if request.prompt_tokens <= 0:
            return np.zeros(len(candidates))
        return np.minimum(candidates.cached_tokens / request.prompt_tokens, 1.0)
