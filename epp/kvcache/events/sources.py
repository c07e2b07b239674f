"""Where a worker publishes its KV events: ports from the configuration, or what the worker itself tells.

In: an endpoint; the answer of its `GET /kv_event_sources` (vLLM since mid-2026). Out: the addresses to dial. Always on
the endpoint's own host: what a worker says chooses ports only, never another machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """ZeroMQ addresses of one publisher; `replay` is "" where there is no replay socket."""

    events: str
    replay: str


def configured(host: str, rank: int, events_port: int, replay_port: int | None) -> Source:
    """By vLLM's rule: data-parallel rank r publishes on port + r, and replays likewise."""
    replay = _address(host, replay_port + rank) if replay_port is not None else ""
    return Source(_address(host, events_port + rank), replay)


def told(answer: bytes, host: str, rank: int) -> Source | None:
    """What `/kv_event_sources` says of a rank; None if it says that nothing is published, or cannot be read.

    A map from rank to configuration (vLLM 0.32) or a list of them. One that is alone stands for any rank: a port that
    serves one rank of several does not always know the number.
    """
    try:
        document: Any = msgspec.json.decode(answer)
    except (ValueError, RecursionError):
        return None
    entries: dict[str, Any] = {}
    if isinstance(document, dict):
        entries = document
    elif isinstance(document, list):
        entries = {str(e.get("data_parallel_rank", i)): e for i, e in enumerate(document) if isinstance(e, dict)}
    entry = next(iter(entries.values())) if len(entries) == 1 else entries.get(str(rank))
    if not isinstance(entry, dict):
        return None
    events, replay = _port(entry.get("endpoint")), _port(entry.get("replay_endpoint"))
    return Source(_address(host, events), _address(host, replay) if replay else "") if events else None


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _port(endpoint: Any) -> int:
    """The port of `tcp://host:port`, else 0."""
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return 0
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536 else 0
