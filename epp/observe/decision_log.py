"""The decision log: what was decided and how it came out, as JSON lines in a file and as the recent ones in memory.

In: a `Decision` when it is made and the `Outcome` when the request ends. Out: one line per sampled request in a file
that is rotated by size, and the last decisions for `/debug/decisions`. The event loop only appends to a queue; a thread
renders, writes and rotates. When the thread cannot keep up or the disk refuses, lines are dropped and counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import msgspec

from epp.decision import Decision
from epp.plugin import Outcome

log = logging.getLogger("kvsteer.decisions")


@dataclass(frozen=True, slots=True)
class LogFile:
    """Where and how much to write."""

    path: Path
    sample: float = 1.0
    """Share of requests written, 0..1."""
    max_bytes: int = 64 << 20
    """Size at which the file is rotated."""
    files: int = 5
    """Files kept: PATH, PATH.1 (the one before), ..."""
    queue_lines: int = 10_000
    """Lines that may wait for the disk."""


class DecisionLog:
    """Keeps the last `recent` decisions; writes to `file` when given. `written` and `dropped` count lines."""

    def __init__(self, file: LogFile | None = None, *, recent: int = 256, random: Random | None = None) -> None:
        self.written = 0
        self.dropped = 0
        self._random = random or Random()
        self._capacity = recent
        self._recent: OrderedDict[int, tuple[Decision, Outcome | None]] = OrderedDict()
        self._file = file
        self._queue: queue.Queue[tuple[Decision, Outcome | None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        if file is not None:
            stream = open(file.path, "ab")  # noqa: SIM115 - the thread closes it; opened here so that a bad path fails
            self._queue = queue.Queue(file.queue_lines)
            self._thread = threading.Thread(target=self._write, args=(file, stream), name="decision log", daemon=True)
            self._thread.start()

    def decided(self, decision: Decision) -> None:
        """A decision was made, with or without an endpoint."""
        self._recent[id(decision)] = (decision, None)
        if len(self._recent) > self._capacity:
            self._recent.popitem(last=False)

    def finished(self, decision: Decision, outcome: Outcome | None = None) -> None:
        """The request is over (for one without an endpoint: at once). Writes its line, if it is in the sample."""
        if id(decision) in self._recent:
            self._recent[id(decision)] = (decision, outcome)
        file = self._file
        if file is None or (file.sample < 1.0 and self._random.random() >= file.sample):
            return
        try:
            self._queue.put_nowait((decision, outcome))
        except queue.Full:
            self._drop("the disk does not keep up")

    def recent(self, limit: int = 50, request_id: str = "") -> list[dict[str, Any]]:
        """The last decisions, of one request when its id is given, newest first; rendered now."""
        chosen = [e for e in reversed(self._recent.values()) if not request_id or e[0].request_id == request_id]
        return [render(*entry) for entry in chosen[:limit]]

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, at most for `timeout_s`, and close the file."""
        if self._thread is not None:
            try:
                self._queue.put(None, timeout=timeout_s)
            except queue.Full:
                return
            self._thread.join(timeout_s)

    def _drop(self, why: str, lines: int = 1) -> None:
        if not self.dropped and lines:
            log.warning("decisions are dropped from the log (said once): %s", why)
        self.dropped += lines

    def _write(self, file: LogFile, stream: BinaryIO) -> None:
        encoder = msgspec.json.Encoder()
        size = stream.tell()
        waiting = 0  # lines in the stream's buffer: written or dropped only when that is flushed
        while (entry := self._queue.get()) is not None:
            try:
                line = encoder.encode(render(*entry)) + b"\n"
            except Exception as error:  # a name that is no UTF-8, say: the next one may be fine
                self._drop(f"one cannot be rendered: {error}")
                continue
            try:
                if size and size + len(line) > file.max_bytes:
                    stream.close()
                    self.written, waiting = self.written + waiting, 0
                    stream = rotate(file)
                    size = 0
                waiting += 1
                stream.write(line)
                size += len(line)
                if self._queue.empty():
                    stream.flush()
                    self.written, waiting = self.written + waiting, 0
            except (OSError, ValueError) as error:  # ValueError: the stream is closed since a rotation failed
                self._drop(str(error), max(waiting, 1))
                waiting = 0
                with contextlib.suppress(OSError):
                    stream.close()  # and with it the lines that could not be flushed
                stream, size = _reopen(file, stream)
        try:
            stream.close()
            self.written += waiting
        except OSError as error:
            self._drop(str(error), waiting)


def render(decision: Decision, outcome: Outcome | None) -> dict[str, Any]:
    """A decision and its outcome as plain JSON-ready values; `outcome` is absent while the request runs."""
    record = decision.as_dict()
    if outcome is not None:
        record["outcome"] = dataclasses.asdict(outcome)
    return record


def rotate(file: LogFile) -> BinaryIO:
    """PATH becomes PATH.1, PATH.1 becomes PATH.2, ...; the oldest goes. Returns the new, empty PATH."""
    names = [file.path, *(file.path.with_name(f"{file.path.name}.{i}") for i in range(1, max(file.files, 1)))]
    for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
        if newer.exists():
            os.replace(newer, older)
    return open(file.path, "wb")


def _reopen(file: LogFile, closed: BinaryIO) -> tuple[BinaryIO, int]:
    try:
        stream = open(file.path, "ab")  # noqa: SIM115 - closed by the thread
    except OSError:
        return closed, 0
    return stream, stream.tell()
