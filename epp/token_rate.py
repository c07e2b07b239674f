"""Bytes of prompt text per token, learned per model from what workers report.

In: the size of a request's prompt and the worker's count of its tokens. Out: the rate by which later prompts of that
model are estimated without a tokenizer. English prose has about 4.5 bytes a token, code 3 to 4: an
estimate off by half would count load and the room in a worker's cache off by half.
"""

from __future__ import annotations

from epp.request import BYTES_PER_TOKEN, InferenceRequest

MAX_MODELS = 1_000
"""Names come from clients; beyond this many nothing more is learned."""
MIN_PROMPT_BYTES = 1_024
"""Shorter prompts tell more of the chat template than of the text."""
BOUNDS = (1.0, 16.0)
"""A sample outside holds something else than text (an image in base64 has hundreds of bytes a token)."""
SLOWEST_GAIN = 0.05


def text_bytes(request: InferenceRequest) -> int:
    """Bytes of text a request's prompts have; 0 where they are token ids."""
    if request.tokens_exact or not request.prompts:
        return 0
    return sum(map(len, request.prompts)) + len(request.prompt_seed)


class TokenRates:
    """Target model -> bytes per token."""

    def __init__(self) -> None:
        self._rates: dict[str, tuple[float, int]] = {}

    def of(self, model: str) -> float:
        return self._rates.get(model, (BYTES_PER_TOKEN, 0))[0]

    def estimate(self, request: InferenceRequest) -> None:
        """Put the rate of the request's target model into a request that was just read; token ids are exact already."""
        rate = self.of(request.target_model)
        if request.tokens_exact or rate == request.bytes_per_token:
            return
        request.prompt_tokens = round(request.prompt_tokens * request.bytes_per_token / rate)
        request.bytes_per_token = rate

    def observe(self, model: str, size: int, prompt_tokens: int) -> None:
        """A worker counted the tokens of a prompt of `size` bytes of text; 0 bytes teach nothing."""
        if size <= 0 or prompt_tokens <= 0:
            return
        sample = size / prompt_tokens
        known = self._rates.get(model)
        if size < MIN_PROMPT_BYTES or not BOUNDS[0] <= sample <= BOUNDS[1]:
            return
        if known is None and len(self._rates) >= MAX_MODELS:
            return
        rate, samples = known or (sample, 0)
        gain = max(1 / (samples + 1), SLOWEST_GAIN)
        self._rates[model] = (rate + gain * (sample - rate), samples + 1)
