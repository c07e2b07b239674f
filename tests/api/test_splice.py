"""Rewriting one value leaves every other byte as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.api.fields import Fields, read_fields, span_of
from epp.api.scan import MemberScanner
from epp.api.splice import include_usage, model_span, rewrite_model

ODD = [
    b'{"seed":9007199254740993,"model":"a"}',
    b'{"model":"a","n":1e400}',
    b'{"p":0.10000000000000000555,"model":"a"}',
    b'{"model":"a","z":-0.0}',
    b'{"model":"a","x":NaN,"y":[-Infinity]}',
    b'{"prompt":"\\ud800","model":"a"}',
    b'{"model":"first","k":1,"model":"a"}',
    b'{"z":1,"a":2,"model":"a","B":3}',
    b'{"prompt":"\\u0041\\/\\u00e9","mod\\u0065l":"a"}',
    b'{ "n" : 1.0 ,\r\n\t"model" :\t"a" \n}\n',
    b'\xef\xbb\xbf{"model":"a"}',
    b'{"messages":[{"model":"a","content":"\\"model\\":\\"a\\""}],"model":"a","m":{"model":"a"}}',
]


@pytest.mark.parametrize("body", ODD, ids=repr)
def test_rewrite_leaves_everything_outside_the_model_value_equal(body: bytes) -> None:
    span = model_span(body)
    assert span is not None
    start, end = span
    assert body[start:end] == b'"a"'
    assert rewrite_model(body, 'b/"é"') == body[:start] + '"b/\\"é\\""'.encode() + body[end:]
    assert json.loads(rewrite_model(body, "b"))["model"] == "b"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"m":{"model":"a"}}', b"\x00\xff"], ids=repr)
def test_body_without_a_model_is_left_alone(body: bytes) -> None:
    assert rewrite_model(body, "b") == body


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.text(max_size=6) | st.just("model"), VALUES, max_size=6)


@given(OBJECTS, st.text(), st.booleans(), st.sampled_from([None, 1]))
def test_rewrite_changes_the_model_and_nothing_else(
    body: dict[str, Any], model: str, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps({**body, "model": "old"}, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    span = model_span(text)
    assert span is not None
    new = rewrite_model(text, model)
    assert new.startswith(text[: span[0]])
    assert new.endswith(text[span[1] :])
    assert json.loads(new)["model"] == model


@given(OBJECTS, st.sampled_from([None, 2]), st.integers(1, 9))
def test_members_lie_where_a_parser_finds_them(body: dict[str, Any], indent: int | None, piece: int) -> None:
    text = json.dumps(body, indent=indent).encode()
    scanner = MemberScanner()
    marks = [
        (mark.name, start + mark.offset)
        for start in range(0, len(text), piece)
        for mark in scanner.feed(text[start : start + piece])
    ]
    found = [
        (begin[0], json.loads(text[begin[1] : end[1]])) for begin, end in zip(marks[::2], marks[1::2], strict=True)
    ]
    assert repr(found) == repr(list(json.loads(text).items()))


@given(st.dictionaries(st.sampled_from(Fields.__struct_fields__), OBJECTS), st.sampled_from([None, 2]), st.booleans())
def test_what_only_python_parses_is_read_the_same(body: dict[str, Any], indent: int | None, escape: bool) -> None:
    text = json.dumps({"x": [float("nan"), "\ud800 é"], **body}, indent=indent, ensure_ascii=escape)
    encoded = text.encode("utf-8-sig", "surrogatepass")
    fields = read_fields(encoded)
    for name in Fields.__struct_fields__:
        raw = getattr(fields, name)
        span = span_of(encoded, raw)
        if name in body:
            assert span is not None
            assert repr(json.loads(encoded[span[0] : span[1]])) == repr(body[name])
        else:
            assert span is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"m"}', b'{"stream_options":{"include_usage":true},"model":"m"}'),
        (b" { }", b' {"stream_options":{"include_usage":true} }'),
        (b'{"stream_options":null,"n":1}', b'{"stream_options":{"include_usage":true},"n":1}'),
        (b'{"stream_options": {}}', b'{"stream_options": {"include_usage":true}}'),
        (b'{"stream_options":{"x":1}}', b'{"stream_options":{"include_usage":true,"x":1}}'),
        (b'{"stream_options":{"include_usage":false,"x":1}}', b'{"stream_options":{"include_usage":true,"x":1}}'),
        (b'{"stream_options":{"include_usage": null}}', b'{"stream_options":{"include_usage": true}}'),
        (b'\xef\xbb\xbf{"x":NaN}', b'\xef\xbb\xbf{"stream_options":{"include_usage":true},"x":NaN}'),
        (b'{"stream_options":{"include_usage":true}}', None),
        (b'{"stream_options":"yes"}', None),
    ],
)
def test_include_usage_is_put_in_beside_what_is_there(body: bytes, expected: bytes | None) -> None:
    assert include_usage(body) == expected
