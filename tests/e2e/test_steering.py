"""Real requests through the real Envoy and `kvsteer serve`, in both shipped profiles and on both edges.

One stack serves all tests of a pairing, as one would in production; tests that kill parts are in `test_outages.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from epp.envoy_options import FailureMode, Profile
from tests.e2e.backend import echo
from tests.e2e.envoy import until
from tests.e2e.serving import DESTINATION, Stack, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAIRINGS = [(profile, edge) for profile in Profile for edge in ("lean", "grpcio")]

NASTY = [
    b'{"model":"m","prompt":"x","seed":9007199254740993}',
    b'{"model":"m","prompt":"x","temperature":1e400}',
    b'{"model":"m","prompt":"x","top_p":0.10000000000000000555}',
    b'{"model":"m","prompt":"x","presence_penalty":-0.0}',
    b'{"model":"m","prompt":"x","logit_bias":{"5":NaN}}',
    b'{"model":"m","prompt":"\\ud800 \\udc00"}',
    b'{"model":"m","prompt":"x","user":"a","user":"b"}',
    b'{ "stream" : false ,\r\n\t"prompt":"x", "model":"m" }  \n',
    '{"model":"m","prompt":"Grüße \u2028 \U0001f600 \\u00e9"}'.encode(),
    b'{"model":"m","prompt":"x","n":1.0,"max_tokens":16}',
    b'{"model":"m","prompt":"x","seed":' + b"9" * 400 + b"}",
    b'{"prompt":["a","b"],"model":"m","unknown":{"deep":[[[[[[1]]]]]]}}',
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PAIRINGS, ids=lambda p: f"{p[0]}-{p[1]}")
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    profile, edge = request.param
    async with running_stack(profile, edge, failure_mode=FailureMode.CLOSED) as running:
        yield running


BODY = b'{"model":"m","prompt":"x"}'


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def completion(size: int) -> bytes:
    """A completion request of `size` bytes in all."""
    head, tail = b'{"model":"m","prompt":"', b'"}'
    words = b"The quick brown fox jumps over the lazy dog. " * (size // 45 + 1)
    return head + words[: size - len(head) - len(tail)] + tail


async def test_a_body_reaches_the_worker_byte_for_byte(stack: Stack) -> None:
    answers = [await stack.ask(body) for body in NASTY]
    assert [a.status for a in answers] == [200] * len(NASTY)
    assert [a.account["sha256"] for a in answers] == [sha256(body) for body in NASTY]


@pytest.mark.parametrize("size", [61_999, 62_000, 62_001, 5_000_000, 20 << 20])
async def test_a_long_body_reaches_the_worker_byte_for_byte(stack: Stack, size: int) -> None:
    body = completion(size)
    answer = await stack.ask(body)
    assert (answer.status, answer.account["length"], answer.account["sha256"]) == (200, size, sha256(body))


async def test_an_upload_in_pieces_reaches_the_worker_byte_for_byte(stack: Stack) -> None:
    pieces = [b'{"model":"m",', b'"prompt":"', b"x" * 70_000, b'"', b"}"]

    async def upload() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
            await asyncio.sleep(0.01)

    answer = await stack.ask(upload())
    assert (answer.status, answer.account["sha256"]) == (200, sha256(b"".join(pieces)))


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("GET", "/health"), ("POST", "/reset_prefix_cache")]
)
async def test_a_request_without_a_body_is_steered_at_once(stack: Stack, method: str, path: str) -> None:
    answer = await stack.ask(method=method, path=path)
    assert (answer.status, answer.account["path"], answer.account["length"]) == (200, path, 0)
    assert answer.account["headers"][DESTINATION] == answer.account["worker"]


async def test_a_body_that_is_no_request_is_refused_with_an_openai_error(stack: Stack) -> None:
    for body in (b"{", b"[]", b'"x"', b'{"model":1}', b"\xff\xfe", b"[" * 10_000):
        answer = await stack.ask(body)
        assert (answer.status, answer.headers["content-type"]) == (400, "application/json"), body[:20]
        error = json.loads(answer.body)["error"]
        assert error["message"]
        assert len(answer.body) < 1_000


async def test_trailers_pass_both_ways(stack: Stack) -> None:
    reply = echo(trailers={"x-answer": "yes"})["x_echo"]
    reader, writer = await asyncio.open_connection(stack.envoy.host, stack.envoy.port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-echo: {reply}\r\nconnection: close\r\n"
        chunk = b"%x\r\n%s\r\n0\r\nx-question: why\r\n\r\n" % (len(BODY), BODY)
        writer.write(f"{head}trailer: x-question\r\ntransfer-encoding: chunked\r\n\r\n".encode() + chunk)
        async with asyncio.timeout(10):
            answer = (await reader.read()).decode()
    finally:
        writer.close()
    assert '"trailers": {"x-question": "why"}' in answer
    assert sha256(BODY) in answer
    assert answer.endswith("0\r\nx-answer: yes\r\n\r\n")


async def test_a_client_cannot_steer(stack: Stack) -> None:
    lies = [DESTINATION, f"{DESTINATION}-subset", f"{DESTINATION}-served"]
    lies += ["x-prefiller-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port", "x-data-parallel-rank"]
    for method, body in (("POST", BODY), ("GET", None)):
        answer = await stack.ask(body, method=method, **{name.replace("-", "_"): "10.0.0.9:22" for name in lies})
        assert answer.status == 200
        seen = {name: value for name, value in answer.account["headers"].items() if name in lies}
        assert seen == {DESTINATION: answer.account["headers"][DESTINATION]}
        assert seen[DESTINATION].split(",")[0] == answer.account["worker"]


async def test_header_metadata_and_serving_worker_agree_over_a_thousand_requests(stack: Stack) -> None:
    async def client(requests: int) -> None:
        for i in range(requests):
            body = b'{"model":"m","prompt":"%d"}' % i if i % 5 else None
            answer = await stack.ask(body, method="POST" if body else "GET")
            picked = answer.account["headers"][DESTINATION]
            assert answer.status == 200
            assert answer.headers["x-metadata"] == picked
            assert answer.account["worker"] == answer.headers["x-worker"] == picked.split(",")[0]

    await asyncio.gather(*(client(125) for _ in range(8)))
    assert min(w.requests for w in stack.workers) > 0
    await stack.idle()


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        (503, "text/plain", "upstream connect error or disconnect/reset before headers"),
        (502, "text/html", "<html><body>Bad Gateway</body></html>"),
        (502, "text/plain", ""),
        (200, "application/json", "{not json"),
        (404, "application/json", '{"error": {"message": "The model `x` does not exist."}}'),
        (200, "audio/wav", "RIFF\x00\x01"),
    ],
)
async def test_a_workers_answer_is_passed_untouched(stack: Stack, status: int, content_type: str, body: str) -> None:
    answer = await stack.ask(BODY, **echo(status=status, content_type=content_type, body=body))
    assert (answer.status, answer.body.decode(), answer.headers["content-type"]) == (status, body, content_type)


async def test_a_stream_of_events_is_passed_as_it_comes(stack: Stack) -> None:
    reply = echo(chunks=50, pause=0.002, content_type="text/event-stream")
    answer = await stack.ask(b'{"model":"m","prompt":"x","stream":true}', **reply)
    events = [f'data: {{"i":{i}}}\n\n' for i in range(50)]
    assert answer.body.decode() == "".join([*events, "data: [DONE]\n\n"])


async def test_a_long_prompt_beside_many_short_ones_costs_none_of_them_its_answer(stack: Stack) -> None:
    long = completion(10_000_000)
    first = asyncio.create_task(stack.ask(long))
    shorts = await asyncio.gather(*(stack.ask(b'{"model":"m","prompt":"%d"}' % i) for i in range(200)))
    answer = await first
    assert {a.status for a in (answer, *shorts)} == {200}
    assert answer.account["sha256"] == sha256(long)


async def test_slow_requests_all_run_at_once(stack: Stack) -> None:
    many = 1_200 if stack.edge == "lean" else 300
    tasks = [asyncio.create_task(stack.ask(BODY, **echo(hold=True))) for _ in range(many)]
    try:
        await until(stack.running, lambda n: n == many)
    finally:
        for worker in stack.workers:
            worker.gate.set()
    assert {a.status for a in await asyncio.gather(*tasks)} == {200}
    await stack.idle()


async def test_aborted_requests_leave_nothing_in_flight(stack: Stack) -> None:
    endless = echo(chunks=1000, pause=0.05, content_type="text/event-stream")
    tasks = [asyncio.create_task(stack.ask(BODY, **endless)) for _ in range(20)]
    await until(stack.running, lambda n: n == 20)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await stack.idle()


async def test_a_websocket_is_steered_and_carries_bytes_both_ways(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection(stack.envoy.host, stack.envoy.port)
    try:
        writer.write(
            b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\nping"
        )
        async with asyncio.timeout(10):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            assert head.startswith("HTTP/1.1 101 ")
            assert any(f"x-worker: {w.address}" in head for w in stack.workers)
            assert await reader.readexactly(4) == b"ping"
    finally:
        writer.close()
    await stack.idle()


async def test_a_body_over_the_limit_is_refused(stack: Stack) -> None:
    assert (await stack.ask(completion(33 << 20))).status == 413
    assert (await stack.ask(BODY)).status == 200


async def test_nothing_of_all_this_was_an_error_to_the_picker(stack: Stack) -> None:
    lines = stack.picker.log.read_text().splitlines()
    assert [line for line in lines if " ERROR " in line or "Traceback" in line] == []
