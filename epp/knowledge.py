"""What the configuration of the moment wants known besides gauges: token ids of prompts.

In: the scheduler in force (its configuration names the models), the pool (workers tell their adapters). Out: `Tokens`
for the director. Loading a model's tokenizer takes a second or two and runs in a thread; until a new one is ready the
old one serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from epp.endpoint import Pool
from epp.kvcache.tokens import ModelFolderError, Tokens
from epp.model_config import ModelConfig
from epp.scheduler import Scheduler

log = logging.getLogger("kvsteer")


class Knowledge:
    """Follows the configuration; `replace` is told of every new `Tokens`, None when no model is registered."""

    def __init__(self, pool: Pool, replace: Callable[[Tokens | None], None]) -> None:
        self._pool = pool
        self._replace = replace
        self._models: tuple[ModelConfig, ...] = ()
        self._tokens: Tokens | None = None
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def configure(self, scheduler: Scheduler) -> None:
        """Load what is new. Raises ModelFolderError, and what was loaded before stays."""
        async with self._lock:
            models = scheduler.config.models
            if models != self._models:
                tokens = await asyncio.to_thread(self._load, models) if models else None
                old, self._tokens, self._models = self._tokens, tokens, models
                self._replace(tokens)
                if old is not None:
                    await old.client.close()

    def reconfigure(self, scheduler: Scheduler) -> None:
        """The same in the background, for a running picker: a model that cannot be loaded is logged."""
        self._task = asyncio.create_task(self._reconfigure(scheduler))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._tokens is not None:
            await self._tokens.client.close()

    async def _reconfigure(self, scheduler: Scheduler) -> None:
        try:
            await self.configure(scheduler)
        except ModelFolderError as error:
            log.error("a model of the changed configuration cannot be loaded, those before stay: %s", error)

    def _load(self, models: tuple[ModelConfig, ...]) -> Tokens:
        return Tokens(models, parent=self._parent)

    def _parent(self, adapter: str) -> str:
        """The base model of an adapter, as some worker tells; "" when none does."""
        return next((e.parents[adapter] for e in self._pool.endpoints if adapter in e.parents), "")
