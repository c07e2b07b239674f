"""The shipped Envoy settings, each shown to do what docs/envoy.md says, with a picker that answers by script.

Real Envoy, real sockets, no code of the product but the configuration. Every test starts its own Envoy: a setting is
tested in the state in which it matters (picker gone, worker gone, client that lies).
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import pytest

from epp.envoy_options import FailureMode, HostPort, Mode, Profile, defaults, parse_picker
from tests.e2e.backend import Worker, echo, running_worker
from tests.e2e.envoy import RunningEnvoy, running_envoy, until
from tests.e2e.scripted_picker import ScriptedPicker, running_picker

DEAD = "127.0.0.1:9"
"""The discard port: nothing listens."""

both_profiles = pytest.mark.parametrize("profile", Profile)
both_pools = pytest.mark.parametrize("listed", [True, False], ids=["listed", "unlisted"])


@dataclass(slots=True)
class Setup:
    envoy: RunningEnvoy
    picker: ScriptedPicker
    workers: list[Worker]
    client: aiohttp.ClientSession
    close_picker: AsyncExitStack

    async def post(
        self, body: bytes = b'{"model":"m"}', /, **headers: str
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, the worker's account (or the text under `text`), and the response headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(f"{self.envoy.url}/v1/completions", data=body, headers=named) as response:
            text = await response.text()
            is_json = response.content_type == "application/json" and text.startswith('{"worker"')
            account = await response.json() if is_json else {"text": text}
            return response.status, account, {k.lower(): v for k, v in response.headers.items()}

    async def picker_is_unhealthy(self) -> None:
        """Wait until Envoy's health check has given the picker up."""
        gauge = "cluster.picker.membership_healthy"
        await until(lambda: self.envoy.stats(gauge), lambda stats: stats[gauge] == 0)


@asynccontextmanager
async def setup(
    profile: Profile,
    *,
    listed: bool,
    also: str = "",
    usage: bool = False,
    mode: FailureMode | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[Setup]:
    """Two workers, a scripted picker that names the first, and Envoy; `also` is one more listed address."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running_worker(name, host)) for name in "ab"]
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-"))
        picker_stack = await stack.enter_async_context(AsyncExitStack())
        address = f"unix:{directory}/picker"
        picker = await picker_stack.enter_async_context(running_picker(address))
        picker.destinations = workers[0].address
        endpoints = [HostPort.parse(w.address) for w in workers] + [HostPort.parse(a) for a in also.split()]
        options = defaults(
            Mode.SIDECAR,
            profile,
            picker=parse_picker(address),
            endpoints=tuple(endpoints) if listed else (),
            failure_mode=mode,
            usage=usage,
        )
        envoy = await stack.enter_async_context(running_envoy(options))
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Setup(envoy, picker, workers, client, picker_stack)


@both_profiles
@both_pools
async def test_a_request_reaches_the_named_worker_unchanged(profile: Profile, listed: bool) -> None:
    async with setup(profile, listed=listed) as s:
        for worker in s.workers:
            s.picker.destinations = worker.address
            body = bytes(range(256)) * 4000
            status, account, _ = await s.post(body)
            assert status == 200
            assert account["worker"] == worker.address
            assert account["sha256"] == hashlib.sha256(body).hexdigest()
            assert account["headers"]["x-gateway-destination-endpoint"] == worker.address


@both_profiles
@both_pools
async def test_control_headers_of_a_client_reach_neither_picker_nor_worker(profile: Profile, listed: bool) -> None:
    async with setup(profile, listed=listed) as s:
        _, account, _ = await s.post(
            x_gateway_destination_endpoint=s.workers[1].address,
            x_gateway_destination_endpoint_subset=s.workers[1].address,
            x_gateway_destination_endpoint_served=s.workers[1].address,
            x_prefiller_host_port="10.0.0.9:22",
            x_encoder_hosts_ports="10.0.0.9:22",
            x_data_parallel_host_port="10.0.0.9:22",
            x_data_parallel_rank="1",
        )
        assert account["worker"] == s.workers[0].address
        lies = ("x-gateway", "x-prefiller", "x-encoder", "x-data-parallel")
        assert [name for name in s.picker.seen[-1] if name.startswith(lies)] == []
        assert [name for name in account["headers"] if name.startswith(lies)] == ["x-gateway-destination-endpoint"]
        assert account["headers"]["x-gateway-destination-endpoint"] == s.workers[0].address


@both_profiles
async def test_a_dead_worker_is_retried_at_the_next_of_the_pickers_list(profile: Profile) -> None:
    async with setup(profile, listed=True, also=DEAD) as s:
        for second in (s.workers[1], s.workers[0], s.workers[1], s.workers[0]):
            s.picker.destinations = f"{DEAD},{second.address}"
            body = b"x" * 3_000_000
            status, account, _ = await s.post(body)
            assert (status, account.get("worker")) == (200, second.address)
            assert account["sha256"] == hashlib.sha256(body).hexdigest()


@both_pools
async def test_an_ipv6_worker_is_reached(listed: bool) -> None:
    async with setup(Profile.FAST, listed=listed, host="::1") as s:
        s.picker.destinations = s.workers[1].address
        assert s.picker.destinations.startswith("[::1]:")
        status, account, _ = await s.post()
        assert (status, account["worker"]) == (200, s.workers[1].address)


@both_profiles
@both_pools
async def test_grpc_requests_reach_the_named_worker_over_http2(profile: Profile, listed: bool) -> None:
    async def reverse(request: bytes, context: object) -> bytes:
        return request[::-1]

    server = grpc.aio.server()
    handlers = {"Generate": grpc.unary_unary_rpc_method_handler(reverse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("vllm.grpc.engine.VllmEngine", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with setup(profile, listed=listed, also=address) as s:
            s.picker.destinations = address
            async with grpc.aio.insecure_channel(f"{s.envoy.host}:{s.envoy.port}") as channel:
                call = channel.unary_unary("/vllm.grpc.engine.VllmEngine/Generate")
                assert await call(b"abc", timeout=10) == b"cba"
    finally:
        await server.stop(0)


@both_profiles
async def test_an_unlisted_pool_takes_the_first_of_the_pickers_list(profile: Profile) -> None:
    async with setup(profile, listed=False) as s:
        s.picker.destinations = f"{s.workers[1].address},{s.workers[0].address}"
        assert (await s.post())[1]["worker"] == s.workers[1].address


@both_profiles
async def test_a_request_that_kills_its_worker_is_not_sent_to_the_next(profile: Profile) -> None:
    async with setup(profile, listed=True) as s:
        s.picker.destinations = f"{s.workers[0].address},{s.workers[1].address}"
        assert (await s.post(**echo(reset="before")))[0] == 503
        assert [w.requests for w in s.workers] == [1, 0]


async def test_fail_open_serves_buffered_requests_from_the_moment_the_picker_is_gone() -> None:
    async with setup(Profile.FAST, listed=True) as s:
        assert (await s.post())[0] == 200
        await s.close_picker.aclose()
        answers = [await s.post(b"x" * 100_000) for _ in range(8)]
        assert [status for status, _, _ in answers] == [200] * 8
        assert {account["worker"] for _, account, _ in answers} == {w.address for w in s.workers}


async def test_fail_open_serves_full_duplex_requests_once_the_health_check_has_seen_the_picker_gone() -> None:
    async with setup(Profile.GATEWAY, listed=True) as s:
        assert (await s.post())[0] == 200
        await s.close_picker.aclose()
        assert (await s.post(b""))[0] == 200, "a request without a body is free at once"
        await s.picker_is_unhealthy()
        answers = [await s.post(b"x" * 100_000) for _ in range(8)]
        assert [status for status, _, _ in answers] == [200] * 8
        assert {account["worker"] for _, account, _ in answers} == {w.address for w in s.workers}


@both_profiles
@both_pools
async def test_fail_closed_answers_an_error_when_the_picker_is_gone(profile: Profile, listed: bool) -> None:
    async with setup(profile, listed=listed, mode=FailureMode.CLOSED) as s:
        assert (await s.post())[0] == 200
        await s.close_picker.aclose()
        statuses = [(await s.post())[0] for _ in range(4)]
        assert all(status >= 500 for status in statuses), statuses
        assert sum(w.requests for w in s.workers) == 1


@both_profiles
async def test_a_picker_that_says_not_serving_is_left(profile: Profile) -> None:
    async with setup(profile, listed=True) as s:
        s.picker.serving = False
        await s.picker_is_unhealthy()
        before = s.picker.streams
        assert (await s.post())[0] == 200
        assert s.picker.streams == before


async def test_the_session_token_of_the_pick_reaches_the_client_without_a_response_phase() -> None:
    async with setup(Profile.FAST, listed=True) as s:
        assert "x-session-token" not in (await s.post())[2]
        s.picker.metadata = {"x-session-token": "dG9rZW4="}
        assert (await s.post())[2]["x-session-token"] == "dG9rZW4="


async def test_usage_shows_the_response_to_the_picker_without_waiting() -> None:
    async with setup(Profile.FAST, listed=True, usage=True) as s:
        _, answer, _ = await s.post(**echo(chunks=5, content_type="text/event-stream"))
        assert answer["text"].endswith("data: [DONE]\n\n")
        await until(s.picker.shown, lambda seen: seen == answer["text"].encode())


async def test_the_endpoint_that_served_is_told_to_the_picker_even_after_a_retry() -> None:
    async with setup(Profile.GATEWAY, listed=True, also=DEAD) as s:
        s.picker.destinations = f"{DEAD},{s.workers[1].address}"
        assert (await s.post())[0] == 200
        assert s.picker.served == [s.workers[1].address]


@both_profiles
async def test_streams_end_by_half_close_and_not_by_reset(profile: Profile) -> None:
    async with setup(profile, listed=True) as s:
        for _ in range(50):
            assert (await s.post())[0] == 200
        assert s.picker.streams == 50
        resets = await s.envoy.stats("cluster.picker.http2.tx_reset", "cluster.picker.http2.rx_reset")
        assert (s.picker.resets, resets["cluster.picker.http2.tx_reset"]) == (0, 0)


@both_profiles
@both_pools
async def test_a_websocket_is_steered_and_carries_bytes_both_ways(profile: Profile, listed: bool) -> None:
    async with setup(profile, listed=listed) as s:
        s.picker.destinations = s.workers[1].address
        reader, writer = await asyncio.open_connection(s.envoy.host, s.envoy.port)
        try:
            writer.write(
                b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
                b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            )
            async with asyncio.timeout(10):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                writer.write(b"ping")
                assert head.startswith("HTTP/1.1 101 ")
                assert f"x-worker: {s.workers[1].address}" in head
                assert await reader.readexactly(4) == b"ping"
        finally:
            writer.close()


@both_profiles
async def test_trailers_pass_both_ways(profile: Profile) -> None:
    async with setup(profile, listed=True) as s:
        reader, writer = await asyncio.open_connection(s.envoy.host, s.envoy.port)
        try:
            reply = echo(trailers={"x-answer": "yes"})["x_echo"]
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-echo: {reply}\r\nconnection: close\r\n"
                "trailer: x-question\r\ntransfer-encoding: chunked\r\n\r\n"
                "5\r\nhello\r\n0\r\nx-question: why\r\n\r\n".encode()
            )
            async with asyncio.timeout(10):
                answer = (await reader.read()).decode()
        finally:
            writer.close()
        assert '"trailers": {"x-question": "why"}' in answer
        assert hashlib.sha256(b"hello").hexdigest() in answer
        assert answer.endswith("0\r\nx-answer: yes\r\n\r\n")


@pytest.mark.parametrize(("profile", "status"), [(Profile.GATEWAY, 200), (Profile.FAST, 413)])
async def test_a_body_over_the_buffer_limit_is_refused_only_where_it_is_buffered(profile: Profile, status: int) -> None:
    async with setup(profile, listed=True) as s:
        assert (await s.post(b"x" * (20 << 20)))[0] == 200
        assert (await s.post(b"x" * (33 << 20)))[0] == status
