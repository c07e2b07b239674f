"""The front door: token ids of a request, from whichever source has them, and the reason where none has.

In: an `InferenceRequest` and its body. Out: a `Tokenized`. Sources, in this order: ids that the request itself holds;
this process (`epp.kvcache.tokens.local`); a worker (`epp.kvcache.tokens.render`). Where all fail the result has no
prompts, source `estimate` and the reason: the caller scores by the approximate history, never by zero in silence.

    tokenized = tokens.ready(request, body)            # at once, on the event loop, or None
    tokenized = await in_thread(tokens.work(request, body))
    if not tokenized.prompts and tokens.renders(request):
        tokenized = await tokens.render(request, body, worker_address)

`work` may be abandoned at the caller's deadline; what it found stays in the caches for the next turn.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from epp.kvcache.tokens.folder import ModelFolderError, load_folder
from epp.kvcache.tokens.local import LocalModel, Prompt
from epp.kvcache.tokens.messages import Unrenderable
from epp.kvcache.tokens.pieces import Ids, PieceCache
from epp.kvcache.tokens.render import Media, RenderClient, RenderError
from epp.kvcache.tokens.turns import Turns
from epp.model_config import ModelConfig
from epp.request import Api, InferenceRequest

CACHE_BYTES = 256 << 20
"""Bound on the piece cache, and on the turns: each is 64 million ids (a session of 100,000 tokens takes 0.4 MB)."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Ids of every prompt of a request; none when they are not known."""

    prompts: tuple[Prompt, ...]
    source: str
    """`ids`, `local`, `render`, or `estimate` when there are no ids."""
    reason: str = ""
    """Why there are none; a word for counters."""
    detail: str = ""
    media: tuple[tuple[Media, ...], ...] = ()
    """Of each prompt, as far as a worker rendered it; empty: none has any."""

    @property
    def ids(self) -> tuple[Ids, ...]:
        return tuple(prompt.ids for prompt in self.prompts)


class Tokens:
    """Safe to call from the event loop (`ready`, `render`) and from threads (what `work` returns)."""

    def __init__(
        self,
        models: Iterable[ModelConfig],
        *,
        parent: Callable[[str], str] = lambda adapter: "",
        client: RenderClient | None = None,
        cache_bytes: int = CACHE_BYTES,
        seed: int = 0,
    ) -> None:
        """`parent`: the base model of an adapter, as workers tell (`Endpoint.parents`), or "".

        Loads every model's folder (0.3-2 s each, the proofs included). Raises ModelFolderError.
        """
        self.cache = PieceCache(cache_bytes, seed)
        self.turns = Turns(cache_bytes)
        self.client = client or RenderClient()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """(source, reason) -> requests."""
        self.seconds: dict[str, float] = {"local": 0.0, "render": 0.0}
        """Source -> time spent."""
        self._parent = parent
        self._models: dict[str, ModelConfig] = {}
        self._local: dict[str, LocalModel] = {}
        for model in models:
            self._models |= dict.fromkeys((model.name, *model.aliases), model)
            if model.path and model.source != "render":
                self._local[model.name] = LocalModel(
                    load_folder(model.path),
                    self.cache,
                    self.turns,
                    template_defaults=model.chat_template_kwargs,
                    seed=seed,
                )

    def base_of(self, request: InferenceRequest) -> tuple[str, str]:
        """(registered base model, adapter) that a request is for; ("", "") when its model is not registered."""
        asked = request.target_model or request.model
        model = self._models.get(asked)
        if model is not None:
            return model.name, ""
        model = self._models.get(self._parent(asked))
        return (model.name, asked) if model is not None else ("", "")

    def registered(self, names: Iterable[str]) -> str | None:
        """The registered base model among the names that a worker serves; None when it serves none."""
        return next((self._models[name].name for name in names if name in self._models), None)

    def local(self, name: str) -> LocalModel | None:
        """What is loaded under a registered name."""
        return self._local.get(name)

    def ready(self, request: InferenceRequest, body: bytes) -> Tokenized | None:
        """The answer when it costs well under a millisecond, or is that there will be none here; else None."""
        return self._count(self._locally(request, body, quick=True))

    def work(self, request: InferenceRequest, body: bytes) -> Callable[[], Tokenized]:
        """A call for a thread; it never raises."""

        def tokenize() -> Tokenized:
            tokenized = self._count(self._locally(request, body, quick=False))
            assert tokenized is not None
            return tokenized

        return tokenize

    def renders(self, request: InferenceRequest) -> bool:
        """Whether a worker may be asked for what could not be tokenised here."""
        model = self._models.get(self.base_of(request)[0])
        return model is not None and model.source != "local"

    async def render(self, request: InferenceRequest, body: bytes, worker: str) -> Tokenized:
        """Ask a worker (`ip:port`), or whom the configuration names. Never raises but CancelledError."""
        model = self._models.get(self.base_of(request)[0])
        if model is None:
            return self._done(Tokenized((), "estimate", "model-not-registered"))
        started = time.perf_counter()
        try:
            url = model.render_url.rstrip("/") or f"http://{worker}"
            rendered = await self.client.render(url, request.api, body, model.timeout)
        except RenderError as error:
            return self._done(Tokenized((), "estimate", error.reason, str(error)))
        finally:
            self.seconds["render"] += time.perf_counter() - started
        media = tuple(r.media for r in rendered)
        return self._done(
            Tokenized(tuple(Prompt(r.ids) for r in rendered), "render", media=media if any(media) else ())
        )

    def _locally(self, request: InferenceRequest, body: bytes, *, quick: bool) -> Tokenized | None:
        if request.prompts and all(isinstance(prompt, np.ndarray) for prompt in request.prompts):
            return Tokenized(tuple(Prompt(p) for p in request.prompts if isinstance(p, np.ndarray)), "ids")
        if not request.prompts:
            return Tokenized((), "estimate", "no-prompt")
        name, _ = self.base_of(request)
        if not name:
            return Tokenized((), "estimate", "model-not-registered")
        model = self._local.get(name)
        if model is None:
            return Tokenized((), "estimate", "not-local")
        started = time.perf_counter()
        try:
            if request.api is Api.CHAT:
                prompt = model.chat(body, quick=quick)
                return None if prompt is None else Tokenized((prompt,), "local")
            if request.api is Api.COMPLETIONS:
                prompts = model.completion(body, quick=quick)
                return None if prompts is None else Tokenized(tuple(prompts), "local")
            return Tokenized((), "estimate", "no-template-for-api")
        except Unrenderable as error:
            return Tokenized((), "estimate", error.reason, str(error))
        except Exception as error:  # whatever a template or tokenizer does, the request is served
            return Tokenized((), "estimate", "tokenizer-failed", f"{type(error).__name__}: {error}"[:300])
        finally:
            self.seconds["local"] += time.perf_counter() - started

    def _count(self, tokenized: Tokenized | None) -> Tokenized | None:
        return None if tokenized is None else self._done(tokenized)

    def _done(self, tokenized: Tokenized) -> Tokenized:
        self.outcomes[tokenized.source, tokenized.reason] += 1
        return tokenized


__all__ = ["ModelFolderError", "Tokenized", "Tokens"]
