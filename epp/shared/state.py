"""What this picker and its other replicas share, tied to its pool and its plugins. No I/O.

In: picks and their ends from the director, members from discovery, messages and chunks of snapshots from whoever
carries them. Out: messages and chunks; `Endpoint.count_remote` and what learners learn. Nothing in here waits: a pick
costs an entry in a list, the rest is done when a batch is due.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from epp.endpoint import Endpoint, Pool
from epp.kvcache.blocks import Keys
from epp.kvcache.tier import Tier
from epp.request import InferenceRequest
from epp.shared.chains import Told
from epp.shared.learning import End, Holding, Learner, Shares
from epp.shared.messages import CHAIN, MAX_KEYS, VERSION, Chunk, Known, Passage, passage
from epp.shared.replica import Replica, ReplicaSettings

log = logging.getLogger(__name__)

LOST = "shared-state-lost"
"""A reason: the other replicas cannot be heard or told; this one goes on alone."""

CHUNK_BYTES = 256 << 10
MAX_SNAPSHOT_BYTES = 128 << 20
MAX_WAITING_BYTES = 256 << 20
"""Of snapshots' blocks kept for endpoints that are not in the pool yet."""
WAITING_S, RETRY_S = 60.0, 1.0
PREFILL_RATE = 8000.0
"""Uncached tokens a second, as long as no worker has shown its rate; what `ttft-estimator` assumes too."""


class SharedState:
    """One picker's."""

    def __init__(
        self,
        pool: Pool,
        plugins: Callable[[], Mapping[str, object]],
        *,
        origin: int,
        now: float,
        settings: ReplicaSettings | None = None,
    ) -> None:
        """`plugins`: those in force now, by name; the same object until they change. `origin`: see `Replica`."""
        self.pool = pool
        self.replica = Replica(origin, self, now, settings)
        self.reason = ""
        """Why decisions are made alone; goes into them. Set by whoever carries the messages."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to tell."""
        self.faults = 0
        """Exceptions of learners; each costs its own contribution."""
        self._plugins = plugins
        self._learned_of: Mapping[str, object] = {}
        self._known_learners: list[Learner] = []
        self._waiting: dict[str, list[Passage]] = {}
        """By address: blocks of a snapshot whose endpoint is not in the pool yet."""
        self._waiting_bytes = 0
        self._waiting_until = math.inf
        self._retry_at = -math.inf

    # -- for the director

    def picked(self, request: InferenceRequest, endpoint: Endpoint) -> int:
        """A request was sent there, and the plugins know. A number for `ended`."""
        chains: list[tuple[str, Keys]] = []
        for learner in self._learners():
            try:
                chains.extend((learner.name, keys) for keys in learner.taught(request))
            except Exception as fault:
                self._fault(learner, fault)
        self.wake()
        return self.replica.picked(endpoint.key, chains)

    def ended(self, number: int) -> None:
        """That request is over. Later calls do nothing."""
        self.replica.ended(number)
        self.wake()

    # -- for discovery and the clock

    def changed(self, joined: Sequence[Endpoint], left: Sequence[Endpoint], now: float) -> None:
        """The pool's members changed."""
        del left
        for endpoint in joined:
            requests, tokens = self.replica.load(endpoint.key)
            if requests:
                endpoint.count_remote(requests=requests, tokens=tokens)
            self._retry(endpoint.key, now)

    def tick(self, now: float) -> None:
        """Time passes. Call it a few times a second."""
        self.replica.tick(now)
        if now >= self._waiting_until:
            self._waiting.clear()
            self._waiting_bytes = 0
            self._waiting_until = math.inf
        elif self._waiting and now >= self._retry_at:
            self._retry_at = now + RETRY_S
            for address in list(self._waiting):
                self._retry(address, now)

    # -- for whoever carries messages

    def outgoing(self, now: float) -> bytes | None:
        """The next message, if there is anything to tell."""
        return self.replica.outgoing(
            now, {e.key: (e.in_flight, e.in_flight_tokens) for e in self.pool.endpoints if e.in_flight}
        )

    def snapshot(self) -> Iterator[Chunk]:
        """All that is known here, in steps of some milliseconds between which anything may change."""
        number, size, total = 0, 0, 0
        known: list[Known] = []
        for learner in self._learners():
            lots = learner.known()
            while total < MAX_SNAPSHOT_BYTES and (lot := self._next_lot(learner, lots)) is not None:
                for address, passages in _by_address(learner.name, lot).items():
                    for part in passages:
                        if size > CHUNK_BYTES:
                            yield Chunk(VERSION, number, False, known)
                            number, size, known = number + 1, 0, []
                        if not known or known[-1].address != address:
                            known.append(Known(address, []))
                        known[-1].passages.append(part)
                        size += len(part.keys)
                        total += len(part.keys)
        yield Chunk(VERSION, number, True, known)

    def take(self, chunk: Chunk, now: float) -> None:
        """Take over a part of a snapshot. Blocks of endpoints not there, or not followed yet, wait a minute."""
        for known in chunk.known:
            self._take_or_keep(known.address, known.passages, now)
        if chunk.known:
            self._waiting_until = now + WAITING_S

    # -- what others tell (`replica.Listener`)

    def remote_load(self, address: str, requests: int, tokens: int, now: float) -> None:
        endpoint = self.pool.by_key.get(address)
        if endpoint is None:
            return
        more = tokens - endpoint.remote_tokens
        endpoint.count_remote(requests=requests, tokens=tokens)
        if more > 0:
            until = max(endpoint.get("prefill_until"), now) + more / self._prefill_rate(endpoint)
            endpoint.set("prefill_until", until)

    def learned(self, address: str, space: str, keys: Keys, now: float) -> End | None:
        endpoint = self.pool.by_key.get(address)
        learner = self._learner(space)
        if endpoint is None or learner is None:
            return None
        try:
            return learner.learn(endpoint, keys, now)
        except Exception as fault:
            self._fault(learner, fault)
            return None

    def _learners(self) -> list[Learner]:
        plugins = self._plugins()
        if plugins is not self._learned_of:
            shares = [plugin for plugin in plugins.values() if isinstance(plugin, Shares)]
            self._known_learners = [learner for plugin in shares for learner in plugin.learners()]
            self._learned_of = plugins
        return self._known_learners

    def _prefill_rate(self, endpoint: Endpoint) -> float:
        rate = endpoint.get("prefill_rate")
        if math.isnan(rate):
            known = self.pool.whole_column("prefill_rate")
            known = known[~np.isnan(known)]
            rate = float(np.median(known)) if len(known) else PREFILL_RATE
        return max(rate, 1.0)

    def _next_lot(self, learner: Learner, lots: Iterator[list[Holding]]) -> list[Holding] | None:
        try:
            return next(lots, None)
        except Exception as fault:
            self._fault(learner, fault)
            return None

    def _retry(self, address: str, now: float) -> None:
        passages = self._waiting.pop(address, None)
        if passages:
            self._waiting_bytes -= sum(len(p.keys) for p in passages)
            self._take_or_keep(address, passages, now)

    def _take_or_keep(self, address: str, passages: Sequence[Passage], now: float) -> None:
        endpoint = self.pool.by_key.get(address)
        later = [p for p in passages if endpoint is None or not self._take_over(endpoint, p, now)]
        if later and self._waiting_bytes < MAX_WAITING_BYTES:
            self._waiting.setdefault(address, []).extend(later)
            self._waiting_bytes += sum(len(p.keys) for p in later)

    def _take_over(self, endpoint: Endpoint, part: Passage, now: float) -> bool:
        """Whether that is settled, for better or worse."""
        learner = self._learner(part.space)
        if learner is None or part.tier not in (CHAIN, *Tier):
            return True
        keys = self.replica.whole(part) if part.tier == CHAIN else part.array()
        if keys is None:
            return True
        try:
            tier = None if part.tier == CHAIN else Tier(part.tier)
            return learner.believe(Holding(endpoint, keys, tier, part.group), now)
        except Exception as fault:
            self._fault(learner, fault)
            return True

    def _learner(self, space: str) -> Learner | None:
        return next((learner for learner in self._learners() if learner.name == space), None)

    def _fault(self, learner: Learner, fault: Exception) -> None:
        if not self.faults:
            log.error("%s cannot share what it knows (said once)", learner.name, exc_info=fault)
        self.faults += 1


def _by_address(space: str, lot: Sequence[Holding]) -> dict[str, list[Passage]]:
    """A lot as passages that can be put together again by themselves."""
    passages: dict[str, list[Passage]] = {}
    told: dict[str, Told] = {}
    for holding in lot:
        address = holding.endpoint.key
        parts = passages.setdefault(address, [])
        if holding.tier is None:
            parts.extend(told.setdefault(address, Told()).all_untold(space, holding.keys))
            continue
        for start in range(0, len(holding.keys), MAX_KEYS):
            some = holding.keys[start : start + MAX_KEYS]
            parts.append(passage(space, some, tier=holding.tier, group=holding.group))
    return passages
