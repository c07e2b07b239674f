"""The HTTP/2 connection, sans I/O: states, windows and errors of RFC 9113."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.gateway import http2_frames as f
from epp.gateway.http2_frames import ErrorCode, Setting
from epp.gateway.http2_limits import Limits
from tests.gateway.wire import ECHO, GREETING, Peer, data, fields, headers, message, parse, rst


def test_the_server_greets_with_its_settings_and_acknowledges_the_clients() -> None:
    peer = Peer(greet=False)
    peer.send(GREETING)
    first, window, ack = peer.frames()
    assert (first.kind, first.flags, first.stream_id) == (f.SETTINGS, 0, 0)
    assert (window.kind, window.stream_id) == (f.WINDOW_UPDATE, 0)
    assert (ack.kind, ack.flags, ack.payload) == (f.SETTINGS, f.ACK, b"")


def test_a_request_is_answered_with_headers_data_and_trailers_in_one_write() -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, message(b"hello"), end=True))
    assert [(frame.kind, frame.flags) for frame in peer.frames()] == [
        (f.HEADERS, f.END_HEADERS),
        (f.DATA, 0),
        (f.HEADERS, f.END_HEADERS | f.END_STREAM),
    ]
    assert peer.ledger.closings == [1]
    assert peer.counters.streams_open == 0


def test_a_stream_ended_before_the_client_ended_it_is_followed_by_a_reset_without_error() -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, message(b"!finish")))
    assert peer.resets() == {1: ErrorCode.NO_ERROR}
    peer.send(data(1, message(b"late")) + data(1, b"", end=True))
    assert not peer.connection.closing
    peer.send(data(1, b"x"))
    assert peer.goaway == ErrorCode.STREAM_CLOSED


def test_a_reset_ends_the_forbearance_for_a_stream_that_was_ended_early() -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, message(b"!finish")) + rst(1))
    peer.send(data(1, b"x"))
    assert peer.goaway == ErrorCode.STREAM_CLOSED


def test_padding_and_priority_are_skipped() -> None:
    peer = Peer()
    block = b"\x03" + b"\x00\x00\x00\x00\x10" + fields() + b"\0\0\0"
    peer.send(headers(1, block, f.END_HEADERS | f.PADDED | f.HAS_PRIORITY))
    peer.send(f.frame(f.PRIORITY, 0, 7, b"\0\0\0\0\x01"))
    peer.send(f.frame(f.DATA, f.PADDED | f.END_STREAM, 1, b"\x02" + message(b"hello") + b"\0\0"))
    assert peer.answer()[0] == [b"hello"]


def test_a_header_block_may_be_cut_into_continuations() -> None:
    peer = Peer()
    block = fields()
    peer.send(headers(1, block[:7], f.END_STREAM))
    peer.send(f.frame(f.CONTINUATION, 0, 1, block[7:9]))
    peer.send(f.frame(f.CONTINUATION, f.END_HEADERS, 1, block[9:]))
    assert peer.answer()[1]["grpc-status"] == "0"


def test_ping_is_answered_with_its_payload() -> None:
    peer = Peer()
    peer.send(f.frame(f.PING, 0, 0, b"12345678") + f.frame(f.PING, f.ACK, 0, b"12345678"))
    assert [(x.kind, x.flags, x.payload) for x in peer.frames()] == [(f.PING, f.ACK, b"12345678")]


def test_unknown_frames_and_settings_are_ignored() -> None:
    peer = Peer()
    peer.send(f.frame(0x42, 0xFF, 3, b"whatever") + f.frame(f.SETTINGS, 0, 0, b"\x12\x34\0\0\0\1"))
    assert [(x.kind, x.flags) for x in peer.frames()] == [(f.SETTINGS, f.ACK)]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
        (f.PREFACE + f.frame(f.PING, 0, 0, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (f.PREFACE + f.SETTINGS_ACK, ErrorCode.PROTOCOL_ERROR),
        (GREETING + data(1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (GREETING + data(0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (GREETING + headers(0), ErrorCode.PROTOCOL_ERROR),
        (GREETING + headers(2), ErrorCode.PROTOCOL_ERROR),
        (GREETING + headers(3, flags=5) + headers(1), ErrorCode.STREAM_CLOSED),
        (GREETING + headers(1, flags=5) + headers(1), ErrorCode.STREAM_CLOSED),
        (GREETING + headers(1, flags=5) + data(1, b"x"), ErrorCode.STREAM_CLOSED),
        (GREETING + headers(1) + rst(1) + data(1, b"x"), ErrorCode.STREAM_CLOSED),
        (GREETING + headers(1, b"\x80"), ErrorCode.COMPRESSION_ERROR),
        (GREETING + headers(1, b"\x41"), ErrorCode.COMPRESSION_ERROR),
        (GREETING + headers(1, b"\x09abc", f.END_HEADERS | f.PADDED), ErrorCode.PROTOCOL_ERROR),
        (GREETING + headers(1, b"abc", f.END_HEADERS | f.HAS_PRIORITY), ErrorCode.FRAME_SIZE_ERROR),
        (GREETING + headers(1, b"abc", 0) + f.frame(f.PING, 0, 0, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (GREETING + headers(1, b"abc", 0) + f.frame(f.CONTINUATION, 4, 3), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.frame(f.CONTINUATION, 4, 1), ErrorCode.PROTOCOL_ERROR),
        (GREETING + headers(1) + f.frame(f.DATA, f.PADDED, 1), ErrorCode.PROTOCOL_ERROR),
        (GREETING + headers(1) + f.frame(f.DATA, f.PADDED, 1, b"\x01"), ErrorCode.PROTOCOL_ERROR),
        (GREETING + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", ErrorCode.FRAME_SIZE_ERROR),
        (GREETING + f.frame(f.RST_STREAM, 0, 1, b"\0\0\0\0"), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.frame(f.RST_STREAM, 0, 0, b"\0\0\0\0"), ErrorCode.PROTOCOL_ERROR),
        (GREETING + headers(1) + f.frame(f.RST_STREAM, 0, 1, b"\0\0\0"), ErrorCode.FRAME_SIZE_ERROR),
        (GREETING + f.frame(f.PRIORITY, 0, 0, b"\0\0\0\0\0"), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.frame(f.PRIORITY, 0, 1, b"\0\0\0\0"), ErrorCode.FRAME_SIZE_ERROR),
        (GREETING + f.frame(f.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.frame(f.SETTINGS, 0, 0, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
        (GREETING + f.frame(f.SETTINGS, f.ACK, 0, b"\0\1\0\0\0\0"), ErrorCode.FRAME_SIZE_ERROR),
        (GREETING + f.settings({Setting.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 31}), ErrorCode.FLOW_CONTROL_ERROR),
        (GREETING + f.settings({Setting.MAX_FRAME_SIZE: 16_383}), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.settings({Setting.MAX_FRAME_SIZE: 1 << 24}), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.frame(f.PUSH_PROMISE, 4, 1, b"\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.frame(f.PING, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.frame(f.PING, 0, 0, b"1234567"), ErrorCode.FRAME_SIZE_ERROR),
        (GREETING + f.frame(f.GOAWAY, 0, 1, b"\0" * 8), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.frame(f.GOAWAY, 0, 0, b"\0" * 7), ErrorCode.FRAME_SIZE_ERROR),
        (GREETING + f.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.window_update(0, f.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
        (GREETING + f.window_update(1, 1), ErrorCode.PROTOCOL_ERROR),
        (GREETING + f.frame(f.WINDOW_UPDATE, 0, 0, b"\0\0\0"), ErrorCode.FRAME_SIZE_ERROR),
        (
            GREETING
            + headers(1)
            + f.window_update(1, 1 << 30)
            + f.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 30}) * 2,
            ErrorCode.FLOW_CONTROL_ERROR,
        ),
    ],
)
def test_an_error_of_the_connection_ends_it_with_the_code_of_the_protocol(sent: bytes, code: ErrorCode) -> None:
    peer = Peer(greet=False)
    peer.send(sent)
    assert peer.goaway == code
    assert peer.connection.closing
    assert peer.ledger.closings == [1] * len(peer.ledger.sessions)
    assert sum(peer.counters.connection_errors.values()) == 1


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (headers(1, flags=5 & ~1) + headers(1), ErrorCode.PROTOCOL_ERROR),  # trailers without END_STREAM
        (headers(1) + headers(1, flags=5), ErrorCode.PROTOCOL_ERROR),  # trailers with pseudo-headers
        (headers(1) + f.window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + f.window_update(1, f.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
        (headers(1, fields(path=None)), ErrorCode.PROTOCOL_ERROR),
        (headers(1, fields(method=None)), ErrorCode.PROTOCOL_ERROR),
        (headers(1, fields(te="gzip")), ErrorCode.PROTOCOL_ERROR),
        (headers(1, fields(connection="close")), ErrorCode.PROTOCOL_ERROR),
        (headers(1, fields(Upper="x")), ErrorCode.PROTOCOL_ERROR),
        (headers(1, fields(x="a\nb")), ErrorCode.PROTOCOL_ERROR),
        (headers(1, fields() + f.literal(b":path", b"/again")), ErrorCode.PROTOCOL_ERROR),
        (headers(1, f.literal(b":status", b"200") + fields()), ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_an_error_of_one_stream_resets_it_and_others_go_on(sent: bytes, code: ErrorCode) -> None:
    peer = Peer()
    peer.send(sent)
    assert peer.resets() == {1: code}
    peer.send(headers(3) + data(3, message(b"fine"), end=True))
    assert peer.answer()[0] == [b"fine"]
    assert peer.ledger.closings == [1] * len(peer.ledger.sessions)


def test_frames_after_the_end_of_an_open_stream_reset_it() -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, message(b"!stay"), end=True))
    peer.frames()
    peer.send(data(1, b"more"))
    assert peer.resets() == {1: ErrorCode.STREAM_CLOSED}


def test_data_beyond_the_streams_window_resets_the_stream() -> None:
    peer = Peer(Limits(stream_window=100))
    peer.send(headers(1) + data(1, b"x" * 101))
    assert peer.resets() == {1: ErrorCode.FLOW_CONTROL_ERROR}


def test_data_beyond_the_connections_window_ends_the_connection() -> None:
    peer = Peer(Limits(connection_window=70_000, stream_window=1 << 20, connection_backlog=-1))
    peer.send(headers(1), *[data(1, b"\0" * 14_001) for _ in range(5)])
    assert peer.goaway == ErrorCode.FLOW_CONTROL_ERROR


def test_streams_beyond_the_limit_are_refused() -> None:
    peer = Peer(Limits(streams=2))
    peer.send(headers(1) + headers(3) + headers(5))
    assert peer.resets() == {5: ErrorCode.REFUSED_STREAM}
    peer.send(data(5, b"in flight", end=True) + data(1, message(b"x"), end=True) + headers(7))
    assert peer.resets() == {}
    assert len(peer.ledger.sessions) == 3


def test_a_client_that_shrinks_the_header_table_is_told_that_ours_is_empty() -> None:
    peer = Peer()
    peer.decoder.max_allowed_table_size = 0
    peer.send(f.settings({Setting.HEADER_TABLE_SIZE: 0}) + headers(1) + data(1, message(b"x"), end=True))
    assert peer.answer()[1]["grpc-status"] == "0"


def test_answers_wait_for_the_streams_window_and_keep_their_order() -> None:
    peer = Peer()
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 10}), headers(1))
    peer.send(data(1, message(b"a" * 20)) + data(1, message(b"b"), end=True))
    out = b"".join(x.payload for x in peer.frames() if x.kind == f.DATA)
    assert len(out) == 10
    for _ in range(30):
        peer.send(f.window_update(1, 1))
    frames = peer.frames()
    out += b"".join(x.payload for x in frames if x.kind == f.DATA)
    assert out == message(b"a" * 20) + message(b"b")
    assert frames[-1].flags & f.END_STREAM
    assert peer.ledger.closings == [1]
    assert peer.connection.backlog == 0


def test_a_larger_initial_window_lets_waiting_answers_go() -> None:
    peer = Peer()
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 0}), headers(1), data(1, message(b"x"), end=True))
    assert peer.answer()[0] == []
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 100}))
    assert peer.answer()[0] == [b"x"]


def test_small_answers_use_up_the_connections_window() -> None:
    peer = Peer()
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 20}), headers(1))
    peer.send(*[data(1, message(bytes(995))) for _ in range(70)])
    assert sum(len(x.payload) for x in peer.frames() if x.kind == f.DATA) == 65_535


def test_a_window_made_smaller_below_zero_must_be_refilled_first() -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, message(b"a" * 95)))  # 100 of 65,535 used
    peer.frames()
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 50}) + data(1, message(b"b")))
    peer.send(f.window_update(1, 50))
    assert [x for x in peer.frames() if x.kind == f.DATA] == []
    peer.send(f.window_update(1, 6))
    assert [x.payload for x in peer.frames() if x.kind == f.DATA] == [message(b"b")]


def test_streams_share_the_connections_window_in_turn() -> None:
    peer = Peer()
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 20}))
    for stream in (1, 3, 5):
        peer.send(headers(stream) + data(stream, message(b"x" * 65_000)[:60_000]) + data(stream, b"x" * 5_005))
    served: dict[int, int] = dict.fromkeys((1, 3, 5), 0)
    for _ in range(30):
        for frame in peer.frames():
            if frame.kind == f.DATA:
                served[frame.stream_id] += len(frame.payload)
        if served[3]:
            break
        peer.send(f.window_update(0, 1_000))
    assert served[1] >= 65_000
    for _ in range(8):
        peer.send(f.window_update(0, 1_000))
    for frame in peer.frames():
        if frame.kind == f.DATA:
            served[frame.stream_id] += len(frame.payload)
    assert served[3] >= 4_000
    assert served[5] >= 4_000


def test_who_does_not_read_gets_no_window_to_write() -> None:
    limits = Limits(stream_window=1_000, stream_backlog=500)
    peer = Peer(limits)
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 0}), headers(1))
    peer.send(data(1, message(b"x" * 395)))
    peer.send(data(1, message(b"x" * 395)))
    assert [x for x in peer.frames() if x.kind == f.WINDOW_UPDATE] == []
    peer.send(f.window_update(1, 400))
    grants = [x for x in peer.frames() if x.kind == f.WINDOW_UPDATE and x.stream_id == 1]
    assert [int.from_bytes(x.payload, "big") for x in grants] == [800]


def test_a_paused_transport_holds_data_back_and_resume_lets_it_go() -> None:
    peer = Peer()
    peer.connection.pause()
    peer.send(headers(1) + data(1, message(b"hello"), end=True))
    assert [x.kind for x in peer.frames()] == [f.HEADERS]
    peer.connection.resume()
    assert [x.kind for x in peer.frames()] == [f.DATA, f.HEADERS]


def test_frames_are_no_longer_than_the_peer_takes() -> None:
    peer = Peer()
    big = message(b"x" * 40_000)
    peer.send(headers(1) + data(1, big[:30_000]) + data(1, big[30_000:], end=True))
    assert [len(x.payload) for x in peer.frames() if x.kind == f.DATA] == [16_384, 16_384, 7_237]
    peer.send(f.settings({Setting.MAX_FRAME_SIZE: 65_536}))
    peer.send(headers(3) + data(3, big[:30_000]) + data(3, big[30_000:], end=True))
    assert [len(x.payload) for x in peer.frames() if x.kind == f.DATA] == [25_530]  # the connection's window ends here


def test_drain_lets_late_requests_in_until_the_ping_is_answered_and_closes_after_the_last() -> None:
    peer = Peer()
    peer.send(headers(1))
    peer.connection.drain(0.0)
    goaway, ping = peer.frames()
    assert (goaway.payload[:4], ping.kind) == (f.MAX_WINDOW.to_bytes(4, "big"), f.PING)
    peer.send(headers(3))
    peer.send(f.frame(f.PING, f.ACK, 0, ping.payload))
    assert [x.payload[:4] for x in peer.frames()] == [(3).to_bytes(4, "big")]
    peer.send(headers(5))
    assert peer.resets() == {5: ErrorCode.REFUSED_STREAM}
    peer.send(data(1, message(b"a"), end=True))
    assert peer.counters.streams_open == 1
    peer.send(data(3, message(b"a"), end=True))
    assert peer.connection.closing
    assert peer.ledger.closings == [1, 1]


def test_drain_does_not_wait_for_a_peer_that_answers_no_ping() -> None:
    peer = Peer()
    peer.connection.drain(10.0)
    closing = []
    for now in (10.5, 11.0):
        peer.connection.tick(now)
        closing.append(peer.connection.closing)
    assert closing == [False, True]


def test_after_the_peers_goaway_running_streams_end_and_the_connection_with_the_last() -> None:
    peer = Peer()
    peer.send(headers(1) + f.goaway(0, ErrorCode.NO_ERROR) + data(1, message(b"x"), end=True))
    assert peer.answer()[0] == [b"x"]
    assert peer.connection.closing


CONVERSATION = (
    GREETING
    + headers(1)
    + data(1, message(b"one") + message(b"t" * 300))
    + headers(3, fields(path="/nope"))
    + f.frame(f.PING, 0, 0, b"12345678")
    + headers(5)
    + f.frame(f.DATA, f.PADDED, 5, b"\x02" + message(b"five")[:6] + b"\0\0")
    + data(1, b"", end=True)
    + data(5, message(b"five")[6:])
    + f.window_update(0, 99)
    + rst(5)
    + headers(7, fields()[:30], f.END_STREAM)
    + f.frame(f.CONTINUATION, f.END_HEADERS, 7, fields()[30:])
)


def _transcript(chunks: list[bytes]) -> tuple[object, ...]:
    peer = Peer(greet=False)
    peer.send(*chunks)
    return (
        parse(peer.connection.take()),
        [s.received for s in peer.ledger.sessions],
        peer.ledger.closings,
        peer.counters,
    )


WHOLE = _transcript([CONVERSATION])


def test_bytes_one_by_one_give_what_one_read_gives() -> None:
    assert _transcript([CONVERSATION[i : i + 1] for i in range(len(CONVERSATION))]) == WHOLE
    assert WHOLE[1] == [[b"one", b"t" * 300], [b"five"], []]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=12))
def test_any_cut_of_the_bytes_gives_what_one_read_gives(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(CONVERSATION)]
    assert _transcript([CONVERSATION[a:b] for a, b in pairwise(edges)]) == WHOLE


def test_a_changed_size_of_the_header_table_is_never_taken_from_the_memo() -> None:
    peer = Peer()
    insert = b"\x40" + f.literal(b"content-type", b"application/grpc")[1:]
    full, none = b"\x3f\xe1\x1f", b"\x20"  # size updates to 4,096 and to 0
    for stream, block in enumerate((full + fields(), none + fields(), full + fields())):
        peer.send(headers(2 * stream + 1, block, 5))
    peer.send(headers(7, fields(content_type=None) + insert, 5) + headers(9, fields(content_type=None) + b"\xbe", 5))
    assert len(peer.ledger.sessions) == 5
    assert not peer.connection.closing


def test_blocks_are_memoised_only_while_the_header_table_stays() -> None:
    """An indexed field means another header after the table moved: the same bytes must then be decoded anew."""
    peer = Peer()
    insert = b"\x40" + f.literal(b"content-type", b"application/grpc")[1:]
    other = b"\x40" + f.literal(b"content-type", b"text/plain")[1:]
    rest = fields(content_type=None)
    peer.send(headers(1, rest + insert) + data(1, b"", end=True))
    peer.send(headers(3, rest + b"\xbe") + data(3, b"", end=True))
    peer.send(headers(5, rest + b"\xbe") + data(5, b"", end=True))
    assert [s.closings for s in peer.ledger.sessions] == [1, 1, 1]
    peer.send(headers(7, rest + other, 5) + headers(9, rest + b"\xbe", 5))
    assert len(peer.ledger.sessions) == 3
    assert peer.counters.statuses["HTTP_415"] == 2
    assert ECHO in peer.connection.service.methods
