"""The Helm chart: every flavour renders, fits the schemas of what it is given to, and starts what it says it starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from epp.cli import main
from epp.config import read
from tests.deploy.charts import CHART, ROOT, VALUES, containers, expanded, flavour, of_kind, pod_specs, render
from tests.kube import schema
from tests.kube.resources import Resource, crds, of_crd

KUBERNETES = "1.32"
OWN = yaml.safe_load((Path(__file__).parent / "schemas.yaml").read_text())
REFERENCE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {name: {"type": "string"} for name in ("group", "kind", "name", "namespace")},
}
CUSTOM: dict[tuple[str, str], Resource] = {(r.group_version, r.kind): r for crd in crds() for r in of_crd(crd)}
each_flavour = pytest.mark.parametrize("path", VALUES, ids=[path.stem for path in VALUES])


def test_helm_has_nothing_to_say_against_the_chart() -> None:
    found = helm_python.lint(str(CHART))
    assert found["errors"] == []
    assert [m for m in found["messages"] if m["severity"] > 1] == []


def test_there_is_a_file_of_values_for_each_flavour() -> None:
    gateways = {yaml.safe_load(p.read_text()).get("gateway", {}).get("flavour") for p in VALUES}
    assert {"istio", "envoy-gateway", "kgateway", "agentgateway", "gke"} <= gateways
    assert {"standalone", "prefill-decode", "tiered-cache", "wide-ep", "mtp"} <= {p.stem for p in VALUES}


@each_flavour
def test_every_object_fits_its_schema(path: Path) -> None:
    objects = flavour(path)
    assert len({(o["kind"], o["metadata"]["name"]) for o in objects}) == len(objects)
    for obj in objects:
        check(obj)


def check(obj: dict[str, Any]) -> None:
    custom = CUSTOM.get((obj["apiVersion"], obj["kind"]))
    if custom is not None:
        assert custom.schema is not None
        _, unknown = schema.admit(obj, dict(custom.schema))
        assert unknown == []
    elif obj["kind"] in OWN:
        assert obj.keys() == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(obj["spec"], OWN[obj["kind"]] | {"definitions": {"reference": REFERENCE}})
        for metadata, spec in pod_specs([obj]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **metadata}, "spec": spec}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    else:
        kubernetes_validate.validate(obj, KUBERNETES, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    """The check of the checks."""
    objects = flavour(ROOT / "deploy/values/wide-ep.yaml")
    for kind, place, value in (
        ("InferencePool", "targetPorts", [{"number": 1}] * 2),
        ("HTTPRoute", "rule", []),
        ("Deployment", "replica", 1),
        ("LeaderWorkerSet", "sizes", 1),
    ):
        (obj,) = of_kind(objects, kind)
        broken = {**obj, "spec": {**obj["spec"], place: value}}
        with pytest.raises((schema.Invalid, jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            check(broken)


@each_flavour
def test_the_picker_takes_its_arguments(path: Path) -> None:
    command = main.get_command(click.Context(main), "serve")
    assert command is not None
    (picker,) = containers(flavour(path), "picker")
    context = command.make_context("serve", expanded(picker))
    assert context.params["pool_name"] or context.params["endpoint_selector"]
    assert context.params["drain_delay"] + context.params["grace"] < picker_pod(path)["terminationGracePeriodSeconds"]


@each_flavour
def test_the_sidecar_takes_its_arguments_and_stands_before_vllm(path: Path) -> None:
    command = main.get_command(click.Context(main), "sidecar")
    assert command is not None
    objects = flavour(path)
    for sidecar in containers(objects, "sidecar"):
        context = command.make_context("sidecar", expanded(sidecar))
        assert sidecar["restartPolicy"] == "Always"
        assert sidecar["command"][-1] == "sidecar"
        (vllm,) = (c for c in containers(objects, "vllm") if c["ports"][0]["name"] == "vllm")
        assert context.params["decoder"] == f"127.0.0.1:{vllm['ports'][0]['containerPort']}"
        assert f"--port={vllm['ports'][0]['containerPort']}" in vllm["args"]
    assert bool(containers(objects, "sidecar")) == (path.stem == "prefill-decode")


def picker_pod(path: Path) -> dict[str, Any]:
    (found,) = (spec for _, spec in pod_specs(flavour(path)) if is_picker(spec))
    return found


@each_flavour
def test_every_configuration_in_it_is_a_good_one(path: Path) -> None:
    for obj in of_kind(flavour(path), "ConfigMap"):
        for name, text in obj["data"].items():
            if name == "config.yaml":
                read(text, source=f"{path.name}: {name}")
            else:
                assert name in ("envoy.yaml", "kvsteer.json")


@each_flavour
def test_whom_the_pool_selects_are_its_own_workers_and_the_service_finds_the_picker(path: Path) -> None:
    objects = flavour(path)
    pickers = [metadata["labels"] for metadata, spec in pod_specs(objects) if is_picker(spec)]
    workers = [metadata["labels"] for metadata, spec in pod_specs(objects) if not is_picker(spec)]
    (service,) = of_kind(objects, "Service")
    assert all(service["spec"]["selector"].items() <= labels.items() for labels in pickers)
    assert not any(service["spec"]["selector"].items() <= labels.items() for labels in workers)
    for pool in of_kind(objects, "InferencePool"):
        selector = pool["spec"]["selector"]["matchLabels"]
        assert all(selector.items() <= labels.items() for labels in workers)
        assert not any(selector.items() <= labels.items() for labels in pickers)
        assert pool["spec"]["endpointPickerRef"]["name"] == service["metadata"]["name"]
        assert pool["spec"]["endpointPickerRef"]["port"]["number"] in {p["port"] for p in service["spec"]["ports"]}
        for _, spec in pod_specs(objects):
            if not is_picker(spec):
                every = (*spec.get("initContainers", ()), *spec["containers"])
                declared = {port["containerPort"] for container in every for port in container["ports"]}
                assert {port["number"] for port in pool["spec"]["targetPorts"]} <= declared
    for hpa in of_kind(objects, "HorizontalPodAutoscaler"):
        target = hpa["spec"]["scaleTargetRef"]
        (scaled,) = (o for o in of_kind(objects, target["kind"]) if o["metadata"]["name"] == target["name"])
        assert "replicas" not in scaled["spec"], "the autoscaler's number would be undone at each upgrade"


def is_picker(spec: dict[str, Any]) -> bool:
    return any(c["name"] == "picker" for c in (*spec.get("initContainers", ()), *spec["containers"]))


@each_flavour
def test_pods_run_without_root_and_without_writing_to_their_image(path: Path) -> None:
    spec = picker_pod(path)
    assert spec["securityContext"]["runAsNonRoot"] is True
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}


def rules(objects: list[dict[str, Any]], kind: str) -> dict[str, set[str]]:
    """`group/resource` -> verbs."""
    found: dict[str, set[str]] = {}
    for role in of_kind(objects, kind):
        for rule in role["rules"]:
            for group in rule.get("apiGroups", [""]):
                for resource in rule.get("resources", rule.get("nonResourceURLs", ())):
                    found.setdefault(f"{group}/{resource}", set()).update(rule["verbs"])
    return found


READ = {"get", "list", "watch"}
X, V1 = "inference.networking.x-k8s.io", "inference.networking.k8s.io"


def test_the_picker_may_do_what_its_page_lists_and_nothing_else() -> None:
    everything = render({"picker": {"leaderElection": True, "metricsAuth": True}, "pool": {"selector": {"a": "b"}}})
    assert rules(everything, "Role") == {
        "/pods": READ,
        "/events": {"create"},
        f"{V1}/inferencepools": READ,
        f"{X}/inferencepools": READ,
        f"{X}/inferenceobjectives": READ,
        f"{X}/inferencemodelrewrites": READ,
        "coordination.k8s.io/leases": {"get", "create", "update"},
    }
    assert rules(everything, "ClusterRole") == {
        "authentication.k8s.io/tokenreviews": {"create"},
        "authorization.k8s.io/subjectaccessreviews": {"create"},
        "//metrics": {"get"},
    }
    least = render({"picker": {"metricsAuth": False}, "mode": "standalone", "pool": {"selector": {"a": "b"}}})
    assert rules(least, "Role") == {"/pods": READ, "/events": {"create"}}
    assert of_kind(least, "ClusterRole") == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mode": "sidecar"}, "mode"),
        ({"picker": {"replica": 2}}, "replica"),
        ({"picker": {"replicas": 0}}, "replicas"),
        ({"pool": {"targetPorts": []}}, "targetPorts"),
        ({"pool": {"targetPorts": list(range(8000, 8009))}}, "targetPorts"),
        ({"pool": {"targetPorts": [8000, 8000]}}, "targetPorts"),
        ({"gateway": {"flavour": "nginx"}}, "flavour"),
        ({"gateway": {"requestTimeout": "1 hour"}}, "requestTimeout"),
        ({"workers": [{"name": "vllm"}]}, "model"),
        ({"workers": [{"name": "Bad_Name", "image": "i", "model": "m"}]}, "name"),
        ({"workers": [{"name": "vllm", "image": "i", "model": "m", "role": "prefill", "sidecar": True}]}, "role"),
        ({"workers": [{"name": "vllm", "image": "i", "model": "m", "sidecar": True}]}, "role"),
        ({"picker": {"sharedState": "http://redis"}}, "sharedState"),
    ],
)
def test_wrong_values_are_refused_with_their_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm_python.HelmError, match=words):
        render(values)


def test_standalone_has_the_picker_up_before_envoy_and_down_after_it() -> None:
    spec = picker_pod(ROOT / "deploy/values/standalone.yaml")
    (picker,) = spec["initContainers"]
    assert picker["restartPolicy"] == "Always"
    assert [container["name"] for container in spec["containers"]] == ["envoy"]
    (envoy,) = (o for o in of_kind(flavour(ROOT / "deploy/values/standalone.yaml"), "ConfigMap"))
    assert envoy["data"]["envoy.yaml"] == (CHART / "files/envoy.yaml").read_text()
    arguments = expanded(picker)
    for shared in ("/run/kvsteer/ext_proc.sock", "/run/kvsteer/pool.json"):
        assert shared in envoy["data"]["envoy.yaml"]
        assert any(shared in argument for argument in arguments)


def test_envoys_file_in_the_chart_is_what_the_command_prints() -> None:
    asked = ["envoy-config", "--mode", "sidecar", "--profile", "gateway", "--endpoints", "file:/run/kvsteer/pool.json"]
    printed = CliRunner().invoke(main, asked)
    assert (CHART / "files/envoy.yaml").read_text() == printed.output, "run `make envoy-files`"


def test_another_port_of_envoy_is_in_its_file_its_container_and_the_service() -> None:
    objects = render({"mode": "standalone", "pool": {"selector": {"a": "b"}}, "envoy": {"port": 8888}})
    (config,) = of_kind(objects, "ConfigMap")
    assert "port_value: 8888" in config["data"]["envoy.yaml"]
    assert "port_value: 8080" not in config["data"]["envoy.yaml"]
    (envoy,) = containers(objects, "envoy")
    assert envoy["ports"] == [{"name": "http", "containerPort": 8888}]


@pytest.mark.parametrize(
    ("worker", "connector"),
    [
        ({}, None),
        ({"offloadGiB": 1}, "OffloadingConnector"),
        ({"role": "prefill"}, "NixlConnector"),
        ({"role": "decode", "offloadGiB": 1}, "MultiConnector"),
    ],
)
def test_a_worker_gets_the_connector_for_what_it_is_to_do(worker: dict[str, Any], connector: str | None) -> None:
    objects = render({"workers": [{"name": "w", "image": "i", "model": "m", **worker}]})
    (vllm,) = containers(objects, "vllm")
    transfers = [json.loads(a.partition("=")[2]) for a in vllm["args"] if a.startswith("--kv-transfer-config=")]
    assert [t["kv_connector"] for t in transfers] == ([connector] if connector else [])
    if worker.get("offloadGiB"):
        assert '"cpu_bytes_to_use": 1073741824' in json.dumps(transfers)
    ((metadata, _),) = ((m, s) for m, s in pod_specs(objects) if s["containers"][0]["name"] == "vllm")
    assert metadata["labels"].get("llm-d.ai/role") == worker.get("role")


def test_every_metric_of_the_dashboard_exists() -> None:
    board = json.loads((CHART / "files/dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {n for e in expressions for n in re.findall(r"\b(?:kvsteer|inference)_[a-z0-9_]+", e)}
    documented = set(re.findall(r"`([a-z0-9_]+)`", (ROOT / "docs/metrics.md").read_text()))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} - documented == set()
    labels = {label.strip() for e in expressions for by in re.findall(r"by \(([^)]*)\)", e) for label in by.split(",")}
    assert labels <= documented | {"le"}
