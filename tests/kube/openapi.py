"""As much of OpenAPI v3 as kubectl reads before it creates, applies or patches: that fields are validated here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kube.resources import Resource

Json = dict[str, Any]


def index(resources: Iterable[Resource]) -> Json:
    """`/openapi/v3`: a document for each API version."""
    roots = sorted({r.root for r in resources})
    return {"paths": {root.strip("/"): {"serverRelativeURL": f"/openapi/v3{root}?hash=0"} for root in roots}}


def document(resources: Iterable[Resource], root: str) -> Json | None:
    """The document of one API version; None: there is no such version."""
    found = [r for r in resources if r.root == f"/{root}"]
    if not found:
        return None
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.32.0"},
        "paths": dict(_path(r) for r in found),
        "components": {"schemas": {f"{r.version}.{r.kind}": _schema(r) for r in found}},
    }


def _path(resource: Resource) -> tuple[str, Json]:
    named = [
        {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
        for name in ("dryRun", "fieldManager", "fieldValidation")
    ]
    middle = "/namespaces/{namespace}" if resource.namespaced else ""
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    operation = {
        "parameters": named,
        "x-kubernetes-group-version-kind": kind,
        "responses": {"200": {"description": "OK"}},
    }
    return f"{resource.root}{middle}/{resource.plural}/{{name}}", {
        "patch": {**operation, "x-kubernetes-action": "patch"}
    }


def _schema(resource: Resource) -> Json:
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    return {"type": "object", "x-kubernetes-group-version-kind": [kind]}
