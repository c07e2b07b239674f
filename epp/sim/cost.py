"""How long one engine step takes: a linear model of what is computed, and presets calibrated on measurements.

`seconds = step + prefill_token * new prompt tokens + decode_sequence * sequences that decode
         + attention * sum over chunks of (new tokens * tokens they attend to)`
"""

from __future__ import annotations

from dataclasses import dataclass

from epp.sim.scheduler import SchedulerOutput


@dataclass(frozen=True, slots=True)
class CostModel:
    """All in seconds; `attention` per pair of a computed token and a token before it."""

    step: float
    prefill_token: float
    decode_sequence: float
    attention: float

    def seconds(self, output: SchedulerOutput) -> float:
        total = self.step
        for chunk in output.chunks:
            total += self.decode_sequence if chunk.is_decode else self.prefill_token * chunk.num_tokens
            total += self.attention * chunk.num_tokens * (chunk.context + chunk.num_tokens / 2)
        return total


PRESETS: dict[str, CostModel] = {
    # Fitted to first-token times of vLLM 0.32 on one busy CPU core, a 2-layer model: 47 ms at 2,000 tokens, 256 ms at
    # 7,000, 2 ms a decode step.
    "cpu-tiny": CostModel(step=0.002, prefill_token=1.7e-5, decode_sequence=1e-4, attention=5.5e-9),
    # The same with an 8-layer model: 552 ms at 2,000 tokens, 3.4 s at 7,000, 5-9 ms a decode step.
    "cpu-small": CostModel(step=0.006, prefill_token=1.87e-4, decode_sequence=5e-4, attention=8.6e-8),
    # About 16,000 prefill tokens a second, the figure llm-d's guides calibrate their gate with, 20 ms a decode step.
    "gpu-large": CostModel(step=0.015, prefill_token=5.5e-5, decode_sequence=1e-4, attention=1.5e-10),
    # Nothing costs anything: for tests of behaviour, not of time.
    "free": CostModel(step=0.0, prefill_token=0.0, decode_sequence=0.0, attention=0.0),
}
