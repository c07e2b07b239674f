"""The image, without an engine to build it: its file linted, its steps run, what they leave weighed and started."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BASE_MB = 55
"""Size of the runtime base, unpacked: Debian's Python without a shell."""
LIMIT_MB = 200


def test_the_containerfile_passes_the_linter() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, DEPLOY / "Containerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_last_stage_has_no_build_tools_no_shell_and_no_root() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert last.startswith("gcr.io/distroless/python3-debian12:nonroot\n")
    assert "RUN" not in last
    assert "USER 65532:65532" in last


def locked() -> dict[str, str]:
    """Package -> version of the lock."""
    pins = re.findall(r"^([a-z0-9._-]+)==(\S+) \\$", (DEPLOY / "requirements.lock").read_text(), re.MULTILINE)
    return dict(pins)


def test_the_lock_has_every_dependency_by_hash() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["redis"]]
    names = {re.split(r"[>=;\s]", requirement)[0].lower() for requirement in wanted}
    assert names - locked().keys() == set()
    blocks = re.split(r"\n(?=\S)", (DEPLOY / "requirements.lock").read_text().strip())[1:]
    assert all("--hash=sha256:" in block for block in blocks)


@pytest.mark.timeout(300)
def test_its_steps_leave_a_picker_that_starts_and_is_small_enough(tmp_path: Path) -> None:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the image's Python is 3.11")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = tmp_path / "source"
    for name in ("proto", "epp", "scorers", "filters"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "wheel", source],
        check=True,
        timeout=120,
    )
    (wheel,) = (tmp_path / "wheel").iterdir()
    site = tmp_path / "site"
    subprocess.run(
        [DEPLOY / "build-site", sys.executable, wheel, DEPLOY / "requirements.lock", site], check=True, timeout=240
    )
    size = int(subprocess.run(["du", "-sm", site], check=True, capture_output=True, text=True).stdout.split()[0])
    assert size + BASE_MB < LIMIT_MB
    # Nothing but what was installed, as in the image: -S leaves this interpreter's own packages out.
    run = [sys.executable, "-S", "-P", "-m", "epp.cli"]
    environment = {"PYTHONPATH": str(site), "PATH": ""}
    version = subprocess.run(
        [*run, "--version"], env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert version.stdout.startswith("kvsteer, version "), version.stderr
    (tmp_path / "config.yaml").write_text((ROOT / "epp/default_config.yaml").read_text())
    checked = subprocess.run(
        [*run, "check", "config.yaml"], env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert checked.returncode == 0, checked.stderr
