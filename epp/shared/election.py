"""Leader election over the API server: looks at the Lease every few seconds and writes it when it is our turn.

In: an `ApiClient`, the Lease's name, an `Election`, which has the rules. Out: `leads`, for readiness; the Lease is
released at the end, so that the next replica need not wait for it to run out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable

from epp.discovery.kubernetes.client import ApiClient, ApiError
from epp.discovery.kubernetes.credentials import AccessError
from epp.shared.lease import Election, Lease

log = logging.getLogger(__name__)


def identity() -> str:
    """A name that no other process has: the pod's, and a part of its own for each start."""
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4()}"


class Candidate:
    """One replica that would lead. `start` once, `stop` at the end."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        name: str,
        election: Election,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.election = election
        self._clock = clock
        self.counters: Counter[str] = Counter(acquired=0, renewed=0, lost=0, failed=0)
        self._client = client
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace, self._name = namespace, name
        self._task: asyncio.Task[None] | None = None
        self._led = False
        self._trouble = ""

    @property
    def not_leading(self) -> str:
        """Why this replica should serve nobody; empty when it leads."""
        if self.election.leads(self._clock()):
            return ""
        if self._trouble:
            return f"the lease {self._namespace}/{self._name} cannot be had: {self._trouble}"
        return f"standing by: {self.election.holder or 'nobody yet'} leads"

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Give the Lease back, if it is ours, and stop."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        released = self.election.release(time.time())
        if released is not None:
            try:
                async with asyncio.timeout(self.election.timing.retry_s):
                    self.election.wrote(await self._write(released), self._clock())
                log.info("the lease %s/%s is given back", self._namespace, self._name)
            except (ApiError, AccessError, TimeoutError) as error:
                log.warning("the lease could not be given back, the next replica has to wait for it: %s", error)

    async def _run(self) -> None:
        timing = self.election.timing
        while True:
            try:
                async with asyncio.timeout(timing.renew_deadline_s / 2):
                    await self._turn()
                self._trouble = ""
            except (ApiError, AccessError, TimeoutError) as error:
                self.counters["failed"] += 1
                if not self._trouble:
                    log.warning("the lease %s/%s: %s", self._namespace, self._name, error or "no answer in time")
                self._trouble = str(error) or "no answer in time"
            self._report()
            await asyncio.sleep(timing.retry_s)

    async def _turn(self) -> None:
        election = self.election
        try:
            found: Lease | None = Lease.read(await self._client.request("GET", f"{self._path}/{self._name}"))
        except ApiError as error:
            if error.status != 404:
                raise
            found = None
        election.observe(found, self._clock())
        wanted = election.wanted(self._clock(), time.time())
        if wanted is None:
            return
        sent_at, mine = self._clock(), election.holder == election.identity
        try:
            election.wrote(await self._write(wanted), sent_at)
        except ApiError as error:
            if error.status != 409:
                raise
            return  # another one was faster; who, the next look tells
        self.counters["renewed" if mine else "acquired"] += 1

    async def _write(self, lease: Lease) -> Lease:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": lease.spec(),
        }
        if not lease.version:
            return Lease.read(await self._client.request("POST", self._path, body=body))
        body["metadata"] = {**body["metadata"], "resourceVersion": lease.version}  # type: ignore[dict-item]
        return Lease.read(await self._client.request("PUT", f"{self._path}/{self._name}", body=body))

    def _report(self) -> None:
        leads = self.election.leads(self._clock())
        if leads != self._led:
            self._led = leads
            self.counters["lost"] += not leads
            log.info("this replica %s", "leads" if leads else f"leads no more; {self.election.holder or 'nobody'} does")
