"""`kvsteer sidecar` before both real decode workers, each in a process of its own, with a gate before every worker."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import aiohttp

from tests.e2e.envoy import until
from tests.ports import free_port
from tests.vllm.gate import Gate, running_gate
from tests.vllm.pairs import LEASE_S, Pairs, Prompt, Told, ask
from tests.vllm.workers import Worker

MARGIN_S = 3
"""So long before the end of a lease, no decode is sent any more."""


@dataclass
class Sidecar:
    """A running one, and the gate between it and its worker."""

    address: str
    process: asyncio.subprocess.Process
    decoder: Gate

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def ask(self, client: aiohttp.ClientSession, asked: Prompt, *prefillers: Gate) -> Told:
        """As a picker sends it: with the prefillers to be tried, in their order."""
        named = ",".join(gate.address for gate in prefillers)
        return await ask(
            client, self.url, asked, x_prefiller_host_port=named, x_request_id=uuid4().hex, x_kvsteer_disaggregation="?"
        )


@dataclass
class Sidecars:
    """That of the worker which fails when it cannot have the blocks, and that of the one which recomputes."""

    prefillers: list[Gate]
    running: list[Sidecar]


@asynccontextmanager
async def running_sidecars(folder: Path, pairs: Pairs) -> AsyncIterator[Sidecars]:
    async with AsyncExitStack() as stack:
        prefillers = [await stack.enter_async_context(running_gate(w.address)) for w in pairs.prefillers]
        listens = [f"127.0.0.1:{free_port()}" for _ in pairs.decoders]
        targets = [*(gate.address for gate in prefillers), *listens]
        starting = (
            stack.enter_async_context(_running(folder, decoder, listen, targets))
            for decoder, listen in zip(pairs.decoders, listens, strict=True)
        )
        yield Sidecars(prefillers, await asyncio.gather(*starting))


@asynccontextmanager
async def _running(folder: Path, decoder: Worker, listen: str, targets: list[str]) -> AsyncIterator[Sidecar]:
    """One that may have prompts prefilled at the targets, its sibling among them: a worker may pull from the other."""
    admin = f"127.0.0.1:{free_port()}"
    log = folder / f"sidecar-{decoder.port}.log"
    async with running_gate(decoder.address) as gate:
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "epp.cli", "sidecar", "--listen", listen, "--admin", admin),
                *("--decoder", gate.address, "--lease", str(LEASE_S), "--lease-margin", str(MARGIN_S)),
                *(f"--prefiller={target}" for target in targets),
                stdout=output,
                stderr=output,
            )

        async def ready() -> bool:
            if process.returncode is not None:
                raise RuntimeError(f"kvsteer sidecar ended with {process.returncode}:\n{log.read_text()}")
            try:
                async with aiohttp.ClientSession() as session, session.get(f"http://{admin}/readyz") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        try:
            await until(ready, bool)
            yield Sidecar(listen, process, gate)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@contextmanager
def stalled(*sidecars: Sidecar) -> Iterator[None]:
    """They get no time meanwhile."""
    for sidecar in sidecars:
        sidecar.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for sidecar in sidecars:
            sidecar.process.send_signal(signal.SIGCONT)
