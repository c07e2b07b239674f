"""What the configuration of the moment wants known besides gauges: token ids of prompts, and workers' KV events.

In: the scheduler in force (its configuration names the models, its precise producer how events are had), the pool. Out:
`Tokens` for the director, followers for the producer. Loading a model's tokenizer takes a second or two and runs in a
thread; until a new one is ready the old one serves. A producer that a reload keeps keeps its subscriptions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from epp.endpoint import Endpoint, Pool
from epp.kvcache.events.subscriber import EventsSettings, Subscriber
from epp.kvcache.precise import PrecisePrefixCache
from epp.kvcache.tokens import ModelFolderError, Tokens
from epp.model_config import ModelConfig
from epp.scheduler import Scheduler

log = logging.getLogger("kvsteer")


class Knowledge:
    """Follows the configuration; `replace` is told of every new `Tokens`, None when no model is registered."""

    def __init__(self, pool: Pool, replace: Callable[[Tokens | None], None]) -> None:
        self.tokens: Tokens | None = None
        self.producer: PrecisePrefixCache | None = None
        self.subscriber: Subscriber | None = None
        self._pool = pool
        self._replace = replace
        self._models: tuple[ModelConfig, ...] = ()
        self._asleep: set[Endpoint] = set()
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def configure(self, scheduler: Scheduler) -> None:
        """Load what is new, follow what is to be followed.

        Raises ModelFolderError and ValueError (an address that cannot be bound); what was there before stays.
        """
        async with self._lock:
            await self._load(scheduler.config.models)
            found = [p for p in scheduler.plugins.values() if isinstance(p, PrecisePrefixCache)]
            await self._subscribe(found[0] if found else None)

    def reconfigure(self, scheduler: Scheduler) -> None:
        """The same in the background, for a running picker: what fails is logged."""
        task = asyncio.create_task(self._reconfigure(scheduler))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def changed(self, joined: Sequence[Endpoint], left: Sequence[Endpoint]) -> None:
        """A discovery listener: who is to be followed."""
        self._asleep.difference_update(left)
        if self.subscriber is not None:
            self.subscriber.changed(joined, left)

    def scraped(self, endpoint: Endpoint) -> None:
        """An endpoint's metrics were read. One that sleeps holds nothing, and would say so only when it wakes."""
        if not endpoint.asleep:
            self._asleep.discard(endpoint)
        elif endpoint not in self._asleep:
            self._asleep.add(endpoint)
            follower = self.subscriber.followers.get(endpoint) if self.subscriber is not None else None
            if follower is not None:
                follower.emptied()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._subscribe(None)
        if self.tokens is not None:
            await self.tokens.client.close()

    async def _reconfigure(self, scheduler: Scheduler) -> None:
        try:
            await self.configure(scheduler)
        except (ModelFolderError, ValueError) as error:
            log.error(
                "what the changed configuration wants known cannot be had, what was known before stays: %s", error
            )

    async def _load(self, models: tuple[ModelConfig, ...]) -> None:
        if models == self._models:
            return
        tokens = await asyncio.to_thread(Tokens, models, parent=self._parent) if models else None
        old, self.tokens, self._models = self.tokens, tokens, models
        self._replace(tokens)
        if old is not None:
            await old.client.close()

    async def _subscribe(self, producer: PrecisePrefixCache | None) -> None:
        if producer is self.producer:
            return
        subscriber = None
        if producer is not None:
            p = producer.parameters
            settings = EventsSettings(events_port=p.events_port, replay_port=p.replay_port, bind=p.bind, topic=p.topic)
            subscriber = Subscriber(producer.index, settings, model=self._model)
            subscriber.start()
            producer.followers = subscriber.followers
            subscriber.changed(self._pool.endpoints, ())
        old, self.subscriber, self.producer = self.subscriber, subscriber, producer
        if old is not None:
            await old.stop()

    def _model(self, endpoint: Endpoint) -> str | None:
        """The registered name of the model an endpoint serves, once it has told its models."""
        if self.tokens is None or endpoint.models is None:
            return None
        return self.tokens.registered(sorted(endpoint.models))

    def _parent(self, adapter: str) -> str:
        """The base model of an adapter, as some worker tells; "" when none does."""
        return next((e.parents[adapter] for e in self._pool.endpoints if adapter in e.parents), "")
