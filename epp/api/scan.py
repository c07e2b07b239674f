"""Where the top-level members of a JSON object lie, found in one pass over bytes that may come in pieces.

In: pieces of a JSON text that a worker or a parser vouches for. Out: `Mark`s, the offsets in each piece at which the
value of a top-level member begins and ends. Nothing is kept but the state: a name (bounded) and the depth.

Theory: below the top level only quotes and brackets matter, so the scanner jumps from one to the next by regular
expression (a 10 MB embedding holds few of them) and, inside a string, from backslash to backslash. On the top level it
goes name, colon, value, comma. Text that is not JSON yields no marks or wrong ones, never an exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

_IN_STRING = re.compile(rb'["\\]')
_NESTED = re.compile(rb'["{}\[\]]')
_BLACK = re.compile(rb"[^ \t\r\n]")
_AFTER_SCALAR = re.compile(rb"[ \t\r\n,}]")
_MAX_NAME = 256


class Mark(NamedTuple):
    """An edge of a value: `offset` in the piece just fed, at the value's first byte or after its last."""

    name: str
    offset: int
    begins: bool


class _State(Enum):
    START = auto()
    NAME = auto()  # a name or the end of the object comes
    IN_NAME = auto()
    VALUE = auto()  # a colon, then a value comes
    IN_STRING = auto()
    IN_SCALAR = auto()
    NESTED = auto()
    NESTED_STRING = auto()
    OVER = auto()


class MemberScanner:
    """One JSON object. `depth` is the nesting at this point (the object itself is 1); `deepest` the most seen."""

    def __init__(self) -> None:
        self.depth = 0
        self.deepest = 0
        self._state = _State.START
        self._name = bytearray()
        self._escaped = False

    def feed(self, data: bytes) -> list[Mark]:
        """Marks in `data`, in order."""
        marks: list[Mark] = []
        position, length = 0, len(data)
        while position < length and self._state is not _State.OVER:
            match self._state:
                case _State.IN_NAME | _State.IN_STRING | _State.NESTED_STRING:
                    position = self._string(data, position, marks)
                case _State.NESTED:
                    position = self._nested(data, position, marks)
                case _State.IN_SCALAR:
                    end = _AFTER_SCALAR.search(data, position)
                    position = end.start() if end else length
                    if end:
                        self._end_value(marks, position)
                case _:
                    position = self._top(data, position, marks)
        return marks

    def _top(self, data: bytes, position: int, marks: list[Mark]) -> int:
        """Between names and values: one black byte at a time."""
        black = _BLACK.search(data, position)
        if black is None:
            return len(data)
        byte, position = black[0], black.start()
        if self._state is _State.START:
            if byte == b"{":
                self.depth = self.deepest = 1
                self._state = _State.NAME
            elif byte not in b"\xef\xbb\xbf":
                self._state = _State.OVER
        elif self._state is _State.NAME:
            if byte == b'"':
                self._name.clear()
                self._state = _State.IN_NAME
            elif byte != b",":
                self.depth = 0
                self._state = _State.OVER
        elif byte != b":":
            marks.append(Mark(self._text(), position, True))
            if byte == b'"':
                self._state = _State.IN_STRING
            elif byte in b"{[":
                self._enter()
                self._state = _State.NESTED
            else:
                self._state = _State.IN_SCALAR
                return position
        return position + 1

    def _string(self, data: bytes, position: int, marks: list[Mark]) -> int:
        start = position
        if self._escaped:
            self._escaped = False
            position += 1
        closed = False
        while (hit := _IN_STRING.search(data, position)) is not None:
            if hit[0] == b'"':
                position, closed = hit.end(), True
                break
            position = hit.end() + 1
            if position > len(data):
                self._escaped = True
        else:
            position = len(data)
        if self._state is _State.IN_NAME and len(self._name) < _MAX_NAME:
            self._name += data[start : position - 1 if closed else position]
        if closed:
            if self._state is _State.IN_NAME:
                self._state = _State.VALUE
            elif self._state is _State.IN_STRING:
                self._end_value(marks, position)
            else:
                self._state = _State.NESTED
        return position

    def _nested(self, data: bytes, position: int, marks: list[Mark]) -> int:
        hit = _NESTED.search(data, position)
        if hit is None:
            return len(data)
        byte = hit[0]
        if byte == b'"':
            self._state = _State.NESTED_STRING
        elif byte in b"{[":
            self._enter()
        else:
            self.depth -= 1
            if self.depth == 1:
                self._end_value(marks, hit.end())
        return hit.end()

    def _enter(self) -> None:
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)

    def _end_value(self, marks: list[Mark], offset: int) -> None:
        marks.append(Mark(self._text(), offset, False))
        self._state = _State.NAME

    def _text(self) -> str:
        name = bytes(self._name)
        if b"\\" in name:
            try:
                return str(json.loads(b'"' + name + b'"', strict=False))
            except ValueError:
                return ""
        return name.decode("utf-8", "surrogateescape")


def members(body: bytes, max_depth: int) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of every top-level member's value of a whole JSON object, in order.

    Raises ValueError when it is nested deeper than `max_depth`.
    """
    scanner = MemberScanner()
    marks = scanner.feed(body)
    if scanner.deepest > max_depth:
        raise ValueError(f"nested deeper than {max_depth} levels")
    for begin, end in zip(marks[::2], marks[1::2], strict=False):
        yield begin.name, begin.offset, end.offset
