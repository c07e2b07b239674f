"""The engine in real time: late loops, waiting readers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from epp.sim.async_engine import AsyncEngine
from epp.sim.cost import CostModel
from epp.sim.engine import EngineConfig, EngineCore
from epp.sim.sequence import SamplingParams, Sequence


def sequence(output: int) -> Sequence:
    return Sequence("r", range(10), SamplingParams(max_tokens=output))


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    core = EngineCore(EngineConfig(num_gpu_blocks=100, cost=CostModel(0.001, 0.0, 0.0, 0.0)))
    engine = AsyncEngine(core, speed=10.0)
    engine.start()
    yield engine
    await engine.stop()


async def test_a_request_that_arrives_while_the_loop_is_late_has_not_waited_less_than_nothing(
    engine: AsyncEngine,
) -> None:
    with engine.submit([sequence(1000)]) as running:
        await running.read()
        time.sleep(0.05)  # noqa: ASYNC251 (holding up the loop is the point)
        late = sequence(1)
        with engine.submit([late]) as stream:
            await stream.wait()
    assert late.first_scheduled_time is not None
    assert late.first_scheduled_time >= late.arrival_time


async def test_a_late_loop_does_not_slow_the_emulated_engine(engine: AsyncEngine) -> None:
    one = sequence(200)
    with engine.submit([one]) as stream:
        await stream.read()
        time.sleep(0.05)  # noqa: ASYNC251 (holding up the loop is the point)
        await stream.wait()
    assert one.first_token_time is not None
    assert one.last_token_time is not None
    assert one.last_token_time - one.first_token_time == pytest.approx(0.199)


async def test_a_reader_may_wait_for_several_outputs(engine: AsyncEngine) -> None:
    with engine.submit([sequence(10)]) as stream:
        sizes = [len(await stream.read(4)) for _ in range(4)]
    assert sizes[0] >= 4
    assert sum(sizes) == 10
    assert sizes[-1] == 0


async def test_leaving_a_stream_aborts_its_sequences(engine: AsyncEngine) -> None:
    with engine.submit([sequence(500), sequence(500)]) as stream:
        await stream.read()
    assert engine.core.is_idle


async def test_if_one_sequence_of_a_request_is_refused_none_is_added(engine: AsyncEngine) -> None:
    too_long = Sequence("long", range(5000))
    with pytest.raises(ValueError, match="a prompt of 5000 tokens"):
        engine.submit([sequence(5), too_long])
    assert engine.core.is_idle


def test_a_speed_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="speed must be above 0"):
        AsyncEngine(EngineCore(EngineConfig()), speed=0)
