"""The scheduler: from a request and the candidates to a Decision. Filter, score, pick.

In: an `InferenceRequest`, the `Candidates` of the pool, the time. Out: a `Decision`, or `Unschedulable` with the
decision that shows why. Pure: no socket, no wall clock, no randomness but the seeded source of its plugins (the clock
it is given only times the stages).

    producers -> handler -> for each profile: filters in order -> scorers -> weighted sum -> picker -> decision

A plugin that raises, returns NaN or a wrong shape, or hangs costs its own contribution only: a filter at fault keeps
all, a scorer adds 0, a picker is replaced by the highest total, a handler by running every profile in order. Each
fault is in the trace and in the decision's reasons, is counted in `faults`, and is logged the first time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any, cast

import msgspec
import numpy as np

from epp import returned
from epp.config import ConfigError, PickerConfig, PluginConfig, ProfileConfig
from epp.decision import Decision, Estimate, FilterTrace, ProfileTrace, ScorerTrace
from epp.document import Problem, one_line
from epp.endpoint import PRODUCED, Candidates, Endpoint, Floats
from epp.guard import Fault, Faults, Guard, Limits
from epp.pickers import HowMany, MaxScorePicker
from epp.plugin import Filter, Handle, Outcome, Picker, Plugin, Producer, ProfileHandler, Scorer, Settled
from epp.request import InferenceRequest

NO_CANDIDATES = "no-candidates"
"""Nobody to ask: the pool is empty, or nothing in it is available and inside the gateway's subset."""
ALL_FILTERED = "all-filtered"
"""There were candidates, and the filters of the profile that matters left none."""


class Unschedulable(Exception):
    """No endpoint for this request. `reason` is NO_CANDIDATES or ALL_FILTERED; `decision` has no endpoints."""

    def __init__(self, reason: str, decision: Decision) -> None:
        super().__init__(reason)
        self.reason = reason
        self.decision = decision


@dataclass(frozen=True, slots=True)
class _Profile:
    name: str
    filters: tuple[tuple[str, Guard, Filter[Any]], ...]
    scorers: tuple[tuple[str, Guard, Callable[[InferenceRequest, Candidates], Any]], ...]
    weights: Floats
    weight_list: tuple[float, ...]
    picker: tuple[str, Guard, Picker[Any]]


class _Run(msgspec.Struct):
    """One request on its way through the profiles."""

    request: InferenceRequest
    candidates: Candidates
    reasons: list[str] = msgspec.field(default_factory=list)
    traces: list[ProfileTrace] = msgspec.field(default_factory=list)
    results: dict[str, Sequence[Endpoint] | None] = msgspec.field(default_factory=dict)
    estimates: dict[str, Estimate] = msgspec.field(default_factory=dict)
    remaining: dict[str, Candidates] = msgspec.field(default_factory=dict)
    settled: Settled | None = None


class Scheduler:
    """One configuration at work. Built anew for a changed configuration, keeping the plugins that stayed the same."""

    def __init__(
        self,
        config: PickerConfig,
        *,
        random: Random | None = None,
        previous: Scheduler | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Make the plugins. Raises ConfigError when one cannot be made; `previous` then stays as it was.

        `previous`: a plugin with the same name, class and parameters is taken over from there with its state, and what
        is not given here (randomness, limits, clock) stays as there. May run on a thread beside `previous` at work.
        """
        self.config = config
        self.faults: Faults = previous.faults if previous else Faults()
        self.handle: Handle = previous.handle if previous else Handle(random=random or Random())
        self._limits: Limits = limits or (previous._limits if previous else Limits())
        self._clock: Callable[[], float] = clock or (previous._clock if previous else time.perf_counter)
        self._guards: dict[str, Guard] = {}
        for wanted in config.plugins:
            kept = previous._kept(wanted) if previous else None
            self._guards[wanted.name] = kept or Guard(_make(wanted, self.handle, config.source), self._limits)
        self.plugins: dict[str, Plugin[Any]] = {name: guard.plugin for name, guard in self._guards.items()}
        self.handle.plugins = dict(self.plugins)
        self._producers = [(n, self._guards[n], _producing(self._guards[n])) for n in config.producers]
        self._all_shipped = all(guard.inline for guard in self._guards.values())
        self._profiles = {p.name: self._profile(p) for p in config.profiles}
        self._names = tuple(self._profiles)
        self._handler_guard = self._guards[config.handler]
        self._handler = cast(ProfileHandler[Any], self._handler_guard.plugin)
        self._settles = type(self._handler).settle is not ProfileHandler.settle
        self._fallback_picker = MaxScorePicker(HowMany(), self.handle, "fallback")
        self._hooks = {
            hook: [(n, g, getattr(g.plugin, hook)) for n, g in self._guards.items() if _overrides(g.plugin, hook)]
            for hook in ("picked", "response_headers", "finished", "removed")
        }

    def _kept(self, wanted: PluginConfig) -> Guard | None:
        guard = self._guards.get(wanted.name)
        if guard is not None and type(guard.plugin) is wanted.cls and guard.plugin.parameters == wanted.parameters:
            return guard
        return None

    def _profile(self, config: ProfileConfig) -> _Profile:
        def named(name: str) -> tuple[str, Guard, Any]:
            return name, self._guards[name], self._guards[name].plugin

        return _Profile(
            config.name,
            tuple(named(name) for name in config.filters),
            tuple((name, self._guards[name], _scoring(self._guards[name])) for name, _ in config.scorers),
            np.array([weight for _, weight in config.scorers], dtype=np.float64),
            tuple(float(weight) for _, weight in config.scorers),
            named(config.picker),
        )

    # --- one request ---

    def schedule(self, request: InferenceRequest, candidates: Candidates, at: float) -> Decision:
        """Decide where `request` goes. `at`: seconds since the epoch, for the record. Raises Unschedulable."""
        clock = self._clock
        started = clock()
        run = _Run(request, candidates)
        primary: str | None = None
        produced = started
        if len(candidates):
            self._produce(run)
            produced = clock()
            primary = self._run_profiles(run)
        endpoints = tuple(run.results[primary] or ()) if primary is not None else ()
        estimate = run.estimates[primary] if primary is not None and endpoints else Estimate(request.prompt_tokens, 0)
        settled = run.settled
        if settled is not None and endpoints:
            estimate = _settled_estimate(request, candidates, settled, endpoints[0])
        ended = clock()
        decision = Decision(
            request.request_id,
            request.model,
            request.api.value,
            at,
            endpoints,
            tuple(run.traces),
            estimate,
            tuple(dict.fromkeys((*request.reasons, *run.reasons))),
            {"produce": produced - started, "profiles": ended - produced, "total": ended - started},
            candidates.endpoints,
        )
        if settled is not None and endpoints:
            decision = msgspec.structs.replace(
                decision, prefill=settled.prefill, kind=settled.kind, headers=settled.headers, notes=settled.notes
            )
        if not endpoints:
            raise Unschedulable(ALL_FILTERED if len(candidates) else NO_CANDIDATES, decision)
        return decision

    def _produce(self, run: _Run) -> None:
        candidates = run.candidates
        for name, guard, produce in self._producers:
            try:
                made = guard.call(candidates.now, produce, run.request, candidates)
                if made is not None:
                    for field, values in zip(PRODUCED, made, strict=True):
                        setattr(candidates, field, values)
            except Fault as fault:
                self._note(name, fault, run)
            if not guard.inline and (wrong := returned.repair(candidates)):
                self._note(name, Fault("shape", wrong), run)
        self._freeze(candidates)

    def _freeze(self, candidates: Candidates) -> None:
        """Filters and scorers of one request share the arrays; ours know not to write."""
        if not self._all_shipped:
            returned.freeze(candidates)

    def _run_profiles(self, run: _Run) -> str | None:
        """Run what the handler asks for; the profile that decides, or None."""
        handler, guard, now = self._handler, self._handler_guard, run.candidates.now
        results = MappingProxyType(run.results)
        # Each round runs a profile that has not run, or ends.
        while len(results) < len(self._names):
            try:
                names = guard.call(now, returned.next_profiles, handler, run.request, self._names, results)
            except Fault as fault:
                self._note(handler.name, fault, run)
                names = [n for n in self._names if n not in results]
            if not names:
                break
            for name in names:
                trace = self._run_profile(self._profiles[name], run)
                run.traces.append(trace)
                run.results[name] = trace.chosen or None
        if self._settles:
            self._settle(run)
        try:
            return guard.call(now, returned.primary, handler, results)
        except Fault as fault:
            self._note(handler.name, fault, run)
            return next((name for name, endpoints in results.items() if endpoints), None)

    def _settle(self, run: _Run) -> None:
        """Let the handler choose among the profiles' candidates together; its choice replaces their picks."""
        try:
            settled = self._handler_guard.call(
                run.candidates.now, returned.settled, self._handler, run.request, run.remaining, run.results
            )
        except Fault as fault:
            self._note(self._handler.name, fault, run)
            return
        if settled is None:
            return
        run.settled = settled
        run.reasons.extend(settled.reasons)
        for i, trace in enumerate(run.traces):
            chosen = tuple(settled.endpoints.get(trace.name) or ())
            run.results[trace.name] = chosen or None
            if chosen != trace.chosen:
                run.traces[i] = msgspec.structs.replace(trace, chosen=chosen)

    def _run_profile(self, profile: _Profile, run: _Run) -> ProfileTrace:
        request, remaining, now = run.request, run.candidates, run.candidates.now
        filters: list[FilterTrace] = []
        for name, guard, filter_ in profile.filters:
            before, text = len(remaining), ""
            try:
                remaining = remaining.select(guard.call(now, returned.mask, filter_, request, remaining))
            except Fault as fault:
                text = self._note(name, fault, run)
            filters.append(FilterTrace(name, before, remaining.endpoints, text))
            if not remaining:
                return ProfileTrace(profile.name, tuple(filters), (), (), np.zeros(0), profile.picker[0], ())
        if remaining is not run.candidates:
            self._freeze(remaining)
        if self._settles:
            run.remaining[profile.name] = remaining
        scorers, totals = self._score(profile, remaining, run)
        name, guard, picker = profile.picker
        try:
            chosen = guard.call(now, returned.chosen, picker, request, remaining, totals)
        except Fault as fault:
            self._note(name, fault, run)
            chosen = returned.chosen(self._fallback_picker, request, remaining, totals)
        run.estimates[profile.name] = _estimate(request, remaining, chosen[0])
        return ProfileTrace(
            profile.name,
            tuple(filters),
            remaining.endpoints,
            scorers,
            totals,
            name,
            chosen,
            remaining.cached_tokens,
            remaining.expected_ttft,
            remaining.cached_by_tier,
        )

    def _score(self, profile: _Profile, candidates: Candidates, run: _Run) -> tuple[tuple[ScorerTrace, ...], Floats]:
        """What each scorer says, and the weighted sum, shape (n,)."""
        count, scorers = len(candidates), profile.scorers
        # One row per scorer: a copy of what the plugin gave (it may go on using its array), and the sum is one product.
        raw = np.zeros((len(scorers), count))
        texts = [""] * len(scorers)
        for i, (name, guard, score) in enumerate(scorers):
            try:
                raw[i] = guard.call(candidates.now, score, run.request, candidates)
            except Fault as fault:
                texts[i] = self._note(name, fault, run)
        # The comparison is false also when there is a NaN.
        if scorers and not (np.minimum.reduce(raw, None) >= 0.0 and np.maximum.reduce(raw, None) <= 1.0):
            for i, missing in enumerate(np.isnan(raw).sum(axis=1).tolist()):
                if missing:
                    texts[i] = self._note(scorers[i][0], Fault("nan", f"for {missing} of {count} candidates"), run)
            raw = np.clip(np.nan_to_num(raw, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0)
        totals = profile.weights.dot(raw)
        totals.flags.writeable = False
        traces = [
            ScorerTrace(name, weight, row, text)
            for (name, _, _), weight, row, text in zip(scorers, profile.weight_list, raw, texts, strict=True)
        ]
        return tuple(traces), totals

    def _note(self, plugin: str, fault: Fault, run: _Run) -> str:
        self.faults.note(plugin, fault)
        run.reasons.append(f"plugin-fault:{plugin}:{fault.kind}")
        return str(fault)

    # --- the plugins' hooks: each is called on every plugin that has it, whatever the others do ---

    def picked(self, request: InferenceRequest, decision: Decision, now: float) -> None:
        """Tell the plugins what was decided, before the next decision is made."""
        if self._hooks["picked"]:
            self._run_hooks("picked", now, request, _first_endpoints(decision))

    def response_headers(self, request: InferenceRequest, decision: Decision, now: float) -> dict[str, str]:
        """Headers that plugins add to the client's response."""
        headers: dict[str, str] = {}
        if self._hooks["response_headers"]:
            for added in self._run_hooks("response_headers", now, request, _first_endpoints(decision)):
                if isinstance(added, Mapping):
                    headers.update((str(name), str(value)) for name, value in added.items())
        return headers

    def finished(self, request: InferenceRequest, endpoint: Endpoint, outcome: Outcome, now: float) -> None:
        """Tell the plugins that a request is over. To be called on the scheduler that picked, once per request."""
        self._run_hooks("finished", now, request, endpoint, outcome)

    def removed(self, endpoint: Endpoint, now: float) -> None:
        """Tell the plugins that an endpoint left the pool."""
        self._run_hooks("removed", now, endpoint)

    def _run_hooks(self, hook: str, now: float, *args: Any) -> list[Any]:
        answers = []
        for name, guard, function in self._hooks[hook]:
            try:
                answers.append(guard.call(now, function, *args))
            except Fault as fault:
                self.faults.note(name, fault)
        return answers


def _make(wanted: PluginConfig, handle: Handle, source: str) -> Plugin[Any]:
    try:
        plugin = wanted.cls(wanted.parameters, handle, wanted.name)
        if not (hasattr(plugin, "parameters") and hasattr(plugin, "name")):
            raise TypeError("its __init__ does not call super().__init__(parameters, handle, name)")
        return plugin
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        why = f'"{wanted.name}" cannot be made: {type(error).__name__}: {error}'
        raise ConfigError(source, [Problem(wanted.line, "plugins", one_line(why))]) from error


def _producing(guard: Guard) -> Callable[[InferenceRequest, Candidates], Any]:
    """What runs a producer; it gives the candidates' arrays when these have to be taken over and looked at."""
    producer = cast(Producer[Any], guard.plugin)
    return producer.produce if guard.inline else partial(returned.produced, producer)


def _scoring(guard: Guard) -> Callable[[InferenceRequest, Candidates], Any]:
    """What gives a scorer's scores, shape (n,)."""
    scorer = cast(Scorer[Any], guard.plugin)
    return scorer.score if guard.inline else partial(returned.scores, scorer)


def _overrides(plugin: Plugin[Any], hook: str) -> bool:
    return getattr(type(plugin), hook) is not getattr(Plugin, hook)


def _first_endpoints(decision: Decision) -> Mapping[str, Endpoint]:
    return {trace.name: trace.chosen[0] for trace in decision.profiles if trace.chosen}


def _settled_estimate(
    request: InferenceRequest, candidates: Candidates, settled: Settled, endpoint: Endpoint
) -> Estimate:
    """What is expected of a request whose prompt another endpoint computes."""
    at = _estimate(request, candidates, settled.prefill or endpoint)
    return Estimate(
        at.prompt_tokens, at.cached_tokens, at.ttft_s if settled.expected_ttft is None else settled.expected_ttft
    )


def _estimate(request: InferenceRequest, candidates: Candidates, endpoint: Endpoint) -> Estimate:
    row = candidates.endpoints.index(endpoint)
    expected = candidates.expected_ttft
    ttft = float(expected[row]) if expected is not None and row < len(expected) else math.nan
    return Estimate(request.prompt_tokens, int(candidates.cached_tokens[row]), ttft if math.isfinite(ttft) else None)
