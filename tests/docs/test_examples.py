"""What the pages show is true: configurations load, plugins decide as described, programs run."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from epp.cli import main
from epp.config import load, read
from epp.endpoint import Endpoint, Pool
from epp.scheduler import Scheduler
from tests.docs.pages import PAGES, Page
from tests.pools import candidates, request

README, CONFIGURATION, PLUGINS, EMULATOR = (
    Page(Path(name)) for name in ("README.md", "docs/configuration.md", "docs/plugins.md", "docs/emulator.md")
)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.path) for page in PAGES])
def test_every_configuration_of_a_page_loads_without_a_warning(page: Page, tmp_path: Path) -> None:
    for name, source in (("same_zone.py", README), ("short_prompts.py", PLUGINS)):
        (tmp_path / name).write_text(source.block("python"))
    for number, text in enumerate(b for b in page.blocks("yaml") if "EndpointPickerConfig" in b):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        assert not load(file).warnings


def test_the_scorer_of_the_readme_sends_a_request_to_its_own_zone(tmp_path: Path) -> None:
    (tmp_path / "same_zone.py").write_text(README.block("python"))
    (config,) = (text for text in README.blocks("yaml") if "same_zone:SameZone" in text)
    (tmp_path / "zones.yaml").write_text(config)
    picker = Scheduler(load(tmp_path / "zones.yaml"))
    pool = Pool(Endpoint("10.0.0.1", port, labels={"zone": zone}) for port, zone in enumerate("ab", 8000))
    for zone in "ab":
        decision = picker.schedule(request(b"x" * 400, headers={"x-zone": zone}), pool.candidates(100.0), at=0)
        assert decision.endpoints[0].labels["zone"] == zone
        assert decision.reasons == ()


def test_the_scorer_of_the_plugin_page_works_as_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "short_prompts.py").write_text(PLUGINS.block("python"))
    (tmp_path / "config.yaml").write_text(PLUGINS.block("yaml"))
    picker, pool = Scheduler(load(tmp_path / "config.yaml")), candidates(4)
    short = picker.schedule(request(b"x" * 400), pool, at=0)
    long = picker.schedule(request(b"x" * 40_000), pool, at=0)
    assert short.endpoints == (pool[2],)
    assert long.endpoints != (pool[2],)
    assert short.reasons == long.reasons == ()


def test_the_plugin_of_the_page_is_described_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short_prompts.py").write_text(PLUGINS.block("python"))
    described = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["plugins", "short_prompts:ShortPrompts"])
    assert described.exit_code == 0
    assert "maxTokens" in described.stdout
    assert "Prompts up to this length are short." in described.stdout


def test_the_file_of_the_configuration_page_loads_as_it_says() -> None:
    config = read("".join(CONFIGURATION.blocks("yaml")))
    (profile,) = config.profiles
    assert profile.filters == ("decode-filter",)
    assert profile.scorers == (("prefix", 2.0), ("queue-scorer", 1.0))
    assert config.plugin("approx-prefix-cache-producer").parameters.block_size_tokens == 64
    assert [(m.aliases, m.source, m.timeout) for m in config.models] == [
        (("qwen",), "auto", 0.25),
        ((), "render", 0.25),
    ]


def test_the_program_of_the_emulator_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EMULATOR.block("python"), "emulator.md", "exec"), {})
    first_token, cached = capsys.readouterr().out.split()
    assert float(first_token) > 1.0
    assert cached == "0"
