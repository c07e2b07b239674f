"""The sidecar over real sockets: both legs, streams, failures, clients that leave, its command line and its end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from epp.cli import main
from epp.envoy_options import HostPort, Mode, Profile, UnixSocket, defaults
from tests.disagg import fakes
from tests.disagg.fakes import EVENTS, Worker
from tests.e2e.envoy import running_envoy, until
from tests.ports import free_port

CHAT = "/v1/chat/completions"
BOTH = pytest.mark.parametrize("flavour", ["standalone", "envoy"])
STREAM = b'{"model":"m",  "stream":true,"stream_options":{"include_usage":true},"n":1,"messages":[]}'


@dataclass(slots=True)
class Setup:
    """Two prefill workers, one that decodes, and the sidecar in its own process."""

    prefill: list[Worker]
    decode: Worker
    url: str
    admin: str
    process: asyncio.subprocess.Process
    client: aiohttp.ClientSession
    log: Path

    async def ask(
        self, body: bytes = STREAM, path: str = CHAT, named: str | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """`named`: whom the picker is said to have named; None: both prefillers."""
        by = ",".join(p.address for p in self.prefill) if named is None else named
        sent = {"content-type": "application/json", "x-kvsteer-disaggregation": "?", "x-prefiller-host-port": by}
        async with self.client.post(f"{self.url}{path}", data=body, headers=sent) as response:
            return response.status, await response.read(), {k.lower(): v for k, v in response.headers.items()}

    async def metric(self, name: str) -> dict[str, float]:
        async with self.client.get(f"{self.admin}/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rpartition(" ") for line in lines if line.startswith(name))
        return {labels.removeprefix(name): float(value) for labels, _, value in pairs}


async def _status(client: aiohttp.ClientSession, url: str) -> int:
    async with client.get(url) as response:
        return response.status


@asynccontextmanager
async def setup(folder: Path, flavour: str, *args: str, prefillers: int = 2) -> AsyncIterator[Setup]:
    """`flavour`: `standalone`, or `envoy` for an Envoy that asks the sidecar over a Unix socket."""
    port, admin, log = free_port(), free_port(), folder / "sidecar.log"
    short = tempfile.TemporaryDirectory(prefix="kvsteer-")  # a socket's path has 107 bytes at most
    socket = f"{short.name}/decode.sock"
    prefill = [fakes.running("prefill") for _ in range(prefillers)]
    workers = [await p.__aenter__() for p in prefill]
    async with AsyncExitStack() as stack:
        stack.callback(short.cleanup)
        decode = await stack.enter_async_context(fakes.running("decode"))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        where = ["--ext-proc", f"unix:{socket}"] if flavour == "envoy" else ["--listen", f"127.0.0.1:{port}"]
        told = [f"--prefiller={w.address}" for w in workers]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "epp.cli", "sidecar", *where),
                *("--decoder", decode.address, "--admin", str(admin), *told, *args),
                stdout=output,
                stderr=output,
            )
        try:
            await until(lambda: asyncio.sleep(0, log.read_text()), lambda text: "serving on" in text)
            url = f"http://127.0.0.1:{port}"
            if flavour == "envoy":
                worker = HostPort.parse(decode.address)
                options = defaults(
                    Mode.SIDECAR, Profile.FAST, decode=True, picker=UnixSocket(socket), endpoints=(worker,)
                )
                url = (await stack.enter_async_context(running_envoy(options))).url
                await until(lambda: _status(client, f"{url}/health"), lambda status: status == 200)
            yield Setup(workers, decode, url, f"http://127.0.0.1:{admin}", process, client, log)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
    for p in prefill:
        await p.__aexit__(None, None, None)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions?x=a%20b", "/v1/responses", "/v1/messages"])
@BOTH
async def test_a_prompt_is_computed_where_the_picker_said_and_the_answer_streams_through(
    tmp_path: Path, flavour: str, path: str
) -> None:
    async with setup(tmp_path, flavour) as made:
        status, body, headers = await made.ask(path=path)
        assert (status, headers["x-kvsteer-disaggregation"]) == (200, "prefill-decode")
        assert headers["x-worker"] == made.decode.address
        assert body.startswith(b"".join(EVENTS))
        (first,), (second,) = made.prefill[0].asked, made.decode.asked
        assert (first.path, second.path) == (path, path)
        assert first.headers["x-request-id"] == second.headers["x-request-id"]
        assert second.json["kv_transfer_params"]["remote_host"] == made.prefill[0].address
        member = json.dumps(second.json["kv_transfer_params"])
        assert second.body.replace(b'"kv_transfer_params":%s,' % member.encode(), b"") == STREAM
        for leg in (first, second):
            assert not {"x-prefiller-host-port", "x-kvsteer-disaggregation"} & leg.headers.keys()


async def test_the_client_sees_the_prefillers_count_of_cached_tokens(tmp_path: Path) -> None:
    """Bug case: the decoding worker counts all that it pulled as cached."""
    async with setup(tmp_path, "standalone") as made:
        _, events, _ = await made.ask()
        assert b'"cached_tokens":4' in events
        assert b'"cached_tokens":9' not in events
        _, whole, _ = await made.ask(STREAM.replace(b"true", b"false", 1))
        assert json.loads(whole)["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        alone = await made.ask(named="")
        assert b'"cached_tokens":9' in alone[1]


@BOTH
async def test_a_request_without_a_prefiller_and_other_paths_pass_as_they_are(tmp_path: Path, flavour: str) -> None:
    async with setup(tmp_path, flavour) as made:
        for path, body in ((CHAT, STREAM), ("/v1/embeddings", b'{"input":"x"}'), ("/other", b"\x00raw")):
            await made.ask(body, path, named="" if path == CHAT else None)
            assert made.decode.asked[-1].body == body
        assert made.prefill[0].asked == []
        big = json.dumps({"model": "m", "prompt": "x" * (8 << 20)}).encode()
        assert (await made.ask(big, "/v1/completions"))[0] == 200
        assert len(made.decode.asked[-1].body) > len(big)
        assert made.decode.asked[-1].headers["content-type"] == "application/json"


@BOTH
async def test_failures_of_prefillers_lead_to_the_next_and_then_to_the_worker_alone(
    tmp_path: Path, flavour: str
) -> None:
    async with setup(tmp_path, flavour) as made:
        one, two = made.prefill
        one.status = 503
        assert (await made.ask())[2]["x-kvsteer-disaggregation"] == "prefill-decode"
        assert (len(one.asked), len(two.asked)) == (1, 1)
        two.reset = True
        status, body, headers = await made.ask()
        assert (status, headers["x-kvsteer-disaggregation"]) == (200, "decode-only; prefill-reset")
        assert made.decode.asked[-1].body == STREAM
        one.status = 500
        assert (await made.ask())[2]["x-kvsteer-disaggregation"] == "decode-only; prefill-5xx"
        one.status = 422
        status, body, _ = await made.ask()
        assert (status, json.loads(body)["error"]["message"]) == (422, "prefill says 422")
        counts = await made.metric("kvsteer_sidecar_requests_total")
        assert counts['{outcome="decode-only",why="prefill-reset"}'] == 1
        assert (await made.metric("kvsteer_sidecar_prefills_total"))['{ended="503"}'] == 2


@BOTH
async def test_a_prefiller_that_hangs_is_given_up_in_time(tmp_path: Path, flavour: str) -> None:
    async with setup(tmp_path, flavour, "--prefill-timeout=0.3") as made:
        for worker in made.prefill:
            worker.hold = asyncio.Event()
        assert (await made.ask())[2]["x-kvsteer-disaggregation"] == "decode-only; prefill-timeout"
        await until(lambda: asyncio.sleep(0, [w.left for w in made.prefill]), lambda left: left == [1, 1])


@BOTH
async def test_a_decoding_worker_that_refuses_is_not_given_a_second_prefill(tmp_path: Path, flavour: str) -> None:
    """Bug case: blind retries fill the prefill worker's cache with blocks that nobody fetches."""
    async with setup(tmp_path, flavour) as made:
        made.decode.status = 400
        assert (await made.ask())[0] == 400
        assert (len(made.prefill[0].asked), len(made.prefill[1].asked), len(made.decode.asked)) == (1, 0, 1)


async def test_a_worker_that_is_down_is_a_503_with_words_and_a_time(tmp_path: Path) -> None:
    async with setup(tmp_path, "standalone", "--decoder", f"127.0.0.1:{free_port()}") as made:
        status, body, headers = await made.ask()
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["message"] == "the worker does not take connections"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@BOTH
async def test_a_client_that_leaves_takes_the_running_leg_along(tmp_path: Path, flavour: str, leg: str) -> None:
    async with setup(tmp_path, flavour) as made:
        worker = made.prefill[0] if leg == "prefill" else made.decode
        worker.hold = asyncio.Event()
        asking = asyncio.create_task(made.ask())
        await until(lambda: asyncio.sleep(0, len(worker.asked)), lambda n: n == 1)
        asking.cancel()
        await until(lambda: asyncio.sleep(0, worker.left), lambda n: n == 1)
        assert len(made.decode.asked) == (leg == "decode")
        await until(lambda: made.metric("kvsteer_sidecar_running_requests"), lambda m: m == {"": 0.0})


@BOTH
async def test_who_is_not_listed_is_never_asked(tmp_path: Path, flavour: str) -> None:
    async with setup(tmp_path, flavour) as made, fakes.running("prefill") as stranger:
        status, _, _ = await made.ask(named=stranger.address)
        assert (status, stranger.asked, made.decode.asked) == (403, [], [])
        assert (await made.ask(named="169.254.169.254:80"))[0] == 403


@BOTH
async def test_blocks_that_lay_unfetched_for_longer_than_their_lease_are_computed_again(
    tmp_path: Path, flavour: str
) -> None:
    """The process is stopped while the prefiller answers, and goes on when the lease is over: vLLM would answer 200."""
    async with setup(tmp_path, flavour, "--lease=2", "--lease-margin=0.5") as made:
        worker = made.prefill[0]
        worker.hold = asyncio.Event()
        asking = asyncio.create_task(made.ask())
        await until(lambda: asyncio.sleep(0, len(worker.asked)), lambda n: n == 1)
        made.process.send_signal(signal.SIGSTOP)
        worker.hold.set()
        await asyncio.sleep(2.5)
        made.process.send_signal(signal.SIGCONT)
        assert (await asking)[2]["x-kvsteer-disaggregation"] == "prefill-decode"
        assert len(worker.asked) == 2
        assert made.decode.asked[-1].json["kv_transfer_params"]["remote_block_ids"] == [[2]]
        assert (await made.metric("kvsteer_sidecar_prefills_total"))['{ended="lease-over"}'] == 1


@BOTH
async def test_health_is_the_workers_own_until_it_drains_and_what_runs_ends_well(tmp_path: Path, flavour: str) -> None:
    async with setup(tmp_path, flavour, "--drain-delay=1") as made:

        async def health() -> int:
            return await _status(made.client, f"{made.url}/health")

        assert await health() == 200
        made.decode.status = 500
        assert await health() == 500
        made.decode.status = 200
        made.decode.hold = asyncio.Event()
        asking = asyncio.create_task(made.ask())
        await until(lambda: asyncio.sleep(0, len(made.decode.asked)), lambda n: n == 1)
        made.process.send_signal(signal.SIGTERM)
        await until(health, lambda status: status == 503)
        made.decode.hold.set()
        assert (await asking)[0] == 200
        assert await made.process.wait() == 0
        assert "stopped; 0 requests were cut off" in made.log.read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "nobody may be asked to prefill"),
        (["--prefiller", "nonsense"], "nonsense"),
        (["--prefiller", "10.0.0.1:1", "--lease", "5"], "--lease-margin must be below --lease"),
        (["--prefiller", "10.0.0.1:1", "--listen", "x"], "--listen 'x'"),
        (["--prefiller", "10.0.0.1:1", "--tls-skip-verify", "decoder"], "--tls decoder"),
        (["--prefiller", "10.0.0.1:1", "--ext-proc", "unix:/x", "--tls", "decoder"], "no meaning with --ext-proc"),
    ],
)
def test_wrong_options_are_told_in_words(args: list[str], words: str) -> None:
    done: Any = CliRunner().invoke(main, ["sidecar", *args])
    assert done.exit_code == 2
    assert words in done.output
