"""Templates render as the reference implementation renders them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from epp.kvcache.tokens.template import ChatTemplate, TemplateError
from tests.kvcache.tokens import templates

MACRO = "{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return ChatTemplate(source).render(messages or USER, variables)


def test_tojson_does_not_escape_html_and_keeps_order_and_unicode() -> None:
    assert render("{{ x | tojson }}", x={"b": "<é & '>", "a": 1.0}) == '{"b": "<é & \'>", "a": 1.0}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    assert render("{{ x | tojson(separators=(',', ':'), sort_keys=true) }}", x={"b": 1, "a": 2}) == '{"a":2,"b":1}'


def test_blocks_take_their_line_with_them() -> None:
    assert render("{% if true %}\n  {% set x = 1 %}\na\n{% endif %}\nb") == "a\nb"


def test_generation_marks_leave_their_content_and_loops_can_be_broken() -> None:
    assert render("{% generation %}a{{ messages[0].role }}{% endgeneration %}") == "auser"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_a_template_that_raises_says_why() -> None:
    with pytest.raises(TemplateError, match="no system here"):
        render("{{ raise_exception('no system here') }}")


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}"],
)
def test_a_template_cannot_leave_its_sandbox_or_change_its_input(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)
    assert USER == [{"role": "user", "content": "hi"}]


def test_what_is_not_jinja_is_an_error() -> None:
    with pytest.raises(TemplateError, match="not a Jinja template"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (templates.CHATML, "string"),
        (templates.PARTS, "openai"),
        ("{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages[1:] %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}", "openai"),
        ("{% set ms = messages %}{% for m in ms %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai"),
        (MACRO + "{% for m in messages %}{{ f(m.content) }}{% endfor %}", "openai"),
        (MACRO + "{% for m in messages %}{{ f(c=m['content']) }}{% endfor %}", "openai"),
        (MACRO + "{% for m in messages %}{{ f(m.tools) }}{% endfor %}", "string"),
        ("{% set content = messages[0].content %}{% for c in content %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        ("{% for a, b in messages %}{% endfor %}", "string"),
    ],
)
def test_content_format_is_detected_as_vllm_does(source: str, expected: str) -> None:
    assert ChatTemplate(source).content_format == expected


def test_a_final_message_is_left_open_to_be_continued() -> None:
    chat = [*USER, {"role": "assistant", "content": "and so"}]
    template = ChatTemplate(templates.CHATML)
    assert template.render_continued(chat, {}).endswith("<|im_start|>assistant\nand so")
    stripping = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert stripping.render_continued([{"role": "assistant", "content": " x "}], {}) == "[x"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate(templates.PARTS).render_continued(parts, {}) == "<|im_start|>assistant\nab"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].role }}", {"role": "assistant", "content": "x"}),
        ("{{ 'content' }}", {"role": "assistant", "content": "x"}),
        (templates.CHATML, {"role": "assistant", "content": None}),
        (templates.PARTS, {"role": "assistant", "content": [{"type": "image"}]}),
    ],
)
def test_a_message_that_cannot_be_continued_is_an_error(source: str, message: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="continue_final_message"):
        ChatTemplate(source).render_continued([message], {})


def test_the_clock_is_asked_in_known_formats_or_the_template_says_not() -> None:
    dated = ChatTemplate(templates.DATED)
    assert dated.clock_formats_known
    assert dated.clock(datetime(2026, 12, 1)) == "01 Dec 2026"
    assert ChatTemplate(templates.CHATML).clock(datetime(2026, 12, 1)) == ""
    guarded = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"
    assert ChatTemplate(guarded).clock_formats_known
    assert not ChatTemplate("{{ strftime_now(format) }}").clock_formats_known
    assert not ChatTemplate("{% set now = strftime_now %}{{ now('%Y') }}").clock_formats_known


def test_strings_a_template_looks_for_in_content_are_its_marks() -> None:
    assert ChatTemplate(templates.THINKING).marks == ("</think>", "<think>")
    assert ChatTemplate(templates.CHATML).marks == ()
