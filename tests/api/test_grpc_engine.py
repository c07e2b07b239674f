"""vLLM's gRPC engine API: prompts from requests, counts from responses."""

from __future__ import annotations

import pytest

from epp.api.errors import BadRequest
from epp.api.requests import LOAD_ONLY, parse_request
from epp.api.responses import ResponseReader, Usage
from epp.gateway.pb import vllm_engine_pb2 as pb
from epp.request import Api, Headers, InferenceRequest, RequestHead

SERVICE = "/vllm.grpc.engine.VllmEngine/"


def frame(message: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(message).to_bytes(4, "big") + message


def parse(body: bytes, method: str = "Generate") -> InferenceRequest:
    head = RequestHead("POST", SERVICE + method, Headers({"content-type": [b"application/grpc"]}))
    return parse_request(head, body, "r-1")


def test_token_ids_become_the_prompt() -> None:
    tokenized = pb.TokenizedInput(input_ids=[1, 2, 4294967295])
    sampling = pb.SamplingParams(max_tokens=9)
    message = pb.GenerateRequest(tokenized=tokenized, sampling_params=sampling, stream=True)
    request = parse(frame(message.SerializeToString()))
    (prompt,) = request.prompts
    assert not isinstance(prompt, bytes)
    assert prompt.tolist() == [1, 2, 4294967295]
    assert (request.prompt_tokens, request.tokens_exact, request.max_tokens, request.stream) == (3, True, 9, True)
    embed = parse(frame(pb.EmbedRequest(tokenized=tokenized).SerializeToString()), "Embed")
    assert (embed.api, embed.prompt_tokens) == (Api.GRPC_EMBED, 3)


def test_text_becomes_the_prompt() -> None:
    assert parse(frame(pb.GenerateRequest(text="héllo").SerializeToString())).prompts == ("héllo".encode(),)


def test_field_numbers_are_those_of_the_engine() -> None:
    """Written by hand after vllm/grpc/vllm_engine.proto, with fields before and behind that are not read."""
    sampling = b"\x0d\x00\x00\x80\x3f" + b"\x40\x07"  # temperature = 1.0 (1), max_tokens = 7 (8)
    tokenized = b"\x0a\x02hi" + b"\x12\x03\x05\xac\x02"  # original_text (1), input_ids = [5, 300] (2)
    message = b"\x0a\x01r" + b"\x12" + bytes([len(tokenized)]) + tokenized
    message += b"\x22" + bytes([len(sampling)]) + sampling + b"\x28\x01" + b"\xc2\x3e\x00"
    request = parse(frame(message))
    (prompt,) = request.prompts
    assert not isinstance(prompt, bytes)
    assert (prompt.tolist(), request.max_tokens, request.stream) == ([5, 300], 7, True)


def test_compressed_message_goes_by_load_alone() -> None:
    request = parse(frame(b"\x1f\x8b", flag=1))
    assert (request.api, request.prompts, request.attributes[LOAD_ONLY]) == (Api.GRPC_GENERATE, (), "grpc-compressed")
    assert parse(frame(b"")).attributes[LOAD_ONLY] == "no-prompt"


@pytest.mark.parametrize("body", [b"", b"\0\0\0", b"\0\0\0\0\x09abc", frame(b"") + b"x", frame(b"\xff\xff")])
def test_malformed_message_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(body)


def test_counts_are_read_at_every_cut_and_the_last_message_wins() -> None:
    chunk = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(prompt_tokens=20, completion_tokens=1, cached_tokens=16))
    last = pb.GenerateResponse(complete=pb.GenerateComplete(prompt_tokens=20, completion_tokens=4, cached_tokens=16))
    body = frame(chunk.SerializeToString()) * 3 + frame(last.SerializeToString())
    for cut in range(len(body) + 1):
        reader = ResponseReader(Api.GRPC_GENERATE, "application/grpc+proto")
        reader.feed(body[:cut])
        reader.feed(body[cut:])
        assert reader.finish() == Usage(20, 4, 16)
    embedded = pb.EmbedResponse(complete=pb.EmbedComplete(prompt_tokens=5))
    reader = ResponseReader(Api.GRPC_EMBED, "application/grpc")
    reader.feed(frame(embedded.SerializeToString()))
    assert reader.finish() == Usage(5, None, None)


@pytest.mark.parametrize("body", [frame(b"", flag=1), b"\0\xff\xff\xff\xff", frame(b"\xff\xff")])
def test_unreadable_responses_count_nothing(body: bytes) -> None:
    reader = ResponseReader(Api.GRPC_GENERATE, "application/grpc")
    for _ in range(3):
        reader.feed(body)
    assert (reader.finish(), reader.faults) == (None, 1)
