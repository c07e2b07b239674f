"""One replica among others: what it tells, and what it makes of what others tell. No I/O and no clock.

In: own picks and their ends, own loads when a batch is due, others' batches, the time. Out: batches to send; to a
`Listener` the load that all others together have at an endpoint, and the blocks of their picks.

Nothing here needs every message to arrive. Loads are told as what they are, not as differences; once a second a *full*
batch tells all of them and which picks are still open, so that a lost message is made good by the next full one, an old
or repeated one is passed over, and nothing can become negative. Who is silent for some seconds is forgotten with all it
had in flight. Chains of keys are told in parts (see `chains`); whoever misses a message asks for whole ones.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from epp.kvcache.blocks import Keys
from epp.shared.chains import Chains, Told
from epp.shared.messages import CHAIN, VERSION, Batch, Load, Passage, Pick, Unreadable, decode_batch, encode

Loads = Mapping[str, tuple[int, int]]
"""Address -> requests and uncached prompt tokens in flight there."""
End = Callable[[float], None]
"""To be called once, with the time, when a pick is over."""

MAX_PEERS = 64
MAX_OPEN = 100_000
"""Open picks remembered of one peer."""
MAX_SPACES = 16
MAX_BATCH_BYTES = 256 << 10
"""Of keys in one batch, about; the rest goes with the next."""
MAX_WAITING = 4096
"""Own picks that wait to be told; the oldest are dropped."""
MAX_REQUESTS = 8
"""Peers that wait for a snapshot of ours."""

COUNTERS = (
    "messages_out",
    "messages_in",
    "messages_unreadable",  # of another version, or broken
    "messages_old",  # repeated, or overtaken by later ones
    "messages_missed",  # by the gaps in their numbers
    "messages_lost",  # ours, that could not be sent
    "picks_dropped",  # ours, that waited for too long a time to be told
    "picks_in",
    "unknown_chains",  # passages that follow something not known here
    "repeats_asked",
    "peers_lost",  # silent for too long
    "peers_refused",  # more than 64
    "bootstraps_asked",
    "bootstraps_done",
    "bootstraps_failed",
    "bootstraps_given",
)


class Listener(Protocol):
    """Where what others tell goes."""

    def remote_load(self, address: str, requests: int, tokens: int, now: float) -> None:
        """All others together have this in flight there now."""

    def learned(self, address: str, space: str, keys: Keys, now: float) -> End | None:
        """A prompt with these block keys, from its first, was sent there by another replica."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Times in seconds."""

    heartbeat_s: float = 1.0
    """Between two full batches."""
    silence_s: float = 3.5
    """After so long without a message a peer is forgotten."""
    repeat_s: float = 30.0
    """Least time between two requests to tell chains from their beginning."""
    settle_s: float = 2.5
    """Before a newcomer chooses whom to ask for a snapshot: everyone has been heard by then."""
    bootstrap_s: float = 20.0
    """A snapshot that is not there after that is given up, and another peer is asked."""
    bootstrap_tries: int = 3
    chains_bytes: int = 64 << 20
    """Of keys remembered for each plugin that shares what it knows."""


@dataclass(slots=True)
class _Peer:
    origin: int
    seq: int
    heard_at: float
    started: float = 0.0
    """By the clock here."""
    loads: dict[str, tuple[int, int]] = field(default_factory=dict)
    open: dict[int, list[End]] = field(default_factory=dict)
    """Pick -> what to do at its end."""


class Replica:
    """Of one process."""

    def __init__(self, origin: int, listener: Listener, now: float, settings: ReplicaSettings | None = None) -> None:
        """`origin`: a random number, 1 to 2^48 - 1."""
        self.origin = origin
        self.settings = settings or ReplicaSettings()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.requests: deque[int] = deque(maxlen=MAX_REQUESTS)
        """Peers that asked this one for a snapshot."""
        self.asked = 0
        """The peer that was asked for a snapshot and has not given it; 0 = none."""
        self.seq = 0
        """Number of the last batch sent."""
        self.echoed = 0
        """Number of the last own batch that was heard."""
        self._listener = listener
        self._started = now
        self._full_at = now
        self._peers: dict[int, _Peer] = {}
        self._totals: dict[str, tuple[int, int]] = {}
        self._told_loads: dict[str, tuple[int, int]] = {}
        self._told: dict[str, Told] = {}
        self._chains: dict[str, Chains] = {}
        self._picks: deque[tuple[int, str, Sequence[tuple[str, Keys]]]] = deque(maxlen=MAX_WAITING)
        self._open: set[int] = set()
        self._ended: list[int] = []
        self._numbers = 0
        self._repeat = False
        self._repeat_at = now
        self._ask = 0
        """`asked`, as long as it has to be told."""
        self._ask_at = now + self.settings.settle_s
        self._tries = self.settings.bootstrap_tries
        self._tried: set[int] = set()

    @property
    def peers(self) -> int:
        """Others that are heard of."""
        return len(self._peers)

    # -- what this replica does ---------------------------------------------------------------------------------------

    def picked(self, address: str, chains: Sequence[tuple[str, Keys]]) -> int:
        """A request was sent there; `chains` are its block keys by space. A number for `ended`."""
        self._numbers += 1
        if len(self._picks) == MAX_WAITING:
            self.counters["picks_dropped"] += 1
        self._picks.append((self._numbers, address, chains))
        self._open.add(self._numbers)
        return self._numbers

    def ended(self, number: int) -> None:
        """The request is over. Later calls do nothing."""
        if number in self._open:
            self._open.discard(number)
            self._ended.append(number)

    def outgoing(self, now: float, loads: Loads) -> bytes | None:
        """The next batch to send, if there is anything to tell. `loads`: all endpoints where something is in flight."""
        full = now >= self._full_at
        changed = loads if full else {a: load for a, load in loads.items() if self._told_loads.get(a) != load}
        gone = () if full else [a for a in self._told_loads if a not in loads]
        if not (full or changed or gone or self._picks or self._ended):
            return None
        self._told_loads = dict(loads)
        if full:
            self._full_at = now + self.settings.heartbeat_s
            self._choose_giver(now)
        ended, self._ended = self._ended, []
        repeat, self._repeat = self._repeat, False
        ask, self._ask = self._ask, 0
        told = [Load(a, *load) for a, load in changed.items()] + [Load(a, 0, 0) for a in gone]
        everything = sorted(self._open) if full else None
        return encode(Batch(*self._head(now), told, self._tell(), ended, everything, repeat, ask))

    def leave(self, now: float) -> bytes:
        """The last batch: others forget this replica at once."""
        return encode(Batch(*self._head(now), [], [], [], leaving=True))

    def failed(self, now: float) -> None:
        """A batch, or what was to follow it, did not reach the others: tell everything again."""
        self.counters["messages_lost"] += 1
        self._picks.clear()
        self._ended.clear()
        self._full_at = now
        for told in self._told.values():
            told.forget()

    def _head(self, now: float) -> tuple[int, int, int, float]:
        self.seq += 1
        self.counters["messages_out"] += 1
        return VERSION, self.origin, self.seq, now - self._started

    def _tell(self) -> list[Pick]:
        picks, size = [], 0
        while self._picks and size < MAX_BATCH_BYTES:
            number, address, chains = self._picks.popleft()
            passages = []
            for space, keys in chains:
                if len(keys) and (known := self._space(space)) is not None:
                    passages.append(self._told[space].untold(space, keys))
                    known.add(keys)
            picks.append(Pick(number, address, passages))
            size += sum(len(p.keys) for p in passages) + 32
        return picks

    def _space(self, space: str) -> Chains | None:
        known = self._chains.get(space)
        if known is None and len(self._chains) < MAX_SPACES:
            known = self._chains[space] = Chains(self.settings.chains_bytes)
            self._told[space] = Told()
        return known

    # -- what others tell ---------------------------------------------------------------------------------------------

    def heard(self, message: bytes, now: float) -> None:
        """A message from the others, or one of our own, which is passed over."""
        try:
            batch = decode_batch(message)
        except Unreadable:
            self.counters["messages_unreadable"] += 1
            return
        if batch.origin == self.origin:
            self.echoed = max(self.echoed, batch.seq)
            return
        peer = self._peer(batch, now)
        if peer is None:
            return
        self.counters["messages_in"] += 1
        peer.seq, peer.heard_at, peer.started = batch.seq, now, now - batch.up_s
        if batch.leaving:
            self._forget(peer, now)
            return
        if batch.repeat:
            for told in self._told.values():
                told.forget()
        if batch.ask == self.origin and batch.origin not in self.requests:
            self.requests.append(batch.origin)
        self._take_loads(peer, batch, now)
        for pick in batch.picks:
            self._take_pick(peer, pick, now)
        over = [number for number in batch.ended if number in peer.open]
        if batch.open is not None:
            still = set(batch.open)
            over.extend(number for number in peer.open if number not in still)
        for number in over:
            self._end(peer.open.pop(number, ()), now)

    def tick(self, now: float) -> None:
        """Time passes: who was silent for too long is forgotten. Call it a few times a second."""
        for peer in [p for p in self._peers.values() if now - p.heard_at > self.settings.silence_s]:
            self.counters["peers_lost"] += 1
            self._forget(peer, now)

    def whole(self, passage: Passage) -> Keys | None:
        """The chain that a passage of a snapshot ends; None if what it follows is not known here."""
        known = self._space(passage.space)
        keys = known.whole(passage) if known is not None else None
        if keys is None:
            self.counters["unknown_chains"] += 1
        return keys

    def _peer(self, batch: Batch, now: float) -> _Peer | None:
        peer = self._peers.get(batch.origin)
        if peer is not None:
            if batch.seq <= peer.seq:
                self.counters["messages_old"] += 1
                return None
            if missed := batch.seq - peer.seq - 1:
                self.counters["messages_missed"] += missed
                self._ask_to_repeat(now)
            return peer
        if batch.leaving:
            return None
        if len(self._peers) >= MAX_PEERS:
            self.counters["peers_refused"] += 1
            return None
        if batch.seq > 1:
            self._ask_to_repeat(now)
        peer = self._peers[batch.origin] = _Peer(batch.origin, batch.seq, now)
        return peer

    def _take_loads(self, peer: _Peer, batch: Batch, now: float) -> None:
        new = {load.address: (load.requests, load.tokens) for load in batch.loads}
        if batch.open is not None:
            new = {**dict.fromkeys(peer.loads, (0, 0)), **new}
        for address, load in new.items():
            before = peer.loads.pop(address, (0, 0))
            if any(load):
                peer.loads[address] = load
            if load != before:
                self._add(address, load[0] - before[0], load[1] - before[1], now)

    def _add(self, address: str, requests: int, tokens: int, now: float) -> None:
        """A peer's load has changed by so much."""
        total = self._totals.pop(address, (0, 0))
        total = (total[0] + requests, total[1] + tokens)
        if any(total):
            self._totals[address] = total
        self._listener.remote_load(address, *total, now)

    def _take_pick(self, peer: _Peer, pick: Pick, now: float) -> None:
        self.counters["picks_in"] += 1
        ends = []
        for passage in pick.passages:
            if passage.tier != CHAIN or self._space(passage.space) is None:
                continue
            self._told[passage.space].heard(passage)
            keys = self.whole(passage)
            if keys is None:
                self._ask_to_repeat(now)
            elif (end := self._listener.learned(pick.address, passage.space, keys, now)) is not None:
                ends.append(end)
        if ends:
            self._end(peer.open.pop(pick.number, ()), now)
            if len(peer.open) < MAX_OPEN:
                peer.open[pick.number] = ends
            else:
                self._end(ends, now)

    def _forget(self, peer: _Peer, now: float) -> None:
        del self._peers[peer.origin]
        for address, (requests, tokens) in peer.loads.items():
            self._add(address, -requests, -tokens, now)
        for ends in peer.open.values():
            self._end(ends, now)
        if peer.origin == self.asked:
            self.bootstrapped(done=False, now=now)

    def _end(self, ends: Sequence[End], now: float) -> None:
        for end in ends:
            end(now)

    def _ask_to_repeat(self, now: float) -> None:
        if now >= self._repeat_at:
            self._repeat_at = now + self.settings.repeat_s
            self._repeat = True
            self.counters["repeats_asked"] += 1

    def load(self, address: str) -> tuple[int, int]:
        """Requests and tokens that all others together have in flight at an endpoint."""
        return self._totals.get(address, (0, 0))

    # -- a newcomer's snapshot ----------------------------------------------------------------------------------------

    def _choose_giver(self, now: float) -> None:
        """Ask the peer that runs for longest, if it runs for longer than this one."""
        if self.asked and now >= self._ask_at:
            self.bootstrapped(done=False, now=now)
        if self.asked or not self._tries or now < self._ask_at:
            return
        older = [p for p in self._peers.values() if p.started < self._started and p.origin not in self._tried]
        if not older:
            self._tries = 0  # nobody knows more
            return
        self.asked = self._ask = min(older, key=lambda p: p.started).origin
        self._tried.add(self.asked)
        self._tries -= 1
        self._ask_at = now + self.settings.bootstrap_s
        self.counters["bootstraps_asked"] += 1

    def bootstrapped(self, *, done: bool, now: float) -> None:
        """The snapshot that was asked for is taken over, or will not come. Later calls do nothing."""
        if self.asked:
            self.asked = 0
            self._ask_at = now
            self.counters["bootstraps_done" if done else "bootstraps_failed"] += 1
            if done:
                self._tries = 0
