"""The emulated worker over HTTP: vLLM's endpoints, shapes and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epp.sim.cost import CostModel
from epp.sim.engine import EngineConfig
from epp.sim.server import Worker
from epp.sim.tokenizer import ChatTokenizer

StartWorker = Callable[..., Awaitable[Worker]]
SLOW = EngineConfig(num_gpu_blocks=256, cost=CostModel(0.02, 0.0, 0.0, 0.0))
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4}
LONG = "The picker answers one question for every inference request. " * 40


async def post(session: aiohttp.ClientSession, worker: Worker, path: str, body: Any, **more: Any) -> tuple[int, Any]:
    async with session.post(f"http://{worker.address}{path}", json=body, **more) as response:
        return response.status, await response.json()


async def get(session: aiohttp.ClientSession, worker: Worker, path: str) -> Any:
    async with session.get(f"http://{worker.address}{path}") as response:
        assert response.status == 200
        return await response.json()


async def stream(session: aiohttp.ClientSession, worker: Worker, path: str, body: dict[str, Any]) -> list[str]:
    """The data of each event."""
    async with session.post(f"http://{worker.address}{path}", json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events = text.strip().split("\n\n")
    return [line.removeprefix("data: ") for event in events for line in event.split("\n") if line.startswith("data: ")]


async def metrics(session: aiohttp.ClientSession, worker: Worker) -> dict[str, float]:
    """Sample name -> value, summed over its series; fails on a page Prometheus could not read."""
    async with session.get(f"http://{worker.address}/metrics") as response:
        text = await response.text()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0) + sample.value
    return samples


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.005)


async def test_a_chat_completion_has_vllms_shape_and_counts_cached_tokens(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(name="w1")
    body = {"model": "tiny", "messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
    status, first = await post(session, worker, "/v1/chat/completions", body)
    _, second = await post(session, worker, "/v1/chat/completions", body)
    assert status == 200
    assert first["object"] == "chat.completion"
    [choice] = first["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    prompt_tokens = first["usage"]["prompt_tokens"]
    assert first["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 4,
        "total_tokens": prompt_tokens + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt_tokens - 1) // 16 * 16
    assert second["choices"][0]["message"] == choice["message"]


async def test_the_next_turn_of_a_chat_finds_the_blocks_of_the_answer_too(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    messages = [{"role": "user", "content": LONG}]
    body = {"messages": messages, "max_tokens": 200, "ignore_eos": True}
    _, first = await post(session, worker, "/v1/chat/completions", body)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    _, second = await post(session, worker, "/v1/chat/completions", body)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    # Everything computed in the first turn: the prompt and all of the answer but its last token, in whole blocks.
    assert cached == (first["usage"]["total_tokens"] - 1) // 16 * 16


async def test_streamed_and_whole_answers_say_the_same(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    _, whole = await post(session, worker, "/v1/chat/completions", CHAT)
    body = CHAT | {"stream_options": {"include_usage": True}}
    *chunks, usage, done = await stream(session, worker, "/v1/chat/completions", body)
    deltas = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(delta["delta"]["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert [delta["finish_reason"] for delta in deltas] == [None, None, None, None, "length"]
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["completion_tokens"] == 4


async def test_a_stream_without_include_usage_carries_none(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    *chunks, done = await stream(session, worker, "/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert done == "[DONE]"
    assert len(chunks) == 3
    assert all("usage" not in json.loads(chunk) for chunk in chunks)


async def test_tokens_of_a_chunk_follow_the_stream_interval(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(stream_interval=4)
    *chunks, _ = await stream(session, worker, "/v1/completions", {"prompt": "x", "max_tokens": 9, "ignore_eos": True})
    words = [len(json.loads(chunk)["choices"][0]["text"].split()) for chunk in chunks]
    assert sum(words) == 9
    assert all(count >= 4 for count in words[1:-1])
    assert len(words) <= 3


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("one", 1), ([5, 6, 7], 1), (["one", "two"], 2), ([[5, 6], [7, 8, 9], [1]], 3)],
    ids=["text", "ids", "texts", "lists of ids"],
)
async def test_every_shape_of_prompt_is_answered(
    start_worker: StartWorker, session: aiohttp.ClientSession, prompt: Any, choices: int
) -> None:
    worker = await start_worker()
    status, answer = await post(session, worker, "/v1/completions", {"prompt": prompt, "max_tokens": 2, "n": 2})
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * choices))
    assert answer["usage"]["completion_tokens"] == 4 * choices


async def test_anthropic_messages_are_answered_whole_and_streamed(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    parts = [{"type": "text", "text": "Hello"}, {"type": "tool_result", "tool_use_id": "t", "content": "42"}]
    body = {"model": "tiny", "system": "Be terse.", "messages": [{"role": "user", "content": parts}], "max_tokens": 3}
    status, whole = await post(session, worker, "/v1/messages", body)
    assert status == 200
    assert whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == 3
    events = [json.loads(event) for event in await stream(session, worker, "/v1/messages", body)]
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    _, count = await post(session, worker, "/v1/messages/count_tokens", body)
    assert count == {"input_tokens": whole["usage"]["input_tokens"]}


async def test_responses_are_answered_whole_and_streamed(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    body = {"input": "Hello", "instructions": "Be terse.", "max_output_tokens": 3}
    _, whole = await post(session, worker, "/v1/responses", body)
    assert (whole["status"], whole["usage"]["output_tokens"]) == ("incomplete", 3)
    events = [json.loads(event) for event in await stream(session, worker, "/v1/responses", body)]
    assert [event["type"] for event in events] == [
        "response.created",
        *["response.output_text.delta"] * 3,
        "response.incomplete",
    ]
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


async def test_the_request_id_is_part_of_the_answers_id_and_echoed(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(name="w1")
    url = f"http://{worker.address}/v1/completions"
    async with session.post(url, json={"prompt": "x"}, headers={"X-Request-Id": "my-id-7"}) as response:
        assert (await response.json())["id"] == "cmpl-my-id-7"
        assert response.headers["x-request-id"] == "my-id-7"
        assert response.headers["x-served-by"] == "w1"


async def test_an_unknown_model_is_refused_in_vllms_words(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    assert await post(session, worker, "/v1/completions", {"model": "nope", "prompt": "x"}) == (
        404,
        {
            "error": {
                "message": "The model `nope` does not exist. Valid aliases: tiny.",
                "type": "NotFoundError",
                "param": "model",
                "code": 404,
            }
        },
    )


async def test_a_prompt_beyond_the_context_is_refused_in_vllms_words(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(engine=EngineConfig(num_gpu_blocks=256, max_model_len=2048))
    status, answer = await post(session, worker, "/v1/completions", {"prompt": [5] * 3000})
    assert status == 400
    assert answer["error"] == {
        "message": "This model's maximum context length is 2048 tokens. However, your prompt contains 3000 input "
        "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
        "prompt. (parameter=input_tokens, value=3000)",
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": 400,
    }
    status, answer = await post(session, worker, "/v1/completions", {"prompt": [5] * 2000, "max_tokens": 49})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {}, "missing required field `prompt`"),
        ("/v1/completions", {"prompt": []}, "prompt must be text"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt must be text"),
        ("/v1/completions", {"prompt": [-1]}, "token ids must be integers"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": ["a"] * 20, "n": 100}, "at most 1024 sequences"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "content of a message"),
        ("/v1/chat/completions", {"messages": [{"role": 5, "content": "x"}]}, "role of a message"),
        ("/tokenize", {}, "prompt or messages is required"),
    ],
)
async def test_a_bad_body_gets_400_and_the_reason(
    start_worker: StartWorker, session: aiohttp.ClientSession, path: str, body: Any, words: str
) -> None:
    worker = await start_worker()
    status, answer = await post(session, worker, path, body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert (await post(session, worker, "/v1/completions", {"prompt": "x"}))[0] == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[" * 200_000, b'{"prompt": "\\ud800"}', b'{"prompt": NaN}'],
    ids=["empty", "cut off", "not UTF-8", "deep", "lone surrogate", "NaN"],
)
async def test_what_is_not_json_gets_400(
    start_worker: StartWorker, session: aiohttp.ClientSession, body: bytes
) -> None:
    worker = await start_worker()
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize", "/control/faults"):
        if path == "/control/faults" and not body:
            continue  # asks for no faults
        async with session.post(f"http://{worker.address}{path}", data=body) as response:
            assert response.status == 400


async def test_errors_of_the_messages_api_have_anthropics_shape(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    body = {"model": "nope", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    status, answer = await post(session, worker, "/v1/messages", body)
    assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")


async def test_rendering_and_tokenizing_give_the_tokens_that_are_served(
    start_worker: StartWorker, session: aiohttp.ClientSession, tokenizer: ChatTokenizer
) -> None:
    worker = await start_worker()
    _, rendered = await post(session, worker, "/v1/chat/completions/render", CHAT)
    _, tokens = await post(session, worker, "/tokenize", CHAT)
    _, answer = await post(session, worker, "/v1/chat/completions", CHAT)
    assert rendered["token_ids"] == tokens["tokens"]
    assert answer["usage"]["prompt_tokens"] == tokens["count"]
    _, text = await post(session, worker, "/detokenize", {"tokens": tokens["tokens"]})
    assert text["prompt"] == "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    _, [completion] = await post(session, worker, "/v1/completions/render", {"prompt": "Hello there"})
    _, plain = await post(session, worker, "/tokenize", {"prompt": "Hello there", "return_token_strs": True})
    assert completion["token_ids"] == plain["tokens"]
    assert len(plain["token_strs"]) == plain["count"]


async def test_metrics_carry_vllms_names_labels_and_counts(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    for _ in range(2):
        await post(session, worker, "/v1/completions", {"prompt": [7] * 65, "max_tokens": 4})
    samples = await metrics(session, worker)
    assert samples["vllm:prefix_cache_queries_total"] == 130
    assert samples["vllm:prefix_cache_hits_total"] == 64
    assert samples["vllm:prompt_tokens_total"] == 130
    assert samples["vllm:generation_tokens_total"] == 8
    assert samples["vllm:request_success_total"] == 2
    assert samples["vllm:time_to_first_token_seconds_count"] == 2
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    async with session.get(f"http://{worker.address}/metrics") as response:
        text = await response.text()
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in text
    [config] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in config
    assert 'num_gpu_blocks="256"' in config
    assert 'hash_block_size="None"' in config


async def test_a_client_that_goes_away_frees_its_blocks(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(engine=SLOW)
    pool = worker.core.kv.block_pool
    for streamed in (True, False):
        body = {"prompt": [7] * 500, "max_tokens": 1000, "ignore_eos": True, "stream": streamed}
        request = asyncio.ensure_future(session.post(f"http://{worker.address}/v1/completions", json=body))
        await until(lambda: pool.usage > 0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: pool.usage == 0)
    assert worker.core.stats.requests_by_reason["abort"] == 2
    assert worker.core.is_idle


async def test_load_beyond_max_num_seqs_waits_and_shows_in_the_gauges(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(engine=replace(SLOW, max_num_seqs=2))
    body = {"prompt": "x", "max_tokens": 8, "ignore_eos": True}
    running = [asyncio.ensure_future(post(session, worker, "/v1/completions", body)) for _ in range(5)]
    await until(lambda: len(worker.core.scheduler.waiting) == 3)
    samples = await metrics(session, worker)
    assert samples["vllm:num_requests_running"] == 2
    assert samples["vllm:num_requests_waiting"] == 3
    assert samples["vllm:kv_cache_usage_perc"] > 0
    assert [status for status, _ in await asyncio.gather(*running)] == [200] * 5


async def test_lora_adapters_are_loaded_served_under_their_own_blocks_and_unloaded(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(lora_modules=("ad1",))
    url = f"http://{worker.address}"
    async with session.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "ad2", "lora_path": "/x"}) as response:
        assert response.status == 200
    models = await get(session, worker, "/v1/models")
    assert [(model["id"], model["parent"]) for model in models["data"]] == [
        ("tiny", None),
        ("ad1", "tiny"),
        ("ad2", "tiny"),
    ]
    cached = []
    for model in ("tiny", "ad1", "ad1"):
        _, answer = await post(session, worker, "/v1/completions", {"model": model, "prompt": [5] * 33})
        assert answer["model"] == model
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 32]
    async with session.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "ad2"}) as response:
        assert response.status == 200
    assert (await post(session, worker, "/v1/completions", {"model": "ad2", "prompt": "x"}))[0] == 404
    assert (await post(session, worker, "/v1/unload_lora_adapter", {"lora_name": "ad2"}))[0] == 404
    assert (await post(session, worker, "/v1/load_lora_adapter", {"lora_name": "ad1"}))[0] == 400


async def test_lora_requests_info_names_the_running_adapters_and_keeps_old_combinations(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(lora_modules=("ad1",), engine=SLOW)
    page = f"http://{worker.address}/metrics"
    async with session.get(page) as response:
        assert "vllm:lora_requests_info{" not in await response.text()
    body = {"model": "ad1", "prompt": "x", "max_tokens": 10, "ignore_eos": True}
    request = asyncio.ensure_future(post(session, worker, "/v1/completions", body))
    await until(lambda: len(worker.core.scheduler.running) == 1)
    async with session.get(page) as response:
        running = await response.text()
    await request
    async with session.get(page) as response:
        idle = await response.text()
    series = 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="ad1",waiting_lora_adapters="ad1"} '
    assert series in running
    assert series in idle
    assert 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""} ' in idle


async def test_a_sleeping_worker_answers_when_it_wakes_up(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker()
    url = f"http://{worker.address}"
    async with session.post(f"{url}/sleep?level=1") as response:
        assert response.status == 200
    assert await get(session, worker, "/is_sleeping") == {"is_sleeping": True}
    request = asyncio.ensure_future(post(session, worker, "/v1/completions", {"prompt": "x"}))
    await until(lambda: len(worker.core.scheduler.waiting) == 1)
    async with session.post(f"{url}/wake_up") as response:
        assert response.status == 200
    assert (await request)[0] == 200


async def test_the_prefix_cache_is_reset_on_request(start_worker: StartWorker, session: aiohttp.ClientSession) -> None:
    worker = await start_worker()
    body = {"prompt": [5] * 33}
    await post(session, worker, "/v1/completions", body)
    assert await post(session, worker, "/reset_prefix_cache", None) == (200, {"success": True})
    _, answer = await post(session, worker, "/v1/completions", body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_health_ping_version_and_unknown_paths(start_worker: StartWorker, session: aiohttp.ClientSession) -> None:
    worker = await start_worker()
    for path in ("/health", "/ping"):
        async with session.get(f"http://{worker.address}{path}") as response:
            assert (response.status, await response.text()) == (200, "")
    assert await get(session, worker, "/version") == {"version": "0.32.0"}
    assert await get(session, worker, "/kv_event_sources") == {}
    assert (await post(session, worker, "/v1/nothing", {}))[0] == 404


async def test_a_worker_told_to_stop_finishes_what_runs_within_its_grace(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(engine=SLOW)
    body = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
    request = asyncio.ensure_future(post(session, worker, "/v1/completions", body))
    await until(lambda: len(worker.core.scheduler.running) == 1)
    await worker.stop(grace_s=5)
    assert (await request)[0] == 200


async def test_a_worker_told_to_stop_without_grace_drops_what_runs(
    start_worker: StartWorker, session: aiohttp.ClientSession
) -> None:
    worker = await start_worker(engine=SLOW)
    body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
    request = asyncio.ensure_future(post(session, worker, "/v1/completions", body))
    await until(lambda: len(worker.core.scheduler.running) == 1)
    await worker.stop()
    with pytest.raises(aiohttp.ClientError):
        await request
    assert worker.core.is_idle


async def test_a_taken_port_is_named(start_worker: StartWorker) -> None:
    worker = await start_worker()
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{worker.port}: the port is taken"):
        await start_worker(port=worker.port)
