"""The cheap reader of metrics pages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest

from epp.signals.prometheus_text import MAX_LINE_BYTES, MAX_SAMPLES, read_page


def one(page: bytes, name: str = "a:b") -> tuple[dict[str, str], float]:
    samples = read_page(page, [name]).samples[name]
    assert len(samples) == 1
    return dict(samples[0].labels), samples[0].value


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"a:b 3", 3.0),
        (b"a:b{} 3.5", 3.5),
        (b'a:b{x="y"} 1.796e+09', 1.796e9),
        (b"a:b\t-0.25e-3 1796086992000", -0.00025),
        (b"a:b .5\r", 0.5),
        (b"a:b 5.", 5.0),
        (b'a:b 3 # {trace="1"} 4', 3.0),
        (b'a:b{x="y # {"} 3 # {trace="1"} 4', 3.0),
        (b'a:b{x="y # {"} 3', 3.0),
        (b"a:b +Inf", math.inf),
        (b"a:b -Inf", -math.inf),
    ],
)
def test_values_are_read_in_every_spelling(line: bytes, value: float) -> None:
    assert one(line)[1] == value
    assert one(b"# TYPE a:b gauge\n" + line + b"\nnext 1\n")[1] == value


def test_nan_is_a_value() -> None:
    assert math.isnan(one(b"a:b NaN")[1])


@pytest.mark.parametrize(
    "line",
    [
        *(b"a:b ", b"a:b x", b"a:b 1_0", b"a:b 0x10", b"a:b 1e", b"a:b 1,5", b"a:b nan(1)", b'a:b {x="y"} 1'),
        b'a:b{x="y" 1',
        b"a:b{x=y} 1",
        b'a:b{x="y} 1',
        b'a:b{x="y"}1',
        b'a:b{x="1" y="2"} 1',
        b'a:b{x="' + b"y" * 70_000,
    ],
)
def test_a_broken_line_is_counted_and_the_others_stand(line: bytes) -> None:
    page = read_page(b"a:b 1\n" + line + b"\na:b 2\n", ["a:b"])
    assert [s.value for s in page.samples["a:b"]] == [1.0, 2.0]
    assert page.malformed == 1


def test_label_escapes_are_undone() -> None:
    assert one(rb'a:b{x="q\"b\\n\nz",y="}, {",z="" , } 1')[0] == {"x": 'q"b\\n\nz', "y": "}, {", "z": ""}


def test_a_name_is_not_taken_for_the_beginning_of_a_longer_one() -> None:
    page = b'a:b_total 1\na:b_by_reason{r="x"} 2\n# HELP a:b a:b 7\nx a:b 8\na:b 3\n'
    assert one(page) == ({}, 3.0)


def test_a_family_that_is_absent_has_no_entry() -> None:
    assert read_page(b"x 1\n", ["a:b"]).samples == {}
    assert read_page(b"", ["a:b"]).samples == {}


def test_samples_of_a_family_are_bounded() -> None:
    page = read_page(b"a:b 1\n" * (MAX_SAMPLES + 10), ["a:b"])
    assert len(page.samples["a:b"]) == MAX_SAMPLES


def test_a_line_is_bounded() -> None:
    line = b'a:b{x="' + b"y" * MAX_LINE_BYTES + b'"} 1'
    assert read_page(line, ["a:b"]).malformed == 1


label_values = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(st.tuples(label_values, label_values, st.floats()), max_size=8, unique_by=lambda x: x[:2]))
def test_what_prometheus_client_writes_is_read_back(series: list[tuple[str, str, float]]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("wanted", "help with \\ and \n in it", ["x", "y"], registry=registry)
    Gauge("wanted_more", "another", registry=registry).set(1)
    for x, y, value in series:
        gauge.labels(x, y).set(value)
    samples = read_page(generate_latest(registry), ["wanted"]).samples.get("wanted", [])
    assert [(s.labels["x"], s.labels["y"]) for s in samples] == [(x, y) for x, y, _ in series]
    for sample, (_, _, value) in zip(samples, series, strict=True):
        assert sample.value == value or (math.isnan(sample.value) and math.isnan(value))


@given(
    st.lists(
        st.sampled_from([b"a:b", b"{", b"}", b'"', b"\\", b"x", b"=", b",", b" ", b"\n", b"1", b"e", b"\xff", b"NaN"])
    )
)
def test_no_bytes_make_it_raise(parts: list[bytes]) -> None:
    for sample in read_page(b"".join(parts), ["a:b"]).samples.get("a:b", []):
        assert isinstance(sample.value, float)
