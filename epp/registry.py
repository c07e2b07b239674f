"""The registry: which plugin types exist, and the class behind each.

In: the shipped packages, installed distributions with entry points in the group `kvsteer.plugins`, and `module:Class`
references. Out: `Registry`, asked by type name. A plugin needs no registration: a class with a `type` in one of the
scanned places is found.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from epp.plugin import Decider, Filter, Picker, Plugin, Producer, ProfileHandler, Scorer

ENTRY_POINT_GROUP = "kvsteer.plugins"
SHIPPED = ("scorers", "filters", "epp.pickers", "epp.handlers", "epp.disagg", "epp.kvcache", "epp.estimate")
ROLES: dict[str, type[Plugin[Any]]] = {
    "producer": Producer,
    "filter": Filter,
    "scorer": Scorer,
    "picker": Picker,
    "handler": ProfileHandler,
    "decider": Decider,
}

PluginClass = type[Plugin[Any]]


class RegistryError(Exception):
    """A plugin type that cannot be had; the message says why in one line."""


class Registry:
    """Type name or alias -> plugin class. Two classes with one type are an error that names both."""

    def __init__(self, classes: Iterable[PluginClass] = (), broken: dict[str, str] | None = None) -> None:
        self._by_name: dict[str, PluginClass] = {}
        self._broken = dict(broken or {})
        for cls in classes:
            self.add(cls)

    def add(self, cls: PluginClass) -> None:
        for name in (cls.type, *cls.aliases):
            other = self._by_name.get(name)
            if other is not None and other is not cls:
                raise RegistryError(f'plugin type "{name}" is declared twice: by {where(other)} and by {where(cls)}')
            self._by_name[name] = cls

    def names(self) -> list[str]:
        """Every type and alias."""
        return sorted(self._by_name)

    def classes(self) -> list[PluginClass]:
        """Every class once, by type."""
        return sorted(set(self._by_name.values()), key=lambda cls: cls.type)

    def broken(self) -> dict[str, str]:
        """Entry points that could not be loaded: name -> why."""
        return dict(self._broken)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def find(self, name: str, folder: Path | None = None) -> PluginClass | None:
        """The class of a type, an alias or a `module:Class`; None when nothing has that name.

        A module is looked for as Python does (PYTHONPATH, installed packages), then as a file in `folder`, the place of
        the configuration. Raises RegistryError when the name is known but the class cannot be loaded.
        """
        if ":" in name:
            return _load(name, folder)
        if name in self._broken and name not in self._by_name:
            raise RegistryError(self._broken[name])
        return self._by_name.get(name)


def roles(cls: PluginClass) -> tuple[str, ...]:
    """What a class can serve as: any of the keys of `ROLES`."""
    return tuple(role for role, base in ROLES.items() if issubclass(cls, base))


def where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def is_shipped(cls: type) -> bool:
    """True for our own plugins, which run without a guard."""
    return any(cls.__module__ == name or cls.__module__.startswith(name + ".") for name in SHIPPED)


@cache
def default_registry() -> Registry:
    """Shipped plugins and those of installed distributions."""
    registry = Registry(_shipped())
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            registry.add(_checked(point.load(), f"entry point {point.name}"))
        except (Exception, SystemExit) as error:  # a foreign package may fail in any way, and must not stop the others
            registry._broken[point.name] = _entry_point_fault(point, error)
    return registry


def _shipped() -> Iterator[PluginClass]:
    for name in SHIPPED:
        module = importlib.import_module(name)
        yield from _declared(module)
        for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
            yield from _declared(importlib.import_module(info.name))


def _declared(module: ModuleType) -> Iterator[PluginClass]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Plugin) and value.__module__ == module.__name__:  # noqa: SIM102
            if "type" in vars(value) and roles(value):
                yield value


def _entry_point_fault(point: EntryPoint, error: BaseException) -> str:
    if isinstance(error, RegistryError):
        return str(error)
    return f"entry point {point.name} = {point.value} cannot be loaded: {type(error).__name__}: {error}"


def _load(reference: str, folder: Path | None) -> PluginClass:
    module_name, _, class_name = reference.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
        raise RegistryError(f'"{reference}" is not of the form module:Class')
    try:
        module = _from_folder(module_name, folder) or importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the foreign module's top level does
        raise RegistryError(f'module "{module_name}" cannot be loaded: {type(error).__name__}: {error}') from error
    cls = getattr(module, class_name, None)
    if cls is None:
        raise RegistryError(f'module "{module_name}" ({module.__file__}) has no class {class_name}')
    return _checked(cls, reference)


def _checked(cls: Any, reference: str) -> PluginClass:
    if not (isinstance(cls, type) and issubclass(cls, Plugin) and roles(cls)):
        raise RegistryError(f"{reference} is not a Filter, Scorer, Picker, ProfileHandler or Producer of epp.plugin")
    if not isinstance(getattr(cls, "type", None), str):
        raise RegistryError(f"{reference} has no class attribute `type`")
    return cls


def _from_folder(module_name: str, folder: Path | None) -> ModuleType | None:
    """The module as a file in `folder`, unless Python finds one of that name by itself; read anew when it changed.

    It lives in `sys.modules` under a name made of its path and content, so that equal names in two folders do not meet
    and a changed file gives new classes while the old ones go on serving until the reload is done.
    """
    if folder is None or importlib.util.find_spec(module_name.partition(".")[0]) is not None:
        return None
    path = folder.joinpath(*module_name.split(".")).with_suffix(".py")
    if not path.is_file():
        return None
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + path.read_bytes()).hexdigest()[:16]
    name = f"{module_name}@{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
