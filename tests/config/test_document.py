"""Reading YAML: lines, bounds, and strict typed decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from epp.decoding import camel, decode, seconds
from epp.document import MAX_BYTES, MAX_PROBLEMS, Problems, parse, plain
from epp.plugin import Duration, Range, Unit


@dataclass(frozen=True, slots=True)
class Inner:
    key: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outer:
    idle_threshold: Annotated[int, Range(min=0, max=10)] = 0
    share: Annotated[float, Range(min=0, max=1)] = 0.5
    penalty_ms: Annotated[float, Unit("ms")] = 1.0
    timeout: Duration = 2.0
    maybe: Annotated[int | None, Range(min=1)] = None
    mode: Literal["least", "most"] = "least"
    on: bool = False
    name: str = ""
    inner: Inner | None = None
    many: list[Inner] = field(default_factory=list)
    labels: Mapping[str, str] = field(default_factory=dict)
    anything: Any = None

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("name must not be bad")


def outer(text: str) -> Any:
    """The decoded value, or the list of problems."""
    problems = Problems()
    node = parse(text, problems)
    value = decode(Outer, node, "p", problems) if node is not None else None
    return [str(p) for p in problems.sorted()] or value


def problems_of(text: str) -> list[str]:
    problems = Problems()
    parse(text, problems)
    return [str(p) for p in problems.sorted()]


def test_every_kind_of_value_is_read() -> None:
    value = outer(
        """
idleThreshold: 3
share: 1
penaltyMs: 2.5
timeout: 1m30.5s
maybe: 4
mode: most
"on": true
name: 2024-01-01
inner: {key: k, values: [a, b]}
many: [{key: x}]
labels: {a: b}
anything: {x: [1, null]}
"""
    )
    assert value == Outer(
        3,
        1.0,
        2.5,
        90.5,
        4,
        "most",
        True,
        "2024-01-01",
        Inner("k", ("a", "b")),
        [Inner("x")],
        {"a": "b"},
        {"x": [1, None]},
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("idleTreshold: 3", "1: p.idleTreshold: unknown key; did you mean 'idleThreshold'?"),
        ("idle_threshold: 3", "1: p.idle_threshold: unknown key; did you mean 'idleThreshold'?"),
        ("idleThreshold: 3.5", "1: p.idleThreshold: must be a whole number, got 3.5"),
        ("idleThreshold: '3'", '1: p.idleThreshold: must be a whole number, got "3"'),
        ("idleThreshold: true", "1: p.idleThreshold: must be a whole number, got true"),
        ("idleThreshold: 11", "1: p.idleThreshold: must be at most 10, got 11"),
        ("idleThreshold: -1", "1: p.idleThreshold: must be at least 0, got -1"),
        ("idleThreshold:", "1: p.idleThreshold: must be a whole number, got nothing"),
        ("share: .nan", "1: p.share: must be a number, got nan"),
        ("share: .inf", "1: p.share: must be a number, got inf"),
        ("share: [1]", "1: p.share: must be a number, got a list"),
        (f"share: 1{'0' * 400}", "1: p.share: must be a number, got a number beyond 64 bits"),
        (f"share: 1{'0' * 5000}", "1: share: cannot be read as int"),
        ("timeout: 5", "1: p.timeout: must be a duration such as 2s or 500ms, got 5"),
        ("timeout: 5 s", '1: p.timeout: must be a duration such as 2s or 500ms, got "5 s"'),
        ("maybe: 0", "1: p.maybe: must be at least 1, got 0"),
        ("mode: best", '1: p.mode: must be one of least, most, got "best"'),
        ("name: 1", "1: p.name: must be text, got 1"),
        ("inner: {}", "1: p.inner.key: is required"),
        ("inner: {key: 1, valeus: []}", "1: p.inner.valeus: unknown key; did you mean 'values'?"),
        ("many: [{key: a}, 3]", "1: p.many[1]: must be a mapping, got 3"),
        ("labels: {a: 1}", "1: p.labels.a: must be text, got 1"),
        ("labels: []", "1: p.labels: must be a mapping, got a list"),
        ("name: bad", "1: p: name must not be bad"),
        ("[1]", "1: p: must be a mapping, got a list"),
        ("name: a\nNAME: b", "2: p.NAME: is set twice, in different letter case, for name"),
    ],
)
def test_what_does_not_fit_is_named_with_line_and_path(text: str, problem: str) -> None:
    assert problem in outer(text)


def test_all_problems_are_reported_in_the_order_of_lines() -> None:
    assert outer("share: 2\nname: 1\nshaer: 1\n") == [
        "1: p.share: must be at most 1, got 2",
        "2: p.name: must be text, got 1",
        "3: p.shaer: unknown key; did you mean 'share'?",
    ]


def test_a_file_full_of_mistakes_is_refused_with_a_bounded_report() -> None:
    found = outer("".join(f"key{i}: 1\n" for i in range(5_000)))
    assert len(found) == MAX_PROBLEMS


def test_null_stands_for_absent_only_where_none_is_allowed() -> None:
    assert outer("maybe:\ninner: ~") == Outer()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: {c: 1,\n  c: 2}", "3: b.c: is set twice, first on line 2"),
        ("a: 1\n---\nb: 1", "2: holds more than one YAML document"),
        ("a: &x [*x]", "1: a[0]: alias *x has no finished anchor before it"),
        ("a: *nowhere", "1: a: alias *nowhere has no finished anchor before it"),
        ("a: {<<: {b: 1}}", "1: a: merge keys (<<) are not supported: write the values out"),
        ("a: !!python/object:os.system x", "1: a: tag tag:yaml.org,2002:python/object:os.system is not supported"),
        ("? [1]\n: 2", "1: a key must be plain text"),
        ("a: [1", "1: not YAML: "),
        ("a:\n\t- 1", "2: not YAML: "),
        ("a: 1\x00", "1: not YAML: "),
        ("[" * 60, "1: nested deeper than 40 levels"),
        ("a: " + "x" * MAX_BYTES, f"1: the file is longer than {MAX_BYTES} bytes"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, problem: str) -> None:
    (found,) = problems_of(text)
    assert problem in found


def test_an_alias_bomb_is_refused_by_what_it_would_become() -> None:
    bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(10)
    )
    (found,) = problems_of(bomb)
    assert "holds more than 50000 values" in found


def test_aliases_within_bounds_work() -> None:
    problems = Problems()
    node = parse("a: &x {k: 1}\nb: *x\n", problems)
    assert node is not None
    assert plain(node) == {"a": {"k": 1}, "b": {"k": 1}}
    assert not problems.found


@pytest.mark.parametrize(
    ("text", "value"),
    [("2s", 2.0), ("500ms", 0.5), ("1h2m3s", 3723.0), ("1.5s", 1.5), ("0", 0.0), ("10us", 1e-5), ("3ns", 3e-9)],
)
def test_durations_are_those_of_go(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "s", "5", "-1s", "1s ", "1s2", "1d", "1..5s", "١s", None, True, 1.5, []])
def test_other_texts_are_no_durations(text: Any) -> None:
    assert seconds(text) is None


def test_camel_case() -> None:
    assert [camel("a"), camel("idle_threshold"), camel("max_ttft_penalty_ms")] == [
        "a",
        "idleThreshold",
        "maxTtftPenaltyMs",
    ]


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.text(alphabet="abn:-[]{}*&!|>'\"#?,<% \n\t0123.e~\\\x85\ud800é", max_size=60))
def test_any_text_is_read_or_refused_and_nothing_else(text: str) -> None:
    problems = Problems()
    node = parse(text, problems)
    assert node is not None or problems.found
    for problem in problems.found:
        assert "\n" not in str(problem)
        assert problem.line >= 1


@given(st.dictionaries(st.sampled_from([camel(f) for f in Outer.__dataclass_fields__]), yaml_values))
def test_any_values_give_the_dataclass_or_problems(values: dict[str, Any]) -> None:
    result = outer(yaml.safe_dump(values))
    if isinstance(result, Outer):
        assert math.isfinite(result.share)
        assert 0 <= result.share <= 1
        assert 0 <= result.idle_threshold <= 10
    else:
        assert result
