"""Ports for processes that tests start."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def quiet_ports(count: int) -> int:
    """The first of so many free ports in a row, for what binds them seconds from now: they are below those given out
    for `:0` and to clients, so that nobody gets them meanwhile."""
    for first in range(15_000, 30_000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports")
