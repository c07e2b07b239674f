"""The EndpointPickerConfig file: defaults, references, and every kind of mistake named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.config import ConfigError, PickerConfig, default_text, load, load_default, read
from epp.plugin import InferenceRequest, NoParameters, Picker, Producer, Scorer
from epp.registry import Registry, default_registry
from epp.scheduler import Scheduler

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


def errors(text: str, registry: Registry | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, source="f", registry=registry)
    return str(caught.value).splitlines()


def plugins(*entries: str) -> str:
    return HEAD + "plugins:\n" + "".join(f"- {entry}\n" for entry in entries)


# --- what is filled in ---


def test_without_profiles_all_plugins_form_one_in_the_order_of_the_file() -> None:
    config = read(
        plugins(
            "type: queue-scorer", "type: decode-filter", "type: kv-cache-utilization-scorer", "type: by-label-selector"
        )
    )
    (profile,) = config.profiles
    assert profile.name == "default"
    assert profile.filters == ("decode-filter", "by-label-selector")
    assert profile.scorers == (("queue-scorer", 1.0), ("kv-cache-utilization-scorer", 1.0))
    assert (profile.picker, config.handler) == ("max-score-picker", "single-profile-handler")


def test_the_one_picker_of_the_file_serves_profiles_that_name_none() -> None:
    config = read(plugins("type: random-picker", "type: queue-scorer") + "schedulingProfiles: [{name: a, plugins: []}]")
    assert config.profiles[0].picker == "random-picker"
    assert config.profiles[0].scorers == ()


def test_the_order_of_plugins_does_not_matter_for_references() -> None:
    entries = ["type: queue-scorer", "{type: queue-scorer, name: other}", "type: random-picker"]
    profiles = "schedulingProfiles: [{name: a, plugins: [{pluginRef: other, weight: 2}, {pluginRef: random-picker}]}]"
    one, two = read(plugins(*entries) + profiles), read(plugins(*reversed(entries)) + profiles)
    assert one.profiles == two.profiles
    assert {p.name for p in one.plugins} == {p.name for p in two.plugins}


def test_a_default_weight_is_one_and_negative_weights_are_allowed() -> None:
    text = plugins("type: queue-scorer", "{type: queue-scorer, name: q}") + (
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}, {pluginRef: q, weight: -0.5}]}]"
    )
    assert read(text).profiles[0].scorers == (("queue-scorer", 1.0), ("q", -0.5))


def test_producers_are_added_by_need_and_run_after_those_whose_result_they_read() -> None:
    assert read(plugins("type: queue-scorer")).producers == ()
    assert read(plugins("type: prefix-cache-scorer")).producers == ("approx-prefix-cache-producer",)
    entries = ["type: ttft-estimator", "type: expected-ttft-scorer", "{type: approx-prefix-cache-producer, name: p}"]
    assert read(plugins(*entries)).producers == ("p", "ttft-estimator")


def test_a_scorers_prefix_parameters_go_to_the_producer_that_is_added_for_it() -> None:
    config = read(plugins("{type: prefix-cache-scorer, parameters: {blockSizeTokens: 64, autoTune: false}}"))
    producer = config.plugin("approx-prefix-cache-producer")
    assert (producer.parameters.block_size_tokens, producer.parameters.auto_tune) == (64, False)


def test_two_scorers_that_want_different_producers_are_refused() -> None:
    found = errors(
        plugins(
            "{type: prefix-cache-scorer, parameters: {blockSizeTokens: 64}}",
            "{type: prefix-cache-scorer, name: b, parameters: {blockSizeTokens: 32}}",
        )
    )
    assert found == [
        'f:5: plugins: "prefix-cache-scorer" and "b" set blockSizeTokens differently; '
        "configure the producer approx-prefix-cache-producer"
    ]


def test_a_scorers_prefix_parameters_beside_a_configured_producer_give_a_warning() -> None:
    config = read(
        plugins("{type: prefix-cache-scorer, parameters: {blockSizeTokens: 64}}", "type: approx-prefix-cache-producer")
    )
    assert any("prefix-cache-scorer.blockSizeTokens: has no effect" in warning for warning in config.warnings)


def test_the_built_in_configuration_is_good_and_makes_a_scheduler() -> None:
    config = load_default()
    assert not config.warnings
    assert config.profiles[0].scorers[0][0] == "expected-ttft-scorer"
    assert read(default_text()).profiles == config.profiles
    assert set(Scheduler(config).plugins) >= {"expected-ttft-scorer", "active-request-scorer", "ttft-estimator"}


# --- what is refused ---


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "f:1: apiVersion: is required: llm-d.ai/v1alpha1"),
        (
            "apiVersion: v1\nkind: EndpointPickerConfig",
            'f:1: apiVersion: must be llm-d.ai/v1alpha1 or inference.networking.x-k8s.io/v1alpha1, got "v1"',
        ),
        ("apiVersion: llm-d.ai/v1alpha1\nkind: X", 'f:2: kind: must be EndpointPickerConfig, got "X"'),
        (HEAD + "pluginz: []", "f:3: pluginz: unknown key; did you mean 'plugins'?"),
        (HEAD + "plugins: {}", "f:3: plugins: must be a list, got a mapping"),
        (HEAD + "plugins: [3]", "f:3: plugins[0]: must be a mapping, got 3"),
        (plugins("name: x"), "f:4: plugins[0].type: is required"),
        (
            plugins("type: queue-scoreer"),
            "f:4: plugins[0].type: \"queue-scoreer\": unknown type; did you mean 'queue-scorer'?",
        ),
        (
            plugins("{type: queue-scorer, weight: 1}"),
            "f:4: plugins[0].weight: unknown key; known: name, parameters, type",
        ),
        (
            plugins("{type: queue-scorer, parameters: {x: 1}}"),
            "f:4: plugins[0].parameters.x: unknown key; none is taken here",
        ),
        (plugins("{type: queue-scorer, parameters: 3}"), "f:4: plugins[0].parameters: must be a mapping, got 3"),
        (
            plugins("type: queue-scorer", "type: queue-scorer"),
            'f:5: plugins[1]: the name "queue-scorer" is taken by the plugin on line 4',
        ),
        (
            plugins("{type: max-score-picker, parameters: {maxNumOfEndpoints: 0}}"),
            "f:4: plugins[0].parameters.maxNumOfEndpoints: must be at least 1, got 0",
        ),
        (plugins("type: random-picker", "type: max-score-picker"), "has 2 pickers (random-picker, max-score-picker)"),
        (
            plugins("type: single-profile-handler", "{type: single-profile-handler, name: h}"),
            "f:5: plugins: hold 2 profile handlers (single-profile-handler, h); one is allowed",
        ),
        (HEAD + "featureGates: [flowcontrol]", "f:3: featureGates[0]: must be one of flowControl, dataLayer"),
        (HEAD + "parser: {pluginRef: nothing}", 'f:3: parser.pluginRef: "nothing" is not in plugins: unknown name'),
        (
            HEAD + "flowControl: {}",
            "f:3: flowControl: we do not have flowControl of llm-d; requests are not queued here",
        ),
        (plugins("type: 'json:loads'"), "json:loads is not a Filter, Scorer, Picker, ProfileHandler or Producer"),
        (plugins("type: 'json:nothing'"), 'module "json" ('),
        (plugins("type: 'no_such_module_x:Y'"), 'f:4: plugins[0].type: module "no_such_module_x" cannot be loaded'),
        (plugins("type: 'a b:c'"), 'f:4: plugins[0].type: "a b:c" is not of the form module:Class'),
    ],
)
def test_a_mistake_is_one_line_with_place_and_path(text: str, problem: str) -> None:
    found = errors(text)
    assert any(problem in line for line in found), found


@pytest.mark.parametrize(
    ("profile", "problem"),
    [
        ("- {name: a, plugins: [{pluginRef: q, weight: x}]}", 'plugins[0].weight: must be a number, got "x"'),
        ("- {name: a, plugins: [{pluginRef: q, weight: .nan}]}", "plugins[0].weight: must be a number, got nan"),
        (
            "- {name: a, plugins: [{pluginRef: nobody}]}",
            'plugins[0].pluginRef: "nobody" is not in plugins: unknown name',
        ),
        (
            "- {name: a, plugins: [{pluginRef: q}, {pluginRef: q}]}",
            'plugins[1].pluginRef: "q" is already in this profile',
        ),
        ("- {name: a, plugins: [{ref: q}]}", "plugins[0].ref: unknown key"),
        ("- {name: a, plugins: [{pluginRef: handler}]}", '"handler" is a handler; a profile takes filters, scorers'),
        ("- {plugins: []}", "schedulingProfiles[0].name: is required and must not be empty"),
        ("- {name: '', plugins: []}", "schedulingProfiles[0].name: is required and must not be empty"),
        ("- {name: a, plugin: []}", "schedulingProfiles[0].plugin: unknown key; did you mean 'plugins'?"),
        ("- {name: a}\n- {name: a}", 'schedulingProfiles[1].name: "a" is taken by the profile on line 7'),
        ("- {name: a}\n- {name: b}", "schedulingProfiles: single-profile-handler takes one profile, got 2"),
        ("- 3", "schedulingProfiles[0]: must be a mapping, got 3"),
    ],
)
def test_a_mistake_in_a_profile_is_named(profile: str, problem: str) -> None:
    head = plugins("{type: queue-scorer, name: q}", "{type: single-profile-handler, name: handler}")
    found = errors(f"{head}schedulingProfiles:\n{profile}")
    assert any(problem in line for line in found), found


def test_all_mistakes_are_reported_and_none_twice() -> None:
    steps = "[{pluginRef: queue-scoreer}, {pluginRef: random-picker, weigth: 1}]"
    text = plugins("type: queue-scoreer", "{type: random-picker, parameters: {maxNumOfEndpoints: x}}")
    text += f"schedulingProfiles:\n- {{name: a, plugins: {steps}}}\n"
    assert [line.split(":")[1] for line in errors(text)] == ["4", "5", "7"]


def test_a_weight_on_a_picker_gives_a_warning() -> None:
    text = (
        plugins("type: random-picker")
        + "schedulingProfiles: [{name: a, plugins: [{pluginRef: random-picker, weight: 2}]}]"
    )
    assert read(text, source="f").warnings == (
        'f:5: schedulingProfiles[0].plugins[0].weight: has no effect: "random-picker" is not a scorer',
    )


def test_a_plugin_in_no_profile_gives_a_warning() -> None:
    text = plugins("type: random-picker", "type: queue-scorer") + "schedulingProfiles: [{name: a, plugins: []}]"
    assert read(text, source="f").warnings == ('f:5: plugins: "queue-scorer" is in no profile and decides nothing',)


def test_retired_parameters_give_a_warning_with_the_reason() -> None:
    (warning,) = read(plugins("{type: active-request-scorer, parameters: {requestTimeout: 5m}}"), source="f").warnings
    assert warning.startswith("f:4: plugins[0].parameters.requestTimeout: has no effect: ")


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_one_error(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:1: ")


class First(Producer[NoParameters]):
    type = "first"
    reads = ("b",)
    writes = ("a",)


class Second(Producer[NoParameters]):
    type = "second"
    reads = ("a",)
    writes = ("b",)


class Reader(Scorer[NoParameters]):
    type = "reader"
    reads = ("unheard_of",)


def test_producers_in_a_circle_and_fields_nobody_writes_are_refused() -> None:
    registry = Registry([*default_registry().classes(), First, Second, Reader])
    assert errors(plugins("type: first", "type: second"), registry) == [
        "f:4: plugins: the producers first, second read each other's results in a circle"
    ]
    assert errors(plugins("type: reader"), registry) == [
        'f:4: plugins: "reader" reads unheard_of, which no plugin writes'
    ]


def test_two_plugins_of_one_type_are_an_error_that_names_both() -> None:
    class Other(Picker[NoParameters]):
        type = "random-picker"

        def pick(self, request: InferenceRequest, candidates: Any, scores: Any) -> Any:
            return [0]

    with pytest.raises(
        Exception, match=r'"random-picker" is declared twice: by epp\.pickers\.RandomPicker and by .*Other'
    ):
        Registry([*default_registry().classes(), Other])


# --- the files that llm-d ships ---


@dataclass(frozen=True)
class Shipped:
    file: str
    lacks: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "shipped",
    [
        Shipped("epp-config.yaml"),
        Shipped("epp-estimate-prefix-cache-config.yaml"),
        Shipped("data-layer.yaml"),
        Shipped("pd-epp-config.yaml"),
        Shipped("epp-precise-prefix-cache-config.yaml"),
        Shipped("sim-epp-no-hit-lru.yaml"),
        Shipped("dp-epp-config.yaml", ("data-parallel-profile-handler",)),
        Shipped("sim-e-pd-epp-config.yaml"),
        Shipped("probabilistic-admitter-epp-config.yaml", ("probabilistic-admitter",)),
        Shipped("flow-control.yaml", ("round-robin-fairness-policy", "flowControl")),
    ],
    ids=lambda s: s.file,
)
def test_a_file_of_llm_d_starts_unchanged_or_says_by_name_what_we_lack(shipped: Shipped) -> None:
    path = Path(__file__).parent / "llm_d" / shipped.file
    try:
        config = load(path)
    except ConfigError as error:
        lines = str(error).splitlines()
        assert len(lines) == len(shipped.lacks)
        for line, name in zip(lines, shipped.lacks, strict=True):
            assert "we do not have " in line
            assert name in line
    else:
        assert not shipped.lacks
        Scheduler(config)


# --- anything else ---

words = st.sampled_from(
    ["apiVersion", "kind", "plugins", "schedulingProfiles", "type", "name", "parameters", "pluginRef", "weight",
     "queue-scorer", "max-score-picker", "prefix-cache-scorer", "single-profile-handler", "llm-d.ai/v1alpha1",
     "EndpointPickerConfig", "dataLayer", "parser", "featureGates", "sources", "maxNumOfEndpoints", "blockSizeTokens",
     "os:system", "random-picker", "utilization-detector"]
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=3), inner, max_size=4),
    max_leaves=25,
)
plugin_lists = st.lists(
    st.fixed_dictionaries({"type": words}, optional={"name": words, "parameters": values}), max_size=5
)
steps = st.lists(st.fixed_dictionaries({"pluginRef": words}, optional={"weight": values}), max_size=4)
documents = st.fixed_dictionaries(
    {
        "apiVersion": st.just("llm-d.ai/v1alpha1"),
        "kind": st.just("EndpointPickerConfig"),
        "plugins": plugin_lists | values,
    },
    optional={
        "schedulingProfiles": st.lists(st.fixed_dictionaries({"name": words, "plugins": steps}), max_size=3) | values,
        "dataLayer": values,
        "parser": values,
        "featureGates": values,
        "flowControl": values,
    },
)


@settings(max_examples=300)
@given(documents | values)
def test_any_document_is_a_configuration_or_a_config_error(document: Any) -> None:
    _read_or_refuse(yaml.safe_dump(document))


@settings(max_examples=300)
@given(st.data())
def test_any_damage_to_a_good_file_gives_a_configuration_or_a_config_error(data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from([default_text(), *(p.read_text() for p in (Path(__file__).parent / "llm_d").iterdir())])
    )
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 20, len(text))))
    _read_or_refuse(text[:start] + data.draw(st.text(alphabet="a-:{}[]&*!#'\"\n \t1.", max_size=6)) + text[end:])


def _read_or_refuse(text: str) -> None:
    problems: str | None = None
    try:
        config = read(text, source="f")
    except ConfigError as error:
        problems = str(error)
    if problems is None:
        assert isinstance(config, PickerConfig)
        assert {config.handler, *config.producers} <= {p.name for p in config.plugins}
        Scheduler(config)
    else:
        assert problems
        assert all(line.startswith("f:") for line in problems.splitlines())
