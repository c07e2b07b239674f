"""The resources that the API server knows: the built-in ones that are used here, and those of CRDs.

A `Resource` has what discovery says of it, its schema where a CRD has one, and the columns of its Table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]
Column = tuple[str, str, Callable[[Json], Any]]
"""Name, type and value of a Table's column."""
CRDS = Path(__file__).parent / "crds"


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object under one API version."""

    group: str
    version: str
    plural: str
    kind: str
    short_names: tuple[str, ...] = ()
    namespaced: bool = True
    schema: Mapping[str, Any] | None = None
    has_status: bool = False
    columns: tuple[Column, ...] = ()

    @property
    def group_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """The path of its API version."""
        return f"/apis/{self.group_version}" if self.group else f"/api/{self.version}"

    @property
    def title(self) -> str:
        """As messages name it: `inferencepools.inference.networking.k8s.io`, `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def _ready(pod: Json) -> str:
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    return f"{int(ready)}/1"


def _pod_status(pod: Json) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    return str(pod.get("status", {}).get("phase") or "Pending")


BUILT_IN = (
    Resource("", "v1", "namespaces", "Namespace", ("ns",), namespaced=False, has_status=True),
    Resource(
        "",
        "v1",
        "pods",
        "Pod",
        ("po",),
        has_status=True,
        columns=(
            ("Ready", "string", _ready),
            ("Status", "string", _pod_status),
            ("IP", "string", lambda pod: pod.get("status", {}).get("podIP") or "<none>"),
        ),
    ),
    Resource("", "v1", "services", "Service", ("svc",), has_status=True),
    Resource("", "v1", "configmaps", "ConfigMap", ("cm",)),
    Resource("", "v1", "events", "Event", ("ev",)),
    Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"),
    Resource("coordination.k8s.io", "v1", "leases", "Lease"),
)


def crds() -> list[Json]:
    """The CRDs of this folder, parsed."""
    return [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]


def of_crd(crd: Json) -> list[Resource]:
    """A resource for each version that is served."""
    spec = crd["spec"]
    names = spec["names"]
    return [
        Resource(
            spec["group"],
            version["name"],
            names["plural"],
            names["kind"],
            tuple(names.get("shortNames", ())),
            spec["scope"] == "Namespaced",
            version["schema"]["openAPIV3Schema"],
            "status" in version.get("subresources", {}),
        )
        for version in spec["versions"]
        if version["served"]
    ]
