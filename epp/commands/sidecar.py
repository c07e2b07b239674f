"""`kvsteer sidecar`: the reverse proxy beside a decode worker, or what an Envoy there asks."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from pathlib import Path
from random import Random

import click

from epp.cluster_options import cluster_options
from epp.disagg.sidecar.caller import CallerSettings
from epp.disagg.sidecar.exchange import Rules
from epp.disagg.sidecar.proxy import ProxySettings
from epp.disagg.sidecar.service import Settings, Sidecar, Targets
from epp.discovery.dns import DnsDiscovery
from epp.discovery.file import EndpointFileError, FileDiscovery
from epp.discovery.kubernetes.cluster import Cluster, ClusterSettings
from epp.discovery.kubernetes.credentials import AccessError
from epp.discovery.membership import Discovery
from epp.discovery.static import StaticDiscovery
from epp.gateway.listen import AddressError
from epp.number_types import seconds

SECONDS = seconds()
POSITIVE_SECONDS = seconds(0.01)
LEGS = click.Choice(["prefiller", "decoder"])


@click.command(name="sidecar", short_help="Run the proxy beside a decode worker: prefill elsewhere, decode here.")
@click.option("--listen", default=":8000", show_default=True, help="[host:]port of HTTP; :port is all interfaces.")
@click.option(
    "--ext-proc",
    default="",
    metavar="unix:/PATH|HOST:PORT",
    help="Serve an Envoy here (envoy/decode-sidecar.yaml) instead; --listen and --decoder are then Envoy's.",
)
@click.option("--decoder", default="127.0.0.1:8001", show_default=True, help="host:port of the local worker.")
@click.option(
    "--prefiller",
    "prefillers",
    multiple=True,
    metavar="IP:PORT[-PORT]",
    help="A worker that may be asked to prefill. Repeat for more.",
)
@click.option("--endpoints-file", type=click.Path(path_type=Path), help="Such workers from a file, watched.")
@click.option("--dns", multiple=True, metavar="NAME:PORTS", help="Such workers from DNS.")
@cluster_options
@click.option(
    "--allow-any-target/--no-allow-any-target",
    default=False,
    show_default=True,
    help="Ask whomever a request names. Only where nobody but the picker can reach this port.",
)
@click.option("--lease", type=POSITIVE_SECONDS, default=30.0, show_default=True, help="Of prefill workers' blocks.")
@click.option(
    "--lease-margin", type=SECONDS, default=5.0, show_default=True, help="Seconds before its end in which it is over."
)
@click.option(
    "--prefill-timeout", type=POSITIVE_SECONDS, default=120.0, show_default=True, help="Seconds a prefill may take."
)
@click.option("--max-prefills", type=click.IntRange(1), default=256, show_default=True, help="Prefills at a time.")
@click.option(
    "--max-request-bytes", type=click.IntRange(1), default=32 << 20, show_default=True, help="413 for longer bodies."
)
@click.option("--tls", "tls", type=LEGS, multiple=True, help="Speak TLS to these. Repeatable.")
@click.option("--ca-file", type=click.Path(path_type=Path, dir_okay=False), help="CA certificates for --tls.")
@click.option("--tls-skip-verify", type=LEGS, multiple=True, help="Do not check these certificates. Repeatable.")
@click.option(
    "--recount-usage/--no-recount-usage",
    default=True,
    show_default=True,
    help="Tell the client the prefill worker's cached tokens.",
)
@click.option("--admin", default="", metavar="[HOST:]PORT", help="/metrics, /healthz, /readyz.  [default: off]")
@click.option("--drain-delay", type=SECONDS, default=3.0, show_default=True, help="Seconds served after SIGTERM.")
@click.option("--grace", type=SECONDS, default=30.0, show_default=True, help="Seconds running requests get then.")
@click.option("-v", "--verbose", count=True, help="More log lines; twice for debugging.")
def command(
    *,
    listen: str,
    ext_proc: str,
    decoder: str,
    prefillers: tuple[str, ...],
    endpoints_file: Path | None,
    dns: tuple[str, ...],
    cluster: ClusterSettings | None,
    allow_any_target: bool,
    lease: float,
    lease_margin: float,
    prefill_timeout: float,
    max_prefills: int,
    max_request_bytes: int,
    tls: tuple[str, ...],
    ca_file: Path | None,
    tls_skip_verify: tuple[str, ...],
    recount_usage: bool,
    admin: str,
    drain_delay: float,
    grace: float,
    verbose: int,
) -> None:
    """Run the proxy beside a decode worker.

    A request that names prefillers (x-prefiller-host-port, set by the picker) has its prompt computed there, then goes
    to the local worker with what that handed over; all others go to the local worker as they are. Whom it may ask is a
    list: --prefiller, --endpoints-file, --dns, or the pool's own pods (--pool-name).

    \b
      kvsteer sidecar --decoder 127.0.0.1:8001 --prefiller 10.0.0.7:8000
    """
    level = logging.DEBUG if verbose > 1 else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    if not (prefillers or endpoints_file or dns or cluster or allow_any_target):
        raise click.UsageError(
            "nobody may be asked to prefill: give --prefiller, --endpoints-file, --dns or --pool-name"
        )
    if ext_proc and "decoder" in tls:
        raise click.UsageError("--tls decoder has no meaning with --ext-proc: Envoy speaks to the worker")
    if lease_margin >= lease:
        raise click.UsageError("--lease-margin must be below --lease")
    targets = Targets()
    host, port = _listen("--listen", listen, "0.0.0.0")

    async def main() -> None:
        sources: list[Discovery] = [StaticDiscovery(prefillers)] if prefillers else []
        if endpoints_file:
            sources.append(FileDiscovery(endpoints_file))
        sources.extend(DnsDiscovery(name) for name in dns)
        followed = Cluster(cluster, Random()) if cluster is not None else None
        if followed is not None:
            sources.extend(followed.sources)
        rules = Rules(
            allowed=(lambda address: True) if allow_any_target else targets.allowed,
            lease_s=lease,
            margin_s=lease_margin,
            prefill_timeout_s=prefill_timeout,
        )
        legs = CallerSettings(rules, _context("prefiller", tls, ca_file, tls_skip_verify), max_prefills)
        proxy = ProxySettings(
            decoder=decoder,
            decoder_tls=_context("decoder", tls, ca_file, tls_skip_verify),
            max_body_bytes=max_request_bytes,
            recount=recount_usage,
        )
        page = _listen("--admin", admin, "127.0.0.1") if admin else None
        settings = Settings(legs, proxy, targets, sources, host, port, ext_proc, page, drain_delay, grace)
        try:
            await Sidecar(settings).run()
        finally:
            if followed is not None:
                await followed.stop()

    try:
        asyncio.run(main())
    except EndpointFileError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    except (ValueError, AddressError) as error:
        raise click.UsageError(str(error)) from error
    except AccessError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"cannot start: {error.strerror or error}") from error


def _context(leg: str, tls: tuple[str, ...], ca: Path | None, unchecked: tuple[str, ...]) -> ssl.SSLContext | None:
    if leg not in tls:
        if leg in unchecked:
            raise click.UsageError(f"--tls-skip-verify {leg} has no meaning without --tls {leg}")
        return None
    context = ssl.create_default_context(cafile=str(ca) if ca else None)
    if leg in unchecked:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _listen(option: str, text: str, here: str) -> tuple[str, int]:
    """`here`: what a port alone stands for; `:PORT` is all interfaces."""
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise click.UsageError(f"{option} {text!r}: write PORT, :PORT or HOST:PORT")
    return host.strip("[]") or ("0.0.0.0" if colon else here), int(port)
