"""What is read of Kubernetes objects, and what becomes of them: endpoints, and models to ask for."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from epp.discovery.kubernetes.members import lacking, of_pods, of_slices, selects
from epp.discovery.kubernetes.objects import (
    read_objective,
    read_pod,
    read_pool,
    read_rewrite,
    read_slice,
)
from epp.discovery.kubernetes.rewrites import ModelRewrites

V1 = {
    "metadata": {"name": "p", "namespace": "ns"},
    "spec": {
        "selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": 8000}, {"number": 8001}],
        "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
    },
}


def pod(name: str = "w-0", **over: Any) -> dict[str, Any]:
    """A ready pod; `over` replaces what is said of it."""
    status: dict[str, Any] = {
        "podIP": "10.0.0.1",
        "podIPs": [{"ip": "10.0.0.1"}],
        "conditions": [{"type": "ContainersReady", "status": "False"}, {"type": "Ready", "status": "True"}],
    }
    status.update(over.pop("status", {}))
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "labels": {"app": "vllm"}}
    metadata.update(over.pop("metadata", {}))
    spec = {"nodeName": "n1", "containers": [{"name": "vllm", "ports": []}]} | over
    return {"metadata": metadata, "spec": spec, "status": status}


def test_a_pool_of_either_version_has_a_selector_and_ports_by_rank() -> None:
    new = read_pool(V1)
    assert (new.selector, new.ports, new.app_protocol) == ({"app": "vllm"}, (8000, 8001), "http")
    old = read_pool({"metadata": {"name": "p"}, "spec": {"selector": {"app": "vllm"}, "targetPortNumber": 8000}})
    assert (old.selector, old.ports) == ({"app": "vllm"}, (8000,))


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {},
        {"selector": {"matchLabels": {}}, "targetPorts": [{"number": 8000}]},
        {"selector": {"matchLabels": {"a": "b"}}},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": []},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 0}]},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": True}]},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": "8000"}]},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 8000}] * 2},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": n} for n in range(1, 10)]},
    ],
)
def test_a_pool_that_its_schema_would_refuse_is_refused_here_too(spec: dict[str, Any] | None) -> None:
    with pytest.raises(ValueError, match=r"^spec"):
        read_pool({"metadata": {"name": "p"}, "spec": spec})


@pytest.mark.parametrize(
    ("over", "ready"),
    [
        ({}, True),
        ({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, False),
        ({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}, False),
        ({"status": {"conditions": None}}, False),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, False),
    ],
)
def test_a_pod_serves_by_its_condition_ready_until_it_is_being_deleted(over: dict[str, Any], ready: bool) -> None:
    assert bool(of_pods([read_pod(pod(**over))], [8000])) is ready


@pytest.mark.parametrize(
    ("status", "host"),
    [
        ({"podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]}, "10.0.0.1"),
        ({"podIP": "fd00::1", "podIPs": [{"ip": "fd00:0:0::1"}, {"ip": "10.0.0.1"}]}, "fd00::1"),
        ({"podIP": "10.0.0.9", "podIPs": None}, "10.0.0.9"),
    ],
)
def test_the_address_is_the_one_of_the_clusters_first_family(status: dict[str, Any], host: str) -> None:
    (spec,) = of_pods([read_pod(pod(status=status))], [8000])
    assert spec.host == host


def test_a_ready_pod_without_an_address_is_no_endpoint_yet() -> None:
    assert of_pods([read_pod(pod(status={"podIP": "", "podIPs": None}))], [8000]) == []


def test_several_ports_are_ranks_by_their_place_and_named_for_it() -> None:
    specs = of_pods([read_pod(pod())], [8000, 8001])
    assert [(s.name, s.port, s.rank) for s in specs] == [("w-0-rank-0", 8000, 0), ("w-0-rank-1", 8001, 1)]
    assert {s.uid for s in specs} == {"uid-w-0"}
    assert specs[0].labels == {"app": "vllm", "kubernetes.io/hostname": "n1"}


@pytest.mark.parametrize("key", ["llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"])
def test_an_annotation_limits_the_ports_that_are_live_and_ranks_keep_their_numbers(key: str) -> None:
    specs = of_pods([read_pod(pod(metadata={"annotations": {key: "8001, x,9"}}))], [8000, 8001])
    assert [(s.port, s.rank) for s in specs] == [(8001, 1)]


def test_a_port_that_the_containers_do_not_declare_is_noticed_only_where_they_declare_some() -> None:
    declares = read_pod(pod(containers=[{"name": "c", "ports": [{"containerPort": 8000}]}]))
    assert lacking(declares, [8000, 8001]) == (8001,)
    assert lacking(read_pod(pod()), [8000]) == ()
    limited = read_pod(
        pod(
            metadata={"annotations": {"llm-d.ai/active-ports": "8000"}},
            containers=[{"name": "c", "ports": [{"containerPort": 8000}]}],
        )
    )
    assert lacking(limited, [8000, 8001]) == ()


def test_a_selector_wants_every_label_and_an_empty_one_takes_nobody() -> None:
    assert selects({"a": "1"}, {"a": "1", "b": "2"})
    assert not selects({"a": "1", "b": "3"}, {"a": "1", "b": "2"})
    assert not selects({}, {"a": "1"})


@pytest.mark.parametrize("broken", [{}, {"metadata": {}}, {"metadata": {"name": ""}}, {"metadata": []}])
def test_an_object_without_a_name_is_none(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="metadata"):
        read_pod(broken)


def slice_(*endpoints: dict[str, Any], ports: Any = ({"name": "http", "port": 8000},)) -> dict[str, Any]:
    return {"addressType": "IPv4", "ports": list(ports), "endpoints": list(endpoints)}


def test_a_slice_gives_what_is_ready_or_does_not_say_once_each() -> None:
    found = read_slice(
        slice_(
            {"addresses": ["10.0.0.1", "10.0.0.9"], "conditions": {"ready": True}, "zone": "z1", "nodeName": "n1"},
            {"addresses": ["10.0.0.2"]},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": False}},
            {"addresses": ["10.0.0.4"], "conditions": {"ready": True, "terminating": True}},
            {"addresses": []},
            {"addresses": ["10.0.0.1"]},
        )
    )
    specs = of_slices([found, found], "")
    assert [(s.host, s.port) for s in specs] == [("10.0.0.1", 8000), ("10.0.0.2", 8000)]
    assert specs[0].labels == {"kubernetes.io/hostname": "n1", "topology.kubernetes.io/zone": "z1"}


@pytest.mark.parametrize(("port", "numbers"), [("", [8000, 9090]), ("http", [8000]), ("9090", [9090]), ("nope", [])])
def test_the_port_of_a_service_is_named_or_numbered_or_all(port: str, numbers: list[int]) -> None:
    ports = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9090}]
    found = read_slice(slice_({"addresses": ["10.0.0.1"]}, ports=ports))
    assert [s.port for s in of_slices([found], port)] == numbers


def test_a_headless_service_without_ports_takes_the_number_that_is_given() -> None:
    found = read_slice(slice_({"addresses": ["10.0.0.1"]}, ports=()))
    assert [s.port for s in of_slices([found], "8000")] == [8000]


def test_names_in_slices_are_no_endpoints() -> None:
    assert of_slices([read_slice(slice_({"addresses": ["a.example"]}) | {"addressType": "FQDN"})], "") == []


@pytest.mark.parametrize(("priority", "read"), [(None, 0), (0, 0), (7, 7), (-1, -1)])
def test_an_objective_has_a_priority_and_0_where_it_says_none(priority: int | None, read: int) -> None:
    objective = read_objective({"metadata": {"name": "o"}, "spec": {"poolRef": {"name": "p"}, "priority": priority}})
    assert (objective.pool, objective.priority) == ("p", read)


def rewrite(name: str, *rules: Any, created: str = "2026-01-01T00:00:00Z") -> Any:
    spec = {"poolRef": {"name": "p"}, "rules": list(rules)}
    return read_rewrite({"metadata": {"name": name, "creationTimestamp": created}, "spec": spec})


def rule(models: list[str], **targets: int | None) -> dict[str, Any]:
    return {
        "matches": [{"model": {"value": model}} for model in models],
        "targets": [
            {"modelRewrite": name} | ({"weight": weight} if weight is not None else {})
            for name, weight in targets.items()
        ],
    }


def test_a_rule_that_names_the_model_beats_one_for_all_and_the_older_object_beats_the_younger() -> None:
    rules = ModelRewrites(Random(1))
    assert not rules
    rules.replace(
        [
            rewrite("young", rule(["a"], young=None), created="2026-02-01T00:00:00Z"),
            rewrite("old", rule([], everyone=None), rule(["a"], old=None), rule(["a"], later=None)),
        ]
    )
    assert rules.target("a") == "old"
    assert rules.target("b") == "everyone"
    rules.replace([rewrite("young", rule(["a"], young=None))])
    assert (rules.target("a"), rules.target("b")) == ("young", "")


def test_targets_are_drawn_by_weight_and_alike_where_none_has_one() -> None:
    rules = ModelRewrites(Random(1))
    rules.replace([rewrite("r", rule(["a"], x=9, y=1), rule(["b"], x=None, y=None))])
    weighted = Counter(rules.target("a") for _ in range(2000))
    alike = Counter(rules.target("b") for _ in range(2000))
    assert weighted["x"] / 2000 == pytest.approx(0.9, abs=0.03)
    assert alike["x"] / 2000 == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    "rules",
    [[{}], [{"targets": []}], [{"targets": [{"weight": 1}]}], [{"matches": [{"model": {"type": "Regex"}}]}], None, [7]],
)
def test_a_rewrite_that_its_schema_would_refuse_is_refused_here_too(rules: Any) -> None:
    with pytest.raises(ValueError, match=r"spec\.rules"):
        read_rewrite({"metadata": {"name": "r"}, "spec": {"poolRef": {"name": "p"}, "rules": rules}})
