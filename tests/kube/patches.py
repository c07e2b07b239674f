"""The three kinds of patch that an API server takes: JSON merge (RFC 7386), strategic merge, JSON patch (RFC 6902).

Pure: an object and a patch in, the new object out; ValueError for a patch that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

MERGE_KEYS: Mapping[str, str] = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "podIPs": "ip",
    "ownerReferences": "uid",
    "imagePullSecrets": "name",
}
"""Lists of the built-in kinds that are merged element by element -> the key they are told apart by (`patchMergeKey`
in the API's types). `ports` is told apart by what it is in."""


def merge(target: Any, patch: Any) -> Any:
    """JSON merge patch: null deletes, lists are replaced."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strategic(target: Any, patch: Any, field: str = "") -> Any:
    """Strategic merge patch, with `$patch: delete` and `replace`, and `$setElementOrder` taken for granted."""
    if isinstance(patch, list):
        return _strategic_list(target if isinstance(target, list) else [], patch, field)
    if not isinstance(patch, dict):
        return deepcopy(patch)
    if patch.get("$patch") == "replace":
        return {k: deepcopy(v) for k, v in patch.items() if k != "$patch"}
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [item for item in result.get(name, []) if item not in value]
        elif key.startswith("$"):
            continue
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = strategic(result.get(key), value, key)
    return result


def _strategic_list(target: list[Any], patch: list[Any], field: str) -> list[Any]:
    key = MERGE_KEYS.get(field)
    if field == "ports":
        elements = [item for item in [*target, *patch] if isinstance(item, dict)]
        key = "containerPort" if any("containerPort" in e for e in elements) else "port"
    if field == "finalizers":
        return [*target, *(item for item in patch if item not in target)]
    if key is None:
        return deepcopy(patch)
    if any(isinstance(item, dict) and item.get("$patch") == "replace" for item in patch):
        return [deepcopy(item) for item in patch if item.get("$patch") != "replace"]
    result = list(target)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise ValueError(f"{field}: an element without its merge key {key!r}")
        place = next((i for i, known in enumerate(result) if known.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            if place is not None:
                del result[place]
        elif place is None:
            result.append(deepcopy(item))
        else:
            result[place] = strategic(result[place], item)
    return result


def json_patch(target: Any, operations: Any) -> Any:
    """JSON patch: add, remove, replace, move, copy, test."""
    if not isinstance(operations, list):
        raise ValueError("a JSON patch is a list of operations")
    result = deepcopy(target)
    for operation in operations:
        kind, path = operation["op"], _pointer(operation["path"])
        if kind in ("move", "copy"):
            source = _pointer(operation["from"])
            value = deepcopy(_at(result, source))
            if kind == "move":
                _remove(result, source)
            _add(result, path, value)
        elif kind == "add":
            _add(result, path, deepcopy(operation["value"]))
        elif kind == "remove":
            _remove(result, path)
        elif kind == "replace":
            _remove(result, path)
            _add(result, path, deepcopy(operation["value"]))
        elif kind == "test":
            if _at(result, path) != operation["value"]:
                raise ValueError(f"test of {operation['path']} failed")
        else:
            raise ValueError(f"unknown operation {kind!r}")
    return result


def _pointer(text: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _at(value: Any, path: list[str]) -> Any:
    try:
        for part in path:
            value = value[int(part)] if isinstance(value, list) else value[part]
    except (KeyError, IndexError, TypeError, ValueError):
        raise ValueError(f"there is nothing at /{'/'.join(path)}") from None
    return value


def _add(root: Any, path: list[str], value: Any) -> None:
    parent = _at(root, path[:-1])
    if isinstance(parent, list):
        parent.insert(len(parent) if path[-1] == "-" else int(path[-1]), value)
    else:
        parent[path[-1]] = value


def _remove(root: Any, path: list[str]) -> None:
    _at(root, path)
    parent = _at(root, path[:-1])
    del parent[int(path[-1]) if isinstance(parent, list) else path[-1]]
