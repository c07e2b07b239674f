"""Decision: the outcome for one request and why: every filter, score and estimate. Pure records, rendered lazily.

In: what the scheduler did (arrays are kept by reference, nothing is formatted on the hot path). Out: `as_dict` for the
decision log and `/debug/decisions`; `epp.explain` prints it as a table. msgspec Structs, because each is made for every
request: a frozen dataclass takes five times as long to make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from epp.endpoint import Endpoint, Floats
from epp.kvcache.tier import Tier


class FilterTrace(msgspec.Struct, frozen=True):
    """One filter's effect: endpoints that were there before and after it."""

    name: str
    before: int
    kept: tuple[Endpoint, ...]
    fault: str = ""


class ScorerTrace(msgspec.Struct, frozen=True):
    """One scorer's raw scores over the profile's final candidates, shape (n,), and its weight."""

    name: str
    weight: float
    raw: Floats
    fault: str = ""


class ProfileTrace(msgspec.Struct, frozen=True):
    """One profile's run. `chosen` is empty when no candidate was left."""

    name: str
    filters: tuple[FilterTrace, ...]
    candidates: tuple[Endpoint, ...]
    scorers: tuple[ScorerTrace, ...]
    totals: Floats
    picker: str
    chosen: tuple[Endpoint, ...]
    cached_tokens: Floats | None = None
    """Prompt tokens each candidate was believed to hold, shape (n,)."""
    expected_ttft: Floats | None = None
    """Seconds to the first token expected of each, shape (n,); None: nobody estimated."""
    cached_by_tier: Floats | None = None
    """`cached_tokens` by tier, shape (tiers, n); None: tiers are not told apart."""


class Estimate(msgspec.Struct, frozen=True):
    """What the picker expects at the chosen endpoint, to be held against what then happens."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float | None = None


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes and why. `endpoints[0]` is the destination, the rest ordered fallbacks."""

    request_id: str
    model: str
    api: str
    at: float
    """Seconds since the epoch."""
    endpoints: tuple[Endpoint, ...]
    profiles: tuple[ProfileTrace, ...]
    estimate: Estimate
    reasons: tuple[str, ...] = ()
    """Why anything was done in a lesser way (a fallback, a plugin at fault, stale metrics), by fixed names."""
    timing: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Stage -> seconds."""
    candidates: tuple[Endpoint, ...] = ()
    """Who was in question before any filter: available, and inside the gateway's subset."""
    priority: int = 0
    """Of the request, by the InferenceObjective it named."""
    prefill: Endpoint | None = None
    """Who computes the prompt; None: the destination."""
    kind: str = ""
    """How its stages are spread (`Settled.kind`); "" where the configuration has no stages."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Request headers that tell the destination of the others."""
    notes: Mapping[str, float | str | None] = msgspec.field(default_factory=dict)
    """What was compared to spread the stages."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values; scores rounded to 6 digits."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "api": self.api,
            "priority": self.priority,
            "at": self.at,
            "endpoints": [e.key for e in self.endpoints],
            "prefill": self.prefill.key if self.prefill is not None else None,
            "kind": self.kind,
            "notes": dict(self.notes),
            "estimate": {
                "prompt_tokens": self.estimate.prompt_tokens,
                "cached_tokens": self.estimate.cached_tokens,
                "ttft_s": self.estimate.ttft_s,
            },
            "reasons": list(self.reasons),
            "candidates": [e.key for e in self.candidates],
            "timing": {k: round(v, 6) for k, v in self.timing.items()},
            "profiles": [_profile(p) for p in self.profiles],
        }


def _profile(trace: ProfileTrace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "filters": [
            {"name": f.name, "before": f.before, "kept": [e.key for e in f.kept], "fault": f.fault}
            for f in trace.filters
        ],
        "candidates": [e.key for e in trace.candidates],
        "scorers": [
            {"name": s.name, "weight": s.weight, "raw": _numbers(s.raw), "fault": s.fault} for s in trace.scorers
        ],
        "totals": _numbers(trace.totals),
        "picker": trace.picker,
        "chosen": [e.key for e in trace.chosen],
        "cached_tokens": _numbers(trace.cached_tokens),
        "expected_ttft": _numbers(trace.expected_ttft),
        "cached_by_tier": _tiers(trace.cached_by_tier),
    }


def _tiers(values: Floats | None) -> dict[str, list[float | None] | None] | None:
    return None if values is None else {tier.name.lower(): _numbers(values[tier]) for tier in Tier}


def _numbers(values: Floats | None) -> list[float | None] | None:
    """JSON has no NaN and no infinity: they become null."""
    return None if values is None else [round(x, 6) if math.isfinite(x) else None for x in values.tolist()]
