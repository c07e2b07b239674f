"""CPU per request through the real Envoy: without an ext_proc server, with one in C++ that does nothing, with kvsteer.

In: how long. Out: figures `end_to_end/<case>/<profile>/<server>/<what>`: the picker's and Envoy's CPU per request, for
streams also per ext_proc message (nearly all of them response chunks). They are medians over rounds in which all
servers take turns, forwards and backwards. The picker's ratios are to the C++ server, Envoy's to Envoy alone, always of
the same run. Wall times are there as information only: the load generator and the worker share the machine's cores.

What a server uses when nothing is asked of it (health checks, scraping 16 workers) is measured first and taken off, so
that a figure does not depend on how fast the machine happened to send. `idle` shows it, and `idle/kvsteer-default` what
a picker uses that scrapes at its default rate.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from bench import load
from bench.bodies import Conversation, small
from bench.cpu import cpu_seconds
from bench.load import Bodies
from bench.stack import CPP, LEAN, NONE, PROFILES, Bench, running
from epp.envoy_options import Profile
from epp.figures import Figure, figure, percentile

CHUNKS = 100
LARGE_BYTES = 400_000
TURNS = 25
"""Turns of a conversation before it branches again: 400 KB grow to at most 500 KB."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of load; `chunks` events in each answer, or an answer in one piece."""

    name: str
    clients: int
    chunks: int = 0


CASES = (
    Case("200B", clients=16),
    Case("200B-alone", clients=1),
    Case("400KB", clients=4),
    Case("stream", clients=8, chunks=CHUNKS),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One server under one load for one round. CPU in microseconds a request, wall times in milliseconds."""

    picker_us: float
    envoy_us: float
    p50_ms: float
    p99_ms: float
    requests: int
    messages: int
    """ext_proc messages Envoy sent, all requests together."""


Results = dict[tuple[str, Profile, str], list[Cell]]


async def measure(say: Say, *, rounds: int, seconds: float, idle_seconds: float) -> list[Figure]:
    """Start everything, measure, stop everything. Raises `epp.demo.stack.StackError`, `bench.load.LoadError`."""
    say("starting Envoy, the worker and the ext_proc servers (builds the C++ server the first time)")
    async with running(say) as bench:
        sources = {case.name: _sources(case) for case in CASES}
        await _warm_up(bench, sources)
        idle = await _idle(bench, idle_seconds)
        results: Results = defaultdict(list)
        for number in range(rounds):
            for case, profile in itertools.product(CASES, PROFILES):
                say(f"round {number + 1} of {rounds}: {case.name}, {profile}")
                for server in bench.servers if number % 2 == 0 else reversed(bench.servers):
                    bodies = [source(number) for source in sources[case.name]]
                    cell = await _cell(bench, case, profile, server, bodies, seconds, idle)
                    results[case.name, profile, server].append(cell)
        return _figures(bench, results, idle)


Source = Callable[[int], Bodies]
"""What one client sends in round n."""


def _sources(case: Case) -> list[Source]:
    return [_agent(n) if case.name == "400KB" else _short(n, bool(case.chunks)) for n in range(case.clients)]


def _short(client: int, stream: bool) -> Source:
    return lambda number: lambda: small(client, stream=stream)


def _agent(client: int) -> Source:
    conversation = Conversation(client, LARGE_BYTES)

    def bodies(number: int) -> Bodies:
        turns = itertools.cycle(range(1, TURNS + 1))
        laps = itertools.count()
        lap = 0

        def next_body() -> bytes:
            nonlocal lap
            turn = next(turns)
            if turn == 1:
                lap = next(laps)
            return conversation.body(number * 1000 + lap, turn)

        return next_body

    return bodies


async def _warm_up(bench: Bench, sources: dict[str, list[Source]]) -> None:
    """Each server sees each conversation once; an Envoy that has not yet found a server healthy is waited for."""
    for (server, profile), case in itertools.product(bench.ports, CASES):
        for attempt in range(40):
            try:
                bodies = [source(-1) for source in sources[case.name]]
                await load.run(bench.ports[server, profile], bodies, 0.05, chunks=case.chunks)
                break
            except load.LoadError:
                if attempt == 39:
                    raise
                await asyncio.sleep(0.25)


async def _idle(bench: Bench, seconds: float) -> dict[str, float]:
    """Share of a core that each server uses when nothing is asked of it."""
    await asyncio.sleep(0.5)
    pids = {**bench.pids, f"{LEAN}-default": bench.scraping.pid}
    before = {server: cpu_seconds(pid) for server, pid in pids.items()}
    await asyncio.sleep(seconds)
    idle = {server: (cpu_seconds(pid) - before[server]) / seconds for server, pid in pids.items()}
    bench.scraping.terminate()
    await bench.scraping.wait()
    return idle


async def _cell(
    bench: Bench,
    case: Case,
    profile: Profile,
    server: str,
    bodies: list[Bodies],
    seconds: float,
    idle: dict[str, float],
) -> Cell:
    pid = bench.pids.get(server)
    messages = await _messages(bench, server, profile)
    picker = cpu_seconds(pid) if pid else 0.0
    envoy = cpu_seconds(bench.envoy_pid)
    sent = await load.run(bench.ports[server, profile], bodies, seconds, chunks=case.chunks)
    used = cpu_seconds(pid) - picker - idle[server] * sent.seconds if pid else 0.0
    envoy = cpu_seconds(bench.envoy_pid) - envoy
    count = len(sent.latencies)
    return Cell(
        picker_us=max(0.0, used) / count * 1e6,
        envoy_us=envoy / count * 1e6,
        p50_ms=percentile(sent.latencies, 0.5) * 1e3,
        p99_ms=percentile(sent.latencies, 0.99) * 1e3,
        requests=count,
        messages=await _messages(bench, server, profile) - messages,
    )


async def _messages(bench: Bench, server: str, profile: Profile) -> int:
    """ext_proc messages that Envoy has sent for one listener."""
    name = f"http.{server}-{profile}.ext_proc.stream_msgs_sent"
    url = f"http://127.0.0.1:{bench.admin_port}/stats"
    async with aiohttp.ClientSession() as session, session.get(url, params={"filter": f"^{name}$"}) as response:
        return int((await response.text()).rpartition(": ")[2] or 0)


def _figures(bench: Bench, results: Results, idle: dict[str, float]) -> list[Figure]:
    out = [figure(f"end_to_end/idle/{server}", share * 1000, "ms CPU/s") for server, share in idle.items()]
    for case, profile, server in results:
        place = f"end_to_end/{case}/{profile}"

        def median(of: Callable[[Cell], float], who: str = server, key: tuple[str, Profile] = (case, profile)) -> float:
            return statistics.median(of(cell) for cell in results[(*key, who)])

        def add(what: str, unit: str, of: Callable[[Cell], float], base: str = "") -> None:
            value = median(of)
            reference = median(of, base) if base in bench.servers and base != server else 0.0  # noqa: B023
            ratio = value / reference if reference else None
            to = f"{place}/{base}/{what}" if ratio is not None else ""  # noqa: B023
            out.append(figure(f"{place}/{server}/{what}", value, unit, ratio=ratio, to=to))  # noqa: B023

        if server != NONE:
            add("picker_cpu", "us/request", lambda cell: cell.picker_us, CPP)
        add("envoy_cpu", "us/request", lambda cell: cell.envoy_us, NONE)
        if server != NONE:
            add("envoy_and_picker_cpu", "us/request", lambda cell: cell.envoy_us + cell.picker_us, CPP)
        if server != NONE and case == "stream" and profile is Profile.GATEWAY:
            per_message = "picker_cpu_per_message"
            add(per_message, "us/message", lambda cell: cell.picker_us * cell.requests / cell.messages, CPP)
        add("wall_p50", "ms", lambda cell: cell.p50_ms)
        add("wall_p99", "ms", lambda cell: cell.p99_ms)
        add("requests", "requests/round", lambda cell: cell.requests)
    return out
