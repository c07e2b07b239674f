"""The event-stream grammar, whatever the pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.api.sse import Event, EventReader


def read(pieces: list[bytes]) -> list[Event]:
    reader = EventReader()
    events = [event for piece in pieces for event in reader.feed(piece)]
    rest = reader.rest()
    return [*events, rest] if rest else events


def told(events: list[Event]) -> list[tuple[bytes, bytes]]:
    return [(event.event, event.data) for event in events if event.spans]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [(b"", b"a")]),
        (b"data:a\r\rdata:b\r\n\r\n", [(b"", b"a"), (b"", b"b")]),
        (b"data:  two spaces\n\n", [(b"", b" two spaces")]),
        (b"data: a\ndata\ndata: b\n\n", [(b"", b"a\n\nb")]),
        (b"event: delta\ndata: a\n\ndata: b\n\n", [(b"delta", b"a"), (b"", b"b")]),
        (b"event: lost\n\ndata: b\n\n", [(b"", b"b")]),
        (b": ping\n\n\n\n: data: x\ndata: a\n\n", [(b"", b"a")]),
        (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", [(b"", b"a")]),
        (b"DATA: a\ndata : b\nfoo: c\ndata: d\n\n", [(b"", b"d")]),
        (b"data: unfinished", [(b"", b"unfinished")]),
        (b"", []),
    ],
)
def test_stream_is_read_by_the_grammar_at_every_cut(stream: bytes, expected: list[tuple[bytes, bytes]]) -> None:
    for cut in range(len(stream) + 1):
        assert told(read([stream[:cut], stream[cut:]])) == expected
    assert told(read([stream[i : i + 1] for i in range(len(stream))])) == expected


def test_id_and_retry_are_kept_and_malformed_ones_ignored() -> None:
    reader = EventReader()
    reader.feed(b"id: 7\nretry: 250\n\nid: a\0b\nretry: 1s\n\n")
    assert (reader.last_id, reader.retry_ms) == (b"7", 250)


LINES = st.sampled_from(
    [b"data: x", b"data:", b"event: e", b": c", b"", b"", b"id: 1", b'data: {"a":1}', b"\xef\xbb\xbf"]
)
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.lists(st.tuples(LINES, ENDS), max_size=12), st.lists(st.integers(0, 80), max_size=6))
def test_cuts_change_no_event_and_raw_bytes_add_up(lines: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(line + end for line, end in lines)
    edges = sorted({0, *(cut for cut in cuts if cut < len(stream)), len(stream)})
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    whole = read([stream])
    assert told(read(pieces)) == told(whole)
    assert b"".join(event.raw for event in read(pieces)) == stream


def test_too_long_an_event_ends_the_reading_and_loses_no_byte() -> None:
    reader = EventReader(max_bytes=100)
    assert len(reader.feed(b"data: a\n\n")) == 1
    assert not reader.feed(b"data: " + b"x" * 200)
    assert reader.overflowed
    rest = reader.rest()
    assert rest is not None
    assert (len(rest.raw), rest.spans) == (206, ())
    assert reader.feed(b"data: b\n\n") == []


def test_an_event_of_absurdly_many_lines_ends_the_reading_too() -> None:
    reader = EventReader()
    lines = b"data:\n" * 20_000
    assert not reader.feed(lines)
    assert reader.overflowed
    rest = reader.rest()
    assert rest is not None
    assert (rest.raw, rest.spans) == (lines, ())


def test_long_events_in_small_pieces_are_searched_once() -> None:
    reader = EventReader()
    for _ in range(20_000):
        reader.feed(b"x" * 100)
    (event,) = reader.feed(b"\n\n")
    assert len(event.raw) == 2_000_002
