"""`kvsteer serve` as a process: what it says when it cannot start, how it is told of changes, how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from epp.gateway.ext_proc import METHOD
from epp.gateway.pb import ext_proc_pb2 as pb
from tests.e2e.backend import Worker, running_worker
from tests.e2e.envoy import until
from tests.e2e.serving import Picker, running_picker
from tests.gateway.ext_proc_peer import CHAT, http_headers

MODELS = ((":method", b"GET"), (":path", b"/v1/models"))
KVSTEER = (sys.executable, "-m", "epp.cli")
ROTATION = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: round-robin-picker
schedulingProfiles:
- name: {name}
  plugins:
  - pluginRef: round-robin-picker
"""


def run(*args: str) -> tuple[int, str]:
    """Exit status and what was written to standard error."""
    done = subprocess.run([*KVSTEER, "serve", "--admin", "0", *args], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


ANY_PORT = ("--listen", "127.0.0.1:0", "--health-port", "0", "--no-secure-serving")


def test_a_wrong_configuration_is_one_line_with_its_place_and_exit_2(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(ROTATION.format(name="default").replace("pluginRef: round", "pluginRef: square"))
    status, words = run(*ANY_PORT, "--endpoint", "127.0.0.1:1", "--config-file", str(config))
    assert status == 2
    (line,) = words.strip().splitlines()
    assert line.startswith(f"{config}:8: schedulingProfiles[0].plugins[0].pluginRef: ")


def test_a_wrong_endpoints_file_is_one_line_with_its_place_and_exit_2(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text("endpoints:\n- address: 10.0.0.1\n  ports: 70000\n")
    status, words = run(*ANY_PORT, "--endpoints-file", str(file))
    assert status == 2
    assert f"{file}:3: endpoints[0].ports: " in words
    assert "Traceback" not in words


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "no workers"),
        (("--endpoint", "10.0.0.1"), "10.0.0.1"),
        (("--endpoint", "127.0.0.1:1", "--model-rewrite", "a"), "FROM=TO"),
        (("--endpoint", "127.0.0.1:1", "--admin", "99999"), "99999"),
        (("--endpoint", "127.0.0.1:1", "--config-file", "a", "--config-text", "b"), "exclude"),
    ],
)
def test_wrong_arguments_are_told_in_words_and_exit_2(args: tuple[str, ...], words: str) -> None:
    status, told = run(*ANY_PORT, *args)
    assert status == 2
    assert words in told
    assert "Traceback" not in told


@pytest.mark.parametrize("option", ["--listen", "--health-port", "--admin"])
def test_a_port_that_is_taken_is_told_in_words(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, told = run(*ANY_PORT, "--endpoint", "127.0.0.1:1", option, address)
    assert status == 1
    assert address in told
    assert "Traceback" not in told


@asynccontextmanager
async def serving(*args: str, workers: int = 2) -> AsyncIterator[tuple[Picker, str, list[Worker]]]:
    """A picker over workers, the address of its socket, the workers."""
    with tempfile.TemporaryDirectory(prefix="kvsteer-") as directory:
        listen = f"unix:{directory}/picker"
        async with running_worker("a") as a, running_worker("b") as b:
            told = [f"--endpoint={w.address}" for w in (a, b)][:workers]
            async with running_picker(Path(directory), listen, *told, *args) as picker:
                yield picker, listen, [a, b]


async def pick(listen: str) -> str:
    """The endpoint named for a request without a body."""
    message = pb.ProcessingRequest(request_headers=http_headers(MODELS, end=True))
    async with grpc.aio.insecure_channel(listen) as channel:
        call = channel.stream_stream(METHOD)(iter([message.SerializeToString()]), timeout=10)
        reply = pb.ProcessingResponse.FromString(await call.read())
        call.cancel()
    space = reply.dynamic_metadata.fields["envoy.lb"].struct_value
    return str(space.fields["x-gateway-destination-endpoint"].string_value)


async def get(picker: Picker, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{picker.admin}{path}") as response:
        return await response.json()


async def test_a_changed_configuration_is_taken_and_a_wrong_one_refused_while_serving(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(ROTATION.format(name="first"))
    async with serving("--config-file", str(config)) as (picker, listen, workers):

        async def profile() -> str:
            await pick(listen)
            latest = (await get(picker, "/debug/decisions"))[0]
            return str(latest["profiles"][0]["name"])

        async def refused() -> float:
            return sum((await picker.gauges("kvsteer_config_refused_total")).values())

        assert await profile() == "first"
        config.write_text(ROTATION.format(name="second"))
        picker.process.send_signal(signal.SIGHUP)
        await until(profile, lambda name: name == "second")
        config.write_text(ROTATION.format(name="third").replace("round-robin-picker", "no-such-picker"))
        picker.process.send_signal(signal.SIGHUP)
        await until(refused, lambda n: n >= 1)
        assert await profile() == "second"
        assert {await pick(listen) for _ in range(4)} == {w.address for w in workers}
        assert f"{config}:4:" in picker.log.read_text()
        config.write_text(ROTATION.format(name="fourth"))  # without a signal
        await until(profile, lambda name: name == "fourth")


SCORER = """
from epp.plugin import NoParameters, Scorer

class Mine(Scorer[NoParameters]):
    type = "mine"

    def score(self, request, candidates):
        return [float(endpoint.port == {port}) for endpoint in candidates]
"""
BY_SCORER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: mine:Mine
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: mine:Mine
"""


async def test_a_scorer_in_a_file_of_ones_own_steers_and_a_hangup_signal_takes_its_new_text(tmp_path: Path) -> None:
    """The configuration is watched; the files of plugins it names are read again on SIGHUP alone."""
    config, scorer = tmp_path / "config.yaml", tmp_path / "mine.py"
    config.write_text(BY_SCORER)
    scorer.write_text(SCORER.format(port=0))
    async with serving("--config-file", str(config)) as (picker, listen, workers):
        for worker in (*workers, workers[0]):
            scorer.write_text(SCORER.format(port=worker.address.rpartition(":")[2]))
            picker.process.send_signal(signal.SIGHUP)

            async def picks() -> set[str]:
                return {await pick(listen) for _ in range(5)}

            await until(picks, lambda seen, expected=worker.address: seen == {expected})  # type: ignore[misc]


async def test_decisions_are_logged_shown_and_explained(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    async with serving("--decision-log", str(log)) as (picker, listen, _):
        picked = await pick(listen)
        (shown,) = await get(picker, "/debug/decisions")

        async def lines() -> list[str]:
            return log.read_text().splitlines() if log.exists() else []

        (line,) = await until(lines, lambda found: len(found) == 1)
        assert json.loads(line)["endpoints"] == shown["endpoints"] == [picked]
        explain = await asyncio.create_subprocess_exec(
            *(*KVSTEER, "explain", str(log)), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await explain.communicate()
        assert explain.returncode == 0
        assert picked in out.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("edge", ["lean", "grpcio"])
async def test_a_hundred_idle_streams_do_not_hold_up_the_end(number: signal.Signals, edge: str) -> None:
    """Streams that hold no work kept an ext_proc server alive elsewhere (AIBrix #2283)."""
    async with serving("--edge", edge, "--drain-delay", "0", "--grace", "1") as (picker, listen, _):
        async with grpc.aio.insecure_channel(listen) as channel:
            calls = [channel.stream_stream(METHOD)(timeout=60) for _ in range(100)]
            for call in calls:
                await call.write(pb.ProcessingRequest(request_headers=http_headers(CHAT)).SerializeToString())

            async def opened() -> float:
                return sum((await picker.gauges("kvsteer_edge_streams_open")).values())

            await until(opened, lambda n: n == 100)
            picker.process.send_signal(number)
            async with asyncio.timeout(20):
                assert await picker.process.wait() == 0
            for call in calls:
                call.cancel()
        assert "Traceback" not in picker.log.read_text()
