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
