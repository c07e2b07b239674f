"""The pool and its view for one request."""

from __future__ import annotations

import pytest

from epp.endpoint import Endpoint, Pool

HOSTS = [("10.0.0.1", 8000), ("10.0.0.1", 8001), ("10.0.0.2", 8000), ("fd00::1", 8000)]


@pytest.mark.parametrize(
    ("subset", "addresses"),
    [
        (None, ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::1]:8000"]),
        ({"10.0.0.1:8001"}, ["10.0.0.1:8001"]),
        ({"10.0.0.1"}, ["10.0.0.1:8000", "10.0.0.1:8001"]),
        ({"[fd00::1]:8000"}, ["[fd00::1]:8000"]),
        ({"fd00::1"}, ["[fd00::1]:8000"]),
        ({"10.0.0.9:8000", "10.0.0.2:8000"}, ["10.0.0.2:8000"]),
        (set(), []),
    ],
)
def test_a_subset_allows_endpoints_by_address_and_port_or_all_ports_of_an_address(
    subset: set[str] | None, addresses: list[str]
) -> None:
    candidates = Pool(Endpoint(*host) for host in HOSTS).candidates(0.0, None if subset is None else frozenset(subset))
    assert [endpoint.address for endpoint in candidates] == addresses


def test_a_column_is_shown_live_read_only_and_follows_the_members() -> None:
    pool = Pool(Endpoint(*host) for host in HOSTS)
    first = pool.candidates(0.0)
    assert first.column("running") is pool.candidates(1.0).column("running")
    pool.endpoints[1].set("running", 7.0)
    assert first.column("running")[1] == 7.0
    with pytest.raises(ValueError, match="read-only"):
        first.column("running")[0] = 1.0
    pool.update(remove=[pool.endpoints[0]])
    assert len(pool.candidates(0.0).column("running")) == 3
    assert len(first.column("running")) == 4
    pool.update(add=[Endpoint("10.1.0.1", port) for port in range(1, 40)])
    pool.endpoints[-1].set("running", 9.0)
    assert pool.candidates(0.0).column("running")[-1] == 9.0


def test_an_endpoint_that_is_out_is_no_candidate_and_its_row_no_column() -> None:
    pool = Pool(Endpoint(*host) for host in HOSTS)
    for i, endpoint in enumerate(pool.endpoints):
        endpoint.set("running", float(i))
    pool.endpoints[1].available = False
    candidates = pool.candidates(0.0)
    assert [e.row for e in candidates] == [0, 2, 3]
    assert candidates.column("running").tolist() == [0.0, 2.0, 3.0]


def test_what_other_replicas_tell_is_added_to_the_columns_and_never_to_the_own_counts() -> None:
    endpoint = Endpoint("10.0.0.1", 8000)
    pool = Pool([endpoint])
    load = endpoint.acquire(100, now=0.0)
    endpoint.count_remote(requests=2, tokens=500)
    columns = ("in_flight", "in_flight_tokens", "unseen")
    assert [endpoint.get(name) for name in columns] == [3, 600, 3]
    assert (endpoint.in_flight, endpoint.in_flight_tokens) == (1, 100)
    load.release()
    assert [endpoint.get(name) for name in columns] == [2, 500, 2]
    pool.update(remove=[endpoint])
    endpoint.count_remote(requests=0, tokens=0)
    pool.update(add=[endpoint])
    assert [endpoint.get(name) for name in columns] == [0, 0, 0]


def test_others_requests_are_unseen_until_a_scrape_that_began_after_them() -> None:
    endpoint = Endpoint("10.0.0.1", 8000)
    Pool([endpoint])
    endpoint.count_remote(requests=2, tokens=0)
    endpoint.scrape_began()
    endpoint.count_remote(requests=5, tokens=0)
    endpoint.scrape_succeeded(1.0)
    assert endpoint.get("unseen") == 3
    endpoint.count_remote(requests=1, tokens=0)
    assert endpoint.get("unseen") == 1
    endpoint.scrape_began()
    endpoint.count_remote(requests=0, tokens=0)
    endpoint.scrape_succeeded(2.0)
    assert endpoint.get("unseen") == 0
