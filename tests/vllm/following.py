"""Real, small, evicting vLLM workers that publish KV events; pickers that follow them; how well these know them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from epp.envoy_options import HostPort, Mode, Profile, defaults, parse_picker
from epp.sim.tokenizer import SHIPPED
from tests.e2e.envoy import running_envoy, until
from tests.e2e.serving import running_picker
from tests.vllm.workers import Fleet, Worker, vllm_python

BLOCK = 32
EVENTS_S = 0.03
"""Pause after an answer. A request picked before the last one's events are here races with them: what they evict still
counts. Seen once in 200 requests without a pause."""
EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:0",
    "replay_endpoint": "tcp://*:0",
    "topic": "kv@worker@tiny",
}
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
models:
- name: tiny
  path: {model}
plugins:
- type: precise-prefix-cache-producer
  parameters: {parameters}
- type: expected-ttft-scorer
- type: active-request-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: expected-ttft-scorer
    weight: 10
  - pluginRef: active-request-scorer
    weight: 0.1
"""
WINDOW = 40
"""A picker knows its workers when of so many requests in a row less than a twentieth came out otherwise."""
PATIENCE = 400
"""Requests after which it never will."""

Request = tuple[str, dict[str, Any]]


def new_fleet(folder: Path) -> Fleet:
    """No workers yet, but the model for them."""
    script = Path(__file__).parent / "tiny_model.py"
    subprocess.run([vllm_python(), script, SHIPPED, folder / "model"], check=True, timeout=120)
    return Fleet(folder / "model", folder)


@dataclass(frozen=True)
class Compared:
    """One request: cached tokens expected at the pick, and those the worker reported."""

    endpoint: str
    expected: int
    reported: int
    by_tier: dict[str, float]
    """What was expected of the endpoint chosen."""
    reasons: tuple[str, ...]

    @property
    def wrong(self) -> bool:
        return self.expected != self.reported


@dataclass(frozen=True)
class Recovery:
    """How long it took until a picker knew its workers (again)."""

    seconds: float
    requests: int
    wrong: int
    """Of these requests."""

    def __str__(self) -> str:
        return f"known after {self.seconds:.1f} s and {self.requests} requests, {self.wrong} of them expected otherwise"


@dataclass
class Following:
    """A running picker behind an Envoy."""

    url: str
    admin: str
    log: Path
    client: aiohttp.ClientSession
    asked: int = 0

    async def ask(self, *requests: Request) -> list[Compared]:
        """Send one after the other, and compare."""
        for path, body in requests:
            await ask(self.client, self.url, path, body)
        self.asked += len(requests)
        lines = await until(
            lambda: asyncio.to_thread(lambda: self.log.read_text().splitlines()), lambda seen: len(seen) >= self.asked
        )
        return [_compared(json.loads(line)) for line in lines[self.asked - len(requests) : self.asked]]

    async def index(self) -> list[dict[str, Any]]:
        """What the picker believes of each worker."""
        async with self.client.get(f"{self.admin}/debug/index") as response:
            endpoints: list[dict[str, Any]] = (await response.json())["endpoints"]
            return endpoints

    async def recovery(self, traffic: Iterator[Request], *, of: Worker | None = None) -> Recovery:
        """Send requests until the picker knows its workers, a tenth of them served by `of`."""
        loop = asyncio.get_running_loop()
        start, times, found = loop.time(), list[float](), list[Compared]()
        while len(found) < PATIENCE:
            times.append(loop.time() - start)
            found += await self.ask(next(traffic))
            window, before = found[-WINDOW:], len(found) - WINDOW
            there = WINDOW if of is None else sum(c.endpoint == of.address for c in window)
            if before >= 0 and sum(c.wrong for c in window) < 0.05 * WINDOW and there >= 0.1 * WINDOW:
                return Recovery(times[before], before, sum(c.wrong for c in found[:before]))
        wrong = sum(c.wrong for c in found[-WINDOW:])
        raise AssertionError(f"of the last {WINDOW} of {PATIENCE} requests {wrong} came out otherwise")


def _compared(record: dict[str, Any]) -> Compared:
    (profile,) = record["profiles"]
    row = profile["candidates"].index(record["endpoints"][0])
    by_tier = {tier: values[row] for tier, values in (profile["cached_by_tier"] or {}).items()}
    expected, reported = (record[part]["cached_tokens"] for part in ("estimate", "outcome"))
    return Compared(record["endpoints"][0], expected, reported, by_tier, tuple(record["reasons"]))


@asynccontextmanager
async def following(fleet: Fleet, folder: Path, parameters: str = "{}") -> AsyncIterator[Following]:
    """A picker that follows these workers; `parameters` are those of its precise producer."""
    addresses = [w.address for w in fleet.workers]
    listen, log, config = f"unix:{folder}/picker.sock", folder / "decisions.jsonl", folder / "config.yaml"
    config.write_text(CONFIG.format(model=fleet.model, parameters=parameters))
    options = defaults(
        Mode.SIDECAR, Profile.GATEWAY, picker=parse_picker(listen), endpoints=tuple(map(HostPort.parse, addresses))
    )
    told = [*(f"--endpoint={a}" for a in addresses), f"--config-file={config}", f"--decision-log={log}"]
    async with (
        running_picker(folder, listen, *told) as picker,
        running_envoy(options) as envoy,
        aiohttp.ClientSession() as client,
    ):
        yield Following(envoy.url, picker.admin, log, client)


def requests(seed: int) -> Iterator[Request]:
    """Prompts of up to 900 tokens that share beginnings or do not, as completions and as chats that go on; endless."""
    random = Random(seed)
    shared = [" ".join(f"fact {seed * 7919 + s * 1000 + n}" for n in range(120)) for s in range(4)]
    chats: list[list[dict[str, str]]] = [[] for _ in range(4)]
    number = 0
    while True:
        number += 1
        common = {"model": "tiny", "max_tokens": random.choice((1, 8, 40)), "temperature": 0}
        if random.random() < 0.5:
            text = random.choice(shared)[: random.choice((300, 700, 2000))] if random.random() < 0.7 else ""
            own = " ".join(f"item {number * 100 + n}" for n in range(random.choice((1, 20, 60))))
            yield "/v1/completions", {**common, "prompt": f"{text} {own}"}
        else:
            chat = random.choice(chats)
            if len(chat) > 9:
                chat.clear()
            chat.append({"role": "user", "content": f"{number}: " + random.choice(shared)[: random.choice((40, 300))]})
            yield "/v1/chat/completions", {**common, "messages": list(chat)}
            chat.append({"role": "assistant", "content": f"answer {number}"})


async def ask(client: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> None:
    """One request, and time for its events to come."""
    async with client.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()
    await asyncio.sleep(EVENTS_S)


@dataclass
class Proxy:
    """Between a picker and one worker's event sockets, on the worker's address: lets batches fall, refuses replays."""

    refuse: bool = False
    drop: int = 0
    """So many batches fall from now on."""
    dropped: int = 0
    replays: int = 0
    """Connections to the replay socket, those refused included."""
    _pipes: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def running(self, worker: Worker, events_port: int, replay_port: int) -> AsyncIterator[Proxy]:
        (source,) = json.loads(await asyncio.to_thread(worker.get, "/kv_event_sources")).values()
        replay_host, _, port = source["replay_endpoint"].removeprefix("tcp://").rpartition(":")

        async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.replays += 1
            if self.refuse:
                writer.close()
                return
            their_reader, their_writer = await asyncio.open_connection(replay_host, int(port))
            for pipe in (_pipe(reader, their_writer), _pipe(their_reader, writer)):
                self._pipes.add(asyncio.create_task(pipe))

        context = zmq.asyncio.Context()
        subscribed, published = context.socket(zmq.SUB), context.socket(zmq.PUB)
        server = await asyncio.start_server(replay, worker.host, replay_port)
        try:
            subscribed.subscribe(b"")
            subscribed.connect(source["endpoint"])
            published.bind(f"tcp://{worker.host}:{events_port}")
            self._pipes.add(asyncio.create_task(self._forward(subscribed, published)))
            yield self
        finally:
            server.close()
            for task in self._pipes:
                task.cancel()
            await asyncio.gather(*self._pipes, return_exceptions=True)
            context.destroy(linger=0)

    async def _forward(self, subscribed: zmq.asyncio.Socket, published: zmq.asyncio.Socket) -> None:
        while True:
            frames = await subscribed.recv_multipart()
            if self.drop:
                self.drop, self.dropped = self.drop - 1, self.dropped + 1
            else:
                await published.send_multipart(frames)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
