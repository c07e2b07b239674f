"""KV events on the wire: layouts as captured from vLLM 0.32.0, publishing and replay over ZeroMQ."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from epp.sim.events import AllBlocksCleared, BlockRemoved, BlockStored, EventEncoder, KVCacheEvent
from epp.sim.faults import Faults
from epp.sim.publisher import EventPublisher, EventsConfig
from epp.sim.server import Worker

StartWorker = Callable[..., Awaitable[Worker]]
END = b"\xff" * 8
EVERYWHERE = EventsConfig("tcp://*:0", "tcp://127.0.0.1:*", topic="kv@{address}@{model}")

# The hashes are the digests' last eight bytes.
DIGEST = bytes(24) + (17281856691673831396).to_bytes(8, "big")
PARENT = bytes(24) + (8329289438758292919).to_bytes(8, "big")
STORED = BlockStored((DIGEST,), PARENT, array("I", range(200, 232)), 32, None, None, (None,))
# A payload that vLLM 0.32.0 sent, its token ids 200..231 left out.
CAPTURED_HEAD = (
    "93cb41dac386854f7158918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfefd57d190e6d17e4"
    "b1706172656e745f626c6f636b5f68617368"
)


@pytest.fixture
async def sockets() -> AsyncIterator[Callable[..., zmq.asyncio.Socket]]:
    context = zmq.asyncio.Context()

    def connect(kind: int, endpoint: str | None, *, subscribe: bytes | None = None) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        if subscribe is not None:
            socket.setsockopt(zmq.SUBSCRIBE, subscribe)
        assert endpoint is not None
        socket.connect(endpoint)
        return socket

    yield connect
    context.destroy(linger=0)


async def received(socket: zmq.asyncio.Socket) -> list[bytes]:
    async with asyncio.timeout(5):
        frames: list[bytes] = await socket.recv_multipart()
        return frames


async def replayed(socket: zmq.asyncio.Socket, start: int) -> list[list[bytes]]:
    await socket.send_multipart([b"", start.to_bytes(8, "big")])
    answers: list[list[bytes]] = []
    while not answers or END not in answers[-1]:
        answers.append(await received(socket))
    return answers


async def complete(session: aiohttp.ClientSession, worker: Worker, prompt: list[int], **more: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 2, **more}
    async with session.post(f"http://{worker.address}/v1/completions", json=body) as response:
        assert response.status == 200


def test_the_map_layout_has_the_keys_of_vllm_in_their_order() -> None:
    payload = EventEncoder()([STORED], 1796086291.0)
    _, [event], rank = msgspec.msgpack.decode(payload)
    assert rank == 0
    assert list(event.items()) == [
        ("type", "BlockStored"),
        ("block_hashes", [17281856691673831396]),
        ("parent_block_hash", 8329289438758292919),
        ("token_ids", list(range(200, 232))),
        ("block_size", 32),
        ("lora_id", None),
        ("medium", "GPU"),
        ("lora_name", None),
        ("extra_keys", [None]),
        ("group_idx", 0),
        ("kv_cache_spec_kind", "full_attention"),
    ]
    captured = bytes.fromhex(CAPTURED_HEAD)
    assert payload[:1] + payload[10 : len(captured)] == captured[:1] + captured[10:]  # all but the timestamp


def test_removals_and_resets_have_vllms_keys() -> None:
    happened: list[KVCacheEvent] = [BlockRemoved((DIGEST,)), AllBlocksCleared()]
    _, events, rank = msgspec.msgpack.decode(EventEncoder(data_parallel_rank=1)(happened, 1.0))
    assert events == [
        {"type": "BlockRemoved", "block_hashes": [17281856691673831396], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]
    assert rank == 1


def test_the_array_layout_names_the_type_first() -> None:
    events: list[KVCacheEvent] = [STORED, BlockRemoved((DIGEST,)), AllBlocksCleared()]
    _, [first, second, third], _ = msgspec.msgpack.decode(EventEncoder("array")(events, 1.0))
    assert first[:3] == ["BlockStored", [17281856691673831396], 8329289438758292919]
    assert first[4:] == [32, None, "GPU", None, [None], 0, "full_attention"]
    assert second == ["BlockRemoved", [17281856691673831396], "GPU", 0]
    assert third == ["AllBlocksCleared"]


def test_hashes_may_be_whole_digests() -> None:
    _, [event], _ = msgspec.msgpack.decode(EventEncoder(bytes_hashes=True)([STORED], 1.0))
    assert (event["block_hashes"], event["parent_block_hash"]) == ([DIGEST], PARENT)


async def test_events_are_published_with_topic_and_numbers_from_zero(
    start_worker: StartWorker, session: aiohttp.ClientSession, sockets: Callable[..., zmq.asyncio.Socket]
) -> None:
    worker = await start_worker(events=EVERYWHERE)
    async with session.get(f"http://{worker.address}/kv_event_sources") as response:
        [source] = await response.json()
    assert (source["data_parallel_rank"], source["topic"]) == (0, f"kv@{worker.address}@tiny")
    assert source["endpoint"].startswith("tcp://127.0.0.1:")
    live = sockets(zmq.SUB, source["endpoint"], subscribe=b"kv@")
    replay = sockets(zmq.DEALER, source["replay_endpoint"])
    assert await replayed(replay, 0) == [[b"", b"", END, b""]]
    await complete(session, worker, [1] * 33)
    await complete(session, worker, [1] * 33)  # a full hit, no batch
    await complete(session, worker, [1] * 33 + [2] * 32, cache_salt="s")
    answers = await replayed(replay, 0)
    topic = f"kv@{worker.address}@tiny".encode()
    assert [answer[1:3] for answer in answers[:-1]] == [[topic, n.to_bytes(8, "big")] for n in range(2)]
    _, [event], _ = msgspec.msgpack.decode(answers[1][3])
    assert event["extra_keys"] == [["s"], None, None, None]
    # By now the subscription has been made: the next batch arrives live, and its replay is equal to it.
    await complete(session, worker, [3] * 33)
    frames = await received(live)
    while frames[1] != (2).to_bytes(8, "big"):
        frames = await received(live)
    assert await replayed(replay, 2) == [[b"", *frames], [b"", b"", END, b""]]
    assert await replayed(replay, 3) == [[b"", b"", END, b""]]


async def test_a_replay_request_without_the_empty_frame_is_ignored(
    start_worker: StartWorker, session: aiohttp.ClientSession, sockets: Callable[..., zmq.asyncio.Socket]
) -> None:
    worker = await start_worker(events=EVERYWHERE)
    assert worker.publisher is not None
    replay = sockets(zmq.DEALER, worker.publisher.replay_endpoint)
    await replay.send_multipart([(0).to_bytes(8, "big")])
    await replay.send_multipart([b"", b"\0"])
    assert await replayed(replay, 0) == [[b"", b"", END, b""]]


async def test_replay_of_the_array_layout_has_no_topic_and_starts_where_the_buffer_does(
    start_worker: StartWorker, session: aiohttp.ClientSession, sockets: Callable[..., zmq.asyncio.Socket]
) -> None:
    config = EventsConfig("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", layout="array", buffer_steps=2)
    worker = await start_worker(events=config)
    assert worker.publisher is not None
    for token in (1, 2, 3):
        await complete(session, worker, [token] * 33)
    answers = await replayed(sockets(zmq.DEALER, worker.publisher.replay_endpoint), 0)
    assert [answer[:2] for answer in answers] == [[b"", n.to_bytes(8, "big")] for n in (1, 2)] + [[b"", END]]


async def test_an_endpoint_without_a_star_is_connected_to(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    context = zmq.asyncio.Context()
    central = context.socket(zmq.SUB)
    central.setsockopt(zmq.SUBSCRIBE, b"")
    port = central.bind_to_random_port("tcp://127.0.0.1")
    try:
        worker = await start_worker(events=EventsConfig(f"tcp://127.0.0.1:{port}", topic="t"))
        frames = None
        for token in range(100):  # what is published before the connection stands is lost, as with vLLM
            await complete(session, worker, [token] * 17)
            if await central.poll(50):
                frames = await received(central)
                break
        assert frames is not None
        assert frames[0] == b"t"
    finally:
        context.destroy(linger=0)


async def test_lost_events_use_up_their_numbers_and_stay_replayable(
    start_worker: StartWorker, session: aiohttp.ClientSession, sockets: Callable[..., zmq.asyncio.Socket]
) -> None:
    worker = await start_worker(events=EVERYWHERE)
    assert worker.publisher is not None
    live = sockets(zmq.SUB, worker.publisher.endpoint, subscribe=b"")
    replay = sockets(zmq.DEALER, worker.publisher.replay_endpoint)
    while not await live.poll(50):
        await complete(session, worker, [len(await replayed(replay, 0))] * 17)
    while await live.poll(50):
        await received(live)
    before = len(await replayed(replay, 0)) - 1
    await worker.set_faults(Faults(event_loss=1.0))
    await complete(session, worker, [901] * 17)
    await worker.set_faults(Faults())
    await complete(session, worker, [902] * 17)
    _, number, _ = await received(live)
    assert int.from_bytes(number, "big") == before + 1
    assert len(await replayed(replay, 0)) - 1 == before + 2


async def test_an_endpoint_that_cannot_be_bound_is_named(start_worker: StartWorker) -> None:
    with pytest.raises(ValueError, match=r"KV-event endpoint tcp://\*:nowhere"):
        EventPublisher(EventsConfig("tcp://*:nowhere"))
    with pytest.raises(ValueError, match="KV-event endpoint"):
        await start_worker(events=EventsConfig("tcp://*:nowhere"))
