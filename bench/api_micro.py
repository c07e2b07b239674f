"""What reading bodies costs by itself: a coding agent's request of about 400 KB, and one chunk of an event stream."""

from __future__ import annotations

from bench.backend import CHUNK
from bench.bodies import Conversation
from bench.timing import EFFORT, cpu_us, each_us
from epp.api.fields import read_fields
from epp.api.requests import parse_request
from epp.api.responses import ResponseReader
from epp.api.rewriting import Renaming, response_rewriter
from epp.api.splice import include_usage, rewrite_model
from epp.figures import Figure, figure
from epp.request import Api, Headers, RequestHead


def figures() -> list[Figure]:
    conversation = Conversation(7)
    body = conversation.body(0, 0, stream=True)
    turns = [conversation.body(1, turn) for turn in range(max(3, EFFORT.times(30)))]
    head = RequestHead("POST", "/v1/chat/completions", Headers({"content-type": [b"application/json"]}))
    ids = b'{"model":"m","prompt":[%s]}' % b",".join(b"%d" % (n * 37 % 150_000) for n in range(100_000))
    ids_head = RequestHead("POST", "/v1/completions", Headers())
    reader = ResponseReader(Api.CHAT, "text/event-stream")
    rewriter = response_rewriter("text/event-stream", renaming=Renaming(target="m", client="client"))
    assert rewriter is not None
    runs = (
        ("read the members of 400 KB never seen", lambda: read_fields(body)),
        ("read a request of 400 KB seen before, looking for media", lambda: parse_request(head, body, "r").multimodal),
        ("read 100,000 token ids", lambda: parse_request(ids_head, ids, "r")),
        ("rewrite the model of 400 KB", lambda: rewrite_model(body, "target")),
        ("ask for usage in 400 KB", lambda: include_usage(body)),
        ("read a response chunk", lambda: reader.feed(CHUNK)),
        ("rename the model in a response chunk", lambda: rewriter.feed(CHUNK, False)),
    )
    out = [figure(f"api/{name}", cpu_us(run), "us") for name, run in runs]
    grown = each_us([lambda b=turn: parse_request(head, b, "r") for turn in turns])  # type: ignore[misc]
    return [*out, figure("api/read a request of 400 KB that grew by a turn", grown, "us")]
