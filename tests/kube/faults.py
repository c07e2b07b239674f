"""What can go wrong with an API server, switched on and off by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Faults:
    """All off as made. `(verb, resource)` names a kind of request: `("watch", "pods")`, `("list", "*")`."""

    refuse: dict[tuple[str, str], int] = field(default_factory=dict)
    """Requests answered with this status as long as it stands: 403, 500, 503, ..."""
    once: deque[tuple[int, str]] = field(default_factory=deque)
    """Statuses for the next requests, whatever they are, each with a `Retry-After` ("": none)."""
    tokens: set[str] | None = None
    """Bearer tokens that are taken; None: everybody is."""
    delay_s: float = 0.0
    """Before each answer."""
    expired_as_event: bool = True
    """How an expired version is told on a watch: as an event of a 200 stream, or as status 410."""
    mute: bool = False
    """Watches bring nothing: the connection is there, and dead."""
    cut_after: int | None = None
    """Bytes after which a watch is cut, in the middle of a line; then it is off again."""
    padding: int = 0
    """Bytes by which the objects of watches are blown up (an annotation)."""
    bookmark_s: float = 60.0
    watch_limit_s: float = 1800.0
    """After which the server ends a watch, whatever the client asked for."""
    no_limit: bool = False
    """Answer lists whole, whatever `limit` says."""
