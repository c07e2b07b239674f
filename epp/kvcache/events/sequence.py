"""One publisher's sequence of batches: in order, each once, no loss unnoticed. Without I/O.

In: live and replayed messages as they come, connections, the passing of time. Out: batches to apply in order (`Apply`),
`Ask` for a replay, `Restarted` (forget everything before), `Lost` (batches that cannot be had any more).

    LIVE ----- seq as expected ------------> applied
    LIVE ----- seq beyond the expected ----> ASKING: replay from the expected one on; live messages are held
    ASKING --- replayed ones, in order ----> applied; one that skips says that the worker's buffer began later: `Lost`
    ASKING --- end of the replay ----------> held ones are applied, LIVE; a gap that is left is asked for again while
                                             asking helps, else it is `Lost`
    ASKING --- no answer, `attempts` times > `Lost`, held ones are applied, LIVE

A connection begins with ASKING from 0: PUB sockets drop while nobody listens. After a break the last number that was
seen is asked for once more: a publisher that does not have it, or has it under another time stamp, is a new process,
though it may have published nothing since. A number that goes back, under a newer time stamp, is one too: everything
before is void. (An older time stamp is a live message that a replay brought first.) Replays run on the worker's
publishing thread and stall it, so one gap is one request, and the caller spaces those of many workers.

Source: vllm/distributed/kv_events.py (sequence numbers from 0 per process; a ring of `buffer_steps` batches).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from epp.kvcache.events.decoder import END_OF_REPLAY, Batch


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Times in seconds."""

    replay: bool = True
    """Whether the worker has a replay socket."""
    answer_s: float = 2.0
    """Silence after which a replay counts as not answered."""
    attempts: int = 3
    held: int = 20_000
    """Live batches held during a replay; beyond it the oldest are let go and count as lost."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this batch now."""

    seq: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the worker for a replay from this number on."""

    start: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher is a new process: what was applied before holds no longer."""


@dataclass(frozen=True, slots=True)
class Lost:
    """These many batches from `start` on were never seen and will not be."""

    start: int
    count: int


Action = Apply | Ask | Restarted | Lost


class _Phase(Enum):
    LIVE = auto()
    ASKING = auto()


class Sequence:
    """Follows one publisher. Every method gives the actions to take, in order."""

    def __init__(self, settings: SequenceSettings | None = None) -> None:
        self.settings = settings or SequenceSettings()
        self.next: int | None = None
        """The number expected next; None before anything was seen."""
        self._phase = _Phase.LIVE
        self._last_ts = float("-inf")
        self._newest_ts = 0.0
        """Time stamp of the batch before `next`."""
        self._probing = False
        """The batch before `next` is asked for, to see whether the publisher is still the same."""
        self._broken = False
        """The connection was lost and is not reported anew yet."""
        self._held: deque[tuple[int, Batch]] = deque()
        self._asked_from = 0
        self._attempt = 0
        self._heard_at = 0.0
        self._progress = False

    @property
    def asking(self) -> bool:
        """A replay is on its way."""
        return self._phase is _Phase.ASKING

    @property
    def held(self) -> int:
        """Live batches waiting for a replay to end."""
        return len(self._held)

    def connected(self, now: float) -> list[Action]:
        """The live socket is connected (again): whatever was published meanwhile was not received."""
        self._broken = False
        if not self.next:
            return list(self._ask(0, now))
        actions = list(self._ask(self.next - 1, now))
        self._probing = bool(actions)
        return actions

    def disconnected(self) -> None:
        """The live socket is not connected any more: what comes is held until it is known who publishes."""
        self._broken = self.settings.replay

    def asked(self, now: float) -> None:
        """The replay's request goes out only now: the time to answer begins."""
        self._heard_at = now

    def live(self, seq: int, batch: Batch, now: float) -> list[Action]:
        """A batch on the live socket."""
        if self._phase is _Phase.ASKING or self._broken:
            return list(self._hold(seq, batch, now))
        return list(self._live(seq, batch, now))

    def replayed(self, seq: int, batch: Batch | None, now: float) -> list[Action]:
        """A batch on the replay socket; END_OF_REPLAY with None where it ends. Ignored when nothing was asked."""
        if self._phase is not _Phase.ASKING:
            return []
        self._heard_at = now
        ended = seq == END_OF_REPLAY or batch is None
        if self._probing:
            self._probing = False
            assert self.next is not None
            if ended or (seq == self.next - 1 and batch is not None and batch.ts != self._newest_ts):
                return [*self._restart(), *self._ask(0, now)]
        if ended or batch is None:
            return list(self._settle(now))
        expected = self._asked_from if self.next is None else self.next
        if seq < expected:
            return []
        actions: list[Action] = [Lost(expected, seq - expected)] if seq > expected else []
        self._progress = True
        return [*actions, self._take(seq, batch)]

    def tick(self, now: float) -> list[Action]:
        """Time passes: a replay may be given up. Call it once or twice a second."""
        if self._phase is not _Phase.ASKING or now - self._heard_at < self.settings.answer_s:
            return []
        if self._attempt < self.settings.attempts:
            self._attempt += 1
            self._heard_at = now
            self._asked_from = (self.next or 0) - self._probing
            return [Ask(self._asked_from)]
        self._progress = False
        return list(self._settle(now))

    def _live(self, seq: int, batch: Batch, now: float) -> Iterator[Action]:
        # Who hears a publisher for the first time has missed what is before, as after any gap: a live batch may come
        # before the connection is told of.
        expected = self.next or 0
        if seq == expected:
            yield self._take(seq, batch)
        elif seq > expected:
            if self.settings.replay:
                self._held.append((seq, batch))
                yield from self._ask(expected, now)
            else:
                yield Lost(expected, seq - expected)
                yield self._take(seq, batch)
        elif batch.ts > self._last_ts:
            yield from self._restart()
            if seq and self.settings.replay:
                self._held.append((seq, batch))
                yield from self._ask(0, now)
            else:
                yield from self._live(seq, batch, now)

    def _hold(self, seq: int, batch: Batch, now: float) -> Iterator[Action]:
        newest_seq, newest_ts = (self._held[-1][0], self._held[-1][1].ts) if self._held else (-1, self._last_ts)
        back = seq <= newest_seq or (self.next is not None and seq < self.next)
        if back and batch.ts <= max(newest_ts, self._last_ts):
            return  # the replay brought it first
        if back:
            # A restart while asking: the answer, if any, is of the old process and its ring is gone.
            self._held.clear()
            yield from self._restart()
            self._held.append((seq, batch))
            yield from self._ask(0, now)
            return
        self._held.append((seq, batch))
        if len(self._held) > self.settings.held:
            self._held.popleft()

    def _ask(self, start: int, now: float) -> Iterator[Action]:
        if not self.settings.replay:
            return
        self._phase = _Phase.ASKING
        self._probing = False
        self._asked_from, self._attempt, self._heard_at, self._progress = start, 1, now, False
        yield Ask(start)

    def _settle(self, now: float) -> Iterator[Action]:
        """The replay is over: go on with what was held."""
        self._phase = _Phase.LIVE
        self._probing = False
        if self.next is None and self._asked_from == 0 and self._held and self._held[0][0] == 0:
            self.next = 0
        held, self._held = self._held, deque()
        while held:
            seq, batch = held.popleft()
            expected = self.next
            if expected is not None and seq < expected:
                if batch.ts > self._last_ts:
                    # The old numbers were answered by nobody: the worker restarted before the replay was asked for.
                    yield from self._restart()
                    self._held = deque([(seq, batch), *held])
                    yield from self._ask(0, now)
                    return
                continue
            if expected is not None and seq > expected:
                if self._progress:
                    self._held = deque([(seq, batch), *held])
                    yield from self._ask(expected, now)
                    return
                yield Lost(expected, seq - expected)
            elif expected is None and seq > 0:
                yield Lost(0, seq)
            yield self._take(seq, batch)

    def _restart(self) -> Iterator[Action]:
        self.next = None
        self._last_ts = float("-inf")
        yield Restarted()

    def _take(self, seq: int, batch: Batch) -> Apply:
        self.next = seq + 1
        self._newest_ts = batch.ts
        self._last_ts = max(self._last_ts, batch.ts)
        return Apply(seq, batch)
