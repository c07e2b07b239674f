"""The check that the API server of these tests is honest: the real kubectl does its work with it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.envoy import until
from tests.kube.server import Api, running_api

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")

POOL: dict[str, Any] = {
    "apiVersion": "inference.networking.k8s.io/v1",
    "kind": "InferencePool",
    "metadata": {"name": "pool"},
    "spec": {
        "selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
    },
}


def pod(name: str, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "vllm"} | labels},
        "spec": {"containers": [{"name": "vllm", "image": "vllm", "ports": [{"containerPort": 8000}]}]},
        "status": {"phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }


class Kubectl:
    """The program, against one server."""

    def __init__(self, api: Api, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.config = api.kubeconfig(folder / "kubeconfig")

    async def start(self, *args: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        environment = os.environ | {"KUBECONFIG": str(self.config), "HOME": str(self.folder)}
        return await asyncio.create_subprocess_exec(
            "kubectl", *args, stdin=pipe, stdout=pipe, stderr=pipe, env=environment
        )

    async def fails(self, *args: str, given: Any = None) -> str:
        """Run it; what it complains of."""
        process = await self.start(*args)
        _, errors = await process.communicate(yaml.safe_dump(given).encode() if given else None)
        assert process.returncode != 0
        return errors.decode()

    async def __call__(self, *args: str, given: Any = None) -> str:
        """Run it; what it prints. `given`: an object for its standard input."""
        process = await self.start(*args)
        output, errors = await process.communicate(yaml.safe_dump(given).encode() if given else None)
        assert process.returncode == 0, errors.decode()
        return output.decode()


@pytest.fixture
async def kubectl(tmp_path: Path) -> Any:
    async with running_api() as api:
        yield Kubectl(api, tmp_path)


async def test_it_gets_and_describes_what_is_stored(kubectl: Kubectl) -> None:
    for i in range(3):
        kubectl.api.store.put("Pod", pod(f"w-{i}", tier="a" if i else "b"))
    listed = (await kubectl("get", "po")).splitlines()
    assert listed[0].split() == ["NAME", "READY", "STATUS", "IP", "CREATED", "AT"]
    assert [line.split()[:4] for line in listed[1:]] == [[f"w-{i}", "1/1", "Running", "127.0.0.1"] for i in range(3)]
    assert (await kubectl("get", "pods", "-l", "tier=b", "-o", "name")).split() == ["pod/w-0"]
    assert (await kubectl("get", "pods", "-l", "tier in (a,c),!gone", "-o", "name")).split() == ["pod/w-1", "pod/w-2"]
    assert (await kubectl("get", "pods", "--field-selector", "metadata.name=w-2", "-o", "name")).split() == ["pod/w-2"]
    assert len(json.loads(await kubectl("get", "pods", "--chunk-size=1", "-o", "json"))["items"]) == 3
    assert (await kubectl("get", "pod", "w-1", "-o", "jsonpath={.status.podIP}")) == "127.0.0.1"
    assert "Readiness" in await kubectl("describe", "pod", "w-1") or "Ready" in await kubectl("describe", "pod", "w-1")
    assert json.loads(await kubectl("get", "--raw", "/version"))["major"] == "1"


async def test_it_watches_what_comes_changes_and_goes(kubectl: Kubectl) -> None:
    store = kubectl.api.store
    store.put("Pod", pod("w-0"))
    process = await kubectl.start("get", "pods", "-w", "--output-watch-events", "--no-headers")
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            first = (await process.stdout.readline()).decode().split()
            await until(lambda: asyncio.sleep(0, kubectl.api.watches), lambda n: n == 1)
            store.put("Pod", pod("w-1"))
            store.delete(store.kind("Pod"), "default", "w-0", grace_s=0)
            rest = [(await process.stdout.readline()).decode().split() for _ in range(2)]
    finally:
        process.kill()
        await process.wait()
    assert [line[:2] for line in [first, *rest]] == [["ADDED", "w-0"], ["ADDED", "w-1"], ["DELETED", "w-0"]]


async def test_it_applies_creates_and_changes_by_merging_what_it_last_applied(kubectl: Kubectl) -> None:
    assert (await kubectl("apply", "-f", "-", given=POOL)).split()[-1] == "created"
    assert (await kubectl("apply", "-f", "-", given=POOL)).split()[-1] == "unchanged"
    changed = {**POOL, "spec": {**POOL["spec"], "targetPorts": [{"number": 8000}, {"number": 8001}]}}
    assert (await kubectl("apply", "-f", "-", given=changed)).split()[-1] == "configured"
    stored = json.loads(await kubectl("get", "infpool", "pool", "-o", "json"))
    assert stored["spec"]["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    assert stored["spec"]["appProtocol"] == "http"
    assert stored["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"
    assert stored["metadata"]["generation"] == 2
    assert (await kubectl("apply", "-f", "-", given=pod("w-0"))).split()[-1] == "created"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"targetPorts": []}, "spec.targetPorts"),
        ({"targetPorts": [{"number": 70_000}]}, "70000 is greater than the maximum of 65535"),
        ({"targetPorts": [{"number": 8000}, {"number": 8000}]}, "port number must be unique"),
        ({"selector": {}}, "matchLabels"),
        ({"appProtocol": "h3"}, "appProtocol"),
        ({"endpointPickerRef": {"name": "epp"}}, "port is required when kind is 'Service'"),
    ],
)
async def test_it_is_told_what_the_schema_refuses(kubectl: Kubectl, spec: dict[str, Any], words: str) -> None:
    refused = {**POOL, "spec": {**POOL["spec"], **spec}}
    assert words in await kubectl.fails("create", "-f", "-", given=refused)


async def test_it_patches_in_each_of_the_three_ways(kubectl: Kubectl) -> None:
    kubectl.api.store.put("Pod", pod("w-0"))
    kubectl.api.store.put("InferencePool", POOL, "inference.networking.k8s.io")
    await kubectl("patch", "pod", "w-0", "-p", '{"spec":{"containers":[{"name":"vllm","image":"new"}]}}')
    await kubectl("patch", "pod", "w-0", "--type=merge", "-p", '{"metadata":{"labels":{"app":null,"x":"y"}}}')
    stored = json.loads(await kubectl("get", "pod", "w-0", "-o", "json"))
    assert stored["spec"]["containers"] == [{"name": "vllm", "image": "new", "ports": [{"containerPort": 8000}]}]
    assert stored["metadata"]["labels"] == {"x": "y"}
    replace = '[{"op":"replace","path":"/spec/targetPorts/0/number","value":9000}]'
    await kubectl("patch", "infpool", "pool", "--type=json", "-p", replace)
    assert await kubectl("get", "infpool", "pool", "-o", "jsonpath={.spec.targetPorts[0].number}") == "9000"
    assert "strategic" in await kubectl.fails("patch", "infpool", "pool", "--type=strategic", "-p", '{"spec":{}}')
    await kubectl("label", "pod", "w-0", "role=decode")
    await kubectl("annotate", "pod", "w-0", "llm-d.ai/active-ports=8000")
    await kubectl("patch", "infpool", "pool", "--subresource=status", "--type=merge", "-p", '{"status":{"parents":[]}}')
    assert json.loads(await kubectl("get", "infpool", "pool", "-o", "json"))["status"] == {"parents": []}


async def test_a_stale_version_is_a_conflict(kubectl: Kubectl) -> None:
    stale = json.loads(json.dumps(kubectl.api.store.put("Pod", pod("w-0"))))
    kubectl.api.store.put("Pod", pod("w-0", newer="yes"))
    stale["metadata"]["labels"]["older"] = "yes"
    assert "the object has been modified" in await kubectl.fails("replace", "-f", "-", given=stale)


async def test_it_deletes_pods_in_two_steps_and_others_at_once(kubectl: Kubectl) -> None:
    store = kubectl.api.store
    store.put("Pod", pod("w-0"))
    store.put("Pod", pod("w-1"))
    store.put("InferencePool", POOL, "inference.networking.k8s.io")
    kubectl.api.kubelet_s = 60
    await kubectl("delete", "pod", "w-0", "--wait=false")
    assert "Terminating" in await kubectl("get", "pods")
    await kubectl("delete", "pod", "w-1", "--grace-period=0", "--force")
    await kubectl("delete", "infpool", "pool")
    assert [p["metadata"]["name"] for p in store.all(store.kind("Pod"))] == ["w-0"]
    store.finish(store.kind("Pod"), "default", "w-0")
    assert "not found" in (await kubectl.fails("get", "pod", "w-0")).lower()


async def test_it_waits_for_a_condition(kubectl: Kubectl) -> None:
    waiting = pod("w-0")
    waiting["status"]["conditions"] = []
    kubectl.api.store.put("Pod", waiting)
    process = await kubectl.start("wait", "pod/w-0", "--for=condition=Ready", "--timeout=20s")
    await until(lambda: asyncio.sleep(0, kubectl.api.watches), lambda n: n == 1)
    kubectl.api.store.put("Pod", pod("w-0"))
    output, errors = await process.communicate()
    assert output.decode().strip() == "pod/w-0 condition met", errors.decode()


async def test_a_resource_without_its_crd_is_unknown(kubectl: Kubectl) -> None:
    kubectl.api.store.remove_crd("inference.networking.x-k8s.io", "inferenceobjectives")
    assert "doesn't have a resource type" in await kubectl.fails("get", "inferenceobjectives")
