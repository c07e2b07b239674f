"""The real Envoy as a test fixture: started with a generated configuration on free ports, always ended.

`running_envoy(options)` yields where it listens and its admin port once it is ready; on a failure to start, its log is
in the error. Ports are chosen by the kernel, no hot restart, one worker thread.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import yaml

from epp.envoy_options import EnvoyOptions
from epp.envoy_yaml import render

START_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunningEnvoy:
    """Where a running Envoy is reached."""

    url: str
    host: str
    port: int
    admin: str
    log: Path

    async def stats(self, *names: str) -> dict[str, int]:
        """Counters and gauges by name; 0 for one that Envoy has not made yet."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin}/stats") as response:
            lines = (line.rpartition(": ") for line in (await response.text()).splitlines())
            values = {name: value for name, _, value in lines}
        return {name: int(values.get(name, "0")) for name in names}


async def until(look: Callable[[], Awaitable[T]], done: Callable[[T], bool], within_s: float = 20.0) -> T:
    """Look again and again until what is seen is `done`; TimeoutError names what was seen last."""
    end = time.monotonic() + within_s
    while True:
        value = await look()
        if done(value):
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"still {value!r:.500} after {within_s} s")
        await asyncio.sleep(0.05)


@asynccontextmanager
async def running_envoy(
    options: EnvoyOptions, edit: Callable[[Any], None] = lambda tree: None
) -> AsyncIterator[RunningEnvoy]:
    """Envoy with the configuration of `options`, its two ports replaced by free ones, then changed by `edit`."""
    with tempfile.TemporaryDirectory(prefix="kvsteer-envoy-") as directory:
        path = Path(directory)
        (path / "envoy.yaml").write_text(_on_free_ports(render(options), edit))
        envoy = shutil.which("envoy") or f"{sysconfig.get_path('scripts')}/envoy"
        process = await asyncio.create_subprocess_exec(
            envoy,
            *("-c", f"{path}/envoy.yaml"),
            *("--admin-address-path", f"{path}/admin"),
            *("--log-path", f"{path}/envoy.log"),
            *("--log-level", "warning"),
            *("--concurrency", "1"),
            *("--drain-time-s", "1"),
            "--disable-hot-restart",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await until(lambda: _is_ready(process, path), bool, START_S)
            yield await _running(path)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def _on_free_ports(text: str, edit: Callable[[Any], None]) -> str:
    tree = yaml.safe_load(text)
    for place in (tree["admin"], tree["static_resources"]["listeners"][0]):
        place["address"]["socket_address"]["port_value"] = 0
    edit(tree)
    return yaml.safe_dump(tree)


async def _is_ready(process: asyncio.subprocess.Process, path: Path) -> bool:
    """Whether Envoy says it is ready. RuntimeError with its log when it has ended instead."""
    if process.returncode is not None:
        raise RuntimeError(f"envoy ended with {process.returncode}:\n{_log(path)}")
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{_admin(path)}/ready") as response:
            return response.status == 200
    except (OSError, aiohttp.ClientError, ValueError):
        return False


async def _running(path: Path) -> RunningEnvoy:
    async with aiohttp.ClientSession() as session, session.get(f"{_admin(path)}/listeners?format=json") as response:
        listeners = json.loads(await response.text())["listener_statuses"]
    port = listeners[0]["local_address"]["socket_address"]["port_value"]
    return RunningEnvoy(f"http://127.0.0.1:{port}", "127.0.0.1", port, _admin(path), path / "envoy.log")


def _admin(path: Path) -> str:
    return "http://" + (path / "admin").read_text().strip()


def _log(path: Path) -> str:
    return (path / "envoy.log").read_text()
