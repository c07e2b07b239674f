"""The picker's own metrics: cheap to count on the hot path, rendered for Prometheus only when scraped.

In: the director counts requests, outcomes and reasons; other parts register counters as functions that return numbers.
Out: `render()` gives the text exposition. Names are the field's where they exist (`inference_objective_*`,
`inference_pool_*`, `inference_extension_*`), so that existing dashboards work; `kvsteer_*` is ours.

A count here is one integer addition, an observation one bisection; locked children of prometheus-client cost 1-3 us,
ten of which would double the cost of a small request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.endpoint import Endpoint, Pool
from epp.observe.exposition import gauge, labels

MAX_MODELS = 200
"""Model names are sent by clients; beyond this many, requests are counted under `other`."""
MAX_MODEL_CHARS = 256
"""A longer name is counted under `other`: it would be on a hundred lines of every page."""

DURATION_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800, 3600)
TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
DECISION_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 65536, 131072, 262144, 524288, 1048576)
BYTES = (64, 512, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
ERROR_RATIO = (0.05, 0.1, 0.2, 0.35, 0.5, 1, 2, 5, 10)


class Histogram:
    """Counts per bucket (upper bounds, ascending) and the sum of what was observed."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus buckets: (upper bound as text, observations at or below it)."""
        out, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            out.append((bound, float(running)))
        return out


class ModelStats:
    """What is counted per pair of (model asked for, model sent to the worker)."""

    __slots__ = (
        "cached_error",
        "cached_expected",
        "cached_tokens",
        "duration",
        "errors",
        "input_tokens",
        "output_tokens",
        "per_token",
        "request_bytes",
        "requests",
        "response_bytes",
        "running",
        "stages",
        "ttft",
        "ttft_error",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.running = 0
        self.errors: Counter[str] = Counter()
        self.stages: Counter[str] = Counter()
        """Decisions by how the stages of the request are spread."""
        self.duration = Histogram(DURATION_S)
        self.ttft = Histogram(TTFT_S)
        self.ttft_error = Histogram(ERROR_RATIO)
        self.cached_error = Histogram(TOKENS)
        self.cached_expected = Histogram(TOKENS)
        self.per_token = Histogram(PER_TOKEN_S)
        self.request_bytes = Histogram(BYTES)
        self.response_bytes = Histogram(BYTES)
        self.input_tokens = Histogram(TOKENS)
        self.output_tokens = Histogram(TOKENS)
        self.cached_tokens = Histogram(TOKENS)


class Metrics(Collector):
    """Everything one picker counts. One instance a process; `sources` adds the counters of other parts."""

    def __init__(self, pool: Pool, pool_name: str = "default") -> None:
        self.pool = pool
        self.pool_name = pool_name
        self.models: dict[tuple[str, str], ModelStats] = {}
        self.reasons: Counter[str] = Counter()
        """Why something was done in a lesser way: fallbacks, plugin faults, refusals."""
        self.attempts: Counter[str] = Counter()
        """Scheduling attempts by `success` or `failure`."""
        self.decision = Histogram(DECISION_S)
        self.sources: dict[str, Callable[[], Mapping[str, float | Mapping[str, float]]]] = {}
        """Name of a part -> its numbers now; see `_of_source` for what becomes of them."""
        self.families: list[Callable[[], Iterable[Metric]]] = []
        """Parts that make metrics themselves."""
        self.texts: list[Callable[[], Iterable[str]]] = []
        """Parts that make them as text (`epp.observe.exposition`)."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def model(self, model: str, target: str) -> ModelStats:
        """The counts of one model, bounded in number; where workers tell what they serve, only that has its own."""
        stats = self.models.get((model, target))
        if stats is None:
            own = len(self.models) < MAX_MODELS and len(model) <= MAX_MODEL_CHARS and self._is_served(target)
            key = (model, target) if own else ("other", "other")
            stats = self.models.setdefault(key, ModelStats())
        return stats

    def _is_served(self, model: str) -> bool:
        told = [e.models for e in self.pool.endpoints if e.models is not None]
        return not (model and told) or any(model in models for models in told)

    def render(self) -> bytes:
        """The text exposition format of Prometheus."""
        more = [*self._by_endpoint(), *(text for read in self.texts for text in read())]
        return bytes(generate_latest(self._registry)) + "".join(more).encode()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from self._requests()
        yield from self._pool()
        attempts = CounterMetricFamily(
            "inference_extension_scheduler_attempts", "Scheduling attempts", labels=["status"]
        )
        for status, count in self.attempts.items():
            attempts.add_metric([status], count)
        yield attempts
        decision = HistogramMetricFamily(
            "inference_extension_scheduler_e2e_duration_seconds", "From the whole body to the decision"
        )
        decision.add_metric([], self.decision.cumulative(), self.decision.total)
        yield decision
        reasons = CounterMetricFamily(
            "kvsteer_reasons", "Why something was done in a lesser way, by reason", labels=["reason"]
        )
        for reason, count in self.reasons.items():
            reasons.add_metric([reason], count)
        yield reasons
        stages = CounterMetricFamily(
            "llm_d_inference_scheduler_disagg_decision",
            "Decisions by how the stages of a request are spread over workers",
            labels=["model_name", "decision_type"],
        )
        spread: Counter[tuple[str, str]] = Counter()
        for (_, target), stats in self.models.items():
            spread.update({(target or "unknown", kind): count for kind, count in stats.stages.items()})
        for names, count in spread.items():
            stages.add_metric(names, count)
        yield stages
        for source, read in self.sources.items():
            for name, value in read().items():
                yield _of_source(source, name, value)
        for families in self.families:
            yield from families()

    def _requests(self) -> Iterable[Metric]:
        names = ["model_name", "target_model_name"]
        total = CounterMetricFamily("inference_objective_request", "Requests seen", labels=names)
        errors = CounterMetricFamily(
            "inference_objective_request_error", "Requests that ended in an error", labels=[*names, "error_code"]
        )
        running = GaugeMetricFamily(
            "inference_objective_running_requests", "Requests sent and not seen to end", labels=["model_name"]
        )
        per_model: Counter[str] = Counter()
        for (model, target), stats in self.models.items():
            total.add_metric([model, target], stats.requests)
            per_model[model] += stats.running
            for code, count in stats.errors.items():
                errors.add_metric([model, target, code], count)
        for model, count in per_model.items():
            running.add_metric([model], count)
        yield from (total, errors, running)
        for attribute, name, text in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=names)
            for (model, target), stats in self.models.items():
                histogram: Histogram = getattr(stats, attribute)
                family.add_metric([model, target], histogram.cumulative(), histogram.total)
            yield family

    def _pool(self) -> Iterable[Metric]:
        pool, size = self.pool, len(self.pool)
        ready = GaugeMetricFamily("inference_pool_ready_pods", "Endpoints that may be picked", labels=["name"])
        ready.add_metric([self.pool_name], sum(e.available for e in pool.endpoints))
        yield ready
        for column, name, text in (
            ("kv_usage", "inference_pool_average_kv_cache_utilization", "Mean share of KV blocks in use, 0..1"),
            ("waiting", "inference_pool_average_queue_size", "Mean requests in a worker's queue"),
            ("running", "inference_pool_average_running_requests", "Mean requests in a worker's batch"),
        ):
            known = pool.columns[column][:size]
            known = known[~np.isnan(known)]
            if len(known):
                family = GaugeMetricFamily(name, text, labels=["name"])
                family.add_metric([self.pool_name], float(known.mean()))
                yield family

    def _by_endpoint(self) -> Iterable[str]:
        endpoints = self.pool.endpoints
        names = [labels(model_server_pod=e.key, name=self.pool_name) for e in endpoints]
        for name, text, read in _PER_ENDPOINT:
            yield gauge(name, text, zip(names, map(read, endpoints), strict=True))


def _of_source(source: str, name: str, value: float | Mapping[str, float]) -> Metric:
    """A number of another part: a gauge if it ends in `_open` or `_seconds`, else a counter; by `kind` if a mapping."""
    full, text = f"kvsteer_{source}_{name}", f"{source}: {name}".replace("_", " ")
    if isinstance(value, Mapping):
        family = CounterMetricFamily(full, text, labels=["kind"])
        for kind, count in value.items():
            family.add_metric([kind.lower().replace("-", "_")], count)
        return family
    if name.endswith(("_open", "_seconds")):
        return GaugeMetricFamily(full, text, value=value)
    return CounterMetricFamily(full, text, value=value)


_PER_ENDPOINT: tuple[tuple[str, str, Callable[[Endpoint], float]], ...] = (
    ("kvsteer_endpoint_in_flight_requests", "Requests sent and not seen to end", lambda e: e.in_flight),
    (
        "kvsteer_endpoint_in_flight_tokens",
        "Uncached prompt tokens sent, first token unseen",
        lambda e: e.in_flight_tokens,
    ),
    ("kvsteer_endpoint_remote_in_flight_requests", "Requests of other replicas", lambda e: e.remote_in_flight),
    ("kvsteer_endpoint_remote_in_flight_tokens", "Uncached prompt tokens of these", lambda e: e.remote_tokens),
    ("inference_pool_per_pod_queue_size", "Requests in the worker's queue, as scraped", lambda e: e.get("waiting")),
)
_HISTOGRAMS = (
    ("duration", "inference_objective_request_duration_seconds", "From the request's head to its end"),
    ("ttft", "inference_objective_request_ttft_seconds", "From the pick to the first content of the response"),
    ("per_token", "inference_objective_normalized_time_per_output_token_seconds", "Duration over output tokens"),
    ("request_bytes", "inference_objective_request_sizes", "Request body, bytes"),
    ("response_bytes", "inference_objective_response_sizes", "Response body, bytes"),
    ("input_tokens", "inference_objective_input_tokens", "Prompt tokens reported by the worker"),
    ("output_tokens", "inference_objective_output_tokens", "Output tokens reported by the worker"),
    ("cached_tokens", "inference_objective_prompt_cached_tokens", "Cached prompt tokens reported by the worker"),
    (
        "cached_expected",
        "kvsteer_cached_tokens_expected",
        "Cached prompt tokens expected, where some are reported",
    ),
    ("cached_error", "kvsteer_cached_tokens_error", "Distance of expected and reported cached prompt tokens, tokens"),
    ("ttft_error", "kvsteer_ttft_error_ratio", "Distance of expected and seen first-token time, over the seen time"),
)
