"""A pool of a cluster behind the real Envoy: workers as pods on loopback addresses, under load, while it changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from epp.envoy_options import Mode, Profile, defaults, parse_picker
from tests.e2e.backend import Worker, running_worker
from tests.e2e.envoy import RunningEnvoy, running_envoy, until
from tests.e2e.serving import Picker, running_picker
from tests.kube.objects import V1, pod, pool
from tests.kube.server import Api, running_api
from tests.ports import free_port

BODY = b'{"model":"m","prompt":"x"}'
CLIENTS = 12
PROMISE_S = 1.0
"""After which no request may reach an endpoint that left."""


class Fleet:
    """Pods and the workers behind them: pod `w-I` is 127.0.1.I."""

    def __init__(self, stack: AsyncExitStack, api: Api, ports: tuple[int, ...]) -> None:
        self.api, self.ports = api, ports
        self._stack = stack
        self._served: dict[str, list[Worker]] = {}

    def workers(self, name: str) -> list[Worker]:
        """One for each port, in order."""
        return self._served[name]

    async def add(self, *indices: int, labels: dict[str, str] | None = None) -> None:
        for i in indices:
            name, ip = f"w-{i}", f"127.0.1.{i}"
            if name not in self._served:
                running = [running_worker(f"{name}:{port}", ip, port) for port in self.ports]
                self._served[name] = [await self._stack.enter_async_context(worker) for worker in running]
            self.api.store.put("Pod", pod(name, ip, labels=labels))

    def delete(self, *indices: int) -> None:
        """As Kubernetes does it: marked first, gone when the kubelet says so; the worker serves what it has."""
        for i in indices:
            self.api.store.delete(self.api.store.kind("Pod"), "default", f"w-{i}")

    def requests(self) -> Counter[str]:
        """By address, since the start."""
        return Counter({w.address: w.requests for workers in self._served.values() for w in workers})


class Load:
    """Clients that ask without pause until told to stop."""

    def __init__(self, envoy: RunningEnvoy) -> None:
        self.answers: Counter[str] = Counter()
        """What went wrong, or the worker that answered."""
        self._url = f"{envoy.url}/v1/completions"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            clients = [asyncio.create_task(self._client(session)) for _ in range(CLIENTS)]
            try:
                yield self
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)

    async def _client(self, session: aiohttp.ClientSession) -> None:
        headers = {"content-type": "application/json", "x-echo": '{"pause": 0.02, "body": "{}"}'}
        while True:
            try:
                async with session.post(self._url, data=BODY, headers=headers) as response:
                    text = await response.text()
                    worker = response.headers.get("x-worker", "")
                    self.answers[worker if response.status == 200 else f"{response.status} {text:.200}"] += 1
            except aiohttp.ClientError as error:
                self.answers[f"{type(error).__name__}: {error}"] += 1

    def lost(self) -> dict[str, int]:
        return {answer: n for answer, n in self.answers.items() if not answer.startswith("127.0.1.")}


@asynccontextmanager
async def cluster(
    folder: Path, *ports: int, pods: range, pool_ports: tuple[int, ...] = ()
) -> AsyncIterator[tuple[Fleet, Picker, Load]]:
    """The API server, a pool of so many pods, the picker, Envoy, and a load on it."""
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_api())
        fleet = Fleet(stack, api, ports)
        api.store.put("InferencePool", pool(*(pool_ports or ports)), V1)
        await fleet.add(*pods)
        api.kubelet_s = 2.0
        listen = f"unix:{folder}/picker"
        options = ("--no-secure-serving", "--no-metrics-endpoint-auth", f"--kubeconfig={api.kubeconfig(folder / 'kc')}")
        picker = await stack.enter_async_context(running_picker(folder, listen, "--pool-name=pool", *options))
        settings = defaults(Mode.SIDECAR, Profile.GATEWAY, picker=parse_picker(listen), endpoints=())
        envoy = await stack.enter_async_context(running_envoy(settings))
        load = await stack.enter_async_context(Load(envoy).running())
        await until(lambda: asyncio.sleep(0, load.answers.total()), lambda n: n > 50)
        yield fleet, picker, load


async def all_serve(fleet: Fleet, *addresses: str) -> None:
    """Wait until each of these has had a request, from now on."""
    before = fleet.requests()
    await until(lambda: asyncio.sleep(0, fleet.requests() - before), lambda new: all(new[a] for a in addresses))


async def assert_left(fleet: Fleet, *addresses: str) -> None:
    """No request reaches these from `PROMISE_S` after now on, however many others are answered."""
    await asyncio.sleep(PROMISE_S)
    before = fleet.requests()
    await asyncio.sleep(1.0)
    after = fleet.requests()
    assert {a: after[a] - before[a] for a in addresses} == dict.fromkeys(addresses, 0)
    assert after.total() - before.total() > 50


async def test_a_pool_that_grows_and_shrinks_under_load_loses_no_request(tmp_path: Path) -> None:
    port = free_port()
    async with cluster(tmp_path, port, pods=range(1, 3)) as (fleet, _, load):
        await fleet.add(*range(3, 21))
        await all_serve(fleet, *(f"127.0.1.{i}:{port}" for i in range(1, 21)))
        fleet.delete(*range(4, 21))
        await assert_left(fleet, *(f"127.0.1.{i}:{port}" for i in range(4, 21)))
        await asyncio.sleep(fleet.api.kubelet_s)
        await all_serve(fleet, *(f"127.0.1.{i}:{port}" for i in range(1, 4)))
        assert len(fleet.api.store.all(fleet.api.store.kind("Pod"))) == 3
        assert load.lost() == {}


async def test_ports_ranks_and_the_selector_change_under_load(tmp_path: Path) -> None:
    old, new, third = free_port(), free_port(), free_port()
    async with cluster(tmp_path, old, new, third, pods=range(1, 4), pool_ports=(old,)) as (fleet, picker, load):
        put = fleet.api.store.put
        put("InferencePool", pool(new), V1)
        await assert_left(fleet, *(f"127.0.1.{i}:{old}" for i in range(1, 4)))
        await until(lambda: asyncio.sleep(0, fleet.workers("w-1")[1].scrapes), lambda n: n > 0)
        put("InferencePool", pool(new, third), V1)
        await all_serve(fleet, *(f"127.0.1.{i}:{p}" for i in range(1, 4) for p in (new, third)))
        ranks = await picker.gauges("kvsteer_endpoint_in_flight_requests")
        assert len(ranks) == 6
        await fleet.add(3, labels={"tier": "x"})
        put("InferencePool", pool(new, third, selector={"tier": "x"}), V1)
        await assert_left(fleet, *(f"127.0.1.{i}:{p}" for i in (1, 2) for p in (new, third)))
        await fleet.add(4, labels={"tier": "x", "app": "another"})
        await all_serve(fleet, f"127.0.1.4:{new}", f"127.0.1.4:{third}")
        assert load.lost() == {}


async def test_the_pool_serves_on_while_the_api_server_is_away_and_is_right_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    port = free_port()
    async with cluster(tmp_path, port, pods=range(1, 4)) as (fleet, picker, load):
        await fleet.api.stop()
        await all_serve(fleet, *(f"127.0.1.{i}:{port}" for i in range(1, 4)))
        fleet.delete(1)
        await fleet.api.start()
        await until(lambda: picker.gauges("inference_pool_ready_pods"), lambda pods: sum(pods.values()) == 2)
        await assert_left(fleet, f"127.0.1.1:{port}")
        assert load.lost() == {}
