"""The emulated worker in real time: an engine, or one per data-parallel rank, behind vLLM's HTTP interface.

    worker = Worker(WorkerConfig(model="demo"), tokenizer)
    await worker.start(); ...; await worker.stop()

Every answer carries `x-served-by`, the worker's name. A client that goes away aborts its sequences. Faults are read and
set at `/control/faults`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import msgspec
from aiohttp import web

from epp.sim.async_engine import AsyncEngine
from epp.sim.bodies import ApiError, LoraBody, read_body
from epp.sim.engine import EngineConfig, EngineCore
from epp.sim.faults import FaultDice, Faults, read_faults, reset_connection
from epp.sim.generation import Generator
from epp.sim.metrics import LoraInfo, render_metrics
from epp.sim.publisher import EventPublisher, EventsConfig
from epp.sim.replies import error_body, model_list
from epp.sim.tokenizer import ChatTokenizer

VERSION = "0.32.0"
"""The vLLM release whose interface this is."""
_log = logging.getLogger(__name__)
FLUSH_S = 0.1
"""How long a stopping worker lets answers leave that its engine has finished."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """`port` 0 takes a free one; `name` defaults to `host:port`."""

    model: str
    host: str = "127.0.0.1"
    port: int = 0
    name: str = ""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Of each rank."""
    data_parallel_size: int = 1
    """Engines behind the port, each with blocks of its own; the header `X-data-parallel-rank` picks one."""
    events: EventsConfig | None = None
    """Of rank 0; rank r publishes and replays on port + r."""
    faults: Faults = field(default_factory=Faults)
    lora_modules: tuple[str, ...] = ()
    speed: float = 1.0
    stream_interval: int = 1
    """Tokens per streamed chunk, as vLLM's option."""
    output_tokens: int = 128
    """Mean length of an answer that no limit cuts."""
    max_body_bytes: int = 64 << 20


class Worker:
    def __init__(self, config: WorkerConfig, tokenizer: ChatTokenizer) -> None:
        self.config = config
        engine = replace(config.engine, output_vocabulary=tuple(tokenizer.words))
        self.engines = [AsyncEngine(EngineCore(engine), speed=config.speed) for _ in range(config.data_parallel_size)]
        """By rank."""
        self.port = config.port
        self.name = config.name
        self.loras: dict[str, str] = {}
        self.publishers: list[EventPublisher] = []
        """By rank; none without events."""
        self.dice = FaultDice(Faults())
        self._generator = Generator(self, tokenizer)
        self._lora_info = LoraInfo(config.engine.max_loras)
        self._created = int(time.time())
        self._frozen_metrics: str | None = None
        self._fault_end: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        for name in config.lora_modules:
            self._load_lora(name, name)

    @property
    def engine(self) -> AsyncEngine:
        """Of rank 0."""
        return self.engines[0]

    @property
    def core(self) -> EngineCore:
        """Of rank 0."""
        return self.engine.core

    @property
    def cores(self) -> list[EngineCore]:
        return [engine.core for engine in self.engines]

    @property
    def publisher(self) -> EventPublisher | None:
        """Of rank 0."""
        return self.publishers[0] if self.publishers else None

    def engine_for(self, rank: str | None) -> AsyncEngine:
        """The rank that a request header names; without one, or with one that is no number, the least busy one.

        Raises ApiError, as vLLM does, for a rank that is not there.
        """
        try:
            number = int(rank or "")
        except ValueError:
            return min(self.engines, key=lambda engine: engine.load)
        if not 0 <= number < len(self.engines):
            raise ApiError(400, f"data_parallel_rank {number} is out of range [0, {len(self.engines)}).")
        return self.engines[number]

    @property
    def address(self) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{host}:{self.port}"

    def reachable(self, endpoint: str) -> str:
        """A bound ZeroMQ endpoint with this worker's host for the wildcard."""
        return endpoint.replace("0.0.0.0", self.config.host)

    async def start(self) -> None:
        """Raises OSError, naming the port, if it is taken; ValueError for an event endpoint that cannot be used."""
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handler_cancellation=True,  # a client that goes away ends the handler, which aborts its sequences
            keepalive_timeout=600,  # longer than a proxy keeps an idle connection
            shutdown_timeout=FLUSH_S,
        )
        await self._runner.setup()
        try:
            await self._listen()
            self.name = self.name or self.address
            if self.config.events is not None:
                topic = self.config.events.topic.replace("{address}", self.address)
                topic = topic.replace("{model}", self.config.model)
                for rank, engine in enumerate(self.engines):
                    publisher = EventPublisher(
                        replace(self.config.events.of_rank(rank), topic=topic),
                        lambda: self.dice.strikes(self.dice.faults.event_loss),
                    )
                    self.publishers.append(publisher)
                    engine.on_events = publisher.publish
        except (OSError, ValueError):
            await self.stop()
            raise
        for engine in self.engines:
            engine.start()
        await self.set_faults(self.config.faults)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop listening, let running requests end for `grace_s` seconds, then drop them."""
        self._forget_fault_end()
        self._close_listener()
        await asyncio.gather(*(engine.stop(grace_s) for engine in self.engines))
        if self._runner is not None:
            await self._runner.cleanup()
        while self.publishers:
            await self.publishers.pop().stop()

    async def set_faults(self, faults: Faults, *, asked_over: asyncio.BaseTransport | None = None) -> None:
        """Put faults in force instead of those before. `asked_over` is a connection that a refusal spares."""
        self._forget_fault_end()
        self.dice = FaultDice(faults)
        for engine in self.engines:
            engine.slow_factor = faults.slow
        self._frozen_metrics = self._metrics_page() if faults.stale_metrics else None
        if faults.refuse == "close":
            self._close_listener()
            self._reset_connections(spare=asked_over)
        elif self._listener is None:
            await self._listen()
        if faults.duration_s is not None:
            self._fault_end = asyncio.create_task(self._end_faults(faults.duration_s))

    def _forget_fault_end(self) -> None:
        if self._fault_end is not None:
            self._fault_end.cancel()
            self._fault_end = None

    async def _end_faults(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._fault_end = None
        try:
            await self.set_faults(Faults())
        except OSError as error:
            _log.error("the faults have ended, but: %s", error)

    async def _listen(self) -> None:
        assert self._runner is not None
        server = self._runner.server
        assert server is not None

        def accept() -> asyncio.Protocol:
            return _ResetOnAccept() if self.dice.faults.refuse == "reset" else server()

        try:
            self._listener = await asyncio.get_running_loop().create_server(
                accept, self.config.host, self.port, backlog=1024
            )
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            reason = "the port is taken by another process" if taken else error.strerror
            raise OSError(f"cannot listen on {self.address}: {reason}") from None
        self.port = self._listener.sockets[0].getsockname()[1]

    def _reset_connections(self, spare: asyncio.BaseTransport | None) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection.transport is not None and connection.transport is not spare:
                reset_connection(connection.transport)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=self.config.max_body_bytes, middlewares=[self._guard])
        app.on_response_prepare.append(self._sign)
        generator = self._generator
        app.add_routes(
            [
                web.post("/v1/completions", self._with_faults(generator.completions)),
                web.post("/v1/chat/completions", self._with_faults(generator.chat)),
                web.post("/v1/messages", self._with_faults(generator.messages)),
                web.post("/v1/responses", self._with_faults(generator.responses)),
                web.post("/v1/messages/count_tokens", generator.count_tokens),
                web.post("/v1/completions/render", generator.render_completions),
                web.post("/v1/chat/completions/render", generator.render_chat),
                web.post("/tokenize", generator.tokenize),
                web.post("/detokenize", generator.detokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._empty),
                web.get("/ping", self._empty),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._event_sources),
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake_up),
                web.get("/is_sleeping", self._is_sleeping),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.post("/v1/load_lora_adapter", self._load_lora_adapter),
                web.post("/v1/unload_lora_adapter", self._unload_lora_adapter),
                web.get("/control/faults", self._get_faults),
                web.post("/control/faults", self._post_faults),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every error in the shape of the API that was called."""
        try:
            return await handler(request)
        except ConnectionResetError:  # the client went away while its answer was written
            raise asyncio.CancelledError from None
        except ApiError as error:
            failure = error
        except web.HTTPException as error:
            kind = "NotFoundError" if error.status == 404 else "BadRequestError"
            failure = ApiError(error.status, error.reason, kind)
        anthropic = request.path.startswith("/v1/messages")
        return web.json_response(error_body(failure, anthropic=anthropic), status=failure.status)

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-served-by"] = self.name
        if request_id := request.headers.get("x-request-id"):
            response.headers["x-request-id"] = request_id

    def _with_faults(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            dice = self.dice
            if dice.strikes(dice.faults.hang):
                await request.read()
                await asyncio.Event().wait()
            if dice.strikes(dice.faults.error_rate):
                raise ApiError(dice.faults.error_status, "a fault was asked for", "InternalServerError")
            return await handler(request)

        return guarded

    async def _models(self, request: web.Request) -> web.Response:
        models = [(self.config.model, None), *((name, self.config.model) for name in self.loras)]
        return web.json_response(model_list(models, self._created, self.config.engine.context_length))

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.dice.faults.hung_metrics:
            await asyncio.Event().wait()
        page = self._frozen_metrics if self._frozen_metrics is not None else self._metrics_page()
        return web.Response(text=page, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    def _metrics_page(self) -> str:
        running = [sequence for core in self.cores for sequence in core.scheduler.running]
        self._lora_info.update((s.lora_name for s in running if s.lora_name), time.time())
        return render_metrics(self.cores, self.config.model, self._lora_info)

    async def _event_sources(self, request: web.Request) -> web.Response:
        """As vLLM tells them: a list with an entry per data-parallel rank, an empty object without events."""
        sources = [
            {
                "data_parallel_rank": publisher.config.data_parallel_rank,
                "endpoint": self.reachable(publisher.endpoint),
                "replay_endpoint": publisher.replay_endpoint and self.reachable(publisher.replay_endpoint),
                "topic": publisher.config.topic,
            }
            for publisher in self.publishers
        ]
        return web.json_response(sources or {})

    async def _sleep(self, request: web.Request) -> web.Response:
        level = request.query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise ApiError(400, "level must be 0, 1 or 2", param="level")
        for core in self.cores:
            core.sleep(int(level))
        return web.Response()

    async def _wake_up(self, request: web.Request) -> web.Response:
        for engine in self.engines:
            engine.wake_up()
        return web.Response()

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.core.sleep_level is not None})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        preempt = request.query.get("reset_running_requests", "false").lower() == "true"
        reset = [core.reset_prefix_cache(preempt_running=preempt) for core in self.cores]
        return web.json_response({"success": all(reset)})

    async def _load_lora_adapter(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), LoraBody)
        if body.lora_name in self.loras or body.lora_name == self.config.model:
            raise ApiError(400, f"The lora adapter '{body.lora_name}' has already been loaded.", "InvalidUserInput")
        self._load_lora(body.lora_name, body.lora_path)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload_lora_adapter(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), LoraBody)
        if self.loras.pop(body.lora_name, None) is None:
            raise ApiError(404, f"The lora adapter '{body.lora_name}' cannot be found.", "NotFoundError")
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _load_lora(self, name: str, path: str) -> None:
        self.loras[name] = path
        for core in self.cores:
            numbers = core.kv.lora_ids
            numbers.setdefault(name, len(numbers) + 1)

    async def _get_faults(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.dice.faults), content_type="application/json")

    async def _post_faults(self, request: web.Request) -> web.Response:
        try:
            faults = read_faults(await request.read() or b"{}")
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        await self.set_faults(faults, asked_over=request.transport)
        return await self._get_faults(request)


class _ResetOnAccept(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        reset_connection(transport)
