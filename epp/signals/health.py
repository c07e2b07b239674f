"""Passive health: endpoints that fail requests or refuse connections are out of picking for a while. Pure.

In: how requests ended (`failed`, `succeeded`: the director), how scrapes ended (`scraped`: the scraper), picks and the
passing of time. Out: `Endpoint.available`, and `ready_at` on return, for slow start.

    IN ----- `failures` failed requests in a row, or scrapes refused or unanswered in a row ------> OUT
    OUT ---- backoff over, pushed out by requests: one request may try --------------------------> TRIAL
    OUT ---- backoff over, pushed out by scrapes: stays out until a scrape reaches it -----------> IN
    TRIAL -- the request went well --> IN         TRIAL -- it failed, or scrapes are refused ---> OUT, for twice as long

A failure is a server error (5xx) or a connection that came to nothing. 4xx, 429 among them, is an answer. Where
response phases are off, requests show nothing and refused scrapes are the only signal.

Never are more than `max_out_share` of the pool out, and never the last endpoint: when everything fails, picking on is
no worse than not picking. What is let off for that reason is counted as `spared`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from epp.endpoint import Endpoint, Pool
from epp.signals.outcome import Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Counts are of events in a row, times in seconds."""

    failures: int = 3
    """Failed requests that push an endpoint out."""
    refused_scrapes: int = 3
    silent_scrapes: int = 10
    """Scrapes that timed out: more patience, since an engine under a long prompt may be slow to tell its metrics."""
    backoff_s: float = 1.0
    """First time out; doubles with each further one, give or take a fifth."""
    max_backoff_s: float = 60.0
    max_out_share: float = 0.5
    trial_timeout_s: float = 30.0
    """A trial whose end is not seen by then is given to another request."""
    forgive_s: float = 60.0
    """Time in the pool after which earlier times out no longer lengthen the next."""


class Phase(StrEnum):
    """Where an endpoint stands."""

    IN = "in"
    OUT = "out"
    TRIAL = "trial"


class _State:
    """What is remembered of an endpoint that gave trouble."""

    __slots__ = (
        "by_scrapes",
        "ejections",
        "failures",
        "phase",
        "refused",
        "silent",
        "since",
        "trial_picked_at",
        "until",
    )

    def __init__(self) -> None:
        self.phase = Phase.IN
        self.failures = 0
        self.refused = 0
        self.silent = 0
        self.ejections = 0
        self.by_scrapes = False
        self.since = -math.inf  # of this phase
        self.until = -math.inf  # end of the backoff
        self.trial_picked_at: float | None = None


class Health:
    """The health of one pool's endpoints. Nothing is kept of those that never gave trouble."""

    def __init__(self, pool: Pool, random: Random, settings: HealthSettings | None = None) -> None:
        self.pool = pool
        self.settings = settings or HealthSettings()
        self.counters = Counter({"failures": 0, "ejected": 0, "spared": 0, "trials": 0, "returned": 0})
        self._random = random
        self._states: dict[Endpoint, _State] = {}

    def phase(self, endpoint: Endpoint) -> Phase:
        state = self._states.get(endpoint)
        return state.phase if state else Phase.IN

    def picked(self, endpoint: Endpoint, now: float) -> None:
        """A request goes to this endpoint. On trial, it is the trial, and no other goes there until it has ended."""
        state = self._states.get(endpoint)
        if state is None or state.phase is not Phase.TRIAL or state.trial_picked_at is not None:
            return
        state.trial_picked_at = now
        self.counters["trials"] += 1
        if self._may_hide_one():
            endpoint.available = False

    def succeeded(self, endpoint: Endpoint, now: float, picked_at: float = math.inf) -> None:
        """A response below 500 came. `picked_at`: of its request; one from before a trial says nothing about it."""
        state = self._states.get(endpoint)
        if state is None:
            return
        state.failures = 0
        if state.phase is Phase.TRIAL and picked_at >= state.since:
            self._bring_back(endpoint, state, now)

    def failed(self, endpoint: Endpoint, now: float, why: str, picked_at: float = math.inf) -> None:
        """A request ended with a server error, or without any answer. `why`: for the log."""
        self.counters["failures"] += 1
        state = self._state(endpoint)
        if state.phase is Phase.OUT or picked_at < state.since:
            return  # sent before it went out or came back: known already
        state.failures += 1
        if state.phase is Phase.TRIAL or state.failures >= self.settings.failures:
            self._push_out(endpoint, state, now, why, by_scrapes=False)

    def scraped(self, endpoint: Endpoint, now: float, outcome: Outcome) -> None:
        """A scrape ended. Any HTTP answer shows that something listens."""
        if outcome in (Outcome.REFUSED, Outcome.TIMEOUT):
            state = self._state(endpoint)
            state.refused += outcome is Outcome.REFUSED
            state.silent += outcome is Outcome.TIMEOUT
            if state.phase is not Phase.OUT and self._unreachable(state):
                self._push_out(endpoint, state, now, f"scrapes: {outcome}", by_scrapes=True)
        elif known := self._states.get(endpoint):
            known.refused = known.silent = 0
            if known.phase is Phase.OUT and known.by_scrapes and now >= known.until:
                self._bring_back(endpoint, known, now)

    def tick(self, now: float) -> None:
        """Let time pass: end backoffs and lost trials, forget what is over. A few times a second is enough."""
        settings = self.settings
        for endpoint, state in list(self._states.items()):
            if endpoint.pool is not self.pool:
                del self._states[endpoint]
            elif state.phase is Phase.OUT:
                if now >= state.until and not state.by_scrapes and not self._unreachable(state):
                    self._try(endpoint, state, now)
            elif state.phase is Phase.TRIAL:
                if state.trial_picked_at is not None and now - state.trial_picked_at > settings.trial_timeout_s:
                    self._try(endpoint, state, now)
            elif now - state.since > settings.forgive_s and not (state.failures or state.refused or state.silent):
                del self._states[endpoint]
        self._keep_share(now)

    def _state(self, endpoint: Endpoint) -> _State:
        state = self._states.get(endpoint)
        if state is None:
            state = self._states[endpoint] = _State()
        return state

    def _unreachable(self, state: _State) -> bool:
        return state.refused >= self.settings.refused_scrapes or state.silent >= self.settings.silent_scrapes

    def _push_out(self, endpoint: Endpoint, state: _State, now: float, why: str, *, by_scrapes: bool) -> None:
        if endpoint.pool is not self.pool:
            return
        if endpoint.available and not self._may_hide_one():
            if state.phase is Phase.TRIAL:
                self._bring_back(endpoint, state, now)
            self.counters["spared"] += 1
            return
        if state.phase is Phase.IN and now - state.since > self.settings.forgive_s:
            state.ejections = 0
        backoff_s = min(self.settings.backoff_s * 2.0 ** min(state.ejections, 30), self.settings.max_backoff_s)
        backoff_s *= self._random.uniform(0.8, 1.2)
        state.ejections += 1
        state.phase, state.since, state.until, state.by_scrapes = Phase.OUT, now, now + backoff_s, by_scrapes
        state.failures = 0
        state.trial_picked_at = None
        endpoint.available = False
        self.counters["ejected"] += 1
        log.warning("%s is out for %.1f s or more (%s)", endpoint.key, backoff_s, why)

    def _try(self, endpoint: Endpoint, state: _State, now: float) -> None:
        state.phase, state.since, state.trial_picked_at = Phase.TRIAL, now, None
        endpoint.available = True

    def _bring_back(self, endpoint: Endpoint, state: _State, now: float) -> None:
        state.phase, state.since, state.trial_picked_at = Phase.IN, now, None
        state.failures = 0
        endpoint.available = True
        endpoint.set("ready_at", now)
        self.counters["returned"] += 1
        log.info("%s is back", endpoint.key)

    def _limit(self) -> int:
        """How many endpoints may be out."""
        size = len(self.pool)
        return min(math.floor(size * self.settings.max_out_share), size - 1)

    def _hidden(self) -> int:
        return sum(not endpoint.available for endpoint in self.pool.endpoints)

    def _may_hide_one(self) -> bool:
        return self._hidden() < self._limit()

    def _keep_share(self, now: float) -> None:
        """When others left the pool, those that have waited longest for the end of their backoff may try early."""
        excess = self._hidden() - max(self._limit(), 0)
        if excess <= 0:
            return
        hidden = [(state.until, endpoint) for endpoint, state in self._states.items() if not endpoint.available]
        for _, endpoint in sorted(hidden, key=lambda entry: entry[0])[:excess]:
            self._try(endpoint, self._states[endpoint], now)
