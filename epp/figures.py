"""The JSON in which the demo and the benchmarks leave what they measured, so that anyone can compare runs.

In: names, values, units. Out: a list of `{"name", "value", "unit", "ratio", "to"}` in a file; a figure that has a
target also has `"target"` (text) and `"met"`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Figure = dict[str, Any]


def figure(name: str, value: float, unit: str, *, ratio: float | None = None, to: str = "") -> Figure:
    """One measured figure; `ratio` is value over the figure named `to`."""
    return {"name": name, "value": value, "unit": unit, "ratio": ratio, "to": to or None}


def write(path: Path, figures: Sequence[Figure]) -> None:
    """Leave figures at `path`, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(figures), indent=1) + "\n")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)] if ordered else 0.0
