"""Keeping a collection equal to the API server's: list, watch from there, list again when that is lost. Sans-IO.

In: what the server answered, and `now`. Out: what to do next (`List`, `Watch`, `Wait`), and the collection as it is
known. The rules are those of Kubernetes' API conventions ("Efficient detection of changes"):

- A list is read in pages at the newest version; the collection is replaced by it as a whole, so that what was deleted
  while nobody watched is gone.
- A watch goes on from the last version seen, in an event or a bookmark. A server that ends it says nothing by that.
- One that is cut, or cannot be had, may mean a server that was restored from a backup and counts the same versions
  anew: nothing but a list tells.
- 410 comes as a status or as an event of an open watch. Either means: list again. So does every other refusal of a
  watch, which costs one list where the version alone was at fault.
- What cannot be reached or is refused is tried again, later each time, spread by chance; `Retry-After` is kept to.
- Versions are opaque: they are handed back, never compared.

Own code, because none of the Python clients reports what was deleted between an expired watch and the next list.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")
PAGE = 500
"""Objects of one list answer, as kubectl asks for."""
MAX_LINE_BYTES = 8 << 20
"""Longest event of a watch: etcd takes objects up to 1.5 MiB, and JSON may spell them longer."""
WATCH_S = (240.0, 480.0)
"""How long the server is asked to keep a watch; drawn, so that replicas do not come back together."""
SHORT_S = 1.0
"""A watch that ended sooner and brought nothing was no watch."""
MAX_RETRY_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class List:
    """Ask for a page of the list."""

    continue_token: str = ""
    limit: int = PAGE


@dataclass(frozen=True, slots=True)
class Watch:
    """Watch from a version on, for about so many seconds."""

    version: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing until `until`, on the clock that `now` is from."""

    until: float


Action = List | Watch | Wait


class Trouble(StrEnum):
    """What keeps the collection from being known. The values are the words of logs and reasons."""

    NOT_FOUND = "the API server does not have this resource (404)"
    FORBIDDEN = "the API server does not allow it (403)"
    UNAUTHORIZED = "the API server does not know who asks (401)"
    UNREACHABLE = "the API server cannot be reached"
    FAILED = "the API server answers with errors"


class ListWatch(Generic[T]):
    """One collection. `read` makes of an object's JSON what is kept of it; ValueError: it is not one."""

    def __init__(
        self,
        read: Callable[[dict[str, Any]], T],
        *,
        random: Random,
        retry_s: tuple[float, float] = (0.5, 30.0),
        absent_retry_s: float = 30.0,
    ) -> None:
        self.objects: dict[str, T] = {}
        """`namespace/name` -> object. Replaced or changed in place; `version` tells when."""
        self.synced = False
        """It was listed whole once."""
        self.version = 0
        """Grows with each change of `objects`."""
        self.trouble: Trouble | None = None
        self.counters: Counter[str] = Counter(
            lists=0, watches=0, events=0, bookmarks=0, expired=0, failures=0, unreadable=0
        )
        self._read = read
        self._random = random
        self._retry_s = retry_s
        self._absent_retry_s = absent_retry_s
        self._pages: dict[str, T] | None = None
        self._token = ""
        self._from = ""
        self._failures = 0
        self._not_before = -math.inf
        self._line = bytearray()
        self._watch_began = 0.0
        self._watch_brought = False
        self._over = False

    def step(self, now: float) -> Action:
        """What to do now. Ask again after every answer."""
        if now < self._not_before:
            return Wait(self._not_before)
        if not self._from:
            return List(self._token)
        self._line.clear()
        self._watch_began, self._watch_brought, self._over = now, False, False
        return Watch(self._from, round(self._random.uniform(*WATCH_S)))

    # A list

    def listed(self, page: dict[str, Any], now: float) -> None:
        """A page of the list is there."""
        metadata, items = page.get("metadata"), page.get("items")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        if not isinstance(version, str) or not version or not isinstance(items, list | None):
            self.failed(None, now)
            return
        if self._pages is None:
            self._pages = {}
        for item in items or ():
            self._put(self._pages, item)
        self._token = str(metadata.get("continue") or "") if isinstance(metadata, dict) else ""
        if self._token:
            return
        self.counters["lists"] += 1
        changed = self._pages != self.objects or not self.synced
        self.objects, self._pages, self._from = self._pages, None, version
        self.synced, self.trouble = True, None
        self.version += changed

    # A watch

    def watching(self) -> None:
        """The server granted the watch."""
        self.counters["watches"] += 1
        self.trouble = None

    def received(self, data: bytes) -> bool:
        """Bytes of the watch. False: it is of no use any more, end it."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
        self._line += rest
        for line in lines:
            if line.strip():
                self._event(line)
        if len(self._line) > MAX_LINE_BYTES:
            self._lost()
        return not self._over

    def watch_ended(self, now: float, *, properly: bool = True) -> None:
        """The server ended the watch, or (not properly) the connection broke; what of a line was there is dropped."""
        self._line.clear()
        if not properly:
            self._from = ""
        if self._watch_brought or now - self._watch_began >= SHORT_S:
            self._failures = 0
        else:
            self._back_off(now, slight=self._over)

    # Failures of either

    def failed(self, status: int | None, now: float, *, retry_after_s: float | None = None) -> None:
        """A list or a watch was refused with an HTTP status, or (None) could not be had at all."""
        self._pages, self._token = None, ""
        if status == 410:
            self.counters["expired"] += 1
            self._from = ""
            self._back_off(now, slight=True)
            return
        self.counters["failures"] += 1
        self.trouble = _TROUBLES.get(status, Trouble.FAILED) if status is not None else Trouble.UNREACHABLE
        if status not in (401, 429, 502, 503):
            # 500 and 504 may say "Too large resource version", after a server lost what it had.
            self._from = ""
        if status == 404 and (self.objects or not self.synced):
            # The resource is gone, and so is everything that was of it.
            self.objects, self.synced = {}, True
            self.version += 1
        self._back_off(now, at_least_s=min(retry_after_s or 0.0, MAX_RETRY_AFTER_S), absent=status in (403, 404))

    def _event(self, line: bytes) -> None:
        if self._over:
            return
        try:
            event = msgspec.json.decode(line)
            kind, obj = event["type"], event["object"]
            version = obj["metadata"].get("resourceVersion") if kind != "ERROR" else ""
        except (msgspec.DecodeError, RecursionError, TypeError, KeyError, AttributeError):
            self.counters["unreadable"] += 1
            self._lost()
            return
        if kind == "ERROR":
            self.counters["expired"] += isinstance(obj, dict) and obj.get("code") == 410
            self._lost()
            return
        self._watch_brought = True
        if isinstance(version, str) and version:
            self._from = version
        if kind == "BOOKMARK":
            self.counters["bookmarks"] += 1
            return
        self.counters["events"] += 1
        if kind == "DELETED":
            self.version += self.objects.pop(_key(obj), None) is not None
        elif kind in ("ADDED", "MODIFIED"):
            before = self.objects.get(_key(obj))
            self._put(self.objects, obj)
            self.version += self.objects.get(_key(obj)) != before

    def _put(self, objects: dict[str, T], obj: Any) -> None:
        try:
            key = _key(obj)
        except (TypeError, KeyError):
            self.counters["unreadable"] += 1
            return
        try:
            objects[key] = self._read(obj)
        except ValueError:
            # What cannot be understood is not what it was either.
            objects.pop(key, None)
            self.counters["unreadable"] += 1

    def _lost(self) -> None:
        """What this watch would still bring cannot be trusted: list again."""
        self._over = True
        self._from = ""

    def _back_off(self, now: float, *, at_least_s: float = 0.0, absent: bool = False, slight: bool = False) -> None:
        first, longest = self._retry_s
        delay = min(first * 2.0 ** min(self._failures, 16), longest)
        self._failures += 1
        if absent:
            delay = max(delay, self._absent_retry_s)
        if slight and self._failures == 1:
            delay = 0.0
        self._not_before = now + max(at_least_s, delay * self._random.uniform(0.5, 1.0))


_TROUBLES = {404: Trouble.NOT_FOUND, 403: Trouble.FORBIDDEN, 401: Trouble.UNAUTHORIZED}


def _key(obj: Any) -> str:
    metadata = obj["metadata"]
    return f"{metadata.get('namespace') or ''}/{metadata['name']}"
