"""Workers that render: their answers, their refusals, and what happens when they are slow or broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from epp.kvcache.tokens.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from epp.kvcache.tokens.render import Media, RenderClient, RenderError
from epp.request import Api

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()


@asynccontextmanager
async def worker(handler: Handler) -> AsyncIterator[tuple[RenderClient, str]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = RenderClient()
    try:
        yield client, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await client.close()
        await runner.cleanup()


def answers(by_path: dict[str, Any], asked: list[tuple[str, bytes]] | None = None) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append((request.path, await request.read()))
        answer = by_path.get(request.path, 403)
        return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)

    return handle


async def reason_of(client: RenderClient, url: str, api: Api = Api.CHAT, body: bytes = CHAT) -> str:
    with pytest.raises(RenderError) as caught:
        await client.render(url, api, body, 5)
    return caught.value.reason


async def test_the_body_goes_unchanged_to_the_path_of_its_api() -> None:
    asked: list[tuple[str, bytes]] = []
    paths = {
        "/v1/chat/completions/render": {"token_ids": [1, 2], "sampling_params": {}},
        "/v1/completions/render": [{"token_ids": [1]}, {"token_ids": [2]}],
        "/v1/messages/render": {"token_ids": [3]},
        "/v1/responses/render": {"token_ids": [4]},
    }
    async with worker(answers(paths, asked)) as (client, url):
        apis = (Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES)
        made = [[r.ids.tolist() for r in await client.render(url, api, CHAT, 5)] for api in apis]
    assert made == [[[1, 2]], [[1], [2]], [[3]], [[4]]]
    assert asked == [(path, CHAT) for path in paths]


async def test_media_come_with_their_places() -> None:
    features = {
        "mm_hashes": {"image": ["a", "b"], "audio": ["c"]},
        "mm_placeholders": {
            "image": [{"offset": 5, "length": 4}, {"offset": 20, "length": 4}],
            "audio": [{"offset": 12, "length": 2}],
        },
    }
    path = "/v1/chat/completions/render"
    async with worker(answers({path: {"token_ids": [1], "features": features}})) as (client, url):
        (rendered,) = await client.render(url, Api.CHAT, CHAT, 5)
    assert rendered.media == (Media(5, 4, "a"), Media(12, 2, "c"), Media(20, 4, "b"))


async def test_tokenize_is_asked_where_rendering_is_switched_off_and_that_is_remembered() -> None:
    asked: list[tuple[str, bytes]] = []
    async with worker(answers({"/tokenize": {"tokens": [7], "count": 1}}, asked)) as (client, url):
        for _ in range(2):
            (rendered,) = await client.render(url, Api.CHAT, CHAT, 5)
            assert rendered.ids.tolist() == [7]
        one = json.dumps({"model": "m", "prompt": "x"}).encode()
        assert [r.ids.tolist() for r in await client.render(url, Api.COMPLETIONS, one, 5)] == [[7]]
    assert [path for path, _ in asked] == ["/v1/chat/completions/render", "/tokenize", "/tokenize", "/tokenize"]


@pytest.mark.parametrize(
    ("api", "members"),
    [
        (Api.CHAT, {"messages": [], "reasoning_effort": "low"}),
        (Api.CHAT, {"messages": [{"role": "assistant", "reasoning_content": "x"}]}),
        (Api.COMPLETIONS, {"prompt": ["a", "b"]}),
        (Api.MESSAGES, {"messages": []}),
        (Api.EMBEDDINGS, {"input": "x"}),
    ],
)
async def test_what_tokenize_would_read_otherwise_is_not_asked(api: Api, members: dict[str, Any]) -> None:
    async with worker(answers({"/tokenize": {"tokens": [7]}})) as (client, url):
        assert await reason_of(client, url, api, json.dumps(members).encode()) == "render-not-offered"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(400, "render-refused"), (500, "render-broken"), ({"token_ids": [-1]}, "render-broken"), ([], "render-broken"),
     ({"token_ids": ["x"]}, "render-broken"), ({"token_ids": [1 << 40]}, "render-broken"),
     ({"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}}, "render-broken")],
)  # fmt: skip
async def test_refusals_and_nonsense_have_reasons(answer: Any, reason: str) -> None:
    async with worker(answers({"/v1/chat/completions/render": answer})) as (client, url):
        assert await reason_of(client, url) == reason


async def test_a_worker_that_hangs_costs_the_deadline_and_is_then_left_alone() -> None:
    released = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    async with worker(hang) as (client, url):
        for _ in range(FAILURES):
            with pytest.raises(RenderError) as caught:
                await client.render(url, Api.CHAT, CHAT, 0.02)
            assert caught.value.reason == "render-timeout"
        assert await reason_of(client, url) == "render-paused"
        released.set()


async def test_a_client_fault_does_not_pause_a_worker() -> None:
    async with worker(answers({"/v1/chat/completions/render": 400})) as (client, url):
        for _ in range(FAILURES + 2):
            assert await reason_of(client, url) == "render-refused"


async def test_a_worker_that_is_gone_is_unreachable() -> None:
    client = RenderClient()
    try:
        assert await reason_of(client, "http://127.0.0.1:1") == "render-unreachable"
    finally:
        await client.close()


def test_a_breaker_opens_after_failures_in_a_row_and_tries_once_after_each_pause() -> None:
    breaker, now = Breaker(), 100.0
    for _ in range(FAILURES - 1):
        breaker.failed(now)
    breaker.succeeded()
    for _ in range(FAILURES):
        assert breaker.allows(now)
        breaker.failed(now)
    assert (breaker.opened, breaker.allows(now)) == (1, False)
    pauses = []
    for _ in range(8):
        start = now
        while not breaker.allows(now):
            now += 0.25
        assert not breaker.allows(now), "one try only"
        pauses.append(now - start)
        breaker.failed(now)
    assert pauses == [FIRST_PAUSE_S, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    now += LONGEST_PAUSE_S
    assert breaker.allows(now)
    breaker.succeeded()
    assert breaker.allows(now)
    assert breaker.allows(now)
