"""The `--endpoint` argument, and how sources become a pool."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.discovery.membership import Discovery, EndpointSpec, Membership, Publish
from epp.discovery.static import StaticDiscovery, parse_endpoint
from epp.endpoint import Endpoint, Pool


class Source:
    """A source driven by hand."""

    def __init__(self, name: str = "hand", synced: bool = True) -> None:
        self.name = name
        self.synced = synced
        self.trouble = ""
        self.counters: Counter[str] = Counter()

    async def start(self, publish: Publish) -> None:
        self.publish = publish

    async def stop(self) -> None:
        pass


async def membership(pool: Pool, *sources: Discovery) -> Membership:
    result = Membership(pool, clock=lambda: 100.0)
    await result.start(sources)
    return result


def test_an_address_with_a_port_is_one_endpoint() -> None:
    assert parse_endpoint("10.0.0.1:8000") == [EndpointSpec("10.0.0.1", 8000)]
    assert parse_endpoint("localhost:8000") == [EndpointSpec("127.0.0.1", 8000)]


def test_an_ipv6_address_stands_in_brackets_and_is_spelled_one_way() -> None:
    assert parse_endpoint("[FD00:0:0::1]:8000") == [EndpointSpec("fd00::1", 8000)]


def test_a_port_range_is_the_ranks_of_one_host() -> None:
    specs = parse_endpoint("10.0.0.1:8000-8002=name=w0,role=decode,zone=a")
    assert [(s.port, s.rank, s.name) for s in specs] == [
        (8000, 0, "w0-rank-0"),
        (8001, 1, "w0-rank-1"),
        (8002, 2, "w0-rank-2"),
    ]
    assert specs[0].labels == {"llm-d.ai/role": "decode", "zone": "a"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10.0.0.1", "write HOST:PORT"),
        (":8000", "write HOST:PORT"),
        ("", "write HOST:PORT"),
        ("10.0.0.1:", "'' is not a port"),
        ("10.0.0.1:0", "'0' is not a port"),
        ("10.0.0.1:65536", "'65536' is not a port"),
        ("10.0.0.1:80x", "'80x' is not a port"),
        ("10.0.0.1:٨٠", "is not a port"),
        ("10.0.0.1:8007-8000", "runs backwards"),
        ("10.0.0.1:1-65535", "more than 64 ports"),
        ("fd00::1:8000", "in brackets"),
        ("[fe80::1%eth0]:8000", "has a zone"),
        ("worker:8000", "not an IP address (names are for --dns)"),
        ("10.0.0.1:8000=zone", "'zone' is not KEY=VALUE"),
        ("10.0.0.1:8000=zone=a,zone=b", "zone is given twice"),
        ("10.0.0.1:8000=role=prefil", "the role 'prefil' is none of prefill, decode"),
        ("10.0.0.1:8000=engine=vlm", "the engine 'vlm' is none of auto, vllm"),
    ],
)
def test_an_argument_that_cannot_be_read_says_which_and_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match="endpoint ") as error:
        parse_endpoint(text)
    assert str(error.value).startswith(f"endpoint {text!r}: ")
    assert reason in str(error.value)


@given(st.text(max_size=40))
def test_any_argument_is_read_or_refused_with_a_value_error(text: str) -> None:
    try:
        specs = parse_endpoint(text)
    except ValueError:
        return
    assert specs


def test_an_address_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"port 8001 of 10\.0\.0\.1 is given twice"):
        StaticDiscovery(["10.0.0.1:8000-8001", "10.0.0.1:8001"])


async def test_the_static_list_fills_the_pool_and_is_synced() -> None:
    pool = Pool()
    source = StaticDiscovery(["10.0.0.1:8000", "[fd00::1]:8000=engine=sglang"])
    members = await membership(pool, source)
    assert [(e.address, e.engine) for e in pool.endpoints] == [("10.0.0.1:8000", "auto"), ("[fd00::1]:8000", "sglang")]
    assert members.synced


async def test_endpoints_still_named_stay_the_same_objects_with_their_counts() -> None:
    pool = Pool()
    source = Source()
    members = await membership(pool, source)
    changes: list[tuple[list[Endpoint], list[Endpoint]]] = []
    members.listeners.append(lambda joined, left: changes.append((list(joined), list(left))))
    source.publish([EndpointSpec("10.0.0.1", 8000), EndpointSpec("10.0.0.2", 8000)])
    first, second = pool.endpoints
    load = first.acquire(10, now=0.0)
    source.publish([EndpointSpec("10.0.0.1", 8000), EndpointSpec("10.0.0.3", 8000)])
    assert pool.by_key["10.0.0.1:8000"] is first
    assert first.in_flight == 1
    assert changes[-1] == ([pool.by_key["10.0.0.3:8000"]], [second])
    load.release()


async def test_a_port_that_is_no_longer_named_leaves_at_once() -> None:
    """Ports taken out of a pool stayed selectable elsewhere."""
    pool = Pool()
    source = Source()
    await membership(pool, source)
    source.publish([EndpointSpec("10.0.0.1", 8000), EndpointSpec("10.0.0.1", 8001, rank=1)])
    source.publish([EndpointSpec("10.0.0.1", 8000)])
    assert [e.address for e in pool.candidates(0.0)] == ["10.0.0.1:8000"]


async def test_new_labels_are_put_on_the_endpoint_where_it_is() -> None:
    pool = Pool()
    source = Source()
    members = await membership(pool, source)
    source.publish([EndpointSpec("10.0.0.1", 8000)])
    endpoint = pool.endpoints[0]
    version = pool.version
    source.publish([EndpointSpec("10.0.0.1", 8000, labels={"llm-d.ai/engine-type": "sglang"})])
    assert pool.endpoints == [endpoint]
    assert endpoint.engine == "sglang"
    assert pool.version > version
    assert members.counters["relabelled"] == 1


async def test_another_name_at_the_same_address_is_another_worker() -> None:
    pool = Pool()
    source = Source()
    await membership(pool, source)
    source.publish([EndpointSpec("10.0.0.1", 8000, name="pod-a")])
    old = pool.endpoints[0]
    source.publish([EndpointSpec("10.0.0.1", 8000, name="pod-b")])
    assert pool.endpoints[0] is not old
    assert old.pool is None


async def test_sources_are_united_by_address_and_the_first_wins() -> None:
    pool = Pool()
    a, b = Source("a"), Source("b")
    await membership(pool, a, b)
    b.publish([EndpointSpec("10.0.0.1", 8000, labels={"from": "b"}), EndpointSpec("10.0.0.2", 8000)])
    a.publish([EndpointSpec("10.0.0.1", 8000, labels={"from": "a"})])
    assert {e.address: e.labels.get("from") for e in pool.endpoints} == {"10.0.0.1:8000": "a", "10.0.0.2:8000": None}
    a.publish([])
    assert pool.by_key["10.0.0.1:8000"].labels == {"from": "b"}


async def test_the_first_endpoints_need_no_slow_start_and_later_ones_do() -> None:
    pool = Pool()
    source = Source(synced=False)
    await membership(pool, source)
    source.publish([EndpointSpec("10.0.0.1", 8000)])
    source.synced = True
    source.publish([EndpointSpec("10.0.0.1", 8000), EndpointSpec("10.0.0.2", 8000)])
    assert [e.get("ready_at") for e in pool.endpoints] == [float("-inf"), 100.0]


async def test_two_sources_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="hand is given twice"):
        await membership(Pool(), Source(), Source())


def test_ranks_behind_one_port_are_endpoints_of_one_address() -> None:
    specs = parse_endpoint("10.0.0.1:8000=dp=2,name=w,zone=a")
    assert [(s.port, s.rank, s.ranks, s.name) for s in specs] == [(8000, 0, 2, "w-rank-0"), (8000, 1, 2, "w-rank-1")]
    assert specs[1].labels == {"zone": "a"}
    assert [(s.port, s.rank, s.name) for s in parse_endpoint("10.0.0.1:1-2=dp=2,name=w")] == [
        (1, 0, "w-1-rank-0"),
        (1, 1, "w-1-rank-1"),
        (2, 0, "w-2-rank-0"),
        (2, 1, "w-2-rank-1"),
    ]
    assert parse_endpoint("10.0.0.1:8000=dp=1") == parse_endpoint("10.0.0.1:8000")


@pytest.mark.parametrize("count", ["0", "-1", "two", "", "1025", "1" * 5000])
def test_a_number_of_ranks_that_cannot_be_is_refused(count: str) -> None:
    with pytest.raises(ValueError, match="is not a number of data-parallel ranks"):
        parse_endpoint(f"10.0.0.1:8000=dp={count}")


def test_a_port_with_and_without_ranks_is_given_twice() -> None:
    with pytest.raises(ValueError, match="is given twice"):
        StaticDiscovery(["10.0.0.1:8000=dp=2", "10.0.0.1:8000"])


async def test_where_sources_disagree_about_ranks_the_first_wins() -> None:
    pool = Pool()
    a, b = Source("a"), Source("b")
    await membership(pool, a, b)
    b.publish([EndpointSpec("10.0.0.1", 8000)])
    a.publish([EndpointSpec("10.0.0.1", 8000, rank=rank, ranks=2) for rank in range(2)])
    assert sorted(pool.by_key) == ["10.0.0.1:8000@0", "10.0.0.1:8000@1"]


async def test_more_ranks_behind_a_port_leave_those_there_as_they_are() -> None:
    pool = Pool()
    source = Source()
    await membership(pool, source)
    source.publish([EndpointSpec("10.0.0.1", 8000, rank=rank, ranks=2) for rank in range(2)])
    before = list(pool.endpoints)
    source.publish([EndpointSpec("10.0.0.1", 8000, rank=rank, ranks=3) for rank in range(3)])
    assert pool.endpoints[:2] == before
    assert [e.ranks for e in pool.endpoints] == [3, 3, 3]
