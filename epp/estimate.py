"""The estimate: seconds to the first token of a request at each endpoint, and what the choice costs the others.

In: a request, its cached tokens per endpoint, the pool's columns. Out: `candidates.expected_ttft` and `expected_cost`.
As requests end, the model of each endpoint learns from its own first-token times:

    ttft(e) = overhead(e) + (tokens ahead(e) + uncached(e)) / prefill rate(e) + load(e) * request_cost + restore(e)
    cost(e) = ttft(e) + (decode_weight * load(e) + eviction_weight * turnover(e)) * uncached(e) / prefill rate(e)

*Tokens ahead* are the uncached prompt tokens this picker sent there, known at once, less what the rate should have done
of them since, plus a mean request for each one in the worker's queue that is not ours, known from the scrape. *Load* is
the number of requests there: ours and what the gauges show beyond them. *Turnover*, 0..1, is how many uncached tokens
went there of late, relative to the busiest: each pushes a block out of the cache, and where blocks go round fast, the
one pushed out is the more likely to be asked for again. What is unknown or stale is neutral: it counts as the others'
mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from epp.endpoint import Pool
from epp.plugin import (
    PREFILLED_AT,
    Candidates,
    Duration,
    Endpoint,
    Floats,
    Handle,
    InferenceRequest,
    Mask,
    Outcome,
    Producer,
    Range,
)

_max, _min = np.maximum.reduce, np.minimum.reduce
"""Half the time of the methods `max` and `min`, which call these."""

RATE_BOUNDS = (50.0, 2_000_000.0)
OVERHEAD_BOUNDS = (0.001, 30.0)


@dataclass(frozen=True, slots=True)
class EstimatorParameters:
    prefill_tokens_per_second: Annotated[float, Range(*RATE_BOUNDS)] = 8000.0
    """Prefill rate of an endpoint until one is learned."""
    overhead: Duration = 0.03
    """Seconds to a first token besides prefill, until learned."""
    request_cost: Duration = 0.004
    """Seconds each request already at an endpoint adds to a new one's first token: a longer step, a longer queue."""
    decode_weight: Annotated[float, Range(min=0, max=10)] = 0.1
    """What a second's delay of one request that is being served there weighs against a second of the first token."""
    eviction_weight: Annotated[float, Range(min=0, max=10)] = 1.0
    """What a second of prefill costs in blocks it pushes out, where the cache turns over fastest."""
    turnover_half_life: Duration = 300.0
    """Time after which a token sent counts half in the turnover."""
    stale_after: Duration = 5.0
    """Age at which a scraped gauge counts as unknown; when all are older, age is ignored."""
    slow_start: Duration = 30.0
    """Time in which an endpoint that joined comes up to its full rate; 0 = at once. No effect while all are new."""


class Expectation(msgspec.Struct, frozen=True):
    """What was expected of one endpoint when it was picked."""

    work_tokens: float
    """Uncached tokens of this request and of those ahead of it."""
    uncached_tokens: float
    load: float
    prefill_s: float
    """Seconds of this request's own prefill."""


@dataclass(slots=True)
class _Pending:
    """The estimate of one request over the candidates its producer saw, until the pick."""

    candidates: Candidates
    work_s: Floats
    uncached: Floats
    load: Floats
    pace: Floats


class TTFTEstimator(Producer[EstimatorParameters]):
    """Estimates seconds to the first token at each endpoint, and learns each endpoint's prefill rate and overhead.

    `ttft = overhead + (tokens ahead + uncached) / rate + load * requestCost`. Both rate and overhead follow the
    endpoint's own first-token times in small steps on a log scale, bounded, so that one odd request moves them little.
    The tokens ahead drain by the rate, and at the latest with the first token. Where no first token is seen (response
    phases off, answers in one piece) the start values stay. An endpoint without a learned rate counts as the median of
    those that have one.
    """

    type = "ttft-estimator"
    Parameters = EstimatorParameters
    reads = ("cached_tokens",)
    writes = ("expected_ttft", "expected_cost")

    def __init__(self, parameters: EstimatorParameters, handle: Handle, name: str) -> None:
        super().__init__(parameters, handle, name)
        self._models: dict[Endpoint, FirstTokenModel] = {}
        self._learned: tuple[tuple[Endpoint, ...], Floats, Floats] | None = None
        """Pace and overhead of the last candidates, as long as nothing more is learned."""
        self._mean_uncached = 1000.0
        self._faded_at = -math.inf

    def produce(self, request: InferenceRequest, candidates: Candidates) -> None:
        """The formulas above in seconds, in place where an array is its own: 12 us for 16 endpoints, mostly calls."""
        p = self.parameters
        pace, overhead = self._pace_and_overhead(candidates)
        if (factor := _slow_start(candidates, p.slow_start)) is not None:
            pace = pace / factor
        uncached = np.maximum(request.prompt_tokens - candidates.cached_tokens, 0.0)
        uncached_s = uncached * pace
        foreign, load = _others(candidates, p.stale_after)
        foreign *= self._mean_uncached
        work_s = foreign * pace
        work_s += uncached_s
        left_s = np.maximum(candidates.column("prefill_until") - candidates.now, 0.0)
        work_s += np.minimum(candidates.column("in_flight_tokens") * pace, left_s)
        ttft = load * p.request_cost
        ttft += overhead
        ttft += work_s
        if candidates.restore_s is not None:
            ttft = ttft + candidates.restore_s
        candidates.expected_ttft = ttft
        recent = candidates.column("recent_tokens")
        cost = recent * (p.eviction_weight / max(float(_max(recent, initial=0.0)), 1.0))
        cost += load * p.decode_weight
        cost *= uncached_s
        cost += ttft
        candidates.expected_cost = cost
        request.attributes[self.name] = _Pending(candidates, work_s, uncached, load, pace)

    def _pace_and_overhead(self, candidates: Candidates) -> tuple[Floats, Floats]:
        """Seconds per token and overhead of each endpoint, shape (n,); kept while nothing is learned."""
        p = self.parameters
        # The whole pool is one tuple until its members change.
        if self._learned is None or self._learned[0] is not candidates.endpoints:
            pace = 1.0 / _or_median(candidates.column("prefill_rate"), p.prefill_tokens_per_second)
            overhead = _or_median(candidates.column("first_token_overhead"), p.overhead)
            self._learned = (candidates.endpoints, pace, overhead)
        return self._learned[1:]

    def picked(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> None:
        pending = request.attributes.get(self.name)
        if not isinstance(pending, _Pending):
            return
        now, expected = pending.candidates.now, {}
        self._fade(pending.candidates.pool, now)
        elsewhere = request.attributes.get(PREFILLED_AT)
        for endpoint in {elsewhere} if isinstance(elsewhere, Endpoint) else set(endpoints.values()):
            i = pending.candidates.endpoints.index(endpoint)
            uncached, pace = pending.uncached.item(i), pending.pace.item(i)
            prefill_s = uncached * pace
            expected[endpoint] = Expectation(pending.work_s.item(i) / pace, uncached, pending.load.item(i), prefill_s)
            self._mean_uncached += 0.05 * (uncached - self._mean_uncached)
            endpoint.set("recent_tokens", endpoint.get("recent_tokens") + uncached)
            until = endpoint.get("prefill_until")
            endpoint.set("prefill_until", max(now, until if until == until else now) + prefill_s)
        request.attributes[self.name] = expected

    def finished(self, request: InferenceRequest, endpoint: Endpoint, outcome: Outcome) -> None:
        expected = request.attributes.pop(self.name, None)
        expectation = expected.get(endpoint) if isinstance(expected, dict) else None
        if expectation is None or outcome.first_token_s is None or (outcome.status or 200) >= 400:
            return
        if outcome.served not in ("", endpoint.address):
            return
        work = expectation.work_tokens
        if outcome.prompt_tokens is not None and outcome.cached_tokens is not None:
            work += (outcome.prompt_tokens - outcome.cached_tokens) - expectation.uncached_tokens
        seconds = outcome.first_token_s - expectation.load * self.parameters.request_cost
        model = self._models.get(endpoint)
        if model is None:
            if endpoint.pool is None:
                return
            p = self.parameters
            model = self._models[endpoint] = FirstTokenModel(p.prefill_tokens_per_second, max(p.overhead, 0.001))
        model.observe(work_tokens=work, seconds=seconds)
        self._learned = None
        if model.rate_samples:
            endpoint.set("prefill_rate", model.rate)
        if model.overhead_samples:
            endpoint.set("first_token_overhead", model.overhead_s)

    def _fade(self, pool: Pool, now: float) -> None:
        half_life = self.parameters.turnover_half_life
        if half_life > 0 and now > self._faded_at:
            pool.columns["recent_tokens"] *= 0.5 ** ((now - self._faded_at) / half_life)
        self._faded_at = max(now, self._faded_at)

    def removed(self, endpoint: Endpoint) -> None:
        self._models.pop(endpoint, None)


@dataclass(slots=True)
class FirstTokenModel:
    """`seconds = overhead + work / rate` of one endpoint, learned sample by sample.

    A sample moves the one of the two that explains most of its time. Steps are on a log scale, cut to a factor of about
    4.5, and shrink to a tenth: the first samples find the order of magnitude, later ones track slowly.
    """

    rate: float
    overhead_s: float
    rate_samples: int = 0
    overhead_samples: int = 0

    def observe(self, *, work_tokens: float, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(work_tokens)):
            return
        prefill_s = max(work_tokens, 0.0) / self.rate
        if prefill_s >= self.overhead_s:
            implied = work_tokens / max(seconds - self.overhead_s, 0.1 * seconds)
            self.rate = _step(self.rate, implied, self.rate_samples, RATE_BOUNDS)
            self.rate_samples += 1
        else:
            implied = max(seconds - prefill_s, 0.1 * seconds)
            self.overhead_s = _step(self.overhead_s, implied, self.overhead_samples, OVERHEAD_BOUNDS)
            self.overhead_samples += 1


def _step(value: float, implied: float, samples: int, bounds: tuple[float, float]) -> float:
    gain = max(1.0 / (samples + 1), 0.1)
    moved = value * math.exp(gain * min(max(math.log(implied / value), -1.5), 1.5))
    return min(max(moved, bounds[0]), bounds[1])


def _or_median(values: Floats, start: float) -> Floats:
    """`values` with NaN replaced by the (upper) median of the known ones, or by `start` when none is known."""
    if not _any_nan(values):
        return values
    unknown = np.isnan(values)
    known = values[~unknown]
    if not len(known):
        return np.full(len(values), start)
    known.sort()
    return np.where(unknown, known[len(known) // 2], values)


def _any_nan(values: Floats) -> bool:
    """Squares cannot cancel each other, so their sum is NaN only for a NaN. A fifth of the time of isnan().any()."""
    return math.isnan(values.dot(values))


def _slow_start(candidates: Candidates, duration_s: float) -> Floats | None:
    """Factors on the rate, a quarter to 1, relative to the longest-serving candidate: all new is nobody new.

    None: nobody is new.
    """
    if candidates.now - float(_max(candidates.column("ready_at"), initial=-math.inf)) >= duration_s:
        return None
    ramp = np.maximum(candidates.ramp(duration_s), 0.25)
    relative: Floats = ramp / ramp.max()
    return relative


def _others(candidates: Candidates, stale_after_s: float) -> tuple[Floats, Floats]:
    """Requests in each worker's queue that are not this picker's, and all requests there; both shape (n,)."""
    own = candidates.column("in_flight")
    seen = np.maximum(own - candidates.column("unseen"), 0.0)
    waiting = candidates.column("waiting")
    foreign_waiting = np.maximum(waiting - seen, 0.0)
    foreign = np.maximum(waiting + candidates.column("running") - seen, 0.0)
    oldest = _min(candidates.column("scraped_at"), initial=math.inf)
    if oldest >= candidates.now - stale_after_s and not _any_nan(foreign):  # all known: nothing to make neutral
        return foreign_waiting, own + foreign
    fresh = candidates.fresh(stale_after_s)
    return _neutral(foreign_waiting, fresh), own + _neutral(foreign, fresh)


def _neutral(values: Floats, usable: Mask) -> Floats:
    """`values` where known and usable; elsewhere their mean there, 0 when there is none."""
    known = usable & ~np.isnan(values)
    return np.where(known, values, values[known].mean() if known.any() else 0.0)
