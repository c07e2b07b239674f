"""The `models` section, and llm-d's plugins that say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.config import ConfigError, read
from epp.model_config import ModelConfig

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


def models(text: str) -> tuple[ModelConfig, ...]:
    return read(HEAD + text, folder=Path("/etc/picker")).models


def problems(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        models(text)
    return str(caught.value)


def test_models_are_read_with_their_line_and_a_folder_relative_to_the_file() -> None:
    (one, other) = models(
        "models:\n"
        "- name: base\n"
        "  path: models/base\n"
        "  aliases: [b, c]\n"
        "  source: local\n"
        "  chatTemplateKwargs: {enable_thinking: false}\n"
        "- {name: other, path: /models/other, renderUrl: http://r:1, timeout: 100ms}\n"
    )
    assert (one.name, one.aliases, one.path, one.source, one.line) == (
        "base", ("b", "c"), "/etc/picker/models/base", "local", 4,
    )  # fmt: skip
    assert one.chat_template_kwargs == {"enable_thinking": False}
    assert (other.path, other.source, other.render_url, other.timeout) == ("/models/other", "auto", "http://r:1", 0.1)


def test_without_the_section_no_model_is_registered() -> None:
    assert models("") == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: {name: x}\n", "config:3: models: must be a list"),
        ("models:\n- {}\n", "config:4: models[0].name: is required"),
        ("models:\n- name: ''\n", "config:4: models[0]: name must not be empty"),
        ("models:\n- name: a\n  paht: x\n", "config:5: models[0].paht: unknown key"),
        ("models:\n- name: a\n  source: local\n", "config:4: models[0]: source local needs a path"),
        ("models:\n- name: a\n  source: guess\n", "config:5: models[0].source: must be one of auto, local, render"),
        ("models:\n- name: a\n  renderUrl: r:1\n", "config:4: models[0]: renderUrl must begin with http://"),
        ("models:\n- name: a\n  timeout: 0s\n", "config:5: models[0].timeout: must be at least 0.001"),
        ("models:\n- name: a\n- name: b\n  aliases: [a]\n",
         'config:5: models[1]: the name "a" is taken by the model on line 4'),
        ("models:\n- name: a\n  line: 7\n", "line is not a setting"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_line_and_path(text: str, problem: str) -> None:
    assert problem in problems(text)


def test_llm_ds_token_producer_is_a_model_that_a_worker_renders() -> None:
    (model,) = models(
        "plugins:\n"
        "- type: token-producer\n"
        "  parameters:\n"
        "    modelName: base\n"
        "    vllm: {url: 'http://localhost:8000', timeout: 5s, mmTimeout: 30s}\n"
    )
    assert (model.name, model.source, model.render_url, model.timeout) == ("base", "render", "http://localhost:8000", 5)


@pytest.mark.parametrize(
    "parameters",
    ["", "  parameters: {estimate: {}}\n", "  parameters: {modelName: base, estimate: {bytesPerToken: 3}}\n"],
)
def test_a_token_producer_that_estimates_has_no_effect_and_says_so(parameters: str) -> None:
    config = read(HEAD + "plugins:\n- type: token-producer\n" + parameters)
    assert config.models == ()
    assert "has no effect: every request has an estimate" in config.warnings[0]


def test_an_entry_of_models_comes_before_a_token_producer() -> None:
    config = read(
        HEAD + "models:\n- {name: base, path: /m}\nplugins:\n- type: token-producer\n"
        "  parameters: {modelName: base, vllm: {http: 'http://r:1'}}\n"
    )
    assert [m.path for m in config.models] == ["/m"]
    assert 'models has an entry for "base"' in config.warnings[0]


def test_mistakes_of_a_token_producer_are_told_and_references_to_it_are_not_told_again() -> None:
    text = problems(
        "plugins:\n- type: token-producer\n  name: t\n  parameters: {modelName: base, vllm: {http: 'r:1'}}\n"
        "schedulingProfiles:\n- name: p\n  plugins: [{pluginRef: t}]\n"
    )
    assert text == "config:4: plugins[0].parameters: renderUrl must begin with http:// or https://"
