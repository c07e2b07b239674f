"""Scraping: what every endpoint says of itself, twice a second, into its row of the pool.

In: the pool's members, through `changed` (a discovery listener). Out: the columns `waiting`, `running`, `kv_usage`,
`scraped_at`, the count of unseen requests, the endpoint's `lora`, `block_size`, `cache_blocks`, `models`, `engine`; and
one outcome per scrape to a listener (health).

One task an address, each with its own timeout, the next scrape only after the last: a worker that accepts and never
answers delays nobody, and nothing piles up. Where an engine can answer for chosen families alone, it is asked so. Of
several data-parallel ranks behind an address the page is read once, and shared out among their endpoints.

When scrapes fail, the last values stand and `scraped_at` tells their age: from `Candidates.fresh` they are stale. After
`forget_s` they are unknown (NaN): a queue length of half a minute ago is worth less than the picker's own counts.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import msgspec

from epp.endpoint import Endpoint
from epp.signals import engines
from epp.signals.outcome import Outcome
from epp.signals.prometheus_text import MAX_PAGE_BYTES

log = logging.getLogger(__name__)

MAX_MODELS_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """Times in seconds."""

    interval_s: float = 0.5
    max_rate: float = 200.0
    """Scrapes a second over the whole pool: a bigger pool is scraped less often. One costs about 0.4 ms of CPU."""
    timeout_s: float = 1.0
    models_interval_s: float = 10.0
    forget_s: float = 30.0
    scheme: str = "http"
    verify: bool = False
    """With https: check the worker's certificate. Workers commonly show self-signed ones."""


Listener = Callable[[Endpoint, float, Outcome], None]

# Good pages that lack a gauge; lines that could not be read; /v1/models likewise; faults of our own.
COUNTERS = ("unknown_waiting", "unknown_running", "unknown_kv_usage", "malformed_lines", "models_failed", "faults")


class Scraper:
    """Scrapes the endpoints it was told of until they leave."""

    def __init__(
        self,
        settings: ScrapeSettings,
        *,
        clock: Callable[[], float],
        random: Random,
        listener: Listener = lambda endpoint, now, outcome: None,
    ) -> None:
        self.settings = settings
        self.counters: Counter[str] = Counter(dict.fromkeys((*Outcome, *COUNTERS), 0))
        """Scrapes by outcome, and those named in `COUNTERS`."""
        self._clock = clock
        self._random = random
        self._listener = listener
        self._targets: dict[str, _Target] = {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def interval_s(self) -> float:
        """Seconds between two scrapes of one address, for a pool of this size."""
        return max(self.settings.interval_s, len(self._targets) / self.settings.max_rate)

    def changed(self, joined: Sequence[Endpoint], left: Sequence[Endpoint]) -> None:
        """Begin with those that joined, end with those that left. Called on the event loop."""
        for endpoint in left:
            target = self._targets.get(endpoint.address)
            if target is None or endpoint not in target.ranks:
                continue
            target.ranks.remove(endpoint)
            if not target.ranks:
                target.task.cancel()
                del self._targets[endpoint.address]
        for endpoint in joined:
            if target := self._targets.get(endpoint.address):
                target.ranks.append(endpoint)
            else:
                target = self._targets[endpoint.address] = _Target(endpoint)
                target.task = asyncio.get_running_loop().create_task(self._run(target))

    async def stop(self) -> None:
        tasks = [target.task for target in self._targets.values()]
        self._targets.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _run(self, target: _Target) -> None:
        # Spread the first scrapes, so that a big pool is not scraped in bursts ever after.
        spread_s = max(min(self.settings.interval_s, 0.2), len(self._targets) / self.settings.max_rate)
        await asyncio.sleep(self._random.random() * spread_s)
        while True:
            try:
                await self._turn(target)
            except Exception:
                # A fault of ours or of the library must not end an endpoint's scraping for good.
                self.counters["faults"] += 1
                log.exception("%s: scraping failed", target.address)
            await asyncio.sleep(self.interval_s * self._random.uniform(0.9, 1.1))

    async def _turn(self, target: _Target) -> None:
        outcome = await self._scrape(target)
        now = self._clock()
        self.counters[outcome] += 1
        for endpoint in target.ranks:
            if outcome is not Outcome.GOOD and now - endpoint.get("scraped_at") > self.settings.forget_s:
                _forget(endpoint)
            self._listener(endpoint, now, outcome)
        if now >= target.models_due and outcome not in (Outcome.REFUSED, Outcome.TIMEOUT):
            target.models_due = now + self.settings.models_interval_s
            await self._models(target)

    async def _scrape(self, target: _Target) -> Outcome:
        scraped = tuple(target.ranks)
        for endpoint in scraped:
            endpoint.scrape_began()
        outcome, reading = await self._read(target)
        if target.narrow and outcome not in (Outcome.REFUSED, Outcome.TIMEOUT) and not target.tells_all(reading):
            target.widen()
            outcome, reading = await self._read(target)
        if outcome is Outcome.GOOD:
            self._apply(target, reading, scraped)
            return outcome
        target.failed(outcome)
        target.report(outcome)
        return outcome

    async def _read(self, target: _Target) -> tuple[Outcome, engines.Reading]:
        outcome, page = await self._get(target.address, target.path, MAX_PAGE_BYTES)
        if outcome is not Outcome.GOOD:
            return outcome, engines.NOTHING
        reading = engines.read(page, target.engine, target.ranks[0].ranks)
        self.counters["malformed_lines"] += reading.malformed
        return (outcome if reading.engine else Outcome.UNREADABLE), reading

    def _apply(self, target: _Target, reading: engines.Reading, scraped: Sequence[Endpoint]) -> None:
        if target.engine not in ("auto", reading.engine):
            log.warning("%s: said to be %s, its metrics are those of %s", target.address, target.engine, reading.engine)
        now, unknown = self._clock(), set(reading.unknown)
        for endpoint in scraped:
            own = reading.by_rank[endpoint.rank] if endpoint.rank < len(reading.by_rank) else reading
            endpoint.engine = own.engine
            endpoint.set("waiting", own.waiting)
            endpoint.set("running", own.running)
            endpoint.set("kv_usage", own.kv_usage)
            endpoint.lora = own.lora
            endpoint.asleep = own.asleep
            endpoint.block_size = own.block_size or endpoint.block_size
            endpoint.cache_blocks = own.cache_blocks or endpoint.cache_blocks
            endpoint.scrape_succeeded(now)
            unknown.update(own.unknown)
        target.succeeded(reading)
        for gauge in unknown:
            self.counters[f"unknown_{gauge}"] += 1
        target.report(Outcome.GOOD, sorted(unknown))

    async def _models(self, target: _Target) -> None:
        """Read `/v1/models`. Where there is none, or it cannot be read, what was known stays."""
        outcome, body = await self._get(target.address, "/v1/models", MAX_MODELS_BYTES)
        models = parse_models(body) if outcome is Outcome.GOOD else None
        if models is None:
            self.counters["models_failed"] += 1
            return
        for endpoint in target.ranks:
            endpoint.models = frozenset(models)
            endpoint.parents = {name: parent for name, parent in models.items() if parent}

    async def _get(self, address: str, path: str, limit: int) -> tuple[Outcome, bytes]:
        session = self._session or self._open_session()
        body = bytearray()
        try:
            async with session.get(f"{self.settings.scheme}://{address}{path}", allow_redirects=False) as response:
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > limit:
                        response.close()
                        return Outcome.UNREADABLE, b""
                return (Outcome.GOOD if response.status == 200 else Outcome.STATUS), bytes(body)
        except TimeoutError:
            return Outcome.TIMEOUT, b""
        except (aiohttp.ClientConnectionError, OSError):
            return Outcome.REFUSED, b""
        except aiohttp.ClientError:
            return Outcome.UNREADABLE, b""

    def _open_session(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            # The library's default of 100 connections would let a hundred hung workers stop all scraping.
            connector=aiohttp.TCPConnector(limit=0, ssl=self.settings.verify),
            timeout=aiohttp.ClientTimeout(total=self.settings.timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Compression would cost the worker more than the wire.
            headers={"Accept": "text/plain, application/json", "Accept-Encoding": "identity"},
        )
        return self._session


class _Target:
    """What scraping one address remembers between scrapes: above all, which path to ask.

    The engine's usual path, or in turn with the other one while none answers; once its engine is known, the narrow
    page, unless that tells less than the whole one did.
    """

    __slots__ = ("address", "models_due", "narrow", "narrow_fails", "path", "ranks", "reported", "task", "told")

    task: asyncio.Task[None]

    def __init__(self, endpoint: Endpoint) -> None:
        self.address = endpoint.address
        self.ranks = [endpoint]
        """Never empty while the address is scraped."""
        self.models_due = -math.inf
        self.narrow = False
        self.narrow_fails = False
        self.path = _usual_path(endpoint)
        self.reported: tuple[str, ...] = ()
        self.told: tuple[bool, ...] = ()

    @property
    def engine(self) -> str:
        return self.ranks[0].engine

    def succeeded(self, reading: engines.Reading) -> None:
        url = engines.BY_NAME[reading.engine].narrow_url
        if url and not self.narrow and not self.narrow_fails:
            self.narrow, self.path, self.told = True, url, reading.told

    def tells_all(self, reading: engines.Reading) -> bool:
        """The narrow page has what the whole one had."""
        return all(now or not before for now, before in zip(reading.told, self.told, strict=True))

    def widen(self) -> None:
        self.narrow, self.narrow_fails, self.path = False, True, _usual_path(self.ranks[0])

    def failed(self, outcome: Outcome) -> None:
        if outcome is Outcome.REFUSED:
            # What answers next may be a new process, of another version.
            self.narrow, self.narrow_fails, self.path = False, False, _usual_path(self.ranks[0])
        elif outcome is not Outcome.TIMEOUT:
            self.path = "/metrics" if self.path != "/metrics" else engines.OTHER_PATH

    def report(self, outcome: Outcome, unknown: Sequence[str] = ()) -> None:
        """Log a change of state once, not every half second."""
        state = (outcome, *unknown)
        if state == self.reported:
            return
        if outcome is not Outcome.GOOD:
            log.warning("%s: metrics cannot be read: %s", self.address, outcome)
        elif unknown:
            log.warning("%s: %s does not tell %s", self.address, self.engine, ", ".join(unknown))
        elif self.reported:
            log.info("%s: metrics are read again", self.address)
        self.reported = state


def parse_models(body: bytes) -> dict[str, str] | None:
    """`/v1/models` (OpenAI's list, vLLM's `parent` for adapters) as name -> parent, "" for none. None: unreadable."""
    try:
        document: Any = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        return None
    models: dict[str, str] = {}
    for item in data:
        if isinstance(item, dict) and isinstance(name := item.get("id"), str):
            parent = item.get("parent")
            models[name] = parent if isinstance(parent, str) else ""
    return models


def _usual_path(endpoint: Endpoint) -> str:
    known = engines.BY_NAME.get(endpoint.engine)
    return known.path if known else "/metrics"


def _forget(endpoint: Endpoint) -> None:
    for gauge in ("waiting", "running", "kv_usage"):
        endpoint.set(gauge, math.nan)
    endpoint.lora = None
