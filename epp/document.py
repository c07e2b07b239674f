"""Configuration documents: bounded YAML with line numbers, read strictly into typed dataclasses.

In: text from a file a person wrote. Out: `Node` trees (every value knows its line) and frozen dataclasses made from
them by their type hints; and `Problem`s, all of them, each with the line and the path of the value it speaks of. Pure:
no file is opened here. Used for the picker's configuration and its plugins' parameters.

Strict means: unknown and repeated keys, wrong types, numbers out of range, NaN and infinity are problems.
Bounded means: size, depth and number of values are limited, aliases
included, so that no document can exhaust the process.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union

import yaml

from epp.plugin import Range, Unit

MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_VALUES = 50_000

Scalar = str | int | float | bool | None
Value = Union[Scalar, "list[Node]", "dict[str, Node]"]


@dataclass(slots=True)
class Node:
    """One value of a document: a scalar, a list of nodes, or a mapping of text to nodes; `line` counts from 1."""

    value: Value
    line: int
    keys: dict[str, int] = field(default_factory=dict)
    """For a mapping: key -> its line."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a document."""

    line: int
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.line}: {self.path + ': ' if self.path else ''}{self.message}"


class Problems:
    """Collects what is wrong, so that a reader of the errors can mend all of them at once."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, node: Node | int, path: str, message: str) -> None:
        line = node if isinstance(node, int) else node.line
        problem = Problem(line, one_line(path), one_line(message))
        if problem not in self.found:
            self.found.append(problem)

    def sorted(self) -> tuple[Problem, ...]:
        return tuple(sorted(self.found, key=lambda p: p.line))


# --- reading YAML ---------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """The document cannot be read further: (line, path, message)."""


class _Resolver(yaml.SafeLoader):
    """Only for turning one scalar into a value; plain scalars that YAML 1.1 takes for dates stay text."""


_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}


def parse(text: str, problems: Problems) -> Node | None:
    """Read one YAML document; None when it cannot be read (`problems` says why). Empty text is an empty mapping."""
    if len(text) > MAX_BYTES:
        problems.add(1, "", f"the file is longer than {MAX_BYTES} bytes")
        return None
    try:
        return _Builder(text, problems).build()
    except _Stop as stop:
        problems.add(*stop.args)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problems.add(mark.line + 1 if mark else 1, "", f"not YAML: {error.problem or error.context}")
    except yaml.YAMLError as error:
        problems.add(1, "", f"not YAML: {error}")
    return None


class _Builder:
    """Builds nodes from YAML events. Not recursive: depth is counted, never felt."""

    def __init__(self, text: str, problems: Problems) -> None:
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        self.resolver = _Resolver("")
        self.problems = problems
        self.anchors: dict[str, tuple[Node, int]] = {}
        self.values = 0

    def build(self) -> Node:
        root: Node | None = None
        # Open collections: the node, its path, the key that waits for its value, its anchor, values counted before it.
        stack: list[tuple[Node, str, list[tuple[str, int] | None], str | None, int]] = []
        documents = 0
        for event in self.events:
            line = event.start_mark.line + 1 if event.start_mark else 1
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _Stop(line, "", "holds more than one YAML document")
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                node, _, _, anchor, before = stack.pop()
                if anchor:
                    self.anchors[anchor] = (node, self.values - before)
                continue
            if not isinstance(event, yaml.NodeEvent):
                continue
            if len(stack) >= MAX_DEPTH:
                raise _Stop(line, "", f"nested deeper than {MAX_DEPTH} levels")
            path = ""
            key: tuple[str, int] | None = None
            if stack:
                parent, parent_path, waiting, _, _ = stack[-1]
                if isinstance(parent.value, dict):
                    if waiting[0] is None:
                        waiting[0] = self.key(event, line, parent_path)
                        continue
                    key, waiting[0] = waiting[0], None
                    path = join(parent_path, key[0])
                else:
                    path = f"{parent_path}[{len(parent.value)}]" if isinstance(parent.value, list) else parent_path
            self.count(1, line, path)
            before = self.values - 1
            node = self.node(event, line, path)
            if not stack:
                root = node
            elif key is None:
                assert isinstance(parent.value, list)
                parent.value.append(node)
            elif key[0] in parent.keys:
                self.problems.add(key[1], path, f"is set twice, first on line {parent.keys[key[0]]}")
            else:
                assert isinstance(parent.value, dict)
                parent.value[key[0]] = node
                parent.keys[key[0]] = key[1]
            if isinstance(event, yaml.CollectionStartEvent):
                stack.append((node, path, [None], event.anchor, before))
            elif isinstance(event, yaml.ScalarEvent) and event.anchor:
                self.anchors[event.anchor] = (node, 1)
        return root if root is not None else Node({}, 1)

    def count(self, values: int, line: int, path: str) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            raise _Stop(
                line, path, f"the document holds more than {MAX_VALUES} values (aliases counted as written out)"
            )

    def key(self, event: yaml.NodeEvent, line: int, path: str) -> tuple[str, int]:
        if not isinstance(event, yaml.ScalarEvent):
            raise _Stop(line, path, "a key must be plain text")
        if event.value == "<<" and event.style is None:
            raise _Stop(line, path, "merge keys (<<) are not supported: write the values out")
        if event.anchor:
            raise _Stop(line, path, "a key cannot carry an anchor")
        return event.value, line

    def node(self, event: yaml.NodeEvent, line: int, path: str) -> Node:
        if isinstance(event, yaml.AliasEvent):
            target = self.anchors.get(event.anchor or "")
            if target is None:
                raise _Stop(line, path, f"alias *{event.anchor} has no finished anchor before it")
            self.count(target[1], line, path)
            return target[0]
        if isinstance(event, yaml.ScalarEvent):
            return Node(self.scalar(event, line, path), line)
        tag = event.tag if isinstance(event, yaml.CollectionStartEvent) else None
        if tag not in (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise _Stop(line, path, f"tag {tag} is not supported")
        return Node({} if isinstance(event, yaml.MappingStartEvent) else [], line)

    def scalar(self, event: yaml.ScalarEvent, line: int, path: str) -> Scalar:
        tag = event.tag
        if tag in (None, "!"):
            tag = self.resolver.resolve(yaml.ScalarNode, event.value, event.implicit)  # type: ignore[no-untyped-call]
            if tag not in _PLAIN:
                return event.value
        elif tag not in _PLAIN:
            raise _Stop(line, path, f"tag {tag} is not supported")
        try:
            value: Scalar = self.resolver.construct_object(yaml.ScalarNode(tag, event.value))
        except (ValueError, KeyError, OverflowError, yaml.YAMLError):
            raise _Stop(line, path, f"cannot be read as {tag.rpartition(':')[2]}") from None
        return value


# --- typed decoding -------------------------------------------------------------------------------------------------


def decode(
    cls: type[Any], node: Node, path: str, problems: Problems, *, ignored: Mapping[str, str] | None = None
) -> Any:
    """Make an instance of the dataclass `cls` from a mapping; None when anything in it is wrong (see `problems`).

    Keys are the field names in lowerCamelCase; upper and lower case are not told apart (as in Go's decoder, whose files
    these are). `ignored` are keys (lower case) to step over.
    """
    if node.value is None:
        node = Node({}, node.line)
    if not isinstance(node.value, dict):
        problems.add(node, path, f"must be a mapping, got {show(node)}")
        return None
    before = len(problems.found)
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name.replace("_", "").lower(): f for f in dataclasses.fields(cls) if f.init}
    values: dict[str, Any] = {}
    for key, child in node.value.items():
        at = join(path, key)
        known = fields.get(key.lower())
        if known is None:
            if key.lower() not in (ignored or {}):
                names = [camel(f.name) for f in fields.values()]
                problems.add(node.keys[key], at, unknown("key", key, names))
        elif known.name in values:
            problems.add(node.keys[key], at, f"is set twice, in different letter case, for {camel(known.name)}")
        else:
            values[known.name] = convert(hints[known.name], child, at, problems)
    for f in fields.values():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            problems.add(node, join(path, camel(f.name)), "is required")
    if len(problems.found) > before:
        return None
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        problems.add(node, path, str(error))
        return None


def convert(hint: Any, node: Node, path: str, problems: Problems) -> Any:
    """Turn a node into a value of the type `hint`; on a mismatch note the problem and return None."""
    bounds, unit = Range(), ""
    if typing.get_origin(hint) is typing.Annotated:
        hint, *notes = typing.get_args(hint)
        for note in notes:
            bounds = note if isinstance(note, Range) else bounds
            unit = note.name if isinstance(note, Unit) else unit
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if node.value is None and type(None) in args:
            return None
        rest = [a for a in args if a is not type(None)]
        return convert(typing.Annotated[rest[0], bounds, Unit(unit)] if len(rest) == 1 else Any, node, path, problems)
    if hint is Any:
        return plain(node)
    if unit == "duration":
        return _number(seconds(node.value), "a duration such as 2s or 500ms", bounds, node, path, problems)
    if hint is float:
        value = node.value
        number = (
            float(value) if isinstance(value, int | float) and not isinstance(value, bool) and _fits(value) else None
        )
        return _number(number, "a number", bounds, node, path, problems)
    if hint is int:
        value = node.value
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        number = whole if isinstance(whole, int) and not isinstance(whole, bool) and _fits(whole) else None
        return _number(number, "a whole number", bounds, node, path, problems)
    if hint in (bool, str):
        if isinstance(node.value, hint):
            return node.value
        problems.add(node, path, f"must be {'true or false' if hint is bool else 'text'}, got {show(node)}")
        return None
    if origin is Literal:
        if node.value in args and not isinstance(node.value, bool):
            return node.value
        problems.add(node, path, f"must be one of {', '.join(map(str, args))}, got {show(node)}")
        return None
    if origin in (list, tuple) or hint in (list, tuple):
        if not isinstance(node.value, list):
            problems.add(node, path, f"must be a list, got {show(node)}")
            return None
        items = [convert(args[0] if args else Any, n, f"{path}[{i}]", problems) for i, n in enumerate(node.value)]
        return items if list in (origin, hint) else tuple(items)
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping" or hint is dict:
        if not isinstance(node.value, dict):
            problems.add(node, path, f"must be a mapping, got {show(node)}")
            return None
        inner = args[1] if args else Any
        return {k: convert(inner, n, join(path, k), problems) for k, n in node.value.items()}
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return decode(hint, node, path, problems)
    problems.add(node, path, f"the plugin declares a type this reader does not know: {hint}")
    return None


def _number(number: float | None, what: str, bounds: Range, node: Node, path: str, problems: Problems) -> float | None:
    if number is None or not math.isfinite(number):
        problems.add(node, path, f"must be {what}, got {show(node)}")
    elif number < bounds.min:
        problems.add(node, path, f"must be at least {bounds.min:g}, got {show(node)}")
    elif number > bounds.max:
        problems.add(node, path, f"must be at most {bounds.max:g}, got {show(node)}")
    else:
        return number
    return None


def _fits(number: float) -> bool:
    """Whole numbers beyond 63 bits are never meant, and float() of a longer one raises."""
    return not isinstance(number, int) or -(1 << 63) <= number < 1 << 63


_DURATION_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(value: Value) -> float | None:
    """Seconds of a duration as Go writes it (`1m30s`, `500ms`, `0`); None when it is not one."""
    if value == 0 and not isinstance(value, bool):
        return 0.0
    if not isinstance(value, str):
        return None
    if value == "0":
        return 0.0
    total, end = 0.0, 0
    for part in _DURATION_PART.finditer(value):
        if part.start() != end:
            return None
        total += float(part[1]) * _SECONDS[part[2]]
        end = part.end()
    return total if end and end == len(value) else None


# --- words ----------------------------------------------------------------------------------------------------------


def plain(node: Node) -> Any:
    """The node as plain Python values."""
    if isinstance(node.value, dict):
        return {k: plain(v) for k, v in node.value.items()}
    if isinstance(node.value, list):
        return [plain(v) for v in node.value]
    return node.value


def join(path: str, key: str) -> str:
    key = key if len(key) <= 60 else key[:57] + "..."
    return f"{path}.{key}" if path else key


def camel(name: str) -> str:
    """`idle_threshold` -> `idleThreshold`."""
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)


def unknown(kind: str, word: str, known: Iterable[str]) -> str:
    """'unknown key, did you mean ...?' for a word that is none of `known`."""
    names = sorted(known)
    lower = {n.lower(): n for n in names}
    near = difflib.get_close_matches(word.lower()[:100], list(lower), n=1, cutoff=0.6)
    if near:
        return f"unknown {kind}; did you mean {lower[near[0]]!r}?"
    if not names:
        return f"unknown {kind}; none is taken here"
    listed = ", ".join(names) if len(names) <= 12 else ", ".join(names[:12]) + ", ..."
    return f"unknown {kind}; known: {listed}"


def show(node: Node) -> str:
    """A value as an error message may quote it: short, one line."""
    value = node.value
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{one_line(value[:40])}{"..." if len(value) > 40 else ""}"'
    if isinstance(value, int) and not _fits(value):
        return "a number beyond 64 bits"
    return str(value)


def one_line(text: str) -> str:
    """The text with what would break or hide a line of output replaced by `?`."""
    return "".join(c if c.isprintable() else "?" for c in text.replace("\n", " "))
