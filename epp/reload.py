"""Hot reload: a new configuration file takes effect without a restart, and a bad one takes none.

In: the path of the configuration and the scheduler at work. Out: a call with the new `Scheduler` for every change that
could be used. The file is watched by its identity (inode, size, time of change), which also sees the way Kubernetes
swaps a mounted ConfigMap; `trigger` (for SIGHUP) reads it in any case, so that a changed plugin file is taken too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from epp.config import ConfigError, PickerConfig, load
from epp.registry import Registry
from epp.scheduler import Scheduler

log = logging.getLogger("kvsteer.config")


class ConfigWatcher:
    """Watches one file. `run` is a task; `taken` and `refused` count what happened to changes."""

    def __init__(
        self,
        path: str | Path,
        current: Callable[[], Scheduler],
        replace: Callable[[Scheduler], None],
        *,
        interval_s: float = 1.0,
        registry: Registry | None = None,
    ) -> None:
        """`current` gives the scheduler at work; `replace` puts a new one in its place. Both are called on the loop."""
        self.path = Path(path)
        self.taken = 0
        self.refused = 0
        self._current = current
        self._replace = replace
        self._interval_s = interval_s
        self._registry = registry
        self._seen = _identity(self.path)
        self._wanted = asyncio.Event()

    def trigger(self) -> None:
        """Read the file soon, changed or not."""
        self._wanted.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            try:
                await self.check(force=self._wanted.is_set())
            except Exception:  # a fault of ours must not end the watch, nor serving
                self.refused += 1
                log.exception("the configuration could not be taken")

    async def check(self, *, force: bool = False) -> bool:
        """Take the file if it changed (or `force`); True when a new scheduler went to work."""
        self._wanted.clear()
        identity = await asyncio.to_thread(_identity, self.path)
        if identity == self._seen and not force:
            return False
        self._seen = identity
        try:
            new = await asyncio.to_thread(self._build, self._current())
        except ConfigError as error:
            self.refused += 1
            log.error("the changed configuration is refused, the one before stays in force:\n%s", error)
            return False
        self._replace(new)
        self.taken += 1
        announce(new.config)
        return True

    def _build(self, current: Scheduler) -> Scheduler:
        """Runs on a thread: a foreign plugin may take its time to load."""
        return Scheduler(load(self.path, self._registry), previous=current)


def announce(config: PickerConfig) -> None:
    """Log that a configuration is in force, and its warnings."""
    for warning in config.warnings:
        log.warning("%s", warning)
    log.info("configuration in force: %s", config.source)


def _identity(path: Path) -> tuple[int, int, int, int] | None:
    """None while there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
