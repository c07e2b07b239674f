"""`kvsteer emulate` as a process: starts, serves, says what is wrong, stops cleanly."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from epp.commands.emulate import command


@contextmanager
def emulate(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "epp.cli", "emulate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_serve_until_a_signal_and_leave_with_zero(number: signal.Signals) -> None:
    with emulate("--port", "0", "--port", "0", "--name", "w", "--kv-events", "tcp://127.0.0.1:*") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        for name, line in zip(("w-1", "w-2"), lines, strict=True):
            assert line.startswith(f"{name}: http://127.0.0.1:")
            address = line.split()[1].rstrip(",")
            with urllib.request.urlopen(f"{address}/health", timeout=10) as response:
                assert response.headers["x-served-by"] == name
        process.send_signal(number)
        _, errors = process.communicate(timeout=10)
        assert (process.returncode, errors) == (0, "")


def test_a_taken_port_is_said_and_nothing_is_left_listening() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with emulate("--port", "0", "--port", str(port)) as process:
            output, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors == f"Error: cannot listen on 127.0.0.1:{port}: the port is taken by another process\n"
    address = output.split()[-1].removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address[0], int(address[1])), timeout=5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fault", "error_rate=2"], "--fault: Expected `float` <= 1.0 - at `$.error_rate`"),
        (["--fault", "nothing=1"], "--fault: Object contains unknown field `nothing`"),
        (["--kv-replay", "tcp://*:5558"], "--kv-replay needs --kv-events"),
        (["--blocks", "10", "--block-size", "16", "--max-model-len", "1000"], "max_model_len 1000 does not fit"),
        (["--base-port", "65535", "--count", "2"], "port 65536 is out of range"),
        (["--speed", "0"], "--speed"),
    ],
)
def test_bad_options_are_refused_by_name(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code != 0
    assert words in result.output


def test_a_stream_is_reset_under_the_commands_own_event_loop() -> None:
    with emulate("--port", "0", "--fault", "reset_mid_stream=1", "--speed", "100") as process:
        assert process.stdout is not None
        address = process.stdout.readline().split("//")[1].strip()
        with socket.create_connection(("127.0.0.1", int(address.split(":")[1])), timeout=10) as client:
            body = b'{"prompt": "x", "stream": true}'
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            with pytest.raises(ConnectionResetError):
                _read_to_end(client)


def test_a_worker_that_dies_resets_its_connections_and_a_client_that_leaves_is_no_error() -> None:
    with emulate("--port", "0", "--speed", "0.2") as process:
        assert process.stdout is not None
        address = process.stdout.readline().split("//")[1].strip()
        leaving, staying = (socket.create_connection(("127.0.0.1", int(address.split(":")[1])), 10) for _ in range(2))
        body = b'{"prompt": "x", "stream": true}'
        for client in (leaving, staying):
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            assert client.recv(20)
        leaving.close()
        faults = urllib.request.Request(f"http://{address}/control/faults", b'{"refuse": "close"}')
        with urllib.request.urlopen(faults, timeout=10) as response:
            assert response.status == 200
        with staying, pytest.raises(ConnectionResetError):
            _read_to_end(staying)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=10)[1] == ""


def _read_to_end(client: socket.socket) -> None:
    while client.recv(65536):
        pass
