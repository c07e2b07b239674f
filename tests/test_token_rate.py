"""Bytes per token are learned per model from what workers report."""

from __future__ import annotations

import numpy as np
import pytest

from epp.request import Api, InferenceRequest
from epp.token_rate import MAX_MODELS, TokenRates, text_bytes


def request(text: bytes = b"x" * 8_000, model: str = "m") -> InferenceRequest:
    return InferenceRequest("r", Api.CHAT, model, model, prompts=(text,), prompt_tokens=len(text) // 4)


def test_a_reported_count_changes_the_estimate_of_the_next_prompt_of_that_model() -> None:
    rates = TokenRates()
    rates.observe("m", 8_000, 1_000)
    later, other = request(), request(model="other")
    rates.estimate(later)
    rates.estimate(other)
    assert (later.prompt_tokens, later.bytes_per_token) == (1_000, 8.0)
    assert (other.prompt_tokens, other.bytes_per_token) == (2_000, 4)


def test_one_odd_sample_moves_a_settled_rate_little() -> None:
    rates = TokenRates()
    for _ in range(100):
        rates.observe("m", 8_000, 2_000)
    rates.observe("m", 8_000, 1_000)
    assert rates.of("m") == pytest.approx(4.2)


@pytest.mark.parametrize(
    ("prompt", "tokens"), [(b"hi", 1), (b"x" * 8_000, 1), (b"x" * 8_000, 100_000), (b"x" * 8_000, 0)]
)
def test_prompts_that_tell_nothing_of_text_teach_nothing(prompt: bytes, tokens: int) -> None:
    rates = TokenRates()
    rates.observe("m", text_bytes(request(prompt)), tokens)
    assert rates.of("m") == 4


def test_token_ids_are_exact_and_neither_teach_nor_are_estimated() -> None:
    rates = TokenRates()
    ids = InferenceRequest(
        "r", Api.COMPLETIONS, "m", "m", prompts=(np.arange(9_000, dtype=np.uint32),), prompt_tokens=9_000,
        tokens_exact=True,
    )  # fmt: skip
    rates.observe("m", text_bytes(ids), 9_000)
    assert rates.of("m") == 4
    rates.observe("m", 8_000, 1_000)
    rates.estimate(ids)
    assert ids.prompt_tokens == 9_000


def test_model_names_are_bounded() -> None:
    rates = TokenRates()
    for n in range(MAX_MODELS + 10):
        rates.observe(f"m{n}", 8_000, 1_000)
    assert rates.of(f"m{MAX_MODELS - 1}") == 8.0
    assert rates.of(f"m{MAX_MODELS + 1}") == 4
