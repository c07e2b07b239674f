"""Real vLLM workers that hand KV blocks to each other with NIXL over loopback, and requests whose tokens are compared.

Two that prefill, two that decode (and can prefill for each other), and a plain one that says which tokens are right:
one zygote, one model. A pair's first transfer shakes hands, which costs more than the transfer.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations, product
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from tests.e2e.envoy import until
from tests.ports import quiet_ports
from tests.vllm.following import BLOCK, new_fleet
from tests.vllm.workers import Fleet, Worker

LEASE_S = 6
"""For so long a prefiller keeps the blocks of a request for the decoder. vLLM's own default is 30."""
EXPIRED, EXPIRED_READS = "vllm:nixl_num_kv_expired_reqs_total", "vllm:nixl_num_notifications_after_expiry_total"
USAGE = "vllm:kv_cache_usage_perc"
"""The share of blocks that running and leased requests hold."""
BLOCKS, LONG_BLOCKS = 512, 120
"""Of a worker's cache; of the longest prompt."""

ROLES = (("kv_producer", "fail"), ("kv_producer", "fail"), ("kv_both", "fail"), ("kv_both", "recompute"))
"""Of the workers in their order, with what they do when blocks cannot be had; `fail` is vLLM's default."""

PREFILL_ONLY = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}


@dataclass
class Pairs:
    """The workers of a fleet by what they do."""

    fleet: Fleet
    _met: set[tuple[str, str]] = field(default_factory=set)

    @property
    def prefillers(self) -> list[Worker]:
        return self.fleet.workers[:2]

    @property
    def decoders(self) -> list[Worker]:
        return self.fleet.workers[2:4]

    @property
    def plain(self) -> Worker:
        return self.fleet.workers[4]

    async def ready(self, client: aiohttp.ClientSession) -> None:
        """Start those anew that a test has ended, and have every pair that does not know each other shake hands."""
        for worker in [w for w in self.fleet.workers if not w.process.runs()]:
            self._met -= {pair for pair in self._met if worker.address in pair}
            await asyncio.to_thread(self.fleet.restart, worker)
        pairs = [*product(self.prefillers, self.decoders), *permutations(self.decoders, 2)]
        strangers = [(a, b) for a, b in pairs if (a.address, b.address) not in self._met]
        await asyncio.gather(*(shake_hands(client, a, b) for a, b in strangers))
        self._met |= {(a.address, b.address) for a, b in strangers}


def start(folder: Path) -> Pairs:
    """All five workers; they answer, or an error says why not."""
    fleet = new_fleet(folder)
    fleet.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    side = quiet_ports(len(ROLES))
    for number, (role, failure) in enumerate(ROLES):
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_load_failure_policy": failure,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side + number)}
        fleet.launch(1, "--kv-transfer-config", json.dumps(transfer), own=own)
    fleet.launch(1)
    fleet.wait()
    return Pairs(fleet)


def transferred(worker: Worker) -> float:
    """Prompt tokens whose KV came from another worker."""
    return worker.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def computed_by(worker: Worker) -> float:
    """Prompt tokens that the worker has computed itself."""
    return worker.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


@dataclass(frozen=True)
class Prompt:
    """A request whose right answer a plain worker knows."""

    path: str
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(frozen=True)
class Told:
    """What came back: the tokens generated, and the usage."""

    status: int
    tokens: list[int]
    usage: dict[str, Any]
    headers: dict[str, str]
    text: str

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def prompts(seed: int, count: int, words: tuple[int, int] = (1, 160)) -> Iterator[Prompt]:
    """Completions and chats, streams and not, in turn; none shares a block with another."""
    random = Random(seed)
    kinds = list(product(("/v1/completions", "/v1/chat/completions"), (False, True)))
    for number in range(count):
        path, stream = kinds[number % len(kinds)]
        text = f"{seed}.{number}: " + " ".join(f"fact {random.randrange(10**6)}" for _ in range(random.randint(*words)))
        yield prompt(text, path=path, stream=stream, max_tokens=random.choice((2, 9, 20)))


def prompt(text: str, *, path: str = "/v1/completions", stream: bool = False, max_tokens: int = 12) -> Prompt:
    said = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    body = {"model": "tiny", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return Prompt(path, said | body | streamed)


async def ask(client: aiohttp.ClientSession, url: str, asked: Prompt, **headers: str) -> Told:
    """Send it there; underscores in header names are hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.post(url + asked.path, json=asked.body, headers=named) as response:
        text = await response.text()
        status, fields = response.status, {name.lower(): value for name, value in response.headers.items()}
    if status != 200:
        return Told(status, [], {}, fields, text)
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {"))
    parts = [json.loads(line) for line in lines] if asked.stream else [json.loads(text)]
    failed = [part["error"] for part in parts if "error" in part]
    assert not failed, failed
    tokens = [t for part in parts for choice in part["choices"] for t in choice.get("token_ids") or ()]
    return Told(status, tokens, parts[-1]["usage"], fields, text)


async def prefilled(client: aiohttp.ClientSession, prefiller: Worker, asked: Prompt) -> dict[str, Any]:
    """The first leg by hand; the address of the blocks."""
    body = {name: value for name, value in asked.body.items() if name != "stream_options"} | PREFILL_ONLY
    async with client.post(prefiller.url + asked.path, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


async def decoded(client: aiohttp.ClientSession, decoder: Worker, asked: Prompt, params: dict[str, Any]) -> Told:
    """The second leg by hand."""
    return await ask(client, decoder.url, Prompt(asked.path, asked.body | {"kv_transfer_params": params}))


async def shake_hands(client: aiohttp.ClientSession, prefiller: Worker, decoder: Worker) -> None:
    asked = prompt(f"from {prefiller.address} " * 5)
    told = await decoded(client, decoder, asked, await prefilled(client, prefiller, asked))
    assert told.status == 200, told.text


async def right(client: aiohttp.ClientSession, pairs: Pairs, asked: Prompt) -> list[int]:
    """The tokens of a worker that knows nothing of all this."""
    told = await ask(client, pairs.plain.url, asked)
    assert told.status == 200, told.text
    return told.tokens


async def holds_nothing(worker: Worker) -> None:
    """Wait until the worker has given back the blocks of all requests, at the latest when their leases are over."""
    await until(lambda: asyncio.to_thread(worker.metric, USAGE), lambda held: held == 0, within_s=LEASE_S * 3)


async def stepped(client: aiohttp.ClientSession, worker: Worker, metric: str) -> float:
    """A metric after the engine has run: it looks at what decoders tell then, not while it is idle."""
    told = await ask(client, worker.url, prompt("step", max_tokens=1))
    assert told.status == 200, told.text
    return await asyncio.to_thread(worker.metric, metric)


async def overwrite(client: aiohttp.ClientSession, worker: Worker) -> None:
    """Have every free block of the worker's cache written anew."""
    for number in range(BLOCKS // LONG_BLOCKS + 1):
        ids = [300 + (number * 7919 + at * 31) % 3000 for at in range(LONG_BLOCKS * BLOCK)]
        told = await ask(client, worker.url, Prompt("/v1/completions", {"prompt": ids, "max_tokens": 1}))
        assert told.status == 200, told.text


@contextmanager
def stopped(worker: Worker) -> Iterator[None]:
    """The worker does nothing meanwhile."""
    worker.process.send(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.process.send(signal.SIGCONT)


async def left_after(seconds: float, request: Coroutine[Any, Any, object]) -> None:
    """Send the request and go away before it is answered."""
    task = asyncio.ensure_future(request)
    done, _ = await asyncio.wait([task], timeout=seconds)
    assert not done, f"answered within {seconds} s: {task}"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
