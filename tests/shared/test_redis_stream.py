"""Two pickers and a real redis-server: they share picks, and go on alone whatever becomes of the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from epp.endpoint import Endpoint, Pool
from epp.kvcache.producer import ApproxPrefixCache
from epp.shared.redis_stream import RedisStream, parse_url
from epp.shared.replica import ReplicaSettings
from epp.shared.state import LOST, SharedState
from tests.pools import plugin, request
from tests.shared.redis_server import RedisServer, redis_server

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

QUICK = ReplicaSettings(heartbeat_s=0.3, silence_s=1.5, settle_s=0.8)
TEXT = bytes(range(256)) * 400


class Replica:
    """A picker as far as it shares: three endpoints, the approximate history."""

    def __init__(self, url: str) -> None:
        self.pool = Pool(Endpoint("10.0.0.1", 8000 + i) for i in range(3))
        self.history = plugin(ApproxPrefixCache)
        plugins = {"history": self.history}
        self.state = SharedState(self.pool, lambda: plugins, origin=Random().getrandbits(48) or 1, now=time.monotonic())
        self.stream = RedisStream(parse_url(url), self.state, clock=time.monotonic, random=Random(1))

    def pick(self, row: int, text: bytes = TEXT) -> Callable[[], None]:
        """Send a prompt to an endpoint; what is to be called at its end."""
        asked, endpoint = request(text), self.pool.endpoints[row]
        self.history.produce(asked, self.pool.candidates(0.0))
        load = endpoint.acquire(asked.prompt_tokens, 0.0)
        self.history.picked(asked, {"default": endpoint})
        number = self.state.picked(asked, endpoint)

        def end() -> None:
            load.release()
            self.state.ended(number)

        return end

    def cached(self, text: bytes = TEXT) -> list[float]:
        """Tokens of a prompt that each endpoint is believed to hold."""
        candidates = self.pool.candidates(0.0)
        self.history.produce(request(text), candidates)
        tokens: list[float] = candidates.cached_tokens.tolist()
        return tokens

    @property
    def in_flight(self) -> list[float]:
        return [e.get("in_flight") for e in self.pool.endpoints]

    async def ticking(self) -> None:
        while True:
            self.state.tick(time.monotonic())
            await asyncio.sleep(0.1)


@asynccontextmanager
async def running(url: str) -> AsyncIterator[Replica]:
    replica = Replica(url)
    replica.stream.start()
    ticking = asyncio.create_task(replica.ticking())
    try:
        yield replica
    finally:
        ticking.cancel()
        await replica.stream.stop()


@asynccontextmanager
async def pair(server: RedisServer) -> AsyncIterator[tuple[Replica, Replica]]:
    """Two replicas that hear each other."""
    async with AsyncExitStack() as stack:
        await server.ready()
        one = await stack.enter_async_context(running(server.url))
        other = await stack.enter_async_context(running(server.url))
        await until(lambda: all(r.stream.connected and r.state.replica.peers == 1 for r in (one, other)))
        yield one, other


async def until(condition: Callable[[], bool], patience_s: float = 20.0) -> None:
    """Wait for it; fail when it does not come."""
    ends = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < ends, "it does not come"
        await asyncio.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path) -> object:
    with redis_server(tmp_path) as started:
        yield started


async def test_a_pick_counts_at_the_other_replica_within_two_messages(server: RedisServer) -> None:
    async with pair(server) as (one, other):
        before = one.state.replica.counters["messages_out"]
        end = one.pick(1)
        await until(lambda: other.in_flight == [0, 1, 0])
        assert one.state.replica.counters["messages_out"] - before <= 2
        await until(lambda: other.cached()[1] > 25_000)
        assert other.cached() == one.cached()
        assert [e.in_flight for e in other.pool.endpoints] == [0, 0, 0]
        end()
        await until(lambda: other.in_flight == [0, 0, 0])
        assert one.stream.lag_s < 10


async def test_a_burst_over_two_replicas_adds_up_and_ends_at_nothing(server: RedisServer) -> None:
    async with pair(server) as (one, other):
        ends = [replica.pick(i % 3, TEXT[: 4000 + 64 * i]) for i in range(300) for replica in (one, other)]
        await until(lambda: one.in_flight == other.in_flight == [200, 200, 200])
        for end in ends:
            end()
        await until(lambda: one.in_flight == other.in_flight == [0, 0, 0])


async def test_a_replica_that_leaves_takes_its_requests_along_at_once(server: RedisServer) -> None:
    async with running(server.url) as one:
        async with running(server.url) as other:
            await until(lambda: one.state.replica.peers == 1)
            other.pick(0)
            await until(lambda: one.in_flight == [1, 0, 0])
        assert one.state.replica.counters["peers_lost"] == 0
        await until(lambda: one.in_flight == [0, 0, 0], 2.0)
        assert one.state.replica.counters["peers_lost"] == 0


async def test_a_server_that_dies_leaves_each_alone_and_told_until_it_is_back(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "epp.shared")
    async with pair(server) as (one, other):
        one.pick(1)
        await until(lambda: other.in_flight == [0, 1, 0])
        server.kill()
        await until(lambda: one.state.reason == other.state.reason == LOST)
        await until(lambda: other.in_flight == [0, 0, 0])
        other.pick(2)
        assert other.in_flight == [0, 0, 1]
        lines = len(caplog.records)
        failures = one.stream.counters["failures"]
        await until(lambda: one.stream.counters["failures"] > failures + 1)
        assert len(caplog.records) == lines
        server.start()
        await until(lambda: one.in_flight == other.in_flight == [0, 1, 1])
        await until(lambda: one.state.reason == other.state.reason == "")
        one.pick(0, TEXT[:8000])
        await until(lambda: other.cached(TEXT[:8000])[0] > 0)
        assert "deciding alone" in caplog.text
        assert caplog.messages[-1].endswith("connected")


async def test_a_server_that_is_not_there_at_the_start_is_found_later(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    async with running(server.url) as one, running(server.url) as other:
        one.pick(1)
        await until(lambda: one.stream.counters["failures"] >= 2)
        assert one.state.reason == LOST
        try:
            server.start()
            await until(lambda: other.in_flight == [0, 1, 0])
        finally:
            server.kill()


async def test_a_flushed_server_is_filled_again(server: RedisServer) -> None:
    async with pair(server) as (one, other):
        one.pick(1)
        await until(lambda: other.in_flight == [0, 1, 0])
        server.command("FLUSHALL")
        one.pick(1, TEXT[::-1])
        await until(lambda: other.in_flight == [0, 2, 0])


async def test_a_stream_that_begins_anew_with_lower_numbers_is_found(server: RedisServer) -> None:
    async with pair(server) as (one, other):
        server.command("XADD", "kvsteer", "9999999999999-0", "m", "")  # as if the clock had been ahead
        await until(lambda: one.state.replica.counters["messages_unreadable"] == 1)
        server.command("FLUSHALL")
        one.pick(1)
        await until(lambda: other.in_flight == [0, 1, 0])


@pytest.mark.parametrize("how", ["client pause", "debug sleep", "frozen"])
async def test_a_server_that_pauses_delays_nobody_and_is_made_up_for(server: RedisServer, how: str) -> None:
    async with pair(server) as (one, other):
        one.pick(1)
        await until(lambda: other.in_flight == [0, 1, 0])
        longest = asyncio.create_task(longest_wait())
        sleeping = None
        if how == "client pause":
            server.command("CLIENT", "PAUSE", 4000)
        elif how == "debug sleep":
            sleeping = asyncio.create_task(asyncio.to_thread(server.command, "DEBUG", "SLEEP", 4))
        else:
            server.freeze()
        end = one.pick(2)
        await until(lambda: one.state.reason == other.state.reason == LOST)
        await until(lambda: other.in_flight == [0, 0, 0])
        if how == "frozen":
            server.thaw()
        await until(lambda: other.in_flight == [0, 1, 1])
        end()
        await until(lambda: other.in_flight == [0, 1, 0])
        await until(lambda: one.state.reason == other.state.reason == "")
        longest.cancel()
        if sleeping is not None:
            await sleeping


async def longest_wait() -> None:
    """Fails when the loop was held up for as long as an answer may take."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.01)
        assert time.monotonic() - before < 5


async def test_a_full_server_is_a_failure_with_its_words_and_hearing_goes_on(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(server) as (one, other):
        server.command("CONFIG", "SET", "maxmemory", "1")
        one.pick(1)
        await until(lambda: one.state.reason == LOST)
        assert "maxmemory" in caplog.text
        server.command("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: other.in_flight == [0, 1, 0])
        await until(lambda: one.state.reason == "")


async def test_the_stream_stays_bounded(server: RedisServer) -> None:
    await server.ready()
    async with running(f"{server.url}&maxlen=100&interval_ms=1") as one:
        await until(lambda: one.stream.connected)
        for i in range(600):
            one.pick(i % 3, TEXT[:640])()
            await asyncio.sleep(0.002)
        await until(lambda: one.state.replica.echoed > 300)
        length = server.command("XLEN", "kvsteer")
        assert isinstance(length, int)
        assert 100 <= length <= 400


async def test_a_password_is_used_and_never_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "epp.shared")
    with redis_server(tmp_path, "--requirepass", "right") as server:
        wrong, right = (server.url.replace("//", f"//:{word}@") for word in ("wr0ng", "right"))
        async with running(wrong) as shut, running(right) as let_in:
            await until(lambda: let_in.stream.connected and shut.stream.counters["failures"] >= 1)
            assert not shut.stream.connected
    assert "wr0ng" not in caplog.text


async def test_a_late_starter_learns_what_its_peer_knows(server: RedisServer) -> None:
    await server.ready()
    async with running(server.url) as one:
        await until(lambda: one.stream.connected)
        texts = [bytes([i]) * 100 + TEXT for i in range(40)]
        for i, text in enumerate(texts):
            one.pick(i % 3, text)()
        async with running(server.url) as late:
            assert late.cached(texts[0]) == [0, 0, 0]
            await until(lambda: late.state.replica.counters["bootstraps_done"] == 1)
            assert [late.cached(text) for text in texts] == [one.cached(text) for text in texts]
            assert one.state.replica.counters["bootstraps_given"] == 1
            assert one.state.replica.counters["bootstraps_asked"] == 0
            grown = texts[7] + b"and on" * 100
            late.pick(1, grown)
            await until(lambda: one.cached(grown) == late.cached(grown))
            assert late.state.replica.counters["unknown_chains"] == 0


async def test_a_snapshot_larger_than_what_lies_on_the_server_at_once_arrives_whole(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epp.shared.state.CHUNK_BYTES", 1000)
    monkeypatch.setattr("epp.shared.redis_stream.CHUNKS_AHEAD", 2)
    await server.ready()
    async with running(server.url) as one:
        await until(lambda: one.stream.connected)
        texts = [bytes([i]) * 100 + TEXT for i in range(20)]
        for text in texts:
            one.pick(0, text)()
        async with running(server.url) as late:
            await until(lambda: late.state.replica.counters["bootstraps_done"] == 1)
            assert [late.cached(text) for text in texts] == [one.cached(text) for text in texts]
