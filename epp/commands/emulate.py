"""`kvsteer emulate`: emulated vLLM workers on local ports."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import uvloop

from epp.number_types import Number, seconds
from epp.sim.cost import PRESETS
from epp.sim.engine import EngineConfig
from epp.sim.faults import Faults
from epp.sim.publisher import EventsConfig, shifted
from epp.sim.server import Worker, WorkerConfig
from epp.sim.tokenizer import SHIPPED, ChatTokenizer

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
F = TypeVar("F", bound=Callable[..., Any])


def _option(flag: str, text: str, kind: Any, default: Any = None, **more: Any) -> Callable[[F], F]:
    return click.option(flag, type=kind, default=default, help=text, show_default=default is not None, **more)


@click.command(name="emulate", short_help="Run emulated vLLM workers, without a model.")
@_option("--port", "A worker on this port, 0 = a free one. Repeat for more.", click.IntRange(0, 65535), multiple=True)
@_option("--count", "This many workers, on ports from --base-port on.", click.IntRange(1, 256))
@_option("--base-port", "First port of --count.", click.IntRange(1, 65535), 8101)
@_option("--host", "Address to listen on.", str, "127.0.0.1")
@_option("--model", "The model name served.", str, "emulated")
@_option("--name", "Name in x-served-by; the n-th of several gets -n appended.  [default: host:port]", str)
@_option("--tokenizer", "Directory with tokenizer.json and a chat template.  [default: a shipped one]", DIRECTORY)
@_option("--blocks", "KV-cache blocks, one of them the null block.", click.IntRange(2), 4096)
@_option("--block-size", "Tokens a block.", click.IntRange(1, 4096), 16)
@_option("--max-model-len", "Context length in tokens.  [default: what the blocks hold]", click.IntRange(1))
@_option("--max-num-seqs", "Sequences in one engine step.", click.IntRange(1), 128)
@_option("--max-num-batched-tokens", "Tokens in one engine step.", click.IntRange(1), 8192)
@_option("--cost", "How long a step takes.", click.Choice(sorted(PRESETS)), "gpu-large")
@_option("--speed", "Engine seconds in a real second.", Number(0, min_open=True), 1.0)
@_option("--output-tokens", "Mean length of an answer that no limit cuts.", click.IntRange(1), 128)
@_option("--stream-interval", "Tokens a streamed chunk.", click.IntRange(1), 1)
@_option("--lora", "A LoRA adapter to serve under this name. May be repeated.", str, multiple=True)
@_option("--data-parallel-size", "Engines behind each port (X-data-parallel-rank picks one).", click.IntRange(1, 64), 1)
@_option("--max-loras", "Different adapters in one engine step.", click.IntRange(1), 1)
@_option("--hash-seed", "Seed of the block hashes that events report.", str, "")
@_option(
    "--kv-events", "Publish KV events (ZeroMQ) here, e.g. tcp://*:5557; every further rank and worker adds 1.", str
)
@_option("--kv-replay", "Replay missed KV events here; ports likewise.", str)
@_option("--kv-events-topic", "Topic of KV events.", str, "kv@{address}@{model}")
@_option(
    "--kv-events-layout",
    "Layout of KV events: vLLM's since mid-2026, or the one before.",
    click.Choice(["map", "array"]),
    "map",
)
@_option("--kv-events-buffer", "Batches of KV events kept for replay.", click.IntRange(1), 10_000)
@_option("--fault", "NAME=VALUE, e.g. error_rate=0.1; the names are those of POST /control/faults.", str, multiple=True)
@_option("--grace", "Seconds running requests may take to end after SIGTERM or Ctrl-C.", seconds(), 0.0)
def command(**options: Any) -> None:
    """Emulated vLLM workers: scheduling, blocks, prefix cache, metrics and KV events, without a model.

    Several workers share the process; each has its own engine and port.
    """
    try:
        tokenizer = ChatTokenizer(options["tokenizer"] or SHIPPED)
        workers = [Worker(config, tokenizer) for config in _configs(options)]
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    uvloop.run(_serve(workers, options["grace"]))


def _configs(options: dict[str, Any]) -> list[WorkerConfig]:
    """Raises ValueError for a bad fault or a port out of range."""
    ports = options["port"] or tuple(range(options["base_port"], options["base_port"] + (options["count"] or 1)))
    if ports[-1] > 65535:
        raise ValueError(f"--base-port and --count: port {ports[-1]} is out of range")
    engine = EngineConfig(
        num_gpu_blocks=options["blocks"],
        block_size=options["block_size"],
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_model_len=options["max_model_len"],
        max_loras=options["max_loras"],
        hash_seed=options["hash_seed"],
        cost=PRESETS[options["cost"]],
    )
    return [
        WorkerConfig(
            model=options["model"],
            host=options["host"],
            port=port,
            name=(options["name"] and (f"{options['name']}-{index + 1}" if len(ports) > 1 else options["name"])) or "",
            engine=engine,
            data_parallel_size=options["data_parallel_size"],
            events=_events(options, index * options["data_parallel_size"]),
            faults=_faults(options["fault"]),
            lora_modules=options["lora"],
            speed=options["speed"],
            stream_interval=options["stream_interval"],
            output_tokens=options["output_tokens"],
        )
        for index, port in enumerate(ports)
    ]


def _events(options: dict[str, Any], index: int) -> EventsConfig | None:
    if options["kv_events"] is None:
        if options["kv_replay"] is not None:
            raise ValueError("--kv-replay needs --kv-events")
        return None
    return EventsConfig(
        endpoint=shifted(options["kv_events"], index),
        replay_endpoint=options["kv_replay"] and shifted(options["kv_replay"], index),
        topic=options["kv_events_topic"],
        buffer_steps=options["kv_events_buffer"],
        layout=options["kv_events_layout"],
    )


def _faults(settings: tuple[str, ...]) -> Faults:
    pairs = [setting.partition("=") for setting in settings]
    try:
        return msgspec.convert({name: value for name, _, value in pairs}, Faults, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"--fault: {error}") from None


async def _serve(workers: list[Worker], grace_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    started: list[Worker] = []
    try:
        for worker in workers:
            await worker.start()
            started.append(worker)
            events = f", KV events on {worker.reachable(worker.publisher.endpoint)}" if worker.publisher else ""
            click.echo(f"{worker.name}: http://{worker.address}{events}")
        await stop.wait()
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    finally:
        await asyncio.gather(*(worker.stop(grace_s) for worker in started))
