"""Which models' prompts are tokenised, and how: the `models` section of the configuration.

Like the shapes of plugins' parameters these are frozen dataclasses; `epp.config` reads them strictly. llm-d's
`token-producer` and `tokenizer` plugins are read into the same (`TokenProducer.model`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from epp.plugin import Range, Unit

DEADLINE_S = 0.25
"""A prompt without ids by then is scored by the approximate history."""

Seconds = Annotated[float, Range(min=0.001, max=60), Unit("duration")]
Source = Literal["auto", "local", "render"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One base model; its adapters need no entry."""

    name: str
    """As workers and clients call it."""
    aliases: tuple[str, ...] = ()
    """Other names it is asked for by."""
    path: str = ""
    """Folder with tokenizer.json and its like, relative to the file; empty: nothing is tokenised in this process."""
    source: Source = "auto"
    """`local`: in this process only. `render`: by a worker only. `auto`: here where it can be, else by a worker."""
    render_url: str = ""
    """Who renders, as http://host:port; empty: the worker itself."""
    timeout: Seconds = DEADLINE_S
    """Bound on one rendering by a worker."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The worker's `--default-chat-template-kwargs`."""
    line: int = 0
    """Where it stands in the file; set by the reader."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty")
        if self.source == "local" and not self.path:
            raise ValueError("source local needs a path")
        if self.render_url and not self.render_url.startswith(("http://", "https://")):
            raise ValueError("renderUrl must begin with http:// or https://")
        if self.line:
            raise ValueError("line is not a setting")

    def at(self, line: int, path: str) -> ModelConfig:
        """The same with where it stands and its folder as found from there."""
        made = replace(self, path=path)
        object.__setattr__(made, "line", line)
        return made


@dataclass(frozen=True, slots=True)
class _Vllm:
    url: str = ""
    http: str = ""
    timeout: Seconds = DEADLINE_S
    mm_timeout: Seconds = DEADLINE_S


@dataclass(frozen=True, slots=True)
class _Estimate:
    bytes_per_token: Annotated[float, Range(min=0.1)] = 4.0


@dataclass(frozen=True, slots=True)
class TokenProducer:
    """Parameters of llm-d's `token-producer` (and `tokenizer`)."""

    model_name: str = ""
    vllm: _Vllm | None = None
    estimate: _Estimate | None = None

    @property
    def model(self) -> ModelConfig | None:
        """None when it asks for an estimate, which every request has anyhow."""
        if self.vllm is None or not self.model_name:
            return None
        url = self.vllm.url or self.vllm.http
        return ModelConfig(self.model_name, source="render", render_url=url, timeout=self.vllm.timeout)
