"""The `h2` library as the client, a second opinion on every byte the server writes."""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.gateway.http2_frames import ErrorCode
from epp.gateway.http2_limits import Limits
from tests.gateway.wire import ECHO, Peer, message, unframe

HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", ECHO),
    (":authority", "picker"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


class Client:
    """An h2 client wired to a server connection by hand, with all it was told per stream."""

    def __init__(self, window: int = 65_535, limits: Limits | None = None) -> None:
        self.peer = Peer(limits, greet=False)
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.received: dict[int, bytearray] = {}
        self.trailers: dict[int, dict[str, str]] = {}
        self.resets: dict[int, int] = {}
        self.acknowledging = True
        self.terminated: int | None = None
        self.exchange()

    def open(self) -> int:
        stream: int = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, HEAD)
        self.received[stream] = bytearray()
        return stream

    def send(self, stream: int, payload: bytes, *, end: bool = False) -> None:
        """Send as windows allow, exchanging in between."""
        while True:
            size = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size, len(payload))
            last = size == len(payload)
            self.h2.send_data(stream, payload[:size], end_stream=end and last)
            payload = payload[size:]
            self.exchange()
            if last:
                return
            assert size, "the server gives no window"

    def exchange(self) -> None:
        """Carry bytes to and fro until both are silent. h2 raises on anything the protocol forbids."""
        while True:
            sent = self.h2.data_to_send()
            if sent:
                self.peer.send(sent)
            answer = self.peer.connection.take()
            if not (sent or answer):
                return
            for event in self.h2.receive_data(answer):
                match event:
                    case DataReceived():
                        self.received[event.stream_id] += event.data
                        if self.acknowledging:
                            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    case ResponseReceived() | TrailersReceived():
                        self.trailers.setdefault(event.stream_id, {}).update({str(k): str(v) for k, v in event.headers})
                    case StreamReset():
                        self.resets[event.stream_id] = event.error_code
                    case ConnectionTerminated():
                        self.terminated = event.error_code
                    case StreamEnded():
                        pass


@settings(max_examples=60, deadline=None)
@given(st.integers(500, 70_000), st.lists(st.lists(st.integers(0, 40_000), max_size=4), min_size=1, max_size=5))
def test_every_answer_arrives_whole_through_any_window(window: int, streams: list[list[int]]) -> None:
    client = Client(window)
    ids = [client.open() for _ in streams]
    for stream, sizes in zip(ids, streams, strict=True):
        sent = [bytes([n % 251]) * n for n in sizes]
        client.send(stream, b"".join(map(message, sent)), end=True)
        assert unframe(bytes(client.received[stream])) == sent
        assert client.trailers[stream]["grpc-status"] == "0"
    assert client.terminated is None
    assert client.peer.ledger.closings == [1] * len(streams)
    assert client.peer.connection.backlog == 0


OPERATIONS = st.lists(
    st.sampled_from(["open", "message", "half", "end", "reset", "ping", "window", "smaller", "silent", "finish"]),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_any_order_of_lawful_operations_keeps_both_sides_in_agreement(operations: list[str]) -> None:
    client = Client()
    alive: list[int] = []
    for operation in operations:
        if operation == "open":
            alive.append(client.open())
        elif operation == "ping":
            client.h2.ping(b"12345678")
        elif operation == "smaller":
            client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
        elif operation == "window":
            client.h2.increment_flow_control_window(1_000)
        elif alive:
            stream = alive[0]
            if operation == "message":
                client.send(stream, message(b"m" * 20))
                alive.append(alive.pop(0))
            elif operation == "silent":
                client.send(stream, message(b"!silent"))
            elif operation == "half":
                client.send(stream, message(b"half a message")[:9], end=True)
                alive.pop(0)
            elif operation == "finish":
                client.send(stream, message(b"!finish"))
                alive.pop(0)
            elif operation == "end":
                client.send(stream, b"", end=True)
                alive.pop(0)
            elif operation == "reset":
                client.h2.reset_stream(stream, ErrorCode.CANCEL)
                alive.pop(0)
        client.exchange()
    assert client.terminated is None
    assert client.peer.counters.connection_errors == {}
    assert set(client.peer.connection.streams) >= set(alive)
    client.peer.connection.shut()
    assert set(client.peer.ledger.closings) <= {1}


def test_a_client_that_reads_nothing_is_given_no_window_and_loses_its_stream_in_time() -> None:
    client = Client(limits=Limits(stream_window=50_000, stream_backlog=50_000))
    client.acknowledging = False
    stream = client.open()
    sent = 0
    while client.h2.local_flow_control_window(stream) >= 10_005:
        client.send(stream, message(bytes(10_000)))
        sent += 10_005
    assert sent < 65_535 + 50_000 + 50_000 + 10_005
    client.peer.connection.tick(0.0)
    client.peer.connection.tick(31.0)
    client.exchange()
    assert client.resets == {stream: ErrorCode.ENHANCE_YOUR_CALM}
    assert client.peer.ledger.closings == [1]
