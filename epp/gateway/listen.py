"""Listening addresses as the user writes them, and sockets for them.

`host:port`, `[v6]:port`, `:port` (all interfaces, both families) and `unix:/path`. A stale Unix socket is removed, a
live one is an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass

UNIX_SOCKET_MODE = 0o660
"""Owner and group: give Envoy's user this group to share the socket."""
BACKLOG = 1_024


class AddressError(Exception):
    """An address that cannot be listened on; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Address:
    """One parsed address: a Unix `path`, or `host` ("" for all interfaces) and `port` (0 for any)."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read one address. Raises `AddressError`."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path or len(os.fsencode(path)) > 107:
            raise AddressError(f"{text!r}: a Unix socket needs a path of 1 to 107 bytes")
        return Address(path=path)
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise AddressError(f"{text!r}: expected host:port, [v6]:port or unix:/path")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise AddressError(f"{text!r}: write an IPv6 address in brackets, [{host}]:{port}")
    return Address(host=host, port=int(port))


def open_sockets(texts: Sequence[str]) -> list[tuple[Address, socket.socket]]:
    """A listening socket for each address, port 0 resolved. All or none. Raises `AddressError`."""
    opened: list[tuple[Address, socket.socket]] = []
    try:
        for text in texts:
            address = parse_address(text)
            try:
                sock = _bind_unix(address.path) if address.path else _bind_tcp(address)
            except OSError as error:
                raise AddressError(f"cannot listen on {text}: {error.strerror or error}") from error
            port = 0 if address.path else sock.getsockname()[1]
            opened.append((Address(address.path, address.host, port), sock))
    except BaseException:
        for address, sock in opened:
            close_socket(address, sock)
        raise
    return opened


def close_socket(address: Address, sock: socket.socket) -> None:
    """Close a listening socket and remove its file if it has one."""
    sock.close()
    if address.path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address.path)


def _bind_tcp(address: Address) -> socket.socket:
    everywhere = not address.host
    if everywhere and socket.has_dualstack_ipv6():
        family, where = socket.AF_INET6, ("::", address.port)
    else:
        found = socket.getaddrinfo(address.host or "0.0.0.0", address.port, type=socket.SOCK_STREAM)
        family, where = found[0][0], found[0][4][:2]  # type: ignore[assignment]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if everywhere else 1)
        sock.bind(where)
        sock.listen(BACKLOG)  # here, since two sockets may bind one port with SO_REUSEADDR and only one may listen
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_unix(path: str) -> socket.socket:
    remove_stale_socket(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, UNIX_SOCKET_MODE)  # before it listens, so nobody connects under other permissions
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def remove_stale_socket(path: str) -> None:
    """Remove a socket file that nobody listens on. Raises `OSError` if somebody does, or if it is no socket."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "another process listens there")
