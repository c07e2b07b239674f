"""`kvsteer explain`: one decision as a table."""

from __future__ import annotations

import sys
import urllib.parse
import urllib.request
from pathlib import Path

import click
from rich.console import Console

from epp.explain import explain, find, read

MAX_BYTES = 256 << 20


@click.command("explain", short_help="Why a request went where it went.")
@click.argument("source", metavar="FILE|URL|-")
@click.option("--id", "request_id", help="The request to explain; without it, the last one.")
def command(source: str, request_id: str | None) -> None:
    """Explain a decision from a decision log FILE, the admin port (URL: http://127.0.0.1:9090) or standard input."""
    try:
        record = find(read(fetch(source, request_id)), request_id)
    except (OSError, ValueError) as error:
        hint = "; an admin port is a URL: http://..." if isinstance(error, FileNotFoundError) and ":" in source else ""
        raise click.ClickException(f"{source}: {reason(error)}{hint}") from None
    if record is None:
        raise click.ClickException(f"{source}: no decision" + (f" for request {request_id}" if request_id else ""))
    try:
        table = explain(record)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        why = f"{source}: not a decision that this version can read ({type(error).__name__}: {error})"
        raise click.ClickException(why) from None
    Console().print(table)


def reason(error: OSError | ValueError) -> str:
    """What went wrong, without the wrapping of `urllib` and the file's name, which the message has already."""
    cause = getattr(error, "reason", error)  # of a URLError, an OSError; of others, text
    return (isinstance(cause, OSError) and cause.strerror) or str(error)


def fetch(source: str, request_id: str | None) -> str:
    """The text behind a file name, a URL or `-`. Of a longer log only the last 256 MB are read.

    A URL without a path is an admin port, which is asked for the one decision wanted.
    """
    if source == "-":
        return sys.stdin.read()
    if not source.startswith(("http://", "https://")):
        with Path(source).open("rb") as file:
            start = max(file.seek(0, 2) - MAX_BYTES, 0)
            file.seek(start)
            if start:
                file.readline()
            return file.read().decode("utf-8", "replace")
    parts = urllib.parse.urlsplit(source)
    if parts.path in ("", "/") and not parts.query:
        query = urllib.parse.urlencode({"limit": 1, "id": request_id or ""})
        source = urllib.parse.urlunsplit(parts._replace(path="/debug/decisions", query=query))
    with urllib.request.urlopen(source, timeout=10) as answer:
        body: bytes = answer.read(MAX_BYTES)
        return body.decode("utf-8", "replace")
