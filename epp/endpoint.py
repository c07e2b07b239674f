"""Endpoints, the pool, and the live state of a pool as numpy columns.

In: discovery adds and removes endpoints, signals write what a worker says of itself, the director counts what it sent.
Out: `Candidates`, the view of the pool that filters and scorers see: objects and columns side by side, row for row.

The pool keeps one row per endpoint in arrays that are grown by doubling, so a scorer over 544 endpoints is one vector
expression. Counts live on the endpoint object (a request releases the very object it was counted on, even after the
address left the pool and came back) and are mirrored into its row while it has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

COLUMNS = (
    "waiting",  # requests in the worker's queue, as last scraped; NaN unknown
    "running",  # requests in the worker's running batch, as last scraped; NaN unknown
    "kv_usage",  # share of KV blocks in use, 0..1, as last scraped; NaN unknown
    "in_flight",  # requests this picker and its other replicas sent and have not seen end
    "in_flight_tokens",  # uncached prompt tokens of those requests whose first token has not been seen
    "unseen",  # those of them sent since the last scrape began: what the gauges cannot show yet
    "scraped_at",  # time of the last good scrape, seconds of the picker's clock; -inf never
    "prefill_rate",  # uncached prompt tokens per second, learned; NaN not yet
    "first_token_overhead",  # seconds to a first token besides prefill, learned; NaN not yet
    "prefill_until",  # when the prompts sent so far should be prefilled, by the learned rate alone; -inf nothing sent
    "recent_tokens",  # uncached prompt tokens sent there, fading with time: how fast its cache turns over
    "ready_at",  # when the endpoint joined or came back, for slow start
)

ENGINES = ("vllm", "sglang", "trtllm-serve", "triton-tensorrt-llm")
"""Serving engines whose metrics are understood, by the names of the field's engine-type label."""

ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
ROLE_LABEL = "llm-d.ai/role"


class Endpoint:
    """Where a request can be sent: an address `ip:port`, or one data-parallel rank of several behind an address.

    Compared by identity: an address gone and back is a new one. `address` is what a gateway is told, `key` what names
    the endpoint among all others: the address, with `@RANK` where ranks share it.
    """

    __slots__ = (
        "address",
        "asleep",
        "available",
        "block_size",
        "cache_blocks",
        "engine",
        "host",
        "in_flight",
        "in_flight_tokens",
        "key",
        "labels",
        "lora",
        "models",
        "name",
        "parents",
        "pool",
        "port",
        "rank",
        "ranks",
        "remote_in_flight",
        "remote_tokens",
        "remote_unseen",
        "remote_unseen_before_scrape",
        "row",
        "scrape_epoch",
        "seen_epoch",
        "uid",
        "unseen",
        "unseen_before_scrape",
    )

    def __init__(
        self,
        host: str,
        port: int,
        *,
        name: str = "",
        labels: Mapping[str, str] | None = None,
        rank: int = 0,
        ranks: int = 1,
        engine: str = "auto",
        uid: str = "",
    ) -> None:
        self.host = host
        self.port = port
        self.address, self.key = address_and_key(host, port, rank, ranks)
        self.name = name or self.key
        self.uid = uid
        """What tells it from an earlier worker of this name and address, where its source knows."""
        self.labels: Mapping[str, str] = dict(labels or {})
        self.rank = rank
        """Its data-parallel rank: among the ports of its host, or behind its port."""
        self.ranks = ranks
        """Ranks behind its port. With more than one, a request header says which of them is meant."""
        self.engine = engine
        """What it is said to be by its label ("auto": nobody said), then what its metrics showed."""
        self.available = True
        """False while health keeps it out of picking; counts and scrapes go on."""
        self.models: frozenset[str] | None = None
        """Model and adapter names it serves; None = unknown."""
        self.parents: Mapping[str, str] = {}
        """Adapter name -> the model it belongs to, as far as `/v1/models` tells."""
        self.lora: LoraState | None = None
        self.asleep = False
        """The engine says that it sleeps: its cache is gone."""
        self.block_size: int | None = None
        self.cache_blocks: int | None = None
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.unseen = 0
        self.remote_in_flight = 0
        """What other replicas tell that they have in flight here; see `count_remote`."""
        self.remote_tokens = 0
        self.remote_unseen = 0
        self.remote_unseen_before_scrape = 0
        self.scrape_epoch = 0
        """Scrapes begun so far; a `Load` remembers the value at its pick."""
        self.seen_epoch = 0
        """Loads picked in an epoch below this one are in the gauges."""
        self.unseen_before_scrape = 0
        """How many of `unseen` were picked before the last scrape began."""
        self.pool: Pool | None = None
        self.row = -1

    def __repr__(self) -> str:
        return f"Endpoint({self.key})"

    def set(self, column: str, value: float) -> None:
        """Write one live value of this endpoint (a name of `COLUMNS`); no effect once it left its pool."""
        if self.pool is not None:
            self.pool.columns[column][self.row] = value

    def get(self, column: str) -> float:
        """Read one live value; NaN once it left its pool."""
        return float(self.pool.columns[column][self.row]) if self.pool is not None else math.nan

    def count(self, *, requests: int, tokens: int, unseen: int = 0) -> None:
        """Add to the own counts (negative to release)."""
        self.in_flight += requests
        self.in_flight_tokens += tokens
        self.unseen += unseen
        if self.pool is not None:
            columns, row = self.pool.columns, self.row
            columns["in_flight"][row] = self.in_flight + self.remote_in_flight
            columns["in_flight_tokens"][row] = self.in_flight_tokens + self.remote_tokens
            columns["unseen"][row] = self.unseen + self.remote_unseen

    def count_remote(self, *, requests: int, tokens: int) -> None:
        """Other replicas have this many requests and uncached prompt tokens in flight here now, altogether.

        Own counts stay exact beside them; the columns show the sums. Requests that came on top are unseen.
        """
        rise = max(requests - self.remote_in_flight, 0)
        self.remote_in_flight, self.remote_tokens = requests, tokens
        self.remote_unseen = min(self.remote_unseen + rise, requests)
        self.count(requests=0, tokens=0)

    def acquire(self, tokens: int, now: float) -> Load:
        """Count one request with `tokens` uncached prompt tokens at the moment of the pick; the token takes it back."""
        self.count(requests=1, tokens=tokens, unseen=1)
        return Load(self, tokens, now)

    def scrape_began(self) -> None:
        """A scrape's request goes out now. Scrapes of one endpoint never overlap."""
        self.scrape_epoch += 1
        self.unseen_before_scrape = self.unseen
        self.remote_unseen_before_scrape = self.remote_unseen

    def scrape_succeeded(self, now: float) -> None:
        """The scrape that began last was answered: its gauges include whatever was picked before it began."""
        self.remote_unseen = max(self.remote_unseen - self.remote_unseen_before_scrape, 0)
        self.remote_unseen_before_scrape = 0
        self.count(requests=0, tokens=0, unseen=-self.unseen_before_scrape)
        self.unseen_before_scrape = 0
        self.seen_epoch = self.scrape_epoch
        self.set("scraped_at", now)


def address_and_key(host: str, port: int, rank: int, ranks: int) -> tuple[str, str]:
    """`ip:port`, IPv6 in brackets, and the key of one of so many ranks behind it."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return address, f"{address}@{rank}" if ranks > 1 else address


class Load:
    """What one request weighs on one endpoint, from its pick to its end. Taken back exactly once, whatever happens.

    It holds the endpoint object, so an address that left the pool and came back keeps its own counts. There is no
    timeout: a generation may run for hours and is in flight until someone says it is not.
    """

    __slots__ = ("_epoch", "_open", "_tokens", "endpoint", "picked_at")

    def __init__(self, endpoint: Endpoint, tokens: int, picked_at: float) -> None:
        """Use `Endpoint.acquire`, which also counts."""
        self.endpoint = endpoint
        self.picked_at = picked_at
        self._tokens = tokens
        self._epoch = endpoint.scrape_epoch
        self._open = True

    def first_token(self) -> None:
        """The prompt is computed: its tokens weigh no more, the request still does. Later calls do nothing."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self.endpoint.count(requests=0, tokens=-tokens)

    def release(self) -> None:
        """The request is over. Later calls do nothing."""
        if not self._open:
            return
        self._open = False
        endpoint, tokens = self.endpoint, self._tokens
        self._tokens = 0
        unseen = self._epoch >= endpoint.seen_epoch
        if unseen and self._epoch < endpoint.scrape_epoch:
            endpoint.unseen_before_scrape -= 1
        endpoint.count(requests=-1, tokens=-tokens, unseen=-int(unseen))


@dataclass(frozen=True, slots=True)
class LoraState:
    """Adapters on a worker as scraped from `vllm:lora_requests_info`."""

    running: frozenset[str]
    waiting: frozenset[str]
    max_adapters: int


class Pool:
    """The endpoints one picker steers. Mutated only on the event loop; `version` grows with each change of members."""

    def __init__(self, endpoints: Iterable[Endpoint] = ()) -> None:
        self.version = 0
        self.endpoints: list[Endpoint] = []
        self.by_key: dict[str, Endpoint] = {}
        self.columns: dict[str, Floats] = {name: np.full(16, _initial(name)) for name in COLUMNS}
        self._whole: dict[str, Floats] = {}
        """Read-only views of the columns over all endpoints; others when members change."""
        self._everyone: tuple[Endpoint, ...] = ()
        self.update(add=endpoints)

    def __len__(self) -> int:
        return len(self.endpoints)

    def update(self, *, add: Iterable[Endpoint] = (), remove: Iterable[Endpoint] = ()) -> None:
        """Take endpoints out and in, in one stroke. Adding a key that is present is an error of the caller."""
        for endpoint in remove:
            if endpoint.pool is self:
                self._remove(endpoint)
        for endpoint in add:
            self._add(endpoint)
        self.version += 1
        self._everyone = tuple(self.endpoints)
        self._whole = {name: column[: len(self.endpoints)] for name, column in self.columns.items()}
        for view in self._whole.values():
            view.flags.writeable = False

    def _add(self, endpoint: Endpoint) -> None:
        if endpoint.key in self.by_key:
            raise ValueError(f"endpoint {endpoint.key} is already in the pool")
        row = len(self.endpoints)
        for name, column in self.columns.items():
            if row == len(column):
                column = self.columns[name] = np.concatenate([column, np.full(row, _initial(name))])
            column[row] = _initial(name)
        self.endpoints.append(endpoint)
        self.by_key[endpoint.key] = endpoint
        endpoint.pool, endpoint.row = self, row
        endpoint.count(requests=0, tokens=0)

    def _remove(self, endpoint: Endpoint) -> None:
        """Close the gap with the last row, so that rows stay dense."""
        last = self.endpoints.pop()
        if last is not endpoint:
            row = endpoint.row
            for column in self.columns.values():
                column[row] = column[last.row]
            self.endpoints[row] = last
            last.row = row
        del self.by_key[endpoint.key]
        endpoint.pool, endpoint.row = None, -1

    def whole_column(self, name: str) -> Floats:
        """One live column over all endpoints, row for row; read-only, and the same view until members change."""
        return self._whole[name]

    def served_by(self, address: str, picked: Endpoint) -> Endpoint | None:
        """The endpoint that served a request meant for `picked`, when a gateway says it went to `address`.

        The header that names a rank stays on a request that is sent elsewhere: the rank of that number served it. A
        request without one went to whichever rank the worker chose; the one with the fewest in flight is assumed.
        """
        alone = self.by_key.get(address)
        if alone is not None or picked.ranks > 1:
            return alone or self.by_key.get(f"{address}@{picked.rank}")
        return min((e for e in self.endpoints if e.address == address), key=lambda e: e.in_flight, default=None)

    def candidates(self, now: float, subset: frozenset[str] | None = None) -> Candidates:
        """The endpoints a request may go to: available ones, and inside `subset` when one is given.

        `subset` holds `ip:port` or a bare address, which stands for each port there, and either for all its ranks.
        """
        endpoints = self._everyone
        if subset is None:
            rows = [e.row for e in endpoints if e.available]
        else:
            rows = [e.row for e in endpoints if e.available and (e.address in subset or e.host in subset)]
        if len(rows) == len(endpoints):
            return Candidates(self, endpoints, slice(0, len(rows)), now, np.zeros(len(rows)), whole=self._whole)
        return Candidates(self, tuple(endpoints[r] for r in rows), np.array(rows, dtype=np.intp), now)


def _initial(column: str) -> float:
    if column in ("in_flight", "in_flight_tokens", "unseen", "recent_tokens"):
        return 0.0
    return -math.inf if column in ("scraped_at", "ready_at", "prefill_until") else math.nan


PRODUCED = ("cached_tokens", "cached_by_tier", "restore_s", "expected_ttft", "expected_cost")
"""The arrays of `Candidates` that producers write."""


@dataclass(slots=True)
class Candidates:
    """The endpoints still in question for one request, as objects and as columns (one entry per endpoint, same order).

    `candidates.column("waiting")` gives a float64 array of shape (n,), a snapshot to read, never to write. Iterating
    gives `Endpoint` objects. `cached_tokens`, shape (n,): prompt tokens of this request each endpoint is believed to
    hold (set by the prefix producer; zeros when nothing is known).
    """

    pool: Pool
    endpoints: tuple[Endpoint, ...]
    rows: slice | NDArray[np.intp]
    now: float
    cached_tokens: Floats = field(default_factory=lambda: np.zeros(0))
    cached_by_tier: Floats | None = None
    """`cached_tokens` by tier (`epp.kvcache.tier.Tier`), shape (tiers, n); None: all count as on the device."""
    restore_s: Floats | None = None
    """Seconds to bring the part of `cached_tokens` on lower tiers to the device, shape (n,); None: nothing to bring."""
    expected_ttft: Floats | None = None
    """Seconds to the first token expected of each endpoint, shape (n,), from whoever works it out (the `ttft-estimator`
    producer); goes into the decision's estimate. None: nobody estimated."""
    expected_cost: Floats | None = None
    """`expected_ttft` plus the seconds the choice would cost the requests already there, shape (n,)."""
    whole: Mapping[str, Floats] | None = field(default=None, repr=False)
    """The pool's columns where these are all its endpoints."""

    def __post_init__(self) -> None:
        if len(self.cached_tokens) != len(self.endpoints):
            self.cached_tokens = np.zeros(len(self.endpoints))

    def __len__(self) -> int:
        return len(self.endpoints)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self.endpoints)

    def __getitem__(self, index: int) -> Endpoint:
        return self.endpoints[index]

    def column(self, name: str) -> Floats:
        """One live column for these candidates; `name` is one of `COLUMNS`. Read-only: writing to it raises."""
        if self.whole is not None:
            return self.whole[name]
        values = self.pool.columns[name][self.rows]
        values.flags.writeable = False
        return values

    def fresh(self, max_age_s: float) -> Mask:
        """True where the gauges were scraped within `max_age_s`. When that holds for none, staleness tells nothing
        between them and all are true: a pool whose metrics stopped goes on serving by the picker's own counts.
        """
        mask: Mask = self.column("scraped_at") >= self.now - max_age_s
        return mask if mask.any() else np.ones(len(self), dtype=np.bool_)

    def unsaturated(self, waiting: float, kv_usage: float, max_age_s: float) -> Mask:
        """True below both thresholds by fresh metrics, as the field's utilization detector has it.

        The queue is the one scraped plus the requests sent since. What is unknown counts as saturated.
        """
        queue = self.column("waiting") + self.column("unseen")
        mask: Mask = self.fresh(max_age_s) & (queue < waiting) & (self.column("kv_usage") < kv_usage)
        return mask

    def ramp(self, duration_s: float) -> Floats:
        """Slow start: from 0 for an endpoint that joined or came back now to 1 after `duration_s` seconds, linear."""
        if duration_s <= 0:
            return np.ones(len(self))
        return np.clip((self.now - self.column("ready_at")) / duration_s, 0.0, 1.0)

    def worst_if_unknown(self, name: str) -> Floats:
        """A copy of `column(name)`, a load, where an unknown value counts as the largest known one; 0 if none is."""
        values = self.column(name)
        unknown = np.isnan(values)
        if not unknown.any():
            return values.copy()
        return np.where(unknown, 0.0 if unknown.all() else np.nanmax(values), values)

    def select(self, keep: Sequence[bool] | Mask) -> Candidates:
        """The candidates where `keep` is true."""
        mask = np.asarray(keep, dtype=np.bool_)
        if mask.all():
            return self
        index = np.flatnonzero(mask)
        rows = index if isinstance(self.rows, slice) else self.rows[index]
        return Candidates(
            self.pool,
            tuple(self.endpoints[i] for i in index),
            rows,
            self.now,
            self.cached_tokens[index],
            None if self.cached_by_tier is None else self.cached_by_tier[:, index],
            None if self.restore_s is None else self.restore_s[index],
            None if self.expected_ttft is None else self.expected_ttft[index],
            None if self.expected_cost is None else self.expected_cost[index],
        )
