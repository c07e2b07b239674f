"""gRPC over the HTTP/2 connection, sans I/O: messages, statuses and the life of a session."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from epp.gateway import http2_frames as f
from epp.gateway.grpc import percent_encode
from epp.gateway.http2_frames import ErrorCode
from epp.gateway.session import GrpcStatus, Writer
from tests.gateway.wire import ECHO, EchoSession, Peer, data, fields, headers, message, rst


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (fields(path="/no/Such"), {"grpc-status": "12", "grpc-message": "unknown method /no/Such"}),
        (fields(grpc_encoding="gzip"), {"grpc-status": "12", "grpc-accept-encoding": "identity"}),
        (fields(grpc_timeout="soon"), {"grpc-status": "13", "grpc-message": "malformed grpc-timeout"}),
        (fields(content_type="application/json"), {":status": "415"}),
        (fields(content_type="application/grpc-web"), {":status": "415"}),
        (fields(content_type=None), {":status": "415"}),
        (fields(method="GET"), {":status": "405"}),
        (fields(big="x" * 17_000), {":status": "431"}),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why_and_makes_no_session(
    head: bytes, expected: dict[str, str]
) -> None:
    peer = Peer()
    peer.send(headers(1, head, 5))
    _, answer = peer.answer()
    assert expected.items() <= answer.items()
    assert peer.ledger.sessions == []
    assert peer.counters.streams_open == 0


@pytest.mark.parametrize(
    "head", [fields(content_type="application/grpc+proto"), fields(grpc_encoding="identity"), fields(te=None)]
)
def test_what_grpc_allows_is_served(head: bytes) -> None:
    peer = Peer()
    peer.send(headers(1, head) + data(1, message(b"x"), end=True))
    messages, answer = peer.answer()
    assert messages == [b"x"]
    assert answer == {":status": "200", "content-type": "application/grpc", "grpc-status": "0"}


def test_messages_are_whole_however_they_are_cut_into_frames() -> None:
    sent = [b"", b"a", b"b" * 70_000, b"", b"c" * 16_384]
    stream = b"".join(map(message, sent))
    for size in (1, 3, 5, 6, 1_000, 16_384, 60_000):
        peer = Peer()
        peer.send(f.window_update(0, 1 << 20) + f.settings({f.Setting.INITIAL_WINDOW_SIZE: 1 << 20}) + headers(1))
        for at in range(0, len(stream), size):
            peer.send(data(1, stream[at : at + size]))
            if size < 6 and at > 200:  # the rest in one go: tiny frames all the way are slow and show nothing more
                rest = stream[at + size :]
                peer.send(*[data(1, rest[i : i + 60_000]) for i in range(0, len(rest), 60_000)])
                break
        peer.send(data(1, b"", end=True))
        messages, answer = peer.answer()
        assert messages == sent
        assert answer["grpc-status"] == "0"
        assert peer.connection.partial_bytes == 0


def test_a_session_that_fails_ends_its_rpc_with_internal_and_no_other() -> None:
    peer = Peer()
    peer.send(headers(1) + headers(3) + data(1, message(b"!raise") + message(b"never seen")))
    messages, answer = peer.answer()
    assert messages == []
    assert answer["grpc-status"] == "13"
    peer.send(data(3, message(b"fine"), end=True))
    assert peer.answer()[0] == [b"fine"]
    assert peer.counters.session_errors == 1
    assert peer.ledger.closings == [1, 1]
    assert peer.ledger.sessions[0].received == [b"!raise"]


class Broken:
    """Fails wherever it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise ValueError(where)

    def receive(self, message: bytes) -> Sequence[bytes]:
        self._fail("receive")
        return ()

    def half_closed(self) -> bool:
        self._fail("half_closed")
        return True

    def closed(self) -> None:
        self._fail("closed")


@pytest.mark.parametrize("where", ["factory", "receive", "half_closed", "closed"])
def test_a_failure_anywhere_in_a_session_is_counted_and_harms_nothing(where: str) -> None:
    def factory(_: Writer) -> Broken:
        if where == "factory":
            raise ValueError(where)
        return Broken(where)

    peer = Peer(methods={ECHO: factory})
    peer.send(headers(1) + data(1, message(b"x"), end=True))
    assert peer.answer()[1]["grpc-status"] == ("0" if where == "closed" else "13")
    assert peer.counters.session_errors == 1
    assert peer.counters.streams_open == 0
    assert not peer.connection.closing


def test_finish_inside_receive_lets_the_returned_messages_out_first() -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, message(b"!finish")))
    messages, answer = peer.answer()
    assert messages == [b"!finish"]
    assert (answer["grpc-status"], answer["grpc-message"]) == ("5", "100 %25 gone%0A")
    assert peer.ledger.closings == [1]


def test_a_writer_works_later_wakes_the_transport_and_is_silent_after_the_end() -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, message(b"!stay"), end=True))
    peer.answer()
    writer = peer.ledger.sessions[0].writer
    wakes = peer.wakes
    writer.send([b"a", b"b"])
    writer.finish()
    assert peer.wakes > wakes
    assert peer.answer()[0] == [b"a", b"b"]
    writer.send([b"c"])
    writer.finish(GrpcStatus.INTERNAL)
    assert peer.frames() == []
    assert peer.ledger.closings == [1]


def test_a_reset_ends_the_session_once_and_its_writer_does_nothing_more() -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, message(b"x")) + rst(1) + rst(1))
    peer.frames()
    peer.ledger.sessions[0].writer.send([b"late"])
    assert peer.frames() == []
    assert peer.ledger.closings == [1]


def test_a_message_above_the_limit_is_refused_when_its_length_is_known() -> None:
    peer = Peer(max_message_bytes=100)
    peer.send(headers(1) + data(1, b"\0\0\0\0\x65"))
    assert peer.answer()[1]["grpc-status"] == "8"
    peer.send(headers(3) + data(3, message(b"x" * 100), end=True))
    assert peer.answer()[0] == [b"x" * 100]
    peer.send(headers(5) + data(5, b"\0\0") + data(5, b"\0\0\x65x"))
    assert peer.answer()[1]["grpc-status"] == "8"


@pytest.mark.parametrize("flag", [1, 2, 255])
def test_a_compressed_message_without_an_encoding_is_an_error(flag: int) -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, bytes((flag,)) + message(b"x")[1:]))
    assert peer.answer()[1]["grpc-status"] == "13"
    assert peer.ledger.sessions[0].received == []


def test_a_stream_that_ends_inside_a_message_is_an_error() -> None:
    peer = Peer()
    peer.send(headers(1) + data(1, message(b"hello")[:-1], end=True))
    assert peer.answer()[1]["grpc-status"] == "13"
    assert peer.ledger.closings == [1]


def test_a_timeout_ends_the_rpc_with_deadline_exceeded() -> None:
    peer = Peer()
    peer.now = 100.0
    peer.send(headers(1, fields(grpc_timeout="1500m")) + headers(3, fields(grpc_timeout="1S")) + headers(5))
    deadlines = [peer.connection.next_deadline]
    peer.send(rst(3))
    deadlines.append(peer.connection.next_deadline)
    peer.connection.expire(101.4)
    assert peer.frames() == []
    peer.connection.expire(101.5)
    assert peer.answer()[1]["grpc-status"] == "4"
    deadlines.append(peer.connection.next_deadline)
    assert deadlines == [101.0, 101.5, None]
    assert peer.ledger.closings == [1, 1, 0]


def test_a_watch_opened_while_the_connection_drains_ends_at_once() -> None:
    peer = Peer(watches=frozenset((ECHO,)))
    peer.send(headers(1))
    peer.connection.drain(0.0)
    peer.send(headers(3))
    assert peer.answer()[1]["grpc-status"] == "14"
    assert peer.ledger.closings == [0, 1]


def test_metadata_of_the_service_is_sent_with_every_answer() -> None:
    peer = Peer()
    peer.connection._response += f.literal(b"x-picker", b"kvsteer")
    peer.send(headers(1) + data(1, message(b"x"), end=True))
    assert peer.answer()[1]["x-picker"] == "kvsteer"


def test_grpc_messages_are_percent_encoded_utf8() -> None:
    assert percent_encode("a b%c\né") == b"a b%25c%0A%C3%A9"
    assert percent_encode("\ud800") == b"?"


def test_a_writer_may_be_used_before_the_factory_returns() -> None:
    def factory(writer: Writer) -> EchoSession:
        writer.send([b"welcome"])
        writer.finish(GrpcStatus.UNAVAILABLE, "not now")
        session = EchoSession(writer)
        sessions.append(session)
        return session

    sessions: list[EchoSession] = []
    peer = Peer(methods={ECHO: factory})
    peer.send(headers(1))
    messages, answer = peer.answer()
    assert messages == [b"welcome"]
    assert answer["grpc-status"] == "14"
    assert [s.closings for s in sessions] == [1]


def test_losing_the_connection_closes_every_session_once() -> None:
    peer = Peer()
    peer.send(headers(1) + headers(3) + data(3, message(b"x")))
    peer.connection.shut()
    peer.connection.shut()
    assert peer.ledger.closings == [1, 1]
    assert peer.counters.streams_open == 0


def test_sessions_that_end_one_another_while_the_connection_goes_are_closed_once() -> None:
    writers: list[Writer] = []
    closings: list[int] = []

    class Spiteful(EchoSession):
        def closed(self) -> None:
            closings.append(1)
            for writer in writers:
                writer.finish(GrpcStatus.CANCELLED)

    def factory(writer: Writer) -> Spiteful:
        writers.append(writer)
        return Spiteful(writer)

    peer = Peer(methods={ECHO: factory})
    peer.send(headers(1) + headers(3) + headers(5))
    peer.connection.fail(ErrorCode.INTERNAL_ERROR, "test", "")
    assert closings == [1, 1, 1]
