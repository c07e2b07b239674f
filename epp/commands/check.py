"""`kvsteer check`: is a configuration file good, what does it come to, and are our token ids the worker's?"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from epp.check_tokens import check_tokens
from epp.config import ConfigError, PickerConfig, default_text, load
from epp.model_config import ModelConfig
from epp.registry import RegistryError
from epp.scheduler import Scheduler


@click.command("check", short_help="Is a configuration file good, and what does it come to?")
@click.argument("files", nargs=-1, type=click.Path())
@click.option("--print-default", is_flag=True, help="Print the configuration that is used when none is given.")
@click.option("--tokens", type=click.Path(path_type=Path), help="Body of a request: compare its token ids.")
@click.option("--worker", help="With --tokens: URL of a worker.")
@click.option("--model-path", default="", help="Folder of the model; without it, the models of FILES.")
def command(
    files: tuple[str, ...], print_default: bool, tokens: Path | None, worker: str | None, model_path: str
) -> None:
    """Check configuration FILES: every problem with file, line and path; exit status 2 if there is one.

    Plugins are loaded and made as `kvsteer serve` makes them.

    With --tokens, compare our token ids of a request with those of a worker; exit status 1 if they differ.
    """
    if (tokens is None) != (worker is None):
        raise click.UsageError("--tokens and --worker go together")
    if tokens is not None and not model_path and not files:
        raise click.UsageError("--tokens needs --model-path, or FILES that name the model")
    if print_default:
        click.echo(default_text(), nl=False)
    elif not files and tokens is None:
        raise click.UsageError("give one or more FILES, or --print-default")
    bad = 0
    models: list[ModelConfig] = []
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
        models += config.models
        click.echo(f"{name}: OK\n{summary(config)}")
    if bad:
        sys.exit(2)
    if tokens is not None and worker is not None and not check_tokens(tokens, worker, model_path, models):
        sys.exit(1)


def summary(config: PickerConfig) -> str:
    """What the configuration comes to, with all that was filled in."""
    lines = [f"  producers: {', '.join(config.producers) or 'none'}"]
    for profile in config.profiles:
        steps = [*profile.filters, *(f"{name} x {weight:g}" for name, weight in profile.scorers), profile.picker]
        lines.append(f"  profile {profile.name}: {' -> '.join(steps)}")
    lines.append(f"  handler: {config.handler}")
    for model in config.models:
        where = model.path or model.render_url or "its workers"
        lines.append(f"  model {', '.join((model.name, *model.aliases))}: tokenised by {model.source} from {where}")
    return "\n".join(lines)
