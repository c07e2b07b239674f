"""`kvsteer sidecar`: proxy or ext_proc service, whom it may ask, its metrics; started in order and stopped in order.

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

from epp.disagg.sidecar.beside_envoy import Beside
from epp.disagg.sidecar.caller import Caller, CallerSettings
from epp.disagg.sidecar.proxy import Proxy, ProxySettings
from epp.discovery.membership import Discovery, Membership
from epp.endpoint import Pool
from epp.gateway.edge import EdgeServer
from epp.gateway.edge import serve as serve_edge
from epp.gateway.ext_proc import METHOD
from epp.gateway.ext_proc_events import Limits
from epp.gateway.health import WATCHES, Health
from epp.gateway.session import Service

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
    legs: CallerSettings
    proxy: ProxySettings
    targets: Targets
    sources: Sequence[Discovery]
    host: str = "0.0.0.0"
    port: int = 8000
    ext_proc: str = ""
    """Serve an Envoy here (`unix:/path`, `host:port`) instead of HTTP at `host` and `port`."""
    admin: tuple[str, int] | None = None
    drain_delay_s: float = 3.0
    grace_s: float = 30.0


class Sidecar(Collector):
    """One sidecar. `run` returns after a drain."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.legs = Caller(settings.legs)
        self.proxy = Proxy(settings.proxy, self.legs)
        self._health = Health()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "kvsteer_sidecar_requests", "Requests that might be handed over", labels=["outcome", "why"]
        )
        for names, count in self.legs.outcomes.items():
            requests.add_metric(names, count)
        prefills = CounterMetricFamily("kvsteer_sidecar_prefills", "Prefill legs by how they ended", labels=["ended"])
        for ended, count in self.legs.prefills.items():
            prefills.add_metric([ended], count)
        yield from (requests, prefills)
        yield GaugeMetricFamily("kvsteer_sidecar_running_requests", "Requests now", value=self.legs.running)
        targets = len(self.settings.targets.pool)
        yield GaugeMetricFamily("kvsteer_sidecar_targets", "Endpoints that may be asked", value=targets)

    async def run(self) -> None:
        settings, stop = self.settings, asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await self.legs.start()
        await settings.targets.membership.start(settings.sources)
        public = edge = None
        if settings.ext_proc:
            edge = await self._serve_envoy()
        else:
            public = await _serve(self.proxy.application(), settings.host, settings.port)
        admin = await _serve(self._admin(), *settings.admin) if settings.admin is not None else None
        where = settings.ext_proc or f"{settings.host}:{settings.port}, worker {settings.proxy.decoder}"
        log.info("serving on %s", where)
        await stop.wait()
        log.info("draining: new requests for %g s, running ones for %g s", settings.drain_delay_s, settings.grace_s)
        self.legs.draining = True
        await asyncio.sleep(settings.drain_delay_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.grace_s):
                await self.legs.idle.wait()
        cut_off = self.legs.running
        if edge is not None:
            await edge.drain(1.0)
        for runner in (public, admin):
            if runner is not None:
                await runner.cleanup()
        await settings.targets.membership.stop()
        await self.legs.close()
        log.info("stopped; %d requests were cut off", cut_off)

    async def _serve_envoy(self) -> EdgeServer:
        limits = Limits(max_request_bytes=self.settings.proxy.max_body_bytes, response_bodies=False)
        methods = {METHOD: lambda writer: Beside(self.legs, limits, writer), **self._health.methods()}
        edge = await serve_edge("lean", (self.settings.ext_proc,), Service(methods, watches=WATCHES))
        self._health.set_ready(True, "ok")
        return edge

    def _admin(self) -> web.Application:
        async def metrics(request: web.Request) -> web.Response:
            return web.Response(body=generate_latest(self._registry), content_type="text/plain")

        async def ready(request: web.Request) -> web.Response:
            why = "draining" if self.legs.draining else self._not_ready()
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
