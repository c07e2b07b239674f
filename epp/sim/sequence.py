"""One sequence on its way through the engine: its tokens, its blocks and its times.

A request with several prompts, or with n > 1, is several sequences. The scheduler and the KV cache manager are the
only writers of the mutable fields.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from zlib import crc32

from epp.sim.block_pool import Block

TOKEN_TYPECODE = "I"
"""Token ids are kept as `array('I')`: four bytes a token, hashed and sliced without a copy per token."""


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How long to generate. `natural_length` is where the emulated model emits its end token (None = never)."""

    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    natural_length: int | None = None

    def finish_reason(self, num_output_tokens: int) -> str | None:
        """ "stop", "length" or None (go on), as OpenAI's `finish_reason` has it."""
        ended = self.natural_length is not None and num_output_tokens >= max(self.natural_length, self.min_tokens)
        if ended and not self.ignore_eos:
            return "stop"
        return "length" if num_output_tokens >= self.max_tokens else None


class Sequence:
    __slots__ = (
        "arrival_time",
        "block_hashes",
        "blocks",
        "cache_salt",
        "finish_reason",
        "first_scheduled_time",
        "first_token_time",
        "last_token_time",
        "lora_name",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "report_cached_blocks",
        "request_id",
        "sample_seed",
        "sampling",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        sampling: SamplingParams | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        report_cached_blocks: bool = False,
    ) -> None:
        self.request_id = request_id
        self.token_ids = array(TOKEN_TYPECODE, prompt_token_ids)
        """Prompt and output together."""
        self.num_prompt_tokens = len(self.token_ids)
        if not self.num_prompt_tokens:
            raise ValueError("a sequence needs at least one prompt token")
        self.sampling = sampling or SamplingParams()
        self.lora_name = lora_name
        self.cache_salt = cache_salt
        self.report_cached_blocks = report_cached_blocks
        """vLLM's `kv_cache_report_mode: full`: prefix-cache hits are announced again as BlockStored."""

        self.sample_seed = crc32(self.token_ids.tobytes())
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when the sequence was first admitted."""
        self.num_preemptions = 0
        self.blocks: list[Block] = []
        self.block_hashes: list[bytes] = []
        """Digests of the full blocks of `token_ids`; grows with the output."""
        self.num_cached_blocks = 0
        """How many of `blocks` are registered in the prefix cache."""

        self.arrival_time = 0.0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED
