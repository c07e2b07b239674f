"""KV events off the wire: a socket to every worker of the pool, or one that workers connect to.

In: the pool's members, through `changed` (a discovery listener). Out: the block index, and by endpoint its `Follower`
(confidence, counters) and `Holder`.

Dialled, a worker is known by the socket, whatever its topic says. Its connection is watched: when it comes (back), what
was missed is asked for on the replay socket, each time with a fresh DEALER, so that late answers to an earlier request
are not mistaken for this one's. Bound, a worker is known by its topic `kv@<address, host or name>@<model>`; publishers
that no endpoint answers to are counted by name.

Messages are decoded and applied on the event loop, in slices: one slice of about 2 ms at most in every turn of the
loop, however many workers have something to say. What cannot be kept up with is dropped by ZeroMQ beyond its
high-water mark, seen as a gap, and replayed. Replays stall the worker's publisher, so few run at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from epp.endpoint import Endpoint
from epp.kvcache.events import sources
from epp.kvcache.events.confidence import Level
from epp.kvcache.events.decoder import MAX_PAYLOAD_BYTES, MalformedMessage, decode_batch, read_message
from epp.kvcache.events.follower import Follower, FollowerSettings
from epp.kvcache.events.ledger import Ledger, ServedAdapters
from epp.kvcache.events.sequence import Ask
from epp.kvcache.events.sources import Source
from epp.kvcache.index import BlockIndex, Holder

log = logging.getLogger(__name__)

COUNTERS = (
    "silent",  # workers that had published nothing and answered no replay after `silent_s`
    "no_source",  # answers of /kv_event_sources that name no publisher, and failures to get one
    "one_port",  # warnings that the configured port is one for several workers of a host
    "unknown_publisher",  # messages on a bound socket that no endpoint answers to
    "faults",  # of our own
)
MAX_NAMES = 256
_TICK_S = 0.5
_WORK_US = 500.0
"""Cost of what is applied between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class EventsSettings:
    """Times in seconds. Without `bind`, workers are dialled."""

    events_port: int | None = None
    """Port of rank 0; None = each worker tells its own (`/kv_event_sources`)."""
    replay_port: int | None = None
    """Likewise; None = no replay, unless the worker tells."""
    bind: str = ""
    """A ZeroMQ address to bind, `tcp://*:5557` say, that workers connect to."""
    topic: str = ""
    """What topics on a bound socket must begin with."""
    scheme: str = "http"
    verify: bool = False
    """With https: check the worker's certificate."""
    replays: int = 8
    """Replays at once, over all workers."""
    replay_gap_s: float = 0.02
    """Between the beginnings of two."""
    settle_s: float = 0.1
    """From a connection to the replay that covers the time before it: the subscription has to arrive first."""
    retry_s: float = 2.0
    silent_s: float = 10.0
    slice_s: float = 0.002
    receive_hwm: int = 10_000
    """Messages that wait in ZeroMQ for each worker."""
    follower: FollowerSettings = field(default_factory=FollowerSettings)


class Subscriber:
    """Follows the endpoints it was told of until they leave.

    `model` gives the registered name of the base model that an endpoint serves, or None while it is not known: events
    are not asked for before.
    """

    def __init__(
        self,
        index: BlockIndex,
        settings: EventsSettings,
        *,
        model: Callable[[Endpoint], str | None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.index = index
        self.holders: dict[Endpoint, Holder] = {}
        self.followers: dict[Endpoint, Follower] = {}
        """Of the endpoints whose model and event source are known."""
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.unknown: Counter[str] = Counter()
        """Messages of unknown publishers by topic, of the first 256 topics; others under ""."""
        self._model = model
        self._clock = clock
        self._wall = wall
        self._links: dict[Endpoint, _Link] = {}
        self._left: Counter[str] = Counter()
        self._routes: dict[tuple[str, int | None], _Link | None] = {}
        self._context = zmq.asyncio.Context()
        self._turn = asyncio.Lock()
        self._replays = asyncio.Semaphore(settings.replays)
        self._next_replay = 0.0
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.bound = ""
        """The address bound, with the port that `:0` was given; "" when workers are dialled."""

    def start(self) -> None:
        """Begin, on the running loop. Raises ValueError if the address to bind cannot be bound."""
        loop = asyncio.get_running_loop()
        if self.settings.bind:
            socket = self.subscribing(self.settings.topic.encode())
            try:
                socket.bind(self.settings.bind)
            except zmq.ZMQError as error:
                socket.close()
                raise ValueError(f"KV events: {self.settings.bind} cannot be bound: {error}") from None
            self.bound = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
            self._tasks.append(loop.create_task(self._receive_bound(socket)))
        self._tasks.append(loop.create_task(self._tick()))

    def changed(self, joined: Sequence[Endpoint], left: Sequence[Endpoint]) -> None:
        """Follow those that joined, forget those that left. Called on the event loop, after `start`."""
        self._routes.clear()
        for endpoint in left:
            if link := self._links.pop(endpoint, None):
                link.cancel()
            if follower := self.followers.pop(endpoint, None):
                self._left += follower.counters + follower.ledger.counters
            if holder := self.holders.pop(endpoint, None):
                self.index.leave(holder)
        for endpoint in joined:
            self.holders[endpoint] = self.index.join(endpoint)
            self._links[endpoint] = _Link(self, endpoint)
        if joined and self.settings.events_port is not None and not self.settings.bind:
            self._warn_of_one_port()

    def _warn_of_one_port(self) -> None:
        """Workers of one host and rank cannot all publish on the configured port: some are followed at another's."""
        places: dict[tuple[str, int], list[str]] = {}
        for endpoint in self._links:
            places.setdefault((endpoint.host, endpoint.rank), []).append(endpoint.key)
        for keys in places.values():
            if len(keys) > 1:
                self.counters["one_port"] += 1
                log.error("KV events: eventsPort is one port for several workers of a host: %s", ", ".join(keys[:8]))

    def totals(self) -> Counter[str]:
        """All counters, those of followers and ledgers summed, of endpoints that left as well."""
        total = Counter(self.counters)
        total.update(self._left)
        for follower in self.followers.values():  # adding Counters up would take five times as long
            total.update(follower.counters)
            total.update(follower.ledger.counters)
        return total

    async def stop(self) -> None:
        """Close all sockets. What the index holds stays."""
        tasks = [*self._tasks, *(link.task for link in self._links.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._links.clear()
        if self._session is not None:
            await self._session.close()
        self._context.destroy(linger=0)

    # -- for links --------------------------------------------------------------------------------------------------

    def follow(self, endpoint: Endpoint, *, replay: bool) -> Follower | None:
        """The endpoint's follower, made when its model is known."""
        follower = self.followers.get(endpoint)
        if follower is None and (model := self._model(endpoint)) is not None and endpoint in self.holders:
            settings = self.settings.follower
            settings = replace(settings, sequence=replace(settings.sequence, replay=replay))
            ledger = Ledger(self.index, self.holders[endpoint], model, adapters=ServedAdapters(endpoint))
            follower = self.followers[endpoint] = Follower(ledger, settings)
        return follower

    async def pump(self, socket: zmq.asyncio.Socket, take: Callable[[list[bytes]], Follower | None]) -> None:
        """Take what a socket has got, and apply it, in slices."""
        raw: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        behind: set[Follower] = set()
        more = True
        while more:
            async with self._turn:
                more = self._slice(raw, take, behind)
                await asyncio.sleep(0)

    async def work(self, follower: Follower) -> None:
        """Apply what a follower has got, in slices."""
        while follower.busy:
            async with self._turn:
                follower.work(self._clock(), self.settings.slice_s * 1e6)
                await asyncio.sleep(0)

    @asynccontextmanager
    async def replaying(self) -> AsyncIterator[None]:
        """Room for one more replay."""
        async with self._replays:
            wait = self._next_replay - self._clock()
            self._next_replay = max(self._next_replay, self._clock()) + self.settings.replay_gap_s
            if wait > 0:
                await asyncio.sleep(wait)
            yield

    async def sources(self, endpoint: Endpoint) -> bytes:
        """The answer of `/kv_event_sources`; empty if there is none."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self.settings.verify),
                timeout=aiohttp.ClientTimeout(total=self.settings.retry_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        url = f"{self.settings.scheme}://{endpoint.address}/kv_event_sources"
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                body = await response.content.read(sources.MAX_ANSWER_BYTES)
                return body if response.status == 200 else b""
        except (aiohttp.ClientError, OSError):  # TimeoutError is one of the latter
            return b""

    def _slice(
        self,
        raw: zmq.Socket[bytes],
        take: Callable[[list[bytes]], Follower | None],
        behind: set[Follower],
    ) -> bool:
        """One turn's share of receiving and applying; `behind` are followers with work left. True if more is there."""
        until = self._clock() + self.settings.slice_s
        while (now := self._clock()) < until:
            if behind:
                follower = next(iter(behind))
                if not follower.work(now, _WORK_US):
                    behind.discard(follower)
                continue
            try:
                frames = raw.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if follower_of := take(frames):
                behind.add(follower_of)
        return True

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for link in list(self._links.values()):
                try:
                    await link.tick()
                except Exception:
                    self.counters["faults"] += 1
                    log.exception("%s: following KV events failed", link.endpoint.key)

    # -- bound ------------------------------------------------------------------------------------------------------

    async def _receive_bound(self, socket: zmq.asyncio.Socket) -> None:
        with socket:
            while True:
                await socket.poll()
                try:
                    await self.pump(socket, self._take_bound)
                except Exception:
                    self.counters["faults"] += 1
                    log.exception("KV events on %s: receiving failed", self.bound)

    def _take_bound(self, frames: list[bytes]) -> Follower | None:
        try:
            message = read_message(frames)
            batch = decode_batch(message.payload)
        except MalformedMessage:
            self._unknown(f"malformed: {frames[0][:64]!r}" if frames else "malformed")
            return None
        name = (message.topic, batch.rank)
        link = self._routes[name] if name in self._routes else self._route(*name)
        follower = link and link.followed()
        if not link or not follower:
            self._unknown(message.topic[:200])
            return None
        link.plan(follower.batch(message.seq, batch, self._clock(), self._wall()))
        return follower

    def _route(self, topic: str, rank: int | None) -> _Link | None:
        """The endpoint that a topic names: `kv@<address, host or name>@<model>`; of several, the one of the rank."""
        parts = topic.split("@")
        name = parts[1] if len(parts) > 1 else topic
        links = [x for x in self._links.values() if name in (x.endpoint.address, x.endpoint.host, x.endpoint.name)]
        if len(links) > 1:
            links = [x for x in links if x.endpoint.rank == (rank or 0)]
        link = links[0] if len(links) == 1 else None
        if len(self._routes) < 16 * MAX_NAMES:
            self._routes[topic, rank] = link
        return link

    def _unknown(self, name: str) -> None:
        self.counters["unknown_publisher"] += 1
        if name not in self.unknown:
            if len(self.unknown) >= MAX_NAMES:
                name = ""
            else:
                log.warning("KV events of %r: no endpoint of the pool answers to that name", name)
        self.unknown[name] += 1

    @property
    def now(self) -> float:
        return self._clock()

    def take_live(self, follower: Follower, frames: list[bytes]) -> list[Ask]:
        return follower.live(frames, self._clock(), self._wall())

    def subscribing(self, topic: bytes = b"") -> zmq.asyncio.Socket:
        """A SUB socket, not connected yet."""
        socket = self._context.socket(zmq.SUB)
        for option, value in (
            (zmq.IPV6, 1),
            (zmq.LINGER, 0),
            (zmq.RCVHWM, self.settings.receive_hwm),
            (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2000),
            # A host that vanishes without a word is noticed.
            (zmq.HEARTBEAT_IVL, 5000),
            (zmq.HEARTBEAT_TIMEOUT, 15000),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        return socket

    def ask(self, source: Source) -> zmq.asyncio.Socket:
        """A DEALER socket connected to a publisher's replay socket."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, self.settings.receive_hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.connect(source.replay)
        return socket


class _Link:
    """One endpoint's sockets."""

    def __init__(self, subscriber: Subscriber, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._subscriber = subscriber
        self._settings = subscriber.settings
        self._source: Source | None = None
        self._wanted: int | None = None
        """Where the replay to ask for next begins."""
        self._wake = asyncio.Event()
        self._since = subscriber.now
        self._silent = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        self.task.cancel()

    def plan(self, asks: list[Ask]) -> None:
        """Have a replay sent; the newest request replaces one that is still waiting, or running."""
        for ask in asks:
            self._wanted = ask.start
            self._wake.set()

    def followed(self) -> Follower | None:
        """The follower, on a bound socket: there from the first message on, once the model is known."""
        known = self._subscriber.followers.get(self.endpoint)
        if known is None:
            known = self._subscriber.follow(self.endpoint, replay=self._settings.replay_port is not None)
            if known is not None:
                self.plan(known.connected(self._subscriber.now))
        return known

    async def tick(self) -> None:
        """Time passes: replays time out, and who never says anything is named."""
        follower = self._subscriber.followers.get(self.endpoint)
        now = self._subscriber.now
        if follower is not None and self._wanted is None:
            self.plan(follower.tick(now))
            await self._subscriber.work(follower)
        silent = follower is None or follower.confidence.level is Level.NONE
        if silent and not self._silent and now - self._since >= self._settings.silent_s:
            self._subscriber.counters["silent"] += 1
            log.warning("%s: has published no KV events in %.0f s (%s)", self.endpoint.key, now - self._since, self)
        elif self._silent and not silent:
            log.info("%s: publishes KV events now", self.endpoint.key)
        self._silent = silent and now - self._since >= self._settings.silent_s

    def __str__(self) -> str:
        if self._settings.bind:
            return f"bound to {self._subscriber.bound}"
        if self._subscriber.followers.get(self.endpoint) is None:
            return "its model is not known" if self._source else "it tells no source"
        return f"dialled {self._source.events}" if self._source else "not dialled"

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except zmq.ZMQError as error:
                log.warning("%s: KV events: %s", self.endpoint.key, error)
            except Exception:
                self._subscriber.counters["faults"] += 1
                log.exception("%s: following KV events failed", self.endpoint.key)
            if follower := self._subscriber.followers.get(self.endpoint):
                follower.disconnected()
            await asyncio.sleep(self._settings.retry_s)

    async def _follow(self) -> None:
        """Until the connection is lost to a worker that may come back on other ports."""
        self._source = source = await self._find()
        if self._settings.bind:
            if follower := self._subscriber.followers.get(self.endpoint):  # again, after a fault
                self.plan(follower.connected(self._subscriber.now))
            await self._replay_when_asked(source)
            return
        follower = await self._begin(replay=bool(source.replay))
        with self._subscriber.subscribing() as socket:
            # Before connecting: a handshake that nobody watched would leave the worker without its first replay.
            monitor: Any = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            tasks: list[asyncio.Task[None]] = []
            try:
                socket.connect(source.events)
                tasks += [
                    asyncio.create_task(work)
                    for work in (
                        self._watch(monitor, follower),
                        self._receive(socket, follower),
                        self._replay_when_asked(source),
                    )
                ]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                socket.disable_monitor()
                monitor.close(linger=0)

    async def _begin(self, *, replay: bool) -> Follower:
        """The follower, as soon as the model is known."""
        while True:
            follower = self._subscriber.follow(self.endpoint, replay=replay)
            if follower is not None:
                return follower
            await asyncio.sleep(_TICK_S)

    async def _find(self) -> Source:
        """Where the worker publishes; asked again and again until it tells."""
        settings, endpoint = self._settings, self.endpoint
        if settings.bind:
            return sources.configured(endpoint.host, endpoint.rank, 0, settings.replay_port)
        if settings.events_port is not None:
            return sources.configured(endpoint.host, endpoint.rank, settings.events_port, settings.replay_port)
        while True:
            source = sources.told(await self._subscriber.sources(endpoint), endpoint.host, endpoint.rank)
            if source is not None:
                return source
            self._subscriber.counters["no_source"] += 1
            await asyncio.sleep(settings.retry_s)

    async def _watch(self, monitor: Any, follower: Follower) -> None:
        """Tell the follower of connections. Ends when the worker should be asked for its ports again."""
        while True:
            message = await recv_monitor_message(monitor)
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                await asyncio.sleep(self._settings.settle_s)
                self.plan(follower.connected(self._subscriber.now))
                await self._subscriber.work(follower)
            elif message["event"] == zmq.EVENT_DISCONNECTED:
                follower.disconnected()
                if self._settings.events_port is None:
                    return

    async def _receive(self, socket: zmq.asyncio.Socket, follower: Follower) -> None:
        def take(frames: list[bytes]) -> Follower:
            self.plan(self._subscriber.take_live(follower, frames))
            return follower

        while True:
            await socket.poll()
            await self._subscriber.pump(socket, take)

    async def _replay_when_asked(self, source: Source) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            follower = self._subscriber.followers.get(self.endpoint)
            if self._wanted is None or follower is None:
                continue
            async with self._subscriber.replaying():
                start, self._wanted = self._wanted, None
                follower.asked(self._subscriber.now)
                with self._subscriber.ask(source) as socket:
                    await socket.send_multipart([b"", start.to_bytes(8, "big")])
                    await self._receive_replay(socket, follower)

    async def _receive_replay(self, socket: zmq.asyncio.Socket, follower: Follower) -> None:
        """Until the replay has ended, was given up, or another one is wanted."""

        def take(frames: list[bytes]) -> Follower:
            if self._wanted is None:
                self.plan(follower.replayed(frames, self._subscriber.now))
            return follower

        while follower.asking and self._wanted is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await socket.poll()
            await self._subscriber.pump(socket, take)
