"""What reading bodies costs by itself: a coding agent's request of about 393 KB, and one chunk of an event stream.

usage: python -m bench.api_micro    prints JSON: name, value (median of rounds, CPU time), unit
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable

from epp.api.requests import parse_request
from epp.api.responses import ResponseReader
from epp.api.rewriting import Renaming, response_rewriter
from epp.api.splice import include_usage, rewrite_model
from epp.request import Api, Headers, RequestHead

ROUNDS = 7
CHUNK = (
    b'data: {"id":"chatcmpl-b069d3dc567fe240","object":"chat.completion.chunk","created":1796086228,"model":"target",'
    b'"choices":[{"index":0,"delta":{"content":" visit"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)


def agentic_body(turns: int = 95, tools: int = 20) -> bytes:
    """A conversation of short tool calls and long tool results, as coding agents send it: 191 messages, 20 tools."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=rng.randint(2, 9))) for _ in range(3000)]

    def text(size: int) -> str:
        return " ".join(rng.choices(words, k=size // 6 - size // 120)) + "\n"

    messages: list[dict[str, object]] = [{"role": "system", "content": text(8000)}]
    for n in range(turns):
        function = {"name": "read", "arguments": json.dumps({"path": f"src/module_{n}.py", "limit": n})}
        call = {"id": f"call_{n}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": text(200), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{n}", "content": text(3340)})
    schema = {"type": "object", "properties": {"path": {"type": "string", "description": text(60)}}}
    described = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": text(600), "parameters": schema}}
        for n in range(tools)
    ]
    body = {"model": "client", "messages": messages, "tools": described, "stream": True, "max_tokens": 4096}
    return json.dumps(body).encode()


def cost_us(run: Callable[[], object], times: int) -> float:
    """Median CPU time of one call, over `ROUNDS` rounds of `times` calls."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(times):
            run()
        rounds.append((time.process_time() - begin) / times * 1e6)
    return round(statistics.median(rounds), 2)


def main() -> None:
    body = agentic_body()
    head = RequestHead("POST", "/v1/chat/completions", Headers({"content-type": [b"application/json"]}))
    ids = b'{"model":"m","prompt":[%s]}' % b",".join(b"%d" % (n * 37 % 150_000) for n in range(100_000))
    ids_head = RequestHead("POST", "/v1/completions", Headers())
    reader = ResponseReader(Api.CHAT, "text/event-stream")
    rewriter = response_rewriter("text/event-stream", renaming=Renaming(target="target", client="client"))
    assert rewriter is not None
    runs: list[tuple[str, Callable[[], object], int]] = [
        ("parse_agentic_request", lambda: parse_request(head, body, "r"), 200),
        ("parse_agentic_request_and_look_for_media", lambda: parse_request(head, body, "r").multimodal, 100),
        ("parse_100k_token_ids", lambda: parse_request(ids_head, ids, "r"), 10),
        ("rewrite_model", lambda: rewrite_model(body, "target"), 200),
        ("inject_include_usage", lambda: include_usage(body), 200),
        ("read_sse_chunk", lambda: reader.feed(CHUNK), 5000),
        ("rename_model_in_sse_chunk", lambda: rewriter.feed(CHUNK, False), 5000),
    ]
    results = [{"name": f"api.{name}", "value": cost_us(run, times), "unit": "us"} for name, run, times in runs]
    json.dump({"body_bytes": len(body), "chunk_bytes": len(CHUNK), "results": results}, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
