"""What is read of Kubernetes objects: frozen views of the JSON that the API server sends.

Each `read_*` takes one object and raises ValueError where it is not what its schema promises; what is not needed is
not kept. Field names and rules: `core/v1`, `discovery.k8s.io/v1`, and the CRDs of the Gateway API Inference Extension.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
"""Annotations that limit which of the pool's ports are live on a pod; the first one present counts."""
MAX_TARGET_PORTS = 8
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pool:
    """An InferencePool, of either API version."""

    name: str
    selector: Mapping[str, str]
    ports: tuple[int, ...]
    """In the order of rank."""
    app_protocol: str = "http"


def read_pool(obj: Json) -> Pool:
    """`inference.networking.k8s.io/v1`, or the older `inference.networking.x-k8s.io/v1alpha2`."""
    spec = _map(obj.get("spec"), "spec")
    selector = _map(spec.get("selector"), "spec.selector")
    if "targetPortNumber" in spec:
        labels, ports = selector, [spec["targetPortNumber"]]
    else:
        labels = _map(selector.get("matchLabels"), "spec.selector.matchLabels")
        ports = [_map(p, "spec.targetPorts").get("number") for p in _list(spec.get("targetPorts"), "spec.targetPorts")]
    if not labels:
        raise ValueError("spec.selector selects nothing")
    if not 1 <= len(ports) <= MAX_TARGET_PORTS or len(set(ports)) != len(ports):
        raise ValueError(f"spec.targetPorts: 1 to {MAX_TARGET_PORTS} ports, none twice")
    return Pool(
        _name(obj),
        {str(key): str(value) for key, value in labels.items()},
        tuple(_port(port, "spec.targetPorts") for port in ports),
        str(spec.get("appProtocol") or "http"),
    )


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod, as far as it can be an endpoint."""

    namespace: str
    name: str
    uid: str
    host: str
    """Its first IP address; "" while it has none."""
    ready: bool
    """The condition Ready holds, and it is not being deleted."""
    labels: Mapping[str, str]
    active_ports: tuple[int, ...] | None
    """The ports that its annotation limits it to; None: it does not."""
    declared_ports: frozenset[int]
    """Those that its containers declare; Kubernetes does not ask for it."""
    node: str


def read_pod(obj: Json) -> Pod:
    metadata, status = _map(obj.get("metadata"), "metadata"), _optional(obj.get("status"))
    spec = _optional(obj.get("spec"))
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in _maps(status.get("conditions")))
    annotations = _optional(metadata.get("annotations"))
    limit = next((annotations[key] for key in ACTIVE_PORTS if key in annotations), None)
    containers = [*_maps(spec.get("containers")), *_maps(spec.get("initContainers"))]
    return Pod(
        namespace=str(metadata.get("namespace") or ""),
        name=_name(obj),
        uid=str(metadata.get("uid") or ""),
        host=_host(status),
        ready=ready and not metadata.get("deletionTimestamp"),
        labels={str(k): str(v) for k, v in _optional(metadata.get("labels")).items()},
        active_ports=None if limit is None else _active_ports(str(limit)),
        declared_ports=frozenset(
            p["containerPort"]
            for c in containers
            for p in _maps(c.get("ports"))
            if isinstance(p.get("containerPort"), int)
        ),
        node=str(spec.get("nodeName") or ""),
    )


def _host(status: Json) -> str:
    """`podIPs` has one address of each family, that of the cluster's first family in front, which is `podIP` too."""
    found = [str(entry.get("ip") or "") for entry in _maps(status.get("podIPs"))]
    text = next(filter(None, found), "") or str(status.get("podIP") or "")
    return ipaddress.ip_address(text).compressed if text else ""


def _active_ports(text: str) -> tuple[int, ...]:
    """A comma list; what is no port in it is not live."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) <= 5)


@dataclass(frozen=True, slots=True)
class Objective:
    """An InferenceObjective: how much its requests matter."""

    pool: str
    priority: int


def read_objective(obj: Json) -> Objective:
    spec = _map(obj.get("spec"), "spec")
    priority = spec.get("priority")
    if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
        raise ValueError("spec.priority is no integer")
    return Objective(_pool_of(spec), priority or 0)


@dataclass(frozen=True, slots=True)
class Target:
    model: str
    weight: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a rewrite: for these models (none named: for all), to one of the targets."""

    models: tuple[str, ...]
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """An InferenceModelRewrite."""

    pool: str
    name: str
    created: str
    """RFC 3339 in UTC, whole seconds: as text the older is the smaller."""
    rules: tuple[Rule, ...]


def read_rewrite(obj: Json) -> Rewrite:
    spec, metadata = _map(obj.get("spec"), "spec"), _map(obj.get("metadata"), "metadata")
    rules = tuple(_rule(_map(rule, "spec.rules")) for rule in _list(spec.get("rules"), "spec.rules"))
    return Rewrite(_pool_of(spec), _name(obj), str(metadata.get("creationTimestamp") or ""), rules)


def _rule(rule: Json) -> Rule:
    models = []
    for match in _maps(rule.get("matches")):
        model = _map(match.get("model"), "spec.rules.matches.model")
        if model.get("type", "Exact") != "Exact":
            raise ValueError(f"spec.rules.matches.model.type {model['type']!r} is not known")
        models.append(str(model.get("value") or ""))
    targets = [
        Target(str(t.get("modelRewrite") or ""), w if isinstance(w := t.get("weight"), int) and w > 0 else 0)
        for t in _maps(rule.get("targets"))
    ]
    if not targets or not all(target.model for target in targets):
        raise ValueError("spec.rules.targets: each rule needs targets, each with modelRewrite")
    return Rule(tuple(models), tuple(targets))


@dataclass(frozen=True, slots=True)
class SliceEndpoint:
    host: str
    ready: bool
    pod: str
    """Name of the pod behind it; "" when it is none."""
    uid: str
    node: str
    zone: str


@dataclass(frozen=True, slots=True)
class Slice:
    """An EndpointSlice."""

    ports: Mapping[str, int]
    """Name of a port ("" for the only one) -> number."""
    endpoints: tuple[SliceEndpoint, ...]


def read_slice(obj: Json) -> Slice:
    if obj.get("addressType") not in ("IPv4", "IPv6"):
        return Slice({}, ())  # FQDN: Envoy cannot be told names
    ports = {str(p.get("name") or ""): p["port"] for p in _maps(obj.get("ports")) if isinstance(p.get("port"), int)}
    return Slice(ports, tuple(_slice_endpoint(e) for e in _maps(obj.get("endpoints")) if e.get("addresses")))


def _slice_endpoint(entry: Json) -> SliceEndpoint:
    conditions, ref = _optional(entry.get("conditions")), _optional(entry.get("targetRef"))
    is_pod = ref.get("kind") == "Pod"
    return SliceEndpoint(
        # Consumers must take the first address and no other, says the API.
        host=ipaddress.ip_address(str(_list(entry.get("addresses"), "endpoints.addresses")[0])).compressed,
        # Not said counts as ready.
        ready=conditions.get("ready") is not False and conditions.get("terminating") is not True,
        pod=str(ref.get("name") or "") if is_pod else "",
        uid=str(ref.get("uid") or "") if is_pod else "",
        node=str(entry.get("nodeName") or ""),
        zone=str(entry.get("zone") or ""),
    )


def _pool_of(spec: Json) -> str:
    return str(_map(spec.get("poolRef"), "spec.poolRef").get("name") or "")


def _name(obj: Json) -> str:
    name = _map(obj.get("metadata"), "metadata").get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("metadata.name is missing")
    return name


def _port(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise ValueError(f"{where}: {value!r:.40} is not a port")
    return value


def _map(value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no object")
    return value


def _optional(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is no list")
    return value


def _maps(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
