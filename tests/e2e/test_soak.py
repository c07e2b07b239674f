"""Ten thousand requests through the real Envoy with workers that fail and clients that go away.

Whatever happens outside, the picker causes no error, forgets no request, and does not grow.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from operator import le
from pathlib import Path
from random import Random
from statistics import median

import aiohttp
import pytest

from epp.envoy_options import FailureMode, HostPort, Mode, Profile, defaults, parse_picker
from tests.e2e import load
from tests.e2e.emulated import running_workers, set_faults
from tests.e2e.envoy import RunningEnvoy, running_envoy, until
from tests.e2e.serving import Picker, running_picker

MIB = 1 << 20


@asynccontextmanager
async def soaked(profile: Profile, edge: str) -> AsyncIterator[tuple[list[str], Picker, RunningEnvoy]]:
    """Four emulated workers, the picker, Envoy. Fail-closed, so that an error of the picker shows."""
    workers_args = ("--model", "m", "--speed", "20", "--blocks", "256")
    with tempfile.TemporaryDirectory(prefix="kvsteer-soak-") as folder:
        listen = f"unix:{folder}/picker"
        async with (
            running_workers(4, *workers_args) as workers,
            running_picker(Path(folder), listen, *(f"--endpoint={w}" for w in workers), "--edge", edge) as picker,
        ):
            options = defaults(
                Mode.SIDECAR,
                profile,
                picker=parse_picker(listen),
                endpoints=tuple(map(HostPort.parse, workers)),
                failure_mode=FailureMode.CLOSED,
            )
            async with running_envoy(options) as envoy:
                yield workers, picker, envoy


def body(number: int) -> bytes:
    """Of forty conversations the n-th request's next turn; three of four stream."""
    random = Random(number)
    prompt = f"conversation {number % 40} " + "turn " * random.randrange(4, 60)
    return json.dumps(
        {"model": "m", "prompt": prompt, "stream": number % 4 != 0, "max_tokens": random.randrange(1, 6)}
    ).encode()


async def trouble(workers: list[str], tally: load.Tally, requests: int) -> None:
    """Faults of every kind, one worker each; the last worker dies and comes back twice."""
    await set_faults(workers[0], error_rate=0.04, error_status=500)
    await set_faults(workers[1], reset_mid_stream=0.04)
    await set_faults(workers[2], slow=5, hang=0.002, bad_json=0.02)
    for share in (0.2, 0.6):
        await until(tally.progress, partial(le, share * requests), within_s=120)
        await until(lambda: listens(workers[3]), bool)
        await set_faults(workers[3], refuse="close", duration_s=1.5)


async def listens(address: str) -> bool:
    try:
        _, writer = await asyncio.open_connection(*address.split(":"))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


def resident_bytes(picker: Picker) -> int:
    return int(Path(f"/proc/{picker.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def memory(picker: Picker, tally: load.Tally, samples: list[tuple[int, int]]) -> None:
    """Note (requests ended, resident bytes of the picker) again and again."""
    while True:
        samples.append((tally.ended, resident_bytes(picker)))
        await asyncio.sleep(0.1)


async def in_flight(picker: Picker) -> float:
    """All that the picker counts as running, in whatever unit, in its metrics and on its debug page."""
    names = ["kvsteer_endpoint_in_flight_requests", "kvsteer_endpoint_in_flight_tokens"]
    names += ["inference_objective_running_requests", "kvsteer_edge_streams_open"]
    samples = [await picker.gauges(name) for name in names]
    assert all(samples), "a gauge is missing"
    async with aiohttp.ClientSession() as session, session.get(f"{picker.admin}/debug/pool") as response:
        endpoints = await response.json()
    shown = sum(e[column] for e in endpoints for column in ("in_flight", "in_flight_tokens", "unseen"))
    return sum(sum(values.values()) for values in samples) + float(shown)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("profile", "edge", "requests"),
    [(Profile.GATEWAY, "lean", 10_000), (Profile.FAST, "lean", 4_000), (Profile.GATEWAY, "grpcio", 2_500)],
)
async def test_requests_with_failing_workers_and_leaving_clients_leave_nothing_behind(
    profile: Profile, edge: str, requests: int
) -> None:
    async with soaked(profile, edge) as (workers, picker, envoy):
        tally = load.Tally()
        plan = load.Plan(envoy.host, envoy.port, requests, 64, body, abort_share=0.1)
        samples: list[tuple[int, int]] = []
        sampling = asyncio.create_task(memory(picker, tally, samples))
        faults = asyncio.create_task(trouble(workers, tally, requests))
        try:
            await load.run(plan, tally)
            await faults
        finally:
            faults.cancel()
            sampling.cancel()

        assert tally.ended == requests
        assert min(tally.workers[address] for address in workers) > 0
        # Where a worker broke its connection before the head of its answer had gone on, Envoy answers and says so.
        assert [answer for answer in tally.unsigned if b"reset reason: " not in answer[1]] == []
        assert tally.statuses.keys() <= {200, 500, 502, 503}
        assert tally.statuses[200] > 0.85 * requests
        assert min(tally.aborted[moment] for moment in load.ABORTS) > 0.01 * requests
        await until(lambda: in_flight(picker), lambda running: running == 0)

        middle = median(rss for ended, rss in samples if 0.5 <= ended / requests < 0.6)
        end = median(rss for ended, rss in samples if ended >= 0.9 * requests)
        assert end - middle < 3 * MIB, (middle / MIB, end / MIB)
        lines = picker.log.read_text().splitlines()
        assert [line for line in lines if " ERROR " in line or "Traceback" in line] == []
