"""Server-sent events, by the grammar of the HTML standard (https://html.spec.whatwg.org/multipage/server-sent-events.html).

In: pieces of a response body, cut anywhere. Out: `Event`s, each with the very bytes it came in. A leading byte order
mark, the three line ends, comments, several `data` lines, `event`, `id` and `retry` are understood. Each byte is
looked at once; an event longer than `max_bytes`, or of absurdly many lines, ends the reading (`overflowed`), never the
stream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_EVENT_BYTES = 4 << 20
"""A Responses API `response.completed` repeats instructions, tools and output, which are large for coding agents."""

MAX_DATA_LINES = 16_384
"""`data` lines of one event; engines write one. Each costs 100 bytes while the event is read."""

_LINE_END = re.compile(rb"\r\n?|\n")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event, or a block of comments (no `spans`), which clients never see."""

    raw: bytes
    """All bytes of it, the blank line at its end included."""
    spans: tuple[tuple[int, int], ...] = ()
    """(start, end) in `raw` of each `data` line's value."""
    event: bytes = b""
    """Its type; empty means `message`."""

    @property
    def data(self) -> bytes:
        """The data lines' values joined by line feeds."""
        return b"\n".join([self.raw[start:end] for start, end in self.spans])


class EventReader:
    """Reads one stream. `feed` returns the events that are complete; what is pending comes out of `rest`."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self.overflowed = False
        self.last_id = b""
        self.retry_ms: int | None = None
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._line = 0  # where the line begins that is being read
        self._searched = 0  # up to where no line end was found
        self._after_cr = False  # the last line ended with CR at the end of a piece: LF would belong to it
        self._at_start = True
        self._spans: list[tuple[int, int]] = []
        self._event = b""

    def feed(self, data: bytes) -> list[Event]:
        if self.overflowed:
            return []
        buffer = self._buffer
        buffer += data
        events: list[Event] = []
        begin = 0  # of the event being read
        if self._after_cr and len(buffer) > self._line:
            self._after_cr = False
            if buffer[self._line] == 0x0A:
                self._line += 1
                self._searched = self._line
        for end in _LINE_END.finditer(buffer, self._searched):
            if end.end() == len(buffer) and buffer[-1] == 0x0D:
                self._after_cr = True
            if end.start() == self._line:
                events.append(Event(bytes(buffer[begin : end.end()]), tuple(self._spans), self._event))
                self._spans, self._event, begin = [], b"", end.end()
            else:
                self._field(begin, self._line, end.start())
            self._line = end.end()
        del buffer[:begin]
        self._line -= begin
        self._searched = len(buffer)
        if len(buffer) > self._max_bytes or len(self._spans) > MAX_DATA_LINES:
            self.overflowed = True
        return events

    def rest(self) -> Event | None:
        """What came since the last complete event; a last line without its end counts. Call once, at the end.

        The standard drops an unfinished event; the bytes must reach the client all the same, and a usage event whose
        blank line was lost is still true.
        """
        if self._line < len(self._buffer) and not self.overflowed:
            self._field(0, self._line, len(self._buffer))
        raw, spans = bytes(self._buffer), tuple(self._spans)
        self._buffer.clear()
        return Event(raw, spans if not self.overflowed else (), self._event) if raw else None

    def _field(self, begin: int, start: int, end: int) -> None:
        """One line that is not empty, at [start, end) of the buffer; spans count from `begin`."""
        buffer = self._buffer
        if self._at_start:
            self._at_start = False
            if buffer[start : start + 3] == _BOM:
                start += 3
        colon = buffer.find(b":", start, end)
        name_end = colon if colon >= 0 else end
        value = min(name_end + 1, end)
        if value < end and buffer[value] == 0x20:
            value += 1
        name = buffer[start:name_end]
        if name == b"data":
            self._spans.append((value - begin, end - begin))
        elif name == b"event":
            self._event = bytes(buffer[value:end])
        elif name == b"id" and 0 not in buffer[value:end]:
            self.last_id = bytes(buffer[value:end])
        elif name == b"retry" and end - value <= 9 and buffer[value:end].isdigit():
            self.retry_ms = int(buffer[value:end])
