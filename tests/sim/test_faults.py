"""Faults on demand: what a client of a broken worker sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from epp.sim.cost import CostModel
from epp.sim.engine import EngineConfig
from epp.sim.faults import FaultDice, Faults, read_faults
from epp.sim.server import Worker

StartWorker = Callable[..., Awaitable[Worker]]
PROMPT = {"prompt": "x", "max_tokens": 8, "ignore_eos": True}
TIMED = EngineConfig(num_gpu_blocks=256, cost=CostModel(0.002, 0.0, 0.0, 0.0))


async def complete(session: aiohttp.ClientSession, worker: Worker, **more: Any) -> tuple[int, bytes]:
    url = f"http://{worker.address}/v1/completions"
    async with session.post(url, json=PROMPT | more) as response:
        return response.status, await response.read()


async def control(session: aiohttp.ClientSession, worker: Worker, **faults: Any) -> Any:
    async with session.post(f"http://{worker.address}/control/faults", json=faults) as response:
        assert response.status == 200
        return await response.json()


async def test_errors_come_at_their_rate_and_with_their_status(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    assert (await control(session, worker, error_rate=0.5, error_status=502, seed=3))["error_rate"] == 0.5
    statuses = [(await complete(session, worker))[0] for _ in range(40)]
    assert set(statuses) == {200, 502}
    await control(session, worker)
    assert {(await complete(session, worker))[0] for _ in range(10)} == {200}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error_rate": 2}', "$.error_rate"),
        ('{"eror_rate": 1}', "eror_rate"),
        ('{"refuse": "sometimes"}', "$.refuse"),
        ('{"slow": 0}', "$.slow"),
        ("[]", "Expected `object`"),
    ],
)
async def test_a_bad_fault_is_refused_by_name_and_changes_nothing(
    start_worker: StartWorker, session: aiohttp.ClientSession, body: str, words: str
) -> None:
    worker = await start_worker()
    async with session.post(f"http://{worker.address}/control/faults", data=body) as response:
        assert response.status == 400
        assert words in (await response.json())["error"]["message"]
    assert worker.dice.faults == Faults()


async def test_a_stream_is_reset_after_a_part_of_it(start_worker: StartWorker, session: aiohttp.ClientSession) -> None:
    worker = await start_worker(engine=TIMED, faults=Faults(reset_mid_stream=1.0))
    url = f"http://{worker.address}/v1/completions"
    got: list[bytes] = []
    async with session.post(url, json=PROMPT | {"stream": True}) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            got.extend([line async for line in response.content])
    assert b"data: [DONE]\n" not in got
    async with asyncio.timeout(5):
        await worker.engine.stop(grace_s=1)
    assert worker.core.is_idle
    assert worker.core.kv.block_pool.usage == 0


async def test_an_unstreamed_answer_is_reset_before_it_begins(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(faults=Faults(reset_mid_stream=1.0))
    with pytest.raises(aiohttp.ClientConnectionError):
        await complete(session, worker)


async def test_a_hanging_worker_answers_nothing_but_its_health(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(faults=Faults(hang=1.0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await complete(session, worker)
    async with session.get(f"http://{worker.address}/health") as response:
        assert response.status == 200


async def test_bad_json_is_cut_off_whole_or_streamed(start_worker: StartWorker, session: aiohttp.ClientSession) -> None:
    worker = await start_worker(faults=Faults(bad_json=1.0))
    status, body = await complete(session, worker)
    assert status == 200
    with pytest.raises(json.JSONDecodeError):
        json.loads(body)
    _, events = await complete(session, worker, stream=True)
    first, *others = events.strip().split(b"\n\n")
    with pytest.raises(json.JSONDecodeError):
        json.loads(first.removeprefix(b"data: "))
    assert others[-1] == b"data: [DONE]"


async def test_a_closed_port_refuses_resets_open_connections_and_opens_again(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    # Answered once, the connection is known to the server.
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    await control(session, worker, refuse="close")
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", worker.port)
    await control(session, worker)  # over the connection that asked, which was spared
    assert (await complete(session, worker))[0] == 200


async def test_faults_end_after_their_duration(start_worker: StartWorker, session: aiohttp.ClientSession) -> None:
    worker = await start_worker()
    await worker.set_faults(Faults(refuse="close", duration_s=0.05))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", worker.port)
    status = None
    async with asyncio.timeout(5):
        while status is None:
            try:
                status, _ = await complete(session, worker)
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.01)
    assert status == 200
    assert worker.dice.faults == Faults()


async def test_connections_may_be_reset_on_accept(start_worker: StartWorker) -> None:
    worker = await start_worker(faults=Faults(refuse="reset"))
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    writer.close()


async def test_stale_metrics_stay_what_they_were(start_worker: StartWorker, session: aiohttp.ClientSession) -> None:
    worker = await start_worker()
    await control(session, worker, stale_metrics=True)
    pages = []
    for _ in range(2):
        async with session.get(f"http://{worker.address}/metrics") as response:
            pages.append(await response.text())
        await complete(session, worker)
    assert pages[0] == pages[1]
    await control(session, worker)
    async with session.get(f"http://{worker.address}/metrics") as response:
        assert await response.text() != pages[0]


async def test_hung_metrics_do_not_answer_while_requests_do(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(faults=Faults(hung_metrics=True))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await session.get(f"http://{worker.address}/metrics")
    assert (await complete(session, worker))[0] == 200


async def test_a_slow_worker_takes_so_many_times_longer(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(engine=TIMED)
    await complete(session, worker)
    await control(session, worker, slow=10)
    before = worker.core.stats.inter_token_latency.sum
    await complete(session, worker)
    # Engine time, which a busy machine does not stretch: 7 gaps of 2 ms, then 7 of 20 ms.
    assert worker.core.stats.inter_token_latency.sum == pytest.approx(before * 11, rel=1e-6)


def test_the_draws_of_one_seed_are_the_same_each_time() -> None:
    draws = [[dice.strikes(0.3) for _ in range(50)] for dice in (FaultDice(Faults(seed=5)), FaultDice(Faults(seed=5)))]
    assert draws[0] == draws[1]
    assert 0 < sum(draws[0]) < 50
    assert not FaultDice(Faults()).strikes(0.0)


def test_faults_are_read_from_json() -> None:
    assert read_faults(b'{"hang": 0.25, "duration_s": 3}') == Faults(hang=0.25, duration_s=3.0)
    with pytest.raises(ValueError, match="truncated"):
        read_faults(b"{")
