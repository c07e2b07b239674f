"""InferenceObjective and InferenceModelRewrite of a pool, where the cluster has them.

Each feature stands alone: where its CRD is missing or may not be read, it is off, which is said once in the log, and
looked for again now and then.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from epp.discovery.kubernetes.client import ApiClient, Collection
from epp.discovery.kubernetes.listwatch import ListWatch, Trouble
from epp.discovery.kubernetes.objects import Objective, Rewrite, read_objective, read_rewrite
from epp.discovery.kubernetes.rewrites import ModelRewrites
from epp.discovery.kubernetes.sources import COUNTED, Tasks

log = logging.getLogger(__name__)

API = "/apis/inference.networking.x-k8s.io/v1alpha2"


class PoolPolicy:
    """What the cluster says of the requests of one pool. `start` once, `stop` at the end."""

    def __init__(
        self, client: ApiClient, namespace: str, pool: str, *, clock: Callable[[], float], random: Random
    ) -> None:
        self._client, self._namespace, self._pool, self._clock = client, namespace, pool, clock
        self._tasks = Tasks()
        self._objectives: ListWatch[Objective] = ListWatch(read_objective, random=random)
        self._rewrites: ListWatch[Rewrite] = ListWatch(read_rewrite, random=random)
        self._rules = ModelRewrites(random)
        self._said: dict[str, Trouble | None] = {}

    @property
    def rewrites(self) -> bool:
        """Whether there is a rule that renames models."""
        return bool(self._rules)

    @property
    def counters(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for machine in (self._objectives, self._rewrites):
            total.update({f"kubernetes_{name}": machine.counters[name] for name in COUNTED})
        return total

    def target(self, model: str) -> str:
        """The model to ask a worker for; "" when no rule says."""
        return self._rules.target(model)

    def priority(self, objective: str) -> int:
        """The priority that an InferenceObjective gives; 0 for one that is not there or of another pool."""
        found = self._objectives.objects.get(f"{self._namespace}/{objective}")
        return found.priority if found is not None and found.pool == self._pool else 0

    def start(self) -> None:
        self._follow("inferenceobjectives", self._objectives, lambda: None)
        self._follow("inferencemodelrewrites", self._rewrites, self._rewritten)

    async def stop(self) -> None:
        await self._tasks.stop()

    def _follow(self, resource: str, machine: ListWatch[Any], taken: Callable[[], None]) -> None:
        def changed() -> None:
            taken()
            if machine.trouble != self._said.get(resource):
                self._said[resource] = machine.trouble
                if machine.trouble:
                    log.warning("%s are not followed: %s", resource, machine.trouble)
                else:
                    log.info("%s are followed again", resource)

        where = Collection(f"{API}/namespaces/{self._namespace}/{resource}")
        self._tasks.start(self._client.follow(where, machine, self._clock, changed))

    def _rewritten(self) -> None:
        self._rules.replace(r for r in self._rewrites.objects.values() if r.pool == self._pool)
