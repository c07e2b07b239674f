"""What the picker has of one cluster: sources of endpoints, the pool's policy objects, one client for all.

In: `ClusterSettings`, from the command line. Out: a `Cluster`, made on the running event loop and closed at the end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from epp.discovery.kubernetes.client import ApiClient
from epp.discovery.kubernetes.credentials import find
from epp.discovery.kubernetes.policy import PoolPolicy
from epp.discovery.kubernetes.sources import PoolDiscovery, SelectorDiscovery, SliceDiscovery
from epp.discovery.membership import Discovery


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What to follow; any of `pool`, `selector` and `services`."""

    pool: str = ""
    """Name of an InferencePool."""
    group: str = ""
    """API group of the pool; "": whichever has it."""
    namespace: str = ""
    """"": the one of the pod or of the kubeconfig's context, else `default`."""
    selector: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    """With `selector`."""
    services: tuple[tuple[str, str], ...] = ()
    """Services by name and port ("": every port), whose EndpointSlices are followed."""
    kubeconfig: Path | None = None
    metrics_authentication: bool = False
    """Whether the API server is asked who may read the metrics."""
    elect_leader: bool = False
    """Whether a Lease decides which replica serves."""

    @property
    def steers_a_pool(self) -> bool:
        """Whether the pool comes from the cluster, as the field's pickers have it."""
        return bool(self.pool or self.selector)

    @property
    def title(self) -> str:
        """The pool's name in metrics and in the Lease."""
        return self.pool or next(iter(self.selector.values()), "") or "default"


class Cluster:
    """One cluster at work. Raises `AccessError` where there is no way to its API server."""

    def __init__(self, settings: ClusterSettings, random: Random) -> None:
        access = find(settings.kubeconfig)
        self.settings = settings
        self.client = ApiClient(access)
        self.namespace = settings.namespace or access.namespace or "default"
        self.policy: PoolPolicy | None = None
        self.sources: list[Discovery] = []
        where, clock = (self.client, self.namespace), time.monotonic
        if settings.pool:
            self.sources.append(PoolDiscovery(*where, settings.pool, settings.group, clock=clock, random=random))
            self.policy = PoolPolicy(*where, settings.pool, clock=clock, random=random)
        if settings.selector:
            selected = SelectorDiscovery(*where, settings.selector, settings.ports, clock=clock, random=random)
            self.sources.append(selected)
        for service, port in settings.services:
            self.sources.append(SliceDiscovery(*where, service, port, clock=clock, random=random))

    @property
    def counters(self) -> Counter[str]:
        """Of what is followed beside endpoints; the sources have their own."""
        return self.policy.counters if self.policy is not None else Counter()

    def start(self) -> None:
        if self.policy is not None:
            self.policy.start()

    async def stop(self) -> None:
        """After the sources have been stopped."""
        if self.policy is not None:
            await self.policy.stop()
        await self.client.close()
