"""Reading a request: what is asked of which model, and the bytes or token ids that identify its prompts.

In: head and body of an HTTP request. Out: an `InferenceRequest`, or `BadRequest` naming the place. The body is only
read. Whatever vLLM accepts is accepted; what only the worker can judge (roles, part types, sampling parameters) is
left to the worker. Where prompts cannot be read, the request is scheduled by load alone and
`attributes[LOAD_ONLY]` says why.
"""

from __future__ import annotations

import array
import re
from functools import partial
from itertools import islice

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from epp.api.errors import BadRequest
from epp.api.fields import ABSENT, Fields, kind_of, read_fields
from epp.api.grpc_engine import read_grpc_request
from epp.api.media import has_media
from epp.api.paths import api_of
from epp.api.resuming import resume_fields
from epp.request import BYTES_PER_TOKEN, Api, InferenceRequest, RequestHead

LOAD_ONLY = "load-only"
"""Key in `InferenceRequest.attributes`: why a request has no prompts (`compressed-body`, `multipart-body`,
`no-prompt`, `too-many-prompts`, `grpc-compressed`, `unknown-path`, `no-body`)."""

MAX_PROMPTS = 2048
"""Prompts of one request that are looked at one by one (OpenAI's own limit for embeddings); more go by load alone."""

MAX_SESSION_CHARS = 256

_list_of_raw = msgspec.json.Decoder(list[Raw]).decode
_list_of_int = msgspec.json.Decoder(list[int]).decode
_text = msgspec.json.Decoder(str).decode
_INTEGER = re.compile(rb"\d{1,18}")
_FIRST_ITEM = re.compile(rb"\[[ \t\r\n]*(.)", re.DOTALL)
_BETWEEN_TEXTS = re.compile(rb'"[ \t\r\n]*,[ \t\r\n]*"')
_FAULT_INDEX = re.compile(r"\$\[(\d+)\]")


class _Id(msgspec.Struct):
    id: Raw = Raw()


_id_of = msgspec.json.Decoder(_Id).decode


def parse_request(head: RequestHead, body: bytes | None, request_id: str) -> InferenceRequest:
    """Read one request. `body` None or empty: it has none.

    Only POST carries a request to an inference API; every other method is load-only. Raises BadRequest.
    """
    body = body or b""
    api = api_of(head.path) if head.method.upper() == "POST" else Api.OTHER
    request = InferenceRequest(
        request_id=request_id,
        api=api,
        headers=head.headers,
        subset=head.subset,
        body_bytes=len(body),
        session_id=head.headers.get("x-session-token")[:MAX_SESSION_CHARS],
    )
    reason = _untouchable(head)
    if reason:
        request.attributes[LOAD_ONLY] = reason
    elif api is Api.OTHER:
        request.attributes[LOAD_ONLY] = "unknown-path" if body else "no-body"
        _read_other(request, body)
    elif not body:
        raise BadRequest("", "is empty")
    elif api in (Api.GRPC_GENERATE, Api.GRPC_EMBED):
        _conclude(request, read_grpc_request(request, body))
    else:
        _read(request, resume_fields(body))
    request.target_model = request.model
    return request


def _untouchable(head: RequestHead) -> str:
    encoding = head.headers.get("content-encoding").strip().lower()
    if encoding not in ("", "identity"):
        return "compressed-body"
    if head.headers.get("content-type").lstrip().lower().startswith("multipart/"):
        return "multipart-body"
    return ""


def _read_other(request: InferenceRequest, body: bytes) -> None:
    """The model, if the body is JSON and names one; never an error."""
    if body.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"{":
        return
    try:
        request.model = _string(read_fields(body).model) or ""
    except BadRequest:
        pass


def _read(request: InferenceRequest, fields: Fields) -> None:
    request.model = _model(fields, required=request.api is not Api.CONVERSATIONS)
    request.stream = bytes(fields.stream) == b"true"
    request.cache_salt = _string(fields.cache_salt) or ""
    request.max_tokens = _max_tokens(fields)
    request.session_id = request.session_id or _session(fields)
    request.prompt_seed = _seed(fields)
    _read_prompts(request, fields)
    _conclude(request, "no-prompt")


def _conclude(request: InferenceRequest, reason: str) -> None:
    """Count the prompts' tokens, or keep why there are none."""
    if not request.prompts:
        request.attributes.setdefault(LOAD_ONLY, reason)
        return
    request.tokens_exact = not any(isinstance(prompt, bytes) for prompt in request.prompts)
    count = sum(len(p) // BYTES_PER_TOKEN if isinstance(p, bytes) else len(p) for p in request.prompts)
    request.prompt_tokens = count if request.tokens_exact else count + len(request.prompt_seed) // BYTES_PER_TOKEN


def _read_prompts(request: InferenceRequest, fields: Fields) -> None:
    match request.api:
        case Api.COMPLETIONS:
            _flat(request, fields.prompt, "prompt", required=not kind_of(fields.prompt_embeds))
        case Api.EMBEDDINGS if kind_of(fields.input) or not kind_of(fields.messages):
            _flat(request, fields.input, "input", required=True)
        case Api.RESPONSES if kind_of(fields.input) == b'"':
            _flat(request, fields.input, "input", required=True)
        case Api.RESPONSES:
            _turns(request, fields.input, "input", required=True)
        case Api.CONVERSATIONS:
            _turns(request, fields.items, "items", required=False)
        case _:  # chat, Anthropic messages, and the chats that vLLM embeds
            _turns(request, fields.messages, "messages", required=True)


def _turns(request: InferenceRequest, raw: Raw, path: str, *, required: bool) -> None:
    """A list of messages: one prompt, its bytes without the closing bracket, so that the next turn begins with them."""
    kind = kind_of(raw)
    if not kind:
        if required:
            raise BadRequest(path, "is required")
        return
    if kind != b"[":
        raise BadRequest(path, "must be a list")
    turns = memoryview(raw)[:-1].tobytes().rstrip(b" \t\r\n")
    if len(turns) > 1:
        request.prompts, request.media = (turns,), partial(has_media, turns)


def _flat(request: InferenceRequest, raw: Raw, path: str, *, required: bool) -> None:
    """A text, token ids, or a list of one of these."""
    kind = kind_of(raw)
    if kind == b'"':
        request.prompts = (memoryview(raw)[1:-1].tobytes(),)
    elif kind == b"[":
        _list(request, bytes(raw), path)
    elif kind:
        raise BadRequest(path, "must be a string or a list")
    elif required:
        raise BadRequest(path, "is required")


def _list(request: InferenceRequest, value: bytes, path: str) -> None:
    first = _FIRST_ITEM.match(value)
    kind = first[1] if first else b"]"
    if kind == b"]":
        raise BadRequest(path, "must not be empty")
    if kind == b"{":  # multimodal embedding inputs of other engines
        request.media = True
        return
    if kind not in b'"[':
        request.prompts = (_token_ids(value, path),)
        return
    if _surely_too_many(value, kind):
        _too_many(request, value)
        return
    try:
        items = [bytes(item) for item in _list_of_raw(value)]
    except (msgspec.DecodeError, RecursionError):  # NaN or lone surrogates, which Python's parser takes
        return
    for index, item in enumerate(items):
        if item[:1] != kind:
            raise BadRequest(f"{path}[{index}]", "must be of the same kind as the items before it")
    if len(items) > MAX_PROMPTS:
        _too_many(request, value)
    elif kind == b'"':
        request.prompts = tuple(item[1:-1] for item in items)
    else:
        request.prompts = tuple(_token_ids(item, f"{path}[{index}]") for index, item in enumerate(items))


def _surely_too_many(value: bytes, kind: bytes) -> bool:
    """Told without taking the list apart: eight million items would be a gigabyte of objects.

    Between two texts stands quote, comma, quote; a text that ends in an escaped quote and a comma looks like one more.
    """
    if len(value) < 6 * MAX_PROMPTS:
        return False
    if kind == b"[":
        return value.count(b"[") > 2 * MAX_PROMPTS
    return next(islice(_BETWEEN_TEXTS.finditer(value), 2 * MAX_PROMPTS, None), None) is not None


def _too_many(request: InferenceRequest, value: bytes) -> None:
    request.attributes[LOAD_ONLY] = "too-many-prompts"
    request.prompt_tokens = len(value) // BYTES_PER_TOKEN


def _token_ids(value: bytes, path: str) -> NDArray[np.uint32]:
    """`array` is the quickest way from a list of ints (0.4 ms for 100,000; numpy 1.1 ms); it also checks the range."""
    try:
        ids = _list_of_int(value)
        array_of_ids = array.array("I", ids)
    except msgspec.ValidationError as error:
        index = _FAULT_INDEX.search(str(error))
        raise BadRequest(f"{path}[{index[1]}]" if index else path, "must be a token id") from None
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise BadRequest(path, "must hold token ids only") from None
    except OverflowError:
        index_at = next(i for i, token in enumerate(ids) if not 0 <= token < 1 << 32)
        raise BadRequest(f"{path}[{index_at}]", "must be a token id from 0 to 4294967295") from None
    if not ids:
        raise BadRequest(path, "must not be empty")
    return np.frombuffer(array_of_ids, dtype=np.uint32)


def _model(fields: Fields, *, required: bool) -> str:
    model = _string(fields.model)
    if model:
        return model
    if not kind_of(fields.model):
        if required:
            raise BadRequest("model", "is required")
        return ""
    raise BadRequest("model", "must be a non-empty string")


def _string(raw: Raw) -> str | None:
    """The value when it is a string that can be written as UTF-8, else None."""
    if kind_of(raw) != b'"':
        return None
    try:
        return _text(raw)
    except msgspec.DecodeError:
        return None


def _max_tokens(fields: Fields) -> int | None:
    """The newer name first; anything but a plain number is for the worker to judge."""
    for raw in (fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens):
        if raw is not ABSENT and _INTEGER.fullmatch(value := bytes(raw)):
            return int(value)
    return None


def _session(fields: Fields) -> str:
    """A name of the conversation, from the surest hint to the weakest."""
    conversation = fields.conversation
    if kind_of(conversation) == b"{":
        try:
            conversation = _id_of(conversation).id
        except (msgspec.DecodeError, RecursionError):
            pass
    for raw in (conversation, fields.prompt_cache_key, fields.previous_response_id, fields.user):
        if raw is not ABSENT and (name := _string(raw)):
            return name[:MAX_SESSION_CHARS]
    return ""


def _seed(fields: Fields) -> bytes:
    """What workers render before the first message, in one order whatever the body's."""
    named = ((b"tools", fields.tools), (b"system", fields.system), (b"instructions", fields.instructions))
    return b"".join(name + b"\0" + bytes(raw) + b"\0" for name, raw in named if kind_of(raw))
