"""Calls of plugins that read strictly what comes back: a usable value, or a `Fault` that says what was wrong.

In: a plugin and its arguments. Out: checked values (a mask, scores, endpoints, names of profiles). The scheduler runs
these under the plugin's guard, so that odd return values (lazy, endless, raising when looked at) are its fault too.
Shipped producers and scorers are called without: the checks took a sixth of a decision.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from epp.endpoint import PRODUCED, Candidates, Endpoint, Floats, Mask
from epp.guard import Fault
from epp.kvcache.tier import Tier
from epp.plugin import Filter, Picker, Producer, ProfileHandler, Scorer, Settled
from epp.request import InferenceRequest


def next_profiles(
    handler: ProfileHandler[Any],
    request: InferenceRequest,
    profiles: Sequence[str],
    results: Mapping[str, Sequence[Endpoint] | None],
) -> Sequence[str]:
    """Profiles to run now, each known and not run before."""
    names = list(islice(handler.next_profiles(request, profiles, results), len(profiles) + 1))
    for name in names:
        if name not in profiles or name in results:
            raise Fault("shape", f"asked for profile {name!r:.80}, which is unknown or has run")
    return list(dict.fromkeys(names))


def primary(handler: ProfileHandler[Any], results: Mapping[str, Sequence[Endpoint] | None]) -> str | None:
    """A profile that ran, or None."""
    primary = handler.primary(results)
    if primary is not None and primary not in results:
        raise Fault("shape", f"named profile {primary!r:.80}, which did not run")
    return primary


def settled(
    handler: ProfileHandler[Any],
    request: InferenceRequest,
    candidates: Mapping[str, Candidates],
    results: Mapping[str, Sequence[Endpoint] | None],
) -> Settled | None:
    """What the handler chose together: endpoints of the profiles' own candidates, or None."""
    made = handler.settle(request, candidates, results)
    if made is None:
        return None
    if not isinstance(made, Settled):
        raise Fault("shape", f"settled on {made!r:.80}")
    for name, endpoints in made.endpoints.items():
        known = candidates[name].endpoints if name in candidates else ()
        if not all(endpoint in known for endpoint in endpoints):
            raise Fault("shape", f"settled on endpoints for {name!r:.80} that its filters did not leave")
    return made


Estimates = tuple[Any, ...]


def produced(producer: Producer[Any], request: InferenceRequest, candidates: Candidates) -> Estimates:
    """What the candidates' arrays (`PRODUCED`) are after it, in order, unchecked."""
    producer.produce(request, candidates)
    return tuple(getattr(candidates, field) for field in PRODUCED)


def mask(filter_: Filter[Any], request: InferenceRequest, candidates: Candidates) -> Mask:
    """Who stays: bool, shape (n,)."""
    count = len(candidates)
    given = filter_.filter(request, candidates)
    try:
        keep = np.asarray(given)
    except Exception as error:
        raise Fault("shape", f"{type(error).__name__}: {error}") from error
    if keep.shape != (count,) or keep.dtype != np.bool_:
        raise Fault("shape", f"returned {keep.dtype} of shape {keep.shape} for {count} candidates")
    return keep


def scores(scorer: Scorer[Any], request: InferenceRequest, candidates: Candidates) -> Floats:
    """Raw scores: float64, shape (n,); may hold NaN and values outside 0..1."""
    count = len(candidates)
    given = scorer.score(request, candidates)
    try:
        scores = np.asarray(given, dtype=np.float64)
    except Exception as error:
        raise Fault("shape", f"{type(error).__name__}: {error}") from error
    if scores.shape != (count,):
        raise Fault("shape", f"returned shape {scores.shape} for {count} candidates")
    return scores


def chosen(
    picker: Picker[Any], request: InferenceRequest, candidates: Candidates, totals: Floats
) -> tuple[Endpoint, ...]:
    """Endpoints, best first, at least one, each once."""
    endpoints, count = candidates.endpoints, len(candidates)
    given = picker.pick(request, candidates, totals)
    try:
        indices = [operator.index(i) for i in islice(given, count)]
    except Exception as error:
        raise Fault("shape", f"picked {given!r:.80}") from error
    if not indices or min(indices) < 0 or max(indices) >= count:
        raise Fault("shape", f"picked {indices[:8]} of {count} candidates")
    return tuple(dict.fromkeys([endpoints[i] for i in indices]))


def repair(candidates: Candidates) -> str:
    """Replace what a producer left that nobody could use; say what it was."""
    wrong, shape = "", (len(candidates),)
    cached = candidates.cached_tokens
    # The square's sum is finite when all values are (and not absurd): a fifth of the time of isfinite().all().
    if not _are_numbers(cached, shape) or not math.isfinite(cached.dot(cached)):
        candidates.cached_tokens = np.zeros(shape)
        wrong = "cached_tokens must be finite numbers, one per candidate"
    for field in PRODUCED[1:]:
        values = getattr(candidates, field)
        fits = (len(Tier), *shape) if field == "cached_by_tier" else shape
        if values is not None and not _are_numbers(values, fits):
            setattr(candidates, field, None)
            wrong = f"{field} must be numbers, one per candidate"
    return wrong


def _are_numbers(values: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(values, np.ndarray) and values.shape == shape and values.dtype.kind in "fiu"


def freeze(candidates: Candidates) -> None:
    """Filters and scorers of one request share the arrays; none may change them under the others."""
    for field in PRODUCED:
        values = getattr(candidates, field)
        if values is not None:
            values = values.view()
            values.flags.writeable = False
            setattr(candidates, field, values)
