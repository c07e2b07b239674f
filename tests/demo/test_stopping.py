"""A demo that is stopped leaves nothing running."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from epp.demo.stack import Ports, StackError, check_ports
from tests.e2e.envoy import until


def _free_base() -> int:
    for base in range(23_000, 60_000, 100):
        try:
            check_ports(Ports.from_base(base, 4))
        except StackError:
            continue
        return base
    raise RuntimeError("no free ports")


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
async def test_a_stopped_demo_ends_all_it_started(number: signal.Signals, tmp_path: Path) -> None:
    ports = Ports.from_base(_free_base(), 4)
    arguments = ("demo", "--base-port", str(ports.gateway), "--duration", "600")
    with (tmp_path / "out").open("wb") as out:
        demo = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "epp.cli", *arguments, stdout=out, stderr=out, env={"TMPDIR": str(tmp_path)}
        )
    try:

        async def envoy_listens() -> bool:
            assert demo.returncode is None, (tmp_path / "out").read_text()
            return await asyncio.to_thread(_listens, ports.gateway)

        await until(envoy_listens, bool, within_s=60)
        demo.send_signal(number)
        async with asyncio.timeout(30):
            assert await demo.wait() == 130
    finally:
        if demo.returncode is None:
            demo.terminate()
            await demo.wait()
    assert "nothing is left running" in (tmp_path / "out").read_text()
    assert os.listdir(tmp_path) == ["out"]
    check_ports(ports)
