"""The engine: budget, chunked prefill, preemption, aborts, LoRA, lengths; and what must hold for any load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.sim.cost import PRESETS, CostModel
from epp.sim.engine import EngineConfig, EngineCore
from epp.sim.scheduler import SchedulerOutput
from epp.sim.sequence import SamplingParams, Sequence, SequenceStatus


def engine(
    blocks: int = 64, block_size: int = 4, seqs: int = 8, budget: int = 32, max_model_len: int | None = None
) -> EngineCore:
    config = EngineConfig(
        num_gpu_blocks=blocks,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        cost=CostModel(step=1.0, prefill_token=0.0, decode_sequence=0.0, attention=0.0),
    )
    return EngineCore(config)


def sequence(prompt: int, output: int = 1, *, start: int = 0, lora: str | None = None) -> Sequence:
    return Sequence(f"r{start}", range(start, start + prompt), SamplingParams(max_tokens=output), lora_name=lora)


def run(core: EngineCore, steps: int = 10_000) -> int:
    """Steps taken until nothing is left, each a second long."""
    for taken in range(steps):
        if core.begin_step(float(taken)) is None:
            return taken
        core.end_step(taken + 1.0)
    raise AssertionError("the engine does not come to an end")


def scheduled(core: EngineCore) -> list[int]:
    """Tokens per sequence in the next step."""
    output = core.scheduler.schedule()
    return [chunk.num_tokens for chunk in output.chunks]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    core = engine(budget=32)
    one = sequence(70)
    core.add_request(one, 0.0)
    assert [scheduled(core), scheduled(core), scheduled(core)] == [[32], [32], [6]]
    assert one.num_computed_tokens == 70


def test_running_sequences_come_before_waiting_ones_within_the_budget() -> None:
    core = engine(budget=10)
    core.add_request(sequence(8, 3), 0.0)
    core.begin_step(0.0)
    core.end_step(1.0)
    core.add_request(sequence(20, start=100), 1.0)
    core.begin_step(1.0)
    assert [s.num_computed_tokens for s in core.scheduler.running] == [9, 9]


def test_no_more_sequences_run_than_max_num_seqs() -> None:
    core = engine(seqs=2, budget=100)
    for start in (0, 100, 200):
        core.add_request(sequence(8, 5, start=start), 0.0)
    core.begin_step(0.0)
    assert len(core.scheduler.running) == 2
    assert len(core.scheduler.waiting) == 1


def test_a_prompt_that_does_not_fit_into_the_free_blocks_waits_even_if_its_first_chunk_would_fit() -> None:
    core = engine(blocks=17, budget=8)  # 64 tokens
    core.add_request(sequence(40, 4), 0.0)
    core.begin_step(0.0)
    core.end_step(1.0)
    core.add_request(sequence(60, start=100), 1.0)
    core.begin_step(1.0)
    assert len(core.scheduler.waiting) == 1


def test_the_last_admitted_is_preempted_and_its_prompt_computed_again() -> None:
    core = engine(blocks=9, budget=64)  # 8 blocks, 32 tokens
    first, second = sequence(12, 10), sequence(12, 10, start=100)
    core.add_request(first, 0.0)
    core.add_request(second, 0.0)
    run(core)
    assert first.num_preemptions == 0
    assert second.num_preemptions == 1
    assert core.stats.preemptions == 1
    assert [s.num_output_tokens for s in (first, second)] == [10, 10]
    assert core.stats.prefix_cache_queries == 24  # a preempted sequence is not counted twice


def test_two_equal_prompts_of_one_step_share_their_blocks() -> None:
    core = engine(budget=100)
    first, second = sequence(17, 2), sequence(17, 2)
    core.add_request(first, 0.0)
    core.add_request(second, 0.0)
    core.begin_step(0.0)
    assert second.num_cached_tokens == 16
    assert first.blocks[:4] == second.blocks[:4]
    assert [block.ref_cnt for block in first.blocks] == [2, 2, 2, 2, 1]


def test_an_abort_in_the_middle_of_a_step_frees_the_blocks_at_once() -> None:
    core = engine()
    one = sequence(20, 10)
    core.add_request(one, 0.0)
    core.begin_step(0.0)
    assert core.kv.block_pool.usage > 0
    core.abort(one)
    assert core.kv.block_pool.usage == 0
    assert core.end_step(1.0).outputs == []
    core.abort(one)
    assert core.is_idle
    assert core.stats.requests_by_reason == {"abort": 1}


def test_the_same_prompt_gives_the_same_output_on_every_engine() -> None:
    outputs = []
    for _ in range(2):
        one = sequence(9, 20)
        core = engine()
        core.add_request(one, 0.0)
        run(core)
        outputs.append(one.token_ids[9:])
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 10


def test_output_ends_at_the_context_length_the_limit_or_the_models_own_end() -> None:
    core = engine(max_model_len=20)
    cut = sequence(15, 100)
    limited = sequence(5, 3)
    stopped = Sequence("s", range(5), SamplingParams(max_tokens=10, natural_length=4))
    ignoring = Sequence("i", range(5), SamplingParams(max_tokens=10, natural_length=4, ignore_eos=True))
    at_least = Sequence("m", range(5), SamplingParams(max_tokens=10, natural_length=4, min_tokens=6))
    everyone = [cut, limited, stopped, ignoring, at_least]
    for one in everyone:
        core.add_request(one, 0.0)
    run(core)
    ends = [(one.num_output_tokens, one.finish_reason) for one in everyone]
    assert ends == [(5, "length"), (3, "length"), (4, "stop"), (10, "length"), (6, "stop")]


def test_a_prompt_without_room_for_output_is_refused() -> None:
    core = engine(max_model_len=20)
    with pytest.raises(ValueError, match="a prompt of 20 tokens and one of output exceed 20"):
        core.add_request(sequence(20), 0.0)


def test_a_context_that_the_blocks_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len 40 does not fit: 10 blocks of 4 tokens"):
        engine(blocks=10, max_model_len=40)


def test_a_second_adapter_waits_until_the_first_has_ended_and_holds_nobody_up() -> None:
    core = engine()
    core.scheduler.max_loras = 1
    one, two, plain = sequence(5, 3, lora="a"), sequence(5, 3, lora="b"), sequence(5, 3)
    for s in (one, two, plain):
        core.add_request(s, 0.0)
    core.begin_step(0.0)
    assert core.scheduler.running == [one, plain]
    core.end_step(1.0)
    run(core)
    assert two.is_finished


def test_a_sleeping_engine_lets_requests_wait_and_has_forgotten_its_cache() -> None:
    core = engine()
    core.add_request(sequence(20, 10), 0.0)
    core.begin_step(0.0)
    core.end_step(1.0)
    core.sleep(1)
    assert core.begin_step(1.0) is None
    assert core.kv.block_pool.num_cached == 0
    core.wake_up()
    run(core)
    assert core.is_idle


def test_times_are_measured_from_arrival() -> None:
    core = engine()
    one = sequence(5, 3)
    core.add_request(one, 10.0)
    for at in (12.0, 13.0, 14.0):
        core.begin_step(at)
        core.end_step(at + 1)
    assert core.stats.request_queue_time.sum == 2.0
    assert core.stats.time_to_first_token.sum == 3.0
    assert core.stats.inter_token_latency.sum == 2.0
    assert core.stats.e2e_request_latency.sum == 5.0


def test_long_prompts_cost_more_than_linear_and_cached_ones_little() -> None:
    def prefill_seconds(prompt: int, cached: bool) -> float:
        config = EngineConfig(num_gpu_blocks=1024, cost=PRESETS["cpu-small"])
        core = EngineCore(config)
        for _ in range(2 if cached else 1):
            core.add_request(sequence(prompt), 0.0)
            seconds = core.begin_step(0.0)
            core.end_step(1.0)
        assert seconds is not None
        return seconds

    assert prefill_seconds(7000, False) > 4 * prefill_seconds(2000, False)
    assert prefill_seconds(7000, True) < prefill_seconds(7000, False) / 50


requests = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt
        st.integers(1, 30),  # output
        st.integers(0, 3),  # which text: equal ones share prefixes
        st.integers(0, 25),  # arrives in that step
        st.sampled_from([None, None, None, 1, 3, 9]),  # aborted so many steps later
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(requests=requests, blocks=st.integers(24, 60), seqs=st.integers(1, 6), budget=st.integers(1, 50))
def test_for_any_load_blocks_are_neither_lost_nor_shared_wrongly_and_everyone_finishes(
    requests: list[tuple[int, int, int, int, int | None]], blocks: int, seqs: int, budget: int
) -> None:
    core = engine(blocks=blocks, seqs=seqs, budget=budget)
    arrivals = [
        (at, quits, sequence(prompt, output, start=1000 * text)) for prompt, output, text, at, quits in requests
    ]
    for now in range(5000):
        for at, quits, one in arrivals:
            if at == now:
                core.add_request(one, float(now))
            if quits is not None and at + quits == now:
                core.abort(one)
        began = core.begin_step(float(now)) is not None
        check(core, core._step)
        if began:
            core.end_step(now + 1.0)
        elif now > 40:
            break
    assert core.is_idle
    assert all(one.is_finished for _, _, one in arrivals)
    assert core.kv.block_pool.num_free == core.kv.block_pool.num_usable
    for _, quits, one in arrivals:
        if quits is None:
            assert one.num_output_tokens == one.sampling.max_tokens


def check(core: EngineCore, step: SchedulerOutput | None) -> None:
    pool, scheduler = core.kv.block_pool, core.scheduler
    if step is not None:
        assert step.num_tokens <= scheduler.max_num_batched_tokens
        assert len({id(chunk.sequence) for chunk in step.chunks}) == len(step.chunks)
    assert len(scheduler.running) <= scheduler.max_num_seqs
    holders: dict[int, int] = {}
    for one in scheduler.running:
        assert one.status is SequenceStatus.RUNNING
        assert len(one.blocks) == -(-one.num_computed_tokens // core.kv.block_size)
        assert len({block.block_id for block in one.blocks}) == len(one.blocks)
        for block in one.blocks:
            holders[block.block_id] = holders.get(block.block_id, 0) + 1
            assert block.ref_cnt > 0
    assert all(not one.blocks for one in scheduler.waiting)
    assert len(holders) == pool.num_usable - pool.num_free
    for one in scheduler.running:
        assert all(block.ref_cnt == holders[block.block_id] for block in one.blocks)
        full = one.num_computed_tokens // core.kv.block_size
        assert [block.block_hash for block in one.blocks[:full]] == one.block_hashes[:full]
