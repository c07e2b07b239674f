"""The pool as a file that Envoy follows (EDS from the file system), so that Envoy's list and the picker's are one.

In: the pool, whenever its membership changed. Out: a ClusterLoadAssignment in JSON, put in place by a rename, which is
the change Envoy watches for. So the Envoy of a changing pool can retry at other workers and serve without the picker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from epp.endpoint import Endpoint, Pool

log = logging.getLogger(__name__)

ENVOY_POOL = "kvsteer-pool"
"""The name under which Envoy asks for the pool (`eds_cluster_config.service_name`)."""


class EnvoyFile:
    """Keeps `path` equal to the pool. A change that cannot be written is logged and counted; serving goes on."""

    def __init__(self, path: Path, pool: Pool) -> None:
        self.path = path
        self.pool = pool
        self.written = 0
        self.failed = 0

    def create(self) -> None:
        """Make an empty list where there is no file, so that Envoy can start. OSError if that cannot be.

        The list of an earlier run stays until the membership is known: Envoy may be serving from it.
        """
        if not self.path.exists():
            self._write()

    def changed(self, joined: Sequence[Endpoint] = (), left: Sequence[Endpoint] = ()) -> None:
        """The membership changed (`epp.discovery.membership.Listener`). A stop in the middle leaves the old file."""
        del joined, left
        try:
            self._write()
        except OSError as error:
            self.failed += 1
            log.error("%s: Envoy's list of endpoints cannot be written: %s", self.path, error.strerror or error)

    def _write(self) -> None:
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            draft.write_text(load_assignment(list(dict.fromkeys((e.host, e.port) for e in self.pool.endpoints))))
            draft.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        self.written += 1


def load_assignment(addresses: Sequence[tuple[str, int]]) -> str:
    """An Envoy DiscoveryResponse with one ClusterLoadAssignment, as JSON."""
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}} for host, port in addresses
    ]
    assignment = {
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": ENVOY_POOL,
        "endpoints": [{"lb_endpoints": endpoints}],
    }
    return json.dumps({"resources": [assignment]}, indent=1) + "\n"
