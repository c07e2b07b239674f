"""Events of emulated workers over real ZeroMQ sockets: late starts, losses, restarts, names, silence, bursts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import aiohttp
import pytest
import uvloop
import zmq.asyncio

from epp.endpoint import Endpoint
from epp.kvcache.events.follower import FollowerSettings
from epp.kvcache.events.sequence import SequenceSettings
from epp.kvcache.events.subscriber import EventsSettings, Subscriber
from epp.kvcache.index import BlockIndex
from epp.sim.cost import PRESETS
from epp.sim.engine import EngineConfig
from epp.sim.publisher import EventPublisher, EventsConfig
from epp.sim.server import Worker as HttpWorker
from epp.sim.server import WorkerConfig
from epp.sim.tokenizer import ChatTokenizer
from tests.kvcache.events.worker import BLOCK, MODEL, Worker, prompt_keys

PROMPTS = [list(range(n, n + 5 * BLOCK)) for n in (0, 100, 200, 300)]
QUICK = EventsSettings(
    settle_s=0.02,
    retry_s=0.1,
    follower=FollowerSettings(SequenceSettings(answer_s=0.3, attempts=1)),
)


class Publishing(Worker):
    """A worker that publishes on sockets, on the same ports after a restart."""

    def __init__(self, **config: Any) -> None:
        self.lost = False
        self.config = EventsConfig(**{"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", **config})
        self.publisher = EventPublisher(self.config, lambda: self.lost)
        super().__init__(num_blocks=40)

    @property
    def ports(self) -> dict[str, Any]:
        replay = self.publisher.replay_endpoint
        return {"events_port": _port(self.publisher.endpoint), "replay_port": _port(replay) if replay else None}

    def serve(self, *prompts: list[int]) -> None:
        """Serve prompts one after the other; a batch each."""
        for prompt in prompts:
            self.begin(prompt)
            self.finish(0)
            if events := self.manager.take_events():
                self.publisher.publish(events)

    async def restart_publisher(self) -> None:
        await self.publisher.stop()
        self.config = replace(
            self.config,
            endpoint=f"tcp://*:{self.ports['events_port']}",
            replay_endpoint=f"tcp://*:{self.ports['replay_port']}",
        )
        self.restart()
        self.publisher = EventPublisher(self.config, lambda: self.lost)


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def address(bound: Subscriber) -> str:
    """As a worker is told to connect to it; `::`, as in the bound address, would make it bind."""
    return f"tcp://127.0.0.1:{_port(bound.bound)}"


class Setup:
    """What a test starts, to be stopped after it."""

    def __init__(self) -> None:
        self.index = BlockIndex()
        self.running: list[Any] = []

    def worker(self, **config: Any) -> Publishing:
        worker = Publishing(**config)
        self.running.append(worker)
        return worker

    def subscriber(self, settings: EventsSettings = QUICK, **changes: Any) -> Subscriber:
        subscriber = Subscriber(self.index, replace(settings, **changes), model=lambda endpoint: MODEL)
        subscriber.start()
        self.running.append(subscriber)
        return subscriber

    def matches(self, subscriber: Subscriber, endpoint: Endpoint, prompt: list[int]) -> int:
        return int(self.index.match(prompt_keys(prompt), [subscriber.holders[endpoint]]).device[0])

    def holds_all(self, subscriber: Subscriber, endpoint: Endpoint, prompt: list[int]) -> bool:
        return self.matches(subscriber, endpoint, prompt) == len(prompt) // BLOCK

    def agrees(self, subscriber: Subscriber, endpoint: Endpoint, worker: Worker) -> bool:
        return all(self.matches(subscriber, endpoint, p) == worker.holds(p) for p in PROMPTS)

    async def stop(self) -> None:
        for each in reversed(self.running):
            await (each.publisher if isinstance(each, Publishing) else each).stop()


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    setup = Setup()
    yield setup
    await setup.stop()


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", 8000, name="pod-a")


async def late_start(setup: Setup, endpoint: Endpoint) -> tuple[Publishing, Subscriber]:
    worker = setup.worker()
    worker.serve(*PROMPTS[:2])
    subscriber = setup.subscriber(**worker.ports)
    subscriber.changed([endpoint], [])
    await until(lambda: setup.matches(subscriber, endpoint, PROMPTS[1]) == 5)
    await until(lambda: subscriber.followers[endpoint].confidence.level == "complete")
    return worker, subscriber


async def test_a_picker_that_starts_late_knows_what_was_published_before_and_follows(
    setup: Setup, endpoint: Endpoint
) -> None:
    worker, subscriber = await late_start(setup, endpoint)
    worker.serve(PROMPTS[2])
    await until(lambda: setup.agrees(subscriber, endpoint, worker))
    assert subscriber.totals()["replays_asked"] == 1
    assert subscriber.followers[endpoint].lag_s < 60


def test_all_of_it_works_on_uvloop() -> None:
    async def main() -> None:
        setup, endpoint = Setup(), Endpoint("127.0.0.1", 8000)
        try:
            worker, subscriber = await late_start(setup, endpoint)
            worker.serve(PROMPTS[2])
            await until(lambda: setup.agrees(subscriber, endpoint, worker))
        finally:
            await setup.stop()

    uvloop.run(main())


@pytest.mark.parametrize("layout", ["map", "array"])
async def test_three_lost_batches_are_replayed_by_one_request(setup: Setup, endpoint: Endpoint, layout: str) -> None:
    worker = setup.worker(layout=layout)
    subscriber = setup.subscriber(**worker.ports)
    subscriber.changed([endpoint], [])
    worker.serve(PROMPTS[0])
    await until(lambda: setup.agrees(subscriber, endpoint, worker))
    asked = subscriber.totals()["replays_asked"]
    worker.lost = True
    worker.serve(PROMPTS[1], [7] * 9, [8] * 9)
    worker.lost = False
    worker.serve(PROMPTS[2])
    await until(lambda: setup.agrees(subscriber, endpoint, worker))
    totals = subscriber.totals()
    assert (totals["gaps"], totals["replays_asked"] - asked, totals["lost_batches"]) == (1, 1, 0)
    assert subscriber.followers[endpoint].confidence.level == "complete"


async def test_a_worker_that_restarted_is_forgotten_before_it_publishes_again(setup: Setup, endpoint: Endpoint) -> None:
    worker, subscriber = await late_start(setup, endpoint)
    await worker.restart_publisher()
    await until(lambda: setup.agrees(subscriber, endpoint, worker))
    assert subscriber.totals()["restarts"] == 1
    worker.serve(PROMPTS[3])
    await until(lambda: setup.agrees(subscriber, endpoint, worker))
    assert subscriber.followers[endpoint].confidence.level == "complete"


async def test_a_replay_that_is_never_answered_leaves_a_partial_index_that_goes_on(
    setup: Setup, endpoint: Endpoint
) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as deaf:
        worker = setup.worker(replay_endpoint=None)
        replay_port = deaf.bind_to_random_port("tcp://127.0.0.1")
        subscriber = setup.subscriber(**{**worker.ports, "replay_port": replay_port})
        subscriber.changed([endpoint], [])
        await until(lambda: subscriber.totals()["replays_given_up"])
        worker.serve(PROMPTS[0])
        worker.lost = True
        worker.serve(PROMPTS[1])
        worker.lost = False
        worker.serve(PROMPTS[2])
        await until(lambda: setup.matches(subscriber, endpoint, PROMPTS[2]) == 5)
        assert setup.matches(subscriber, endpoint, PROMPTS[1]) == 0
        assert subscriber.followers[endpoint].confidence.level == "partial"
        assert subscriber.totals()["lost_batches"] == 1


async def test_workers_tell_their_ports_and_those_that_leave_hold_nothing(setup: Setup) -> None:
    config = WorkerConfig(
        model=MODEL,
        engine=EngineConfig(num_gpu_blocks=64, block_size=BLOCK, cost=PRESETS["free"]),
        events=EventsConfig("tcp://*:0", "tcp://*:0"),
    )
    workers = [HttpWorker(config, ChatTokenizer()) for _ in range(2)]
    setup.running += workers
    for worker in workers:
        await worker.start()
    endpoints = [Endpoint("127.0.0.1", worker.port) for worker in workers]
    subscriber = setup.subscriber()
    subscriber.changed(endpoints, [])
    async with aiohttp.ClientSession() as session:
        for endpoint, prompt in zip(endpoints, PROMPTS, strict=False):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            async with session.post(f"http://{endpoint.address}/v1/completions", json=body) as response:
                assert response.status == 200
    for endpoint, prompt in zip(endpoints, PROMPTS, strict=False):
        await until(partial(setup.holds_all, subscriber, endpoint, prompt))
    holder = subscriber.holders[endpoints[0]]
    events = subscriber.totals()["events"]
    subscriber.changed([], endpoints[:1])
    assert setup.index.match(prompt_keys(PROMPTS[0])).device.tolist() == [0]
    assert holder.slot < 0
    assert endpoints[0] not in subscriber.followers
    assert subscriber.totals()["events"] == events


async def test_each_rank_behind_a_port_is_followed_on_the_ports_told_for_it(setup: Setup) -> None:
    config = WorkerConfig(
        model=MODEL,
        engine=EngineConfig(num_gpu_blocks=64, block_size=BLOCK, cost=PRESETS["free"]),
        data_parallel_size=2,
        events=EventsConfig("tcp://*:0", "tcp://*:0"),
    )
    worker = HttpWorker(config, ChatTokenizer())
    setup.running.append(worker)
    await worker.start()
    ranks = [Endpoint("127.0.0.1", worker.port, rank=rank, ranks=2) for rank in range(2)]
    subscriber = setup.subscriber()
    subscriber.changed(ranks, [])
    async with aiohttp.ClientSession() as session:
        for rank, prompt in enumerate(PROMPTS[:2]):
            body, head = {"model": MODEL, "prompt": prompt, "max_tokens": 1}, {"x-data-parallel-rank": str(rank)}
            async with session.post(f"http://{worker.address}/v1/completions", json=body, headers=head) as response:
                assert response.status == 200
    for rank, prompt in enumerate(PROMPTS[:2]):
        await until(partial(setup.holds_all, subscriber, ranks[rank], prompt))
        assert setup.matches(subscriber, ranks[1 - rank], prompt) == 0


async def test_adapters_that_a_worker_is_learnt_to_serve_later_count_too(setup: Setup, endpoint: Endpoint) -> None:
    _, subscriber = await late_start(setup, endpoint)
    assert "a1" not in subscriber.followers[endpoint].ledger.adapters
    endpoint.parents = {"a1": MODEL}
    assert "a1" in subscriber.followers[endpoint].ledger.adapters


async def test_events_wait_for_the_models_name(setup: Setup, endpoint: Endpoint) -> None:
    worker = setup.worker()
    worker.serve(PROMPTS[0])
    names: list[str] = []
    subscriber = Subscriber(
        setup.index, replace(QUICK, **worker.ports), model=lambda endpoint: names[0] if names else None
    )
    setup.running.append(subscriber)
    subscriber.start()
    subscriber.changed([endpoint], [])
    await asyncio.sleep(0.1)
    assert not subscriber.followers
    names.append(MODEL)
    await until(lambda: endpoint in subscriber.followers and setup.agrees(subscriber, endpoint, worker))


class TestBound:
    """Workers that connect are known by their topics."""

    @pytest.fixture
    async def bound(self, setup: Setup) -> Subscriber:
        return setup.subscriber(bind="tcp://127.0.0.1:*")

    @pytest.mark.parametrize("topic", ["kv@127.0.0.1:8000@m", "kv@127.0.0.1@m", "kv@pod-a@m", "pod-a"])
    async def test_a_publisher_is_known_by_address_host_or_name(
        self, setup: Setup, bound: Subscriber, endpoint: Endpoint, topic: str
    ) -> None:
        bound.changed([endpoint, Endpoint("127.0.0.2", 8000, name="pod-b")], [])
        worker = setup.worker(endpoint=address(bound), replay_endpoint=None, topic=topic)
        await self.served(worker, lambda: setup.matches(bound, endpoint, PROMPTS[0]) == 5)
        assert not bound.unknown

    @pytest.mark.parametrize("shared", [False, True], ids=["a port each", "one port"])
    async def test_of_several_ranks_of_a_host_the_batch_names_one(
        self, setup: Setup, bound: Subscriber, shared: bool
    ) -> None:
        """Also where the ranks share the address that the topic names."""
        if shared:
            ranks, topic = [Endpoint("127.0.0.1", 8000, rank=rank, ranks=2) for rank in range(2)], "kv@127.0.0.1:8000@m"
        else:
            ranks, topic = [Endpoint("127.0.0.1", 8000 + rank, rank=rank) for rank in range(2)], "kv@127.0.0.1@m"
        bound.changed(ranks, [])
        worker = setup.worker(endpoint=address(bound), replay_endpoint=None, topic=topic, data_parallel_rank=1)
        await self.served(worker, lambda: setup.matches(bound, ranks[1], PROMPTS[0]) == 5)
        assert setup.matches(bound, ranks[0], PROMPTS[0]) == 0

    async def test_unknown_publishers_are_counted_by_name_and_the_names_are_bounded(
        self, setup: Setup, bound: Subscriber, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
    ) -> None:
        bound.changed([endpoint], [])
        worker = setup.worker(endpoint=address(bound), replay_endpoint=None, topic="kv@stranger@m")
        with caplog.at_level(logging.WARNING):
            await self.served(worker, lambda: bound.totals()["unknown_publisher"])
        assert set(bound.unknown) == {"kv@stranger@m"}
        assert "stranger" in caplog.text
        assert len(caplog.records) == 1
        for n in range(300):
            bound._unknown(str(n))
        assert len(bound.unknown) == 257
        assert bound.unknown[""] == 45

    async def test_a_stranger_that_joins_the_pool_is_known_from_then_on(
        self, setup: Setup, bound: Subscriber, endpoint: Endpoint
    ) -> None:
        worker = setup.worker(endpoint=address(bound), replay_endpoint=None, topic="kv@pod-a@m")
        await self.served(worker, lambda: bound.totals()["unknown_publisher"])
        bound.changed([endpoint], [])
        worker.serve(PROMPTS[3])
        await until(lambda: setup.matches(bound, endpoint, PROMPTS[3]) == 5)
        assert bound.followers[endpoint].confidence.level == "partial"

    async def test_with_a_replay_port_a_worker_that_connects_is_asked_for_what_came_before(
        self, setup: Setup, endpoint: Endpoint
    ) -> None:
        probe = setup.worker()
        port = probe.ports["replay_port"]
        await probe.publisher.stop()
        setup.running.remove(probe)
        bound = setup.subscriber(bind="tcp://127.0.0.1:*", replay_port=port)
        bound.changed([endpoint], [])
        worker = setup.worker(endpoint=address(bound), replay_endpoint=f"tcp://*:{port}", topic="kv@pod-a@m")
        worker.lost = True
        worker.serve(PROMPTS[0])
        worker.lost = False
        await self.served(worker, lambda: setup.matches(bound, endpoint, PROMPTS[0]) == 5)
        assert bound.followers[endpoint].confidence.level == "complete"

    async def test_malformed_messages_are_counted_too(self, setup: Setup, bound: Subscriber) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as publisher:
            publisher.connect(address(bound))
            async with asyncio.timeout(10):
                while not bound.unknown:
                    await publisher.send_multipart([b"kv@x", b"junk"])
                    await asyncio.sleep(0.01)
        assert list(bound.unknown) == ["malformed: b'kv@x'"]

    async def test_eight_publishers_at_once_leave_the_index_right(self, setup: Setup, bound: Subscriber) -> None:
        endpoints = [Endpoint("127.0.0.1", port) for port in range(8)]
        bound.changed(endpoints, [])
        workers = [
            setup.worker(endpoint=address(bound), replay_endpoint=None, topic=f"kv@{e.address}@m") for e in endpoints
        ]
        random = Random(1)
        for endpoint, worker in zip(endpoints, workers, strict=True):
            await self.served(worker, partial(setup.holds_all, bound, endpoint, PROMPTS[0]))
        for turn in range(200):
            for worker in workers:
                worker.serve([random.randrange(3)] * 6 + random.choice(PROMPTS)[: random.randrange(20)])
            if turn % 20 == 0:
                await asyncio.sleep(0)
                bound.changed([], endpoints[7:])
                bound.changed(endpoints[7:], [])
        for worker in workers:
            worker.serve([5] * (2 * BLOCK))
        for endpoint, worker in zip(endpoints[:7], workers, strict=False):
            await until(partial(setup.holds_all, bound, endpoint, [5] * (2 * BLOCK)))
            assert setup.agrees(bound, endpoint, worker)
            assert len(bound.followers[endpoint].ledger) == worker.manager.block_pool.num_cached
        counts = setup.index.all_blocks([bound.holders[e] for e in endpoints[:7]])
        assert [c[0] for c in counts] == [w.manager.block_pool.num_cached for w in workers[:7]]

    @staticmethod
    async def served(worker: Publishing, condition: Callable[[], object]) -> None:
        """Serve PROMPTS[0] and others once the connection, which nobody is told of, stands."""
        serial: Iterator[int] = iter(range(1000, 100_000))
        worker.serve(PROMPTS[0])
        while not condition():
            # Until it stands, batches are lost: have it all told again.
            worker.begin(PROMPTS[0], report=True)
            worker.serve([next(serial)] * BLOCK)
            worker.finish(0)
            await asyncio.sleep(0.01)


async def test_a_worker_that_publishes_nothing_and_answers_nothing_is_named_once(
    setup: Setup, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    worker = setup.worker(replay_endpoint=None)
    subscriber = setup.subscriber(silent_s=0.2, **worker.ports)
    subscriber.changed([endpoint], [])
    with caplog.at_level(logging.INFO):
        await until(lambda: subscriber.totals()["silent"])
        await asyncio.sleep(0.6)
        assert "127.0.0.1:8000: has published no KV events" in caplog.text
        assert subscriber.totals()["silent"] == 1
        worker.serve(PROMPTS[0])
        await until(lambda: "publishes KV events now" in caplog.text)


async def test_a_worker_that_has_published_nothing_but_answers_is_not_silent(setup: Setup, endpoint: Endpoint) -> None:
    worker = setup.worker()
    subscriber = setup.subscriber(silent_s=0.2, **worker.ports)
    subscriber.changed([endpoint], [])
    await until(lambda: subscriber.totals()["replays_answered"])
    await asyncio.sleep(0.6)
    assert subscriber.totals()["silent"] == 0
    assert subscriber.followers[endpoint].confidence.level == "complete"


async def test_a_worker_that_tells_no_source_is_asked_again_and_named(setup: Setup, endpoint: Endpoint) -> None:
    subscriber = setup.subscriber(silent_s=0.2)
    subscriber.changed([endpoint], [])
    await until(lambda: subscriber.totals()["no_source"] > 1 and subscriber.totals()["silent"])


async def test_one_configured_port_for_two_workers_of_a_host_is_an_error_in_the_log(
    setup: Setup, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    subscriber = setup.subscriber(**setup.worker().ports)
    subscriber.changed([endpoint, Endpoint("127.0.0.9", endpoint.port)], [])
    assert "one port for several" not in caplog.text
    subscriber.changed([Endpoint(endpoint.host, endpoint.port + 1)], [])
    assert f"{endpoint.key}, {endpoint.host}:{endpoint.port + 1}" in caplog.text
    assert subscriber.counters["one_port"] == 1


async def test_a_burst_is_taken_in_slices_between_which_the_loop_turns(setup: Setup, endpoint: Endpoint) -> None:
    worker = setup.worker()
    for n in range(400):
        worker.serve([n] * 9)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.0004  # so that a slice of 2 ms ends after a handful of looks at the clock
        return now

    settings = replace(QUICK, follower=FollowerSettings(SequenceSettings(answer_s=1e9)), **worker.ports)
    subscriber = Subscriber(setup.index, settings, model=lambda endpoint: MODEL, clock=clock)
    setup.running.append(subscriber)
    subscriber.start()
    subscriber.changed([endpoint], [])
    await until(lambda: subscriber.totals()["replays_asked"])
    steps: list[int] = []
    while not steps or steps[-1] < 400:
        await asyncio.sleep(0)
        steps.append(subscriber.totals()["batches"])
    assert max(b - a for a, b in pairwise([0, *steps])) < 100


async def test_stopping_leaves_no_task_behind(setup: Setup, endpoint: Endpoint) -> None:
    _, subscriber = await late_start(setup, endpoint)
    bound = setup.subscriber(bind="tcp://127.0.0.1:*")
    bound.changed([Endpoint("127.0.0.1", 1)], [])
    await subscriber.stop()
    await bound.stop()
    setup.running = [x for x in setup.running if not isinstance(x, Subscriber)]
    publisher_tasks = 1
    await until(lambda: len(asyncio.all_tasks()) == 1 + publisher_tasks)


async def test_an_address_that_cannot_be_bound_is_an_error_that_names_it(setup: Setup) -> None:
    with pytest.raises(ValueError, match="tcp://nowhere:1 cannot be bound"):
        setup.subscriber(bind="tcp://nowhere:1")
