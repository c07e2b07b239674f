"""The bodies of the two legs of vLLM's NIXL hand-over (`nixlv2` of llm-d's sidecar).

In: a client's request body. Out: the prefill leg's body (one token, nothing streamed, nothing that one token could not
keep), and the decode leg's: the client's own bytes but for `kv_transfer_params`. Raises BadRequest for no JSON object.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from epp.api.errors import BadRequest
from epp.api.fields import span_of
from epp.api.splice import splice
from epp.request import Api

KV = "kv_transfer_params"
TOKENS = {
    Api.CHAT: ("max_tokens", "max_completion_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
    Api.MESSAGES: ("max_tokens",),
}
"""API -> what limits its answer; these APIs are handed over, others are not."""
DROPPED = frozenset(
    {
        *("stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "echo"),
        *("use_beam_search", "max_tool_calls", "background", "store"),
    }
)
"""What a request for one token must not ask: vLLM would refuse it, or do more than is needed."""
_ASKED = b"""{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,\
"remote_host":null,"remote_port":null}"""

_members = msgspec.json.Decoder(dict[str, Raw]).decode


class _Holder(msgspec.Struct):
    kv_transfer_params: Raw = Raw()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Kept(msgspec.Struct):
    remote_prefill_cached_tokens: int | None = None


class _Fetching(msgspec.Struct):
    do_remote_prefill: Any = None
    remote_host: Any = None
    remote_engine_id: Any = None
    remote_kv_source: Any = None


class _Answer(msgspec.Struct):
    kv_transfer_params: Raw = Raw()
    usage: Raw = Raw()


_holder = msgspec.json.Decoder(_Holder).decode
_fetching = msgspec.json.Decoder(_Fetching).decode
_answer = msgspec.json.Decoder(_Answer).decode
_usage = msgspec.json.Decoder(_Usage | None).decode
_kept = msgspec.json.Decoder(_Kept).decode
_OPENING = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{([ \t\r\n]*\})?")


def prefill_body(body: bytes, api: Api) -> bytes:
    """What the prefill worker is asked."""
    try:
        members = _members(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest("", f"is no JSON object that can be handed over: {error}") from None
    for name in DROPPED & members.keys():
        del members[name]
    one = Raw(b"1")
    members.update(dict.fromkeys(TOKENS[api], one), stream=Raw(b"false"))
    members[KV] = Raw(_ASKED)
    return msgspec.json.encode(members)


def decode_body(body: bytes, params: bytes | None) -> bytes:
    """The client's bytes with `params` as its `kv_transfer_params`; None: without any that would fetch blocks.

    A client that could name them would have the worker fetch memory from whatever host it likes. What only asks to keep
    blocks for another one stays: it is a peer's prefill leg.
    """
    try:
        given = _holder(body).kv_transfer_params
    except (msgspec.DecodeError, RecursionError):
        return body  # the worker says what is wrong with it
    span = span_of(body, given)
    if params is None and (span is None or _only_keeps(bytes(given))):
        return body
    if span is not None:
        return splice(body, span, params or b"null")
    assert params is not None
    opening = _OPENING.match(body)
    assert opening is not None  # it was decoded as an object
    at = body.index(b"{", opening.start()) + 1
    return splice(body, (at, at), b'"%s":%s%s' % (KV.encode(), params, b"" if opening[1] else b","))


def _only_keeps(params: bytes) -> bool:
    try:
        asked = _fetching(params)
    except (msgspec.DecodeError, RecursionError):
        return False
    return not (asked.do_remote_prefill or asked.remote_host or asked.remote_engine_id or asked.remote_kv_source)


def handed_over(answer: bytes) -> tuple[bytes, int | None] | None:
    """`kv_transfer_params` of the prefill leg's answer as they stand there, and how many prompt tokens it had cached.

    None: the answer has none.
    """
    try:
        found = _answer(answer)
        params = bytes(found.kv_transfer_params)
        if params[:1] != b"{":
            return None
        return params, _cached(params, bytes(found.usage))
    except (msgspec.DecodeError, RecursionError):
        return None


def _cached(params: bytes, usage: bytes) -> int | None:
    try:
        told = _usage(usage or b"null")
        for details in (told.prompt_tokens_details, told.input_tokens_details) if told is not None else ():
            if details is not None and details.cached_tokens is not None:
                return details.cached_tokens
        return _kept(params).remote_prefill_cached_tokens
    except (msgspec.DecodeError, RecursionError):
        return None
