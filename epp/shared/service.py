"""What `kvsteer serve` runs of this room: the shared state, its carrier, and the file it is kept in.

In: the settings, the pool, the plugins in force. Out: the seam for the director, a listener for discovery, numbers for
the metrics. Without settings it does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from epp.endpoint import Endpoint, Pool
from epp.shared.messages import Chunk
from epp.shared.redis_stream import RedisStream, StreamSettings
from epp.shared.state import SharedState
from epp.shared.state_file import Unusable, restore, save

log = logging.getLogger(__name__)

Figures = Callable[[], Mapping[str, float | Mapping[str, float]]]


class SharedService:
    """Of one picker."""

    def __init__(
        self,
        pool: Pool,
        plugins: Callable[[], Mapping[str, object]],
        stream: StreamSettings | None,
        state_file: Path | None,
        *,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises `epp.shared.redis_stream.RedisMissing`."""
        self.state_file = state_file
        self.file_counters: Counter[str] = Counter(restored=0, refused=0, written=0, failed=0)
        self._clock, self._wall = clock, wall
        # Never from a seed: two replicas with the same one must not be taken for one.
        self.state = SharedState(pool, plugins, origin=secrets.randbits(48) or 1, now=clock())
        self.stream = RedisStream(stream, self.state, clock=clock, random=random) if stream is not None else None
        self._restoring: asyncio.Task[None] | None = None

    @property
    def told(self) -> SharedState | None:
        """Whom the director tells of picks; None when nobody listens."""
        return self.state if self.stream is not None else None

    def start(self) -> None:
        if self.stream is not None:
            self.stream.start()
        if self.state_file is not None:
            self._restore(self.state_file)

    async def stop(self) -> None:
        """Say good-bye to the others, and write the file."""
        if self._restoring is not None:
            self._restoring.cancel()
            await asyncio.gather(self._restoring, return_exceptions=True)
        if self.stream is not None:
            await self.stream.stop()
        if self.state_file is not None:
            self._save(self.state_file)

    def changed(self, joined: Sequence[Endpoint], left: Sequence[Endpoint]) -> None:
        """A listener for discovery."""
        self.state.changed(joined, left, self._clock())

    def tick(self) -> None:
        self.state.tick(self._clock())

    def sources(self) -> dict[str, Figures]:
        """For `Metrics.sources`."""
        sources: dict[str, Figures] = {}
        if self.stream is not None:
            sources["shared"] = self.stream.figures
        if self.state_file is not None:
            sources["state_file"] = lambda: self.file_counters
        return sources

    def _restore(self, path: Path) -> None:
        try:
            chunks = restore(path, self._wall())
        except FileNotFoundError:
            return
        except (OSError, Unusable) as error:
            self._refused(path, error)
            return
        self._restoring = asyncio.create_task(self._take(path, chunks))

    async def _take(self, path: Path, chunks: Iterator[Chunk]) -> None:
        try:
            for chunk in chunks:
                self.state.take(chunk, self._clock())
                await asyncio.sleep(0)
        except Unusable as error:
            self._refused(path, error)
        else:
            self.file_counters["restored"] += 1
            log.info("%s: took over what the last run knew", path)

    def _refused(self, path: Path, error: Exception) -> None:
        self.file_counters["refused"] += 1
        log.warning("%s is not used: %s", path, error)

    def _save(self, path: Path) -> None:
        try:
            size = save(path, self.state.snapshot(), self._wall())
        except OSError as error:
            self.file_counters["failed"] += 1
            log.error("%s: the state cannot be written: %s", path, error.strerror or error)
        else:
            self.file_counters["written"] += 1
            log.info("%s: %d KB of state written", path, size >> 10)
