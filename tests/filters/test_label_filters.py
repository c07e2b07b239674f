"""Filters over labels, models and the test header."""

from __future__ import annotations

from typing import Any

import pytest

from epp.discovery.membership import EndpointSpec, Membership
from epp.endpoint import Candidates, Endpoint, Pool
from filters.by_label import ByLabel, ByLabelParameters
from filters.header_based_testing import HeaderBasedTestingFilter
from filters.label_selector import LabelSelectorFilter, Requirement
from filters.model_served import ModelServed
from filters.role import DecodeFilter, EncodeFilter, PrefillFilter
from tests.pools import NOW, plugin, request

ROLE = "llm-d.ai/role"


def labelled(*labels: dict[str, str]) -> Candidates:
    return Pool(Endpoint(f"10.0.0.{i}", 8000, labels=each) for i, each in enumerate(labels)).candidates(NOW)


def kept(filter_: Any, pool: Candidates, **fields: Any) -> list[int]:
    return [i for i, keep in enumerate(filter_.filter(request(**fields), pool)) if keep]


def test_by_label_keeps_listed_values_and_unlabelled_ones_when_allowed() -> None:
    pool = labelled({"tier": "a"}, {"tier": "b"}, {}, {"tier": "c"})
    assert kept(plugin(ByLabel, label="tier", valid_values=("a", "c")), pool) == [0, 3]
    assert kept(plugin(ByLabel, label="tier", valid_values=("b",), allows_no_label=True), pool) == [1, 2]


def test_by_label_that_could_never_keep_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing could ever stay"):
        ByLabelParameters(label="tier")


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, [0, 1, 2]),
        ({"match_labels": {"zone": "a"}}, [0]),
        ({"match_labels": {"zone": "a", "gpu": "x"}}, []),
        ({"match_expressions": (Requirement("zone", "In", ("a", "b")),)}, [0, 1]),
        ({"match_expressions": (Requirement("zone", "NotIn", ("a",)),)}, [1, 2]),
        ({"match_expressions": (Requirement("gpu", "Exists"),)}, [1]),
        ({"match_expressions": (Requirement("gpu", "DoesNotExist"),)}, [0, 2]),
        ({"match_labels": {"zone": "b"}, "match_expressions": (Requirement("gpu", "Exists"),)}, [1]),
    ],
)
def test_label_selectors_mean_what_they_mean_in_kubernetes(selector: dict[str, Any], expected: list[int]) -> None:
    pool = labelled({"zone": "a"}, {"zone": "b", "gpu": "x"}, {})
    assert kept(plugin(LabelSelectorFilter, **selector), pool) == expected


@pytest.mark.parametrize("values", [((), "In"), (("x",), "Exists"), ((), "NotIn")])
def test_an_expression_with_values_where_none_belong_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="takes"):
        Requirement("zone", values[1], values[0])


def test_roles_name_one_stage_or_several_and_only_decode_takes_the_unlabelled() -> None:
    roles = ["prefill", "decode", "encode", "prefill-decode", "both", "encode-prefill", "encode-prefill-decode", "x"]
    pool = labelled(*({ROLE: role} for role in roles), {})
    assert kept(plugin(PrefillFilter), pool) == [0, 3, 4, 5, 6]
    assert kept(plugin(DecodeFilter), pool) == [1, 3, 4, 6, 8]
    assert kept(plugin(EncodeFilter), pool) == [2, 5, 6]


def test_label_filters_follow_changes_of_the_pool_and_subsets_of_it() -> None:
    pool = Pool(Endpoint("10.0.0.1", 8000 + i, labels={ROLE: "prefill" if i % 2 else "decode"}) for i in range(6))
    prefill = plugin(PrefillFilter)
    assert kept(prefill, pool.candidates(NOW)) == [1, 3, 5]
    pool.update(remove=[pool.endpoints[0]])  # the last one takes its row
    assert [e.port for e, keep in _with(prefill, pool.candidates(NOW)) if keep] == [8005, 8001, 8003]
    subset = pool.candidates(NOW, frozenset({"10.0.0.1:8003", "10.0.0.1:8004"}))
    assert [e.port for e, keep in _with(prefill, subset) if keep] == [8003]


def test_labels_that_discovery_changed_in_place_count_at_once() -> None:
    pool = Pool()
    membership = Membership(pool, lambda: NOW)
    membership.publish("s", [EndpointSpec("10.0.0.1", 8000, labels={ROLE: "prefill"}), EndpointSpec("10.0.0.2", 8000)])
    prefill = plugin(PrefillFilter)
    assert kept(prefill, pool.candidates(NOW)) == [0]
    membership.publish("s", [EndpointSpec("10.0.0.1", 8000), EndpointSpec("10.0.0.2", 8000, labels={ROLE: "both"})])
    assert kept(prefill, pool.candidates(NOW)) == [1]


def _with(filter_: Any, pool: Candidates) -> list[tuple[Endpoint, bool]]:
    return list(zip(pool, filter_.filter(request(), pool), strict=True))


def test_model_served_keeps_servers_of_the_model_and_unknown_ones() -> None:
    pool = labelled({}, {}, {})
    pool[0].models = frozenset({"m", "adapter"})
    pool[1].models = frozenset({"other"})
    assert kept(plugin(ModelServed), pool, model="adapter") == [0, 2]
    assert kept(plugin(ModelServed), pool, model="") == [0, 1, 2]


def test_a_model_nobody_serves_goes_to_a_worker_which_answers_in_its_own_words() -> None:
    pool = labelled({}, {})
    pool[0].models = pool[1].models = frozenset({"other"})
    assert kept(plugin(ModelServed), pool, model="m") == [0, 1]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({}, []),
        ({"test-epp-endpoint-selection": ""}, []),
        ({"test-epp-endpoint-selection": "10.0.0.1"}, [0, 1]),
        ({"test-epp-endpoint-selection": "9.9.9.9, 10.0.0.1:8001"}, [1]),
        ({"test-epp-endpoint-selection": "fd00::1"}, [2]),
        ({"test-epp-endpoint-selection": "[fd00::1]:8000"}, [2]),
        ({"test-epp-endpoint-selection": "[fd00::1]"}, [2]),
    ],
)
def test_the_test_header_names_endpoints_by_address_or_host(header: dict[str, str], expected: list[int]) -> None:
    pool = Pool([Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.1", 8001), Endpoint("fd00::1", 8000)]).candidates(NOW)
    assert kept(plugin(HeaderBasedTestingFilter), pool, headers=header) == expected
