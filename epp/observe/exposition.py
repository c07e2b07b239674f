"""Gauges with a sample for each endpoint, straight as Prometheus text.

In: names, labels, numbers. Out: text. A line costs 1 us here and 8 us through prometheus-client, and there are some
thousands of them in a pool of 544 endpoints; the page is made on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite

_ODD = {inf: "+Inf", -inf: "-Inf"}


def labels(**values: str) -> str:
    """The labels of a sample, escaped, in the order given."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def gauge(name: str, text: str, samples: Iterable[tuple[str, float]]) -> str:
    """One gauge with its samples: `labels` and value."""
    lines = [
        f"{name}{{{of}}} {float(value)!r}" if isfinite(value) else f"{name}{{{of}}} {_ODD.get(value, 'NaN')}"
        for of, value in samples
    ]
    return "\n".join([f"# HELP {name} {text}", f"# TYPE {name} gauge", *lines, ""])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
