"""Where the top-level members of a JSON object lie, found in one pass over bytes that may come in pieces.

In: pieces of a JSON text that a worker or a parser vouches for. Out: `Mark`s, the offsets in each piece at which the
value of a top-level member begins and ends. Nothing is kept but the state: a name (bounded) and the depth.

Theory: below the top level only quotes and brackets matter. A regular expression (of possessive repeats: it never goes
back) passes over whole strings and whole lists and objects without objects in them, so that log probabilities cost
7 ms a MB where going from quote to quote costs 400; what is cut by the end of a piece is gone through edge by edge.
On the top level it goes name, colon, value, comma. Text that is not JSON yields no marks or wrong ones, never an
exception.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import NamedTuple

_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_PLAIN = rb'[^"{}\[\]]++'
_STRING = rb'"' + _IN_STRING.pattern + rb'"'
_FLAT = rb"\[(?:%s|%s)*+\]" % (_PLAIN, _STRING)
_FLAT += rb"|\{(?:%s|%s|%s)*+\}" % (_PLAIN, _STRING, _FLAT)
_NESTED = re.compile(rb"(?:%s|%s|%s)*+" % (_PLAIN, _STRING, _FLAT), re.DOTALL)
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
    """One JSON object. `depth` is the nesting at this point (the object itself is 1)."""

    def __init__(self) -> None:
        self.depth = 0
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
                self.depth = 1
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
                self.depth += 1
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
        length = len(data)
        while position < length and not closed:
            run = _IN_STRING.match(data, position)
            assert run is not None  # it matches nothing, too
            position = run.end()
            if data[position : position + 1] == b'"':
                position, closed = position + 1, True
            elif position == length - 1 and data[position] == 0x5C:
                position, self._escaped = length, True
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
        run = _NESTED.match(data, position)
        assert run is not None  # it matches nothing, too
        position = run.end()
        byte = data[position : position + 1]
        if byte == b'"':
            self._state = _State.NESTED_STRING
        elif byte and byte in b"{[":
            self.depth += 1
        elif byte:
            self.depth -= 1
            if self.depth == 1:
                self._end_value(marks, position + 1)
        return position + len(byte)

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
