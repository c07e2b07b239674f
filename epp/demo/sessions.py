"""Recorded coding-agent sessions as chat requests: the shipped sample, and text that behaves like its prompts.

In: JSON lines, one session each: `{"id", "requests": [{"t", "out", "keep", "new": [[first, count], ...]}]}`. A prompt
is a list of blocks of 64 tokens: the first `keep` blocks of the request before it, then the new runs. Block ids
are local to a session, as in the source, so nothing is shared between sessions. Out: `Turn`s whose messages have the
recorded number of tokens; equal ids give equal text, so prefixes match as they did when recorded.

The sample is derived from the kv-cache-tester traces (see `data/README.md`); `python -m epp.demo.sessions SOURCE OUT`
makes it anew.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec

BLOCK_TOKENS = 64
SAMPLE = "agent_sessions.jsonl.gz"

MAX_PROMPT_TOKENS = 48_000
MIN_TURNS, MAX_TURNS = 7, 16
"""Bounds of what the sample takes: short enough for four emulated workers and a load generator on two cores."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    at_s: float
    """When it was sent, seconds from the session's first request."""
    output_tokens: int
    messages: tuple[str, ...]
    """Texts of the messages, oldest first: the system prompt, then what was added turn by turn."""
    prompt_tokens: int


@dataclass(frozen=True)
class Session:
    """One recorded conversation."""

    id: str
    requests: Sequence[dict[str, Any]]

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns())

    def _turns(self) -> Iterator[Turn]:
        words = Words(self.id)
        ids: list[int] = []
        ends: list[int] = []
        for request in self.requests:
            keep = request["keep"]
            ids = ids[:keep] + [first + k for first, count in request["new"] for k in range(count)]
            # A message that the recorded client cut short ends where the kept blocks end.
            ends = [end for end in ends if end < keep] + ([keep] if keep else [])
            if len(ids) > keep:
                ends.append(len(ids))
            starts = [0, *ends[:-1]]
            messages = tuple(words.text(ids[a:b]) for a, b in zip(starts, ends, strict=True))
            yield Turn(request["t"], request["out"], messages, len(ids) * BLOCK_TOKENS)


class Words:
    """Text of a given number of tokens for the shipped tokenizer: every word is one token of its vocabulary."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._blocks: dict[int, str] = {}

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self._block(i) for i in ids)

    def _block(self, block: int) -> str:
        text = self._blocks.get(block)
        if text is None:
            random = Random(f"{self._session}/{block}")
            text = self._blocks[block] = "".join(" " + w for w in random.choices(vocabulary(), k=BLOCK_TOKENS))
        return text


_vocabulary: list[str] = []


def vocabulary() -> Sequence[str]:
    """Words that are one token each when a space precedes them, whatever surrounds them."""
    if not _vocabulary:
        tokenizer = json.loads(files("epp.sim").joinpath("data/tokenizer.json").read_text(encoding="utf-8"))
        entries = (t[1:] for t in tokenizer["model"]["vocab"] if t.startswith("Ġ"))
        _vocabulary.extend(sorted(w for w in entries if len(w) > 2 and w.isascii() and w.isalpha()))
    return _vocabulary


class SessionsError(ValueError):
    """A file of sessions that cannot be used; the text names the file, the line and what is wrong there."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class _Request(msgspec.Struct):
    t: Annotated[float, msgspec.Meta(ge=0)]
    out: _Count
    keep: _Count
    new: list[tuple[int, _Count]]


class _Line(msgspec.Struct):
    id: str
    requests: Annotated[list[_Request], msgspec.Meta(min_length=1)]


def load(path: Path | None = None) -> list[Session]:
    """The shipped sample, or a file of the same form (plain or .gz). Raises SessionsError."""
    try:
        data = path.read_bytes() if path else files("epp.demo").joinpath(f"data/{SAMPLE}").read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise SessionsError(f"{path}: cannot be read: {error}") from None
    sessions = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            read = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise SessionsError(f"{path}:{number}: not a session: {error}") from None
        sessions.append(Session(read.id, [msgspec.to_builtins(request) for request in read.requests]))
    if not sessions:
        raise SessionsError(f"{path}: holds no session")
    return sessions


def derive(source: Path, count: int = 16) -> list[dict[str, Any]]:
    """The first `count` distinct sessions without sub-agents that fit the bounds, cut to `MAX_TURNS` requests."""
    out: list[dict[str, Any]] = []
    seen: set[str] = set()
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        for line in lines:
            session = json.loads(line)
            requests = session["requests"][:MAX_TURNS]
            if len(requests) < MIN_TURNS or any(r["type"] == "subagent" for r in requests):
                continue
            if max(r["in"] for r in requests) > MAX_PROMPT_TOKENS:
                continue
            slim = [{"t": r["t"], "out": r["out"], "keep": r["keep"], "new": r["new"]} for r in requests]
            shape = json.dumps([r["new"] for r in slim])
            if shape not in seen:
                seen.add(shape)
                out.append({"id": session["id"], "requests": slim})
    return out[:count]


def main(source: str, out: str) -> None:
    lines = "".join(json.dumps(s, separators=(",", ":")) + "\n" for s in derive(Path(source)))
    Path(out).write_bytes(gzip.compress(lines.encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:3])
