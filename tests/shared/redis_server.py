"""A redis-server of a test's own: a free port, a directory of its own, ended by its process."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

BINARY = "redis-server"


class RedisServer:
    """Start, kill, pause and start again on the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0?timeout_ms=300"

    def start(self) -> None:
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), "--enable-debug-command", "local", *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    async def ready(self) -> None:
        for _ in range(200):
            try:
                self.command("PING")
                return
            except redis.ConnectionError:
                await asyncio.sleep(0.05)
        raise AssertionError("redis-server does not answer")

    def command(self, *words: str | int) -> object:
        """Ask the server, by a connection of its own."""
        with redis.Redis(port=self.port, socket_timeout=5) as client:
            return client.execute_command(*words)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        """It stays connected and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A server that is started; `ready` waits until it answers."""
    assert shutil.which(BINARY), "redis-server is not installed (Debian: apt-get install redis-server)"
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
