"""What a hostile peer can cost is bounded, and what Envoy does all day never counts as hostile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epp.gateway import http2_frames as f
from epp.gateway.http2_frames import ErrorCode, Setting
from epp.gateway.http2_limits import Limits
from tests.gateway.wire import Peer, data, fields, headers, message, rst

CALM = ErrorCode.ENHANCE_YOUR_CALM


def flood(peer: Peer, frames: bytes, times: int) -> int:
    """Send until the server closes; how many were taken."""
    for n in range(times):
        peer.send(frames)
        if peer.connection.closing:
            return n
    return times


@pytest.mark.parametrize(
    ("frames", "kind", "burst"),
    [
        (f.frame(f.PING, 0, 0, bytes(8)), "ping_flood", 1_000),
        (f.settings({Setting.INITIAL_WINDOW_SIZE: 1}), "settings_flood", 99),
        (f.SETTINGS_ACK, "settings_flood", 99),
        (f.frame(f.PRIORITY, 0, 1, bytes(5)), "idle_frame_flood", 2_000),
        (f.frame(0x99, 0, 0), "idle_frame_flood", 2_000),
        (f.goaway(0, ErrorCode.NO_ERROR), "idle_frame_flood", 2_000),
        (data(1, b""), "empty_frame_flood", 2_000),
        (f.frame(f.DATA, f.PADDED, 1, b"\x03\0\0\0"), "empty_frame_flood", 2_000),
        (f.window_update(0, 1), "window_update_flood", 5_001),
        (f.window_update(1, 1), "window_update_flood", 5_001),
    ],
)
def test_frames_that_do_nothing_are_a_flood_above_their_burst(frames: bytes, kind: str, burst: int) -> None:
    peer = Peer()
    peer.send(headers(1))
    assert flood(peer, frames, 10_000) == burst
    assert peer.goaway == CALM
    assert peer.counters.connection_errors == {kind: 1}
    assert peer.ledger.closings == [1]


@pytest.mark.parametrize("frames", [f.frame(f.PING, 0, 0, bytes(8)), f.frame(f.PRIORITY, 0, 1, bytes(5))])
def test_the_same_frames_at_a_modest_rate_are_none(frames: bytes) -> None:
    peer = Peer()
    for n in range(20_000):
        peer.now = n / 100
        peer.send(frames)
        peer.frames()
    assert not peer.connection.closing


def test_streams_reset_before_they_carried_a_message_are_rapid_resets() -> None:
    peer = Peer()
    taken = 0
    for stream in range(1, 8_001, 2):
        peer.send(headers(stream) + rst(stream))
        if peer.connection.closing:
            break
        taken += 1
    assert taken == 1_000
    assert peer.goaway == CALM
    assert peer.counters.connection_errors == {"rapid_reset": 1}
    assert set(peer.ledger.closings) == {1}


def test_a_hundred_thousand_served_requests_ended_by_reset_are_normal() -> None:
    peer = Peer()
    window = f.window_update(0, 16)
    for stream in range(1, 200_001, 2):
        peer.send(headers(stream) + data(stream, message(b"headers")) + rst(stream) + window)
        peer.connection.take()
        if stream % 1_001 == 0:
            peer.ledger.sessions.clear()
    assert not peer.connection.closing
    assert peer.counters.streams == peer.counters.resets_received == 100_000
    assert peer.counters.streams_open == 0


def test_streams_that_only_listened_and_were_reset_are_normal() -> None:
    """An observing filter sends and never gets an answer; Envoy resets its streams too."""
    peer = Peer()
    for stream in range(1, 10_001, 2):
        peer.send(headers(stream) + data(stream, message(b"!silent")) + rst(stream))
    assert not peer.connection.closing


@pytest.mark.parametrize(
    "frames",
    [
        lambda stream: headers(stream) + f.window_update(stream, 0),
        lambda stream: headers(stream, fields(te="gzip")),
        lambda stream: headers(stream) + headers(stream),
    ],
)
def test_making_the_server_reset_streams_is_a_flood_too(frames: Callable[[int], bytes]) -> None:
    peer = Peer()
    for stream in range(1, 8_001, 2):
        peer.send(frames(stream))
        if peer.connection.closing:
            break
    assert peer.goaway == CALM
    assert peer.counters.connection_errors == {"reset_flood": 1}
    assert set(peer.ledger.closings) <= {1}


def test_a_continuation_chain_ends_the_connection() -> None:
    peer = Peer()
    peer.send(headers(1, b"", 0))
    assert flood(peer, f.frame(f.CONTINUATION, 0, 1, b"\0"), 100) == 16
    assert peer.goaway == CALM


def test_a_header_block_of_any_length_is_not_kept() -> None:
    peer = Peer()
    peer.send(headers(1, bytes(60_000), 0))
    peer.send(f.frame(f.CONTINUATION, 0, 1, bytes(60_000)))
    assert peer.goaway == CALM
    assert peer.counters.connection_errors == {"continuation_flood": 1}


def test_a_small_block_that_unfolds_into_a_long_list_ends_the_connection() -> None:
    peer = Peer()
    peer.send(headers(1, b"\x40" + f.literal(b"a", b"b" * 3_000)[1:] + b"\xbe" * 30))
    assert peer.goaway == CALM
    assert peer.counters.connection_errors == {"header_list": 1}


def test_a_stream_whose_window_stays_shut_is_given_up_and_others_are_not() -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, message(b"!stay")))
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    peer.send(headers(3) + data(3, message(b"x" * 1_000), end=True))
    peer.frames()
    for now in range(0, 30):
        peer.connection.tick(float(now))
    assert peer.resets() == {}
    peer.connection.tick(31.0)
    assert peer.resets() == {3: CALM}
    assert peer.ledger.closings == [0, 1]
    assert peer.connection.backlog == 0


def test_a_window_opened_byte_by_byte_does_not_keep_a_backlog_alive() -> None:
    peer = Peer()
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    peer.send(headers(1) + data(1, message(b"x" * 1_000), end=True))
    for now in range(0, 33):
        peer.connection.tick(float(now))
        peer.send(f.window_update(1, 1))
    assert peer.resets() == {1: CALM}


def test_a_slow_reader_that_moves_is_kept() -> None:
    peer = Peer(Limits(stall_bytes=100))
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    peer.send(headers(1) + data(1, message(b"x" * 10_000), end=True))
    for now in range(0, 90):
        peer.connection.tick(float(now))
        peer.send(f.window_update(1, 5))
    assert peer.resets() == {}


def test_the_sum_of_backlogs_has_a_ceiling() -> None:
    peer = Peer(Limits(backlog_ceiling=100_000))
    peer.send(f.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    for stream in (1, 3, 5):
        peer.send(headers(stream) + data(stream, message(b"x" * 45_000)))
    assert peer.resets() == {5: CALM}
    assert peer.connection.backlog == 90_010


def test_unfinished_messages_have_a_ceiling() -> None:
    peer = Peer(Limits(partial_ceiling=100_000))
    for stream in (1, 3, 5):
        peer.send(headers(stream) + data(stream, message(b"x" * 60_000)[:45_000]))
    _, answer = peer.answer()
    assert answer["grpc-status"] == "8"
    assert peer.ledger.closings == [0, 0, 1]
    assert peer.connection.partial_bytes == 90_000


def test_a_client_that_never_greets_is_dropped() -> None:
    peer = Peer(greet=False)
    peer.send(f.PREFACE)
    peer.connection.tick(9.0)
    assert peer.goaway is None
    peer.connection.tick(11.0)
    assert peer.goaway == ErrorCode.SETTINGS_TIMEOUT


def test_a_window_update_for_every_frame_of_answers_is_normal() -> None:
    peer = Peer()
    peer.send(headers(1))
    for _ in range(20_000):
        peer.send(data(1, message(b"x")) + f.window_update(0, 6) + f.window_update(1, 6))
        peer.connection.take()
    assert not peer.connection.closing


def test_resets_that_cross_the_end_of_their_stream_are_normal() -> None:
    peer = Peer()
    for stream in range(1, 20_001, 2):
        peer.send(headers(stream) + data(stream, message(b"x"), end=True) + f.window_update(0, 6) + rst(stream))
        peer.connection.take()
    assert not peer.connection.closing
    assert flood(peer, rst(1), 10_000) == 2_000


def test_streams_of_all_connections_together_are_bounded() -> None:
    peer = Peer(Limits(streams_in_all=3))
    peer.counters.streams_open = 2  # of other connections
    peer.send(headers(1) + headers(3))
    assert peer.resets() == {3: ErrorCode.REFUSED_STREAM}


def test_deadlines_of_calls_that_ended_are_forgotten() -> None:
    peer = Peer()
    for stream in range(1, 10_001, 2):
        peer.send(headers(stream, fields(grpc_timeout="99H")) + data(stream, message(b"x")) + rst(stream))
    assert len(peer.connection._deadlines) < 1_100


def test_streams_closed_early_are_remembered_within_bounds() -> None:
    peer = Peer()
    for stream in range(1, 40_001, 2):
        peer.send(headers(stream) + data(stream, message(b"!finish")) + f.window_update(0, 16))
        peer.connection.take()
    peer.send(data(1, b"from long ago") + data(39_999, b"just now"))
    assert not peer.connection.closing
    assert len(peer.connection._lingering) <= 4_096
