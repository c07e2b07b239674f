"""`kvsteer sidecar`: the proxy, the list of whom it may ask, its metrics; started in order and stopped in order.

SIGTERM: `/health` says 503 at once, requests are served for the drain delay, running ones for the grace, then the end.
vLLM itself would answer 500 to new requests from its own SIGTERM on, with a healthy `/health`: let it be ended last.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.disagg.sidecar.proxy import Proxy, ProxySettings
from epp.discovery.membership import Discovery, Membership
from epp.endpoint import Pool

log = logging.getLogger("kvsteer")


class Targets:
    """The addresses that may be asked to prefill: those of the pool, as discovery knows it."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.membership = Membership(self.pool, time.monotonic)

    def allowed(self, address: str) -> bool:
        return any(endpoint.address == address for endpoint in self.pool.endpoints)


@dataclass(frozen=True, slots=True)
class Settings:
    proxy: ProxySettings
    targets: Targets
    sources: Sequence[Discovery]
    host: str = "0.0.0.0"
    port: int = 8000
    admin: tuple[str, int] | None = None
    drain_delay_s: float = 3.0
    grace_s: float = 30.0


class Sidecar(Collector):
    """One sidecar. `run` returns after a drain."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.proxy = Proxy(settings.proxy)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "kvsteer_sidecar_requests", "Requests that might be handed over", labels=["outcome", "why"]
        )
        for names, count in self.proxy.outcomes.items():
            requests.add_metric(names, count)
        prefills = CounterMetricFamily("kvsteer_sidecar_prefills", "Prefill legs by how they ended", labels=["ended"])
        for ended, count in self.proxy.prefills.items():
            prefills.add_metric([ended], count)
        yield from (requests, prefills)
        yield GaugeMetricFamily("kvsteer_sidecar_running_requests", "Requests now", value=self.proxy.running)
        targets = len(self.settings.targets.pool)
        yield GaugeMetricFamily("kvsteer_sidecar_targets", "Endpoints that may be asked", value=targets)

    async def run(self) -> None:
        settings, stop = self.settings, asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await self.proxy.start()
        await settings.targets.membership.start(settings.sources)
        public = await _serve(self.proxy.application(), settings.host, settings.port)
        admin = await _serve(self._admin(), *settings.admin) if settings.admin is not None else None
        log.info("serving on %s:%s, worker %s", settings.host, settings.port, settings.proxy.decoder)
        await stop.wait()
        log.info("draining: new requests for %g s, running ones for %g s", settings.drain_delay_s, settings.grace_s)
        self.proxy.draining = True
        await asyncio.sleep(settings.drain_delay_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.grace_s):
                await self.proxy.idle.wait()
        cut_off = self.proxy.running
        for runner in (public, admin):
            if runner is not None:
                await runner.cleanup()
        await settings.targets.membership.stop()
        await self.proxy.close()
        log.info("stopped; %d requests were cut off", cut_off)

    def _admin(self) -> web.Application:
        async def metrics(request: web.Request) -> web.Response:
            return web.Response(body=generate_latest(self._registry), content_type="text/plain")

        async def ready(request: web.Request) -> web.Response:
            why = "draining" if self.proxy.draining else self._not_ready()
            return web.Response(text=f"{why or 'ready'}\n", status=503 if why else 200)

        async def healthy(request: web.Request) -> web.Response:
            return web.Response(text="ok\n")

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/readyz", ready)
        app.router.add_get("/healthz", healthy)
        return app

    def _not_ready(self) -> str:
        """Without the list nobody may be asked; the worker's own truth is on `/health` of the proxy."""
        membership = self.settings.targets.membership
        return "" if membership.synced or not self.settings.sources else membership.trouble or "no list of targets yet"


async def _serve(app: web.Application, host: str, port: int) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=2048).start()
    return runner
