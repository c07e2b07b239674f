"""What a vLLM worker counts, accumulated by the engine and rendered by `epp.sim.metrics`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from epp.sim.scheduler import SchedulerOutput
from epp.sim.sequence import Sequence

# Bucket bounds of vLLM 0.32's histograms.
TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations per bucket (not cumulative); the last is above every bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class EngineStats:
    def __init__(self) -> None:
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.requests_by_reason: Counter[str] = Counter()
        self.time_to_first_token = Histogram(TTFT)
        self.inter_token_latency = Histogram(INTER_TOKEN)
        self.e2e_request_latency = Histogram(REQUEST)
        self.request_queue_time = Histogram(REQUEST)
        self.request_prefill_time = Histogram(REQUEST)
        self.request_decode_time = Histogram(REQUEST)
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)

    def histograms(self) -> dict[str, Histogram]:
        """By vLLM's metric names, without the prefix."""
        return {
            "time_to_first_token_seconds": self.time_to_first_token,
            "inter_token_latency_seconds": self.inter_token_latency,
            "e2e_request_latency_seconds": self.e2e_request_latency,
            "request_queue_time_seconds": self.request_queue_time,
            "request_prefill_time_seconds": self.request_prefill_time,
            "request_decode_time_seconds": self.request_decode_time,
            "request_prompt_tokens": self.request_prompt_tokens,
            "request_generation_tokens": self.request_generation_tokens,
        }

    def scheduled(self, step: SchedulerOutput, now: float) -> None:
        self.preemptions += len(step.preempted)
        for sequence in step.admitted:
            sequence.first_scheduled_time = now
            self.prefix_cache_queries += sequence.num_prompt_tokens
            self.prefix_cache_hits += sequence.num_cached_tokens

    def sampled(self, sequence: Sequence, now: float) -> None:
        self.generation_tokens += 1
        if sequence.last_token_time is None:
            sequence.first_token_time = now
            self.prompt_tokens += sequence.num_prompt_tokens
            self.prompt_tokens_cached += sequence.num_cached_tokens
            self.time_to_first_token.observe(now - sequence.arrival_time)
        else:
            self.inter_token_latency.observe(now - sequence.last_token_time)
        sequence.last_token_time = now

    def finished(self, sequence: Sequence, now: float | None) -> None:
        """`now` is None for an abort: it is counted, its times mean nothing."""
        assert sequence.finish_reason is not None
        self.requests_by_reason[sequence.finish_reason] += 1
        if now is None:
            return
        assert sequence.first_scheduled_time is not None
        assert sequence.first_token_time is not None
        self.e2e_request_latency.observe(now - sequence.arrival_time)
        self.request_queue_time.observe(sequence.first_scheduled_time - sequence.arrival_time)
        self.request_prefill_time.observe(sequence.first_token_time - sequence.first_scheduled_time)
        self.request_decode_time.observe(now - sequence.first_token_time)
        self.request_prompt_tokens.observe(sequence.num_prompt_tokens)
        self.request_generation_tokens.observe(sequence.num_output_tokens)
