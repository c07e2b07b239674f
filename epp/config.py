"""The configuration of the picker: the field's `EndpointPickerConfig`, read strictly.

In: a YAML file as llm-d's router takes it (`llm-d.ai/v1alpha1`, or the older `inference.networking.x-k8s.io/v1alpha1`).
Out: a frozen `PickerConfig` with every default filled in, or a `ConfigError` that lists all problems, one line each:
`FILE:LINE: schedulingProfiles[0].plugins[1].weight: must be a number, got "x"`.

What the field has and this picker does by itself (scraping, parsing) is accepted with a warning that says so. What this
picker lacks is an error that names it: a file never silently means less than it says. The order of `plugins` matters
for nothing but the order of filters in a profile that was not written out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from epp import field_types
from epp.decoding import camel, convert, decode
from epp.document import Node, Problem, Problems, UnreadableFile, join, one_line, parse, read_file, show, unknown
from epp.model_config import ModelConfig, TokenProducer
from epp.plugin import DEFAULT_PRODUCERS, Decider, Filter, Picker, Plugin, Producer, ProfileHandler, Scorer
from epp.registry import Registry, RegistryError, default_registry, roles

API_VERSIONS = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
KIND = "EndpointPickerConfig"
SECTIONS = ("apiVersion", "kind", "plugins", "schedulingProfiles", "models", *field_types.SECTIONS)
TOKEN_PRODUCERS = ("token-producer", "tokenizer")
"""Plugin types of llm-d that configure what is an entry of `models` here."""

DEFAULT_PICKER = "max-score-picker"
DEFAULT_HANDLER = "single-profile-handler"
DEFAULT_FILE = "default_config.yaml"


class ConfigError(Exception):
    """A configuration that cannot be used; `str()` gives one line per problem."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(f"{source}:{problem}" for problem in problems))
        self.source = source
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """One plugin to make: its name in this file, its class and its parameters (an instance of `cls.Parameters`)."""

    name: str
    cls: type[Plugin[Any]]
    parameters: Any
    line: int = 0
    """0 = added by us, not in the file."""


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """One scheduling profile, by names of plugins."""

    name: str
    filters: tuple[str, ...]
    scorers: tuple[tuple[str, float], ...]
    picker: str


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """A whole configuration, consistent and complete."""

    plugins: tuple[PluginConfig, ...]
    producers: tuple[str, ...]
    """Names, each after those that write what it reads."""
    profiles: tuple[ProfileConfig, ...]
    handler: str
    source: str
    warnings: tuple[str, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    """Models whose prompts are tokenised; no name or alias occurs twice."""

    def plugin(self, name: str) -> PluginConfig:
        return next(p for p in self.plugins if p.name == name)


def load(path: str | Path, registry: Registry | None = None) -> PickerConfig:
    """Read a configuration file. Raises ConfigError for everything wrong with it, unreadable included."""
    path = Path(path)
    try:
        text = read_file(path)
    except UnreadableFile as error:
        raise ConfigError(str(path), [Problem(1, "", str(error))]) from None
    return read(text, source=str(path), folder=path.parent, registry=registry)


def default_text() -> str:
    """The built-in configuration, as the file it is."""
    return files("epp").joinpath(DEFAULT_FILE).read_text()


def load_default(registry: Registry | None = None) -> PickerConfig:
    """The built-in configuration, used when no file is given."""
    return read(default_text(), source=DEFAULT_FILE, registry=registry)


def read(
    text: str, *, source: str = "config", folder: Path | None = None, registry: Registry | None = None
) -> PickerConfig:
    """Read a configuration from text. `folder`: where `module:Class` references may find their file."""
    problems = Problems()
    root = parse(text, problems)
    config = None
    if root is not None:
        config = _Reader(source, folder, registry or default_registry(), problems).read(root)
    if config is None or problems.found:
        raise ConfigError(source, problems.sorted())
    return config


@dataclass(frozen=True, slots=True)
class _PluginEntry:
    type: str
    name: str = ""
    parameters: Any = None


@dataclass(frozen=True, slots=True)
class _Step:
    plugin_ref: str
    weight: float | None = None


class _Reader:
    """Reads one document. Every method notes problems and goes on, so that all are reported together."""

    def __init__(self, source: str, folder: Path | None, registry: Registry, problems: Problems) -> None:
        self.source, self.folder, self.registry, self.problems = source, folder, registry, problems
        self.warnings: list[str] = []
        self.plugins: dict[str, PluginConfig] = {}
        self.models: dict[str, ModelConfig] = {}
        """By name and by every alias."""
        self.silent: set[str] = set()
        """Names that may be referenced without a plugin behind them: built in here, or already reported."""

    def warn(self, line: int, path: str, message: str) -> None:
        self.warnings.append(f"{self.source}:{line}: {one_line(path)}: {one_line(message)}")

    def read(self, root: Node) -> PickerConfig | None:
        if not isinstance(root.value, dict):
            self.problems.add(root, "", f"must be a mapping with apiVersion, kind and plugins, got {show(root)}")
            return None
        for key, line in root.keys.items():
            if key not in SECTIONS:
                self.problems.add(line, key, unknown("key", key, SECTIONS))
        self.constant(root, "apiVersion", API_VERSIONS)
        self.constant(root, "kind", (KIND,))
        self.read_models(self.items(root.value.get("models"), "models"))
        self.read_plugins(self.items(root.value.get("plugins"), "plugins"))
        profiles = self.read_profiles(self.items(root.value.get("schedulingProfiles"), "schedulingProfiles"))
        handler = self.handler(root, profiles)
        self.check_named(handler, profiles)
        self.warn_of_unused(profiles)
        self.read_other_sections(root)
        producers = self.producers(root)
        if self.problems.found:
            return None
        warnings = tuple(dict.fromkeys(self.warnings))
        models = tuple({model.name: model for model in self.models.values()}.values())
        return PickerConfig(
            tuple(self.plugins.values()), producers, tuple(profiles), handler, self.source, warnings, models
        )

    def constant(self, root: Node, key: str, allowed: Sequence[str]) -> None:
        assert isinstance(root.value, dict)
        node = root.value.get(key)
        if node is None:
            self.problems.add(root, key, f"is required: {allowed[0]}")
        elif node.value not in allowed or not isinstance(node.value, str):
            self.problems.add(node, key, f"must be {' or '.join(allowed)}, got {show(node)}")

    def items(self, node: Node | None, path: str) -> list[tuple[Node, str]]:
        if node is None or node.value is None:
            return []
        if not isinstance(node.value, list):
            self.problems.add(node, path, f"must be a list, got {show(node)}")
            return []
        return [(item, f"{path}[{i}]") for i, item in enumerate(node.value)]

    # --- plugins ---

    def read_plugins(self, items: list[tuple[Node, str]]) -> None:
        lines: dict[str, int] = {}
        for node, path in items:
            entry = decode(_PluginEntry, node, path, self.problems)
            if entry is None:
                self.silence(node)
                continue
            name = entry.name or entry.type
            if name in lines:
                self.problems.add(node, path, f'the name "{name}" is taken by the plugin on line {lines[name]}')
                continue
            lines[name] = node.line
            if entry.type in TOKEN_PRODUCERS and self.registry.find(entry.type) is None:
                self.read_token_producer(name, node, path)
            else:
                self.read_plugin(entry.type, name, node, path)

    def silence(self, node: Node) -> None:
        """A broken entry was reported once; references to it are not reported again."""
        if isinstance(node.value, dict):
            for key in ("name", "type"):
                if key in node.value and isinstance(node.value[key].value, str):
                    self.silent.add(str(node.value[key].value))

    def read_plugin(self, type_: str, name: str, node: Node, path: str) -> None:
        cls = self.find(type_, name, node, path)
        if cls is None:
            return
        assert isinstance(node.value, dict)
        parameters = next((v for k, v in node.value.items() if k.lower() == "parameters"), Node(None, node.line))
        at = join(path, "parameters")
        ignored = {key.lower(): why for key, why in cls.ignored_parameters.items()}
        for key, line in parameters.keys.items():
            if key.lower() in ignored:
                self.warn(line, join(at, key), f"has no effect: {ignored[key.lower()]}")
        value = decode(cls.Parameters, parameters, at, self.problems, ignored=ignored)
        if value is None:
            self.silent.add(name)
        else:
            self.plugins[name] = PluginConfig(name, cls, value, node.line)

    def find(self, type_: str, name: str, node: Node, path: str) -> type[Plugin[Any]] | None:
        try:
            cls = self.registry.find(type_, self.folder)
        except RegistryError as error:
            self.problems.add(node, join(path, "type"), str(error))
            self.silent.add(name)
            return None
        if cls is not None:
            return cls
        self.silent.add(name)
        if type_ in field_types.BUILT_IN:
            self.warn(node.line, path, f'"{type_}" has no effect: {field_types.BUILT_IN[type_]}')
        elif type_ in field_types.ABSENT:
            message = f'we do not have plugin type "{type_}" of llm-d; {field_types.ABSENT[type_]}'
            self.problems.add(node, join(path, "type"), message)
        else:
            self.problems.add(node, join(path, "type"), f'"{type_}": {unknown("type", type_, self.registry.names())}')
        return None

    def inject(self, type_: str, node: Node) -> str:
        """Add a plugin the file did not name, with its defaults; its name."""
        if type_ not in self.plugins:
            cls = self.registry.find(type_)
            if cls is None:
                self.problems.add(node, "", f'needs the plugin type "{type_}", which is not installed')
                return type_
            self.plugins[type_] = PluginConfig(type_, cls, cls.Parameters())
        return type_

    # --- models ---

    def read_models(self, items: list[tuple[Node, str]]) -> None:
        for node, path in items:
            model = decode(ModelConfig, node, path, self.problems)
            if model is not None:
                folder = str(self.folder / model.path) if self.folder and model.path else model.path
                self.add_model(model.at(node.line, folder), node, path)

    def add_model(self, model: ModelConfig, node: Node, path: str) -> None:
        for name in (model.name, *model.aliases):
            other = self.models.setdefault(name, model)
            if other is not model:
                self.problems.add(node, path, f'the name "{name}" is taken by the model on line {other.line}')

    def read_token_producer(self, name: str, node: Node, path: str) -> None:
        """llm-d's plugin, which names a model and who renders its prompts; what it is called is of no matter here."""
        self.silent.add(name)
        assert isinstance(node.value, dict)
        parameters = next((v for k, v in node.value.items() if k.lower() == "parameters"), Node(None, node.line))
        at = join(path, "parameters")
        producer = decode(TokenProducer, parameters, at, self.problems)
        try:
            model = producer.model if producer else None
        except ValueError as error:
            self.problems.add(node, at, str(error))
            return
        if model is not None and model.name not in self.models:
            self.add_model(model.at(node.line, ""), node, at)
        elif producer is not None:
            why = "every request has an estimate" if model is None else f'models has an entry for "{model.name}"'
            self.warn(node.line, path, f"has no effect: {why}")

    # --- profiles ---

    def read_profiles(self, items: list[tuple[Node, str]]) -> list[ProfileConfig]:
        if not items:
            steps = [(p.name, 1.0) for p in self.plugins.values()]
            return [self.profile("default", steps, Node(None, 1), "schedulingProfiles")]
        profiles: list[ProfileConfig] = []
        lines: dict[str, int] = {}
        for node, path in items:
            if not isinstance(node.value, dict):
                self.problems.add(node, path, f"must be a mapping, got {show(node)}")
                continue
            for key, line in node.keys.items():
                if key not in ("name", "plugins"):
                    self.problems.add(line, join(path, key), unknown("key", key, ("name", "plugins")))
            name = convert(str, node.value["name"], join(path, "name"), self.problems) if "name" in node.value else ""
            if not name:
                self.problems.add(node, join(path, "name"), "is required and must not be empty")
            elif name in lines:
                self.problems.add(node, join(path, "name"), f'"{name}" is taken by the profile on line {lines[name]}')
            else:
                lines[name] = node.line
            steps = self.steps(self.items(node.value.get("plugins"), join(path, "plugins")))
            profiles.append(self.profile(name or "", steps, node, path))
        return profiles

    def steps(self, items: list[tuple[Node, str]]) -> list[tuple[str, float]]:
        steps: list[tuple[str, float]] = []
        seen: set[str] = set()
        for node, path in items:
            step = decode(_Step, node, path, self.problems)
            if step is None:
                continue
            name = step.plugin_ref
            plugin = self.referenced(name, node, join(path, "pluginRef"))
            if plugin is None:
                continue
            if name in seen:
                self.problems.add(node, join(path, "pluginRef"), f'"{name}" is already in this profile')
                continue
            seen.add(name)
            if not issubclass(plugin.cls, Filter | Scorer | Picker):
                message = f'"{name}" is a {roles(plugin.cls)[0]}; a profile takes filters, scorers and a picker'
                self.problems.add(node, join(path, "pluginRef"), message)
                continue
            if step.weight is not None and not issubclass(plugin.cls, Scorer):
                self.warn(node.line, join(path, "weight"), f'has no effect: "{name}" is not a scorer')
            steps.append((name, 1.0 if step.weight is None else step.weight))
        return steps

    def referenced(self, name: str, node: Node, path: str) -> PluginConfig | None:
        plugin = self.plugins.get(name)
        if plugin is None and name not in self.silent:
            self.problems.add(
                node, path, f'"{name}" is not in plugins: {unknown("name", name, {*self.plugins, *self.silent})}'
            )
        return plugin

    def profile(self, name: str, steps: list[tuple[str, float]], node: Node, path: str) -> ProfileConfig:
        by_role: dict[type, list[tuple[str, float]]] = {Filter: [], Scorer: [], Picker: []}
        for step in steps:
            for role, members in by_role.items():
                if issubclass(self.plugins[step[0]].cls, role):
                    members.append(step)
        pickers = [step[0] for step in by_role[Picker]]
        if len(pickers) > 1:
            self.problems.add(node, path, f"has {len(pickers)} pickers ({', '.join(pickers)}); one is allowed")
        if not pickers:
            listed = [p.name for p in self.plugins.values() if issubclass(p.cls, Picker)]
            pickers = [listed[0] if len(listed) == 1 else self.inject(DEFAULT_PICKER, node)]
        return ProfileConfig(name, tuple(step[0] for step in by_role[Filter]), tuple(by_role[Scorer]), pickers[0])

    def handler(self, root: Node, profiles: list[ProfileConfig]) -> str:
        handlers = [p for p in self.plugins.values() if issubclass(p.cls, ProfileHandler)]
        if len(handlers) > 1:
            names = ", ".join(p.name for p in handlers)
            self.problems.add(
                handlers[1].line, "plugins", f"hold {len(handlers)} profile handlers ({names}); one is allowed"
            )
        if handlers:
            name = handlers[0].name
        elif len(profiles) > 1:
            if not self.silent:
                self.problems.add(
                    root, "plugins", f"{len(profiles)} profiles need a profile handler that chooses among them"
                )
            return ""
        else:
            name = self.inject(DEFAULT_HANDLER, root)
        if name in self.plugins and self.plugins[name].cls.type == DEFAULT_HANDLER and len(profiles) > 1:
            self.problems.add(root, "schedulingProfiles", f"{DEFAULT_HANDLER} takes one profile, got {len(profiles)}")
        return name

    def check_named(self, handler: str, profiles: list[ProfileConfig]) -> None:
        """What plugins and the handler name by their parameters must be there."""
        for plugin in self.plugins.values():
            for place, name in plugin.cls.references(plugin.parameters).items():
                self.referenced(name, Node(None, plugin.line), f"{plugin.name}.{place}")
        chosen = self.plugins.get(handler)
        if chosen is not None and issubclass(chosen.cls, ProfileHandler):
            names = {p.name for p in profiles}
            for name in chosen.cls.needs_profiles(chosen.parameters):
                if name not in names:
                    message = f'"{handler}" needs a profile "{name}", which is not there'
                    self.problems.add(chosen.line, "schedulingProfiles", message)

    def warn_of_unused(self, profiles: list[ProfileConfig]) -> None:
        used = {name for p in profiles for name in (*p.filters, *(scorer for scorer, _ in p.scorers), p.picker)}
        for plugin in self.plugins.values():
            if plugin.name not in used and not issubclass(plugin.cls, Producer | ProfileHandler | Decider):
                self.warn(plugin.line, "plugins", f'"{plugin.name}" is in no profile and decides nothing')

    # --- producers ---

    def producers(self, root: Node) -> tuple[str, ...]:
        """Add the producers that what is configured needs; all of them in an order in which each finds its input."""
        for producer in [p for p in self.plugins.values() if issubclass(p.cls, Producer)]:
            for reader, name, _ in self.set_by_readers(producer):
                message = f'has no effect: the file configures "{producer.name}", whose own parameters hold'
                self.warn(reader.line, f"{reader.name}.{camel(name)}", message)
        while missing := self.read_fields() - self.written_fields():
            field = next((f for f in DEFAULT_PRODUCERS if f in missing), min(missing))
            if field not in DEFAULT_PRODUCERS:
                reader = next(p for p in self.plugins.values() if field in p.cls.reads)
                self.problems.add(reader.line, "plugins", f'"{reader.name}" reads {field}, which no plugin writes')
                return ()
            type_ = DEFAULT_PRODUCERS[field]
            if type_ in self.silent or self.inject(type_, root) not in self.plugins:
                return ()
            self.plugins[type_] = self.passed_on(self.plugins[type_], root)
            if field not in self.written_fields():
                self.problems.add(root, "plugins", f'"{type_}" should write {field} and does not')
                return ()
        waiting = [p for p in self.plugins.values() if issubclass(p.cls, Producer)]
        ordered: list[str] = []
        while waiting:
            unwritten = {field for p in waiting for field in _writes(p)}
            ready = next((p for p in waiting if not unwritten - set(_writes(p)) & set(p.cls.reads)), None)
            if ready is None:
                names = ", ".join(p.name for p in waiting)
                self.problems.add(
                    waiting[0].line, "plugins", f"the producers {names} read each other's results in a circle"
                )
                return ()
            ordered.append(ready.name)
            waiting.remove(ready)
        return tuple(ordered)

    def passed_on(self, producer: PluginConfig, root: Node) -> PluginConfig:
        """Give a producer we add the parameters that its readers set for it: theirs of the same name, not None."""
        given: dict[str, tuple[Any, str]] = {}
        for reader, name, value in self.set_by_readers(producer):
            other, by = given.setdefault(name, (value, reader.name))
            if other != value:
                message = (
                    f'"{by}" and "{reader.name}" set {camel(name)} differently; configure the producer {producer.name}'
                )
                self.problems.add(reader.line, "plugins", message)
        values = {name: value for name, (value, _) in given.items()}
        try:
            return dataclasses.replace(producer, parameters=producer.cls.Parameters(**values))
        except ValueError as error:
            self.problems.add(root, "plugins", f"{producer.name}: {error}")
            return producer

    def set_by_readers(self, producer: PluginConfig) -> Iterator[tuple[PluginConfig, str, Any]]:
        names = {f.name for f in dataclasses.fields(producer.cls.Parameters)}
        for reader in self.plugins.values():
            if reader.name != producer.name and set(reader.cls.reads) & set(_writes(producer)):
                for f in dataclasses.fields(reader.cls.Parameters):
                    value = getattr(reader.parameters, f.name)
                    if f.name in names and value is not None:
                        yield reader, f.name, value

    def read_fields(self) -> set[str]:
        return {field for p in self.plugins.values() for field in p.cls.reads}

    def written_fields(self) -> set[str]:
        return {field for p in self.plugins.values() for field in _writes(p)}

    # --- sections of the field that configure what we do otherwise ---

    def read_other_sections(self, root: Node) -> None:
        assert isinstance(root.value, dict)
        for key, (shape, effect) in field_types.SECTIONS.items():
            node = root.value.get(key)
            if node is None:
                continue
            if shape is None:
                self.problems.add(root.keys[key], key, f"we do not have {key} of llm-d; {effect}")
                continue
            value = convert(shape, node, key, self.problems)
            if value is not None:
                self.check_references(node, key)
                self.warn(root.keys[key], key, f"has no effect: {effect}")

    def check_references(self, node: Node, path: str) -> None:
        """Every pluginRef below here must name a plugin of the file, or a type that is built in."""
        if isinstance(node.value, list):
            for i, item in enumerate(node.value):
                self.check_references(item, f"{path}[{i}]")
        elif isinstance(node.value, dict):
            for key, item in node.value.items():
                if key == "pluginRef" and isinstance(item.value, str):
                    if item.value not in field_types.BUILT_IN:
                        self.referenced(item.value, item, join(path, key))
                else:
                    self.check_references(item, join(path, key))


def _writes(plugin: PluginConfig) -> tuple[str, ...]:
    return plugin.cls.writes if issubclass(plugin.cls, Producer) else ()
