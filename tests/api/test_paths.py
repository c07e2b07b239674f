"""What a path means, whatever stands before and behind it."""

from __future__ import annotations

import pytest

from epp.api.paths import api_of
from epp.request import Api


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT),
        ("/v1/chat/completions?api-version=2024-10-21", Api.CHAT),
        ("/v1/chat/completions/", Api.CHAT),
        ("//v1//chat///completions", Api.CHAT),
        ("/v1/chat%2Fcompletions", Api.CHAT),
        ("/vertex/projects/p/locations/l/endpoints/openapi/chat/completions", Api.CHAT),
        ("/chat/completions#x", Api.CHAT),
        ("/v1/completions", Api.COMPLETIONS),
        ("/team-a/v1/completions?x=/v1/chat/completions", Api.COMPLETIONS),
        ("/v1/responses", Api.RESPONSES),
        ("/v1/responses/resp_1/cancel", Api.OTHER),
        ("/v1/conversations", Api.CONVERSATIONS),
        ("/v1/conversations/conv_1/items", Api.OTHER),
        ("/v1/messages", Api.MESSAGES),
        ("/anthropic/v1/messages?beta=true", Api.MESSAGES),
        ("/v1/messages/count_tokens", Api.OTHER),
        ("/v1/threads/t_1/messages", Api.OTHER),
        ("/v1/embeddings/", Api.EMBEDDINGS),
        ("/vllm.grpc.engine.VllmEngine/Generate", Api.GRPC_GENERATE),
        ("/vllm.grpc.engine.VllmEngine/Embed", Api.GRPC_EMBED),
        ("/vllm.grpc.engine.VllmEngine/HealthCheck", Api.OTHER),
        ("/rerank", Api.OTHER),
        ("/v1/score", Api.OTHER),
        ("/classify", Api.OTHER),
        ("/tokenize", Api.OTHER),
        ("/v1/audio/transcriptions", Api.OTHER),
        ("/v1/images/generations", Api.OTHER),
        ("/v1/models", Api.OTHER),
        ("/health", Api.OTHER),
        ("/", Api.OTHER),
        ("", Api.OTHER),
        ("?", Api.OTHER),
    ],
)
def test_path_means_an_api(path: str, api: Api) -> None:
    assert api_of(path) is api
