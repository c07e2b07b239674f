"""grpc.health.v1 over every edge: five names in three states."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from epp.gateway.health import CHECK_PATH, WATCH_PATH, WATCHES, Health
from epp.gateway.pb import health_pb2
from epp.gateway.session import Service
from tests.gateway.edges import KINDS, Kind, Running, running

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
UNKNOWN, SERVING, NOT_SERVING, SERVICE_UNKNOWN = range(4)
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def server(kind: Kind, health: Health) -> Iterator[Running]:
    with running(kind, service=Service(health.methods(), watches=WATCHES)) as server:
        yield server


def ask(name: str) -> bytes:
    return health_pb2.HealthCheckRequest(service=name).SerializeToString()


def status(message: bytes) -> int:
    return health_pb2.HealthCheckResponse.FromString(message).status


@pytest.mark.parametrize("state", ["starting", "ready", "draining"])
def test_check_tells_readiness_by_three_names_and_liveness_always(server: Running, health: Health, state: str) -> None:
    if state != "starting":
        health.set_ready(True, "endpoints known")
    if state == "draining":
        health.set_ready(False, "draining")
    expected = SERVING if state == "ready" else NOT_SERVING
    with grpc.insecure_channel(server.address) as channel:
        check = channel.unary_unary(CHECK_PATH)
        for name in ("", "readiness", EXT_PROC):
            assert status(check(ask(name), timeout=10)) == expected
        assert status(check(ask("liveness"), timeout=10)) == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check(ask("some.other.Service"), timeout=10)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_watch_tells_the_state_now_and_every_change_once(server: Running, health: Health) -> None:
    with grpc.insecure_channel(server.address) as channel:
        watch = channel.unary_stream(WATCH_PATH)(ask("readiness"), timeout=20)
        alive = channel.unary_stream(WATCH_PATH)(ask("liveness"), timeout=20)
        assert status(next(watch)) == NOT_SERVING
        assert status(next(alive)) == SERVING
        for ready in (True, True, False, True):
            server.loop.call_soon_threadsafe(health.set_ready, ready, "test")
        assert [status(next(watch)) for _ in range(3)] == [SERVING, NOT_SERVING, SERVING]
        alive.cancel()
        watch.cancel()


def test_watch_of_an_unknown_name_streams_service_unknown(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        watch = channel.unary_stream(WATCH_PATH)(ask("some.other.Service"), timeout=20)
        assert status(next(watch)) == SERVICE_UNKNOWN
        watch.cancel()


@pytest.mark.parametrize("path", [CHECK_PATH, WATCH_PATH])
def test_a_request_that_is_no_health_request_is_an_invalid_argument(server: Running, path: str) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(path)(b"\x0a\xff", timeout=10))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_watchers_that_left_are_forgotten(server: Running, health: Health) -> None:
    with grpc.insecure_channel(server.address) as channel:
        watch = channel.unary_stream(WATCH_PATH)(ask(""), timeout=20)
        next(watch)
        assert len(health._watchers) == 1
        watch.cancel()
        assert status(channel.unary_unary(CHECK_PATH)(ask(""), timeout=10)) == NOT_SERVING
    server.drain(0)
    assert not health._watchers
