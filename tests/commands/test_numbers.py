"""Numbers on the command line that no range keeps out."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from epp.cli import main


@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "-1"])
@pytest.mark.parametrize(
    "option",
    [
        "serve --grace",
        "serve --drain-delay",
        "serve --scrape-interval",
        "serve --scrape-timeout",
        "serve --decision-deadline",
        "serve --plugin-time-limit",
        "serve --decision-log-sample",
        "demo --duration",
        "emulate --grace",
    ],
)
def test_seconds_are_finite_and_within_their_range(option: str, value: str) -> None:
    command, name = option.split()
    done = CliRunner().invoke(main, [command, name, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{name}'" in done.output


def test_a_speed_is_finite() -> None:
    done = CliRunner().invoke(main, ["emulate", "--speed", "inf"])
    assert done.exit_code == 2
    assert "inf is not a finite number" in done.output
