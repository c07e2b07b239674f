"""Sources of endpoints in a cluster: an InferencePool, a selector without one, a Service's EndpointSlices.

In: an `ApiClient`, and what to follow. Out: the pool's endpoints, published whole after each change. All of a source's
state is what its collections hold, so that a list after trouble puts it right whatever was missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any

from epp.discovery.kubernetes.client import ApiClient, ApiError, Collection
from epp.discovery.kubernetes.credentials import AccessError
from epp.discovery.kubernetes.listwatch import ListWatch, Trouble
from epp.discovery.kubernetes.members import label_selector, lacking, of_pods, of_slices, selects
from epp.discovery.kubernetes.objects import Pod, Pool, Slice, read_pod, read_pool, read_slice
from epp.discovery.membership import Publish

log = logging.getLogger(__name__)

GROUPS: Mapping[str, str] = {
    "inference.networking.k8s.io": "v1",
    "inference.networking.x-k8s.io": "v1alpha2",
}
"""API groups that have InferencePools, the current one first -> the version that is read."""
COUNTED = ("lists", "watches", "events", "expired", "failures", "unreadable")
CRD_RETRY_S = 5.0
"""How soon it is looked again for what the picker cannot work without."""


class Tasks:
    """The tasks of a source."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a watch of the Kubernetes API ended by a fault of ours", exc_info=error)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


NARROW_S = 0.5
"""How long the pods of an earlier selector serve on while the list of the new one is not there."""


class _Pods:
    """The pods that a selector takes in one namespace.

    With another selector, those of the one before serve on until the new list is there, or, when that takes long, those
    of them that fit the new one by what is known. At once would be too soon: labels that were changed together with the
    selector come by another watch, and a pool must not be empty in between.
    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        random: Random,
        clock: Callable[[], float],
        changed: Callable[[], None],
        tasks: Tasks,
    ) -> None:
        self._client, self._namespace, self._random = client, namespace, random
        self._clock, self._changed, self._tasks = clock, changed, tasks
        self._selector: Mapping[str, str] | None = None
        self._machine: ListWatch[Pod] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._before: list[Pod] = []
        self._narrowing: asyncio.Task[Any] | None = None
        self._counted: Counter[str] = Counter()

    @property
    def synced(self) -> bool:
        return self._machine is not None and self._machine.synced

    @property
    def trouble(self) -> Trouble | None:
        return self._machine.trouble if self._machine is not None else None

    @property
    def counters(self) -> Counter[str]:
        return self._counted + self._machine.counters if self._machine is not None else self._counted

    def pods(self) -> list[Pod]:
        machine = self._machine
        return list(machine.objects.values()) if machine is not None and machine.synced else self._before

    def follow(self, selector: Mapping[str, str] | None) -> None:
        """Follow these from now on; None: nobody."""
        if selector == self._selector:
            return
        self._before = self.pods() if selector is not None else []
        for task in (self._task, self._narrowing):
            if task is not None:
                task.cancel()
        if self._machine is not None:
            self._counted = self.counters
        self._selector, self._machine, self._task = selector, None, None
        if selector is not None:
            self._machine = ListWatch(read_pod, random=self._random, absent_retry_s=CRD_RETRY_S)
            where = Collection(f"/api/v1/namespaces/{self._namespace}/pods", label_selector(selector))
            self._task = self._tasks.start(self._client.follow(where, self._machine, self._clock, self._changed))
            self._narrowing = self._tasks.start(self._narrow(selector))

    async def _narrow(self, selector: Mapping[str, str]) -> None:
        await asyncio.sleep(NARROW_S)
        self._before = [pod for pod in self._before if selects(selector, pod.labels)]
        self._changed()


class _PodSource:
    """What the sources of pods share: publishing, and the word about pods that do not declare the port."""

    def __init__(
        self, client: ApiClient, namespace: str, name: str, *, clock: Callable[[], float], random: Random
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.synced = False
        self._client, self._random, self._clock = client, random, clock
        self._tasks = Tasks()
        self._pods = _Pods(client, namespace, random, clock, self._changed, self._tasks)
        self._publish: Publish = lambda specs: None
        self._lacking: dict[str, tuple[int, ...]] = {}
        self._own = Counter(kubernetes_port_not_declared=0, kubernetes_events_refused=0)

    @property
    def counters(self) -> Counter[str]:
        total = Counter(self._own)
        for counters in self._collections():
            total.update({f"kubernetes_{name}": counters[name] for name in COUNTED})
        return total

    def _collections(self) -> list[Counter[str]]:
        return [self._pods.counters]

    async def stop(self) -> None:
        await self._tasks.stop()

    def _changed(self) -> None:
        raise NotImplementedError

    def _tell(self, ports: Sequence[int]) -> None:
        """Publish the pods that are known, once they are."""
        if self._pods.synced:
            self.synced = True
        if not self.synced:
            return
        pods = self._pods.pods()
        self._publish(of_pods(pods, ports))
        self._warn(pods, ports)

    def _warn(self, pods: Sequence[Pod], ports: Sequence[int]) -> None:
        now = {pod.uid: (pod, missing) for pod in pods if (missing := lacking(pod, ports))}
        for uid, (pod, missing) in now.items():
            if self._lacking.get(uid) != missing:
                self._own["kubernetes_port_not_declared"] += 1
                declared = ", ".join(map(str, sorted(pod.declared_ports)))
                words = (
                    f"the pool sends requests to port {', '.join(map(str, missing))}, "
                    f"this pod's containers declare {declared}"
                )
                log.warning("pod %s/%s: %s", pod.namespace, pod.name, words)
                self._tasks.start(self._event(pod, words))
        self._lacking = {uid: missing for uid, (_, missing) in now.items()}

    async def _event(self, pod: Pod, words: str) -> None:
        """A warning for `kubectl describe pod`; who may not write it goes on without."""
        time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{pod.name[:200]}.", "namespace": pod.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": pod.namespace,
                "name": pod.name,
                "uid": pod.uid,
            },
            "type": "Warning",
            "reason": "TargetPortNotDeclared",
            "message": words,
            "source": {"component": "kvsteer"},
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        }
        try:
            await self._client.request("POST", f"/api/v1/namespaces/{pod.namespace}/events", body=body)
        except (ApiError, AccessError) as error:
            self._own["kubernetes_events_refused"] += 1
            log.debug("the event about pod %s was not taken: %s", pod.name, error)


class SelectorDiscovery(_PodSource):
    """Pods by label and ports by number, for clusters without the CRDs of the Gateway API Inference Extension."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        selector: Mapping[str, str],
        ports: Sequence[int],
        *,
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        name = f"pods {namespace}/{label_selector(selector)}"
        super().__init__(client, namespace, name, clock=clock, random=random)
        self._selector, self._ports = dict(selector), tuple(ports)

    @property
    def trouble(self) -> str:
        trouble = self._pods.trouble
        return f"pods of namespace {self.namespace}: {trouble}" if trouble else ""

    async def start(self, publish: Publish) -> None:
        self._publish = publish
        self._pods.follow(self._selector)

    def _changed(self) -> None:
        self._tell(self._ports)


class PoolDiscovery(_PodSource):
    """The endpoints of an InferencePool.

    `group` is the API group it is in; "": in whichever it is found, the current one first.
    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        pool: str,
        group: str = "",
        *,
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        super().__init__(client, namespace, f"inferencepool {namespace}/{pool}", clock=clock, random=random)
        self._pool_name, self._group = pool, group
        self._pools = {
            name: ListWatch(read_pool, random=random, absent_retry_s=CRD_RETRY_S)
            for name in GROUPS
            if group in ("", name)
        }
        self._told: Pool | None = None
        self._elsewhere = ""

    @property
    def pool(self) -> Pool | None:
        """The InferencePool as it is known; None: there is none."""
        return next((pool for machine in self._pools.values() for pool in machine.objects.values()), None)

    @property
    def trouble(self) -> str:
        if self.pool is None:
            return self._why_none()
        trouble = self._pods.trouble
        return f"pods of namespace {self.namespace}: {trouble}" if trouble else ""

    def _why_none(self) -> str:
        wanted = f"InferencePool {self.namespace}/{self._pool_name}"
        troubles = {group: machine.trouble for group, machine in self._pools.items() if machine.trouble}
        if len(troubles) < len(self._pools) and all(t is Trouble.NOT_FOUND for t in troubles.values()):
            if not all(machine.synced for machine in self._pools.values()):
                return f"{wanted}: not answered yet"
            return f"{wanted} is not there{self._elsewhere}"
        if troubles and all(t is Trouble.NOT_FOUND for t in troubles.values()):
            return f"{wanted}: the API server has no InferencePool in {' or '.join(troubles)}{self._elsewhere}"
        return "; ".join(f"{wanted} of {group}: {trouble}" for group, trouble in troubles.items())

    def _collections(self) -> list[Counter[str]]:
        return [self._pods.counters, *(machine.counters for machine in self._pools.values())]

    async def start(self, publish: Publish) -> None:
        self._publish = publish
        for group, machine in self._pools.items():
            where = Collection(self._path(group), field_selector=f"metadata.name={self._pool_name}")
            self._tasks.start(self._client.follow(where, machine, self._clock, self._changed))

    def _path(self, group: str) -> str:
        return f"/apis/{group}/{GROUPS[group]}/namespaces/{self.namespace}/inferencepools"

    def _changed(self) -> None:
        pool = self.pool
        if pool != self._told:
            self._report(pool)
        if pool is not None:
            self._pods.follow(pool.selector)
            self._tell(pool.ports)
        elif all(machine.synced for machine in self._pools.values()):
            # Gone: nobody serves for it any more. It may come back with another selector.
            self._pods.follow(None)
            if self.synced:
                self._publish([])
            if self._group and not self._elsewhere:
                self._tasks.start(self._look_elsewhere())

    def _report(self, pool: Pool | None) -> None:
        self._told = pool
        if pool is None:
            log.warning("%s: is gone", self.name)
            return
        log.info("%s: selects %s, ports %s", self.name, label_selector(pool.selector), ", ".join(map(str, pool.ports)))

    async def _look_elsewhere(self) -> None:
        """Whether the pool is in the group that was not asked for: the likeliest reason for its absence."""
        (other,) = (group for group in GROUPS if group != self._group)
        try:
            await self._client.request("GET", f"{self._path(other)}/{self._pool_name}")
        except (ApiError, AccessError):
            return
        self._elsewhere = f"; there is one of that name in {other} (--pool-group)"


class SliceDiscovery:
    """The endpoints of a Service, by its EndpointSlices. `port`: name or number of the port; "": all of them."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        service: str,
        port: str = "",
        *,
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        self.name = f"endpointslices {namespace}/{service}"
        self._where = Collection(
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", f"kubernetes.io/service-name={service}"
        )
        self._port = port
        self._client, self._clock = client, clock
        self._machine: ListWatch[Slice] = ListWatch(read_slice, random=random, absent_retry_s=CRD_RETRY_S)
        self._tasks = Tasks()

    @property
    def synced(self) -> bool:
        return self._machine.synced

    @property
    def trouble(self) -> str:
        return f"{self.name}: {self._machine.trouble}" if self._machine.trouble else ""

    @property
    def counters(self) -> Counter[str]:
        return Counter({f"kubernetes_{name}": self._machine.counters[name] for name in COUNTED})

    async def start(self, publish: Publish) -> None:
        def changed() -> None:
            if self._machine.synced:
                publish(of_slices(self._machine.objects.values(), self._port))

        self._tasks.start(self._client.follow(self._where, self._machine, self._clock, changed))

    async def stop(self) -> None:
        await self._tasks.stop()
