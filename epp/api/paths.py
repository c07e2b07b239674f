"""Which API a path belongs to.

A query string, repeated and trailing slashes, percent-encoding and a prefix put before the API's own path
(`/vertex/v1/chat/completions`) do not change what a path means: only its last segments are looked at.
"""

from __future__ import annotations

from urllib.parse import unquote

from epp.request import Api

_LAST_SEGMENT = {
    "completions": Api.COMPLETIONS,
    "responses": Api.RESPONSES,
    "conversations": Api.CONVERSATIONS,
    "embeddings": Api.EMBEDDINGS,
}

GRPC_METHODS = {
    ("vllm.grpc.engine.VllmEngine", "Generate"): Api.GRPC_GENERATE,
    ("vllm.grpc.engine.VllmEngine", "Embed"): Api.GRPC_EMBED,
}
"""(service, method) of the RPCs whose requests are read (vllm/grpc/vllm_engine.proto)."""


def api_of(path: str) -> Api:
    """The API that a request's `:path` means; `Api.OTHER` for all that is scheduled by load alone.

    `messages` counts only as `v1/messages` or alone, because other APIs have sub-resources of that name
    (`/v1/threads/ID/messages`).
    """
    path = path.partition("?")[0].partition("#")[0]
    if "%" in path:
        path = unquote(path)
    segments = [segment for segment in path.split("/") if segment]
    if not segments:
        return Api.OTHER
    last = segments[-1]
    before = segments[-2] if len(segments) > 1 else ""
    if last == "completions" and before == "chat":
        return Api.CHAT
    if last == "messages":
        return Api.MESSAGES if before in ("", "v1") else Api.OTHER
    return _LAST_SEGMENT.get(last) or GRPC_METHODS.get((before, last), Api.OTHER)
