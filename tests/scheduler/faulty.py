"""Plugins that go wrong, each in one way, and the configuration that uses them. They count as foreign: not shipped."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from epp.config import PickerConfig, read
from epp.guard import Limits
from epp.plugin import (
    Candidates,
    Endpoint,
    Filter,
    InferenceRequest,
    NoParameters,
    Outcome,
    Picker,
    Plugin,
    Producer,
    ProfileHandler,
    Scorer,
)
from epp.registry import Registry, default_registry
from epp.scheduler import Scheduler


class Row(Scorer[NoParameters]):
    """A good one: rises with the position, so the last candidate wins."""

    type = "row"

    def score(self, request: InferenceRequest, candidates: Candidates) -> Sequence[float]:
        return [i / len(candidates) for i in range(len(candidates))]


class Raising(Filter[NoParameters], Scorer[NoParameters], Picker[NoParameters], Producer[NoParameters]):
    type = "raising"

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Sequence[bool]:
        raise KeyError("filter")

    def score(self, request: InferenceRequest, candidates: Candidates) -> Sequence[float]:
        raise KeyError("score")

    def pick(self, request: InferenceRequest, candidates: Candidates, scores: Any) -> Sequence[int]:
        raise KeyError("pick")

    def produce(self, request: InferenceRequest, candidates: Candidates) -> None:
        raise KeyError("produce")

    def picked(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> None:
        raise KeyError("picked")

    def response_headers(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> Mapping[str, str]:
        raise KeyError("response_headers")

    def finished(self, request: InferenceRequest, endpoint: Endpoint, outcome: Outcome) -> None:
        raise KeyError("finished")

    def removed(self, endpoint: Endpoint) -> None:
        raise KeyError("removed")


class Hanging(Scorer[NoParameters]):
    type = "hanging"
    let_go = threading.Event()
    calls = 0

    def score(self, request: InferenceRequest, candidates: Candidates) -> Sequence[float]:
        type(self).calls += 1
        self.let_go.wait(30)
        return [1.0] * len(candidates)


class GivingScorer(Scorer[NoParameters]):
    """Scores what `gives` says, whatever that is."""

    type = "giving-scorer"
    gives: Any = None

    def score(self, request: InferenceRequest, candidates: Candidates) -> Any:
        return self.gives


class GivingFilter(Filter[NoParameters]):
    type = "giving-filter"
    gives: Any = None

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Any:
        return self.gives


class GivingPicker(Picker[NoParameters]):
    type = "giving-picker"
    gives: Any = None

    def pick(self, request: InferenceRequest, candidates: Candidates, scores: Any) -> Any:
        return self.gives


class GivingProducer(Producer[NoParameters]):
    type = "giving-producer"
    writes = ("cached_tokens",)
    gives: Any = None

    def produce(self, request: InferenceRequest, candidates: Candidates) -> None:
        candidates.cached_tokens = self.gives


class Writing(Scorer[NoParameters]):
    """Writes into the live columns of the pool, as `x[np.isnan(x)] = 0` in a scorer would."""

    type = "writing"

    def score(self, request: InferenceRequest, candidates: Candidates) -> Any:
        waiting = candidates.column("waiting")
        waiting[:] = 7
        return np.ones(len(candidates))


class Grabbing(Filter[NoParameters], Scorer[NoParameters], Picker[NoParameters], Producer[NoParameters]):
    """Puts its own things into what it is shown, then raises an error that cannot be printed."""

    type = "grabbing"

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise KeyError("not even this")

    def grab(self, request: InferenceRequest, candidates: Candidates) -> Any:
        candidates.endpoints, candidates.rows = (), np.empty(0, dtype=np.intp)
        candidates.cached_tokens = candidates.expected_ttft = candidates.expected_cost = np.array([math.nan])
        request.prompts, request.model, request.prompt_tokens = (), "", -5
        raise self.Unprintable

    filter = score = produce = grab

    def pick(self, request: InferenceRequest, candidates: Candidates, scores: Any) -> Any:
        return self.grab(request, candidates)


class LostHandler(ProfileHandler[NoParameters]):
    """Asks for a profile that does not exist, for ever."""

    type = "lost-handler"

    def next_profiles(
        self, request: InferenceRequest, profiles: Sequence[str], results: Mapping[str, Sequence[Endpoint] | None]
    ) -> Sequence[str]:
        return ["nowhere"]

    def primary(self, results: Mapping[str, Sequence[Endpoint] | None]) -> str | None:
        return "nowhere"


class Telling(Scorer[NoParameters]):
    """Keeps what its hooks are told."""

    type = "telling"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[tuple[Any, ...]] = []

    def score(self, request: InferenceRequest, candidates: Candidates) -> Any:
        return np.ones(len(candidates))

    def picked(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> None:
        self.told.append(("picked", dict(endpoints)))

    def response_headers(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> Mapping[str, str]:
        return {"x-told": "yes"}

    def finished(self, request: InferenceRequest, endpoint: Endpoint, outcome: Outcome) -> None:
        self.told.append(("finished", endpoint, outcome))

    def removed(self, endpoint: Endpoint) -> None:
        self.told.append(("removed", endpoint))


FAULTY: list[type[Plugin[Any]]] = [
    Row,
    Raising,
    Grabbing,
    Hanging,
    GivingScorer,
    GivingFilter,
    GivingPicker,
    GivingProducer,
    Writing,
    LostHandler,
    Telling,
]


def registry() -> Registry:
    return Registry([*default_registry().classes(), *FAULTY])


def config(plugins: Sequence[str]) -> PickerConfig:
    """A configuration of these plugin types, all in one profile."""
    entries = ", ".join(f"{{type: {name}}}" for name in plugins)
    text = f"{{apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig, plugins: [{entries}]}}"
    return read(text, registry=registry())


def scheduler(*plugins: str, limits: Limits | None = None) -> Scheduler:
    patient = Limits(time_limit_s=5.0)  # what is no test of the limit must not depend on how busy the machine is
    return Scheduler(config(plugins), random=Random(1), limits=limits or patient, clock=lambda: 0.0)
