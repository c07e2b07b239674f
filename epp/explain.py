"""Explains a decision to a person: one table per profile, a row per endpoint, a column per filter and scorer.

In: a decision as plain values (`Decision.as_dict`, with `outcome` when the request is over). Out: things that `rich`
prints. Also finds decisions in what a decision log or `/debug/decisions` gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Record = Mapping[str, Any]


def read(text: str) -> Iterator[Record]:
    """Decisions in a text: JSON lines, one JSON object, or a JSON list (also under the key `decisions`).

    Raises ValueError, naming the line, for anything else.
    """
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        yield from _lines(text)
        return
    if isinstance(whole, dict) and isinstance(whole.get("decisions"), list):
        whole = whole["decisions"]
    for i, record in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield _checked(record, f"entry {i}")


def _lines(text: str) -> Iterator[Record]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError(f"line {number} is not JSON") from None
            yield _checked(record, f"line {number}")


def _checked(record: Any, place: str) -> Record:
    if not (
        isinstance(record, dict)
        and isinstance(record.get("profiles"), list)
        and isinstance(record.get("request_id"), str)
        and isinstance(record.get("at"), int | float)
    ):
        raise ValueError(f"{place} is not a decision")
    return record


def find(records: Iterable[Record], request_id: str | None) -> Record | None:
    """The latest decision, or the latest of one request, whichever way the records are ordered."""
    found: Record | None = None
    for record in records:
        if request_id in (None, record["request_id"]) and (found is None or record["at"] >= found["at"]):
            found = record
    return found


def explain(record: Record) -> RenderableType:
    """A decision as a headline, a table per profile, and what came of it."""
    parts: list[RenderableType] = [_headline(record)]
    if record.get("kind"):
        parts.append(_stages(record))
    parts += [_profile(profile, record.get("candidates") or []) for profile in record["profiles"]]
    parts.append(_estimate_and_outcome(record))
    reasons = record.get("reasons") or []
    if reasons:
        parts.append(Text("reasons: " + ", ".join(map(str, reasons)), style="yellow"))
    timing = record.get("timing") or {}
    if timing:
        parts.append(Text("timing: " + ", ".join(f"{k} {v * 1e6:.0f} us" for k, v in timing.items()), style="dim"))
    return Group(*parts)


def _headline(record: Record) -> Text:
    endpoints = record.get("endpoints") or []
    text = Text.assemble(("request ", "dim"), str(record["request_id"]), ("  model ", "dim"), str(record.get("model")))
    text.append(f"  {record.get('api', '')}  ", "dim")
    if not endpoints:
        return text.append("no endpoint", "bold red")
    text.append(f"-> {endpoints[0]}", "bold green")
    return text.append(f"  fallbacks {', '.join(endpoints[1:])}", "dim") if endpoints[1:] else text


def _stages(record: Record) -> Text:
    """How the request's stages are spread, and what was compared."""
    text = Text.assemble((str(record["kind"]), "bold"))
    if record.get("prefill"):
        text.append(f"  prefill at {record['prefill']}", "green")
    for name, value in (record.get("notes") or {}).items():
        text.append(f"  {name} {_number(value) if isinstance(value, float) else value}", "dim")
    return text


def _cached(tokens: float, by_tier: Mapping[str, Any] | None, row: int) -> str:
    """Cached tokens, and below them what lies on a lower tier than the device."""
    lower = [(name, values[row]) for name, values in (by_tier or {}).items() if name != "gpu" and values[row]]
    return "\n".join([f"{tokens:.0f}", *(f"{name} {count:.0f}" for name, count in lower)])


def _profile(profile: Mapping[str, Any], everyone: list[str]) -> RenderableType:
    table = Table(title=escape(f"profile {profile['name']}, picker {profile['picker']}"), title_justify="left")
    table.add_column("endpoint", no_wrap=True)
    filters, scorers = profile["filters"], profile["scorers"]
    for step in filters:
        table.add_column(escape(step["name"]), justify="center", overflow="fold")
    cached, expected = profile.get("cached_tokens"), profile.get("expected_ttft")
    if cached is not None:
        table.add_column("tokens\ncached", justify="right")
    if expected is not None:
        table.add_column("first token\nin s", justify="right")
    for step in scorers:
        table.add_column(escape(f"{step['name']}\nraw x {step['weight']:g}"), justify="right", overflow="fold")
    table.add_column("total", justify="right")
    table.add_column("chosen", justify="center")
    candidates, chosen = profile["candidates"], profile["chosen"]
    for endpoint in _by_rank(profile, everyone):
        cells = [escape(endpoint)]
        stays = True
        for step in filters:
            kept = endpoint in step["kept"]
            cells.append("" if not stays else "yes" if kept else "[red]no[/]")
            stays = stays and kept
        row = candidates.index(endpoint) if endpoint in candidates else None
        if cached is not None:
            cells.append("" if row is None else _cached(cached[row], profile.get("cached_by_tier"), row))
        if expected is not None:
            cells.append("" if row is None else _number(expected[row]))
        for step in scorers:
            cells.append("" if row is None else _score(step["raw"][row], step["weight"]))
        cells.append("" if row is None else _number(profile["totals"][row]))
        cells.append(
            "" if endpoint not in chosen else "*" if endpoint == chosen[0] else str(chosen.index(endpoint) + 1)
        )
        table.add_row(*cells, style="bold green" if chosen[:1] == [endpoint] else None)
    faults = [f"{step['name']}: {step['fault']}" for step in (*filters, *scorers) if step["fault"]]
    notes = [Text(f"at fault: {fault}", style="red") for fault in faults]
    return Group(table, *notes)


def _by_rank(profile: Mapping[str, Any], everyone: list[str]) -> list[str]:
    """The chosen ones first, then by total, then those a filter took out, the last one first."""
    chosen, totals = profile["chosen"], dict(zip(profile["candidates"], profile["totals"], strict=False))
    rest = sorted((e for e in totals if e not in chosen), key=lambda e: -(totals[e] or 0.0))
    rows = dict.fromkeys([*chosen, *rest])
    for step in reversed(profile["filters"]):
        rows.update(dict.fromkeys(step["kept"]))
    return list(rows | dict.fromkeys(everyone))


def _score(raw: float | None, weight: float) -> str:
    return "none" if raw is None else f"{_number(raw)} [dim]{_number(raw * weight)}[/]"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _estimate_and_outcome(record: Record) -> RenderableType:
    estimate, outcome = record.get("estimate") or {}, record.get("outcome")
    table = Table.grid(padding=(0, 2))
    ttft = estimate.get("ttft_s")
    table.add_row(
        "expected",
        f"{estimate.get('cached_tokens', 0)} of {estimate.get('prompt_tokens', 0)} prompt tokens cached",
        "" if ttft is None else f"first token in {ttft:.3f} s",
    )
    if outcome is not None:
        cached, prompt, first = outcome.get("cached_tokens"), outcome.get("prompt_tokens"), outcome.get("first_token_s")
        ended = "aborted" if outcome.get("aborted") else f"status {outcome.get('status') or 'not seen'}"
        table.add_row(
            "came out",
            "usage not seen"
            if prompt is None
            else f"{'?' if cached is None else cached} of {prompt} prompt tokens cached",
            "" if first is None else f"first token in {first:.3f} s",
            ended,
        )
    return table
