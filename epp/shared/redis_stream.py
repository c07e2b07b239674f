"""Messages of replicas through a stream of Redis or Valkey; snapshots for newcomers through a list.

In: `SharedState`, which is told and asked; the address of a server. Out: entries of one stream, trimmed to a length.

The server is never waited for: writing and reading are tasks of their own with a timeout on every answer. While the
server is down, slow, paused or full, messages are dropped, decisions carry a reason, and after a growing pause it is
tried again. Own messages come back on the stream too: they show that it works from end to end, and how late it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from epp.shared.messages import Unreadable, decode_chunk, encode
from epp.shared.state import LOST, SharedState

log = logging.getLogger(__name__)

SCHEMES = ("redis", "rediss", "unix")
FIELD = b"m"
READ_AT_ONCE = 32
BLOCK_S = 1.0
IDLE_S = 0.1
"""How often it is looked whether there is something to tell, when nobody says so: first tokens change loads."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
EXPIRE_S = 3600
"""A stream that nobody writes to goes."""
CHUNKS_AHEAD = 8
"""Chunks of a snapshot that lie on the server at once."""
SNAPSHOT_EXPIRE_S = 60
POLL_S = 0.02
WAIT_S = 10.0
"""How long the giver of a snapshot waits for chunks to be taken, and its taker for the next one."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Where and how. Times in milliseconds, as they are written in the address."""

    url: str
    """Without our own settings; may hold a password, so it is not for the log."""
    where: str
    """For the log."""
    stream: str = "kvsteer"
    maxlen: int = 2000
    """Entries the stream is trimmed to, about."""
    interval_ms: int = 10
    """Least time between two messages of one replica."""
    timeout_ms: int = 1000
    """An answer that takes longer is a failure."""


_BOUNDS = {"maxlen": (100, 1_000_000), "interval_ms": (1, 1000), "timeout_ms": (10, 60_000)}


def parse_url(url: str) -> StreamSettings:
    """`redis://host:port/db?stream=NAME&maxlen=N&interval_ms=N&timeout_ms=N`. Raises ValueError with a sentence."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(
            f"--shared-state: write redis://HOST:PORT/DB, rediss:// for TLS or unix:// (not {parts.scheme}:)"
        )
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"--shared-state: {error}") from error
    if parts.scheme != "unix" and not parts.hostname:
        raise ValueError("--shared-state: the host is missing: write redis://HOST:PORT/DB")
    if parts.scheme != "unix" and not (parts.path.strip("/") or "0").isdecimal():
        raise ValueError(f"--shared-state: the database is a number, not {parts.path.strip('/')!r}")
    where = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{port or 6379}"
    ours: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "stream" and 0 < len(value) <= 200:
            ours[name] = value
        elif name in _BOUNDS:
            low, high = _BOUNDS[name]
            if not (value.isascii() and value.isdecimal() and low <= int(value) <= high):
                raise ValueError(f"--shared-state: {name}={value} is not a number from {low} to {high}")
            ours[name] = int(value)
        else:
            known = ", ".join(f.name for f in fields(StreamSettings)[2:])
            raise ValueError(f"--shared-state: {name}={value} is not known; there are {known}")
    return StreamSettings(urlunsplit(parts._replace(query="")), where, **ours)


class RedisMissing(Exception):
    """redis-py is not installed."""


class RedisStream:
    """Carries the messages of one `SharedState`."""

    def __init__(
        self, settings: StreamSettings, state: SharedState, *, clock: Callable[[], float], random: Random
    ) -> None:
        """Raises RedisMissing. Connects to nothing yet."""
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
        except ImportError:
            raise RedisMissing("--shared-state needs redis-py: pip install 'kvsteer[redis]'") from None
        self.settings = settings
        self.state = state
        self.counters: Counter[str] = Counter(connects=0, failures=0, faults=0)
        self.lag_s = 0.0
        """How long the last own message took to come back."""
        self._errors = (RedisError, OSError, TimeoutError, asyncio.TimeoutError)
        self._clock = clock
        self._random = random
        self._something = asyncio.Event()
        state.wake = self._something.set
        self._troubles: dict[str, str] = {"telling": "not connected yet", "hearing": "not connected yet"}
        self._said = False
        """That there is trouble, in the log."""
        self._sent: deque[tuple[int, float]] = deque(maxlen=1000)
        """Number of each own message that has not come back, and when it was sent."""
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        timeout_s = settings.timeout_ms / 1000

        def client(patience_s: float = 0.0) -> Any:
            return Redis.from_url(
                settings.url,
                socket_timeout=timeout_s + patience_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                client_name="kvsteer",
            )

        self._writer, self._reader, self._snapshots = client(), client(BLOCK_S), client(BLOCK_S)

    @property
    def connected(self) -> bool:
        """Others can be told and heard."""
        return not any(self._troubles.values())

    def start(self) -> None:
        """Begin; there need not be a server yet."""
        self.state.reason = LOST
        parts = {"telling": self._tell, "hearing": self._hear, "giving": self._give, "taking": self._take}
        self._tasks = [asyncio.create_task(self._keep_up(name, part)) for name, part in parts.items()]

    async def stop(self) -> None:
        """Say good-bye, if that can be had at once."""
        self._stopping = True
        while any(not task.done() for task in self._tasks):
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=1.0)  # a cancellation may be lost in a connection's own clean-up
        with contextlib.suppress(*self._errors):
            async with asyncio.timeout(0.5):
                await self._send(self.state.replica.leave(self._clock()))
        for client in (self._writer, self._reader, self._snapshots):
            with contextlib.suppress(*self._errors):
                await client.aclose()

    def figures(self) -> Mapping[str, float | Mapping[str, float]]:
        """Of this and of the replica, for metrics."""
        return {
            **self.state.replica.counters,
            **self.counters,
            "learner_faults": self.state.faults,
            "connected_open": float(self.connected),
            "peers_open": self.state.replica.peers,
            "lag_seconds": self.lag_s,
        }

    async def _keep_up(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        """Run a part until it fails, and again after a pause that grows while it fails."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping:
            began = self._clock()
            try:
                await part()
            except self._errors as error:
                self._failed(name, f"{type(error).__name__}: {error}")
            except Exception as error:  # a fault of ours must not end the sharing for good
                if not self.counters["faults"]:
                    log.exception("shared state: %s failed (said once)", name)
                self.counters["faults"] += 1
                self._failed(name, f"fault: {type(error).__name__}")
            pause_s = FIRST_PAUSE_S if self._clock() - began > LONGEST_PAUSE_S else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * self._random.uniform(0.7, 1.3))

    def _failed(self, name: str, why: str) -> None:
        self.counters["failures"] += 1
        if name == "telling":
            self.state.replica.failed(self._clock())
            self._sent.clear()
        if name in self._troubles:
            self._troubles[name] = why
            self.state.reason = LOST
            if not self._said:
                self._said = True
                log.warning("shared state: %s: %s; deciding alone until it is back", self.settings.where, why)

    def _works(self, name: str) -> None:
        if self._troubles[name]:
            self._troubles[name] = ""
            if self.connected:
                self._said = False
                self.counters["connects"] += 1
                self.state.reason = ""
                log.info("shared state: %s: connected", self.settings.where)

    # -- messages

    async def _tell(self) -> None:
        interval_s = self.settings.interval_ms / 1000
        while True:
            self._something.clear()
            now = self._clock()
            message = self.state.outgoing(now)
            if message is not None:
                self._sent.append((self.state.replica.seq, now))
                await self._send(message)
                self._works("telling")
                await asyncio.sleep(interval_s)
            if not self._something.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._something.wait()

    async def _send(self, message: bytes) -> None:
        async with self._writer.pipeline(transaction=False) as batch:
            batch.xadd(self.settings.stream, {FIELD: message}, maxlen=self.settings.maxlen, approximate=True)
            batch.expire(self.settings.stream, EXPIRE_S)
            await _execute(batch)

    async def _hear(self) -> None:
        name = self.settings.stream
        newest = await self._reader.xrevrange(name, count=1)
        last: bytes = newest[0][0] if newest else b"0-0"
        self._sent.clear()
        self._works("hearing")
        while True:
            reply = await self._reader.xread({name: last}, count=READ_AT_ONCE, block=round(BLOCK_S * 1000))
            for _, entries in reply or ():
                for number, entry in entries:
                    last = number
                    self._heard(entry.get(FIELD, b""))
                    await asyncio.sleep(0)  # requests come between two messages
            if self._sent and self._clock() - self._sent[0][1] > BLOCK_S + self.settings.timeout_ms / 1000:
                # Too far behind, or the stream has begun anew with lower numbers: begin again at its end.
                raise TimeoutError("own messages do not come back")

    def _heard(self, message: bytes) -> None:
        now = self._clock()
        self.state.replica.heard(message, now)
        echoed = self.state.replica.echoed
        while self._sent and self._sent[0][0] <= echoed:
            self.lag_s = now - self._sent.popleft()[1]

    # -- snapshots

    def _key(self, newcomer: int) -> str:
        return f"{self.settings.stream}:snapshot:{newcomer:x}"

    async def _give(self) -> None:
        """Give those who ask a snapshot, one after the other, no faster than it is taken."""
        requests = self.state.replica.requests
        while True:
            await asyncio.sleep(IDLE_S)
            if not requests:
                continue
            key = self._key(requests.popleft())
            for chunk in self.state.snapshot():
                await self._room(key)
                async with self._writer.pipeline(transaction=False) as batch:
                    batch.rpush(key, encode(chunk))
                    batch.expire(key, SNAPSHOT_EXPIRE_S)
                    await _execute(batch)
            self.state.replica.counters["bootstraps_given"] += 1

    async def _room(self, key: str) -> None:
        """Wait until the taker has taken enough of the chunks."""
        for _ in range(round(WAIT_S / POLL_S)):
            if await self._writer.llen(key) < CHUNKS_AHEAD:
                return
            await asyncio.sleep(POLL_S)
        raise TimeoutError("nobody takes the snapshot")

    async def _take(self) -> None:
        """Take the snapshot that was asked for."""
        replica = self.state.replica
        while True:
            await asyncio.sleep(IDLE_S)
            if not replica.asked:
                continue
            try:
                await self._take_chunks(self._key(replica.origin))
            except (Unreadable, *self._errors) as error:
                log.warning("shared state: no snapshot: %s", error)
                replica.bootstrapped(done=False, now=self._clock())
            else:
                log.info("shared state: took over what another replica knows")
                replica.bootstrapped(done=True, now=self._clock())

    async def _take_chunks(self, key: str) -> None:
        number = 0
        while True:
            async with asyncio.timeout(WAIT_S):
                while (item := await self._snapshots.blpop([key], timeout=BLOCK_S)) is None:
                    pass
            chunk = decode_chunk(item[1])
            if chunk.number != number:
                raise Unreadable(f"part {chunk.number} where {number} was due")
            number += 1
            self.state.take(chunk, self._clock())
            if chunk.last:
                return


async def _execute(batch: Any) -> None:
    """Run a pipeline. Of several errors the first is raised, in the server's words and without the command."""
    for result in await batch.execute(raise_on_error=False):
        if isinstance(result, Exception):
            raise result
