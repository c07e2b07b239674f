"""Two pickers behind one Envoy under load: one leads by a Lease, or both share their picks, and one of them dies."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epp.envoy_options import FailureMode, HostPort, Mode, Profile, defaults, parse_picker
from tests.e2e import load
from tests.e2e.backend import Worker, running_worker
from tests.e2e.envoy import RunningEnvoy, running_envoy, until
from tests.e2e.serving import Picker, running_picker
from tests.kube.objects import V1, pod, pool
from tests.kube.server import running_api
from tests.ports import free_port
from tests.shared.redis_server import redis_server

CLIENTS = 8
HEALTHY = "cluster.picker.membership_healthy"


@dataclass(slots=True)
class Pair:
    """Envoy, two workers, and pickers on two fixed sockets."""

    stack: AsyncExitStack
    folder: Path
    args: tuple[str, ...]
    workers: list[Worker]
    envoy: RunningEnvoy

    async def start(self, name: str, *, said: str = "kvsteer: ready: ") -> Picker:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        running = running_picker(folder, f"unix:{self.folder}/{name}", *self.args, "--drain-delay=2", said=said)
        return await self.stack.enter_async_context(running)

    async def envoy_sees(self, pickers: int) -> None:
        await until(lambda: self.envoy.stats(HEALTHY), lambda stats: stats[HEALTHY] == pickers, within_s=30)


@asynccontextmanager
async def pair(
    folder: Path, workers: list[Worker], *args: str, failure_mode: FailureMode = FailureMode.OPEN
) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        known = tuple(HostPort.parse(worker.address) for worker in workers)
        picker = parse_picker(f"unix:{folder}/one")
        options = defaults(Mode.SIDECAR, Profile.GATEWAY, picker=picker, endpoints=known, failure_mode=failure_mode)

        def both(tree: Any) -> None:
            (cluster,) = (c for c in tree["static_resources"]["clusters"] if c["name"] == "picker")
            places = [{"endpoint": {"address": {"pipe": {"path": f"{folder}/{n}"}}}} for n in ("one", "two")]
            cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": places}]

        envoy = await stack.enter_async_context(running_envoy(options, both))
        yield Pair(stack, folder, args, workers, envoy)


@asynccontextmanager
async def under_load(envoy: RunningEnvoy) -> AsyncIterator[load.Tally]:
    tally = load.Tally()
    plan = load.Plan(envoy.host, envoy.port, 1_000_000, CLIENTS, lambda n: b'{"model":"m","prompt":"%d"}' % n)
    running = asyncio.create_task(load.run(plan, tally))
    try:
        await until(tally.progress, lambda n: n > 50)
        yield tally
        await more(tally)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def more(tally: load.Tally, requests: int = 100) -> None:
    """Wait until so many more requests are over."""
    seen = tally.ended + requests
    await until(tally.progress, lambda n: n > seen, within_s=60)


def lost(tally: load.Tally) -> int:
    """Requests that did not get their answer."""
    return sum(n for status, n in tally.statuses.items() if status != 200) + tally.cut_off + tally.aborted.total()


async def steered(picker: Picker) -> float:
    return sum((await picker.gauges("inference_objective_request_total")).values())


async def test_a_standby_takes_over_from_a_leader_that_ends_or_dies(tmp_path: Path) -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_api())
        api.store.put("InferencePool", pool(port), V1)
        workers = []
        for i in (1, 2):
            workers.append(await stack.enter_async_context(running_worker(f"w-{i}", f"127.0.2.{i}", port)))
            api.store.put("Pod", pod(f"w-{i}", f"127.0.2.{i}"))
        cluster = ("--pool-name=pool", f"--kubeconfig={api.kubeconfig(tmp_path / 'kc')}", "--leader-election")
        options = ("--no-secure-serving", "--no-metrics-endpoint-auth")
        made = await stack.enter_async_context(pair(tmp_path, workers, *cluster, *options))
        one = await made.start("one")
        two = await made.start("two", said="not ready: standing by: ")
        await made.envoy_sees(1)
        async with under_load(made.envoy) as tally:
            assert (await steered(one), await steered(two)) >= (50, 0)
            one.terminate()
            await until(lambda: steered(two), lambda n: n > 20)
            assert await one.process.wait() == 0
            assert lost(tally) == 0
            again = await made.start("one", said="not ready: standing by: ")
            await two.kill()
            await until(lambda: steered(again), lambda n: n > 20, within_s=40)
            # Those whose bodies were on the way to a picker that was dead before Envoy's health check knew: of a
            # hundred thousand requests in these seconds, a few for each client.
            assert lost(tally) <= 6 * CLIENTS
            await made.envoy_sees(1)


@pytest.mark.redis
async def test_two_that_share_their_picks_serve_on_whatever_becomes_of_redis_and_of_one_of_them(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        await server.ready()
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(running_worker(name)) for name in "ab"]
            told = [f"--endpoint={worker.address}" for worker in workers]
            args = (*told, f"--shared-state={server.url}")
            made = await stack.enter_async_context(pair(tmp_path, workers, *args, failure_mode=FailureMode.CLOSED))
            one, two = await made.start("one"), await made.start("two")
            await made.envoy_sees(2)

            async def connected(both: bool) -> None:
                async def look() -> float:
                    gauges = [await p.gauges("kvsteer_shared_connected_open") for p in (one, two)]
                    return sum(value for gauge in gauges for value in gauge.values())

                await until(look, lambda n: n == 2 * both)

            async def killed() -> None:
                server.kill()
                await connected(False)

            async def back() -> None:
                server.start()
                await server.ready()
                await connected(True)

            async def paused() -> None:
                server.freeze()
                await connected(False)

            async def thawed() -> None:
                server.thaw()
                await connected(True)

            async def flushed() -> None:
                server.command("FLUSHALL")

            async def full() -> None:
                server.command("CONFIG", "SET", "maxmemory", "1")
                await connected(False)

            async def emptied() -> None:
                server.command("CONFIG", "SET", "maxmemory", "0")
                await connected(True)

            troubles: list[Callable[[], Awaitable[None]]] = [flushed, paused, thawed, full, emptied, killed, back]
            async with under_load(made.envoy) as tally:
                for trouble in troubles:
                    await trouble()
                    await more(tally, 50)
                    assert lost(tally) == 0, trouble.__name__
                await two.kill()
                await more(tally)
                # Those that were with it, and those that came before the refused connection was passed over.
                assert lost(tally) <= 3 * CLIENTS
                await made.envoy_sees(1)
                before = lost(tally)
                await more(tally)
                assert lost(tally) == before
            await until(lambda: total(one, "kvsteer_endpoint_in_flight_requests"), lambda n: n == 0)
            await until(lambda: total(one, "kvsteer_endpoint_remote_in_flight_requests"), lambda n: n == 0)


async def total(picker: Picker, name: str) -> float:
    return sum((await picker.gauges(name)).values())
