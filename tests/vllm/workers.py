"""Real vLLM workers on the CPU, for tests: started together, stopped by their process ids.

The interpreter that has vLLM is named by KVSTEER_VLLM_PYTHON (`make test-vllm` sets it).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_port

START_S = 240.0
"""Bound on one start: 12-30 s on an idle machine of two cores."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}


def vllm_python() -> str:
    """The interpreter that has vLLM."""
    python = os.environ.get("KVSTEER_VLLM_PYTHON", "")
    if not python:
        raise RuntimeError("KVSTEER_VLLM_PYTHON is not set: run these tests with `make test-vllm`")
    return python


@dataclass
class Worker:
    """One running `vllm serve`."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    host: str = "127.0.0.1"
    options: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=30) as response:
            return str(response.read().decode())

    def metric(self, name: str) -> float:
        """The sum over all series of one metric family member, 0 when it is absent."""
        lines = (line for line in self.get("/metrics").splitlines() if line.startswith((name + "{", name + " ")))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@dataclass
class Fleet:
    """Workers that serve one model."""

    model: Path
    folder: Path
    workers: list[Worker] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """More variables of the workers' environment."""

    def start(self, count: int, *extra: str) -> None:
        """Start so many workers at once and wait until all answer; on failure the log's end is in the error."""
        self.launch(count, *extra)
        self.wait()

    def launch(self, count: int, *extra: str, hosts: Sequence[str] = ()) -> None:
        """Start so many workers, on these loopback addresses if any are given, and do not wait."""
        for i in range(count):
            self.workers.append(self._launch(hosts[i] if hosts else "127.0.0.1", free_port(), extra))

    def kill_and_restart(self, worker: Worker) -> Worker:
        """End one at once and start it anew at its address; it takes the other's place once it answers."""
        os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait(10)
        fresh = self._launch(worker.host, worker.port, worker.options)
        self.workers[self.workers.index(worker)] = fresh
        self._wait(fresh, time.monotonic() + START_S)
        return fresh

    def _launch(self, host: str, port: int, extra: tuple[str, ...]) -> Worker:
        log = self.folder / f"vllm-{port}.log"
        command = [
            vllm_python(), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.model), "--served-model-name", "tiny", "--host", host, "--port", str(port),
            "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "8",
            "--max-num-batched-tokens", "2048", "--block-size", "32", "--kv-cache-memory-bytes", "64M",
            "--num-gpu-blocks-override", "512", "--distributed-executor-backend", "uni",
            "--generation-config", "vllm", "--enable-prompt-tokens-details", *extra,
        ]  # fmt: skip
        environment = os.environ | ENVIRONMENT | {"VLLM_HOST_IP": host} | self.environment
        with log.open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        return Worker(port, process, log, host, extra)

    def wait(self) -> None:
        """Until all answer."""
        deadline = time.monotonic() + START_S
        for worker in self.workers:
            self._wait(worker, deadline)

    def _wait(self, worker: Worker, deadline: float) -> None:
        while time.monotonic() < deadline and worker.process.poll() is None:
            try:
                worker.get("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.3)
        raise RuntimeError(f"vLLM did not start:\n{worker.log.read_text(errors='replace')[-4000:]}")

    def stop(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                os.killpg(worker.process.pid, signal.SIGTERM)
        for worker in self.workers:
            try:
                worker.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.wait(5)
