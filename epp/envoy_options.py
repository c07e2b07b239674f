"""What differs between the Envoy bootstraps of `kvsteer envoy-config`: addresses, mode, profile, failure mode.

In: the texts of the command line. Out: `EnvoyOptions`, checked against each other. Needs no extra.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """`standalone`: Envoy is a gateway of its own, the picker is reached over TCP and finds the workers.
    `sidecar`: Envoy, picker and workers in one pod or on one host, the picker behind a Unix socket."""

    STANDALONE = "standalone"
    SIDECAR = "sidecar"


class Profile(StrEnum):
    """`gateway`: FULL_DUPLEX_STREAMED both ways, the InferencePool contract.
    `fast`: the request body BUFFERED, the response untouched."""

    GATEWAY = "gateway"
    FAST = "fast"


class FailureMode(StrEnum):
    """What a request gets when the picker does not answer: any listed endpoint, or an error."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class HostPort:
    """An IP address (without brackets) or a DNS name, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Read `ip:port`, `[ipv6]:port` or `name:port`. Raises ValueError that names the text."""
        host, colon, port = text.strip().rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is not host:port with a port of 1 to 65535")
        if ":" in host and not bracketed:
            raise ValueError(f"{text!r}: an IPv6 address goes in brackets, as in [::1]:8000")
        host = host[1:-1] if bracketed else host
        if bracketed and not is_ip(host):
            raise ValueError(f"{text!r}: {host!r} is not an IPv6 address")
        return cls(host, int(port))


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A Unix domain socket by its path."""

    path: str


PickerAddress = HostPort | UnixSocket


def parse_picker(text: str) -> PickerAddress:
    """Read `host:port` or `unix:/path`. Raises ValueError."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not 0 < len(path.encode()) <= 107:  # sun_path holds 108 bytes with its end
            raise ValueError(f"{text!r}: a socket path has 1 to 107 bytes")
        return UnixSocket(path)
    return HostPort.parse(text)


@dataclass(frozen=True, slots=True)
class EndpointsFile:
    """An absolute path where `kvsteer serve --envoy-endpoints` keeps the pool, which Envoy follows."""

    path: str


Endpoints = tuple[HostPort, ...] | EndpointsFile
"""The pool as Envoy knows it; the empty tuple: not at all."""


def parse_endpoints(text: str) -> Endpoints:
    """Read `ip:port,ip:port`, `file:/path` or `none`.

    Raises ValueError, also on a name: override_host compares addresses, not names.
    """
    if text == "none":
        return ()
    if text.startswith("file:"):
        path = text.removeprefix("file:")
        if not path.startswith("/") or path.endswith("/"):
            raise ValueError(f"{text!r}: an endpoints file needs an absolute path")
        return EndpointsFile(path)
    endpoints = tuple(HostPort.parse(part) for part in text.split(","))
    for endpoint in endpoints:
        if not is_ip(endpoint.host):
            raise ValueError(f"{endpoint.host!r} is not an IP address; the picker names workers by ip:port")
    if len(set(endpoints)) != len(endpoints):
        raise ValueError(f"{text!r} names an endpoint twice")
    return endpoints


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class EnvoyOptions:
    """What differs between bootstraps. `defaults` gives those of the shipped files."""

    mode: Mode
    profile: Profile
    listen: HostPort
    picker: PickerAddress
    admin: HostPort
    endpoints: Endpoints
    """The listed pool; empty: unlisted, the picker's address is connected to."""
    failure_mode: FailureMode
    usage: bool = False
    """A second, observing ext_proc filter that shows the picker the response (fast profile only)."""
    picker_tls: bool = False
    decode: bool = False
    """Beside a decode worker: the "picker" is `kvsteer sidecar --ext-proc` (mode sidecar, profile fast only)."""
    picker_ca: str = ""
    """A file of CA certificates that the picker's certificate must chain to; empty: any certificate is taken."""

    def __post_init__(self) -> None:
        if self.failure_mode is FailureMode.OPEN and not self.endpoints:
            raise ValueError("failure mode open needs listed endpoints: an unlisted pool has no worker to fall back to")
        if self.usage and self.profile is Profile.GATEWAY:
            raise ValueError("usage is for the fast profile: the gateway profile shows responses to the picker anyway")
        if self.decode and (self.mode, self.profile, self.usage) != (Mode.SIDECAR, Profile.FAST, False):
            raise ValueError("a decode sidecar has mode sidecar, profile fast, and needs no usage")
        if self.decode and not self.endpoints:
            raise ValueError("a decode sidecar has its own worker, which must be listed")
        if self.picker_ca and not self.picker_tls:
            raise ValueError("a picker CA without picker TLS would verify nothing")
        if not (is_ip(self.admin.host) and ipaddress.ip_address(self.admin.host).is_loopback):
            raise ValueError(f"the admin port can stop Envoy and must be on loopback, not {self.admin.host!r}")
        if not is_ip(self.listen.host):
            raise ValueError(f"a listening address is an IP, not {self.listen.host!r}")


def defaults(
    mode: Mode,
    profile: Profile,
    *,
    listen: HostPort | None = None,
    picker: PickerAddress | None = None,
    admin: HostPort | None = None,
    endpoints: Endpoints | None = None,
    failure_mode: FailureMode | None = None,
    usage: bool = False,
    picker_tls: bool = False,
    picker_ca: str = "",
    decode: bool = False,
) -> EnvoyOptions:
    """Options with everything unsaid filled in: a sidecar lists two local workers, a listed pool fails open; a decode
    sidecar lists its worker and fails closed, since without it a client's own hand-over would reach that.

    Raises ValueError where the options contradict each other.
    """
    sidecar = mode is Mode.SIDECAR
    if endpoints is None and decode:
        endpoints = (HostPort("127.0.0.1", 8001),)
    elif endpoints is None:
        endpoints = (HostPort("127.0.0.1", 8000), HostPort("127.0.0.1", 8001)) if sidecar else ()
    return EnvoyOptions(
        mode=mode,
        profile=profile,
        listen=listen or HostPort("0.0.0.0", 8000 if decode else 8080),
        picker=picker
        or (
            UnixSocket(f"/run/kvsteer/{'decode' if decode else 'ext_proc'}.sock")
            if sidecar
            else HostPort("127.0.0.1", 9002)
        ),
        admin=admin or HostPort("127.0.0.1", 9901),
        endpoints=endpoints,
        failure_mode=failure_mode or (FailureMode.OPEN if endpoints and not decode else FailureMode.CLOSED),
        usage=usage,
        picker_tls=picker_tls,
        picker_ca=picker_ca,
        decode=decode,
    )
