"""The emulated engine is held to the real one: the same requests give the same KV events and cached tokens.

A real worker with few blocks gets a random sequence of requests that share prefixes, use cache salts, fill blocks by
decoding and force evictions; the emulated engine gets the same in virtual time.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq

from epp.sim.engine import EngineConfig, EngineCore
from epp.sim.events import EventEncoder, KVCacheEvent
from epp.sim.sequence import SamplingParams, Sequence
from epp.sim.tokenizer import SHIPPED
from epp.sim.virtual import VirtualClock, VirtualWorker
from tests.ports import free_port
from tests.vllm.workers import Fleet, Worker, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

BLOCKS, BLOCK_SIZE, REQUESTS = 48, 32, 120


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_tokens: int
    cache_salt: str | None
    report_cached_blocks: bool


def requests(seed: int) -> list[Request]:
    """Four texts of up to 700 tokens; a request is a beginning of one, sometimes with an end of its own."""
    random = Random(seed)
    texts = [[random.randrange(300, 4000) for _ in range(700)] for _ in range(4)]
    made = []
    for _ in range(REQUESTS):
        length = random.choice((1, 31, 32, 33, 64, 65, 96, random.randrange(1, 700)))
        own = [random.randrange(300, 4000) for _ in range(random.choice((0, 0, 1, 40)))]
        made.append(
            Request(
                prompt=random.choice(texts)[:length] + own,
                max_tokens=random.choice((1, 2, 33, 70)),
                cache_salt=random.choice((None, None, None, "salt")),
                report_cached_blocks=random.random() < 0.1,
            )
        )
    return made


class Numbered:
    """Batches with hashes numbered in order of appearance, and without what the sampled tokens decide."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def batch(self, payload: bytes) -> list[dict[str, Any]]:
        _, events, _ = msgspec.msgpack.decode(payload)
        return [self._event(event) for event in events]

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        number = self._numbers
        event["block_hashes"] = [number.setdefault(h, len(number)) for h in event["block_hashes"]]
        if event.get("parent_block_hash") is not None:
            event["parent_block_hash"] = number.get(event["parent_block_hash"], "unknown")
        if "token_ids" in event:
            event["token_ids"] = len(event["token_ids"])
        return event


def emulated(made: list[Request]) -> tuple[list[list[dict[str, Any]]], list[int]]:
    """KV-event batches, and cached tokens per request."""
    encode, numbered, batches = EventEncoder(), Numbered(), []
    clock = VirtualClock()

    def on_events(events: list[KVCacheEvent], now: float) -> None:
        batches.append(numbered.batch(encode(events, now)))

    config = EngineConfig(num_gpu_blocks=BLOCKS, block_size=BLOCK_SIZE, max_model_len=1024, max_num_batched_tokens=256)
    worker = VirtualWorker("emulated", EngineCore(config), clock, on_events)
    cached = []
    for request in made:
        sequence = Sequence(
            "r",
            request.prompt,
            SamplingParams(max_tokens=request.max_tokens),
            cache_salt=request.cache_salt,
            report_cached_blocks=request.report_cached_blocks,
        )
        worker.submit(sequence)
        clock.run()
        cached.append(sequence.num_cached_tokens)
    return batches, cached


def real(worker: Worker, replay_port: int, made: list[Request]) -> tuple[list[list[dict[str, Any]]], list[int]]:
    cached = []
    for request in made:
        body = {"model": "tiny", "prompt": request.prompt, "max_tokens": request.max_tokens, "ignore_eos": True}
        body |= {"temperature": 0} | ({"cache_salt": request.cache_salt} if request.cache_salt else {})
        if request.report_cached_blocks:
            body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
        http = urllib.request.Request(
            f"http://{worker.address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(http, timeout=60) as response:
            cached.append(json.load(response)["usage"]["prompt_tokens_details"]["cached_tokens"])
    numbered = Numbered()
    return [numbered.batch(payload) for payload in replayed(replay_port)], cached


def replayed(port: int) -> list[bytes]:
    """The payloads of all batches the worker has published."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart([b"", bytes(8)])
        payloads: list[bytes] = []
        while socket.poll(20_000):
            *_, number, payload = socket.recv_multipart()
            if number == b"\xff" * 8:
                return payloads
            payloads.append(payload)
    raise AssertionError(f"the replay did not end; {len(payloads)} batches came")


@pytest.fixture(scope="module")
def real_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, int]]:
    folder: Path = tmp_path_factory.mktemp("fidelity")
    script = Path(__file__).with_name("tiny_model.py")
    subprocess.run([vllm_python(), script, SHIPPED, folder / "model"], check=True, timeout=120)
    fleet = Fleet(folder / "model", folder)
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"}
    replay_port = free_port()
    events |= {"replay_endpoint": f"tcp://*:{replay_port}", "buffer_steps": 10_000}
    try:
        fleet.start(
            1,
            *("--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1024"),
            *("--max-num-batched-tokens", "256", "--kv-events-config", json.dumps(events)),
        )
        yield fleet.workers[0], replay_port
    finally:
        fleet.stop()


def test_random_requests_give_the_events_and_cached_tokens_of_the_real_engine(
    real_worker: tuple[Worker, int],
) -> None:
    worker, replay_port = real_worker
    made = requests(seed=7)
    expected_batches, expected_cached = real(worker, replay_port, made)
    batches, cached = emulated(made)
    assert cached == expected_cached
    for number, (batch, expected) in enumerate(zip(batches, expected_batches, strict=False)):
        assert batch == expected, f"batch {number}"
    assert len(batches) == len(expected_batches)
    # The comparison means something: blocks were evicted, and prefixes found.
    assert sum(event["type"] == "BlockRemoved" for batch in batches for event in batch) > 100
    assert sum(count > 0 for count in cached) > 20
