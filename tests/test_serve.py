"""`kvsteer serve` as a gateway and a probe see it: health by name, streams up to the last, the admin port.

Workers are addresses that nothing listens on: health may not put the last endpoint out, so the picker steers to it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from epp.gateway.ext_proc import METHOD
from epp.gateway.health import CHECK_PATH, WATCH_PATH
from epp.gateway.pb import ext_proc_pb2 as pb
from epp.gateway.pb import health_pb2
from tests.e2e.envoy import until
from tests.gateway.ext_proc_peer import CHAT, http_headers

both_edges = pytest.mark.parametrize("edge", ["lean", "grpcio"])

WORKER = "127.0.0.1:9"
ASK = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(slots=True)
class Serve:
    """A `kvsteer serve` on a Unix socket, a health port and an admin port."""

    process: asyncio.subprocess.Process
    folder: Path
    health: str
    admin: str
    channel: Any = field(default=None)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def logged(self, words: str) -> None:
        async def look() -> bool:
            return words in self.log

        await until(look, bool)

    async def get(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.admin}{path}") as response:
            return response.status, await response.text()

    async def status_of(self, name: str) -> int | None:
        """The health of a service name on the health port; None when it is unknown."""
        async with grpc.aio.insecure_channel(self.health) as channel:
            request = health_pb2.HealthCheckRequest(service=name).SerializeToString()
            call = channel.unary_unary(CHECK_PATH)(request, wait_for_ready=True, timeout=10)
            if await call.code() is grpc.StatusCode.NOT_FOUND:
                return None
            return health_pb2.HealthCheckResponse.FromString(await call).status

    async def ask_late(self) -> Steered | None:
        """As `ask`; None when the picker takes no more streams."""
        try:
            return await self.ask()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return None

    async def ask(self) -> Steered:
        """One request up to its pick, on the connection that all share."""
        stream = Steered(self.channel.stream_stream(METHOD)())
        await stream.send(request_headers=http_headers(CHAT))
        await stream.send(request_body=pb.HttpBody(body=ASK, end_of_stream=True))
        stream.destination = (await stream.read()).request_headers.response.header_mutation
        assert (await stream.read()).request_body.response.body_mutation.streamed_response.body == ASK
        return stream


class Steered:
    """An ext_proc stream on gRPC."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.destination = pb.HeaderMutation()

    async def send(self, **content: Any) -> None:
        message = pb.ProcessingRequest(**content)
        message.protocol_config.request_body_mode = message.protocol_config.response_body_mode = 4  # type: ignore[assignment]
        await self.call.write(message.SerializeToString())

    async def read(self) -> pb.ProcessingResponse:
        return pb.ProcessingResponse.FromString(await self.call.read())

    async def finish(self) -> Any:
        """The response; the status of the RPC."""
        await self.send(response_headers=http_headers(((":status", b"200"),)))
        await self.send(response_body=pb.HttpBody(body=b"done", end_of_stream=True))
        assert (await self.read()).WhichOneof("response") == "response_headers"
        assert (await self.read()).response_body.response.body_mutation.streamed_response.body == b"done"
        await self.call.done_writing()
        return await self.call.code()


@asynccontextmanager
async def serve(folder: Path, *args: str) -> AsyncIterator[Serve]:
    """Started and listening, not necessarily ready; killed at the end if it still runs."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        health, admin = (f"127.0.0.1:{s.getsockname()[1]}" for s in (one, two))
    listen = f"unix:{folder}/picker"
    with (folder / "log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "epp.cli", "serve", "--listen", listen, "--health-port", health, "--admin", admin),
            *args,
            stdout=output,
            stderr=output,
        )
    running = Serve(process, folder, health, admin)
    try:
        await running.logged("serving ext_proc on")
        async with grpc.aio.insecure_channel(listen) as running.channel:
            yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@both_edges
async def test_health_is_told_by_name_from_start_to_stop(edge: str, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text("endpoints: []\n")
    names = ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "liveness", "other"]
    args = ("--endpoints-file", str(pool), "--edge", edge, "--drain-delay", "2")
    async with serve(tmp_path, *args) as picker:
        assert [await picker.status_of(n) for n in names] == [NOT_SERVING] * 3 + [SERVING, None]
        assert await picker.get("/readyz") == (503, "the pool has no endpoint\n")
        await picker.logged("not ready: the pool has no endpoint")

        async with grpc.aio.insecure_channel(picker.health) as channel:
            watch = channel.unary_stream(WATCH_PATH)(health_pb2.HealthCheckRequest().SerializeToString())
            told = [health_pb2.HealthCheckResponse.FromString(await watch.read()).status]
            pool.write_text('endpoints: [{address: "127.0.0.1", ports: [9]}]\n')
            told += [health_pb2.HealthCheckResponse.FromString(await watch.read()).status]
            assert [await picker.status_of(n) for n in names] == [SERVING] * 4 + [None]
            assert await picker.get("/readyz") == (200, "ok\n")

            picker.process.send_signal(signal.SIGTERM)
            told += [health_pb2.HealthCheckResponse.FromString(await watch.read()).status]
            assert told == [NOT_SERVING, SERVING, NOT_SERVING]
            assert [await picker.status_of(n) for n in names] == [NOT_SERVING] * 3 + [SERVING, None]
            assert await picker.get("/readyz") == (503, "draining\n")
            assert await (await picker.ask()).finish() is grpc.StatusCode.OK  # nobody has had the time to notice
        async with asyncio.timeout(15):
            assert await picker.process.wait() == 0


@both_edges
async def test_a_hundred_open_streams_are_finished_and_no_new_one_begins(edge: str, tmp_path: Path) -> None:
    args = ("--endpoint", WORKER, "--edge", edge, "--drain-delay", "0", "--grace", "20")
    async with serve(tmp_path, *args) as picker:
        await picker.logged("kvsteer: ready: ")
        streams = [await picker.ask() for _ in range(100)]
        assert {o.header.raw_value for s in streams for o in s.destination.set_headers} >= {WORKER.encode()}
        picker.process.send_signal(signal.SIGTERM)
        await picker.logged("stopping: 100 requests run")
        while (late := await picker.ask_late()) is not None:
            streams.append(late)  # it was on its way when the picker said that it takes no more
        assert {await stream.finish() for stream in streams} == {grpc.StatusCode.OK}
        async with asyncio.timeout(15):
            assert await picker.process.wait() == 0
        assert " ERROR " not in picker.log
        assert not (tmp_path / "picker").exists()


async def test_the_admin_port_shows_what_runs(tmp_path: Path) -> None:
    async with serve(tmp_path, "--endpoint", f"{WORKER}=color=blue", "--endpoint", "127.0.0.1:10") as picker:
        await picker.logged("kvsteer: ready: ")
        streams = [await picker.ask() for _ in range(4)]
        shown = json.loads((await picker.get("/debug/pool"))[1])
        assert {e["address"]: e["labels"] for e in shown} == {WORKER: {"color": "blue"}, "127.0.0.1:10": {}}
        assert sum(e["in_flight"] for e in shown) == 4
        _, metrics = await picker.get("/metrics")
        assert 'inference_objective_running_requests{model_name="m"} 4.0' in metrics
        assert "kvsteer_edge_streams_open 4.0" in metrics
        for stream in streams[:2]:
            await stream.finish()
        for stream in streams[2:]:
            stream.call.cancel()

        async def in_flight() -> float:
            return float(sum(e["in_flight"] for e in json.loads((await picker.get("/debug/pool"))[1])))

        await until(in_flight, lambda n: n == 0)
        assert await picker.get("/healthz") == (200, "ok\n")
