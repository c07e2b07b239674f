"""Write the shipped Envoy files: one per mode and profile, exactly what `kvsteer envoy-config` prints by default.

Run as `python envoy/generate.py`; a test compares the files with what this would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from epp.envoy_options import Mode, Profile, defaults
from epp.envoy_yaml import render

HERE = Path(__file__).parent


def shipped() -> Iterator[tuple[Path, str]]:
    """Each file's path and its whole text."""
    for mode in Mode:
        for profile in Profile:
            yield HERE / f"{mode}-{profile}.yaml", render(defaults(mode, profile))


if __name__ == "__main__":
    for path, text in shipped():
        path.write_text(text)
