"""`python -m bench`: everything that is measured, as a table and as JSON.

In: how much (`--quick`, `--only`). Out: progress on stderr, one table on stdout, figures in the file `--out`. Takes
about four minutes, a minute with `--quick`. docs/performance.md says what each figure means.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import click
import uvloop
from rich.console import Console

from bench import (
    api_micro,
    edge_micro,
    end_to_end,
    events_micro,
    exchange_micro,
    ext_proc_micro,
    index_micro,
    kv_micro,
    replicas_micro,
    scheduler_micro,
    tokens_micro,
)
from bench.load import LoadError
from bench.table import tables
from bench.targets import judged
from bench.timing import EFFORT
from epp.demo.stack import StackError
from epp.figures import Figure, write

MICRO = {
    "edge": edge_micro.figures,
    "ext_proc": ext_proc_micro.figures,
    "api": api_micro.figures,
    "scheduler": scheduler_micro.figures,
    "kv": kv_micro.figures,
    "index": index_micro.figures,
    "tokens": tokens_micro.figures,
    "events": events_micro.figures,
    "exchange": exchange_micro.figures,
    "replicas": replicas_micro.figures,
}
"""Measured inside this process, cheapest first."""
END_TO_END = "end_to_end"


@click.command()
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("build/bench.json"), show_default=True
)
@click.option("--quick", is_flag=True, help="Fewer and shorter rounds: figures are rougher.")
@click.option(
    "--only",
    type=click.Choice(["micro", END_TO_END, *MICRO]),
    multiple=True,
    help="Measure this part alone; may be given again.",
)
def main(out: Path, quick: bool, only: tuple[str, ...]) -> None:
    """Measure kvsteer: CPU per request beside a C++ ext_proc server, and the parts by themselves."""
    begin = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"{time.monotonic() - begin:6.1f} s  {text}", err=True)

    say(machine())
    if quick:
        EFFORT.hurry()
    wanted = set(only) or {"micro", END_TO_END}
    figures: list[Figure] = []
    for name, measure in MICRO.items():
        if wanted & {"micro", name}:
            say(name)
            figures += measure()
    if END_TO_END in wanted:
        rounds, seconds, idle = (1, 0.4, 3.0) if quick else (5, 0.6, 6.0)
        try:
            figures += uvloop.run(end_to_end.measure(say, rounds=rounds, seconds=seconds, idle_seconds=idle))
        except (StackError, LoadError) as error:
            click.echo(f"bench: {error}", err=True)
            sys.exit(1)
    figures = judged(figures)
    write(out, figures)
    console = Console(width=None if sys.stdout.isatty() else 130)
    for made in tables(figures):
        console.print(made)
    say(f"figures are in {out}")


def machine() -> str:
    """What the figures of a run depend on besides the code."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


if __name__ == "__main__":
    main(prog_name="python -m bench")
