"""Static discovery: endpoints named on the command line, `--endpoint IP:PORT[-PORT][=KEY=VALUE,...]`.

    10.0.0.1:8000                                one endpoint
    [fd00::1]:8000-8007=role=decode,zone=a       eight data-parallel ranks of one host, with a role and a label
    10.0.0.1:8000=dp=8                           eight data-parallel ranks behind one port

`name`, `role`, `engine` and `dp` are the endpoint's own; every other key is a label as it stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from epp.discovery.membership import SHORT_LABELS, EndpointSpec, Publish, expand, parse_host, parse_ports, parse_ranks


class StaticDiscovery:
    """Publishes a fixed list once."""

    name = "static"
    trouble = ""

    def __init__(self, endpoints: Iterable[str]) -> None:
        """Raises ValueError, naming the argument, for one that cannot be read or an address given twice."""
        self.synced = False
        self.counters: Counter[str] = Counter()
        self._specs: list[EndpointSpec] = []
        seen: set[tuple[str, int]] = set()
        for text in endpoints:
            specs = parse_endpoint(text)
            for spec in specs:
                if (spec.host, spec.port) in seen:
                    raise ValueError(f"endpoint {text!r}: port {spec.port} of {spec.host} is given twice")
            seen.update((spec.host, spec.port) for spec in specs)
            self._specs += specs

    async def start(self, publish: Publish) -> None:
        publish(self._specs)
        self.synced = True

    async def stop(self) -> None:
        pass


def parse_endpoint(text: str) -> list[EndpointSpec]:
    """The endpoints one argument stands for. ValueError names the argument and what is wrong."""
    where, _, pairs = text.partition("=")
    try:
        host, ports = split_ports(where)
        own = parse_pairs(pairs)
        return expand(parse_host(host), ports, own.name, own.labels, own.ranks)
    except ValueError as error:
        raise ValueError(f"endpoint {text!r}: {error}") from None


def split_ports(where: str) -> tuple[str, tuple[int, ...]]:
    """`HOST:PORTS` in two; an IPv6 address must stand in brackets."""
    host, colon, ports = where.rpartition(":")
    if not colon or not host:
        raise ValueError("write HOST:PORT")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("an IPv6 address stands in brackets: [fd00::1]:8000")
    return host, parse_ports(ports)


class Pairs(NamedTuple):
    """What is said of an endpoint behind its address."""

    name: str
    labels: dict[str, str]
    ranks: int


def parse_pairs(text: str) -> Pairs:
    """`KEY=VALUE,...`: `name`, `dp` (data-parallel ranks behind each port), and labels."""
    name = ""
    ranks = 1
    labels: dict[str, str] = {}
    for pair in text.split(",") if text else ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{pair!r} is not KEY=VALUE")
        if key == "name":
            name = value
            continue
        if key == "dp":
            ranks = parse_ranks(value)
            continue
        label, check = SHORT_LABELS.get(key, (key, str))
        if label in labels:
            raise ValueError(f"{key} is given twice")
        labels[label] = check(value)
    return Pairs(name, labels, ranks)
