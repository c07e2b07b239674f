"""Write the shipped Envoy files: one per mode and profile, exactly what `kvsteer envoy-config` prints by default, the
one for decode workers, and the one that the Helm chart puts into a pod with a picker.

Run as `python envoy/generate.py`; a test compares the files with what this would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from epp.envoy_options import EndpointsFile, Mode, Profile, defaults
from epp.envoy_yaml import render

HERE = Path(__file__).parent
CHART_FILE = HERE.parent / "deploy/chart/kvsteer/files/envoy.yaml"


def shipped() -> Iterator[tuple[Path, str]]:
    """Each file's path and its whole text."""
    for mode in Mode:
        for profile in Profile:
            yield HERE / f"{mode}-{profile}.yaml", render(defaults(mode, profile))
    yield HERE / "decode-sidecar.yaml", render(defaults(Mode.SIDECAR, Profile.FAST, decode=True))
    pool = EndpointsFile("/run/kvsteer/pool.json")
    yield CHART_FILE, render(defaults(Mode.SIDECAR, Profile.GATEWAY, endpoints=pool))


if __name__ == "__main__":
    for path, text in shipped():
        path.write_text(text)
