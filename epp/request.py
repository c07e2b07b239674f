"""InferenceRequest: one inference request as parsed.

In: head and body of an HTTP request. Out: what picking needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray


class Api(StrEnum):
    """The inference API a path belongs to; `OTHER` is everything that is scheduled by load alone."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    CONVERSATIONS = "conversations"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    GRPC_GENERATE = "grpc-generate"
    GRPC_EMBED = "grpc-embed"
    OTHER = "other"


class Headers:
    """HTTP header fields: lower-case names, values as bytes, repeated names kept in order."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, list[bytes]] | None = None) -> None:
        self._fields: dict[str, list[bytes]] = dict(fields or {})

    def add(self, name: str, value: bytes) -> None:
        self._fields.setdefault(name.lower(), []).append(value)

    def get(self, name: str, default: str = "") -> str:
        """The first value as text; bytes outside UTF-8 become U+FFFD."""
        values = self._fields.get(name)
        return values[0].decode("utf-8", "replace") if values else default

    def get_all(self, name: str) -> list[bytes]:
        return self._fields.get(name, [])

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)


class RequestHead(msgspec.Struct, frozen=True):
    """The head of a request as Envoy tells it."""

    method: str
    path: str
    """`:path` as sent, with any query string."""
    headers: Headers
    subset: frozenset[str] | None = None
    """Endpoints the gateway allows (`envoy.lb.subset_hint`): `ip:port` (IPv6 in brackets), or a bare address (IPv6
    without brackets) for all its ports; empty: none is allowed; None: no hint."""


BYTES_PER_TOKEN = 4
"""Bytes of prompt text a token stands for until a model's own rate is learned."""

PromptItem = bytes | NDArray[np.uint32]
"""One prompt: the bytes that identify its text (raw JSON of prompt or messages), or token ids of shape (tokens,)."""


class TokenPrompt(Protocol):
    """One prompt whose token ids are known; its first `shared` ids are those of an earlier turn."""

    @property
    def ids(self) -> NDArray[np.uint32]: ...

    @property
    def shared(self) -> int: ...

    @property
    def earlier(self) -> dict[object, object] | None:
        """The `notes` of that turn."""

    @property
    def notes(self) -> dict[object, object]:
        """Room to keep what was derived from the ids for the next turn."""


class PlacedMedia(Protocol):
    """An image, sound or video within a prompt: where its placeholder lies, in tokens, and what names it."""

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def identifier(self) -> str: ...


@dataclass(slots=True)
class InferenceRequest:
    """What a request asks for. Built by `epp.api`; read, not changed, by producers, filters, scorers and pickers."""

    request_id: str
    api: Api
    model: str = ""
    """The model the client named; empty when the API has none."""
    target_model: str = ""
    """The model the worker will be asked for (after a rewrite); equals `model` otherwise."""
    stream: bool = False
    prompts: tuple[PromptItem, ...] = ()
    """One entry per prompt; empty = load-only scheduling."""
    prompt_seed: bytes = b""
    """What precedes the first block besides the model: tools, system or instructions that the worker renders first."""
    cache_salt: str = ""
    prompt_tokens: int = 0
    """Prompt tokens over all prompts: exact where ids were sent, else bytes over `bytes_per_token`."""
    tokens_exact: bool = False
    bytes_per_token: float = BYTES_PER_TOKEN
    """What `prompt_tokens` was estimated with, unless it is exact; learned per model by the director."""
    max_tokens: int | None = None
    priority: int = 0
    """How much it matters, by the InferenceObjective it names; below 0 it may be shed."""
    base_model: str = ""
    """The registered base model behind `target_model`; "" where no model is registered."""
    adapter: str = ""
    """`target_model` where that is a LoRA adapter of the base model."""
    tokens: Sequence[TokenPrompt] = ()
    """Token ids, one entry per prompt, where they are known in time; empty otherwise."""
    token_media: Sequence[Sequence[PlacedMedia]] = ()
    """Of each entry of `tokens`; empty: none has any."""
    reasons: list[str] = field(default_factory=list)
    """Why something about it is done in a lesser way, by fixed names; they go into the decision."""
    media: bool | Callable[[], bool] = False
    """What `multimodal` answers, or how to find out."""
    headers: Headers = field(default_factory=Headers)
    subset: frozenset[str] | None = None
    body_bytes: int = 0
    session_id: str = ""
    """A name of the conversation when the client gives one (`x-session-token`, `conversation`, `user` hints)."""
    attributes: dict[str, object] = field(default_factory=dict)
    """Scratch space of plugins for the life of this request, keyed by plugin name."""

    @property
    def multimodal(self) -> bool:
        """Whether the prompts carry images, audio, video or files.

        Found out when first asked: it takes as long as all other reading of a request (110 us for 400 KB).
        """
        if not isinstance(self.media, bool):
            self.media = self.media()
        return self.media
