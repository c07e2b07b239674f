"""Small pools for tests: endpoints with the live values a test names, plugins built as the registry builds them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

from epp.endpoint import Candidates, Endpoint, Pool
from epp.plugin import Handle, Plugin
from epp.request import Api, Headers, InferenceRequest

P = TypeVar("P", bound=Plugin[Any])


NOW = 100.0


def candidates(count: int = 0, /, **columns: Sequence[float]) -> Candidates:
    """A pool of `count` endpoints (or as many as a column has values), scraped at `NOW`, with these columns."""
    count = count or max(len(values) for values in columns.values())
    pool = Pool(Endpoint("10.0.0.1", 8000 + i) for i in range(count))
    for i, endpoint in enumerate(pool.endpoints):
        endpoint.set("scraped_at", NOW)
        for name, values in columns.items():
            endpoint.set(name, values[i])
    return pool.candidates(NOW)


def plugin(cls: type[P], /, **parameters: object) -> P:
    return cls(cls.Parameters(**parameters), Handle(random=Random(1)), cls.type)


def request(*prompts: bytes, prompt_tokens: int | None = None, **fields: Any) -> InferenceRequest:
    headers = Headers()
    for name, value in fields.pop("headers", {}).items():
        headers.add(name, value.encode())
    fields.setdefault("model", "m")
    fields.setdefault("target_model", fields["model"])
    tokens = sum(len(p) // 4 for p in prompts) if prompt_tokens is None else prompt_tokens
    return InferenceRequest("r", Api.CHAT, prompts=prompts, prompt_tokens=tokens, headers=headers, **fields)
