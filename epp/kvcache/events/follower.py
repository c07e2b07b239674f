"""One worker followed: its messages in, its blocks in the index, and how far that is to be believed. Without I/O.

In: frames of the live and of the replay socket, connections, time, and what responses report. Out: `Ask`s for replays
to send; the index, through the ledger, when `work` is called: a replay may settle thousands of batches at once, and the
caller decides how much of it is done in one go.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from epp.kvcache.blocks import Keys
from epp.kvcache.events.confidence import Confidence, Level, Verdict
from epp.kvcache.events.decoder import (
    END_OF_REPLAY,
    Batch,
    Cleared,
    Event,
    MalformedMessage,
    Message,
    decode_batch,
    read_message,
)
from epp.kvcache.events.ledger import Ledger, Singles, bundled
from epp.kvcache.events.sequence import Action, Apply, Ask, Lost, Restarted, Sequence, SequenceSettings
from epp.kvcache.tier import Tier

COUNTERS = (
    "batches",
    "events",
    "gaps",  # live batches that did not follow the one before
    "replays_asked",
    "replays_answered",
    "replays_given_up",
    "lost_batches",
    "restarts",
    "malformed_messages",
    "skipped_unknown",  # events of unknown type
    "skipped_malformed",
    "skipped_sparse",  # runs whose tokens and hashes do not fit together
    "agreed",  # responses that report the cached tokens predicted, within a block
    "over",  # ... fewer
    "under",  # ... more
)

EVENT_US, BLOCK_US, SINGLE_US = 20, 2, 5
"""Rough costs, for `work`: of an event, of each of its blocks, of each event in a bundle."""


@dataclass(frozen=True, slots=True)
class FollowerSettings:
    """Times in seconds."""

    sequence: SequenceSettings = field(default_factory=SequenceSettings)
    probe_s: float = 15.0
    """After so long without a message the worker is asked for what was missed: the last of a stream leaves no gap."""


class Follower:
    """Of one worker's (or one rank's) events."""

    def __init__(self, ledger: Ledger, settings: FollowerSettings | None = None) -> None:
        self.ledger = ledger
        self.settings = settings or FollowerSettings()
        self.confidence = Confidence()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.lag_s = 0.0
        """Age of the last live batch when it came, seconds, by the two hosts' wall clocks."""
        self.applied_at = float("-inf")
        """When a batch was last applied."""
        self._sequence = Sequence(self.settings.sequence)
        self._todo: deque[Apply | Lost | Restarted | Event | Singles | None] = deque()
        """What is to be applied; None says that the worker was heard of."""
        self._heard_at = float("-inf")
        self._up = False

    @property
    def asking(self) -> bool:
        """A replay is on its way, or to be sent."""
        return self._sequence.asking

    @property
    def busy(self) -> bool:
        """There is something for `work` to do."""
        return bool(self._todo)

    def connected(self, now: float) -> list[Ask]:
        """The live socket is connected."""
        self._up = True
        self.confidence.verified(yes=False)
        self._heard_at = now
        asks = self._plan(self._sequence.connected(now))
        if not asks:
            self._doubt()
        return asks

    def disconnected(self) -> None:
        """The live socket is not connected any more: events pass by."""
        self._up = False
        self._sequence.disconnected()
        self.confidence.verified(yes=False)

    def asked(self, now: float) -> None:
        """A replay's request was sent (it may have waited its turn)."""
        self._sequence.asked(now)

    def live(self, frames: Series[bytes], now: float, wall: float) -> list[Ask]:
        """A message of the live socket. `wall`: seconds since the epoch."""
        message, batch = self._read(frames)
        return self.batch(message.seq, batch, now, wall) if message and batch else []

    def batch(self, seq: int, batch: Batch, now: float, wall: float) -> list[Ask]:
        """A decoded batch of the live socket."""
        self._heard_at = now
        self.lag_s = max(wall - batch.ts, 0.0)
        expected = self._sequence.next
        if not self.asking and expected is not None and seq > expected:
            self.counters["gaps"] += 1
        return self._plan(self._sequence.live(seq, batch, now))

    def replayed(self, frames: Series[bytes], now: float) -> list[Ask]:
        """A message of the replay socket."""
        message, batch = self._read(frames)
        if message is None:
            return []
        self._heard_at = now
        if message.seq == END_OF_REPLAY and self.asking:
            self.counters["replays_answered"] += 1
            asks = self._plan(self._sequence.replayed(message.seq, None, now))
            self._todo.append(None)
            return asks
        return self._plan(self._sequence.replayed(message.seq, batch, now)) if batch else []

    def tick(self, now: float) -> list[Ask]:
        """Time passes. Call it about once a second, but not while an `Ask` has yet to be sent."""
        was_asking = self.asking
        asks = self._plan(self._sequence.tick(now))
        if was_asking and not self.asking:
            self.counters["replays_given_up"] += 1
            self.confidence.verified(yes=False)
            self._doubt()
        if self._up and not self.asking and self._sequence.next and now - self._heard_at > self.settings.probe_s:
            self._heard_at = now
            asks += self._plan(self._sequence.connected(now))
        return asks

    def emptied(self) -> None:
        """The worker is known to hold nothing, though it has not said so yet: it sleeps, say.

        vLLM publishes in engine steps alone, so an idle worker's AllBlocksCleared comes with the next request.
        """
        self.ledger.clear()

    def work(self, now: float, budget_us: float = float("inf")) -> bool:
        """Apply what has come, of about so many microseconds' cost. True if something is left."""
        todo = self._todo
        while todo and budget_us > 0:
            match todo.popleft():
                case Apply(_, batch):
                    self._count(batch)
                    self.applied_at = now
                    if self._up and not self.asking:
                        self.confidence.verified(yes=True)
                    todo.extendleft(reversed(bundled(batch.events)))
                case Lost(_, count):
                    self.counters["lost_batches"] += count
                    self.confidence.lost()
                    self.ledger.lost()
                case Restarted():
                    self.counters["restarts"] += 1
                    self.ledger.clear()
                    self.confidence.fresh()
                case None:
                    self.confidence.heard()
                    self.confidence.verified(yes=self._up)
                case event:
                    self.ledger.apply(event, now)
                    if isinstance(event, Cleared):
                        self.confidence.fresh()
                    budget_us -= _cost(event)
        return bool(todo)

    def observed(self, predicted: int, actual: int, now: float, *, keys: Keys, picked_at: float) -> Verdict:
        """A response tells its cached tokens: `actual` where `predicted` were expected at the pick.

        `keys` are those of the prompt's whole blocks, `picked_at` is when the request was sent. Where events are known
        to miss, the answer corrects the index: blocks it shows to be there are entered. Blocks it shows to be missing
        are taken out, unless events came since the pick: the request itself has computed them again by now.
        """
        size = self.ledger.block_size
        verdict = self.confidence.observed(predicted, actual, max(size, 1))
        self.counters[verdict] += 1
        if verdict is Verdict.AGREED or not size:
            return verdict
        if verdict is Verdict.OVER:
            self.ledger.lost()
            if self.applied_at < picked_at:
                self.ledger.drop(keys[actual // size : -(-predicted // size)])
        elif self.confidence.level != "complete":
            self.ledger.hold(keys[: actual // size], now)
        return verdict

    def believe(self, keys: Keys, tier: Tier, group: int, now: float) -> None:
        """Others knew that the worker holds these blocks. Without effect where all its events were seen.

        The index is partial by that: they may have gone in the meantime without a word.
        """
        if self.confidence.level is not Level.COMPLETE:
            self.ledger.hold(keys, now, tier, group)
            self.confidence.heard()
            self.confidence.lost()

    def _read(self, frames: Series[bytes]) -> tuple[Message | None, Batch | None]:
        try:
            message = read_message(frames)
            return message, decode_batch(message.payload) if message.seq != END_OF_REPLAY else None
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return None, None

    def _plan(self, actions: list[Action]) -> list[Ask]:
        asks = []
        for action in actions:
            if isinstance(action, Ask):
                self.counters["replays_asked"] += 1
                asks.append(action)
            else:
                self._todo.append(action)
        return asks

    def _doubt(self) -> None:
        """After a break nobody answers: should the numbers go on, it may yet be another process that is as far."""
        if self._sequence.next is not None:
            self._todo.append(Lost(self._sequence.next, 0))

    def _count(self, batch: Batch) -> None:
        self.confidence.heard()
        self.counters["batches"] += 1
        self.counters["events"] += len(batch.events)
        for kind, count in batch.skipped.items():
            self.counters[f"skipped_{kind}"] += count


def _cost(event: Event | Singles) -> int:
    match event:
        case Singles(events):
            return EVENT_US + SINGLE_US * len(events)
        case Cleared():
            return EVENT_US
    return EVENT_US + BLOCK_US * len(event.hashes)
