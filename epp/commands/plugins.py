"""`kvsteer plugins`: the plugin types there are, what they do, and their parameters."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epp.decoding import camel
from epp.document import unknown
from epp.plugin import Range, Unit
from epp.registry import PluginClass, RegistryError, default_registry, is_shipped, roles, where


@click.command("plugins", short_help="List plugin types, or describe one with its parameters.")
@click.argument("type_", metavar="[TYPE]", required=False)
def command(type_: str | None) -> None:
    """List the plugin types, or describe one TYPE (a type, an alias, or module:Class) with its parameters."""
    registry = default_registry()
    console = Console()
    if type_ is None:
        table = Table("type", "kind", "what it does")
        for cls in registry.classes():
            table.add_row(cls.type, ", ".join(roles(cls)), escape(first_sentence(cls)))
        console.print(table)
        for name, why in registry.broken().items():
            console.print(f"[red]{escape(name)}: {escape(why)}[/]")
        return
    try:
        found = registry.find(type_, Path())
    except RegistryError as error:
        raise click.ClickException(str(error)) from None
    if found is None:
        click.echo(f'"{type_}": {unknown("type", type_, registry.names())}', err=True)
        sys.exit(2)
    describe(found, console)


def describe(cls: PluginClass, console: Console) -> None:
    """Print one plugin: kinds, documentation, parameters."""
    console.print(f"[bold]{cls.type}[/] ({', '.join(roles(cls))}){'' if is_shipped(cls) else f'  from {where(cls)}'}")
    if cls.aliases:
        console.print(f"also called {', '.join(cls.aliases)}")
    console.print()
    console.print(escape(inspect.cleandoc(cls.__doc__ or "")))
    fields = dataclasses.fields(cls.Parameters)
    if fields:
        hints = typing.get_type_hints(cls.Parameters, include_extras=True)
        docs = field_docs(cls.Parameters)
        table = Table("parameter", "type", "default", "meaning", title="\nparameters", title_justify="left")
        for field in fields:
            cells = (camel(field.name), type_name(hints[field.name]), default_of(field), docs.get(field.name, ""))
            table.add_row(*map(escape, cells))
        console.print(table)
    for name, why in cls.ignored_parameters.items():
        console.print(f"{escape(name)}: accepted without effect, {escape(why)}")


def first_sentence(cls: type) -> str:
    text = " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())
    head, dot, _ = text.partition(". ")
    return head + "." if dot else text


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(list(value)) if isinstance(value, tuple) else str(value)


def type_name(hint: Any) -> str:
    """The type as the reader of a YAML file thinks of it, with bounds and unit."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is not typing.Annotated:
        return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint).replace("typing.", "")
    base, *notes = typing.get_args(hint)
    text = type_name(base)
    for note in notes:
        if isinstance(note, Unit):
            text = "duration" if note.name == "duration" else f"{text}, {note.name}"
    for note in notes:
        if isinstance(note, Range) and note != Range():
            low = "" if math.isinf(note.min) else f"{note.min:g}"
            high = "" if math.isinf(note.max) else f"{note.max:g}"
            text += f", {low}..{high}" if low and high else f", at least {low}" if low else f", at most {high}"
    return text


def field_docs(cls: type) -> dict[str, str]:
    """The docstrings under the fields of a class; none when its source is not at hand."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):  # noqa: SIM102
            if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                docs[field.target.id] = " ".join(text.value.value.split())
    return docs
