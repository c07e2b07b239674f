"""Leader election over the API server, in virtual time: replicas that come, end, die, and lose their way to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from epp.discovery.kubernetes.client import ApiClient
from epp.discovery.kubernetes.credentials import Access
from epp.shared.election import Candidate
from epp.shared.lease import Election
from tests.kube.server import Api, running_api
from tests.virtual_loop import in_virtual_time

NAME = "epp-default-pool.llm-d.ai"


@asynccontextmanager
async def replica(api: Api, identity: str) -> AsyncIterator[Candidate]:
    client = ApiClient(Access(api.url, tls=False))
    clock = asyncio.get_running_loop().time
    candidate = Candidate(client, "default", NAME, Election(identity), clock=clock)
    candidate.start()
    try:
        yield candidate
    finally:
        await candidate.stop()
        await client.close()


def leaders(*candidates: Candidate) -> list[str]:
    return [c.election.identity for c in candidates if not c.not_leading]


def lease(api: Api) -> dict[str, object]:
    store = api.store
    spec: dict[str, object] = store.get(store.kind("Lease", "coordination.k8s.io"), "default", NAME)["spec"]
    return spec


@in_virtual_time
async def test_one_leads_and_the_others_say_who() -> None:
    async with running_api() as api, replica(api, "a") as a:
        await asyncio.sleep(1)
        async with replica(api, "b") as b, replica(api, "c") as c:
            for _ in range(100):
                await asyncio.sleep(5)
                assert leaders(a, b, c) == ["a"]
            assert b.not_leading == "standing by: a leads"
            assert lease(api)["leaseTransitions"] == 0
            assert a.counters["renewed"] > 200


@in_virtual_time
async def test_never_two_of_ten_that_start_together() -> None:
    async with running_api() as api:
        api.faults.delay_s = 0.05
        replicas = [replica(api, f"r-{i}") for i in range(10)]
        candidates = [await r.__aenter__() for r in replicas]
        for _ in range(50):
            await asyncio.sleep(1)
            assert len(leaders(*candidates)) <= 1
        assert len(leaders(*candidates)) == 1
        for r in replicas:
            await r.__aexit__(None, None, None)


@in_virtual_time
async def test_a_leader_that_ends_gives_the_lease_back_and_the_next_takes_it_at_its_next_look() -> None:
    async with running_api() as api, replica(api, "a") as a:
        await asyncio.sleep(1)
        async with replica(api, "b") as b:
            await asyncio.sleep(5)
            assert leaders(a, b) == ["a"]
            await a.stop()
            assert lease(api)["holderIdentity"] == ""
            await asyncio.sleep(2.1)
            assert leaders(a, b) == ["b"]


@in_virtual_time
async def test_a_leader_that_dies_is_succeeded_after_the_leases_duration_and_not_before() -> None:
    async with running_api() as api, replica(api, "b") as b:
        dead = Candidate(b._client, "default", NAME, Election("a"), clock=asyncio.get_running_loop().time)
        store = api.store
        held = store.get(store.kind("Lease", "coordination.k8s.io"), "default", NAME) if b.election.holder else None
        assert held is None
        await asyncio.sleep(1)
        await b.stop()
        dead.start()
        await asyncio.sleep(3)
        assert leaders(dead) == ["a"]
        assert dead._task is not None
        dead._task.cancel()  # as by kill -9: nothing is given back
        b.start()
        await asyncio.sleep(12)
        assert leaders(b) == []
        await asyncio.sleep(8)
        assert leaders(b) == ["b"]
        assert lease(api)["leaseTransitions"] == 2


@in_virtual_time
async def test_who_cannot_renew_leads_no_more_before_another_can() -> None:
    async with running_api() as api, replica(api, "a") as a:
        await asyncio.sleep(5)
        assert leaders(a) == ["a"]
        api.faults.refuse["*", "leases"] = 503
        gone_at = None
        for second in range(1, 20):
            await asyncio.sleep(1)
            if leaders(a) == [] and gone_at is None:
                gone_at = second
        assert gone_at is not None
        assert gone_at <= 12, "the lease runs 15 s for the others"
        assert "cannot be had: leases: as the test" in a.not_leading.replace("update ", "").replace("get ", "")
        api.faults.refuse.clear()
        await asyncio.sleep(3)
        assert leaders(a) == ["a"]
        assert a.counters["lost"] == 1


@in_virtual_time
async def test_a_slow_api_server_and_a_conflict_cost_a_turn_not_the_lead() -> None:
    async with running_api() as api, replica(api, "a") as a:
        await asyncio.sleep(5)
        api.faults.delay_s = 1.5
        await asyncio.sleep(60)
        assert leaders(a) == ["a"]
        api.faults.once.append((409, ""))
        await asyncio.sleep(10)
        assert leaders(a) == ["a"]
