"""Envoy's side of one ext_proc stream: sends what Envoy sends in each mode, applies and judges what comes back.

Behaviour as observed on Envoy 1.40. A reply Envoy would not accept fails the test here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from epp.gateway.errors import Rejection
from epp.gateway.ext_proc import BodyMode, Event, ExtProcStream, RequestReady, Steering
from epp.gateway.pb import ext_proc_pb2 as pb

Fields = Iterable[tuple[str, bytes]]
Decide = Callable[[RequestReady], Steering | Rejection | None]

CHAT: Fields = ((":method", b"POST"), (":path", b"/v1/chat/completions"), ("content-type", b"application/json"))
OK: Fields = ((":status", b"200"), ("content-type", b"text/event-stream"))


def header_map(fields: Fields) -> pb.HeaderMap:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=name, raw_value=value) for name, value in fields])


def http_headers(fields: Fields, *, end: bool = False) -> pb.HttpHeaders:
    return pb.HttpHeaders(headers=header_map(fields), end_of_stream=end)


def metadata(**spaces: dict[str, Any]) -> pb.Metadata:
    """Filter metadata; `__` in a name stands for a dot."""
    message = pb.Metadata()
    for space, values in spaces.items():
        message.filter_metadata[space.replace("__", ".")].update(values)
    return message


def subset_hint(value: Any) -> pb.Metadata:
    return metadata(envoy__lb__subset_hint={"x-gateway-destination-endpoint-subset": value})


def cut(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """`data` in the pieces between `cuts`; some may be empty."""
    edges = [0, *sorted(min(place, len(data)) for place in cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges)]


class Peer:
    """One HTTP exchange as Envoy drives it. After it, the attributes tell what worker and client were given."""

    def __init__(
        self,
        stream: ExtProcStream,
        request_mode: BodyMode = BodyMode.FULL_DUPLEX,
        response_mode: BodyMode = BodyMode.FULL_DUPLEX,
        *,
        decide: Decide = lambda ready: Steering(("10.0.0.1:8000",)),
        observability: bool = False,
        eager: bool = False,
        metadata_context: pb.Metadata | None = None,
    ) -> None:
        self.stream = stream
        self.modes = {"request": request_mode, "response": response_mode}
        self.decide = decide
        self.observability = observability
        self.metadata_context = metadata_context
        self.config: pb.ProtocolConfiguration | None = pb.ProtocolConfiguration(
            request_body_mode=int(request_mode),  # type: ignore[arg-type]
            response_body_mode=int(response_mode),  # type: ignore[arg-type]
            send_body_without_waiting_for_header_response=eager,
        )
        self.events: list[Event] = []
        self.replies: list[pb.ProcessingResponse] = []
        self.immediate: pb.ImmediateResponse | None = None
        self.destination_metadata: str | None = None
        self.headers: dict[str, dict[str, list[bytes]]] = {"request": {}, "response": {}}
        self.body: dict[str, bytes] = {"request": b"", "response": b""}
        self.ends = {"request": 0, "response": 0}
        self.trailers_answered = {"request": False, "response": False}

    # ---- sending

    def send(self, **content: Any) -> list[pb.ProcessingResponse]:
        """One message with this content; the replies that came at once, decision included."""
        message = pb.ProcessingRequest(**content, observability_mode=self.observability)
        if self.config is not None:
            message.protocol_config.CopyFrom(self.config)
            self.config = None
        if self.metadata_context is not None:
            message.metadata_context.CopyFrom(self.metadata_context)
        return self.send_bytes(message.SerializeToString())

    def send_bytes(self, message: bytes) -> list[pb.ProcessingResponse]:
        events = self.stream.receive(message)
        self.events += events
        for event in events:
            if isinstance(event, RequestReady):
                self.answer(self.decide(event))
        return self.collect()

    def answer(self, answer: Steering | Rejection | None) -> None:
        if isinstance(answer, Steering):
            self.stream.steer(answer)
        elif answer is not None:
            self.stream.reject(answer)

    def collect(self) -> list[pb.ProcessingResponse]:
        """Take the replies that are there and apply them."""
        replies = [pb.ProcessingResponse.FromString(reply) for reply in self.stream.take()]
        assert not (replies and self.observability), "a message in observability mode was answered"
        for reply in replies:
            self._apply(reply)
        self.replies += replies
        return replies

    def request(self, fields: Fields = CHAT, chunks: Sequence[bytes] | None = None, *, trailers: bool = False) -> None:
        """The request; `chunks` None: headers only. Full duplex ends with an empty chunk, as Envoy does on HTTP/1."""
        self._send("request", fields, chunks, trailers=trailers)

    def response(self, fields: Fields = OK, chunks: Sequence[bytes] | None = None, *, trailers: bool = False) -> None:
        self._send("response", fields, chunks, trailers=trailers)

    def _send(self, side: str, fields: Fields, chunks: Sequence[bytes] | None, *, trailers: bool) -> None:
        mode = self.modes[side]
        for name, value in fields:
            self.headers[side].setdefault(name, []).append(value)
        whole = b"".join(chunks or ())
        if mode is not BodyMode.FULL_DUPLEX:
            self.body[side] = whole
        self._expect_one(f"{side}_headers", http_headers(fields, end=chunks is None and not trailers), mode)
        if chunks is not None and mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            self._expect_one(f"{side}_body", pb.HttpBody(body=whole, end_of_stream=not trailers), mode)
        elif chunks is not None and mode is not BodyMode.NONE:
            if mode is BodyMode.STREAMED:
                self.body[side] = b""
            for chunk in chunks:
                self._streamed_whole = chunk
                self._expect_one(f"{side}_body", pb.HttpBody(body=chunk), mode)
            if not trailers:
                self._streamed_whole = b""
                self._expect_one(f"{side}_body", pb.HttpBody(end_of_stream=True), mode)
        if trailers:
            self._expect_one(f"{side}_trailers", pb.HttpTrailers(), mode)

    def _expect_one(self, kind: str, content: Any, mode: BodyMode) -> None:
        """Outside full duplex every message has exactly one reply, of its own kind, unless the request was refused."""
        if self.immediate is not None:
            return
        replies = self.send(**{kind: content})
        if mode is BodyMode.FULL_DUPLEX or self.observability:
            return
        assert [reply.WhichOneof("response") for reply in replies] in ([kind], ["immediate_response"])

    # ---- applying

    _ORDER = ("headers", "body", "trailers")

    def _apply(self, reply: pb.ProcessingResponse) -> None:
        kind = reply.WhichOneof("response")
        assert self.immediate is None, "a reply after an ImmediateResponse"
        assert kind is not None, "an empty reply"
        if reply.HasField("dynamic_metadata"):
            assert list(reply.dynamic_metadata.fields) == ["envoy.lb"]
            space = reply.dynamic_metadata.fields["envoy.lb"].struct_value
            self.destination_metadata = space.fields["x-gateway-destination-endpoint"].string_value
        if kind == "immediate_response":
            self.immediate = reply.immediate_response
            return
        side, part = kind.split("_")
        if part == "trailers":
            assert not self.trailers_answered[side], "trailers answered twice"
            self.trailers_answered[side] = True
            return
        assert not self.trailers_answered[side], "a body after the trailers"
        common = getattr(reply, kind).response
        self._mutate(side, common.header_mutation)
        if part == "body":
            self._apply_body(side, common.body_mutation)

    def _mutate(self, side: str, mutation: pb.HeaderMutation) -> None:
        fields = self.headers[side]
        assert not {option.header.key for option in mutation.set_headers} & set(mutation.remove_headers)
        for name in mutation.remove_headers:
            fields.pop(name, None)
        for option in mutation.set_headers:
            assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
            assert option.header.raw_value
            assert not option.header.value
            fields[option.header.key] = [option.header.raw_value]

    def _apply_body(self, side: str, mutation: pb.BodyMutation) -> None:
        kind = mutation.WhichOneof("mutation")
        mode = self.modes[side]
        if mode is BodyMode.FULL_DUPLEX:
            assert kind == "streamed_response", "full duplex takes streamed bodies only"
            assert self.ends[side] == 0, "a body after its end_of_stream"
            chunk = mutation.streamed_response
            assert len(chunk.body) <= 62_000
            self.body[side] += chunk.body
            self.ends[side] += chunk.end_of_stream
            return
        assert kind in (None, "body", "clear_body")
        replaced = {"body": mutation.body, "clear_body": b""}.get(kind or "")
        if mode is BodyMode.STREAMED:
            self.body[side] += self._streamed_whole if replaced is None else replaced
        elif replaced is not None:
            self.body[side] = replaced
            claimed = self.headers[side].get("content-length")
            assert claimed in (None, [str(len(replaced)).encode()]), "Envoy: 500, content-length is not the body's"
