"""KV-cache events as vLLM publishes them: what happened to which blocks, and how a batch of it looks on the wire.

One batch is published per engine step that had events. Its payload is msgpack, an array
`[timestamp, events, data_parallel_rank]`. Two layouts of an event are in the field: a map with the key `type`
(vLLM since mid-2026, keys with default values left out) and an array whose first element is the type's name (before).
Hashes are the low 64 bits of the digest as an unsigned integer, or, by option, the whole digest as bytes.
Source: vllm/distributed/kv_events.py, and frames captured from vLLM 0.32.0.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

EventFormat = Literal["map", "array"]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of blocks entered the cache: consecutive in one sequence, the first one's parent named."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: array[int]
    """Of all the blocks, flat: `len(block_hashes) * block_size`."""
    block_size: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[list[str] | None, ...]
    """For each block what else than tokens is hashed: LoRA name, cache salt (first block of a prompt only)."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block was evicted."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventEncoder:
    """Encodes batches in one of the layouts."""

    def __init__(self, layout: EventFormat = "map", *, bytes_hashes: bool = False, data_parallel_rank: int = 0) -> None:
        self._event = _as_map if layout == "map" else _as_array
        self._hash = bytes if bytes_hashes else _low_64_bits
        self._rank = data_parallel_rank
        self._encode = msgspec.msgpack.Encoder().encode

    def __call__(self, events: Iterable[KVCacheEvent], timestamp: float) -> bytes:
        """`timestamp` in seconds since the epoch."""
        return self._encode([timestamp, [self._event(event, self._hash) for event in events], self._rank])


def _low_64_bits(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def _as_map(event: KVCacheEvent, external: Any) -> dict[str, Any]:
    match event:
        case BlockStored():
            parent = event.parent_block_hash
            return {
                "type": "BlockStored",
                "block_hashes": [external(h) for h in event.block_hashes],
                "parent_block_hash": None if parent is None else external(parent),
                "token_ids": event.token_ids.tolist(),
                "block_size": event.block_size,
                "lora_id": event.lora_id,
                "medium": "GPU",
                "lora_name": event.lora_name,
                "extra_keys": event.extra_keys,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        case BlockRemoved():
            hashes = [external(h) for h in event.block_hashes]
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _as_array(event: KVCacheEvent, external: Any) -> list[Any]:
    fields = _as_map(event, external)
    return list(fields.values())
