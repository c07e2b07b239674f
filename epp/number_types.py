"""Numbers on the command line: `click.FloatRange` lets NaN through any range and infinity through an open one.

In: an option's text. Out: a finite number within its range, or click's error that names the option.
"""

from __future__ import annotations

import math
from typing import Any

import click

YEAR_S = 31_536_000.0


class Number(click.FloatRange):
    """A finite number within the range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def seconds(minimum: float = 0.0) -> Number:
    """Seconds, at most a year: event loops count in milliseconds and overflow far beyond."""
    return Number(minimum, YEAR_S)
