"""Label and field selectors, as the API's query parameters spell them. Pure; ValueError for what is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Json = dict[str, Any]
Predicate = Callable[[Json], bool]

_REQUIREMENT = re.compile(
    r"\s*(?:(?P<set_key>[\w./-]+)\s+(?P<op>in|notin)\s*\((?P<values>[^)]*)\)"
    r"|(?P<absent>!)\s*(?P<absent_key>[\w./-]+)"
    r"|(?P<key>[\w./-]+)\s*(?:(?P<eq>==|=|!=)\s*(?P<value>[\w.-]*))?)\s*(?:,|$)"
)

FIELDS: Mapping[str, tuple[str, ...]] = {
    "pods": ("spec.nodeName", "spec.restartPolicy", "status.phase", "status.podIP"),
    "events": ("involvedObject.kind", "involvedObject.name", "involvedObject.namespace", "involvedObject.uid"),
}
"""Resource -> fields that may be selected by, beside `metadata.name` and `metadata.namespace`."""


def labels(text: str) -> Predicate:
    """`a=b,c!=d,e in (f,g),h,!i`; an empty one takes everything."""
    tests: list[Callable[[Mapping[str, str]], bool]] = []
    place = 0
    while place < len(text):
        match = _REQUIREMENT.match(text, place)
        if match is None or match.end() == place:
            raise ValueError(f"unable to parse requirement: {text[place:]!r}")
        tests.append(_label_test(match))
        place = match.end()
    return lambda obj: all(test(obj["metadata"].get("labels") or {}) for test in tests)


def _label_test(match: re.Match[str]) -> Callable[[Mapping[str, str]], bool]:
    if key := match["set_key"]:
        values = {value.strip() for value in match["values"].split(",")}
        if match["op"] == "in":
            return lambda found: found.get(key) in values
        return lambda found: found.get(key) not in values
    if absent := match["absent_key"]:
        return lambda found: absent not in found
    key, value = match["key"], match["value"]
    if match["eq"] == "!=":
        return lambda found: found.get(key) != value
    if match["eq"]:
        return lambda found: found.get(key) == value
    return lambda found: key in found


def fields(text: str, resource: str) -> Predicate:
    """`metadata.name=x,status.phase!=Running`."""
    tests: list[tuple[tuple[str, ...], str, bool]] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([\w.]+)(==|=|!=)(.*)", part)
        if match is None:
            raise ValueError(f"invalid field selector: {part!r}")
        path, operator, value = match.groups()
        if path not in ("metadata.name", "metadata.namespace", *FIELDS.get(resource, ())):
            raise ValueError(f"field label not supported: {path}")
        tests.append((tuple(path.split(".")), value, operator != "!="))

    def takes(obj: Json) -> bool:
        return all((_field(obj, path) == value) is wanted for path, value, wanted in tests)

    return takes


def _field(obj: Any, path: tuple[str, ...]) -> str:
    for part in path:
        obj = obj.get(part) if isinstance(obj, dict) else None
    return "" if obj is None else str(obj)
