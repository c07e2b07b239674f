"""Custom resources by the schemas of their CRDs: unknown fields pruned, defaults put in, the rest checked.

In: an object as a client sent it, and the `openAPIV3Schema` of its CRD. Out: the object as it is stored; `Invalid` with
one line for each fault, as a 422 lists them. Rules in CEL are known by their text: the four that the CRDs here have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import jsonschema

Json = dict[str, Any]
_ALWAYS = frozenset({"apiVersion", "kind", "metadata"})


class Invalid(ValueError):
    """The object is not what its schema asks for: path and message of each fault."""

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{path}: {message}" for path, message in faults))
        self.faults = faults


_RULES: Mapping[str, Callable[[Any], bool]] = {
    "self.all(p1, self.exists_one(p2, p1.number==p2.number))": lambda ports: (
        len({p["number"] for p in ports}) == len(ports)
    ),
    "self.kind != 'Service' || has(self.port)": lambda ref: ref.get("kind") != "Service" or "port" in ref,
}


def admit(obj: Json, schema: Json) -> tuple[Json, list[str]]:
    """The object to store, and the paths of fields that the schema does not know (dropped). Raises Invalid."""
    stored, unknown = deepcopy(obj), list[str]()
    _prune(stored, schema, "", unknown)
    _default(stored, schema)
    validator = jsonschema.Draft7Validator(schema)
    faults = [
        (".".join(map(str, error.absolute_path)) or "<root>", error.message)
        for error in sorted(validator.iter_errors(stored), key=lambda e: list(map(str, e.absolute_path)))
    ]
    if not faults:
        _rules(stored, schema, "", faults)
    if faults:
        raise Invalid(faults)
    return stored, unknown


def _prune(value: Any, schema: Json, path: str, unknown: list[str]) -> None:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, dict):
        properties, additional = schema.get("properties"), schema.get("additionalProperties")
        for key in list(value):
            if properties is not None and key in properties:
                if not (path == "" and key in _ALWAYS):
                    _prune(value[key], properties[key], f"{path}.{key}", unknown)
            elif isinstance(additional, dict):
                _prune(value[key], additional, f"{path}.{key}", unknown)
            elif not (path == "" and key in _ALWAYS):
                unknown.append(f"{path}.{key}".lstrip("."))
                del value[key]
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _prune(item, schema.get("items", {}), f"{path}[{i}]", unknown)


def _default(value: Any, schema: Json) -> None:
    if isinstance(value, dict):
        for key, sub in schema.get("properties", {}).items():
            if key not in value and "default" in sub:
                value[key] = deepcopy(sub["default"])
            if key in value:
                _default(value[key], sub)
    elif isinstance(value, list):
        for item in value:
            _default(item, schema.get("items", {}))


def _rules(value: Any, schema: Json, path: str, faults: list[tuple[str, str]]) -> None:
    for rule in schema.get("x-kubernetes-validations", ()):
        if not _RULES[rule["rule"]](value):
            faults.append((path.lstrip("."), rule["message"]))
    if isinstance(value, dict):
        for key, sub in schema.get("properties", {}).items():
            if key in value:
                _rules(value[key], sub, f"{path}.{key}", faults)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _rules(item, schema.get("items", {}), f"{path}[{i}]", faults)
