"""Gauges as text are what prometheus-client reads."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from epp.observe.exposition import gauge, labels

NAMES = st.text(st.characters(blacklist_categories=["Cs", "Cc"], whitelist_characters="\n"))


@given(st.lists(st.tuples(NAMES, NAMES, st.floats()), min_size=1, max_size=5))
def test_labels_and_values_are_read_back(samples: list[tuple[str, str, float]]) -> None:
    text = gauge("some_name", "What it is", [(labels(pod=pod, name=name), value) for pod, name, value in samples])
    (family,) = text_string_to_metric_families(text)
    assert (family.name, family.type, family.documentation) == ("some_name", "gauge", "What it is")
    for sample, (pod, name, value) in zip(family.samples, samples, strict=True):
        assert sample.labels == {"pod": pod, "name": name}
        assert sample.value == value or (math.isnan(sample.value) and math.isnan(value))


def test_a_value_that_is_not_known_is_spelled_as_prometheus_does() -> None:
    assert gauge("a", "b", [("", math.nan), ("", math.inf), ("", 1)]).splitlines()[2:] == [
        "a{} NaN",
        "a{} +Inf",
        "a{} 1.0",
    ]
