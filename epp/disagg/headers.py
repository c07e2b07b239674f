"""Request headers that tell the decoding worker's sidecar of the others; names and forms are llm-d's."""

from __future__ import annotations

from collections.abc import Iterable

from epp.endpoint import Endpoint

PREFILLER = "x-prefiller-host-port"
"""Who prefills: `ip:port`, then whom to ask when that one fails, with commas."""
ENCODERS = "x-encoder-hosts-ports"
DATA_PARALLEL = "x-data-parallel-host-port"
KV_SOURCE = "x-kv-cache-source-host-port"
"""Who holds KV that the worker may pull itself (offloading connector with a peer tier)."""

CONTROL = (PREFILLER, ENCODERS, DATA_PARALLEL, KV_SOURCE)
"""A client's own never reach a worker: its sidecar would ask whomever they name."""


def addresses(endpoints: Iterable[Endpoint]) -> str:
    return ",".join(dict.fromkeys(endpoint.address for endpoint in endpoints))
