"""A worker that costs next to nothing: HTTP/1.1 on many ports in one process, canned answers.

usage: python -m bench.backend --ports 16    prints its ports on one line, then serves until it is ended

In: any request; `x-chunks: N` asks for a stream of N events, one every `TICK_S`. Out: a small chat completion, or that
stream; on /metrics what an idle vLLM says, on /v1/models one model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from typing import cast

import uvloop

from bench.bodies import MODEL

TICK_S = 0.002
CHUNK = (
    b'data: {"id":"chatcmpl-b069d3dc567fe240","object":"chat.completion.chunk","created":1796086228,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" visit"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKS = re.compile(rb"\r\nx-chunks: *(\d+)", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"


def _whole(content_type: str, body: bytes) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _piece(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


METRICS = _whole(
    "text/plain",
    b'vllm:num_requests_running{model_name="m"} 0\nvllm:num_requests_waiting{model_name="m"} 0\n'
    b'vllm:kv_cache_usage_perc{model_name="m"} 0.0\n'
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100000"} 1.0\n',
)
MODELS = _whole("application/json", json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode())
BODY = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1796086228,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"visit"},"finish_reason":"stop"}],"usage":{"prompt_tokens":50,"completion_tokens":1,'
    b'"total_tokens":51,"prompt_tokens_details":{"cached_tokens":0}}}'
)
ANSWER = _whole("application/json", BODY)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_PIECE = _piece(CHUNK)
STREAM_END = _piece(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection: one request after the other, no pipelining."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's inherits from no class
        self._head = b""
        self._tail = b""
        self._left = 0
        """Bytes of the body to come; -1: until the last chunk."""

    def data_received(self, data: bytes) -> None:
        if not self._left:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            data, self._head = self._head[end + 2 :], self._head[: end + 2]
            length = _LENGTH.search(self._head)
            self._left = int(length[1]) + 2 if length else -1 if b"chunked" in self._head else 2
            self._tail = b""
        if self._left > 0:
            self._left -= len(data)
        else:
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
            self._left = 0 if self._tail == _LAST_CHUNK else -1
        if not self._left:
            head, self._head = self._head, b""
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        if head.startswith(b"GET /metrics"):
            self._transport.write(METRICS)
        elif head.startswith(b"GET /v1/models"):
            self._transport.write(MODELS)
        elif chunks := _CHUNKS.search(head):
            self._transport.write(STREAM_HEAD)
            self._stream(int(chunks[1]))
        else:
            self._transport.write(ANSWER)

    def _stream(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(STREAM_END)
            return
        self._transport.write(STREAM_PIECE)
        asyncio.get_running_loop().call_later(TICK_S, self._stream, left - 1)


async def serve(ports: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Connection, "127.0.0.1", 0) for _ in range(ports)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, default=16)
    sys.exit(uvloop.run(serve(parser.parse_args().ports)))
