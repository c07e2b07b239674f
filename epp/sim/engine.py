"""The engine core: requests in, steps, tokens out. No socket, no clock, no randomness.

A driver calls `begin_step(now)`, lets the step's duration pass, and calls `end_step(now)`. Between the two, requests
may be added and aborted, as in vLLM, whose engine takes them between steps. Times are seconds of the driver's clock.

The emulated model "samples" token by token from a generator seeded by the prompt: the same prompt gives the same
output on every worker.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from zlib import crc32

from epp.sim.cost import PRESETS, CostModel
from epp.sim.events import KVCacheEvent
from epp.sim.kv_cache_manager import KVCacheManager
from epp.sim.scheduler import Scheduler, SchedulerOutput
from epp.sim.sequence import Sequence, SequenceStatus
from epp.sim.stats import EngineStats


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """vLLM's options by vLLM's names; one of `num_gpu_blocks` is the null block."""

    num_gpu_blocks: int = 2048
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    """None: what the blocks can hold."""
    max_loras: int = 1
    enable_prefix_caching: bool = True
    hash_seed: str = ""
    cost: CostModel = PRESETS["gpu-large"]
    output_vocabulary: Tokens[int] = range(300, 4000)
    """Token ids the emulated model may emit."""

    @property
    def capacity_tokens(self) -> int:
        return (self.num_gpu_blocks - 1) * self.block_size

    @property
    def context_length(self) -> int:
        return self.max_model_len if self.max_model_len is not None else self.capacity_tokens


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """One token of one sequence; `finish_reason` on its last."""

    sequence: Sequence
    token_id: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    outputs: list[EngineOutput] = field(default_factory=list)
    events: list[KVCacheEvent] = field(default_factory=list)


class EngineCore:
    """Raises ValueError if one sequence of the greatest length would not fit into the blocks."""

    def __init__(self, config: EngineConfig) -> None:
        if not 1 <= config.context_length <= config.capacity_tokens:
            raise ValueError(
                f"max_model_len {config.context_length} does not fit: {config.num_gpu_blocks} blocks of "
                f"{config.block_size} tokens, less the null block, hold {config.capacity_tokens}"
            )
        self.config = config
        self.kv = KVCacheManager(
            config.num_gpu_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_seed=config.hash_seed,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_loras=config.max_loras,
        )
        self.stats = EngineStats()
        self.sleep_level: int | None = None
        """vLLM's sleep: None is awake; asleep, no step is begun and requests wait."""
        self._step: SchedulerOutput | None = None

    @property
    def is_idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting)

    def add_request(self, sequence: Sequence, now: float) -> None:
        """Raises ValueError if the prompt leaves no room for one token of output."""
        if sequence.num_prompt_tokens >= self.config.context_length:
            raise ValueError(
                f"a prompt of {sequence.num_prompt_tokens} tokens and one of output exceed {self.config.context_length}"
            )
        sequence.arrival_time = now
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence and free its blocks at once; nothing happens if it has ended."""
        if not sequence.is_finished:
            self.scheduler.finish(sequence, "abort")
            self.stats.finished(sequence, None)

    def begin_step(self, now: float) -> float | None:
        """Schedule a step and return its duration; None if there is nothing to compute."""
        assert self._step is None, "the last step has not ended"
        if self.sleep_level is not None or self.is_idle:
            return None
        step = self.scheduler.schedule()
        self.stats.scheduled(step, now)
        self._step = step
        return self.config.cost.seconds(step)

    def end_step(self, now: float) -> StepOutput:
        """Account the step begun last: the sequences whose every known token is computed get their next one."""
        assert self._step is not None, "no step was begun"
        step, self._step = self._step, None
        outputs = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            # A sequence aborted or preempted since the step began has no result to take.
            if sequence.status is SequenceStatus.RUNNING and sequence.num_computed_tokens == sequence.num_tokens:
                outputs.append(self._sample(sequence, now))
        return StepOutput(outputs, self.kv.take_events())

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks; False while sequences hold some, unless they are preempted first."""
        if preempt_running:
            self.scheduler.preempt_all()
        return self.kv.block_pool.clear_cache()

    def sleep(self, level: int) -> None:
        self.reset_prefix_cache(preempt_running=True)
        self.sleep_level = level

    def wake_up(self) -> None:
        self.sleep_level = None

    def _sample(self, sequence: Sequence, now: float) -> EngineOutput:
        vocabulary = self.config.output_vocabulary
        # A chain: each token depends on the one before it and on its place, hence on the whole prompt.
        seed = sequence.sample_seed = crc32(sequence.num_tokens.to_bytes(4, "little"), sequence.sample_seed)
        token = vocabulary[seed % len(vocabulary)]
        sequence.token_ids.append(token)
        self.stats.sampled(sequence, now)
        reason = sequence.sampling.finish_reason(sequence.num_output_tokens)
        if reason is None and sequence.num_tokens >= self.config.context_length:
            reason = "length"
        if reason is not None:
            self.scheduler.finish(sequence, reason)
            self.stats.finished(sequence, now)
        return EngineOutput(sequence, token, reason)
