"""Virtual time: order, exact times, the same result twice, and many engines in one clock."""

from __future__ import annotations

from random import Random

import pytest

from epp.sim.cost import CostModel
from epp.sim.engine import EngineConfig, EngineCore, EngineOutput
from epp.sim.sequence import SamplingParams, Sequence
from epp.sim.virtual import VirtualClock, VirtualWorker

CONFIG = EngineConfig(num_gpu_blocks=128, max_num_seqs=4, cost=CostModel(0.01, 0.001, 0.0, 0.0))


def test_callbacks_come_in_order_of_time_and_then_of_asking() -> None:
    clock = VirtualClock()
    seen: list[str] = []
    for at, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (9.0, "late")):
        clock.call_at(at, lambda name=name: seen.append(name))  # type: ignore[misc]
    clock.run(until=5.0)
    assert (seen, clock.now) == (["a", "b", "c"], 5.0)
    with pytest.raises(ValueError, match=r"4\.0 has passed, it is 5\.0"):
        clock.call_at(4.0, lambda: None)
    clock.run()
    assert (seen[-1], clock.now) == ("late", 9.0)


def test_tokens_come_at_the_ends_of_steps() -> None:
    clock = VirtualClock()
    worker = VirtualWorker("a", EngineCore(CONFIG), clock)
    times: list[tuple[float, str | None]] = []

    def on_output(output: EngineOutput, now: float) -> None:
        times.append((round(now, 6), output.finish_reason))

    worker.submit(Sequence("r", range(100), SamplingParams(max_tokens=3)), at=1.0, on_output=on_output)
    clock.run()
    assert times == [(1.11, None), (1.12, None), (1.13, "length")]


def test_an_aborted_sequence_is_heard_of_no_more() -> None:
    clock = VirtualClock()
    worker = VirtualWorker("a", EngineCore(CONFIG), clock)
    outputs: list[EngineOutput] = []
    one = Sequence("r", range(100), SamplingParams(max_tokens=300))
    worker.submit(one, on_output=lambda output, now: outputs.append(output))
    clock.call_at(0.115, lambda: worker.abort(one))
    clock.run()
    assert len(outputs) == 1
    assert worker.engine.is_idle


def test_a_worker_that_wakes_up_goes_on() -> None:
    clock = VirtualClock()
    worker = VirtualWorker("a", EngineCore(CONFIG), clock)
    one = Sequence("r", range(10), SamplingParams(max_tokens=2))
    worker.engine.sleep(1)
    worker.submit(one)
    clock.call_at(5.0, worker.wake_up)
    clock.run()
    assert one.first_scheduled_time == 5.0
    assert one.finish_reason == "length"


def test_the_same_arrivals_give_the_same_history() -> None:
    def history(seed: int) -> list[tuple[str, float | None, int]]:
        random, clock = Random(seed), VirtualClock()
        workers = [VirtualWorker(name, EngineCore(CONFIG), clock) for name in "abcd"]
        sequences = []
        for number in range(200):
            prompt = range(random.choice((0, 500)), 600 + random.randrange(100))
            one = Sequence(str(number), prompt, SamplingParams(max_tokens=random.randrange(1, 40)))
            random.choice(workers).submit(one, at=random.uniform(0, 20))
            sequences.append(one)
        clock.run()
        return [(one.request_id, one.last_token_time, one.num_cached_tokens) for one in sequences]

    first = history(1)
    assert first == history(1)
    assert first != history(2)
    assert any(cached for _, _, cached in first)
