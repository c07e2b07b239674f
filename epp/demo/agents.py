"""Agents: recorded sessions sent as real streaming chat requests, each turn after the reply to the one before.

In: sessions, the URL of a gateway, a duration. Out: one `Reply` per request. The gaps between turns are the recorded
ones, cut at `LONGEST_GAP_S` and scaled so that a session takes most of the duration.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import aiohttp

from epp.api.responses import ResponseReader
from epp.demo.sessions import Session, Turn
from epp.request import Api

LONGEST_GAP_S = 30.0
SPREAD = 0.15
"""Share of the duration over which sessions begin."""
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Reply:
    """How one request went. `ttft_s` is in seconds from sending, `worker` as named in the response's `x-served-by`."""

    session: str
    turn: int
    status: int
    worker: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What is replayed, where, how fast."""

    url: str
    """Base URL of the gateway, without a trailing slash."""
    model: str
    duration_s: float
    max_output_tokens: int
    seed: int = 1


async def replay(sessions: Sequence[Session], load: Load, seen: Callable[[Reply], None]) -> list[Reply]:
    """Run every session at once; `seen` is told of each reply as it ends."""
    random = Random(load.seed)
    starts = [random.random() * SPREAD * load.duration_s for _ in sessions]
    replies: list[Reply] = []

    def record(reply: Reply) -> None:
        replies.append(reply)
        seen(reply)

    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            auto_decompress=False,
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        for session, start in zip(sessions, starts, strict=True):
            group.create_task(_run(client, session, load, start, record))
    return replies


def pace(turns: Sequence[Turn], span_s: float) -> list[float]:
    """When each turn is due, seconds from the first: the recorded gaps, cut, scaled to fill `span_s`."""
    due = [0.0]
    for before, after in pairwise(turns):
        due.append(due[-1] + min(max(after.at_s - before.at_s, 0.0), LONGEST_GAP_S))
    scale = span_s / due[-1] if due[-1] > 0 else 0.0
    return [d * scale for d in due]


async def _run(
    client: aiohttp.ClientSession, session: Session, load: Load, start_s: float, record: Callable[[Reply], None]
) -> None:
    turns = session.turns
    begun = time.monotonic() + start_s
    for number, (turn, due) in enumerate(zip(turns, pace(turns, load.duration_s * (1 - SPREAD)), strict=True)):
        await asyncio.sleep(max(0.0, begun + due - time.monotonic()))
        record(await _ask(client, session, number, turn, load))


async def _ask(client: aiohttp.ClientSession, session: Session, number: int, turn: Turn, load: Load) -> Reply:
    sent = time.monotonic()
    first = 0.0
    status, worker, error = 0, "", ""
    reader = ResponseReader(Api.CHAT, "text/event-stream", 200)
    try:
        async with client.post(
            f"{load.url}/v1/chat/completions", data=chat_body(turn, load), headers={"content-type": "application/json"}
        ) as response:
            status, worker = response.status, response.headers.get("x-served-by", "")
            async for chunk in response.content.iter_any():
                reader.feed(chunk)
                if not first and reader.content_seen:
                    first = time.monotonic()
    except (aiohttp.ClientError, TimeoutError, OSError) as fault:
        error = f"{type(fault).__name__}: {fault}"
    usage = reader.finish()
    return Reply(
        session=session.id,
        turn=number,
        status=status,
        worker=worker,
        prompt_tokens=(usage.prompt_tokens if usage else None) or 0,
        cached_tokens=(usage.cached_tokens if usage else None) or 0,
        ttft_s=first - sent if first else 0.0,
        error=error,
    )


def chat_body(turn: Turn, load: Load) -> bytes:
    """The turn as a streaming chat request: a system prompt, then assistant and user in turns."""
    roles = ["system", *("user" if i % 2 else "assistant" for i in range(1, len(turn.messages)))]
    if len(roles) == 1:
        roles = ["user"]
    body = {
        "model": load.model,
        "messages": [{"role": r, "content": text} for r, text in zip(roles, turn.messages, strict=True)],
        "max_tokens": max(1, min(turn.output_tokens, load.max_output_tokens)),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body, separators=(",", ":")).encode()
