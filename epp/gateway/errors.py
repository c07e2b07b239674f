"""Answers the picker gives in a worker's stead: HTTP status, OpenAI-shaped JSON error, headers.

In: what went wrong, in words for the client. Out: a `Rejection`, which the stream machine turns into Envoy's
ImmediateResponse. A body is never echoed: a message names the path inside the request and the reason, both bounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

DROPPED_REASON = "x-llm-d-request-dropped-reason"
"""Response header with the fixed name of why a request was shed (the field's name for it)."""

_MAX_WORDS = 300


@dataclass(frozen=True, slots=True)
class Rejection:
    """An HTTP answer: `body` is complete, `headers` are set over those Envoy makes."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    """A fixed name for counters and for Envoy's `%RESPONSE_CODE_DETAILS%`."""


def bad_request(path: str, reason: str) -> Rejection:
    """400: `path` names the place in the request ("messages[3].content"; "" is the whole body)."""
    path = _bounded(path)
    message = f"{path}: {_bounded(reason)}" if path else _bounded(reason)
    return _rejection(400, message, kind="invalid_request_error", code="invalid_request", param=path or None)


def too_large(limit: int) -> Rejection:
    """413: the body is over `limit` bytes."""
    message = f"the request body is larger than {limit} bytes"
    return _rejection(413, message, kind="invalid_request_error", code="request_too_large")


def too_many_requests(reason: str, message: str, *, retry_after_s: float = 1.0) -> Rejection:
    """429: shed under load; `reason` is a fixed name such as "rejected-saturated"."""
    return _rejection(
        429, message, kind="rate_limit_error", code="rate_limit_exceeded", reason=reason, retry_after_s=retry_after_s
    )


def unavailable(reason: str, message: str, *, retry_after_s: float = 1.0) -> Rejection:
    """503: no endpoint can take the request, or the picker is draining."""
    return _rejection(
        503, message, kind="server_error", code="service_unavailable", reason=reason, retry_after_s=retry_after_s
    )


def _rejection(
    status: int,
    message: str,
    *,
    kind: str,
    code: str,
    param: str | None = None,
    reason: str = "",
    retry_after_s: float | None = None,
) -> Rejection:
    error = {"message": _bounded(message), "type": kind, "param": param, "code": code}
    headers = {"content-type": "application/json"}
    if reason:
        headers[DROPPED_REASON] = reason
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    return Rejection(status, json.dumps({"error": error}).encode(), headers, reason or code)


def _bounded(words: str) -> str:
    return words if len(words) <= _MAX_WORDS else words[: _MAX_WORDS - 1] + "…"
