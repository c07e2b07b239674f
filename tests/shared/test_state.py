"""What replicas share, tied to a pool and to plugins that learn; and its file from one run to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from epp.endpoint import Endpoint, Pool
from epp.kvcache.blocks import Keys
from epp.kvcache.producer import ApproxPrefixCache
from epp.kvcache.tier import Tier
from epp.request import InferenceRequest
from epp.shared.learning import End, Holding
from epp.shared.messages import Chunk
from epp.shared.redis_stream import parse_url
from epp.shared.state import SharedState
from epp.shared.state_file import MAGIC, MAX_AGE_S, Unusable, restore, save
from tests.pools import plugin, request

WALL = 1.8e9
TEXT = bytes(range(256)) * 40


class Blocks:
    """A learner of blocks by tier."""

    def __init__(self, name: str = "blocks") -> None:
        self.name = name
        self.held: list[Holding] = []
        self.ended: list[float] = []
        self.fails = False
        self.ready = True

    def learners(self) -> Sequence[Blocks]:
        return (self,)

    def taught(self, request: InferenceRequest) -> Sequence[Keys]:
        if self.fails:
            raise RuntimeError("taught")
        return (np.arange(100, dtype=np.uint64),)

    def learn(self, endpoint: Endpoint, keys: Keys, now: float) -> End | None:
        if self.fails:
            raise RuntimeError("learn")
        return self.ended.append

    def known(self) -> Iterator[list[Holding]]:
        yield self.held
        if self.fails:
            raise RuntimeError("known")

    def believe(self, holding: Holding, now: float) -> bool:
        if self.fails:
            raise RuntimeError("believe")
        if self.ready:
            self.held.append(holding)
        return self.ready


class Side:
    """One replica: pool, approximate history, learner of blocks."""

    def __init__(self, origin: int, ports: range = range(8000, 8003)) -> None:
        self.pool = Pool(Endpoint("10.0.0.1", port) for port in ports)
        self.history, self.blocks = plugin(ApproxPrefixCache), Blocks()
        plugins: dict[str, object] = {"history": self.history, "blocks": self.blocks, "other": object()}
        self.state = SharedState(self.pool, lambda: plugins, origin=origin, now=0.0)

    def pick(self, row: int, text: bytes = TEXT) -> int:
        asked, endpoint = request(text), self.pool.endpoints[row]
        self.history.produce(asked, self.pool.candidates(0.0))
        self.history.picked(asked, {"default": endpoint})
        return self.state.picked(asked, endpoint)

    def cached(self, text: bytes = TEXT) -> list[float]:
        candidates = self.pool.candidates(0.0)
        self.history.produce(request(text), candidates)
        tokens: list[float] = candidates.cached_tokens.tolist()
        return tokens

    def tell(self, other: Side, now: float = 0.0) -> None:
        message = self.state.outgoing(now)
        if message is not None:
            other.state.replica.heard(message, now)


def test_a_pick_is_learned_by_every_learner_and_its_end_told_to_those_that_want_it() -> None:
    one, other = Side(1), Side(2)
    number = one.pick(1)
    one.tell(other)
    assert other.cached() == one.cached()
    assert other.cached()[1] > 0
    one.state.ended(number)
    one.tell(other, 0.5)
    assert other.blocks.ended == [0.5]


def test_only_the_picks_of_endpoints_in_the_pool_matter() -> None:
    one, other = Side(1), Side(2, range(9000, 9002))
    one.pool.endpoints[0].acquire(100, 0.0)
    one.pick(0)
    one.tell(other)
    assert other.cached() == [0, 0]
    late = Endpoint("10.0.0.1", 8000)
    other.pool.update(add=[late])
    other.state.changed([late], [], 0.0)
    assert late.get("in_flight") == 1


def test_prompts_of_others_weigh_until_their_prefill_should_be_done() -> None:
    one, other = Side(1), Side(2)
    endpoint = other.pool.endpoints[0]
    endpoint.set("prefill_rate", 1000.0)
    one.pool.endpoints[0].acquire(5000, 0.0)
    one.tell(other, 10.0)
    assert endpoint.get("in_flight_tokens") == 5000
    assert endpoint.get("prefill_until") == 15.0
    one.pool.endpoints[0].acquire(1000, 0.0)
    one.tell(other, 11.0)
    assert endpoint.get("prefill_until") == 16.0


def test_a_learner_that_fails_costs_its_own_part_only() -> None:
    one, other = Side(1), Side(2)
    one.blocks.fails = other.blocks.fails = True
    one.blocks.held.append(Holding(one.pool.endpoints[0], np.arange(5, dtype=np.uint64), Tier.CPU))
    one.pick(1)
    one.tell(other)
    for chunk in one.state.snapshot():
        other.state.take(chunk, 0.0)
    assert other.cached() == one.cached()
    assert one.state.faults == 2
    assert other.state.faults == 1


def filled() -> Side:
    side = Side(1)
    for i in range(30):
        side.pick(i % 3, bytes([i]) * 1000 + TEXT)
    side.blocks.held = [Holding(side.pool.endpoints[2], np.arange(20_000, dtype=np.uint64), Tier.CPU, 1)]
    return side


def texts() -> list[bytes]:
    return [bytes([i]) * 1000 + TEXT for i in range(30)]


def assert_same(one: Side, other: Side) -> None:
    assert [other.cached(text) for text in texts()] == [one.cached(text) for text in texts()]
    assert {(h.endpoint.address, h.tier, h.group) for h in other.blocks.held} == {("10.0.0.1:8002", Tier.CPU, 1)}
    assert np.concatenate([h.keys for h in other.blocks.held]).tolist() == list(range(20_000))


def test_a_snapshot_makes_an_empty_replica_know_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.shared.state.CHUNK_BYTES", 2000)
    one, other = filled(), Side(2)
    chunks = list(one.state.snapshot())
    assert len(chunks) > 5
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for chunk in chunks:
        other.state.take(chunk, 0.0)
    assert_same(one, other)


def test_blocks_of_endpoints_that_are_not_there_yet_wait_for_them_for_a_minute() -> None:
    one, other = filled(), Side(2, range(0))
    for chunk in one.state.snapshot():
        other.state.take(chunk, 0.0)
    endpoints = [Endpoint("10.0.0.1", port) for port in range(8000, 8003)]
    other.pool.update(add=[endpoints[0]])
    other.state.changed(endpoints[:1], [], 59.0)
    other.pool.update(add=[endpoints[2]])
    other.state.tick(59.5)
    assert [other.cached(text) for text in texts()] == [one.cached(text)[::2] for text in texts()]
    other.state.tick(61.0)
    other.pool.update(add=[endpoints[1]])
    other.state.changed(endpoints[1:2], [], 61.0)
    assert not any(other.cached(text)[2] for text in texts())


def test_what_a_learner_cannot_take_yet_is_offered_again() -> None:
    one, other = filled(), Side(2)
    other.blocks.ready = False
    for chunk in one.state.snapshot():
        other.state.take(chunk, 0.0)
    other.state.tick(1.0)
    assert other.blocks.held == []
    other.blocks.ready = True
    other.state.tick(2.0)
    assert_same(one, other)


def test_a_snapshot_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.shared.state.MAX_SNAPSHOT_BYTES", 1000)
    chunks = list(filled().state.snapshot())
    assert sum(len(p.keys) for chunk in chunks for known in chunk.known for p in known.passages) < 50_000


def test_a_file_brings_back_what_was_known(tmp_path: Path) -> None:
    one, other = filled(), Side(2)
    size = save(tmp_path / "state", one.state.snapshot(), WALL)
    assert (tmp_path / "state").stat().st_size == size
    for chunk in restore(tmp_path / "state", WALL + 60):
        other.state.take(chunk, 0.0)
    assert_same(one, other)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_file_that_is_too_old_or_from_the_future_is_not_used(tmp_path: Path) -> None:
    save(tmp_path / "state", filled().state.snapshot(), WALL)
    for wall in (WALL + MAX_AGE_S + 1, WALL - 1):
        with pytest.raises(Unusable, match="old"):
            restore(tmp_path / "state", wall)


def test_a_file_of_another_version_is_not_used(tmp_path: Path) -> None:
    save(tmp_path / "state", filled().state.snapshot(), WALL)
    data = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(data.replace(MAGIC, b"kvsteer-state 999\n"))
    with pytest.raises(Unusable, match="version"):
        restore(tmp_path / "state", WALL)


def test_a_file_damaged_anywhere_is_not_used(tmp_path: Path) -> None:
    save(tmp_path / "state", filled().state.snapshot(), WALL)
    data = (tmp_path / "state").read_bytes()
    for at in (0, len(MAGIC) + 9, len(MAGIC) + 20, len(MAGIC) + 24, len(data) // 2, len(data) - 1):
        (tmp_path / "state").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(Unusable):
            restore(tmp_path / "state", WALL)
        (tmp_path / "state").write_bytes(data[:at])
        with pytest.raises(Unusable):
            restore(tmp_path / "state", WALL)
    (tmp_path / "state").write_bytes(data + b"x")
    with pytest.raises(Unusable):
        restore(tmp_path / "state", WALL)


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path: Path) -> None:
    save(tmp_path / "state", filled().state.snapshot(), WALL)
    data = (tmp_path / "state").read_bytes()

    def breaking() -> Iterator[Chunk]:
        yield next(filled().state.snapshot())
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "state", breaking(), WALL)
    assert (tmp_path / "state").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://a:1/0", "redis://HOST:PORT/DB"),
        ("redis://", "host is missing"),
        ("redis://a:99999/0", "Port out of range"),
        ("redis://a:1/x", "database is a number"),
        ("redis://a:1/0?maxlen=1", "from 100 to"),
        ("redis://a:1/0?maxlen=many", "from 100 to"),
        ("redis://a:1/0?strem=x", "strem=x is not known"),
        ("redis://a:1/0?stream=", "is not known"),
    ],
)
def test_a_wrong_address_is_told_in_words(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_url(url)


def test_an_address_says_where_the_stream_is_and_keeps_the_password_to_itself() -> None:
    settings = parse_url("rediss://user:secret@redis.test/2?stream=pool-a&maxlen=5000&interval_ms=20")
    assert settings.url == "rediss://user:secret@redis.test/2"
    assert (settings.where, settings.stream) == ("redis.test:6379", "pool-a")
    assert (settings.maxlen, settings.interval_ms) == (5000, 20)
    assert parse_url("unix:///run/redis.sock").where == "/run/redis.sock"
