"""How long a pick takes to count at another replica: two of them, a redis-server of our own, one process.

Wall time from the pick to the other's column, over 200 picks one after the other. Without redis-server there is none.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
import time
from random import Random
from statistics import median

from epp.endpoint import Endpoint, Pool
from epp.figures import Figure, figure
from epp.plugin import InferenceRequest
from epp.request import Api
from epp.shared.redis_stream import RedisStream, parse_url
from epp.shared.state import SharedState

PICKS = 200


class Replica:
    def __init__(self, url: str, seed: int) -> None:
        self.pool = Pool([Endpoint("10.0.0.1", 8000)])
        self.state = SharedState(self.pool, dict, origin=seed, now=time.monotonic())
        self.stream = RedisStream(parse_url(url), self.state, clock=time.monotonic, random=Random(seed))

    async def sees(self, requests: int) -> None:
        """Looked at every quarter of a millisecond."""
        async with asyncio.timeout(10):
            while self.pool.endpoints[0].get("in_flight") != requests:  # noqa: ASYNC110
                await asyncio.sleep(0.00025)  # the time is what is measured

    async def ticking(self) -> None:
        while True:
            self.state.tick(time.monotonic())
            await asyncio.sleep(0.1)


def figures() -> list[Figure]:
    server = shutil.which("redis-server")
    if server is None:
        return []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            seconds = asyncio.run(_delays(f"redis://127.0.0.1:{port}/0"))
        finally:
            process.kill()
            process.wait(10)
    return [
        figure("replicas/pick counts at the other, median", median(seconds) * 1e3, "ms"),
        figure("replicas/pick counts at the other, longest of 200", max(seconds) * 1e3, "ms"),
    ]


async def _delays(url: str) -> list[float]:
    one, other = Replica(url, 1), Replica(url, 2)
    for replica in (one, other):
        replica.stream.start()
    ticking = [asyncio.create_task(replica.ticking()) for replica in (one, other)]
    try:
        seconds = []
        for number in range(-3, PICKS):  # the first ones connect
            request = InferenceRequest(str(number), Api.CHAT, "m", "m")
            begun = time.monotonic()
            load = one.pool.endpoints[0].acquire(1000, begun)
            told = one.state.picked(request, one.pool.endpoints[0])
            await other.sees(1)
            if number >= 0:
                seconds.append(time.monotonic() - begun)
            load.release()
            one.state.ended(told)
            await other.sees(0)
        return seconds
    finally:
        for task in ticking:
            task.cancel()
        for replica in (one, other):
            await replica.stream.stop()
