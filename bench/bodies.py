"""Request bodies that the benchmarks send: small ones, and coding agents' long conversations turn by turn.

In: a seed and sizes. Out: JSON bytes. A `Conversation` gives bodies that share all bytes up to their last turn, as an
agent sends them: each turn adds a call of a tool and its result.
"""

from __future__ import annotations

import json
import random

MODEL = "m"
TURN_BYTES = 3_700
"""About what one turn adds: a short call and a long result."""


class Conversation:
    """An agent's conversation of at least `size` bytes; `body(branch, turn)` is what it sends then."""

    def __init__(self, seed: int, size: int = 400_000, tools: int = 20) -> None:
        self._random = random.Random(seed)
        self._words = [
            "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz_", k=self._random.randint(2, 9)))
            for _ in range(3000)
        ]
        self._seed = seed
        messages: list[dict[str, object]] = [{"role": "system", "content": f"{seed} {self._text(8000)}"}]
        written = 8000 + tools * 900
        while written < size:
            messages += self._turn(len(messages))
            written += TURN_BYTES
        self._head = b'{"model":"%s","tools":%s,"messages":%s' % (
            MODEL.encode(),
            json.dumps([self._tool(n) for n in range(tools)]).encode(),
            json.dumps(messages).encode().removesuffix(b"]"),
        )
        self._branch = (-1, [b""])

    def body(self, branch: int, turn: int, *, stream: bool = False) -> bytes:
        """The conversation and `turn` turns of `branch` after it; another branch has other turns."""
        if self._branch[0] != branch:
            self._branch = (branch, [b""])
            self._random = random.Random(f"{self._seed}/{branch}")
        turns = self._branch[1]
        while len(turns) <= turn:
            added = json.dumps(self._turn(len(turns)))[1:-1].encode()
            turns.append(turns[-1] + b", " + added)
        return b'%s%s],"stream":%s,"max_tokens":4096}' % (self._head, turns[turn], b"true" if stream else b"false")

    def _turn(self, number: int) -> list[dict[str, object]]:
        function = {"name": "read", "arguments": json.dumps({"path": f"src/module_{number}.py", "limit": number})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        return [
            {"role": "assistant", "content": self._text(200), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": self._text(3340)},
        ]

    def _tool(self, number: int) -> dict[str, object]:
        path = {"type": "string", "description": self._text(60)}
        parameters = {"type": "object", "properties": {"path": path}}
        described = {"name": f"tool_{number}", "description": self._text(600), "parameters": parameters}
        return {"type": "function", "function": described}

    def _text(self, size: int) -> str:
        return " ".join(self._random.choices(self._words, k=size // 6 - size // 120)) + "\n"


def small(seed: int, *, stream: bool = False) -> bytes:
    """A chat request of about 200 bytes."""
    words = random.Random(seed).choices(("what", "is", "the", "name", "of", "that", "file", "which"), k=20)
    content = f"{seed} {' '.join(words)}"[:105].ljust(105, ".")
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": stream, "max_tokens": 64}
    return json.dumps(body).encode()
