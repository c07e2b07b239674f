"""Real vLLM workers on the CPU, for tests: started together by forks of one process, stopped by their process ids.

The interpreter that has vLLM is named by KVSTEER_VLLM_PYTHON (`make test-vllm` sets it).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

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
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "lo",
}


def vllm_python() -> str:
    """The interpreter that has vLLM."""
    python = os.environ.get("KVSTEER_VLLM_PYTHON", "")
    if not python:
        raise RuntimeError("KVSTEER_VLLM_PYTHON is not set: run these tests with `make test-vllm`")
    return python


@dataclass(frozen=True)
class Process:
    """A server's process group, by its leader. It is no child of ours."""

    pid: int

    def runs(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def send(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def gone(self, within_s: float = 20.0) -> None:
        """Wait for its end, and help by SIGKILL if that does not come in time."""
        deadline = time.monotonic() + within_s
        while self.runs():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
            time.sleep(0.02)


class Zygote:
    """One for all tests: it imports for as long as three servers start. It ends, and all servers with it, as we end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [vllm_python(), Path(__file__).parent / "zygote.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )

    def fork(self, order: Mapping[str, Any]) -> Process:
        """A server of these arguments."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        pid = self._process.stdout.readline()
        if not pid:
            raise RuntimeError(f"the zygote ended with {self._process.wait(5)}")
        return Process(int(pid))


zygote = cache(Zygote)


@dataclass
class Worker:
    """One running vLLM server."""

    port: int
    process: Process
    log: Path
    host: str = "127.0.0.1"
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """What it has of its own in its environment."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as response:
            return str(response.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all series of one metric family member that have these labels, 0 when it is absent."""
        lines = (line for line in self.get("/metrics").splitlines() if line.startswith((name + "{", name + " ")))
        told = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(one in line for one in told))


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

    def launch(self, count: int, *extra: str, hosts: Sequence[str] = (), own: Mapping[str, str] | None = None) -> None:
        """Start so many workers, on these loopback addresses if any are given, and do not wait."""
        for i in range(count):
            self.workers.append(self._launch(hosts[i] if hosts else "127.0.0.1", free_port(), extra, own or {}))

    def kill_and_restart(self, worker: Worker) -> Worker:
        """End one at once and start it anew at its address; it takes the other's place once it answers."""
        worker.process.send(signal.SIGKILL)
        worker.process.gone()
        return self.restart(worker)

    def restart(self, worker: Worker) -> Worker:
        """Start one that has ended anew at its address; it takes the other's place once it answers."""
        fresh = self._launch(worker.host, worker.port, worker.options, worker.environment)
        self.workers[self.workers.index(worker)] = fresh
        self._wait(fresh, time.monotonic() + START_S)
        return fresh

    def _launch(self, host: str, port: int, extra: tuple[str, ...], own: Mapping[str, str]) -> Worker:
        log = self.folder / f"vllm-{port}.log"
        args = [
            "--model", str(self.model), "--served-model-name", "tiny", "--host", host, "--port", str(port),
            "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "8",
            "--max-num-batched-tokens", "2048", "--block-size", "32", "--kv-cache-memory-bytes", "64M",
            "--num-gpu-blocks-override", "512", "--distributed-executor-backend", "uni",
            "--generation-config", "vllm", "--enable-prompt-tokens-details", *extra,
        ]  # fmt: skip
        order = {"args": args, "env": self.environment | {"VLLM_HOST_IP": host, **own}, "log": str(log)}
        return Worker(port, zygote().fork(order), log, host, extra, own)

    def wait(self) -> None:
        """Until all answer."""
        deadline = time.monotonic() + START_S
        for worker in self.workers:
            self._wait(worker, deadline)

    def _wait(self, worker: Worker, deadline: float) -> None:
        while time.monotonic() < deadline and worker.process.runs():
            try:
                worker.get("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.3)
        raise RuntimeError(f"vLLM did not start:\n{worker.log.read_text(errors='replace')[-4000:]}")

    def stop(self) -> None:
        for worker in self.workers:
            worker.process.send(signal.SIGTERM)
        for worker in self.workers:
            worker.process.gone()
