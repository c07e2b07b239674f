"""Emulated workers as a process of their own (`kvsteer emulate`), with faults switched on and off by hand."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp


@asynccontextmanager
async def running_workers(count: int, *args: str) -> AsyncIterator[list[str]]:
    """`count` workers of one process on free ports; yields their addresses `ip:port`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epp.cli", "emulate", *args),
        *(word for _ in range(count) for word in ("--port", "0")),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            lines = [(await process.stdout.readline()).decode() for _ in range(count)]
        yield [line.split("http://")[1].strip() for line in lines]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def set_faults(address: str, **faults: Any) -> None:
    """Put these faults in force at one worker instead of those before."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{address}/control/faults", json=faults) as response,
    ):
        assert response.status == 200, await response.text()
