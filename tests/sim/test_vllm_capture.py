"""The engine model against the real engine: the KV events that vLLM 0.32.0 published for the same requests.

Captured from a worker with 17 blocks of 32 tokens (CPU backend, a tiny random Llama). Hashes are numbered in order of
first appearance, so `stored([3], parent=2)` is the fourth block ever seen, after the third.
"""

from __future__ import annotations

from typing import Any

from epp.sim.cost import PRESETS
from epp.sim.engine import EngineConfig, EngineCore
from epp.sim.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from epp.sim.sequence import SamplingParams, Sequence
from epp.sim.virtual import VirtualClock, VirtualWorker

A = [*range(100, 196), 50]
B = [*range(100, 196), *range(200, 232), 60]


def stored(hashes: list[int], parent: int | None = None, extra: list[Any] | None = None) -> tuple[Any, ...]:
    return ("stored", hashes, parent, len(hashes) * 32, extra or [None] * len(hashes))


def removed(*hashes: int) -> list[tuple[Any, ...]]:
    return [("removed", [number]) for number in hashes]


# What vLLM published, a list per batch.
CAPTURED = [
    [stored([0, 1, 2])],
    [stored([3], parent=2)],
    [stored([4, 5, 6], extra=[["salt1"], None, None])],
    [stored([0, 1, 2])],
    [stored([7])],
    [stored([8], parent=7)],
    [*removed(3, 6, 5, 4, 2, 1), stored([*range(9, 21)])],
    [*removed(0, 8, 7, 20, 19, 18, 17, 16, 15, 14, 13, 12), stored([*range(21, 33)])],
    [*removed(11, 10, 9, 32, 31, 30, 29, 28, 27, 26, 25, 24), stored([*range(33, 45)])],
    [("cleared",), stored([45])],
]


class Recorder:
    """Runs requests one after the other and writes batches down in the notation of `CAPTURED`."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.engine = EngineCore(EngineConfig(num_gpu_blocks=17, block_size=32, cost=PRESETS["cpu-tiny"]))
        self.worker = VirtualWorker("w", self.engine, self.clock, self._on_events)
        self.batches: list[list[tuple[Any, ...]]] = []
        self._numbers: dict[bytes, int] = {}

    def request(self, prompt: list[int], max_tokens: int = 4, **options: Any) -> Sequence:
        sequence = Sequence("r", prompt, SamplingParams(max_tokens=max_tokens), **options)
        self.worker.submit(sequence)
        self.clock.run()
        assert sequence.finish_reason == "length"
        return sequence

    def _on_events(self, events: list[KVCacheEvent], now: float) -> None:
        self.batches.append([self._noted(event) for event in events])

    def _noted(self, event: KVCacheEvent) -> tuple[Any, ...]:
        match event:
            case BlockStored():
                parent = event.parent_block_hash
                hashes = [self._number(h) for h in event.block_hashes]
                number = None if parent is None else self._number(parent)
                return ("stored", hashes, number, len(event.token_ids), list(event.extra_keys))
            case BlockRemoved():
                return ("removed", [self._number(h) for h in event.block_hashes])
            case AllBlocksCleared():
                return ("cleared",)

    def _number(self, block_hash: bytes) -> int:
        return self._numbers.setdefault(block_hash, len(self._numbers))


def test_the_same_requests_give_the_same_block_events_as_vllm() -> None:
    run = Recorder()
    run.request(A)
    run.request(B)
    run.request(A)  # a full hit announces nothing
    run.request(A, cache_salt="salt1")
    run.request(A, report_cached_blocks=True)
    run.request([11] * 20, max_tokens=50)  # blocks that decoding fills are announced
    for start in (1000, 1500, 2000):
        run.request(list(range(start, start + 400)))
    assert run.engine.reset_prefix_cache()
    assert len(run.batches) == 9  # an idle engine publishes nothing
    run.request([9] * 33)
    assert run.batches == CAPTURED


def test_cached_tokens_are_whole_blocks_and_leave_one_token_to_compute() -> None:
    run = Recorder()
    assert run.request(A).num_cached_tokens == 0
    assert run.request(A).num_cached_tokens == 96
    assert run.request(B).num_cached_tokens == 96
    assert run.request(A[:96]).num_cached_tokens == 64  # all of it is cached; the last block is computed again
    assert run.request(A[:95]).num_cached_tokens == 64
    assert run.request(A, cache_salt="x").num_cached_tokens == 0
    assert run.request(A, lora_name="ad1").num_cached_tokens == 0


def test_vllms_cached_tokens_of_a_401_token_prompt_are_384() -> None:
    run = Recorder()
    prompt = list(range(1000, 1401))
    run.request(prompt)
    assert run.request(prompt).num_cached_tokens == 384
