"""Rules for the whole suite: under CI a skipped test is a failure, because this machine could have run it."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# How long an example takes says nothing on a shared machine; only what it shows counts.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if os.environ.get("CI") != "true" or exitstatus != pytest.ExitCode.OK:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line("skipped tests are failures under CI", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
