"""From pods and ports to endpoints of the pool. Pure.

An endpoint is a ready pod's address and one of the pool's target ports. Several ports of a pod are its data-parallel
ranks, numbered by their place in the pool's list and named `POD-rank-N`; an annotation of the pod may leave some out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from epp.discovery.kubernetes.objects import Pod, Slice
from epp.discovery.membership import EndpointSpec

HOSTNAME, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
"""Labels of nodes that an endpoint gets from where its pod runs, unless the pod has them itself."""


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether an equality-based selector takes an object with these labels; an empty one takes none."""
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def label_selector(selector: Mapping[str, str]) -> str:
    """As the API server wants it in a query."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector.items()))


def of_pods(pods: Iterable[Pod], ports: Sequence[int]) -> list[EndpointSpec]:
    """One spec for each ready pod and live port, in the order of the pods' names."""
    specs = []
    for pod in sorted(pods, key=lambda p: p.name):
        if not pod.ready or not pod.host:
            continue
        labels = {HOSTNAME: pod.node, **pod.labels} if pod.node else dict(pod.labels)
        specs += [
            EndpointSpec(pod.host, port, f"{pod.name}-rank-{rank}", labels, rank, uid=pod.uid)
            for rank, port in enumerate(ports)
            if pod.active_ports is None or port in pod.active_ports
        ]
    return specs


def lacking(pod: Pod, ports: Sequence[int]) -> tuple[int, ...]:
    """The pool's ports that a pod which declares ports does not declare: most likely it does not listen there."""
    if not pod.declared_ports:
        return ()
    live = ports if pod.active_ports is None else [port for port in ports if port in pod.active_ports]
    return tuple(port for port in live if port not in pod.declared_ports)


def of_slices(slices: Iterable[Slice], port: str) -> list[EndpointSpec]:
    """One spec for each ready endpoint of a Service's slices. `port`: a name or number; "": each one there is."""
    specs: dict[tuple[str, int], EndpointSpec] = {}
    for of in slices:
        chosen = [number for name, number in of.ports.items() if port in ("", name, str(number))]
        if port.isdecimal() and not chosen:
            chosen = [int(port)]  # a headless Service without ports: its slices name none
        for endpoint in of.endpoints:
            if not endpoint.ready:
                continue
            labels = {key: value for key, value in ((HOSTNAME, endpoint.node), (ZONE, endpoint.zone)) if value}
            for rank, number in enumerate(chosen):
                name = f"{endpoint.pod}-rank-{rank}" if endpoint.pod else ""
                spec = EndpointSpec(endpoint.host, number, name, labels, rank, uid=endpoint.uid)
                specs.setdefault((endpoint.host, number), spec)
    return sorted(specs.values(), key=lambda spec: (spec.host, spec.port))
