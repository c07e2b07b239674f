"""A plugin outside the project: one file beside the configuration, a module on PYTHONPATH, an installed entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from epp.commands.check import command as check
from epp.config import ConfigError, load
from epp.registry import default_registry, is_shipped
from epp.scheduler import Scheduler
from tests.pools import candidates, request

PLUGIN = '''
from dataclasses import dataclass

from epp.plugin import Scorer


@dataclass(frozen=True, slots=True)
class Parameters:
    port: int


class ByPort(Scorer[Parameters]):
    """Likes one port."""

    type = "by-port"
    Parameters = Parameters

    def score(self, request, candidates):
        return [1.0 if e.port == self.parameters.port else 0.0 for e in candidates]
'''
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: {type}
  name: mine
  parameters: {{port: {port}}}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: mine
    weight: 5
"""


def write(folder: Path, *, module: str, reference: str, port: int | str = 8002) -> Path:
    (folder / f"{module}.py").write_text(PLUGIN)
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(type=reference, port=port))
    return path


def test_a_scorer_in_one_file_beside_the_configuration_decides(tmp_path: Path) -> None:
    config = load(write(tmp_path, module="by_port", reference="by_port:ByPort"))
    picker, pool = Scheduler(config), candidates(4)
    decision = picker.schedule(request(), pool, at=0)
    assert decision.endpoints == (pool[2],)
    assert decision.profiles[0].scorers[0].name == "mine"
    assert not is_shipped(config.plugin("mine").cls)
    assert "by_port" not in sys.modules


def test_its_parameters_are_checked_like_any_others(tmp_path: Path) -> None:
    path = write(tmp_path, module="by_port", reference="by_port:ByPort", port="x")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f'{path}:7: plugins[0].parameters.port: must be a whole number, got "x"'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("def", "SyntaxError"),
        ("raise RuntimeError('at import')", "RuntimeError: at import"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("class ByPort: pass", "is not a Filter, Scorer, Picker, ProfileHandler or Producer"),
        ("x = 1", "has no class ByPort"),
        ("from epp.plugin import Scorer\nclass ByPort(Scorer): pass", "has no class attribute `type`"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_of_the_configuration(
    content: str, problem: str, tmp_path: Path
) -> None:
    path = write(tmp_path, module="broken", reference="broken:ByPort")
    (tmp_path / "broken.py").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    (line,) = str(caught.value).splitlines()
    assert problem in line


@pytest.mark.parametrize(
    ("constructor", "problem"),
    [
        ("raise OSError('no model here')", "OSError: no model here"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("self.ready = 1", "TypeError: its __init__ does not call super().__init__(parameters, handle, name)"),
    ],
)
def test_a_constructor_at_fault_is_an_error_of_the_configuration(
    constructor: str, problem: str, tmp_path: Path
) -> None:
    path = write(tmp_path, module="by_port", reference="by_port:ByPort")
    text = PLUGIN + f"\n    def __init__(self, *args):\n        {constructor}\n"
    (tmp_path / "by_port.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Scheduler(load(path))
    assert str(caught.value) == f'{path}:5: plugins: "mine" cannot be made: {problem}'
    done = CliRunner().invoke(check, [str(path)])
    assert (done.exit_code, done.output) == (2, f"{caught.value}\n")


def test_a_changed_file_gives_new_classes_and_an_unchanged_one_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, module="by_port", reference="by_port:ByPort")
    first, again = load(path).plugin("mine").cls, load(path).plugin("mine").cls
    (tmp_path / "by_port.py").write_text(PLUGIN.replace("1.0 if", "0.9 if"))
    assert first is again
    assert load(path).plugin("mine").cls is not first


def test_a_module_on_the_python_path_and_an_entry_point_are_found(tmp_path: Path) -> None:
    write(tmp_path, module="kvsteer_sample_plugin", reference="kvsteer_sample_plugin:ByPort")
    info = tmp_path / "kvsteer_sample-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvsteer-sample\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvsteer.plugins]\nby-port = kvsteer_sample_plugin:ByPort\nbad = kvsteer_sample_plugin:Nothing\n"
    )
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name, reference in (("a", "by-port"), ("b", "kvsteer_sample_plugin:ByPort"), ("c", "bad")):
        (folder / f"{name}.yaml").write_text(CONFIG.format(type=reference, port=1))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    ran = subprocess.run(
        [sys.executable, "-m", "epp.cli", "check", *(str(folder / f"{n}.yaml") for n in "abc")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    assert ran.stdout.count(": OK") == 2
    assert "c.yaml:5: plugins[0].type: entry point bad = kvsteer_sample_plugin:Nothing cannot be loaded" in ran.stderr


def test_every_shipped_plugin_is_documented() -> None:
    for cls in default_registry().classes():
        assert (cls.__doc__ or "").strip(), cls
        assert cls.type == cls.type.lower()
