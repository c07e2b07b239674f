"""What the ext_proc stream machine costs by itself, without HTTP/2 and without a decision.

usage: python -m bench.ext_proc_micro    prints JSON: name, value (median), unit, and how it was taken
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from epp.gateway.ext_proc import BodyMode, ExtProcStream, RequestReady, Steering
from epp.gateway.pb import ext_proc_pb2 as pb

ROUNDS = 7
STEERING = Steering(("10.0.0.1:8000",))


def headers(count: int = 20) -> pb.HttpHeaders:
    """About what Envoy sends for a chat request: `count` headers, 700 bytes."""
    fields = [(":method", b"POST"), (":path", b"/v1/chat/completions"), ("content-type", b"application/json")]
    fields += [(f"x-header-{n:02}", b"0123456789abcdefghij") for n in range(count - len(fields))]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=[pb.HeaderValue(key=k, raw_value=v) for k, v in fields]))


def request_messages(mode: BodyMode, size: int) -> list[bytes]:
    config = pb.ProtocolConfiguration()
    config.request_body_mode = config.response_body_mode = int(mode)  # type: ignore[assignment]
    duplex = mode is BodyMode.FULL_DUPLEX
    messages = [pb.ProcessingRequest(request_headers=headers(), protocol_config=config)]
    messages.append(pb.ProcessingRequest(request_body=pb.HttpBody(body=bytes(size), end_of_stream=not duplex)))
    if duplex:
        messages.append(pb.ProcessingRequest(request_body=pb.HttpBody(end_of_stream=True)))
    return [message.SerializeToString() for message in messages]


def run_request(messages: list[bytes]) -> ExtProcStream:
    stream = ExtProcStream()
    for message in messages:
        for event in stream.receive(message):
            if isinstance(event, RequestReady):
                stream.steer(STEERING)
        stream.take()
    return stream


def request_cost(mode: BodyMode, size: int) -> float:
    messages = request_messages(mode, size)
    return median_us(lambda: run_request(messages), 2_000 if size < 10_000 else 100)


def chunk_cost(mode: BodyMode, size: int) -> float:
    """One response chunk: the message in, its reply taken, its event made."""
    stream = run_request(request_messages(mode, 200))
    stream.receive(pb.ProcessingRequest(response_headers=headers(10)).SerializeToString())
    chunk = pb.ProcessingRequest(response_body=pb.HttpBody(body=bytes(size))).SerializeToString()

    def one() -> None:
        stream.receive(chunk)
        stream.take()

    return median_us(one, 20_000)


def median_us(work: Callable[[], object], times: int) -> float:
    """CPU microseconds of one call: the median of rounds."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(times):
            work()
        rounds.append((time.process_time() - start) / times * 1e6)
    return statistics.median(rounds)


def main() -> None:
    results: list[dict[str, object]] = []
    for mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX):
        for size in (200, 400_000):
            results.append(
                {"name": f"request {mode.name} {size} B, 20 headers", "value": request_cost(mode, size), "unit": "us"}
            )
    for mode in (BodyMode.STREAMED, BodyMode.FULL_DUPLEX):
        results.append({"name": f"response chunk {mode.name} 250 B", "value": chunk_cost(mode, 250), "unit": "us"})
    for result in results:
        result["value"] = round(float(str(result["value"])), 2)
    json.dump({"rounds": ROUNDS, "clock": "process CPU", "results": results}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
