"""Pickers that are restarted while requests run: with a listed pool that fails open, and in pairs that fail closed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epp.envoy_options import FailureMode, HostPort, Mode, Profile, defaults, parse_picker
from tests.e2e import load
from tests.e2e.backend import running_worker
from tests.e2e.envoy import RunningEnvoy, running_envoy, until
from tests.e2e.serving import Picker, running_picker

BODY = b'{"model":"m","prompt":"x"}'
HEALTHY = "cluster.picker.membership_healthy"


class Setup:
    """Two workers, Envoy, and pickers that come and go on fixed sockets."""

    def __init__(self, stack: AsyncExitStack, folder: Path, workers: list[str]) -> None:
        self._stack = stack
        self._folder = folder
        self._workers = workers
        self.envoy: RunningEnvoy

    def listen(self, name: str) -> str:
        return f"unix:{self._folder}/{name}.sock"

    async def start(self, name: str) -> Picker:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        options = ("--grace", "20", "--no-secure-serving")
        endpoints = [f"--endpoint={address}" for address in self._workers]
        return await self._stack.enter_async_context(running_picker(folder, self.listen(name), *endpoints, *options))

    async def stop(self, picker: Picker) -> None:
        picker.terminate()
        async with asyncio.timeout(25):
            assert await picker.process.wait() == 0

    async def envoy_sees(self, pickers: int) -> None:
        await until(lambda: self.envoy.stats(HEALTHY), lambda stats: stats[HEALTHY] == pickers)


@asynccontextmanager
async def setup(
    profile: Profile, mode: FailureMode, names: tuple[str, ...]
) -> AsyncIterator[tuple[Setup, list[Picker]]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-")))
        workers = [(await stack.enter_async_context(running_worker(f"w{i}"))).address for i in range(2)]
        made = Setup(stack, folder, workers)
        pickers = [await made.start(name) for name in names]
        options = defaults(
            Mode.SIDECAR,
            profile,
            picker=parse_picker(made.listen(names[0])),
            endpoints=tuple(map(HostPort.parse, workers)),
            failure_mode=mode,
        )
        sockets = [made.listen(name).removeprefix("unix:") for name in names]
        made.envoy = await stack.enter_async_context(running_envoy(options, _pickers_at(sockets)))
        await made.envoy_sees(len(names))
        yield made, pickers


def _pickers_at(sockets: list[str]) -> Callable[[Any], None]:
    def edit(tree: Any) -> None:
        (cluster,) = (c for c in tree["static_resources"]["clusters"] if c["name"] == "picker")
        places = [{"endpoint": {"address": {"pipe": {"path": path}}}} for path in sockets]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": places}]

    return edit


@asynccontextmanager
async def under_load(envoy: RunningEnvoy) -> AsyncIterator[load.Tally]:
    """Requests all the time, each answered with 200."""
    tally = load.Tally()
    plan = load.Plan(envoy.host, envoy.port, 1_000_000, 8, lambda n: BODY)
    running = asyncio.create_task(load.run(plan, tally))
    try:
        await until(tally.progress, lambda n: n > 50)
        yield tally
        more = tally.ended + 50
        await until(tally.progress, lambda n: n > more)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert set(tally.statuses) == {200}
    assert (tally.cut_off, tally.aborted.total()) == (0, 0)


async def steered(picker: Picker) -> float:
    return sum((await picker.gauges("inference_objective_request_total")).values())


@pytest.mark.parametrize("profile", Profile)
async def test_a_restart_of_the_only_picker_costs_no_request_its_answer_where_the_pool_fails_open(
    profile: Profile,
) -> None:
    async with setup(profile, FailureMode.OPEN, ("one",)) as (made, (picker,)), under_load(made.envoy):
        await made.stop(picker)
        await made.envoy_sees(0)
        again = await made.start("one")
        await made.envoy_sees(1)
        await until(lambda: steered(again), lambda requests: requests > 50)


async def test_a_restart_of_one_of_two_pickers_costs_no_request_its_answer_though_none_fails_open() -> None:
    async with setup(Profile.GATEWAY, FailureMode.CLOSED, ("one", "two")) as (made, pickers), under_load(made.envoy):
        assert min([await steered(picker) for picker in pickers]) > 0
        await made.stop(pickers[0])
        again = await made.start("one")
        await made.envoy_sees(2)
        await until(lambda: steered(again), lambda requests: requests > 20)
