"""DNS discovery: endpoints from A/AAAA records with given ports, or from SRV records that bring their own.

    workers.example:8000-8007=role=decode      every address of the name, with these ports (ranks)
    workers.example:8000=dp=8                  with eight data-parallel ranks behind the port
    _http._tcp.workers.example                 every target and port of the SRV records

An answer is asked for again when its TTL is over, but not more often than `min_ttl_s` and not later than `max_ttl_s`.
A name server that says "there is no such name" or "no such record" has answered: the set is empty. One that fails,
refuses or is silent has not: what was known stays, the failure is logged once and counted, and it is asked again soon.
Where A is answered and AAAA is not, or the other way round, the last answer to the other stands. SRV priorities and
weights are not looked at: the picker weighs by what it knows of the workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import dns.asyncresolver
import dns.name
import dns.nameserver
import dns.rdata
import dns.resolver
from dns.rdtypes.IN.SRV import SRV

from epp.discovery.membership import EndpointSpec, Publish, expand, parse_host
from epp.discovery.static import parse_pairs, split_ports

log = logging.getLogger(__name__)

MAX_NAME = 253


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """What to ask for. Without ports: SRV records."""

    query: str
    ports: tuple[int, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    """Data-parallel ranks behind each port."""


def parse_dns(text: str) -> DnsTarget:
    """`NAME:PORTS[=KEY=VALUE,...]` or `_SERVICE._PROTO.NAME[=...]`. ValueError names the argument and what is wrong."""
    where, _, pairs = text.partition("=")
    try:
        query, ports = (where, ()) if where.startswith("_") else split_ports(where)
        own = parse_pairs(pairs)
        if own.name:
            raise ValueError("endpoints found by DNS have their address for a name")
        if (
            len(query) > MAX_NAME
            or ":" in query
            or any(not 0 < len(part) < 64 for part in query.rstrip(".").split("."))
        ):
            raise ValueError(
                f"{query!r} is not a DNS name" + ("; SRV records bring their ports" if ":" in query else "")
            )
        return DnsTarget(query, ports, own.labels, own.ranks)
    except ValueError as error:
        raise ValueError(f"DNS target {text!r}: {error}") from None


class DnsDiscovery:
    """Publishes what a name resolves to."""

    def __init__(
        self,
        target: str,
        *,
        nameserver: str = "",
        min_ttl_s: float = 1.0,
        max_ttl_s: float = 60.0,
        timeout_s: float = 5.0,
    ) -> None:
        """`nameserver`, `IP:PORT`, stands in for those of the system. Raises ValueError for what cannot be read."""
        self.target = parse_dns(target)
        self.name = f"dns {self.target.query}"
        self.synced = False
        self.trouble = ""
        self.counters = Counter({"dns_answers": 0, "dns_failures": 0})
        self._last: dict[tuple[str, str], list[str]] = {}
        self._min_ttl_s = min_ttl_s
        self._max_ttl_s = max_ttl_s
        self._timeout_s = timeout_s
        self._nameserver = split_ports(nameserver) if nameserver else None
        self._resolver: dns.asyncresolver.Resolver | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, publish: Publish) -> None:
        self._resolver = dns.asyncresolver.Resolver(configure=self._nameserver is None)
        if self._nameserver is not None:
            host, ports = self._nameserver
            self._resolver.nameservers = [dns.nameserver.Do53Nameserver(parse_host(host), ports[0])]
        self._task = asyncio.create_task(self._run(publish))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, publish: Publish) -> None:
        failures = 0
        while True:
            try:
                specs, ttl_s = await self._resolve()
                publish(specs)
            except Exception as error:
                failures += 1
                self.counters["dns_failures"] += 1
                self.trouble = f"{self.target.query} cannot be resolved"
                if failures == 1:
                    log.warning("%s cannot be resolved, the endpoints known before stay: %s", self.name, error)
                wait_s = min(self._min_ttl_s * 2.0 ** min(failures - 1, 10), self._max_ttl_s)
            else:
                if failures:
                    log.info("%s is resolved again", self.name)
                failures = 0
                self.trouble = ""
                self.counters["dns_answers"] += 1
                self.synced = True
                wait_s = min(max(ttl_s, self._min_ttl_s), self._max_ttl_s)
            await asyncio.sleep(wait_s)

    async def _resolve(self) -> tuple[list[EndpointSpec], float]:
        """The endpoints of now and for how many seconds the answer holds."""
        target = self.target
        if target.ports:
            addresses, ttl_s = await self._addresses(target.query)
            return self._specs(dict.fromkeys(addresses, target.ports)), ttl_s
        records, ttl_s = await self._ask(target.query, "SRV")
        ports: dict[str, set[int]] = {}
        for record in records:
            # A target of "." says that the service is not offered.
            if isinstance(record, SRV) and record.target != dns.name.root and record.port:
                ports.setdefault(record.target.to_text(), set()).add(record.port)
        by_host: dict[str, set[int]] = {}
        for name, found in zip(ports, await asyncio.gather(*map(self._addresses, ports)), strict=True):
            ttl_s = min(ttl_s, found[1])
            for host in found[0]:
                by_host.setdefault(host, set()).update(ports[name])
        return self._specs({host: sorted(of_host) for host, of_host in by_host.items()}), ttl_s

    def _specs(self, ports: Mapping[str, Sequence[int]]) -> list[EndpointSpec]:
        target = self.target
        return [spec for host in ports for spec in expand(host, ports[host], "", target.labels, target.ranks)]

    async def _addresses(self, name: str) -> tuple[list[str], float]:
        kinds = ("A", "AAAA")
        answers = await asyncio.gather(*(self._ask(name, kind) for kind in kinds), return_exceptions=True)
        faults = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(faults) == len(kinds):
            raise faults[0]
        ttl_s = self._min_ttl_s if faults else self._max_ttl_s
        hosts: set[str] = set()
        for kind, answer in zip(kinds, answers, strict=True):
            if not isinstance(answer, BaseException):
                self._last[name, kind] = [parse_host(record.to_text()) for record in answer[0]]
                ttl_s = min(ttl_s, answer[1]) if answer[0] else ttl_s
            hosts.update(self._last.get((name, kind), ()))
        return sorted(hosts), ttl_s if hosts else self._min_ttl_s

    async def _ask(self, name: str, kind: str) -> tuple[list[dns.rdata.Rdata], float]:
        """Records and their TTL; none when the name server says that there are none."""
        assert self._resolver is not None
        try:
            answer = await self._resolver.resolve(name, kind, lifetime=self._timeout_s, search=True)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return [], self._min_ttl_s
        return list(answer), float(answer.rrset.ttl if answer.rrset is not None else self._min_ttl_s)
