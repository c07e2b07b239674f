"""`kvsteer index`: what a running picker believes of its workers' caches."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from epp.commands.explain import reason

MAX_BYTES = 64 << 20


@click.command("index", short_help="What a running picker believes of its workers' caches.")
@click.option("--url", default="http://127.0.0.1:9090", show_default=True, help="Admin port of the picker.")
@click.option("--endpoint", metavar="ADDRESS", help="Only this endpoint (address or name), with all that is counted.")
def command(url: str, endpoint: str | None) -> None:
    """Sum up what a running picker knows of each worker's KV cache by its events, and how far it believes that."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/debug/index", timeout=10) as answer:
            found = json.loads(answer.read(MAX_BYTES))
        index, endpoints = found["index"], found["endpoints"]
        if index is None:
            raise click.ClickException(f"{url}: its configuration has no precise-prefix-cache-producer")
        if endpoint is not None:
            endpoints = [e for e in endpoints if endpoint in (e["address"], e["name"])]
            if not endpoints:
                raise click.ClickException(f"{url}: {endpoint} is not in the pool")
        shown = _table(endpoints) if endpoint is None else _one(endpoints[0])
        text = (
            f"index: {index['entries']} blocks in {index['bytes'] / 1e6:.1f} of {index['max_bytes'] / 1e6:.0f} MB, "
            f"{index['evicted']} evicted; {index['precise']} requests scored by it, "
            f"{index['history']} by the history alone"
        )
    except OSError as error:
        raise click.ClickException(f"{url}: {reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{url}: not an answer that this version can read ({type(error).__name__}: {error})"
        raise click.ClickException(why) from None
    console = Console()
    console.print(shown)
    console.print(text, highlight=False)


def _table(endpoints: list[Mapping[str, Any]]) -> RenderableType:
    table = Table()
    table.add_column("endpoint\nmodel", overflow="fold")
    table.add_column("confidence\ncounts", no_wrap=True)
    for heading in ("blocks", "last batch\nlag", "gaps\nlost", "agreed\nover/under"):
        table.add_column(heading, justify="right", no_wrap=True)
    for e in endpoints:
        followed = e["model"] is not None
        table.add_row(
            escape(f"{e['address']}\n{e['model'] or '?'}"),
            f"{_colour(e['confidence'])}\n{e['counts']:.2f}",
            *(_of_followed(e) if followed else (_blocks(e["blocks"]),)),
        )
    return table


def _of_followed(e: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{_blocks(e['blocks'])}\nparked {e['parked']}",
        f"{_age(e['last_batch_age_s'])}\n{e['lag_s'] * 1e3:.0f} ms",
        f"{e['gaps']}\n{e['lost_batches']}",
        f"{e['agreed']}\n{e['over']}/{e['under']}",
    )


def _one(e: Mapping[str, Any]) -> RenderableType:
    """Everything of one endpoint, a line each."""
    table = Table.grid(padding=(0, 2))
    for name, value in e.items():
        if name == "blocks":
            value = ", ".join(_blocks(value).splitlines())
        elif isinstance(value, float):
            value = f"{value:.3f}"
        table.add_row(name.replace("_", " "), escape(str(value)))
    return table


def _blocks(by_tier: Mapping[str, int]) -> str:
    lower = [f"{tier} {count}" for tier, count in by_tier.items() if count and tier != "gpu"]
    return "\n".join([f"gpu {by_tier['gpu']}", *lower])


def _age(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s ago"


def _colour(level: str) -> str:
    return {"complete": "[green]{}[/]", "none": "[red]{}[/]"}.get(level, "[yellow]{}[/]").format(escape(level))
