"""The figures of a run as tables for a terminal.

In: figures. Out: one table of the end-to-end run, servers side by side (`value (ratio)`), one of everything else, and
one of what is held against a target. Wall times are in the JSON only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from bench.stack import SERVERS
from epp.figures import Figure

SHOWN = ("picker_cpu", "picker_cpu_per_message", "envoy_cpu", "envoy_and_picker_cpu")

Place = tuple[str, str, str]
"""Case, profile, what."""


def tables(figures: Sequence[Figure]) -> Iterator[Table]:
    """Only tables that have rows."""
    by_name = {figure["name"]: figure for figure in figures}
    parts = [name.split("/") for name in by_name if name.count("/") == 4]
    places = {(case, profile, what): None for _, case, profile, _, what in parts if what in SHOWN}
    if places:
        yield _end_to_end(by_name, list(places))
    if single := [f for f in figures if f["name"].count("/") < 4]:
        yield _plain(single)
    if held := [f for f in figures if "target" in f]:
        yield _targets(held)


def _end_to_end(by_name: Mapping[str, Figure], places: Sequence[Place]) -> Table:
    made = Table(title="Through Envoy: microseconds of CPU (ratio: picker to cpp, Envoy to none)", title_justify="left")
    for column in ("load", "profile", "what"):
        made.add_column(column)
    for server in SERVERS:
        made.add_column(server, justify="right")
    for case, profile, what in sorted(places, key=lambda p: (p[0], SHOWN.index(p[2]), p[1])):
        cells = [by_name.get(f"end_to_end/{case}/{profile}/{server}/{what}") for server in SERVERS]
        made.add_row(case, profile, what, *("" if cell is None else _with_ratio(cell) for cell in cells))
    return made


def _plain(figures: Sequence[Figure]) -> Table:
    made = Table(title="By itself", title_justify="left")
    made.add_column("figure")
    made.add_column("value", justify="right")
    made.add_column("unit")
    for figure in figures:
        made.add_row(figure["name"], _number(figure["value"]), figure["unit"])
    return made


def _targets(figures: Sequence[Figure]) -> Table:
    made = Table(title="Targets", title_justify="left")
    for column in ("figure", "seen", "target", "met"):
        made.add_column(column)
    for figure in figures:
        verdict = {None: "not measured", True: "yes", False: "NO"}[figure["met"]]
        made.add_row(figure["name"], _with_ratio(figure), figure["target"], verdict)
    return made


def _with_ratio(figure: Figure) -> str:
    ratio = figure["ratio"]
    return _number(figure["value"]) + ("" if ratio is None else f" ({ratio:.2f})")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
