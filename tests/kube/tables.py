"""Objects as `meta.k8s.io/v1` Tables, which kubectl asks for and prints."""

from __future__ import annotations

from typing import Any

from tests.kube.resources import Resource

Json = dict[str, Any]


def table(resource: Resource, objects: list[Json], version: str, token: str = "", *, columns: bool = True) -> Json:
    """`columns`: with the definitions of its columns; later events of a watch leave them out."""
    definitions = [("Name", "string"), *((name, kind) for name, kind, _ in resource.columns), ("Created At", "date")]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version} | ({"continue": token} if token else {}),
        "columnDefinitions": [
            {"name": name, "type": kind, "format": "name" if name == "Name" else "", "description": "", "priority": 0}
            for name, kind in definitions
        ]
        if columns
        else None,
        "rows": [{"cells": _cells(resource, obj), "object": _partial(obj)} for obj in objects],
    }


def _cells(resource: Resource, obj: Json) -> list[Any]:
    metadata = obj["metadata"]
    return [metadata["name"], *(value(obj) for _, _, value in resource.columns), metadata["creationTimestamp"]]


def _partial(obj: Json) -> Json:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}
