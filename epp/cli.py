"""`kvsteer`: the command line. Commands live in `epp.commands`, one a file, and are imported only when used."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import PackageNotFoundError, version

import click

import epp.commands


class LazyGroup(click.Group):
    """A group whose members are the modules of `epp.commands` (`envoy_config` is `envoy-config`)."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(epp.commands.__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"epp.commands.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command


def _version() -> str:
    try:
        return version("kvsteer")
    except PackageNotFoundError:
        return "0 (not installed)"


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(_version(), prog_name="kvsteer")
def main() -> None:
    """kvsteer steers every LLM request to the worker that will answer first.

    It is an Envoy external-processing endpoint picker: put it behind an Envoy or a Gateway API InferencePool.
    """


if __name__ == "__main__":
    main()
