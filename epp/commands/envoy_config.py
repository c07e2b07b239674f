"""`kvsteer envoy-config`: print an Envoy bootstrap that is wired to the picker the right way."""

from __future__ import annotations

import click

from epp.envoy_options import FailureMode, HostPort, Mode, Profile, defaults, parse_endpoints, parse_picker


@click.command("envoy-config", short_help="Print an Envoy configuration that asks the picker.")
@click.option(
    "--mode",
    type=click.Choice([m.value for m in Mode]),
    default=Mode.STANDALONE.value,
    show_default=True,
    help="standalone: Envoy is its own gateway; sidecar: Envoy and picker share a pod or host.",
)
@click.option(
    "--profile",
    type=click.Choice([p.value for p in Profile]),
    default=Profile.FAST.value,
    show_default=True,
    help="gateway: full duplex both ways (InferencePool); fast: request buffered, response untouched.",
)
@click.option("--listen", metavar="IP:PORT", help="Where clients connect.  [default: 0.0.0.0:8080]")
@click.option(
    "--picker",
    metavar="HOST:PORT|unix:/PATH",
    help="Where `kvsteer serve` listens.  [default: 127.0.0.1:9002; sidecar: unix:/run/kvsteer/ext_proc.sock]",
)
@click.option(
    "--endpoints",
    metavar="IP:PORT,...|file:/PATH|none",
    help="The workers: fixed, kept in a file by `serve --envoy-endpoints`, or none (whatever the picker names).  "
    "[default: none; sidecar: 127.0.0.1:8000,127.0.0.1:8001]",
)
@click.option("--admin", metavar="IP:PORT", help="Envoy's admin port, on loopback.  [default: 127.0.0.1:9901]")
@click.option(
    "--failure-mode",
    type=click.Choice([f.value for f in FailureMode]),
    help="Without the picker: any listed endpoint (open) or an error.  [default: open with --endpoints]",
)
@click.option("--usage", is_flag=True, help="fast only: show responses to the picker (`serve --observe-responses`).")
@click.option("--decode-sidecar", is_flag=True, help="Beside a decode worker, for `kvsteer sidecar --ext-proc`.")
@click.option("--picker-tls", is_flag=True, help="TLS to the picker, verified only with --picker-ca.")
@click.option("--picker-ca", metavar="FILE", default="", help="CA certificates for --picker-tls.")
def command(
    mode: str,
    profile: str,
    listen: str | None,
    picker: str | None,
    endpoints: str | None,
    admin: str | None,
    failure_mode: str | None,
    usage: bool,
    decode_sidecar: bool,
    picker_tls: bool,
    picker_ca: str,
) -> None:
    """Print an Envoy configuration (YAML) that sends every request through the picker."""
    try:
        options = defaults(
            Mode(mode),
            Profile(profile),
            listen=HostPort.parse(listen) if listen else None,
            picker=parse_picker(picker) if picker else None,
            admin=HostPort.parse(admin) if admin else None,
            endpoints=parse_endpoints(endpoints) if endpoints else None,
            failure_mode=FailureMode(failure_mode) if failure_mode else None,
            usage=usage,
            decode=decode_sidecar,
            picker_tls=picker_tls,
            picker_ca=picker_ca,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        from epp.envoy_yaml import render
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"envoy-config needs the package {(error.name or '').partition('.')[0]}: pip install 'kvsteer[envoy]'"
        ) from None
    click.echo(render(options), nl=False)
