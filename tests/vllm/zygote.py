"""Import vLLM once, then fork an API server for each order: a start costs a third of a fresh one's, and shares memory.

In, on standard input: lines of JSON `{"args": [...], "env": {...}, "log": path}`. Out, on standard output: the pid of
each, a line. Each server leads a process group of its own. All still running are ended when the input ends, so that
none outlives the tests. Run by the Python that has vLLM.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

IMPORTED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader",
)

POLL_US = 1000


def forked_where_it_may_be() -> None:
    """The CPU platform forces its subprocesses to be spawned, which imports everything again."""
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found, unused-ignore]

    original = CpuPlatform.check_and_update_config.__func__

    def changed(cls: Any, config: Any) -> None:
        original(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(changed)


def nixl_that_sleeps() -> None:
    """NIXL's progress thread polls without a pause: an idle worker takes a core, and a test machine has two."""
    bindings: Any = importlib.import_module("nixl_cu12._bindings")

    class Config(bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, POLL_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Config


def serve(args: list[str], env: dict[str, str], log: str) -> None:
    """In the child: be `python -m vllm.entrypoints.openai.api_server`."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for there, flags, numbers in (
        (os.devnull, os.O_RDONLY, (0,)),
        (log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, (1, 2)),
    ):
        opened = os.open(there, flags, 0o644)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["vllm", *args]
    importlib.import_module(IMPORTED[0]).main()


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    forked_where_it_may_be()
    nixl_that_sleeps()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that a server that has ended is gone, not a zombie
    pids = []
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                serve(**json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
        print(pid, flush=True)
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os._exit(0)  # what the imports started is not waited for


if __name__ == "__main__":
    main()
