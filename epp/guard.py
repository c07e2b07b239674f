"""The guard: calls plugins so that a faulty one costs its own contribution and nothing else.

In: a plugin and a call. Out: its result, or a `Fault`. Shipped plugins are called straight; a foreign one runs on a
thread of its own under a time limit, because a plugin that hangs would otherwise stop every request. After a timeout it
is left out for `retry_after_s`, then one request tries it again, and only once its thread has come back. (A foreign
plugin that spins in pure Python still takes its share of the interpreter; the guard bounds waiting, not CPU.)
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from epp.plugin import Candidates, InferenceRequest, Plugin
from epp.registry import is_shipped

log = logging.getLogger("kvsteer.plugins")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a foreign plugin may take, and how long one that took longer is left out."""

    time_limit_s: float = 0.02
    retry_after_s: float = 30.0


class Fault(Exception):
    """A plugin gave no usable result. `kind` is a fixed name: raised, timeout, quarantined, shape, nan."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class Faults:
    """Counts faults by (plugin name, kind) and logs the first of each."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def note(self, plugin: str, fault: Fault) -> None:
        key = (plugin, fault.kind)
        self.counts[key] += 1
        if self.counts[key] == 1:
            log.error(
                "plugin %s is at fault and left out where it is (logged once): %s",
                plugin,
                fault,
                exc_info=fault.__cause__,
            )

    def by_kind(self) -> dict[str, float]:
        """Faults of all plugins by kind, hooks included."""
        totals: dict[str, float] = {}
        for (_, kind), count in self.counts.items():
            totals[kind] = totals.get(kind, 0) + count
        return totals


class Guard:
    """Calls the methods of one plugin. `now` is the time of the caller's clock, seconds."""

    def __init__(self, plugin: Plugin[Any], limits: Limits) -> None:
        self.plugin = plugin
        self._limits = limits
        self.inline = is_shipped(type(plugin))
        """Called straight, and trusted to give what its contract says."""
        self._worker: _Worker | None = None
        self._until = float("-inf")

    def call(self, now: float, function: Callable[..., T], *args: Any) -> T:
        """The result of `function(*args)`, which may itself raise Fault; raises Fault and nothing else."""
        if self.inline:
            try:
                return function(*args)
            except Fault:
                raise
            except Exception as error:
                raise _raised(error) from error
        return self._call_guarded(now, function, args)

    def _call_guarded(self, now: float, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        if self._worker is None:
            self._worker = _Worker(self.plugin.name)
            # The thread ends with the guard: requests picked before a reload still tell the old plugin how they ended.
            weakref.finalize(self, self._worker.calls.put, None)
        if now < self._until or self._worker.busy:
            raise Fault("quarantined")
        # What it assigns to these, even when it was given up and wakes later, reaches nobody else.
        args = tuple(copy(arg) if isinstance(arg, InferenceRequest | Candidates) else arg for arg in args)
        call = self._worker.start(function, args)
        if not call.done.acquire(timeout=self._limits.time_limit_s):
            self._until = now + self._limits.retry_after_s
            raise Fault("timeout", f"no answer in {self._limits.time_limit_s * 1000:g} ms")
        if isinstance(call.error, Fault):
            raise call.error
        if call.error is not None:
            raise _raised(call.error) from call.error
        result: T = call.result
        return result


def _raised(error: BaseException) -> Fault:
    try:
        said = str(error)
    except Exception:  # it is the plugin's own
        said = "(its text cannot be made)"
    return Fault("raised", f"{type(error).__name__}: {said}"[:500])


class _Call:
    __slots__ = ("args", "done", "error", "function", "result")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.done = threading.Lock()
        self.done.acquire()
        self.result: Any = None
        self.error: BaseException | None = None


class _Worker:
    """One daemon thread that runs calls one after another."""

    def __init__(self, name: str) -> None:
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.busy = False
        threading.Thread(target=self._run, name=f"plugin {name}", daemon=True).start()

    def start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> _Call:
        call = _Call(function, args)
        self.busy = True
        self.calls.put(call)
        return call

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call.result = call.function(*call.args)
            except BaseException as error:  # also SystemExit: a plugin must not end the thread
                call.error = error
            self.busy = False
            call.done.release()
            del call
