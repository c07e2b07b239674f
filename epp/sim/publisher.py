"""Publishes KV-cache events over ZeroMQ as vLLM does, with a socket that replays what was missed.

Live: a PUB socket, messages `[topic, sequence number (8 bytes, big-endian), payload]`, numbers from 0 per process.
Replay: a ROUTER socket. A DEALER sends `[b"", first number wanted]`; every buffered batch from there comes back as
`[b"", topic, number, payload]`, then the end marker `[b"", b"", ff x 8, b""]`. In the old array layout replayed
messages and the end marker have no topic frame, as in the vLLM releases that used it. A request without the empty
frame is ignored.
Source: vllm/distributed/kv_events.py; frames captured from vLLM 0.32.0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import zmq
import zmq.asyncio

from epp.sim.events import EventEncoder, EventFormat, KVCacheEvent

_log = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """vLLM's `--kv-events-config`, and what the emulator adds. An endpoint with `*` or `::`, and ipc, is bound; any
    other is connected to."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    """`{address}` and `{model}` stand for the worker's."""
    buffer_steps: int = 10_000
    layout: EventFormat = "map"
    bytes_hashes: bool = False
    data_parallel_rank: int = 0

    def of_rank(self, rank: int) -> EventsConfig:
        """That of another rank, by vLLM's rule: on port + rank. A port that is connected to is shared."""
        replay = self.replay_endpoint and shifted(self.replay_endpoint, rank)
        return replace(self, endpoint=shifted(self.endpoint, rank), replay_endpoint=replay, data_parallel_rank=rank)


def shifted(endpoint: str, by: int) -> str:
    """An endpoint with `by` added to its port; a bound port 0 stays, a port connected to is shared."""
    head, _, port = endpoint.rpartition(":")
    bound = "*" in head or "::" in head
    return f"{head}:{int(port) + by}" if bound and port.isdigit() and port != "0" else endpoint


class EventPublisher:
    """Raises ValueError for an endpoint that cannot be bound or connected to."""

    def __init__(self, config: EventsConfig, is_lost: Callable[[], bool] = lambda: False) -> None:
        self.config = config
        self._is_lost = is_lost
        self._encode = EventEncoder(
            config.layout, bytes_hashes=config.bytes_hashes, data_parallel_rank=config.data_parallel_rank
        )
        self._topic = config.topic.encode()
        self._sequence = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, 100_000)  # vLLM's default; beyond it messages are dropped
        self._router: zmq.asyncio.Socket | None = None
        try:
            self.endpoint = _open(self._pub, config.endpoint)
            self.replay_endpoint = None
            if config.replay_endpoint:
                self._router = zmq.asyncio.Socket(self._context, zmq.ROUTER)
                self.replay_endpoint = _open(self._router, config.replay_endpoint)
        except ValueError:
            self.close()
            raise
        self._task = asyncio.create_task(self._serve_replay(self._router)) if self._router else None

    def publish(self, events: list[KVCacheEvent]) -> None:
        payload = self._encode(events, time.time())
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._buffer.append((number, payload))
        if not self._is_lost():
            self._pub.send_multipart([self._topic, number, payload], flags=zmq.NOBLOCK)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.close()

    def close(self) -> None:
        self._pub.close(linger=0)
        if self._router is not None:
            self._router.close(linger=0)
        self._context.term()

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        topic = [self._topic] if self.config.layout == "map" else []
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
                _log.warning("ignoring a replay request of %d frames", len(frames))
                continue
            client, _, start = frames
            for number, payload in list(self._buffer):
                if number >= start:
                    await router.send_multipart([client, b"", *topic, number, payload])
            await router.send_multipart([client, b"", *([b""] if topic else []), _END, b""])


def _open(socket: Any, endpoint: str) -> str:
    """Bind or connect by vLLM's rule; the address in full, with the port that `:0` was given."""
    try:
        if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            socket.bind(endpoint)
            return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        socket.connect(endpoint)
        return endpoint
    except zmq.ZMQError as error:
        raise ValueError(f"KV-event endpoint {endpoint}: {error}") from None
