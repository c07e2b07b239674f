"""A cheap reader of the Prometheus text format that touches only the wanted lines.

In: a page of `/metrics` as bytes and the family names wanted. Out: their samples. Nothing else on the page is looked
at: a vLLM page has about 700 lines, of which six matter, twice a second, times hundreds of endpoints. (Measured on a
60 KB page: 0.1 ms of CPU for the six, 7 ms for a full parse by prometheus-client.)

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ and OpenMetrics, as far as sample lines go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

MAX_PAGE_BYTES = 16 << 20
MAX_LINE_BYTES = 64 << 10
MAX_SAMPLES = 4096
"""Per family; a page with more is cut there and counted as malformed."""

_LABEL = re.compile(rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(?:,[ \t]*|(?=\}))')
_VALUE = re.compile(rb"[ \t]+([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?[iI]nf|NaN)(?=[ \t\r]|$)")
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"\\": b"\\", b'"': b'"'}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: its labels and its value (may be NaN or infinite). A timestamp or exemplar behind it is ignored."""

    labels: Mapping[str, str]
    value: float


@dataclass(slots=True)
class Page:
    """The samples found, by family name; a family that is absent has no entry."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    malformed: int = 0
    """Lines of wanted families that could not be read; the others stand."""


def read_page(page: bytes, names: Iterable[str]) -> Page:
    """Find the samples of `names`. Never raises: a broken line is counted and skipped."""
    result = Page()
    for name in names:
        found: list[Sample] = []
        needle = b"\n" + name.encode()
        start = len(needle) - 1 if page.startswith(needle[1:]) else _after(page, needle, 0)
        while start > 0:
            # The name may be the beginning of a longer one: only these end it.
            if page[start : start + 1] in (b"{", b" ", b"\t"):
                end = page.find(b"\n", start)
                sample = _sample(page[start : len(page) if end < 0 else end])
                if sample is None or len(found) == MAX_SAMPLES:
                    result.malformed += 1
                else:
                    found.append(sample)
                if len(found) == MAX_SAMPLES:
                    break
            start = _after(page, needle, start)
        if found:
            result.samples[name] = found
    return result


def _after(page: bytes, needle: bytes, start: int) -> int:
    """The position behind the next occurrence; 0 when there is none."""
    position = page.find(needle, start)
    return position + len(needle) if position >= 0 else 0


def _sample(line: bytes) -> Sample | None:
    """What follows the name: `{labels} value ...`."""
    if len(line) > MAX_LINE_BYTES:
        return None
    labels: Mapping[str, str] = {}
    if line.startswith(b"{"):
        end = line.rfind(b"}") + 1
        known = _labels(line[:end])
        if known is None and (exemplar := line.rfind(b" # {")) > 0:
            end = line.rfind(b"}", 0, exemplar) + 1
            known = _labels(line[:end])
        if known is None:
            return None
        labels, line = known, line[end:]
    number = _VALUE.match(line)
    return Sample(labels, float(number[1])) if number else None


@lru_cache(maxsize=512)
def _labels(text: bytes) -> Mapping[str, str] | None:
    """`{a="b",...}`; None when it is not that. Cached: workers of one kind say the same labels, every time."""
    labels: dict[str, str] = {}
    position = 1
    while match := _LABEL.match(text, position):
        value = match[2]
        if b"\\" in value:
            value = _ESCAPE.sub(lambda escape: _ESCAPES.get(escape[1], escape[0]), value)
        labels[match[1].decode()] = value.decode("utf-8", "replace")
        position = match.end()
    return labels if position == len(text) - 1 and text.endswith(b"}") else None
