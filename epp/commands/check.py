"""`kvsteer check`: is a configuration file good, and what does it come to?"""

from __future__ import annotations

import sys

import click

from epp.config import ConfigError, PickerConfig, default_text, load
from epp.registry import RegistryError
from epp.scheduler import Scheduler


@click.command("check", short_help="Is a configuration file good, and what does it come to?")
@click.argument("files", nargs=-1, type=click.Path())
@click.option("--print-default", is_flag=True, help="Print the configuration that is used when none is given.")
def command(files: tuple[str, ...], print_default: bool) -> None:
    """Check configuration FILES: every problem with file, line and path; exit status 2 if there is one.

    Plugins are loaded and made as `kvsteer serve` makes them.
    """
    if print_default:
        click.echo(default_text(), nl=False)
    elif not files:
        raise click.UsageError("give one or more FILES, or --print-default")
    bad = 0
    for name in files:
        try:
            config = load(name)
            Scheduler(config)
        except (ConfigError, RegistryError) as error:
            bad += 1
            click.echo(str(error), err=True)
            continue
        for warning in config.warnings:
            click.echo(f"warning: {warning}", err=True)
        click.echo(f"{name}: OK\n{summary(config)}")
    sys.exit(2 if bad else 0)


def summary(config: PickerConfig) -> str:
    """What the configuration comes to, with all that was filled in."""
    lines = [f"  producers: {', '.join(config.producers) or 'none'}"]
    for profile in config.profiles:
        steps = [*profile.filters, *(f"{name} x {weight:g}" for name, weight in profile.scorers), profile.picker]
        lines.append(f"  profile {profile.name}: {' -> '.join(steps)}")
    lines.append(f"  handler: {config.handler}")
    return "\n".join(lines)
