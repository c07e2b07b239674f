"""Configuration documents: bounded YAML in which every value knows its line, and the problems found in it.

In: text from a file a person wrote. Out: a tree of `Node`s, and `Problem`s, all of them, each with the line and the
path of the value it speaks of. Pure but for `read_file`. `epp.decoding` makes typed values of the nodes.

Bounded means: size, depth and number of values are limited, with aliases counted as written out, so that no document
can exhaust the process. A repeated key is a problem; tags, merge keys and several documents are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_VALUES = 50_000
MAX_PROBLEMS = 200

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
    """Collects what is wrong, so that a reader of the errors can mend all of them at once. Keeps `MAX_PROBLEMS`."""

    def __init__(self) -> None:
        self.count = 0
        self.found: dict[Problem, None] = {}

    def add(self, node: Node | int, path: str, message: str) -> None:
        self.count += 1
        if len(self.found) < MAX_PROBLEMS:
            line = node if isinstance(node, int) else node.line
            self.found[Problem(line, one_line(path), one_line(message))] = None

    def sorted(self) -> tuple[Problem, ...]:
        """Each once, in the order of lines."""
        return tuple(sorted(self.found, key=lambda p: p.line))


class UnreadableFile(Exception):
    """A file that is not there, is no text or is too long; the text says which."""


def read_file(path: Path) -> str:
    """The text of a file. Whatever lies there now (`/dev/zero`, a core dump), no more than `MAX_BYTES` are read.

    Raises UnreadableFile.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise UnreadableFile(f"the file is longer than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"is not UTF-8 text (byte {error.start})") from None


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
    if isinstance(value, int) and not fits(value):
        return "a number beyond 64 bits"
    return str(value)


def one_line(text: str) -> str:
    """The text with what would break or hide a line of output replaced by `?`."""
    return "".join(c if c.isprintable() else "?" for c in text.replace("\n", " "))


def fits(number: float) -> bool:
    """Whole numbers beyond 63 bits are never meant, and float() of a longer one raises."""
    return not isinstance(number, int) or -(1 << 63) <= number < 1 << 63
