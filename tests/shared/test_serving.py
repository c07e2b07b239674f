"""`kvsteer serve` with its replicas and over a restart, as processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from epp.gateway.ext_proc import METHOD
from epp.gateway.pb import ext_proc_pb2 as pb
from tests.e2e.backend import running_worker
from tests.e2e.envoy import until
from tests.e2e.serving import Picker, running_picker
from tests.gateway.ext_proc_peer import CHAT, http_headers
from tests.shared.redis_server import redis_server

BODY = b'{"model":"m","messages":[{"role":"user","content":"' + b"tell me a story " * 500 + b'"}]}'
IN_FLIGHT, REMOTE = "kvsteer_endpoint_in_flight_requests", "kvsteer_endpoint_remote_in_flight_requests"


@asynccontextmanager
async def held_open(listen: str, body: bytes = BODY) -> AsyncIterator[str]:
    """A request that was sent and is not answered; the endpoint that the picker named for it."""
    messages = [
        pb.ProcessingRequest(request_headers=http_headers(CHAT, end=False)),
        pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True)),
    ]
    asked: asyncio.Queue[bytes] = asyncio.Queue()
    for message in messages:
        asked.put_nowait(message.SerializeToString())

    async def requests() -> AsyncIterator[bytes]:
        while True:
            yield await asked.get()

    async with grpc.aio.insecure_channel(listen) as channel:
        call = channel.stream_stream(METHOD)(requests(), timeout=60)
        named = ""
        while not named:
            reply = pb.ProcessingResponse.FromString(await call.read())
            space = reply.dynamic_metadata.fields["envoy.lb"].struct_value
            named = space.fields["x-gateway-destination-endpoint"].string_value
        yield named
        call.cancel()


async def total(picker: Picker, name: str) -> float:
    return sum((await picker.gauges(name)).values())


async def latest(picker: Picker) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{picker.admin}/debug/decisions") as response:
        return (await response.json())[0]


@pytest.mark.redis
async def test_a_burst_over_two_pickers_is_spread_over_the_workers_as_by_one(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        await server.ready()
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(running_worker(name)) for name in "abcd"]
            told = [f"--endpoint={worker.address}" for worker in workers]
            pickers, listens = [], []
            for name in "12":
                folder = tmp_path / name
                folder.mkdir()
                listens.append(f"unix:{folder}/picker")
                running = running_picker(folder, listens[-1], *told, f"--shared-state={server.url}")
                pickers.append(await stack.enter_async_context(running))
            for picker in pickers:
                await until(lambda p=picker: total(p, "kvsteer_shared_peers_open"), lambda n: n == 1)  # type: ignore[misc]
            named = []
            for i in range(8):
                body = BODY.replace(b"story", b"story %d" % i)
                named.append(await stack.enter_async_context(held_open(listens[i % 2], body)))
                await until(lambda i=i: total(pickers[1 - i % 2], REMOTE), lambda n, i=i: n == i // 2 + 1)  # type: ignore[misc]
            assert {named.count(worker.address) for worker in workers} == {2}
            async with held_open(listens[0]) as first:
                await until(lambda: total(pickers[1], REMOTE), lambda n: n == 5)
            await until(lambda: total(pickers[1], REMOTE), lambda n: n == 4)
            async with held_open(listens[1]) as again:
                assert again == first
            assert (await latest(pickers[1]))["estimate"]["cached_tokens"] > 1500
            server.kill()
            await until(lambda: total(pickers[1], "kvsteer_shared_connected_open"), lambda n: n == 0)
            async with held_open(listens[1]):
                assert "shared-state-lost" in (await latest(pickers[1]))["reasons"]


async def test_a_picker_that_is_started_again_knows_the_prompts_of_its_last_run(tmp_path: Path) -> None:
    async with running_worker("a") as a, running_worker("b") as b:
        told = [f"--endpoint={w.address}" for w in (a, b)] + [f"--state-file={tmp_path / 'state'}", "--drain-delay=0"]
        listen = f"unix:{tmp_path}/picker"
        async with running_picker(tmp_path, listen, *told) as picker:
            async with held_open(listen) as first:
                pass
            await until(lambda: total(picker, IN_FLIGHT), lambda n: n == 0)
            picker.terminate()
            assert await picker.process.wait() == 0
        assert (tmp_path / "state").exists()
        async with running_picker(tmp_path, listen, *told) as picker:
            await until(lambda: total(picker, "kvsteer_state_file_restored_total"), lambda n: n == 1)
            async with held_open(listen) as again:
                assert again == first
            assert (await latest(picker))["estimate"]["cached_tokens"] > 1500
        (tmp_path / "state").write_bytes(b"something else")
        async with running_picker(tmp_path, listen, *told) as picker:
            assert await total(picker, "kvsteer_state_file_refused_total") == 1
            assert "is not used: it is of another version" in picker.log.read_text()


@pytest.mark.parametrize(
    ("url", "words"), [("http://a:1", "redis://HOST:PORT/DB"), ("redis://a:1/0?maxlen=0", "maxlen=0 is not a number")]
)
def test_a_wrong_address_of_the_shared_state_is_told_in_words_and_exit_2(url: str, words: str) -> None:
    command = [sys.executable, "-m", "epp.cli", "serve", "--endpoint", "127.0.0.1:1", "--shared-state", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_without_redis_py_the_way_to_get_it_is_told() -> None:
    script = (
        "import sys; sys.modules['redis'] = None; sys.modules['redis.asyncio'] = None\n"
        "from epp.cli import main; main(['serve', '--endpoint', '127.0.0.1:1', '--shared-state', 'redis://a:1/0'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install 'kvsteer[redis]'" in done.stderr
    assert "Traceback" not in done.stderr
