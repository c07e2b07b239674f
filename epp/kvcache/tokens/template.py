"""A model's chat template, rendered as transformers renders it.

In: Jinja source and variables. Out: text, or `TemplateError` with the template's own words. The environment is the
reference's (transformers, `utils/chat_template_utils.py`): sandboxed and immutable, `trim_blocks`, `lstrip_blocks`,
loop controls, `{% generation %}` blocks, `tojson` without HTML escaping, `raise_exception`, `strftime_now`. How message
content is handed over follows vLLM (`renderers/hf.py`): "openai" when the template loops over a message's content,
else "string".

Rendering is pure Python and holds the GIL: `bench/tokens_micro.py` says for how long.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

ContentFormat = Literal["string", "openai"]

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateError(Exception):
    """The template cannot be used, or rejects these messages; the worker says the same to the client."""


class ChatTemplate:
    """One compiled template. Safe from several threads. Raises TemplateError when it is not valid Jinja."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"not a Jinja template: {error}") from None
        self.variables: frozenset[str] = frozenset(jinja2.meta.find_undeclared_variables(tree))
        """Names it reads from outside; others are not passed on."""
        self.content_format: ContentFormat = _content_format(tree)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.clock_formats_known, self._clock_formats = _clock_formats(tree)
        self.marks: tuple[str, ...] = tuple(sorted(_tested_strings(tree)))
        """Strings it looks for in its input (`'</think>' in content`); see `epp.kvcache.tokens.turns`."""

    def clock(self, now: datetime) -> str:
        """What of the clock the template puts out at `now`."""
        return "\0".join(now.strftime(pattern) for pattern in self._clock_formats)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """`variables`: everything else, `tools`, `documents` and `add_generation_prompt` among it."""
        try:
            return self._template.render(messages=messages, **variables)
        except RecursionError:
            raise TemplateError("nested too deeply") from None
        except Exception as error:  # a template may do anything to its input, and Jinja passes what it raises
            raise TemplateError(f"{type(error).__name__}: {error}"[:500]) from None

    def render_continued(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text up to the end of the last message's content, for the model to go on with."""
        if not messages or "content" not in self.source:
            raise TemplateError("continue_final_message: there is no content to continue")
        tagged, final = _tagged(messages[-1])
        text = self.render([*messages[:-1], tagged], variables)
        place = text.rfind(CONTINUE_TAG.strip())
        if place < 0 or final.strip() not in text:
            raise TemplateError("continue_final_message: the final message does not appear in the rendered chat")
        if text[place : place + len(CONTINUE_TAG)] == CONTINUE_TAG:
            return text[:place]
        return text[:place].rstrip()


def _tagged(message: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The message with the tag after its last text, and that text."""
    content = message.get("content")
    if isinstance(content, list):
        for index in range(len(content) - 1, -1, -1):
            part = content[index]
            if isinstance(part, Mapping) and "text" in part:
                text = str(part["text"])
                parts = [*content[:index], {**part, "text": text + CONTINUE_TAG}, *content[index + 1 :]]
                return {**message, "content": parts}, text
        raise TemplateError("continue_final_message: the final message has no text")
    if content is None:
        raise TemplateError("continue_final_message: the final message has no content")
    return {**message, "content": str(content) + CONTINUE_TAG}, str(content)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the name and shape are Jinja's

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


# --- what a template does with content (the rules of vLLM 0.32, renderers/hf.py) --------------------------------------


def _content_format(tree: nodes.Template) -> ContentFormat:
    try:
        return "openai" if any(True for _ in _content_loops(tree)) else "string"
    except AttributeError:  # a loop over a tuple of names: vLLM falls back likewise
        return "string"


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is `name`, or `name.key`, perhaps filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _reads_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _reads_name(node.node, name) and node.attr == key


def _reads_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _aliases(tree: nodes.Template, name: str) -> list[str]:
    """`name` and every variable that is set from it."""
    found, waiting = [name], deque([name])
    while waiting:
        current = waiting.popleft()
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, current):
                target = assign.target.name  # type: ignore[attr-defined] # not a name: AttributeError, see above
                found.append(target)
                if target != current and found.count(target) == 1:
                    waiting.append(target)
    return found


def _message_names(tree: nodes.Template) -> list[str]:
    """Loop variables that hold one message."""
    names = _aliases(tree, "messages")
    return [
        loop.target.name  # type: ignore[attr-defined]
        for loop in tree.find_all(nodes.For)
        if any(_reads(loop.iter, name) for name in names)
    ]


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    """Loops over a message's content, directly or as the argument of a macro."""
    messages = _message_names(tree)
    parameters, in_macros = _macro_loops(tree, messages)
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name, "content") for name in messages) or (
            isinstance(loop.iter, nodes.Name)
            and (
                loop.iter.name in parameters.get(id(loop), ())
                or (id(loop) not in in_macros and loop.iter.name == "content")
            )
        ):
            yield loop


def _macro_loops(tree: nodes.Template, messages: Sequence[str]) -> tuple[dict[int, set[str]], set[int]]:
    """Loop within a macro -> those of the macro's parameters that are given a message's content; all such loops."""
    parameters: dict[int, set[str]] = {}
    inside: set[int] = set()

    def is_content(node: nodes.Node) -> bool:
        return any(_reads(node, name, "content") for name in messages)

    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        given = set()
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given |= {name for name, value in zip(names, call.args, strict=False) if is_content(value)}
                given |= {k.key for k in call.kwargs if k.key in names and is_content(k.value)}
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if given:
                parameters[id(loop)] = given
    return parameters, inside


def _clock_formats(tree: nodes.Template) -> tuple[bool, tuple[str, ...]]:
    """The formats that `strftime_now` is called with, and whether that is all of them."""
    reads = sum(node.name == "strftime_now" for node in tree.find_all(nodes.Name))
    calls = [c for c in tree.find_all(nodes.Call) if isinstance(c.node, nodes.Name) and c.node.name == "strftime_now"]
    formats = [c.args[0].value for c in calls if c.args and isinstance(c.args[0], nodes.Const)]
    tested = [n for n in tree.find_all(nodes.Test) if n.name in ("defined", "undefined")]
    reads -= sum(isinstance(t.node, nodes.Name) and t.node.name == "strftime_now" for t in tested)
    return len(formats) == reads, tuple(sorted({str(f) for f in formats}))


def _tested_strings(tree: nodes.Template) -> set[str]:
    """String constants that are compared with or searched in something, rather than put out.

    Short ones and plain words (roles, names of fields) are left out: they are compared with whole values.
    """
    found = set()
    for node in tree.find_all((nodes.Compare, nodes.Call)):
        operands: list[nodes.Node] = []
        if isinstance(node, nodes.Compare):
            if any(op.op in ("in", "notin") for op in node.ops):
                operands = [node.expr]
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            operands = list(node.args)
        for operand in operands:
            if isinstance(operand, nodes.Const) and isinstance(operand.value, str):
                text = operand.value.strip()
                if len(text) > 1 and not text.replace("_", "").isalpha():
                    found.add(text)
    return found
