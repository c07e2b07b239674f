"""Static discovery: endpoints named on the command line, `--endpoint HOST:PORT[-PORT][=KEY=VALUE,...]`.

    10.0.0.1:8000                                one endpoint
    [fd00::1]:8000-8007=role=decode,zone=a       eight data-parallel ranks of one host, with a role and a label

`name`, `role` and `engine` are the endpoint's own; every other key is a label as it stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from epp.discovery.membership import SHORT_LABELS, EndpointSpec, Publish, expand, parse_host, parse_ports


class StaticDiscovery:
    """Publishes a fixed list once."""

    name = "static"

    def __init__(self, endpoints: Iterable[str]) -> None:
        """Raises ValueError, naming the argument, for one that cannot be read or an address given twice."""
        self.synced = False
        self.counters: Counter[str] = Counter()
        self._specs: list[EndpointSpec] = []
        seen: set[tuple[str, int]] = set()
        for text in endpoints:
            for spec in parse_endpoint(text):
                if (spec.host, spec.port) in seen:
                    raise ValueError(f"endpoint {text!r}: port {spec.port} of {spec.host} is given twice")
                seen.add((spec.host, spec.port))
                self._specs.append(spec)

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
        name, labels = parse_pairs(pairs)
        return expand(parse_host(host), ports, name, labels)
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


def parse_pairs(text: str) -> tuple[str, dict[str, str]]:
    """`KEY=VALUE,...` as a name and labels."""
    name = ""
    labels: dict[str, str] = {}
    for pair in text.split(",") if text else ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{pair!r} is not KEY=VALUE")
        if key == "name":
            name = value
            continue
        label, check = SHORT_LABELS.get(key, (key, str))
        if label in labels:
            raise ValueError(f"{key} is given twice")
        labels[label] = check(value)
    return name, labels
