"""`kvsteer serve`: run the picker."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from epp.cluster_options import cluster_options
from epp.config import ConfigError
from epp.director import Options
from epp.discovery.dns import DnsDiscovery
from epp.discovery.file import EndpointFileError, FileDiscovery
from epp.discovery.kubernetes.cluster import ClusterSettings
from epp.discovery.kubernetes.credentials import AccessError
from epp.discovery.membership import Discovery
from epp.discovery.static import StaticDiscovery
from epp.exchange import Patience
from epp.field_flags import FieldFlagError, translate
from epp.gateway.edge import EdgeName
from epp.gateway.ext_proc_events import Limits
from epp.gateway.listen import AddressError
from epp.gateway.tls import Tls, TlsError
from epp.guard import Limits as PluginLimits
from epp.kvcache.tokens import ModelFolderError
from epp.number_types import Number, seconds
from epp.observe.decision_log import LogFile
from epp.serve import Picker, Settings
from epp.shared.redis_stream import RedisMissing, parse_url
from epp.signals.scraper import ScrapeSettings

SECONDS = seconds()
POSITIVE_SECONDS = seconds(0.01)


class ServeCommand(click.Command):
    """Takes the Go pickers' flags too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name.lstrip("-") for p in self.params for name in (*p.opts, *p.secondary_opts)}
        try:
            translated = translate(args, own)
        except FieldFlagError as error:
            raise click.UsageError(str(error), ctx) from None
        ctx.meta[NOTES] = translated.notes
        return super().parse_args(ctx, translated.arguments)


NOTES = "kvsteer.notes"
"""Key of `Context.meta`: what to say of flags that have no meaning here."""


@click.command(name="serve", cls=ServeCommand, short_help="Run the picker: answer Envoy until SIGTERM.")
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="IP:PORT[-PORT][=KEY=VALUE,...]",
    help="A worker; several ports of a host are its data-parallel ranks, dp=N are N ranks behind one. Repeat for more.",
)
@click.option(
    "--endpoints-file", type=click.Path(path_type=Path), help="Workers from a YAML file, watched for changes."
)
@click.option(
    "--dns", multiple=True, metavar="NAME:PORTS | _SERVICE._PROTO.NAME", help="Workers from DNS: A/AAAA or SRV."
)
@click.option(
    "--envoy-endpoints",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep the pool in this file for Envoy (`envoy-config --endpoints file:PATH`).",
)
@click.option(
    "--config-file",
    type=click.Path(path_type=Path),
    help="Policy, as an EndpointPickerConfig (docs/configuration.md).  [default: built in]",
)
@click.option("--config-text", default="", help="The text of a configuration, instead of its file.")
@click.option(
    "--listen",
    multiple=True,
    help="Where ext_proc is served: host:port, [v6]:port, :port (all interfaces) or unix:/path. Repeatable."
    "  [default: 127.0.0.1:9002; with a pool from a cluster :9002]",
)
@click.option(
    "--health-port",
    help="[host:]port where only grpc.health.v1 is served, without TLS; :port is all interfaces, 0 = off."
    "  [default: 127.0.0.1:9003; with a pool from a cluster :9003]",
)
@click.option(
    "--admin",
    "--metrics-port",
    help="[host:]port of /metrics, /readyz and /debug; :port is all interfaces, 0 = off."
    "  [default: 127.0.0.1:9090; with a pool from a cluster :9090]",
)
@click.option(
    "--edge",
    type=click.Choice(["lean", "grpcio"]),
    default="lean",
    show_default=True,
    help="gRPC server: ours, or the slower grpc.aio.",
)
@click.option(
    "--secure-serving/--no-secure-serving",
    default=None,
    help="TLS on --listen, self-signed unless --cert-path is given.  [default: on with --cert-path or a pool from a "
    "cluster, else off]",
)
@click.option(
    "--cert-path", type=click.Path(path_type=Path), help="Directory of tls.crt and tls.key, read again on change."
)
@click.option(
    "--scrape-interval",
    type=POSITIVE_SECONDS,
    default=0.5,
    show_default=True,
    help="Seconds between two readings of a worker's metrics.",
)
@click.option(
    "--scrape-timeout", type=POSITIVE_SECONDS, default=1.0, show_default=True, help="Seconds one reading may take."
)
@click.option(
    "--scrape-scheme",
    type=click.Choice(["http", "https"]),
    default="http",
    show_default=True,
    help="How workers' metrics are asked for.",
)
@click.option(
    "--scrape-verify/--no-scrape-verify",
    default=False,
    show_default=True,
    help="With https, check the workers' certificates.",
)
@click.option(
    "--max-request-bytes",
    type=click.IntRange(1),
    default=32 << 20,
    show_default=True,
    help="Longer request bodies are answered with 413.",
)
@click.option(
    "--decision-deadline",
    type=POSITIVE_SECONDS,
    default=0.25,
    show_default=True,
    help="Seconds a decision may take; a later one looks at load alone.",
)
@click.option(
    "--model-rewrite",
    multiple=True,
    metavar="FROM=TO",
    help="Ask workers for TO when a client asks for FROM. Replies say FROM where they pass the picker (gateway profile)"
    ", else TO. Repeatable.",
)
@click.option(
    "--observe-responses/--no-observe-responses",
    default=False,
    show_default=True,
    help="Envoy shows responses by a second filter (`kvsteer envoy-config --usage`).",
)
@click.option(
    "--inject-usage/--no-inject-usage",
    default=False,
    show_default=True,
    help="Ask streaming workers for token usage, and hide it from clients that did not ask.",
)
@click.option(
    "--decision-log",
    type=click.Path(path_type=Path),
    help="Write decisions as JSON lines for `kvsteer explain`, rotated at 64 MiB.",
)
@click.option(
    "--decision-log-sample",
    type=Number(0, 1),
    default=1.0,
    show_default=True,
    help="Share of decisions written.",
)
@click.option(
    "--shared-state",
    metavar="redis://HOST:PORT/DB[?stream=NAME]",
    help="Redis or Valkey through which the picker's replicas tell each other their picks (docs/replicas.md).",
)
@click.option(
    "--state-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep what workers hold in this file, from shutdown to the next start.",
)
@click.option(
    "--drain-delay",
    type=SECONDS,
    default=3.0,
    show_default=True,
    help="Seconds at shutdown in which new requests are still served, until health checks have seen it.",
)
@click.option(
    "--plugin-time-limit",
    type=POSITIVE_SECONDS,
    default=0.02,
    show_default=True,
    help="Seconds a plugin that is not ours may take; one that takes longer is left out for 30 s.",
)
@click.option(
    "--grace", type=SECONDS, default=30.0, show_default=True, help="Seconds running requests get at shutdown."
)
@click.option(
    "--ignore-subset/--no-ignore-subset",
    default=False,
    show_default=True,
    help="Pick among the whole pool, whatever the gateway's subset hint says.",
)
@cluster_options
@click.option("--seed", type=int, help="Seed of every random choice, for repeatable runs.")
@click.option("-v", "--verbose", count=True, help="More log lines; twice for debugging.")
def command(
    *,
    endpoints: tuple[str, ...],
    endpoints_file: Path | None,
    dns: tuple[str, ...],
    envoy_endpoints: Path | None,
    config_file: Path | None,
    config_text: str,
    listen: tuple[str, ...],
    health_port: str | None,
    admin: str | None,
    edge: EdgeName,
    secure_serving: bool | None,
    cert_path: Path | None,
    scrape_interval: float,
    scrape_timeout: float,
    scrape_scheme: str,
    scrape_verify: bool,
    max_request_bytes: int,
    decision_deadline: float,
    model_rewrite: tuple[str, ...],
    observe_responses: bool,
    inject_usage: bool,
    decision_log: Path | None,
    decision_log_sample: float,
    shared_state: str | None,
    state_file: Path | None,
    drain_delay: float,
    plugin_time_limit: float,
    grace: float,
    ignore_subset: bool,
    cluster: ClusterSettings | None,
    seed: int | None,
    verbose: int,
) -> None:
    """Run the picker: answer Envoy's ext_proc streams until SIGTERM.

    Workers come from --endpoint, --endpoints-file, --dns and the cluster (--pool-name, --endpoint-selector,
    --endpoint-slices), together. SIGHUP reads the configuration file again. A second SIGTERM or Ctrl-C does not wait
    for running requests. The flags of llm-d's picker are taken too (docs/migrate.md).

    \b
      kvsteer serve --endpoint 127.0.0.1:8101 --endpoint 127.0.0.1:8102
      kvsteer serve --pool-name my-pool --pool-namespace models
    """
    _log_to_stderr(verbose)
    for note in click.get_current_context().meta.get(NOTES, ()):
        logging.getLogger("kvsteer").warning("%s", note)
    if not (endpoints or endpoints_file or dns or cluster):
        raise click.UsageError(
            "no workers: give --endpoint IP:PORT, --endpoints-file FILE, --dns NAME:PORT or --pool-name NAME"
        )
    in_pool = cluster is not None and cluster.steers_a_pool
    here = "" if in_pool else "127.0.0.1"
    if config_file and config_text:
        raise click.UsageError("--config-file and --config-text exclude each other")
    if edge == "grpcio":
        _need_grpcio()
    try:
        sources = _sources(endpoints, endpoints_file, dns)
        settings = Settings(
            sources=lambda: sources,
            listen=listen or (f"{here}:9002",),
            health_listen=_host_port("--health-port", health_port or f"{here}:9003"),
            admin_listen=_host_port("--admin", admin or f"{here}:9090"),
            envoy_endpoints=envoy_endpoints,
            config_file=config_file,
            config_text=config_text,
            edge=edge,
            tls=_tls(in_pool if secure_serving is None and cert_path is None else secure_serving, cert_path),
            scrape=ScrapeSettings(
                interval_s=scrape_interval, timeout_s=scrape_timeout, scheme=scrape_scheme, verify=scrape_verify
            ),
            limits=Limits(max_request_bytes=max_request_bytes),
            patience=Patience(deadline_s=decision_deadline),
            options=Options(
                model_rewrites=_rewrites(model_rewrite),
                inject_usage=inject_usage,
                observe_responses=observe_responses,
                ignore_subset=ignore_subset,
            ),
            decision_log=LogFile(decision_log, sample=decision_log_sample) if decision_log else None,
            shared_state=parse_url(shared_state) if shared_state else None,
            state_file=state_file,
            drain_delay_s=drain_delay,
            plugin_limits=PluginLimits(time_limit_s=plugin_time_limit),
            grace_s=grace,
            pool_name=cluster.title if cluster is not None else "default",
            cluster=cluster,
            seed=seed,
        )
        _run(settings)
    except (ConfigError, EndpointFileError, ModelFolderError) as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except (AccessError, AddressError, RedisMissing, TlsError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise click.ClickException(f"cannot start: {where}{error.strerror or error}") from error


def _run(settings: Settings) -> None:
    async def main() -> None:
        # Made inside the loop: parts of it take the running loop.
        await Picker(settings).run(_announce)

    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())


def _announce(picker: Picker) -> None:
    where = ", ".join(picker.edges[0].addresses)
    logging.getLogger("kvsteer").info("serving ext_proc on %s (%s edge)", where, picker.settings.edge)


def _sources(endpoints: Sequence[str], endpoints_file: Path | None, dns: Sequence[str]) -> list[Discovery]:
    sources: list[Discovery] = []
    if endpoints:
        sources.append(StaticDiscovery(endpoints))
    if endpoints_file:
        sources.append(FileDiscovery(endpoints_file))
    sources.extend(DnsDiscovery(name) for name in dns)
    return sources


def _tls(secure: bool | None, cert_path: Path | None) -> Tls | None:
    if secure is False and cert_path is not None:
        raise click.UsageError("--cert-path has no meaning with --no-secure-serving")
    if cert_path is not None:
        return Tls.directory(cert_path)
    return Tls.self_signed() if secure else None


def _rewrites(pairs: Sequence[str]) -> dict[str, str]:
    rewrites = {}
    for pair in pairs:
        model, _, target = pair.partition("=")
        if not model or not target:
            raise click.UsageError(f"--model-rewrite {pair!r}: write FROM=TO")
        rewrites[model] = target
    return rewrites


def _host_port(option: str, text: str) -> str:
    """`host:port` from [host:]port, on loopback by default, on all interfaces with `:port`; empty: the port is off."""
    host, colon, port = text.rpartition(":")
    if text == "0":
        return ""
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise click.UsageError(f"{option} {text!r}: write PORT or HOST:PORT")
    return f"{host if colon else '127.0.0.1'}:{port}"


def _need_grpcio() -> None:
    try:
        import grpc  # noqa: F401
    except ImportError:
        raise click.ClickException("--edge grpcio needs grpcio: pip install 'kvsteer[grpcio]'") from None


def _log_to_stderr(verbose: int) -> None:
    level = logging.DEBUG if verbose > 1 else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    if not verbose:
        logging.getLogger("aiohttp").setLevel(logging.WARNING)
