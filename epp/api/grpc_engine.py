"""vLLM's gRPC engine API: requests of Generate and Embed, and the counts in their responses.

In: bodies of gRPC messages (a flag byte, four bytes of length, a protobuf message). Out: token ids or text as prompts;
(prompt, completion, cached) token counts. Compressed messages are not read: such requests go by load alone.
"""

from __future__ import annotations

import numpy as np
from google.protobuf.message import DecodeError

from epp.api.errors import BadRequest
from epp.gateway.pb import vllm_engine_pb2 as pb
from epp.request import Api, InferenceRequest

PREFIX = 5
MAX_MESSAGE_BYTES = 4 << 20
"""Longest response message that is read (gRPC's own default limit); reading ends at a longer one."""


def read_grpc_request(request: InferenceRequest, body: bytes) -> str:
    """Fill `request` from the one message in `body`. Returns why it has no prompts, or "". Raises BadRequest."""
    if len(body) < PREFIX or PREFIX + int.from_bytes(body[1:PREFIX], "big") != len(body):
        raise BadRequest("", "is not one whole gRPC message")
    if body[0]:
        return "grpc-compressed"
    message: pb.GenerateRequest | pb.EmbedRequest
    try:
        if request.api is Api.GRPC_EMBED:
            message = pb.EmbedRequest.FromString(body[PREFIX:])
        else:
            message = pb.GenerateRequest.FromString(body[PREFIX:])
    except DecodeError:
        raise BadRequest("", "is not a protobuf message of vllm.grpc.engine") from None
    if isinstance(message, pb.GenerateRequest):
        request.stream = message.stream
        if message.sampling_params.HasField("max_tokens"):
            request.max_tokens = message.sampling_params.max_tokens
        if message.text:
            request.prompts = (message.text.encode(),)
            return ""
    if not message.tokenized.input_ids:
        return "no-prompt"
    request.prompts = (np.array(message.tokenized.input_ids, dtype=np.uint32),)
    return ""


class GenerateReader:
    """Reads a response body of Generate (`embed`: of Embed), cut anywhere."""

    def __init__(self, *, embed: bool) -> None:
        self.faults = 0
        self._embed = embed
        self._buffer = bytearray()

    def feed(self, data: bytes) -> tuple[int, int | None, int | None] | None:
        """(prompt, completion, cached) tokens as of the last message complete in `data` that tells them."""
        counts = None
        if self.faults:
            return None
        self._buffer += data
        position = 0
        while len(self._buffer) - position >= PREFIX:
            end = position + PREFIX + int.from_bytes(self._buffer[position + 1 : position + PREFIX], "big")
            if end - position > MAX_MESSAGE_BYTES + PREFIX or self._buffer[position]:
                self.faults = 1
                self._buffer.clear()
                return counts
            if end > len(self._buffer):
                break
            counts = self._counts(bytes(self._buffer[position + PREFIX : end])) or counts
            position = end
        del self._buffer[:position]
        return counts

    def _counts(self, message: bytes) -> tuple[int, int | None, int | None] | None:
        try:
            if self._embed:
                embedded = pb.EmbedResponse.FromString(message)
                return (embedded.complete.prompt_tokens, None, None) if embedded.HasField("complete") else None
            generated = pb.GenerateResponse.FromString(message)
        except DecodeError:
            self.faults = 1
            return None
        which = generated.WhichOneof("response")
        if which is None:
            return None
        part = generated.complete if which == "complete" else generated.chunk
        return part.prompt_tokens, part.completion_tokens, part.cached_tokens
