"""The contracts a plugin author reads: Filter, Scorer, Picker, ProfileHandler, Producer; and the registry of types.

A plugin is one file with one class. It names its type, types its parameters, and does one thing:

    @dataclass(frozen=True, slots=True)
    class Parameters:
        threshold: int = 128

    class LoadAware(Scorer[Parameters]):
        \"\"\"Half a point for an empty queue, falling to zero at `threshold` waiting requests.\"\"\"

        type = "load-aware-scorer"
        Parameters = Parameters

        def score(self, request, candidates):
            full = self.parameters.threshold
            return 0.5 * (1 - np.minimum(candidates.column("waiting"), full) / full)

It is used from the configuration by its `type` (shipped plugins, and third parties through the entry-point group
`kvsteer.plugins`) or as `module:Class`. The class docstring is the plugin's documentation: `kvsteer plugins` prints it
with the table of parameters.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from numpy.typing import NDArray

from epp.endpoint import ROLE_LABEL, Candidates, Endpoint, Floats, Mask
from epp.request import InferenceRequest

__all__ = [
    "DEFAULT_PRODUCERS",
    "ROLE_LABEL",
    "Candidates",
    "Decider",
    "Duration",
    "Endpoint",
    "Filter",
    "Floats",
    "Handle",
    "InferenceRequest",
    "Mask",
    "NoParameters",
    "Outcome",
    "Picker",
    "Plugin",
    "Producer",
    "ProfileHandler",
    "Range",
    "Scorer",
    "Settled",
    "Unit",
]


@dataclass(frozen=True, slots=True)
class NoParameters:
    """For plugins that take none."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number in `Parameters`, both inclusive: `threshold: Annotated[int, Range(min=1)] = 128`.

    NaN and infinity are never accepted, with or without a range. A rule over several parameters belongs into
    `__post_init__`, which raises ValueError with a sentence for the reader of the file.
    """

    min: float = -math.inf
    max: float = math.inf


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit of a parameter, for the documentation: `penalty: Annotated[float, Range(min=0), Unit("ms")] = 5000`."""

    name: str


Duration = Annotated[float, Range(min=0), Unit("duration")]
"""Seconds, written in the file as a duration with units: `2s`, `500ms`, `1m30s`."""

PREFILLED_AT = "prefilled-at"
"""Key of a request's attributes: the endpoint that computes its prompt, where that is not the destination."""

DEFAULT_PRODUCERS: Mapping[str, str] = {
    "precise_match": "precise-prefix-cache-producer",
    "cached_tokens": "approx-prefix-cache-producer",
    "expected_ttft": "ttft-estimator",
    "expected_cost": "ttft-estimator",
}
"""Field of `Candidates` -> type of the producer added when a plugin reads it and no configured one writes it.

The first comes first: whoever wants `precise_match` has its producer write `cached_tokens` too. It is no array, but the
promise that `cached_tokens` is the index's where that can be had.
"""

P = TypeVar("P")


class Handle:
    """What a plugin may ask of its surroundings while it is built and run."""

    def __init__(self, *, random: Random, plugins: Mapping[str, Plugin[Any]] | None = None) -> None:
        self.random = random
        """The picker's seeded source of randomness; use no other."""
        self.plugins: dict[str, Plugin[Any]] = dict(plugins or {})
        """Every configured plugin by name; complete before the first request, whatever the order in the file."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, as far as the picker could see; None = not seen (response phases may be off)."""

    status: int | None = None
    first_token_s: float | None = None
    """Seconds from the pick to the first response byte that carried content."""
    duration_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    aborted: bool = False
    served: str = ""
    """Address of the endpoint that really served, when the gateway told."""


class Plugin(Generic[P]):
    """What all plugins share. The optional hooks are called on the event loop and must not block."""

    type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names of the same type that existing configuration files use."""
    Parameters: ClassVar[builtins.type[Any]] = NoParameters
    """A frozen dataclass; a field `idle_threshold` is `idleThreshold` in the file. Types: bool, int, float, str,
    Literal, list or tuple, dict with str keys, nested dataclasses, `| None`; annotated `Range`, `Unit`, `Duration`."""
    ignored_parameters: ClassVar[Mapping[str, str]] = {}
    """Parameters of existing files that have no effect here (spelled as in the file) -> why; they give a warning."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Fields of `Candidates` that some producer must have written before this plugin runs (`cached_tokens`,
    `expected_ttft`, `expected_cost`). A producer runs after those that write what it reads, whatever the order in the
    file; where nothing configured writes a field that is read, `DEFAULT_PRODUCERS` names the type that is added."""

    @classmethod
    def references(cls, parameters: Any) -> Mapping[str, str]:
        """Other plugins that its parameters name, which must be there: place in them (`deciders.prefill`) -> name."""
        return {}

    def __init__(self, parameters: P, handle: Handle, name: str) -> None:
        self.parameters = parameters
        self.handle = handle
        self.name = name

    def picked(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> None:
        """After a decision: profile name -> the endpoint chosen in it. The request's prompts are let go after it."""

    def response_headers(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> Mapping[str, str]:
        """Headers to add to the client's response."""
        return {}

    def finished(self, request: InferenceRequest, endpoint: Endpoint, outcome: Outcome) -> None:
        """When the request is over, once, on every path."""

    def removed(self, endpoint: Endpoint) -> None:
        """When an endpoint left the pool."""


class Producer(Plugin[P]):
    """Computes, before any profile runs, what filters and scorers read (for example `candidates.cached_tokens`)."""

    writes: ClassVar[tuple[str, ...]] = ()
    """Fields of `Candidates` it sets."""

    def produce(self, request: InferenceRequest, candidates: Candidates) -> None:
        raise NotImplementedError


class Filter(Plugin[P]):
    """Says which candidates stay."""

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Sequence[bool] | Mask:
        """One truth value per candidate, in order. All false ends the profile: no endpoint is left."""
        raise NotImplementedError


class Scorer(Plugin[P]):
    """Rates candidates from 0 (worst) to 1 (best)."""

    def score(self, request: InferenceRequest, candidates: Candidates) -> Sequence[float] | Floats:
        """One score per candidate, in order. Values outside 0..1 are clipped; NaN counts as 'no opinion' (0)."""
        raise NotImplementedError


class Picker(Plugin[P]):
    """Chooses from scored candidates."""

    def pick(self, request: InferenceRequest, candidates: Candidates, scores: Floats) -> Sequence[int] | NDArray[Any]:
        """Indices into `candidates`, best first: the pick and its ordered fallbacks; never empty."""
        raise NotImplementedError


class Decider(Plugin[P]):
    """Says whether a request is worth a worker of its own for one of its stages."""

    def splits(self, request: InferenceRequest, endpoint: Endpoint, cached_tokens: float) -> bool:
        """`endpoint` would decode it, and is believed to hold `cached_tokens` of its prompt."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Settled:
    """What a handler makes of the results of its profiles."""

    endpoints: Mapping[str, Sequence[Endpoint]]
    """Profile -> its endpoints, best first; a profile that is left out takes no part in the request."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Request headers toward the destination."""
    prefill: Endpoint | None = None
    """Who computes the prompt; None: the destination does."""
    expected_ttft: float | None = None
    """Seconds to the first token, where other than the destination's own estimate says."""
    kind: str = ""
    """`decode-only`, `prefill-decode`, `encode-decode`, `encode-prefill-decode`, `peer-pull`; for metrics."""
    reasons: tuple[str, ...] = ()
    """Why it is done in a lesser way."""
    notes: Mapping[str, float | str | None] = field(default_factory=dict)
    """What was compared, for the decision's record."""


class ProfileHandler(Plugin[P]):
    """Says which profiles run, in what order, and which one's endpoint is the destination."""

    @classmethod
    def needs_profiles(cls, parameters: Any) -> Sequence[str]:
        """Profiles that the configuration must have for it. Checked on reading."""
        return ()

    def next_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Mapping[str, Sequence[Endpoint] | None],
    ) -> Sequence[str]:
        """Profiles to run now, given those that ran (None: it found no endpoint); empty = done."""
        raise NotImplementedError

    def primary(self, results: Mapping[str, Sequence[Endpoint] | None]) -> str | None:
        """The profile whose endpoints are the destination; None when the request cannot be served."""
        raise NotImplementedError

    def settle(
        self,
        request: InferenceRequest,
        candidates: Mapping[str, Candidates],
        results: Mapping[str, Sequence[Endpoint] | None],
    ) -> Settled | None:
        """After the last round: choose among what the profiles left, together. None: each profile's pick stands.

        `candidates`: profile -> those that passed its filters, in the order of its totals' rows.
        """
        return None
