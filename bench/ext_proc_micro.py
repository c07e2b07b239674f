"""What the ext_proc stream machine costs by itself, without HTTP/2 and without a decision."""

from __future__ import annotations

from bench import messages
from bench.backend import CHUNK
from bench.timing import cpu_us
from epp.figures import Figure, figure
from epp.gateway.ext_proc import BodyMode, ExtProcStream, RequestReady, Steering

STEERING = Steering(("10.0.0.1:8000",))


def figures() -> list[Figure]:
    out = []
    for mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX):
        for size, text in ((200, "200 B"), (400_000, "400 KB")):
            sent = messages.request(mode, bytes(size))
            cost = cpu_us(lambda sent=sent: run_request(sent))  # type: ignore[misc]
            out.append(figure(f"ext_proc/request {mode.name}, {text}", cost, "us"))
    stream = run_request(messages.request(BodyMode.FULL_DUPLEX, bytes(200)))
    stream.receive(messages.response_head())
    chunk = messages.response_chunk(CHUNK)

    def one() -> None:
        stream.receive(chunk)
        stream.take()

    return [*out, figure("ext_proc/response chunk", cpu_us(one), "us")]


def run_request(sent: list[bytes]) -> ExtProcStream:
    stream = ExtProcStream()
    for message in sent:
        for event in stream.receive(message):
            if isinstance(event, RequestReady):
                stream.steer(STEERING)
        stream.take()
    return stream
