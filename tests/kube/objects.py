"""Objects that tests store: pods as endpoints, pools, and what belongs to them."""

from __future__ import annotations

from typing import Any

V1, X = "inference.networking.k8s.io", "inference.networking.x-k8s.io"
Json = dict[str, Any]


def pod(
    name: str,
    ip: str = "127.0.0.1",
    *,
    ready: bool = True,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    declares: tuple[int, ...] = (),
) -> Json:
    """A pod that runs; its label `app` is `vllm` unless `labels` says otherwise."""
    ports = [{"containerPort": port} for port in declares]
    return {
        "metadata": {"name": name, "labels": {"app": "vllm"} | (labels or {}), "annotations": annotations or {}},
        "spec": {"nodeName": "node-1", "containers": [{"name": "vllm", "image": "vllm", "ports": ports}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


def pool(*ports: int, name: str = "pool", selector: dict[str, str] | None = None) -> Json:
    """An InferencePool v1 with these target ports (8000 when none is given)."""
    return {
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": selector or {"app": "vllm"}},
            "targetPorts": [{"number": port} for port in ports or (8000,)],
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
        },
    }


def old_pool(port: int = 8000, name: str = "pool") -> Json:
    """An InferencePool v1alpha2."""
    spec = {"selector": {"app": "vllm"}, "targetPortNumber": port, "extensionRef": {"name": "epp"}}
    return {"metadata": {"name": name}, "spec": spec}


def objective(name: str, priority: int, of: str = "pool") -> Json:
    return {"metadata": {"name": name}, "spec": {"priority": priority, "poolRef": {"name": of}}}


def rewrite(name: str, model: str, *targets: str, of: str = "pool") -> Json:
    """An InferenceModelRewrite of one rule; `model` "" is any."""
    matches = [{"model": {"value": model}}] if model else []
    rule = {"matches": matches, "targets": [{"modelRewrite": target} for target in targets]}
    return {"metadata": {"name": name}, "spec": {"poolRef": {"name": of}, "rules": [rule]}}


def endpoint_slice(name: str, service: str, *ips: str, port: int = 8000) -> Json:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": port}],
        "endpoints": [{"addresses": [ip], "conditions": {"ready": True}} for ip in ips],
    }
