"""The options of `kvsteer serve` that concern a Kubernetes cluster, and the `ClusterSettings` that they come to."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from epp.discovery.kubernetes.cluster import ClusterSettings
from epp.discovery.kubernetes.objects import MAX_TARGET_PORTS
from epp.discovery.kubernetes.sources import GROUPS

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--pool-name", default="", help="The InferencePool whose pods are the workers; its name in metrics."),
    click.option(
        "--pool-namespace",
        default="",
        help="Its namespace.  [default: $NAMESPACE, else that of the pod or of the kubeconfig's context]",
    ),
    click.option(
        "--pool-group",
        type=click.Choice(["", *GROUPS]),
        default="",
        help="API group of the InferencePool.  [default: whichever has it]",
    ),
    click.option(
        "--endpoint-selector",
        default="",
        metavar="KEY=VALUE,...",
        help="Instead of an InferencePool: pods with these labels are the workers.",
    ),
    click.option(
        "--endpoint-target-ports",
        multiple=True,
        metavar="PORT,...",
        help="With --endpoint-selector: the ports to send requests to, in order of data-parallel rank.",
    ),
    click.option(
        "--endpoint-slices",
        multiple=True,
        metavar="SERVICE[:PORT]",
        help="Workers from the EndpointSlices of a Service, a headless one too. Repeatable.",
    ),
    click.option(
        "--kubeconfig",
        type=click.Path(path_type=Path, dir_okay=False),
        help="How to reach the API server.  [default: the pod's service account, else $KUBECONFIG, ~/.kube/config]",
    ),
    click.option(
        "--metrics-endpoint-auth/--no-metrics-endpoint-auth",
        default=None,
        help="Ask the API server who may read /metrics and /debug.  [default: on with --pool-name or "
        "--endpoint-selector]",
    ),
    click.option(
        "--leader-election/--no-leader-election",
        default=False,
        show_default=True,
        help="Only the replica that holds the Lease is ready.",
    ),
)


def cluster_options(function: F) -> F:
    """Adds the options; `function` gets what they come to as `cluster`: settings, or None where none is given."""

    @wraps(function)
    def with_cluster(*, pool_name: str, pool_namespace: str, pool_group: str, **others: Any) -> Any:
        ours = {name: others.pop(name) for name in _OWN}
        cluster = _settings(pool_name, pool_namespace, pool_group, **ours)
        return function(cluster=cluster, **others)

    decorated: Any = with_cluster
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


_OWN = (
    "endpoint_selector",
    "endpoint_target_ports",
    "endpoint_slices",
    "kubeconfig",
    "metrics_endpoint_auth",
    "leader_election",
)


def _settings(
    pool: str,
    namespace: str,
    group: str,
    *,
    endpoint_selector: str,
    endpoint_target_ports: tuple[str, ...],
    endpoint_slices: tuple[str, ...],
    kubeconfig: Path | None,
    metrics_endpoint_auth: bool | None,
    leader_election: bool,
) -> ClusterSettings | None:
    if pool and endpoint_selector:
        raise click.UsageError("--pool-name and --endpoint-selector exclude each other")
    if bool(endpoint_selector) != bool(endpoint_target_ports):
        raise click.UsageError("--endpoint-selector and --endpoint-target-ports go together")
    if not (pool or endpoint_selector or endpoint_slices):
        given = {"--pool-group": group, "--leader-election": leader_election, "--kubeconfig": kubeconfig}
        for flag in (flag for flag, value in given.items() if value):
            raise click.UsageError(f"{flag} needs --pool-name, --endpoint-selector or --endpoint-slices")
        return None
    steers = bool(pool or endpoint_selector)
    return ClusterSettings(
        pool=pool,
        group=group,
        namespace=namespace or os.environ.get("NAMESPACE", ""),
        selector=_selector(endpoint_selector) if endpoint_selector else {},
        ports=_ports(",".join(endpoint_target_ports)) if endpoint_target_ports else (),
        services=tuple(_service(text) for text in endpoint_slices),
        kubeconfig=kubeconfig,
        metrics_authentication=steers if metrics_endpoint_auth is None else metrics_endpoint_auth,
        elect_leader=leader_election,
    )


def _selector(text: str) -> dict[str, str]:
    labels = {}
    for pair in text.split(","):
        key, equals, value = pair.strip().partition("=")
        if not key or not equals:
            raise click.UsageError(f"--endpoint-selector {text!r}: write KEY=VALUE,...")
        labels[key] = value
    return labels


def _ports(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdecimal() and len(p) <= 5 and 1 <= int(p) <= 65535 for p in parts):
        raise click.UsageError(f"--endpoint-target-ports {text!r}: ports are 1 to 65535, with commas between")
    ports = tuple(map(int, parts))
    if len(ports) > MAX_TARGET_PORTS or len(set(ports)) != len(ports):
        raise click.UsageError(f"--endpoint-target-ports {text!r}: at most {MAX_TARGET_PORTS} ports, none twice")
    return ports


def _service(text: str) -> tuple[str, str]:
    name, _, port = text.partition(":")
    if not name:
        raise click.UsageError(f"--endpoint-slices {text!r}: write SERVICE or SERVICE:PORT")
    return name, port
