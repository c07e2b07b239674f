"""The chart as Helm's own code renders it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/chart/kvsteer"
VALUES = sorted((ROOT / "deploy/values").glob("*.yaml"))
Json = dict[str, Any]


def render(values: Json, *, name: str = "my-pool", namespace: str = "models") -> list[Json]:
    """Every object of a release. Raises helm_python.HelmError for values that the schema refuses."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=name, namespace=namespace)
    texts = (text for path, text in sorted(files.items()) if path.endswith(".yaml"))
    return [obj for text in texts for obj in yaml.safe_load_all(text) if obj]


@lru_cache
def flavour(path: Path) -> list[Json]:
    """Every object of one of the shipped files of values."""
    return render(yaml.safe_load(path.read_text()))


def of_kind(objects: list[Json], kind: str) -> list[Json]:
    return [obj for obj in objects if obj["kind"] == kind]


def pod_specs(objects: list[Json]) -> Iterator[tuple[Json, Json]]:
    """Metadata of the template and its spec, of each thing that makes pods."""
    for obj in objects:
        if obj["kind"] == "Deployment":
            yield obj["spec"]["template"]["metadata"], obj["spec"]["template"]["spec"]
        elif obj["kind"] == "LeaderWorkerSet":
            template = obj["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            yield template["metadata"], template["spec"]


def containers(objects: list[Json], name: str) -> list[Json]:
    """Containers of that name, sidecars too."""
    return [
        container
        for _, spec in pod_specs(objects)
        for container in (*spec.get("initContainers", ()), *spec["containers"])
        if container["name"] == name
    ]


def expanded(container: Json) -> list[str]:
    """Its arguments as the process gets them: `$(NAME)` from its environment, "x" where that comes from the cluster."""
    arguments: list[str] = container["args"]
    for variable in container.get("env", ()):
        arguments = [a.replace(f"$({variable['name']})", variable.get("value", "x")) for a in arguments]
    return arguments
