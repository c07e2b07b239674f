"""Membership: the union of what all discovery sources say, applied to the pool in one stroke.

In: each source publishes the whole set of endpoints it knows, whenever that changed. Out: `Pool.update`, and listeners
told which endpoint objects joined and left. An endpoint that is still named by some source, at the same address and
rank and under the same name, stays the same object: its counts and history survive a reload, and new labels are put on
it where it is. Another name (or, where a source tells one, another UID) at the same address is another worker: a new
object.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from epp.endpoint import ENGINE_LABELS, ENGINES, ROLE_LABEL, Endpoint, Pool, address_and_key

log = logging.getLogger(__name__)

ROLES = ("prefill", "decode", "both", "prefill-decode", "encode", "encode-prefill", "encode-prefill-decode")
MAX_PORTS = 64
MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """What a source knows of one endpoint. `host` is an IP address: Envoy is told `ip:port`, never a name."""

    host: str
    port: int
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    ranks: int = 1
    """Data-parallel ranks behind the port; each is an endpoint with a spec of its own."""
    uid: str = ""
    """What tells it from an earlier one of the same name and address; "" where nothing does."""


Publish = Callable[[Sequence[EndpointSpec]], None]
Listener = Callable[[Sequence[Endpoint], Sequence[Endpoint]], None]
"""Called after each change with the endpoints that joined and those that left."""


class Discovery(Protocol):
    """A source of endpoints."""

    name: str
    """Unique among the sources of one pool; names it in logs."""

    @property
    def synced(self) -> bool:
        """It has published a complete answer once: before that the picker is not ready."""

    @property
    def counters(self) -> Counter[str]:
        """Named with the kind of source in front: sources of one kind are added up."""

    @property
    def trouble(self) -> str:
        """Why it knows less than it should, for whoever wonders why the picker is not ready; "" when it does not."""

    async def start(self, publish: Publish) -> None:
        """Begin to publish; returns at once, reports later troubles by log and counter."""

    async def stop(self) -> None:
        """End every task; what was published stays."""


class Membership:
    """Keeps one pool equal to the union of its sources. Where two name one address, the first in `start` wins."""

    def __init__(self, pool: Pool, clock: Callable[[], float], listeners: Iterable[Listener] = ()) -> None:
        self.pool = pool
        self.listeners: list[Listener] = list(listeners)
        self._counters = Counter({"joined": 0, "left": 0, "relabelled": 0})
        self._clock = clock
        self._sources: list[Discovery] = []
        self._known: dict[str, Sequence[EndpointSpec]] = {}

    @property
    def synced(self) -> bool:
        """Every source has answered."""
        return bool(self._sources) and all(source.synced for source in self._sources)

    @property
    def trouble(self) -> str:
        """What keeps the sources from knowing more; empty when nothing does."""
        return "; ".join(source.trouble for source in self._sources if source.trouble)

    @property
    def counters(self) -> Counter[str]:
        """`joined`, `left`, `relabelled`, and those of the sources."""
        total = Counter(self._counters)
        for source in self._sources:
            total.update(source.counters)
        return total

    async def start(self, sources: Sequence[Discovery]) -> None:
        names = [source.name for source in sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the discovery source {name} is given twice")
        self._sources = list(sources)
        self._known = dict.fromkeys(names, ())
        for source in sources:
            await source.start(partial(self.publish, source.name))

    async def stop(self) -> None:
        for source in self._sources:
            await source.stop()

    def publish(self, source: str, specs: Sequence[EndpointSpec]) -> None:
        """Take the whole of what `source` knows now."""
        self._known[source] = specs
        wanted: dict[str, EndpointSpec] = {}
        ranks: dict[str, int] = {}
        for known in self._known.values():
            for spec in known:
                address, key = address_and_key(spec.host, spec.port, spec.rank, spec.ranks)
                if ranks.setdefault(address, spec.ranks) == spec.ranks:
                    wanted.setdefault(key, spec)
        joined: list[Endpoint] = []
        left: list[Endpoint] = []
        for endpoint in self.pool.endpoints:
            spec_now = wanted.get(endpoint.key)
            if spec_now is None or _identity(spec_now, endpoint.key) != (endpoint.name, endpoint.uid):
                left.append(endpoint)
            else:
                del wanted[endpoint.key]
                self._relabel(endpoint, spec_now)
        for spec in wanted.values():
            joined.append(
                Endpoint(
                    spec.host,
                    spec.port,
                    name=spec.name,
                    labels=spec.labels,
                    rank=spec.rank,
                    ranks=spec.ranks,
                    engine=_engine(spec.labels, "auto"),
                    uid=spec.uid,
                )
            )
        slow_start = self.synced
        self.pool.update(add=joined, remove=left)
        if slow_start:
            now = self._clock()
            for endpoint in joined:
                endpoint.set("ready_at", now)
        self._report(source, joined, left)

    def _relabel(self, endpoint: Endpoint, spec: EndpointSpec) -> None:
        if endpoint.labels != spec.labels:
            endpoint.labels = dict(spec.labels)
            endpoint.engine = _engine(spec.labels, endpoint.engine)
            self._counters["relabelled"] += 1
        endpoint.rank, endpoint.ranks = spec.rank, spec.ranks

    def _report(self, source: str, joined: list[Endpoint], left: list[Endpoint]) -> None:
        if not joined and not left:
            return
        self._counters["joined"] += len(joined)
        self._counters["left"] += len(left)
        log.info("%s: %d endpoints joined, %d left, %d in the pool", source, len(joined), len(left), len(self.pool))
        for listener in self.listeners:
            listener(joined, left)


def _identity(spec: EndpointSpec, key: str) -> tuple[str, str]:
    return spec.name or key, spec.uid


def parse_host(text: str) -> str:
    """An IP address in its canonical spelling; `localhost` is 127.0.0.1. ValueError otherwise."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if bare == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        raise ValueError(f"{text!r} is not an IP address (names are for --dns)") from None
    if "%" in bare:
        raise ValueError(f"{text!r} has a zone, which Envoy cannot be told")
    return address.compressed


def parse_ports(text: str) -> tuple[int, ...]:
    """`8000` or `8000-8007`: the ports of one host, in order of rank. ValueError otherwise."""
    first, dash, last = text.partition("-")
    low = _port(first)
    high = _port(last) if dash else low
    if high < low:
        raise ValueError(f"the port range {text} runs backwards")
    if high - low >= MAX_PORTS:
        raise ValueError(f"the port range {text} has more than {MAX_PORTS} ports")
    return tuple(range(low, high + 1))


def parse_ranks(text: str) -> int:
    """How many data-parallel ranks there are behind a port. ValueError otherwise."""
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_RANKS):
        raise ValueError(f"{text!r} is not a number of data-parallel ranks (1 to {MAX_RANKS})")
    return int(text)


def expand(host: str, ports: Sequence[int], name: str, labels: Mapping[str, str], ranks: int = 1) -> list[EndpointSpec]:
    """One spec per port; several ports of one host are its data-parallel ranks 0, 1, ..., named `NAME-rank-N`.

    Behind a port with several `ranks`, a spec for each of them; several such ports are servers of their own.
    """
    if ranks > 1:
        names = {port: name and (f"{name}-{port}" if len(ports) > 1 else name) for port in ports}
        return [
            EndpointSpec(host, port, names[port] and f"{names[port]}-rank-{rank}", labels, rank, ranks)
            for port in ports
            for rank in range(ranks)
        ]
    if len(ports) == 1:
        return [EndpointSpec(host, ports[0], name, labels)]
    return [
        EndpointSpec(host, port, f"{name}-rank-{rank}" if name else "", labels, rank) for rank, port in enumerate(ports)
    ]


def check_role(role: str) -> str:
    if role not in ROLES:
        raise ValueError(f"the role {role!r} is none of {', '.join(ROLES)}")
    return role


def check_engine(engine: str) -> str:
    if engine not in ENGINES and engine != "auto":
        raise ValueError(f"the engine {engine!r} is none of auto, {', '.join(ENGINES)}")
    return engine


SHORT_LABELS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "role": (ROLE_LABEL, check_role),
    "engine": (ENGINE_LABELS[0], check_engine),
}
"""Short key of `--endpoint` and of the endpoint file -> the label it stands for, and its check."""


def _engine(labels: Mapping[str, str], otherwise: str) -> str:
    return next((labels[key] for key in ENGINE_LABELS if key in labels), otherwise)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise ValueError(f"{text!r} is not a port (1 to 65535)")
    return int(text)
