"""One suite over every edge, with grpcio as the client: what a caller can see must not depend on the edge."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from epp.gateway import http2_frames as f
from epp.gateway.edge import serve
from epp.gateway.http2_limits import Limits
from epp.gateway.listen import AddressError
from epp.gateway.session import Service, Writer
from epp.gateway.tls import Tls
from tests.gateway.edges import KINDS, Kind, Running, running
from tests.gateway.wire import ECHO, GREETING, Ledger, data, headers, message

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
SMALL_WINDOWS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535), *UNLIMITED)
Call = Callable[..., Any]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def server(kind: Kind) -> Iterator[Running]:
    with running(kind) as server:
        yield server


def echo(channel: grpc.Channel, path: str = ECHO) -> Call:
    call: Call = channel.stream_stream(path)
    return call


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < end, "did not come about"
        time.sleep(0.005)


class Requests:
    """An iterator of requests that a test feeds by hand."""

    def __init__(self, *first: bytes) -> None:
        self._waiting = list(first)
        self._ended = False
        self._changed = threading.Condition()

    def put(self, message: bytes) -> None:
        with self._changed:
            self._waiting.append(message)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended, 30)
            if not self._waiting:
                raise StopIteration
            return self._waiting.pop(0)


def code_of(responses: Iterable[bytes]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        list(responses)
    code: grpc.StatusCode = caught.value.code()
    return code


@pytest.mark.parametrize("options", [UNLIMITED, SMALL_WINDOWS], ids=["windows", "64 KiB windows"])
def test_messages_of_ten_bytes_to_five_megabytes_come_back_byte_by_byte(server: Running, options: Any) -> None:
    sent = [b"", os.urandom(10), os.urandom(16_379), os.urandom(400_000), os.urandom(5 << 20), b"end"]
    with grpc.insecure_channel(server.address, options) as channel:
        assert list(echo(channel)(iter(sent), timeout=30)) == sent
    assert server.ledger.closings == [1]
    assert server.edge.counters.statuses["OK"] == 1


def test_several_addresses_are_served_at_once(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "edge.sock"
    with running(kind, ["127.0.0.1:0", f"unix:{path}", "[::1]:0", ":0"]) as server:
        tcp, unix, v6, everywhere = server.edge.addresses
        assert unix == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert v6.startswith("[::1]:")
        port = everywhere.removeprefix(":")
        for target in (tcp, unix, v6, f"127.0.0.1:{port}", f"[::1]:{port}"):
            with grpc.insecure_channel(target) as channel:
                assert list(echo(channel)(iter([b"hello"]), timeout=10)) == [b"hello"]
    assert not path.exists()


def test_a_stale_unix_socket_is_replaced_and_a_live_one_is_an_error(kind: Kind, tmp_path: Path) -> None:
    path = str(tmp_path / "edge.sock")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    with running(kind, [f"unix:{path}"]) as server:
        with grpc.insecure_channel(server.address) as channel:
            assert list(echo(channel)(iter([b"x"]), timeout=10)) == [b"x"]
        with pytest.raises(AddressError, match="another process listens there"):
            server.run(serve("lean", [f"unix:{path}"], Service({})))


def test_an_address_in_use_is_an_error_that_names_it(kind: Kind) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressError, match=address), running(kind, [address]):
            pass


def test_one_address_twice_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(AddressError, match=address), running("lean", [address, address]):
        pass


def test_two_hundred_streams_at_once_do_not_mix(server: Running) -> None:
    with grpc.insecure_channel(server.address, UNLIMITED) as channel:
        calls = [echo(channel)(iter([b"%d" % n, b"x" * n * 50]), timeout=30) for n in range(200)]
        for n, call in enumerate(calls):
            assert list(call) == [b"%d" % n, b"x" * n * 50]
    assert server.ledger.closings == [1] * 200


def test_a_cancelled_stream_closes_its_session_once_and_is_no_error(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for _ in range(20):
            call = echo(channel)(Requests(b"!stay"), timeout=30)
            assert next(call) == b"!stay"
            call.cancel()
    until(lambda: server.edge.counters.streams_open == 0)
    assert server.ledger.closings == [1] * 20
    assert server.edge.counters.resets_received == 20
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Unending:
    """Answers, keeps nothing and never ends by itself."""

    def __init__(self, _: Writer) -> None:
        pass

    def receive(self, message: bytes) -> Sequence[bytes]:
        return (message,)

    def half_closed(self) -> bool:
        return False

    def closed(self) -> None:
        pass


def test_cancelled_streams_leave_no_memory_behind(kind: Kind) -> None:
    """grpc.aio leaks the call where a handler swallows CancelledError (grpc #43360)."""

    def cancel_some(server: Running, count: int) -> int:
        with grpc.insecure_channel(server.address) as channel:
            for _ in range(count):
                call = echo(channel)(iter([bytes(20_000)]))
                next(call)
                call.cancel()
        until(lambda: server.edge.counters.streams_open == 0)
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with running(kind, service=Service({ECHO: Unending})) as server:
        before = cancel_some(server, 300)
        assert cancel_some(server, 1_000) - before < 10_000_000  # 20 MB of messages came and 20 MB went


def test_an_unknown_method_is_unimplemented(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        assert code_of(echo(channel, "/no.Such/Method")(iter([b"x"]), timeout=10)) == grpc.StatusCode.UNIMPLEMENTED


def test_a_status_and_its_message_reach_the_client(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = echo(channel)(Requests(b"!finish"), timeout=10)
        assert next(call) == b"!finish"
        assert code_of(call) == grpc.StatusCode.NOT_FOUND
        assert call.details() == "100 % gone\n"
    until(lambda: server.ledger.closings == [1])


def test_an_exception_in_a_session_is_internal_and_the_next_rpc_is_served(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        assert code_of(echo(channel)(iter([b"!raise"]), timeout=10)) == grpc.StatusCode.INTERNAL
        assert list(echo(channel)(iter([b"fine"]), timeout=10)) == [b"fine"]
    assert server.edge.counters.session_errors == 1
    assert server.ledger.closings == [1, 1]


def test_a_deadline_of_the_client_ends_the_session(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = echo(channel)(Requests(b"!stay"), timeout=0.2)
        assert next(call) == b"!stay"
        assert code_of(call) == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: server.ledger.closings == [1])


def test_a_message_above_the_limit_is_resource_exhausted(kind: Kind) -> None:
    ledger = Ledger()
    with running(kind, service=Service({ECHO: ledger.echo}, max_message_bytes=100_000)) as server:
        with grpc.insecure_channel(server.address, UNLIMITED) as channel:
            assert list(echo(channel)(iter([bytes(100_000)]), timeout=10)) == [bytes(100_000)]
            code = code_of(echo(channel)(iter([bytes(100_001)]), timeout=10))
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        until(lambda: ledger.closings == [1, 1])


def test_answers_may_come_long_after_their_question(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = echo(channel)(Requests(b"!stay"), timeout=20)
        next(call)
        writer = server.ledger.sessions[0].writer
        for n in range(3):
            server.loop.call_soon_threadsafe(writer.send, [b"later %d" % n, b""])
            assert [next(call), next(call)] == [b"later %d" % n, b""]
        server.loop.call_soon_threadsafe(writer.finish)
        assert list(call) == []
        assert call.code() == grpc.StatusCode.OK


def test_metadata_of_the_service_reaches_the_client(kind: Kind) -> None:
    ledger = Ledger()
    with (
        running(kind, service=Service({ECHO: ledger.echo}, metadata={"x-picker": "kvsteer"})) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        call = echo(channel)(iter([b"x"]), timeout=10)
        assert list(call) == [b"x"]
        assert ("x-picker", "kvsteer") in [tuple(pair) for pair in call.initial_metadata()]


def test_drain_waits_for_running_streams_and_takes_no_new_connection(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        requests = Requests(b"!stay")
        call = echo(channel)(requests, timeout=20)
        next(call)
        drained = threading.Thread(target=server.drain, args=(15,))
        drained.start()
        host, _, port = server.address.rpartition(":")
        until(lambda: _refuses(host, int(port)))
        requests.put(b"still here")
        assert next(call) == b"still here"
        assert drained.is_alive()
        server.loop.call_soon_threadsafe(server.ledger.sessions[0].writer.finish)
        assert list(call) == []
        drained.join(10)
        assert not drained.is_alive()
    assert server.edge.counters.streams_open == 0


def test_a_hundred_idle_streams_do_not_hold_a_drain_beyond_its_grace(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        calls = [echo(channel)(Requests(b"!stay"), timeout=30) for _ in range(100)]
        for call in calls:
            next(call)
        server.drain(0.1)
        assert {code_of(call) for call in calls} == {grpc.StatusCode.UNAVAILABLE}
    assert server.ledger.closings == [1] * 100


def test_a_second_drain_cuts_the_grace_of_the_first_short(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = echo(channel)(Requests(b"!stay"), timeout=60)
        next(call)
        first = asyncio.run_coroutine_threadsafe(server.edge.drain(3_600), server.loop)
        server.drain(0)
        first.result(20)
        assert code_of(call) == grpc.StatusCode.UNAVAILABLE
    assert server.ledger.closings == [1]


def test_a_drain_ends_watches_at_once(kind: Kind) -> None:
    ledger = Ledger()
    service = Service({ECHO: ledger.echo}, watches=frozenset((ECHO,)))
    with running(kind, service=service) as server, grpc.insecure_channel(server.address) as channel:
        call = echo(channel)(Requests(b"!stay"), timeout=30)
        next(call)
        started = time.monotonic()
        server.drain(3_600)
        assert time.monotonic() - started < 600
        assert code_of(call) == grpc.StatusCode.UNAVAILABLE


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return True
    return False


LEAN = pytest.mark.parametrize("kind", ["lean", "lean-uvloop"])


@LEAN
def test_compressed_calls_are_unimplemented(kind: Kind) -> None:
    with running(kind) as server, _gzip_channel(server.address) as channel:
        call = echo(channel)(iter([b"x" * 1_000]), timeout=10)
        assert code_of(call) == grpc.StatusCode.UNIMPLEMENTED
        assert "gzip" in call.details()


def _gzip_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, compression=grpc.Compression.Gzip)


@LEAN
@pytest.mark.parametrize(
    ("sent", "kind_of_error"),
    [(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "http1"), (b"\x16\x03\x01\x02\x00\x01\x00", "tls_on_plaintext")],
)
def test_a_client_that_speaks_something_else_is_counted_by_what_it_speaks(
    kind: Kind, sent: bytes, kind_of_error: str
) -> None:
    with running(kind) as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as client:
            client.sendall(sent)
            while client.recv(4_096):
                pass
        assert server.edge.counters.connection_errors == {kind_of_error: 1}
        until(lambda: server.edge.counters.connections_open == 0)


@LEAN
def test_a_peer_that_does_not_read_is_not_read_from_and_loses_nothing(kind: Kind) -> None:
    with running(kind, limits=Limits(connection_window=1 << 30)) as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as client:
            client.sendall(
                GREETING + f.settings({f.Setting.INITIAL_WINDOW_SIZE: 1 << 30}) + f.window_update(0, 1 << 30)
            )
            client.settimeout(1.0)
            sent = 0
            pending = b""
            try:
                for stream in itertools.count(1, 2):
                    pending = headers(stream) + data(stream, message(bytes(60_000)), end=True)
                    assert stream < 8_000, "the server reads on without end"
                    while pending:
                        pending = pending[client.send(pending) :]
                    sent += 1
            except TimeoutError:
                pass
            client.settimeout(15)
            ended = _count_ends(client, sent, pending)
        assert ended == sent + bool(pending)
        assert set(server.ledger.closings) == {1}


def _count_ends(client: socket.socket, streams: int, pending: bytes) -> int:
    """Read everything, sending the rest of the last request meanwhile, until every stream has ended."""
    wanted = streams + bool(pending)
    writer = threading.Thread(target=client.sendall, args=(pending,))
    writer.start()
    buffer, ended = b"", 0
    while ended < wanted:
        buffer += client.recv(1 << 20)
        at = 0
        while len(buffer) - at >= 9:
            high, low, kind, flags, _ = f.FRAME_HEADER.unpack_from(buffer, at)
            stop = at + 9 + (high << 8 | low)
            if stop > len(buffer):
                break
            ended += kind == f.HEADERS and bool(flags & f.END_STREAM)
            at = stop
        buffer = buffer[at:]
    writer.join()
    return ended


@pytest.mark.parametrize("address", ["nonsense", "host:", "host:99999", "::1:80", "unix:", "unix:" + "x" * 200])
def test_an_address_that_cannot_be_read_is_refused_with_its_text(address: str) -> None:
    with pytest.raises(AddressError, match=r"'.*'"), running("lean", ["127.0.0.1:0", address]):
        pass


@pytest.fixture(scope="module")
def tls() -> Tls:
    return Tls.self_signed()


def secure(address: str, certificate: bytes) -> grpc.Channel:
    return grpc.secure_channel(
        address.replace("127.0.0.1", "localhost"), grpc.ssl_channel_credentials(certificate), UNLIMITED
    )


def test_tls_carries_messages_of_any_size(kind: Kind, tls: Tls) -> None:
    sent = [b"", os.urandom(10), os.urandom(1 << 20)]
    with running(kind, tls=tls) as server, secure(server.address, tls.pair.certificate) as channel:
        assert list(echo(channel)(iter(sent), timeout=20)) == sent


def test_a_renewed_certificate_serves_the_next_connection(kind: Kind, tmp_path: Path) -> None:
    old, new = Tls.self_signed().pair, Tls.self_signed().pair
    (tmp_path / "tls.crt").write_bytes(old.certificate)
    (tmp_path / "tls.key").write_bytes(old.key)
    tls = Tls.directory(tmp_path)
    with running(kind, tls=tls) as server, secure(server.address, old.certificate) as before:
        assert list(echo(before)(iter([b"x"]), timeout=10)) == [b"x"]
        (tmp_path / "tls.crt").write_bytes(new.certificate)
        (tmp_path / "tls.key").write_bytes(new.key)
        assert tls.refresh() or tls.reloads == 1
        with secure(server.address, new.certificate) as after:
            assert list(echo(after)(iter([b"y"]), timeout=10)) == [b"y"]
        assert list(echo(before)(iter([b"open connections stay"]), timeout=10)) == [b"open connections stay"]
