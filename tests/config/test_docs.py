"""What the documentation of configuration and plugins shows is true: its files load, and its scorer decides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from epp.cli import main
from epp.config import load, read
from epp.scheduler import Scheduler
from tests.pools import candidates, request

DOCS = Path(__file__).parents[2] / "docs"


def block(page: str, language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), flags=re.M | re.S)
    assert len(found) == 1
    return str(found[0])


def test_the_scorer_of_the_plugin_page_works_as_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "short_prompts.py").write_text(block("plugins.md", "python"))
    (tmp_path / "config.yaml").write_text(block("plugins.md", "yaml"))
    config = load(tmp_path / "config.yaml")
    assert not config.warnings
    picker, pool = Scheduler(config), candidates(4)
    short = picker.schedule(request(b"x" * 400), pool, at=0)
    long = picker.schedule(request(b"x" * 40_000), pool, at=0)
    assert short.endpoints == (pool[2],)
    assert long.endpoints != (pool[2],)
    assert short.reasons == long.reasons == ()


def test_the_file_of_the_configuration_page_loads_as_it_says() -> None:
    config = read(block("configuration.md", "yaml"))
    assert not config.warnings
    (profile,) = config.profiles
    assert profile.filters == ("decode-filter",)
    assert profile.scorers == (("prefix", 2.0), ("queue-scorer", 1.0))
    assert config.plugin("approx-prefix-cache-producer").parameters.block_size_tokens == 64


def test_the_plugin_of_the_page_is_described_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short_prompts.py").write_text(block("plugins.md", "python"))
    described = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["plugins", "short_prompts:ShortPrompts"])
    assert described.exit_code == 0
    assert "maxTokens" in described.stdout
    assert "Prompts up to this length are short." in described.stdout
