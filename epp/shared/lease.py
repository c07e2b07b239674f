"""Which of several replicas leads, by a Lease of `coordination.k8s.io/v1`: the rules, without the API server.

In: the Lease as it was read, and `now` of this process's monotonic clock. Out: the Lease to write, if it is our turn,
and whether we lead. The rules are those of Kubernetes' own leader election: whoever leads renews; who sees a Lease
unchanged for its whole duration *by the own clock* takes it (the times inside it are another host's and are never
compared); a write carries the resourceVersion that was read, so that of two only one succeeds; who could not renew by
the deadline, which is shorter than the duration, no longer leads, before anyone else can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. Raises ValueError unless retry < renew deadline < duration."""

    duration_s: float = 15.0
    """How long a Lease that is not renewed keeps others out."""
    renew_deadline_s: float = 10.0
    """Who could not renew for so long stops to lead."""
    retry_s: float = 2.0
    """Between two looks at the Lease, leading or not."""

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.renew_deadline_s < self.duration_s:
            raise ValueError("a lease needs retry < renew deadline < duration")


@dataclass(frozen=True, slots=True)
class Lease:
    """The `spec` of a Lease, and the version under which it was read; "" for one that is not there yet."""

    holder: str = ""
    duration_s: float = 15.0
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0
    version: str = ""

    @classmethod
    def read(cls, obj: dict[str, Any]) -> Lease:
        """From the object as JSON gives it; what is missing or of another type counts as not said."""
        spec, metadata = obj.get("spec"), obj.get("metadata")
        spec = spec if isinstance(spec, dict) else {}
        metadata = metadata if isinstance(metadata, dict) else {}
        duration, transitions = spec.get("leaseDurationSeconds"), spec.get("leaseTransitions")
        return cls(
            holder=str(spec.get("holderIdentity") or ""),
            duration_s=float(duration) if isinstance(duration, int) else 0.0,
            acquired=str(spec.get("acquireTime") or ""),
            renewed=str(spec.get("renewTime") or ""),
            transitions=transitions if isinstance(transitions, int) else 0,
            version=str(metadata.get("resourceVersion") or ""),
        )

    def spec(self) -> dict[str, Any]:
        """The `spec` to write."""
        return {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": max(1, math.ceil(self.duration_s)),
            "acquireTime": self.acquired or None,
            "renewTime": self.renewed or None,
            "leaseTransitions": self.transitions,
        }


class Election:
    """One replica's part in it."""

    def __init__(self, identity: str, timing: Timing | None = None) -> None:
        """`identity` names this process and no other, also not its predecessor under the same name."""
        self.identity = identity
        self.timing = timing or Timing()
        self.seen: Lease | None = None
        """The Lease as last read or written; None: there is none, or it was never read."""
        self._changed_at = -math.inf
        self._renewed_at = -math.inf

    @property
    def holder(self) -> str:
        """Who holds the Lease, as last seen; "" when nobody does."""
        return self.seen.holder if self.seen is not None else ""

    def leads(self, now: float) -> bool:
        """Whether this replica leads: it holds the Lease and renewed it within the deadline."""
        return self.holder == self.identity and now < self._renewed_at + self.timing.renew_deadline_s

    def observe(self, lease: Lease | None, now: float) -> None:
        """The Lease as it was read; None: there is none."""
        if lease != self.seen:
            self.seen, self._changed_at = lease, now

    def wanted(self, now: float, wall: float) -> Lease | None:
        """What to write now, under `version` of the Lease that was observed; None: another one holds it.

        `wall`: seconds since the epoch, only to be written.
        """
        seen = self.seen
        if seen is None:
            seen = Lease()
        mine = seen.holder == self.identity
        if seen.holder and not mine and now < self._changed_at + seen.duration_s:
            return None
        time = _micro_time(wall)
        return Lease(
            holder=self.identity,
            duration_s=self.timing.duration_s,
            acquired=seen.acquired if mine else time,
            renewed=time,
            transitions=seen.transitions + (not mine and bool(seen.version)),
            version=seen.version,
        )

    def wrote(self, lease: Lease, sent_at: float) -> None:
        """A write succeeded and came back as `lease`; `sent_at`: when it was sent, which others see as no earlier."""
        self.seen, self._changed_at, self._renewed_at = lease, sent_at, sent_at

    def release(self, wall: float) -> Lease | None:
        """What to write at the end, so that nobody has to wait; None: the Lease is not ours."""
        if self.seen is None or self.seen.holder != self.identity:
            return None
        return replace(self.seen, holder="", duration_s=1.0, renewed=_micro_time(wall))


def _micro_time(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
