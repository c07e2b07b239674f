"""Prompts tokenised by a worker: its own `/render` endpoints, or `/tokenize` where those are switched off.

In: the request's body, unchanged, and a worker's address. Out: `Rendered` ids, or `RenderError` with a reason. The ids
are the worker's by construction; the price is a network call and the worker's time (about 100 ms for 50,000 tokens), so
it has a deadline, and a worker that fails is left alone for a while.

`/v1/*/render` answers 403 without `--enable-scale-out` (vLLM 0.32). `/tokenize` is always there; it knows fewer fields,
so it is asked only where they do not matter.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np

from epp.kvcache.tokens.breaker import Breaker
from epp.kvcache.tokens.pieces import Ids
from epp.request import Api

RENDER_PATHS = {
    Api.CHAT: "/v1/chat/completions/render",
    Api.COMPLETIONS: "/v1/completions/render",
    Api.MESSAGES: "/v1/messages/render",
    Api.RESPONSES: "/v1/responses/render",
}
NOT_FOR_TOKENIZE = (b'"reasoning', b'"documents"', b'"truncate_prompt_tokens"', b'"suffix"', b'"prompt_embeds"')
"""Names whose members `/tokenize` reads otherwise, or not at all."""
MAX_ANSWER_BYTES = 64 << 20
MAX_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Media:
    """An image, sound or video within a prompt."""

    offset: int
    length: int
    """Where its placeholder lies, in tokens."""
    identifier: str
    """What vLLM hashes into the blocks it touches."""


@dataclass(frozen=True, slots=True)
class Rendered:
    ids: Ids
    media: tuple[Media, ...] = ()


class RenderError(Exception):
    """`reason`: `render-timeout`, `render-unreachable`, `render-refused`, `render-broken`, `render-paused`,
    `render-not-offered`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[dict[str, Any]]]


class _Answer(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


_one = msgspec.json.Decoder(_Answer).decode
_many = msgspec.json.Decoder(list[_Answer]).decode
_tokens = msgspec.json.Decoder(_Tokens).decode


@dataclass(slots=True)
class _Worker:
    breaker: Breaker
    renders: bool = True
    """False once it said that its render endpoints are switched off."""


class RenderClient:
    """Asks workers. Lives on one event loop; `close` it there."""

    def __init__(self, session: aiohttp.ClientSession | None = None) -> None:
        self._session = session
        self._workers: OrderedDict[str, _Worker] = OrderedDict()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def render(self, url: str, api: Api, body: bytes, timeout_s: float) -> list[Rendered]:
        """`url`: http://host:port. One `Rendered` for each prompt. Raises RenderError."""
        if api not in RENDER_PATHS:
            raise RenderError("render-not-offered", f"{api} has no render endpoint")
        loop = asyncio.get_running_loop()
        worker = self._worker(url)
        if not worker.breaker.allows(loop.time()):
            raise RenderError("render-paused")
        try:
            async with asyncio.timeout(timeout_s):
                rendered = await self._ask(url, worker, api, body)
        except TimeoutError:
            worker.breaker.failed(loop.time())
            raise RenderError("render-timeout", f"{url}: no answer in {timeout_s * 1e3:.0f} ms") from None
        except (aiohttp.ClientError, OSError) as error:
            worker.breaker.failed(loop.time())
            raise RenderError("render-unreachable", f"{url}: {error}") from None
        except RenderError as error:
            if error.reason == "render-broken":
                worker.breaker.failed(loop.time())
            raise
        worker.breaker.succeeded()
        return rendered

    def _worker(self, url: str) -> _Worker:
        worker = self._workers.get(url)
        if worker is None:
            worker = self._workers[url] = _Worker(Breaker())
            if len(self._workers) > MAX_WORKERS:
                self._workers.popitem(last=False)
        return worker

    async def _ask(self, url: str, worker: _Worker, api: Api, body: bytes) -> list[Rendered]:
        if worker.renders:
            status, answer = await self._post(url + RENDER_PATHS[api], body)
            if status not in (403, 404, 405):
                return _read_rendered(url, status, answer, many=api is Api.COMPLETIONS)
            worker.renders = False
        if api not in (Api.CHAT, Api.COMPLETIONS) or any(name in body for name in NOT_FOR_TOKENIZE):
            raise RenderError("render-not-offered", f"{url}: start it with --enable-scale-out")
        if api is Api.COMPLETIONS and not isinstance(json.loads(body).get("prompt"), str):
            raise RenderError("render-not-offered", f"{url}: /tokenize takes one text")
        status, answer = await self._post(url + "/tokenize", body)
        _check(url, status, answer)
        try:
            return [Rendered(np.array(_tokens(answer).tokens, dtype=np.uint32))]
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            raise RenderError("render-broken", f"{url}: {error}") from None

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64), auto_decompress=True)
        async with self._session.post(url, data=body, headers={"content-type": "application/json"}) as response:
            answer = await response.content.read(MAX_ANSWER_BYTES + 1)
            while len(answer) <= MAX_ANSWER_BYTES and (more := await response.content.read(1 << 20)):
                answer += more
            if len(answer) > MAX_ANSWER_BYTES:
                raise RenderError("render-broken", f"{url}: the answer is too long")
            return response.status, answer


def _check(url: str, status: int, answer: bytes) -> None:
    if status >= 500:
        raise RenderError("render-broken", f"{url}: status {status}")
    if status != 200:
        raise RenderError("render-refused", f"{url}: status {status}: {answer[:200].decode(errors='replace')}")


def _read_rendered(url: str, status: int, answer: bytes, *, many: bool) -> list[Rendered]:
    _check(url, status, answer)
    try:
        answers = _many(answer) if many else [_one(answer)]
        return [Rendered(np.array(a.token_ids, dtype=np.uint32), _media(a.features)) for a in answers]
    except (msgspec.DecodeError, ValueError, OverflowError, KeyError, TypeError) as error:
        raise RenderError("render-broken", f"{url}: {error}") from None


def _media(features: _Features | None) -> tuple[Media, ...]:
    if features is None:
        return ()
    found = [
        Media(int(place["offset"]), int(place["length"]), identifier)
        for modality, identifiers in features.mm_hashes.items()
        for identifier, place in zip(identifiers, features.mm_placeholders[modality], strict=True)
    ]
    return tuple(sorted(found, key=lambda m: m.offset))
