"""Data-parallel ranks behind one port: each an endpoint of its own, all with one address for the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.discovery.envoy_file import EnvoyFile
from epp.endpoint import Endpoint, Pool
from epp.kvcache.producer import ApproxPrefixCache
from epp.plugin import Outcome
from scorers.session_affinity import SessionAffinity, token
from tests.discovery.test_envoy_file import listed
from tests.exchanges import BY_LOAD, Rig, Stream
from tests.gateway.ext_proc_peer import CHAT, OK, Fields, http_headers, metadata
from tests.pools import NOW, plugin, request

ASK = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
THREE = BY_LOAD.replace(
    "plugins:\n- type: active",
    "plugins:\n- type: max-score-picker\n  parameters: {maxNumOfEndpoints: 9}\n- type: active",
    1,
)


def ranks(host: str, count: int) -> list[Endpoint]:
    return [Endpoint(host, 8000, rank=rank, ranks=count) for rank in range(count)]


def rig_of(*endpoints: Endpoint, config: str = BY_LOAD) -> Rig:
    rig = Rig(0, config=config)
    for endpoint in endpoints:
        rig.add(endpoint)
    return rig


def ask(rig: Rig, fields: Fields = CHAT) -> Stream:
    stream = rig.open()
    stream.request(fields, [ASK])
    return stream


def rank_header(stream: Stream) -> list[bytes]:
    return stream.headers["request"].get("x-data-parallel-rank", [])


def serve_at(stream: Stream, address: str) -> None:
    stream.metadata_context = metadata(envoy__lb={"x-gateway-destination-endpoint-served": address})
    stream.send(response_headers=http_headers(OK))


def test_ranks_share_an_address_and_have_keys_of_their_own() -> None:
    pool = Pool([*ranks("fd00::1", 2), Endpoint("10.0.0.1", 8000)])
    assert [e.address for e in pool.endpoints] == ["[fd00::1]:8000", "[fd00::1]:8000", "10.0.0.1:8000"]
    assert list(pool.by_key) == ["[fd00::1]:8000@0", "[fd00::1]:8000@1", "10.0.0.1:8000"]


def test_a_subset_that_names_the_address_allows_every_rank() -> None:
    pool = Pool([*ranks("10.0.0.1", 2), Endpoint("10.0.0.2", 8000)])
    assert len(pool.candidates(NOW, frozenset({"10.0.0.1:8000"}))) == 2


@pytest.mark.parametrize("more", [(), (("x-request-id", b"r"),)], ids=["id-set", "id-given"])
def test_the_rank_picked_is_in_a_header_and_a_clients_own_is_overwritten(more: Fields) -> None:
    rig = rig_of(*ranks("10.0.0.1", 2))
    streams = [ask(rig, (*CHAT, ("x-data-parallel-rank", b"7"), *more)) for _ in range(4)]
    assert [stream.destination for stream in streams] == ["10.0.0.1:8000"] * 4
    assert sorted(rank_header(stream)[0] for stream in streams) == [b"0", b"0", b"1", b"1"]
    assert rig.in_flight == [2, 2]
    for stream in streams:
        stream.end()
    rig.assert_idle()


def test_a_clients_rank_does_not_reach_a_worker_whose_rank_is_not_chosen() -> None:
    rig = rig_of(Endpoint("10.0.0.1", 8000, rank=3))
    stream = ask(rig, (*CHAT, ("x-data-parallel-rank", b"7")))
    assert rank_header(stream) == []
    stream.end()


def test_fallbacks_are_other_addresses_that_have_the_rank() -> None:
    two, four = ranks("10.0.0.1", 2), ranks("10.0.0.2", 4)
    rig = rig_of(*two, *four, Endpoint("10.0.0.3", 8000), config=THREE)
    for busy in (*two, *four[:3], rig.known[-1]):
        busy.count(requests=1, tokens=0)
    stream = ask(rig)
    assert (stream.destination, rank_header(stream)) == ("10.0.0.2:8000", [b"3"])
    assert len(rig.decisions.made[0].endpoints) == 7
    stream.end()
    four[3].count(requests=5, tokens=0)
    two[0].count(requests=-1, tokens=0)
    stream = ask(rig)
    assert stream.destination.split(",")[0] == "10.0.0.1:8000"
    assert sorted(stream.destination.split(",")) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
    stream.end()


def test_a_response_of_the_picked_address_is_the_picked_ranks() -> None:
    rig = rig_of(*ranks("10.0.0.1", 2))
    stream = ask(rig)
    before = rig.in_flight
    serve_at(stream, "10.0.0.1:8000")
    assert (rig.in_flight, rig.reasons) == (before, {})
    stream.end()
    rig.assert_idle()


def test_served_elsewhere_is_counted_on_the_rank_that_the_header_names() -> None:
    first, other = ranks("10.0.0.1", 2), ranks("10.0.0.2", 2)
    rig = rig_of(*first, *other)
    for busy in (first[0], *other):
        busy.count(requests=1, tokens=0)
    stream = ask(rig)
    assert rank_header(stream) == [b"1"]
    serve_at(stream, "10.0.0.2:8000")
    assert rig.in_flight == [1, 0, 1, 2]
    assert rig.reasons == {"served-elsewhere": 1}
    stream.end()


def test_served_without_a_rank_header_is_counted_on_the_least_busy_rank() -> None:
    alone, there = Endpoint("10.0.0.1", 8000), ranks("10.0.0.2", 2)
    pool = Pool([alone, *there])
    there[0].count(requests=1, tokens=0)
    assert pool.served_by("10.0.0.2:8000", alone) is there[1]
    assert pool.served_by("10.0.0.9:8000", alone) is None


def test_a_rank_that_the_other_address_lacks_served_nothing_known() -> None:
    four, two = ranks("10.0.0.1", 4), ranks("10.0.0.2", 2)
    pool = Pool([*four, *two])
    assert pool.served_by("10.0.0.2:8000", four[1]) is two[1]
    assert pool.served_by("10.0.0.2:8000", four[3]) is None


def test_decisions_and_metrics_name_the_rank() -> None:
    rig = rig_of(*ranks("10.0.0.1", 2))
    ask(rig).end()
    shown = rig.decisions.made[0].as_dict()
    assert shown["candidates"] == ["10.0.0.1:8000@0", "10.0.0.1:8000@1"]
    assert shown["endpoints"][0] in shown["candidates"]
    assert b'kvsteer_endpoint_in_flight_requests{model_server_pod="10.0.0.1:8000@1"' in rig.metrics.render()


def test_what_a_rank_holds_is_its_own() -> None:
    pool = Pool(ranks("10.0.0.1", 2))
    producer = plugin(ApproxPrefixCache)
    asked, again = request(b"x" * 1024), request(b"x" * 1024)
    producer.produce(asked, pool.candidates(NOW))
    producer.picked(asked, {"default": pool.endpoints[1]})
    producer.finished(asked, pool.endpoints[1], Outcome(status=200, served="10.0.0.1:8000"))
    candidates = pool.candidates(NOW)
    producer.produce(again, candidates)
    assert list(candidates.cached_tokens > 0) == [False, True]


def test_a_session_token_names_the_rank() -> None:
    named = [Endpoint("10.0.0.1", 8000, name="w", rank=rank, ranks=2) for rank in range(2)]
    pool = Pool([*named, *ranks("10.0.0.2", 2)])
    tokens = [token(endpoint) for endpoint in pool.endpoints]
    assert len(set(tokens)) == 4
    scores = plugin(SessionAffinity).score(request(headers={"x-session-token": tokens[3]}), pool.candidates(NOW))
    assert scores.tolist() == [0, 0, 0, 1]


def test_envoy_is_told_each_address_once(tmp_path: Path) -> None:
    file = EnvoyFile(tmp_path / "pool.json", Pool([*ranks("10.0.0.1", 2), Endpoint("10.0.0.2", 8000)]))
    file.changed()
    assert listed(file.path) == [("10.0.0.1", 8000), ("10.0.0.2", 8000)]
