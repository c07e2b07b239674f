"""What an end-to-end run measures: one Envoy, a worker that costs nothing, and ext_proc servers side by side.

In: which servers. Out: a `Bench`: per server and profile the port of an Envoy listener, and the process ids whose CPU
is read. All listeners belong to one Envoy process (one worker thread), are the product's own bootstraps for the
profile, and differ only in the ext_proc server behind them (none: the filter is taken out). Servers listen on Unix
sockets, as a sidecar does.
"""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from bench.cpp_server import CannotBuild, build
from epp.demo.stack import KVSTEER, Children, StackError, find_envoy
from epp.envoy_options import FailureMode, HostPort, Mode, Profile, UnixSocket, defaults

ENDPOINTS = 16
NONE, CPP, LEAN, GRPCIO = "none", "cpp", "kvsteer", "kvsteer-grpcio"
SERVERS = (NONE, CPP, LEAN, GRPCIO)
PROFILES = (Profile.FAST, Profile.GATEWAY)
SCRAPE_S = "2"
"""Of the pickers under load, below what makes gauges stale: a scrape costs what several requests cost, so at the modest
rates of this bench it would show in each. Its own cost is measured apart."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything running."""

    envoy_pid: int
    pids: dict[str, int]
    """Server -> process id; `none` has no process."""
    ports: dict[tuple[str, Profile], int]
    admin_port: int
    scraping: asyncio.subprocess.Process
    """A picker with the default scrape interval that gets no requests; measured idle, then ended."""

    @property
    def servers(self) -> tuple[str, ...]:
        return (NONE, *self.pids)


@asynccontextmanager
async def running(say: Any) -> AsyncIterator[Bench]:
    """Start everything; `say` takes a line about what is not as wished. Raises StackError."""
    envoy = find_envoy()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvsteer-bench-")))
        children = Children(stack, folder)
        backend = await children.start("backend", KVSTEER[0], "-m", "bench.backend", "--ports", str(ENDPOINTS))
        endpoints = [f"127.0.0.1:{port}" for port in await _ports(folder / "backend.log", backend)]
        pids = {}
        try:
            binary = await asyncio.to_thread(build)
            process = await children.start(CPP, str(binary), f"unix:{folder}/{CPP}", *endpoints)
            pids[CPP] = process.pid
        except CannotBuild as why:
            say(f"without the C++ server, so without ratios: {why}")
        for name, edge, interval in (
            (LEAN, "lean", SCRAPE_S),
            (GRPCIO, "grpcio", SCRAPE_S),
            ("scraping", "lean", "0.5"),
        ):
            (admin,) = free_ports(1)
            places = [word for address in endpoints for word in ("--endpoint", address)]
            listen = ("--listen", f"unix:{folder}/{name}", "--health-port", "0", "--admin", str(admin))
            quick = ("--scrape-interval", interval, "--drain-delay", "0", "--grace", "1")
            process = await children.start(name, *KVSTEER, "serve", *places, *listen, "--edge", edge, *quick)
            await children.answers(process, f"http://127.0.0.1:{admin}/readyz")
            pids[name] = process.pid
        del pids["scraping"]
        servers = (NONE, *pids)
        wanted = [(server, profile) for server in servers for profile in PROFILES]
        admin, *listen_ports = free_ports(1 + len(wanted))
        ports = dict(zip(wanted, listen_ports, strict=True))
        text = await asyncio.to_thread(envoy_config, folder, endpoints, ports, admin)
        (folder / "envoy.yaml").write_text(text)
        options = ("--log-level", "error", "--concurrency", "1", "--disable-hot-restart")
        proxy = await children.start("envoy", envoy, "-c", f"{folder}/envoy.yaml", *options)
        await children.answers(proxy, f"http://127.0.0.1:{admin}/ready")
        yield Bench(proxy.pid, pids, ports, admin, process)


def envoy_config(folder: Path, endpoints: Sequence[str], ports: dict[tuple[str, Profile], int], admin: int) -> str:
    """One bootstrap with a listener for each of `ports` and one picker cluster for each server."""
    from epp.envoy_yaml import render

    trees: dict[Profile, Any] = {}
    for profile in PROFILES:
        options = defaults(
            Mode.SIDECAR,
            profile,
            picker=UnixSocket("replaced"),
            admin=HostPort("127.0.0.1", admin),
            endpoints=tuple(map(HostPort.parse, endpoints)),
            failure_mode=FailureMode.CLOSED,  # a request that went past the picker must not count as a cheap one
        )
        trees[profile] = yaml.safe_load(render(options))
    tree = copy.deepcopy(trees[Profile.FAST])
    resources = tree["static_resources"]
    (picker,) = (c for c in resources["clusters"] if c["name"] == "picker")
    resources["clusters"].remove(picker)
    resources["listeners"] = []
    for (server, profile), port in ports.items():
        (listener,) = copy.deepcopy(trees[profile]["static_resources"]["listeners"])
        listener["name"] = f"{server}-{profile}"
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
        for manager in _managers(listener):
            manager["stat_prefix"] = listener["name"]
            _choose_picker(manager, server)
        resources["listeners"].append(listener)
    for server in dict.fromkeys(server for server, _ in ports if server != NONE):
        cluster = copy.deepcopy(picker)
        cluster["name"] = cluster["load_assignment"]["cluster_name"] = f"picker-{server}"
        (place,) = cluster["load_assignment"]["endpoints"]
        place["lb_endpoints"] = [{"endpoint": {"address": {"pipe": {"path": f"{folder}/{server}"}}}}]
        resources["clusters"].append(cluster)
    return yaml.safe_dump(tree)


def _managers(listener: Any) -> Iterator[Any]:
    for chain in listener["filter_chains"]:
        for filter_ in chain["filters"]:
            yield filter_["typed_config"]


def _choose_picker(manager: Any, server: str) -> None:
    manager.pop("upgrade_configs", None)  # websockets have filters of their own; none are sent here
    if server == NONE:
        manager["http_filters"] = [f for f in manager["http_filters"] if "ext_proc" not in f["name"]]
    for filter_ in manager["http_filters"]:
        grpc = filter_["typed_config"].get("grpc_service")
        if grpc:
            grpc["envoy_grpc"]["cluster_name"] = f"picker-{server}"


async def _ports(log: Path, process: asyncio.subprocess.Process) -> list[int]:
    """The ports a backend printed."""
    for _ in range(200):
        text = await asyncio.to_thread(log.read_text)
        if text.endswith("\n") or process.returncode is not None:
            break
        await asyncio.sleep(0.05)
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise StackError(f"the backend did not start:\n{text[-2000:]}") from None


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
