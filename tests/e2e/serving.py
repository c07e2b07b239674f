"""The whole of the product behind the real Envoy: workers, `kvsteer serve` in its own process, Envoy.

`running_stack(profile, edge)` yields a `Stack`. The picker's process is started as a user starts it; its log is kept,
shown when it does not start, and looked through by tests.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from epp.envoy_options import EndpointsFile, FailureMode, HostPort, Mode, Profile, defaults, parse_picker
from tests.e2e.backend import Worker, running_worker
from tests.e2e.envoy import RunningEnvoy, running_envoy, until
from tests.ports import free_port

DESTINATION = "x-gateway-destination-endpoint"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got."""

    status: int
    body: bytes
    headers: dict[str, str]
    account: dict[str, Any] = field(default_factory=dict)
    """The worker's account of the request, when it gave one."""


@dataclass(slots=True)
class Picker:
    """A running `kvsteer serve`."""

    process: asyncio.subprocess.Process
    admin: str
    log: Path

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def gauges(self, name: str) -> dict[str, float]:
        """The samples of one metric by label text."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin}/metrics") as response:
            lines = (await response.text()).splitlines()
        samples = (line.rpartition(" ") for line in lines if line.startswith((f"{name}{{", f"{name} ")))
        return {labels: float(value) for labels, _, value in samples}


@dataclass(slots=True)
class Stack:
    """Everything running, and a client."""

    envoy: RunningEnvoy
    picker: Picker
    workers: list[Worker]
    client: aiohttp.ClientSession
    edge: str
    profile: Profile

    async def running(self) -> int:
        """Requests at the workers now."""
        return sum(w.running for w in self.workers)

    async def ask(
        self, body: Any = None, /, *, path: str = "/v1/completions", method: str = "POST", **headers: str
    ) -> Answer:
        """One request; underscores in header names are hyphens."""
        named = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        async with self.client.request(method, f"{self.envoy.url}{path}", data=body, headers=named) as response:
            text = await response.read()
            account = await response.json(content_type=None) if text.startswith(b'{"worker"') else {}
            return Answer(response.status, text, {k.lower(): v for k, v in response.headers.items()}, account)

    async def picker_is_left(self) -> None:
        """Wait until Envoy's health check has given the picker up."""
        gauge = "cluster.picker.membership_healthy"
        await until(lambda: self.envoy.stats(gauge), lambda stats: stats[gauge] == 0)

    async def idle(self) -> None:
        """Wait until the picker counts nothing in flight."""

        async def in_flight() -> float:
            samples = await self.picker.gauges("kvsteer_endpoint_in_flight_requests")
            assert samples
            return sum(samples.values())

        await until(in_flight, lambda running: running == 0)


@asynccontextmanager
async def running_stack(
    profile: Profile,
    edge: str = "lean",
    *,
    listed: bool = True,
    followed: bool = False,
    failure_mode: FailureMode | None = None,
    workers: int = 3,
    dead: tuple[str, ...] = (),
    tls: bool = False,
    picker_ca: str = "",
    usage: bool = False,
    args: tuple[str, ...] = (),
    endpoints_file: Path | None = None,
    edit: Callable[[Any, list[str]], None] = lambda tree, known: None,
) -> AsyncIterator[Stack]:
    """`workers` workers, a picker that knows them and the `dead` addresses, and Envoy before it.

    Envoy knows them too (`listed`), follows them in the picker's file (`followed`), or does not. With `endpoints_file`
    the picker is told of them there. `edit` may change Envoy's configuration, as parsed from YAML, knowing their
    addresses.
    """
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(running_worker(f"w{i}")) for i in range(workers)]
        known = [*(w.address for w in running), *dead]
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-")))
        listen = f"unix:{directory}/picker"
        args += ("--edge", edge, "--secure-serving" if tls else "--no-secure-serving")
        args += ("--observe-responses",) if usage else ()
        args += ("--envoy-endpoints", f"{directory}/pool.json") if followed else ()
        told = [f"--endpoint={address}" for address in known]
        if endpoints_file is not None:
            write_endpoints(endpoints_file, known)
            told = [f"--endpoints-file={endpoints_file}"]
        picker = await stack.enter_async_context(running_picker(directory, listen, *told, *args))
        options = defaults(
            Mode.SIDECAR,
            profile,
            picker=parse_picker(listen),
            endpoints=EndpointsFile(f"{directory}/pool.json")
            if followed
            else tuple(map(HostPort.parse, known))
            if listed
            else (),
            failure_mode=failure_mode,
            picker_tls=tls,
            picker_ca=picker_ca,
            usage=usage,
        )

        def changed(tree: Any) -> None:
            _show_metadata(tree)
            edit(tree, known)

        envoy = await stack.enter_async_context(running_envoy(options, changed))
        connector = aiohttp.TCPConnector(limit=0)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Stack(envoy, picker, running, client, edge, profile)


def manager_of(tree: Any) -> Any:
    """The HTTP connection manager in Envoy's configuration."""
    return tree["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]


def write_endpoints(file: Path, addresses: list[str]) -> None:
    """Put an endpoints file in place at once."""
    entries = [{"address": host, "ports": int(port)} for host, _, port in (a.rpartition(":") for a in addresses)]
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"endpoints": entries}))
    new.replace(file)


def _show_metadata(tree: Any) -> None:
    """Let clients see the destination in the metadata, as the response header `x-metadata`."""
    (host,) = manager_of(tree)["route_config"]["virtual_hosts"]
    header = {"key": "x-metadata", "value": f"%DYNAMIC_METADATA(envoy.lb:{DESTINATION})%"}
    host.setdefault("response_headers_to_add", []).append({"header": header})


@asynccontextmanager
async def running_picker(
    directory: Path, listen: str, *args: str, said: str = "kvsteer: ready: "
) -> AsyncIterator[Picker]:
    """`kvsteer serve` that has said so in its log; killed at the end if it still runs."""
    log = directory / "picker.log"
    admin = f"127.0.0.1:{free_port()}"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "epp.cli", "serve", "--listen", listen, "--health-port", "0", "--admin", admin),
            *args,
            stdout=output,
            stderr=output,
        )
    picker = Picker(process, f"http://{admin}", log)

    async def ready() -> bool:
        if process.returncode is not None:
            raise RuntimeError(f"kvsteer serve ended with {process.returncode}:\n{log.read_text()}")
        return said in log.read_text()

    try:
        await until(ready, bool, within_s=30)
        yield picker
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
