"""Endpoints from a cluster, with the real client against the API server: what belongs to the pool, and when."""

from __future__ import annotations

import logging

import pytest

from epp.discovery.kubernetes.sources import SelectorDiscovery, SliceDiscovery
from tests.discovery.kubernetes.following import following, policy_of, pool_of, settle
from tests.kube.objects import V1, X, endpoint_slice, objective, old_pool, pod, pool, rewrite
from tests.kube.resources import crds
from tests.kube.server import running_api
from tests.virtual_loop import in_virtual_time


@in_virtual_time
async def test_pods_that_are_older_than_the_pool_belong_to_it_and_so_do_younger_ones() -> None:
    async with running_api() as api:
        api.store.put("Pod", pod("old", "127.0.0.2"))
        async with pool_of(api) as followed:
            await settle()
            assert not followed.source.synced
            assert followed.source.trouble == "InferencePool default/pool is not there"
            api.store.put("InferencePool", pool(8000), V1)
            await settle()
            assert (followed.source.synced, followed.addresses) == (True, ["127.0.0.2:8000"])
            api.store.put("Pod", pod("young", "127.0.0.3"))
            await settle(0.1)
            assert followed.addresses == ["127.0.0.2:8000", "127.0.0.3:8000"]
            assert followed.source.trouble == ""


@in_virtual_time
async def test_only_the_pool_of_that_name_counts_and_pods_of_other_namespaces_never() -> None:
    async with running_api() as api:
        store = api.store
        store.put("InferencePool", pool(9000, name="other", selector={"app": "other"}), V1)
        store.put("InferencePool", pool(8000), V1)
        store.put("Pod", pod("mine", "127.0.0.2"))
        store.put("Pod", pod("theirs", "127.0.0.3", labels={"app": "other"}))
        store.put("Pod", pod("away", "127.0.0.4"), namespace="kube-system")
        async with pool_of(api) as followed:
            await settle()
            assert followed.addresses == ["127.0.0.2:8000"]


@in_virtual_time
async def test_ports_that_leave_the_pool_are_out_at_once_and_new_ones_in() -> None:
    async with running_api() as api:
        api.store.put("InferencePool", pool(8000, 8001), V1)
        api.store.put("Pod", pod("w-0", "127.0.0.2"))
        async with pool_of(api) as followed:
            await settle()
            assert followed.addresses == ["127.0.0.2:8000", "127.0.0.2:8001"]
            assert [spec.rank for spec in followed.specs] == [0, 1]
            api.store.put("InferencePool", pool(8000), V1)
            await settle(0.1)
            assert followed.addresses == ["127.0.0.2:8000"]
            api.store.put("InferencePool", pool(9000), V1)
            await settle(0.1)
            assert followed.addresses == ["127.0.0.2:9000"]
            assert api.requests["list", "pods"] == 1, "ports need no question"


@in_virtual_time
async def test_another_selector_takes_out_whom_it_does_not_select_within_a_second_though_the_list_is_late() -> None:
    async with running_api() as api:
        api.store.put("InferencePool", pool(8000), V1)
        api.store.put("Pod", pod("a", "127.0.0.2", labels={"tier": "x"}))
        api.store.put("Pod", pod("b", "127.0.0.3"))
        api.store.put("Pod", pod("c", "127.0.0.4", labels={"app": "other", "tier": "x"}))
        async with pool_of(api) as followed:
            await settle()
            assert followed.names == {"a", "b"}
            api.faults.refuse["list", "pods"] = 503
            api.store.put("InferencePool", pool(8000, selector={"tier": "x"}), V1)
            await settle(0.1)
            assert followed.names == {"a", "b"}
            await settle(0.9)
            assert followed.names == {"a"}
            api.faults.refuse.clear()
            await settle(60)
            assert followed.names == {"a", "c"}


@in_virtual_time
async def test_labels_and_selector_that_change_together_leave_no_moment_without_endpoints() -> None:
    async with running_api() as api:
        api.store.put("InferencePool", pool(8000), V1)
        api.store.put("Pod", pod("a", "127.0.0.2"))
        async with pool_of(api) as followed:
            await settle()
            sizes = set()
            followed.published = lambda: sizes.add(len(followed.specs))
            api.faults.delay_s = 0.2
            api.store.put("InferencePool", pool(8000, selector={"app": "new"}), V1)
            api.store.put("Pod", pod("a", "127.0.0.2", labels={"app": "new"}))
            await settle(5)
            assert followed.names == {"a"}
            assert sizes == {1}


@in_virtual_time
async def test_a_pod_leaves_when_it_is_being_deleted_or_not_ready_or_relabelled() -> None:
    async with running_api() as api:
        store = api.store
        store.put("InferencePool", pool(8000), V1)
        for i in range(4):
            store.put("Pod", pod(f"w-{i}", f"127.0.0.{i + 2}"))
        api.kubelet_s = 600
        async with pool_of(api) as followed:
            await settle()
            assert len(followed.specs) == 4
            store.delete(store.kind("Pod"), "default", "w-0")
            store.put("Pod", pod("w-1", "127.0.0.3", ready=False))
            store.put("Pod", pod("w-2", "127.0.0.4", labels={"app": "gone"}))
            await settle(0.1)
            assert followed.names == {"w-3"}
            store.put("Pod", pod("w-1", "127.0.0.3"))
            await settle(0.1)
            assert followed.names == {"w-1", "w-3"}


@in_virtual_time
async def test_a_pod_that_comes_back_under_its_name_is_another_endpoint() -> None:
    async with running_api() as api:
        store = api.store
        store.put("InferencePool", pool(8000), V1)
        store.put("Pod", pod("w-0", "127.0.0.2"))
        async with pool_of(api) as followed:
            await settle()
            (before,) = followed.specs
            store.delete(store.kind("Pod"), "default", "w-0", grace_s=0)
            store.put("Pod", pod("w-0", "127.0.0.2"))
            await settle(0.1)
            (after,) = followed.specs
            assert (before.host, before.port, before.name) == (after.host, after.port, after.name)
            assert before.uid != after.uid
            assert before != after


@in_virtual_time
async def test_the_older_group_is_found_too_and_the_current_one_comes_first() -> None:
    async with running_api() as api:
        api.store.put("InferencePool", old_pool(7000), X)
        api.store.put("Pod", pod("w-0", "127.0.0.2"))
        async with pool_of(api) as followed:
            await settle()
            assert followed.addresses == ["127.0.0.2:7000"]
            api.store.put("InferencePool", pool(8000), V1)
            await settle()
            assert followed.addresses == ["127.0.0.2:8000"]


@in_virtual_time
async def test_a_pool_in_the_group_that_was_not_asked_for_is_pointed_at() -> None:
    async with running_api() as api:
        api.store.put("InferencePool", pool(8000), V1)
        async with pool_of(api, X) as followed:
            await settle()
            assert not followed.source.synced
            assert followed.source.trouble == (
                f"InferencePool default/pool is not there; there is one of that name in {V1} (--pool-group)"
            )


@in_virtual_time
async def test_without_the_crd_the_reason_says_so_and_the_crd_may_come_later() -> None:
    async with running_api(with_crds=False) as api:
        api.store.put("Pod", pod("w-0", "127.0.0.2"))
        async with pool_of(api) as followed:
            await settle()
            assert not followed.source.synced
            assert "the API server has no InferencePool in" in followed.source.trouble
            for crd in crds():
                api.store.add_crd(crd)
            api.store.put("InferencePool", pool(8000), V1)
            await settle(10)
            assert followed.addresses == ["127.0.0.2:8000"]


@in_virtual_time
async def test_a_403_on_the_pool_is_the_reason_and_is_asked_for_again() -> None:
    async with running_api() as api:
        api.store.put("InferencePool", pool(8000), V1)
        api.store.put("Pod", pod("w-0", "127.0.0.2"))
        api.faults.refuse["list", "inferencepools"] = 403
        async with pool_of(api, V1) as followed:
            await settle()
            assert "the API server does not allow it (403)" in followed.source.trouble
            api.faults.refuse.clear()
            await settle(10)
            assert (followed.addresses, followed.source.trouble) == (["127.0.0.2:8000"], "")


@in_virtual_time
async def test_a_pool_that_is_deleted_has_no_endpoints_and_may_come_back() -> None:
    async with running_api() as api:
        store = api.store
        store.put("InferencePool", pool(8000), V1)
        store.put("Pod", pod("w-0", "127.0.0.2"))
        async with pool_of(api) as followed:
            await settle()
            store.delete(store.kind("InferencePool", V1), "default", "pool")
            await settle(0.1)
            assert (followed.addresses, followed.source.trouble) == ([], "InferencePool default/pool is not there")
            store.put("InferencePool", pool(9000), V1)
            await settle()
            assert followed.addresses == ["127.0.0.2:9000"]


@in_virtual_time
async def test_a_pod_that_does_not_declare_the_port_is_used_and_named_in_log_event_and_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_api() as api:
        store = api.store
        store.put("InferencePool", pool(8000, 8001), V1)
        store.put("Pod", pod("w-0", "127.0.0.2", declares=(8000, 9000)))
        store.put("Pod", pod("w-1", "127.0.0.3"))
        async with pool_of(api) as followed:
            with caplog.at_level(logging.WARNING):
                await settle()
            store.put("Pod", pod("w-2", "127.0.0.4"))
            await settle()
            words = "the pool sends requests to port 8001, this pod's containers declare 8000, 9000"
            assert f"pod default/w-0: {words}" in caplog.text
            assert len(followed.specs) == 6
            assert followed.source.counters["kubernetes_port_not_declared"] == 1
            (event,) = store.all(store.kind("Event"))
            assert (event["type"], event["involvedObject"]["name"], event["message"]) == ("Warning", "w-0", words)


@in_virtual_time
async def test_who_may_not_write_events_goes_on_without() -> None:
    async with running_api() as api:
        api.store.put("InferencePool", pool(8000), V1)
        api.store.put("Pod", pod("w-0", "127.0.0.2", declares=(9000,)))
        api.faults.refuse["create", "events"] = 403
        async with pool_of(api) as followed:
            await settle()
            assert followed.addresses == ["127.0.0.2:8000"]
            assert followed.source.counters["kubernetes_events_refused"] == 1


@in_virtual_time
async def test_the_pool_is_never_written() -> None:
    async with running_api() as api:
        api.store.put("InferencePool", pool(8000), V1)
        api.store.put("Pod", pod("w-0", "127.0.0.2"))
        async with pool_of(api):
            await settle(1000)
        assert {verb for verb, resource in api.requests if resource == "inferencepools"} <= {"get", "list", "watch"}


@in_virtual_time
async def test_pods_by_label_and_port_need_no_crd() -> None:
    async with running_api(with_crds=False) as api:
        api.store.put("Pod", pod("w-0", "127.0.0.2"))
        api.store.put("Pod", pod("w-1", "127.0.0.3", labels={"app": "other"}))
        async with following(api, SelectorDiscovery, {"app": "vllm"}, (8000, 8001)) as followed:
            await settle()
            assert followed.addresses == ["127.0.0.2:8000", "127.0.0.2:8001"]
            api.faults.refuse["watch", "pods"] = 403
            api.cut_watches()
            await settle(20)
            assert followed.source.trouble == "pods of namespace default: the API server does not allow it (403)"
            assert len(followed.specs) == 2


@in_virtual_time
async def test_endpoint_slices_of_a_service_are_one_list() -> None:
    async with running_api() as api:
        group = "discovery.k8s.io"
        api.store.put("EndpointSlice", endpoint_slice("a", "vllm", "127.0.0.2"), group)
        api.store.put("EndpointSlice", endpoint_slice("b", "vllm", "127.0.0.3"), group)
        api.store.put("EndpointSlice", endpoint_slice("c", "other", "127.0.0.4"), group)
        async with following(api, SliceDiscovery, "vllm", "http") as followed:
            await settle()
            assert followed.addresses == ["127.0.0.2:8000", "127.0.0.3:8000"]
            api.store.put("EndpointSlice", endpoint_slice("a", "vllm", "127.0.0.5"), group)
            api.store.delete(api.store.kind("EndpointSlice", group), "default", "b")
            await settle(0.1)
            assert followed.addresses == ["127.0.0.5:8000"]


@in_virtual_time
async def test_objectives_and_rewrites_count_for_their_pool_and_follow_changes() -> None:
    async with running_api() as api:
        store = api.store
        store.put("InferenceObjective", objective("batch", -1), X)
        store.put("InferenceObjective", objective("foreign", 9, of="other"), X)
        store.put("InferenceModelRewrite", rewrite("r", "gpt", "llama"), X)
        async with policy_of(api) as policy:
            await settle()
            assert [policy.priority(name) for name in ("batch", "foreign", "unknown")] == [-1, 0, 0]
            assert (policy.rewrites, policy.target("gpt"), policy.target("x")) == (True, "llama", "")
            store.put("InferenceObjective", objective("batch", 5), X)
            store.put("InferenceModelRewrite", rewrite("r", "gpt", "llama", of="other"), X)
            await settle(0.1)
            assert policy.priority("batch") == 5
            assert (policy.rewrites, policy.target("gpt")) == (False, "")


@pytest.mark.parametrize("how", ["crd missing", "forbidden"])
@in_virtual_time
async def test_a_feature_whose_objects_cannot_be_read_is_off_alone_said_once_and_comes_later(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_api() as api:
        store = api.store
        (crd,) = (c for c in crds() if c["spec"]["names"]["plural"] == "inferenceobjectives")
        if how == "forbidden":
            api.faults.refuse["*", "inferenceobjectives"] = 403
        else:
            store.remove_crd(X, "inferenceobjectives")
        store.put("InferenceModelRewrite", rewrite("r", "gpt", "llama"), X)
        async with policy_of(api) as policy:
            with caplog.at_level(logging.INFO):
                await settle(200)
            assert policy.priority("batch") == 0
            assert policy.target("gpt") == "llama"
            said = [r.message for r in caplog.records if "inferenceobjectives are not followed" in r.message]
            assert len(said) == 1
            api.faults.refuse.clear()
            if how != "forbidden":
                store.add_crd(crd)
            store.put("InferenceObjective", objective("batch", -1), X)
            await settle(60)
            assert policy.priority("batch") == -1
