"""The generation endpoints: body to prompts, prompts to sequences, outputs to replies."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

from aiohttp import web

from epp.sim.async_engine import OutputStream
from epp.sim.bodies import (
    ApiError,
    ChatBody,
    Common,
    CompletionBody,
    DetokenizeBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
    read_body,
    template_messages,
)
from epp.sim.faults import reset_connection
from epp.sim.replies import ChatReply, Choice, CompletionReply, MessagesReply, Reply, ResponsesReply, Usage
from epp.sim.sequence import TOKEN_TYPECODE, SamplingParams, Sequence
from epp.sim.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from epp.sim.server import Worker

Tokens: TypeAlias = "array[int]"
MAX_SEQUENCES = 1024
"""Of one request."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request, read: every prompt is answered `n` times, with at most `max_tokens` (None: what fits)."""

    body: Common
    prompts: list[Tokens]
    max_tokens: int | None
    reply: Reply
    n: int = 1


class Generator:
    def __init__(self, worker: Worker, tokenizer: ChatTokenizer) -> None:
        self._worker = worker
        self._tokenizer = tokenizer

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = read_body(await request.read(), CompletionBody)
        prompts = await self._completion_prompts(body)
        reply = CompletionReply(**self._reply_head(request, body))
        return await self._generate(request, Job(body, prompts, body.max_tokens or 16, reply, body.n))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = read_body(await request.read(), ChatBody)
        prompt = await self._chat_prompt(body.messages, body.tools, body.add_generation_prompt)
        reply = ChatReply(**self._reply_head(request, body))
        max_tokens = body.max_completion_tokens or body.max_tokens
        return await self._generate(request, Job(body, [prompt], max_tokens, reply, body.n))

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = read_body(await request.read(), MessagesBody)
        prompt = await self._chat_prompt(body.as_chat(), body.tools)
        reply = MessagesReply(**self._reply_head(request, body))
        return await self._generate(request, Job(body, [prompt], body.max_tokens, reply))

    async def responses(self, request: web.Request) -> web.StreamResponse:
        body = read_body(await request.read(), ResponsesBody)
        prompt = await self._chat_prompt(body.as_chat(), body.tools)
        reply = ResponsesReply(**self._reply_head(request, body))
        return await self._generate(request, Job(body, [prompt], body.max_output_tokens, reply))

    async def count_tokens(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), MessagesBody)
        return web.json_response({"input_tokens": len(await self._chat_prompt(body.as_chat(), body.tools))})

    async def render_completions(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), CompletionBody)
        self._lora_of(body.model)
        prompts = await self._completion_prompts(body)
        head = f"cmpl-{_request_id(request)}"
        return web.json_response([self._rendered(head, body, prompt, body.max_tokens or 16) for prompt in prompts])

    async def render_chat(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), ChatBody)
        self._lora_of(body.model)
        prompt = await self._chat_prompt(body.messages, body.tools, body.add_generation_prompt)
        max_tokens = body.max_completion_tokens or body.max_tokens or self._room(prompt)
        return web.json_response(self._rendered(f"chatcmpl-{_request_id(request)}", body, prompt, max_tokens))

    async def tokenize(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), TokenizeBody)
        self._lora_of(body.model)
        if body.messages is not None:
            tokens = await self._chat_prompt(body.messages, body.tools, body.add_generation_prompt)
        elif body.prompt is not None:
            tokens = await self._tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            raise ApiError(400, "prompt or messages is required", param="prompt")
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._worker.config.engine.context_length,
            "tokens": tokens.tolist(),
            "token_strs": self._tokenizer.token_strings(tokens) if body.return_token_strs else None,
        }
        return web.json_response(answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), DetokenizeBody)
        return web.json_response({"prompt": self._tokenizer.decode(body.tokens)})

    async def _generate(self, request: web.Request, job: Job) -> web.StreamResponse:
        sequences = self._sequences(job)
        dice = self._worker.dice
        bad_json = dice.strikes(dice.faults.bad_json)
        reset_after = None
        if dice.strikes(dice.faults.reset_mid_stream):
            reset_after = dice.between(1, min(s.sampling.max_tokens for s in sequences))
        with self._worker.engine_for(request.headers.get("x-data-parallel-rank")).submit(sequences) as stream:
            if job.body.stream:
                return await self._stream(request, job, stream, reset_after=reset_after, bad_json=bad_json)
            await stream.wait()
        if reset_after is not None and request.transport is not None:
            reset_connection(request.transport)
        body = job.reply.whole_json(*self._results(job, sequences))
        return web.Response(body=body[: len(body) // 2] if bad_json else body, content_type="application/json")

    async def _stream(
        self, request: web.Request, job: Job, stream: OutputStream, *, reset_after: int | None, bad_json: bool
    ) -> web.StreamResponse:
        sequences = stream.sequences
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        interval = self._worker.config.stream_interval * len(sequences)
        index_of = {sequence: index for index, sequence in enumerate(sequences)}
        outputs = await stream.read()
        # Headers leave with the first token: an engine that queues a request has not answered it.
        await response.prepare(request)
        chunk = job.reply.opening(len(sequences), sum(s.num_prompt_tokens for s in sequences[:: job.n]))
        sent = 0
        while outputs:
            texts: dict[Sequence, list[str]] = {}
            ended: dict[Sequence, str | None] = {}
            for output in outputs:
                texts.setdefault(output.sequence, []).append(self._text([output.token_id]))
                ended[output.sequence] = output.finish_reason
            for sequence, parts in texts.items():
                chunk += job.reply.delta(index_of[sequence], "".join(parts), ended[sequence])
            await response.write(chunk[: len(chunk) // 2] + b"\n\n" if bad_json and not sent else chunk)
            chunk = b""
            sent += len(outputs)
            if reset_after is not None and sent >= reset_after and request.transport is not None:
                reset_connection(request.transport)
                return response
            outputs = await stream.read(interval)
        await response.write(job.reply.closing(*self._results(job, sequences)))
        return response

    def _sequences(self, job: Job) -> list[Sequence]:
        """Raises ApiError for an unknown model and for a prompt or limit that exceeds the context."""
        lora = self._lora_of(job.body.model)
        if len(job.prompts) * job.n > MAX_SEQUENCES:
            raise ApiError(400, f"at most {MAX_SEQUENCES} sequences in one request", param="prompt")
        sequences: list[Sequence] = []
        for prompt in job.prompts:
            sampling = self._sampling(job, prompt)
            for _ in range(job.n):
                sequence = Sequence(
                    f"{job.reply.request_id}-{len(sequences)}",
                    prompt,
                    sampling,
                    lora_name=lora,
                    cache_salt=job.body.cache_salt,
                    report_cached_blocks=job.body.reports_cached_blocks,
                )
                sequences.append(sequence)
        return sequences

    def _sampling(self, job: Job, prompt: Tokens) -> SamplingParams:
        if not prompt:
            raise ApiError(400, "The decoder prompt cannot be empty", param="prompt")
        context, room = self._worker.config.engine.context_length, self._room(prompt)
        if room < 1:
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens. However, your prompt contains "
                f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                f"the length of the input prompt. (parameter=input_tokens, value={len(prompt)})",
                param="input_tokens",
            )
        if job.max_tokens is not None and job.max_tokens > room:
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens. However, you requested {job.max_tokens} "
                f"output tokens and your prompt contains {len(prompt)} input tokens, for a total of "
                f"{job.max_tokens + len(prompt)} tokens. Please reduce the length of the input prompt or the number "
                f"of requested output tokens. (parameter=max_tokens, value={job.max_tokens})",
                param="max_tokens",
            )
        mean = self._worker.config.output_tokens
        return SamplingParams(
            max_tokens=job.max_tokens if job.max_tokens is not None else room,
            min_tokens=job.body.min_tokens,
            ignore_eos=job.body.ignore_eos,
            natural_length=max(1, mean // 2 + crc32(prompt[-256:].tobytes()) % (mean + 1)),
        )

    def _results(self, job: Job, sequences: list[Sequence]) -> tuple[list[Choice], Usage]:
        choices = []
        for sequence in sequences:
            ids = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
            choices.append(Choice(self._text(ids), sequence.finish_reason or "stop", ids))
        prompts = sequences[:: job.n]
        usage = Usage(
            prompt_tokens=sum(s.num_prompt_tokens for s in prompts),
            completion_tokens=sum(s.num_output_tokens for s in sequences),
            cached_tokens=sum(s.num_cached_tokens for s in prompts),
        )
        return choices, usage

    def _text(self, token_ids: Iterable[int]) -> str:
        words = self._tokenizer.words
        return "".join([words[token] for token in token_ids])

    def _room(self, prompt: Tokens) -> int:
        return self._worker.config.engine.context_length - len(prompt)

    def _lora_of(self, model: str | None) -> str | None:
        """The adapter a model name means, None for the base model."""
        base, loras = self._worker.config.model, self._worker.loras
        if model is None or model == base:
            return None
        if model in loras:
            return model
        aliases = ", ".join([base, *loras])
        text = f"The model `{model}` does not exist. Valid aliases: {aliases}."
        raise ApiError(404, text, "NotFoundError", param="model")

    async def _completion_prompts(self, body: CompletionBody) -> list[Tokens]:
        return [
            await self._tokenizer.encode(prompt) if isinstance(prompt, str) else array(TOKEN_TYPECODE, prompt)
            for prompt in body.prompts()
        ]

    async def _chat_prompt(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool = True
    ) -> Tokens:
        try:
            text = self._tokenizer.render_chat(
                template_messages(messages), tools=tools, add_generation_prompt=add_generation_prompt
            )
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        return await self._tokenizer.encode(text, add_special_tokens=False)

    def _reply_head(self, request: web.Request, body: Common) -> dict[str, Any]:
        options = getattr(body, "stream_options", None)
        return {
            "request_id": _request_id(request),
            "model": body.model or self._worker.config.model,
            "created": int(time.time()),
            "include_usage": options is not None and options.include_usage,
            "with_token_ids": bool(getattr(body, "return_token_ids", False)),
        }

    def _rendered(self, request_id: str, body: Common, prompt: Tokens, max_tokens: int) -> dict[str, Any]:
        """vLLM's render answer, less the fields that are always null."""
        return {
            "request_id": request_id,
            "token_ids": prompt.tolist(),
            "sampling_params": {"max_tokens": max_tokens, "min_tokens": body.min_tokens, "ignore_eos": body.ignore_eos},
            "model": body.model or self._worker.config.model,
            "stream": bool(body.stream),
            "cache_salt": body.cache_salt,
        }


def _request_id(request: web.Request) -> str:
    return request.headers.get("x-request-id") or uuid.uuid4().hex[:16]
