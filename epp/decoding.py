"""Typed decoding: nodes of a document into frozen dataclasses, strictly, by their type hints.

In: a `Node`, a dataclass. Out: an instance, or None and the problems noted. Strict means: unknown keys, wrong types,
numbers out of range, NaN and infinity are problems, and every one is found. Used for the configuration, its plugins'
parameters (`epp.plugin` says which types they may have) and endpoint files.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from epp.document import Node, Problems, Value, fits, join, plain, show, unknown
from epp.plugin import Range, Unit


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
    before = problems.count
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
    if problems.count > before:
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
            float(value) if isinstance(value, int | float) and not isinstance(value, bool) and fits(value) else None
        )
        return _number(number, "a number", bounds, node, path, problems)
    if hint is int:
        value = node.value
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        number = whole if isinstance(whole, int) and not isinstance(whole, bool) and fits(whole) else None
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


def camel(name: str) -> str:
    """`idle_threshold` -> `idleThreshold`."""
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)
