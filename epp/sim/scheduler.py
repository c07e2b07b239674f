"""What the engine computes in its next step.

First come, first served, at the level of one step, as vLLM V1 does: sequences that run go first (a decode is one
token), then waiting ones are admitted, all within a budget of tokens. A prompt longer than what is left of the budget
is computed in chunks. When a running sequence finds no block, the one admitted last gives up its blocks and later
computes them anew ("preemption by recompute"); in a step with a preemption nothing is admitted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from epp.sim.kv_cache_manager import KVCacheManager
from epp.sim.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """`num_tokens` of `sequence` computed in this step, after `context` tokens computed or cached before."""

    sequence: Sequence
    num_tokens: int
    context: int
    is_decode: bool


@dataclass(slots=True)
class SchedulerOutput:
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that left the waiting queue in this step."""
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    def __init__(
        self, kv: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_loras: int = 1
    ) -> None:
        if min(max_num_seqs, max_num_batched_tokens) < 1:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_loras = max_loras
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> SchedulerOutput:
        output = SchedulerOutput()
        budget = self._schedule_running(output, self.max_num_batched_tokens)
        if not output.preempted:
            self._admit_waiting(output, budget)
        return output

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence in whatever state it is, and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.kv.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def preempt_all(self) -> None:
        """Send every running sequence back to the head of the waiting queue, in its order."""
        while self.running:
            self._preempt(self.running.pop())

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            num_new = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            if not self._allocate_or_preempt(sequence, num_new, output):
                break
            self._plan(output, sequence, num_new)
            budget -= num_new
            index += 1
        return budget

    def _allocate_or_preempt(self, sequence: Sequence, num_new: int, output: SchedulerOutput) -> bool:
        while not self.kv.allocate_slots(sequence, num_new):
            victim = self.running.pop()
            self._preempt(victim)
            output.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _admit_waiting(self, output: SchedulerOutput, budget: int) -> None:
        held_back: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if not self._lora_fits(sequence):
                held_back.append(self.waiting.popleft())
                continue
            hits = self.kv.get_computed_blocks(sequence)
            num_cached = len(hits) * self.kv.block_size
            num_new = min(sequence.num_tokens - num_cached, budget)
            if not (self.kv.can_fit(sequence, hits) and self.kv.allocate_slots(sequence, num_new, hits)):
                break
            self.waiting.popleft()
            if sequence.status is SequenceStatus.WAITING:
                sequence.num_cached_tokens = num_cached
                output.admitted.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            self._plan(output, sequence, num_new)
            budget -= num_new
        self.waiting.extendleft(reversed(held_back))

    def _lora_fits(self, sequence: Sequence) -> bool:
        if sequence.lora_name is None:
            return True
        loaded = {s.lora_name for s in self.running if s.lora_name}
        return sequence.lora_name in loaded or len(loaded) < self.max_loras

    def _plan(self, output: SchedulerOutput, sequence: Sequence, num_new: int) -> None:
        context = sequence.num_computed_tokens
        is_decode = num_new == 1 and context >= sequence.num_prompt_tokens
        output.chunks.append(ScheduledChunk(sequence, num_new, context, is_decode))
        sequence.num_computed_tokens += num_new

    def _preempt(self, sequence: Sequence) -> None:
        self.kv.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.PREEMPTED
        self.waiting.appendleft(sequence)
