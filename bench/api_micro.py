"""What reading bodies costs by itself: a coding agent's request of about 400 KB, and one chunk of an event stream."""

from __future__ import annotations

from bench.backend import CHUNK
from bench.bodies import Conversation
from bench.timing import cpu_us
from epp.api.requests import parse_request
from epp.api.responses import ResponseReader
from epp.api.rewriting import Renaming, response_rewriter
from epp.api.splice import include_usage, rewrite_model
from epp.figures import Figure, figure
from epp.request import Api, Headers, RequestHead


def figures() -> list[Figure]:
    body = Conversation(7).body(0, 0, stream=True)
    head = RequestHead("POST", "/v1/chat/completions", Headers({"content-type": [b"application/json"]}))
    ids = b'{"model":"m","prompt":[%s]}' % b",".join(b"%d" % (n * 37 % 150_000) for n in range(100_000))
    ids_head = RequestHead("POST", "/v1/completions", Headers())
    reader = ResponseReader(Api.CHAT, "text/event-stream")
    rewriter = response_rewriter("text/event-stream", renaming=Renaming(target="m", client="client"))
    assert rewriter is not None
    runs = (
        ("read a request of 400 KB", lambda: parse_request(head, body, "r")),
        ("the same, looking for media", lambda: parse_request(head, body, "r").multimodal),
        ("read 100,000 token ids", lambda: parse_request(ids_head, ids, "r")),
        ("rewrite the model of 400 KB", lambda: rewrite_model(body, "target")),
        ("ask for usage in 400 KB", lambda: include_usage(body)),
        ("read a response chunk", lambda: reader.feed(CHUNK)),
        ("rename the model in a response chunk", lambda: rewriter.feed(CHUNK, False)),
    )
    return [figure(f"api/{name}", cpu_us(run), "us") for name, run in runs]
