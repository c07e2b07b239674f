"""`kvsteer serve`: the parts put together, started in order, and stopped in order.

In: `Settings`. Out: a running picker until SIGTERM or SIGINT, then a drain: readiness off, new streams served until
health checks have seen it, then no new ones, running ones finish within the grace, exit 0; a second signal ends them at
once. SIGHUP reads the configuration file again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from aiohttp import web

from epp.config import PickerConfig, load, load_default, read
from epp.director import Director, Options
from epp.discovery.envoy_file import EnvoyFile
from epp.discovery.kubernetes.cluster import Cluster, ClusterSettings
from epp.discovery.membership import Discovery, Membership
from epp.endpoint import Endpoint, Pool
from epp.exchange import Exchange, Patience, Timer
from epp.gateway.edge import EdgeName, EdgeServer
from epp.gateway.edge import serve as serve_edge
from epp.gateway.ext_proc import METHOD
from epp.gateway.ext_proc_events import Limits
from epp.gateway.health import WATCHES
from epp.gateway.health import Health as ServingHealth
from epp.gateway.listen import open_sockets
from epp.gateway.session import Service
from epp.gateway.tls import Tls
from epp.guard import Limits as PluginLimits
from epp.knowledge import Knowledge
from epp.kvcache.tokens import Tokens
from epp.observe import admin, caches
from epp.observe.authentication import Authenticator, middleware
from epp.observe.decision_log import DecisionLog, LogFile
from epp.observe.metrics import Metrics
from epp.reload import ConfigWatcher, announce
from epp.scheduler import Scheduler
from epp.shared.election import Candidate, identity
from epp.shared.lease import Election
from epp.shared.redis_stream import StreamSettings
from epp.shared.service import SharedService
from epp.signals.health import Health
from epp.signals.outcome import Outcome
from epp.signals.scraper import Scraper, ScrapeSettings

log = logging.getLogger("kvsteer")

T = TypeVar("T")

TICK_S = 0.25
"""How often readiness is looked at and health's timers run."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All that `kvsteer serve` can be told."""

    sources: Callable[[], Sequence[Discovery]]
    listen: tuple[str, ...] = ("127.0.0.1:9002",)
    health_listen: str = "127.0.0.1:9003"
    """Where only grpc.health.v1 is served, in plain text; empty = nowhere."""
    admin_listen: str = "127.0.0.1:9090"
    """Where the admin port is; empty = nowhere."""
    config_file: Path | None = None
    config_text: str = ""
    edge: EdgeName = "lean"
    tls: Tls | None = None
    scrape: ScrapeSettings = field(default_factory=ScrapeSettings)
    limits: Limits = field(default_factory=Limits)
    patience: Patience = field(default_factory=Patience)
    options: Options = field(default_factory=Options)
    decision_log: LogFile | None = None
    envoy_endpoints: Path | None = None
    """A file that Envoy follows to know the pool (`envoy-config --endpoints file:PATH`)."""
    shared_state: StreamSettings | None = None
    """Where this picker and its other replicas tell each other what they do."""
    state_file: Path | None = None
    """Where it is kept from one run to the next what workers hold."""
    drain_delay_s: float = 3.0
    """From readiness off to no new streams: Envoy's health check (every second, two failures) must have seen it."""
    plugin_limits: PluginLimits = field(default_factory=PluginLimits)
    grace_s: float = 30.0
    pool_name: str = "default"
    cluster: ClusterSettings | None = None
    """What is followed of a Kubernetes cluster; None: nothing."""
    seed: int | None = None


def load_config(settings: Settings) -> PickerConfig:
    """The configuration the settings name. Raises `epp.config.ConfigError`."""
    if settings.config_file is not None:
        return load(settings.config_file)
    if settings.config_text:
        return read(settings.config_text, source="--config-text")
    return load_default()


class LoopRuntime:
    """What exchanges need of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.now = time.monotonic

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        return self._loop.call_later(delay_s, call)

    def offload(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        def finished(future: asyncio.Future[T]) -> None:
            if not future.cancelled():
                done(future.exception() or future.result())

        self._loop.run_in_executor(None, work).add_done_callback(finished)

    def spawn(self, work: Coroutine[Any, Any, T], done: Callable[[T | BaseException], None]) -> None:
        def finished(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                done(task.exception() or task.result())

        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(finished)


class Picker:
    """One running picker."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        random = Random(settings.seed)
        # Sources of their own: how often endpoints are scraped must not change what a seed picks.
        scrape_random, other_random = Random(random.random()), Random(random.random())
        self.cluster = Cluster(settings.cluster, other_random) if settings.cluster is not None else None
        self.candidate = self._candidate()
        self.pool = Pool()
        config = load_config(settings)
        self.scheduler = Scheduler(config, random=random, limits=settings.plugin_limits)
        announce(config)
        self.health = Health(self.pool, random=other_random)
        self.metrics = Metrics(self.pool, settings.pool_name)
        self.decisions = DecisionLog(settings.decision_log, random=other_random)
        self.serving = ServingHealth()
        self.scraper = Scraper(settings.scrape, clock=time.monotonic, random=scrape_random, listener=self._scraped)
        self.membership = Membership(self.pool, time.monotonic, (self._changed, self.scraper.changed))
        self.envoy_file = EnvoyFile(settings.envoy_endpoints, self.pool) if settings.envoy_endpoints else None
        if self.envoy_file is not None:
            self.membership.listeners.append(self.envoy_file.changed)
        self.director = Director(
            pool=self.pool,
            scheduler=lambda: self.scheduler,
            health=self.health,
            metrics=self.metrics,
            decisions=self.decisions,
            wall=time.time,
            options=settings.options,
        )
        if self.cluster is not None:
            self.director.policy = self.cluster.policy
        self.knowledge = Knowledge(self.pool, self._tokens_replaced)
        self.membership.listeners.append(self.knowledge.changed)
        self.shared = SharedService(
            self.pool, lambda: self.scheduler.plugins, settings.shared_state, settings.state_file, random=other_random
        )
        self.director.shared = self.shared.told
        self.membership.listeners.append(self.shared.changed)
        self.watcher = (
            ConfigWatcher(settings.config_file, lambda: self.scheduler, self._reconfigured)
            if settings.config_file
            else None
        )
        self.edges: list[EdgeServer] = []
        self._draining = False
        self._told: str | None = None  # the last reason of `not_ready` in the log

    async def run(self, started: Callable[[Picker], None] = lambda picker: None) -> None:
        """Serve until SIGTERM or SIGINT. Raises `epp.gateway.edge.AddressError` or OSError if a port cannot be had."""
        stop, hurry = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        async with AsyncExitStack() as stack:
            stack.callback(self.decisions.close)
            stack.push_async_callback(self.knowledge.stop)
            await self.knowledge.configure(self.scheduler)
            await self._listen(stack)
            await self._watch(stack)
            # What was made so far lives as long as the process: the collector need not look at it again. A request
            # leaves no cycles, so it may come less often than every 700 allocations: 4 us of 140 a request.
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000)
            started(self)
            await stop.wait()
            drained, hurried = asyncio.create_task(self._drain()), asyncio.create_task(hurry.wait())
            await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            if not drained.done():
                log.warning("a second signal: %d requests that still run are ended", _running(self.pool))
                drained.cancel()

    async def _listen(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        runtime = LoopRuntime()

        def exchange(writer: object) -> Exchange:
            return Exchange(self.director, runtime, settings.limits, settings.patience, writer)  # type: ignore[arg-type]

        health = self.serving.methods()
        service = Service({METHOD: exchange, **health}, watches=WATCHES)
        self.edges.append(await serve_edge(settings.edge, settings.listen, service, settings.tls))
        stack.push_async_callback(self.edges[0].drain, 0.0)
        if settings.health_listen:
            only_health = Service(health, watches=WATCHES)
            self.edges.append(await serve_edge(settings.edge, (settings.health_listen,), only_health))
            stack.push_async_callback(self.edges[1].drain, 0.0)
        if settings.admin_listen:
            await self._admin(stack, settings.admin_listen)
        self._register_counters()

    async def _admin(self, stack: AsyncExitStack, listen: str) -> None:
        sources = admin.Sources(
            metrics=self.metrics.render,
            not_ready=self.not_ready,
            decisions=self.decisions.recent,
            pool=self.pool,
            index=lambda: caches.summary(self.knowledge, self.pool),
        )
        guards = []
        if self.cluster is not None and self.cluster.settings.metrics_authentication:
            guards.append(middleware(Authenticator(self.cluster.client, time.monotonic)))
        runner = web.AppRunner(admin.application(sources, guards), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        for _, sock in open_sockets((listen,)):
            await web.SockSite(runner, sock).start()

    async def _watch(self, stack: AsyncExitStack) -> None:
        if self.cluster is not None:
            stack.push_async_callback(self.cluster.stop)
        stack.push_async_callback(self.scraper.stop)
        stack.push_async_callback(self.membership.stop)
        if self.envoy_file is not None:
            self.envoy_file.create()
        stack.push_async_callback(self.shared.stop)
        self.shared.start()
        await self.membership.start([*self.settings.sources(), *(self.cluster.sources if self.cluster else ())])
        if self.cluster is not None:
            self.cluster.start()
        if self.candidate is not None:
            self.candidate.start()
        tasks = [asyncio.create_task(self._tick())]
        if self.watcher is not None:
            tasks.append(asyncio.create_task(self.watcher.run()))

        async def cancel() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        stack.push_async_callback(cancel)

    def _register_counters(self) -> None:
        sources = self.metrics.sources
        edge = self.edges[0]
        sources["edge"] = lambda: {item.name: getattr(edge.counters, item.name) for item in fields(edge.counters)}
        sources["scrape"] = lambda: self.scraper.counters
        sources["membership"] = lambda: self.membership.counters
        sources["health"] = lambda: self.health.counters
        if (envoy_file := self.envoy_file) is not None:
            sources["envoy_endpoints"] = lambda: {"written": envoy_file.written, "failed": envoy_file.failed}
        sources["decision_log"] = lambda: {"written": self.decisions.written, "dropped": self.decisions.dropped}
        sources.update(self.shared.sources())
        sources["plugin"] = lambda: {"faults": self.scheduler.faults.by_kind()}
        sources["kv_events"] = lambda: caches.event_counters(self.knowledge)
        self.metrics.families.append(lambda: caches.families(self.knowledge))
        self.metrics.texts.append(lambda: caches.by_endpoint(self.knowledge, self.pool, self.settings.pool_name))
        if (cluster := self.cluster) is not None:
            sources["cluster"] = lambda: cluster.counters
        if (candidate := self.candidate) is not None:
            sources["lease"] = lambda: candidate.counters
        if (watcher := self.watcher) is not None:
            sources["config"] = lambda: {"taken": watcher.taken, "refused": watcher.refused}

    def not_ready(self) -> str:
        """Why the picker should get no requests; empty when it should."""
        if self._draining:
            return "draining"
        trouble = self.membership.trouble
        if not self.membership.synced:
            return trouble or "discovery has not answered yet"
        if not len(self.pool):
            return f"the pool has no endpoint{trouble and f': {trouble}'}"
        if not any(e.available for e in self.pool.endpoints):
            return "no endpoint of the pool is healthy"
        return self.candidate.not_leading if self.candidate is not None else ""

    def _candidate(self) -> Candidate | None:
        """This replica's part in the election, where one is held."""
        cluster = self.cluster
        if cluster is None or not cluster.settings.elect_leader:
            return None
        name = f"epp-{cluster.namespace}-{cluster.settings.title}.llm-d.ai"
        return Candidate(cluster.client, cluster.namespace, name, Election(identity()))

    async def _tick(self) -> None:
        while True:
            self.health.tick(time.monotonic())
            self.shared.tick()
            self._report_readiness()
            if self.settings.tls is not None:
                self.settings.tls.refresh()
            await asyncio.sleep(TICK_S)

    def _report_readiness(self) -> None:
        reason = self.not_ready()
        if reason != self._told:
            log.info("%s", f"not ready: {reason}" if reason else f"ready: {len(self.pool)} endpoints")
            self._told = reason
        self.serving.set_ready(not reason, reason or "ok")

    def _hang_up(self) -> None:
        if self.watcher is not None:
            self.watcher.trigger()
        else:
            log.info("SIGHUP: there is no configuration file to read again")

    async def _drain(self) -> None:
        grace = self.settings.grace_s
        self._draining = True
        self._report_readiness()
        if self.candidate is not None:
            # At once: whoever stands by may take over while health checks see that this one leaves.
            await self.candidate.stop()
        await asyncio.sleep(self.settings.drain_delay_s)
        log.info("stopping: %d requests run, %.0f s grace", _running(self.pool), grace)
        await asyncio.gather(*(edge.drain(grace) for edge in self.edges))
        log.info("stopped")

    # What other parts tell

    def _scraped(self, endpoint: Endpoint, now: float, outcome: Outcome) -> None:
        self.health.scraped(endpoint, now, outcome)
        self.knowledge.scraped(endpoint)

    def _changed(self, joined: Sequence[Endpoint], left: Sequence[Endpoint]) -> None:
        del joined
        self.director.endpoints_left(left, time.monotonic())

    def _reconfigured(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.knowledge.reconfigure(scheduler)

    def _tokens_replaced(self, tokens: Tokens | None) -> None:
        self.director.tokens = tokens


def _running(pool: Pool) -> int:
    return sum(e.in_flight for e in pool.endpoints)
