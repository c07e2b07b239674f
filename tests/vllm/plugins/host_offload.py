"""vLLM's OffloadingConnector on the CPU backend, for tests. Loaded by vLLM itself, by name.

vLLM 0.32 copies blocks between device and host only on CUDA and XPU. All else of its CPU tier (what is stored, found,
evicted and told by events) knows no platform; so only the copying is replaced here. `Worker` copies whole blocks, one a
chunk, at once.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Worker(OffloadingWorker):
    """Copies between the device's tensors, shape (blocks, bytes), and as many on the host."""

    def __init__(self, caches: CanonicalKVCaches, blocks: int) -> None:
        self._device = [c.tensor.view(torch.int8).view(-1, c.page_size_bytes) for c in caches.tensors]
        self._host = [torch.zeros((blocks, d.shape[1]), dtype=torch.int8) for d in self._device]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec, dst_spec) -> bool:
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec, dst_spec) -> bool:
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def _copy(self, job_id: int, sources, source_spec, targets, target_spec) -> bool:
        rows, places = (torch.as_tensor(list(map(int, s.block_ids))) for s in (source_spec, target_spec))
        for source, target in zip(sources, targets, strict=True):
            target[places] = source[rows]
        size = len(rows) * sum(s.shape[1] for s in sources)
        self._finished.append(TransferResult(job_id, True, size, 0.001))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""


class HostOffloading(CPUOffloadingSpec):
    """Named by `spec_name` and `spec_module_path` in the connector's configuration."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            self._worker = Worker(kv_caches, self.num_chunks)
        return self._worker
