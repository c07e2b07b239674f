"""KV events off the wire, without I/O: frames of one message in, typed events out.

A live message is `[topic, seq, payload]`; a replayed one `[empty, topic, seq, payload]`, or without the topic from
workers before vLLM 0.26; the end of a replay has sequence -1 and an empty payload. The payload is msgpack: a batch
`[ts, events, data_parallel_rank]` as an array or a map; each event a map with the key `type` (vLLM since mid-2026) or a
positional array (before, and SGLang) with trailing fields left out. Hashes are integers, signed or not, or bytes, whose
last eight count. Unknown fields are ignored; an unknown or broken event is skipped by itself and counted.

Sources: vllm/distributed/kv_events.py and frames captured from vLLM 0.32.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from epp.kvcache.tier import Tier

MAX_PAYLOAD_BYTES = 64 << 20
MAX_EVENTS = 100_000
END_OF_REPLAY = -1
_U64 = (1 << 64) - 1

Hashes = NDArray[np.uint64]
Ids = NDArray[np.uint32]
_NO_IDS: Ids = np.empty(0, dtype=np.uint32)


class MalformedMessage(ValueError):
    """Not a message of a KV-event publisher."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message: `seq` is END_OF_REPLAY where a replay ends."""

    topic: str
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of consecutive blocks entered a tier."""

    hashes: Hashes
    """Engine hashes, shape (blocks,)."""
    parent: int | None
    """Engine hash of the block before the first; None: the first begins a prompt."""
    ids: Ids
    """Token ids of all blocks, shape (blocks * block_size,); empty where the worker told only hashes."""
    block_size: int
    adapter: str
    """LoRA adapter; "" = base model."""
    extras: tuple[tuple[str, ...], ...]
    """Per block what else is hashed (salt, media identifiers), without the adapter's name; () = nothing anywhere."""
    tier: Tier
    group: int
    """KV-cache group of a hybrid model; 0 where there is one."""
    kind: str
    """Attention kind of the group (`full_attention`, `sliding_window`, ...); "" = not told."""
    window: int
    """Tokens a sliding-window group needs; 0 = not told."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left a tier."""

    hashes: Hashes
    tier: Tier
    group: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything was dropped, in all tiers as far as the event tells."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """What one engine step did."""

    ts: float
    """The worker's clock, seconds since the epoch."""
    rank: int | None
    events: tuple[Event, ...]
    skipped: Counter[str] = field(default_factory=Counter)
    """Events left out: `unknown` types, `malformed` ones, `sparse` runs (tokens and hashes do not fit together)."""


def read_message(frames: Sequence[bytes]) -> Message:
    """The parts of a live or replayed message of two to four frames. Raises MalformedMessage."""
    parts = list(frames)
    if len(parts) > 2 and len(parts[0]) == 0:
        parts = parts[1:]  # the delimiter of a ROUTER's reply; an empty topic of a live message goes with it
    if len(parts) == 2:
        parts = [b"", *parts]
    if len(parts) != 3 or len(parts[1]) != 8:
        raise MalformedMessage(f"{len(frames)} frames of {[len(f) for f in frames][:6]} bytes")
    topic, seq, payload = parts
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MalformedMessage(f"a payload of {len(payload)} bytes")
    number = int.from_bytes(seq, "big", signed=True)
    return Message(topic.decode("utf-8", "replace"), END_OF_REPLAY if number < 0 else number, payload)


class _BatchArray(Struct, array_like=True):
    ts: float
    events: list[Raw]
    data_parallel_rank: Any = None


class _BatchMap(Struct):
    ts: float
    events: list[Raw]
    data_parallel_rank: Any = None


class _Tag(Struct, array_like=True):
    type: str


_Hash = int | bytes


class _MapEvent(Struct):
    """All fields of all types; a map leaves out those with default values."""

    type: str
    block_hashes: list[_Hash] = []
    parent_block_hash: _Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    lora_name: Any = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _StoredArray(Struct, array_like=True):
    type: str
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: Any = None
    medium: str | None = None
    lora_name: Any = None
    """SGLang has a map of metadata here."""
    extra_keys: Any = None
    group_idx: Any = None
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None


class _RemovedArray(Struct, array_like=True):
    type: str
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: Any = None


_batch_array = msgspec.msgpack.Decoder(_BatchArray).decode
_batch_map = msgspec.msgpack.Decoder(_BatchMap).decode
_tag = msgspec.msgpack.Decoder(_Tag).decode
_map_event = msgspec.msgpack.Decoder(_MapEvent).decode
_stored_array = msgspec.msgpack.Decoder(_StoredArray).decode
_removed_array = msgspec.msgpack.Decoder(_RemovedArray).decode

_FAULTS = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, TypeError)
"""What decoding bytes from outside can raise."""


def decode_batch(payload: bytes) -> Batch:
    """One batch. Raises MalformedMessage when it is none; single bad events are skipped and counted."""
    try:
        batch = _batch_map(payload) if _is_map(payload) else _batch_array(payload)
    except _FAULTS as error:
        raise MalformedMessage(f"not a batch of events: {error}") from None
    if len(batch.events) > MAX_EVENTS:
        raise MalformedMessage(f"a batch of {len(batch.events)} events")
    events: list[Event] = []
    skipped: Counter[str] = Counter()
    for raw in batch.events:
        try:
            event = _event(bytes(raw))
        except _FAULTS:
            event = "malformed"
        if isinstance(event, str):
            skipped[event] += 1
        else:
            events.append(event)
    return Batch(batch.ts, _small(batch.data_parallel_rank), tuple(events), skipped)


def _event(raw: bytes) -> Event | str:
    """The event, or the name of why it is skipped."""
    if _is_map(raw):
        wire = _map_event(raw)
        match wire.type:
            case "BlockStored":
                return _stored(wire)
            case "BlockRemoved":
                return Removed(_hashes(wire.block_hashes), _tier(wire.medium), _small(wire.group_idx) or 0)
            case "AllBlocksCleared":
                return Cleared()
        return "unknown"
    match _tag(raw).type:
        case "BlockStored":
            return _stored(_stored_array(raw))
        case "BlockRemoved":
            gone = _removed_array(raw)
            return Removed(_hashes(gone.block_hashes), _tier(gone.medium), _small(gone.group_idx) or 0)
        case "AllBlocksCleared":
            return Cleared()
    return "unknown"


def _stored(wire: _MapEvent | _StoredArray) -> Stored | str:
    blocks, ids = len(wire.block_hashes), wire.token_ids
    if not blocks or (ids and (wire.block_size < 1 or len(ids) != blocks * wire.block_size)):
        return "sparse"
    adapter = wire.lora_name if isinstance(wire.lora_name, str) else ""
    parent = wire.parent_block_hash
    return Stored(
        hashes=_hashes(wire.block_hashes),
        parent=None if parent is None else _fold(parent),
        ids=np.array(ids, dtype=np.uint32) if ids else _NO_IDS,
        block_size=wire.block_size,
        adapter=adapter,
        extras=_extras(wire.extra_keys, blocks, adapter),
        tier=_tier(wire.medium),
        group=_small(wire.group_idx) or 0,
        kind=wire.kv_cache_spec_kind if isinstance(wire.kv_cache_spec_kind, str) else "",
        window=_small(wire.kv_cache_spec_sliding_window) or 0,
    )


def _hashes(values: list[_Hash]) -> Hashes:
    return np.array([v & _U64 if isinstance(v, int) else _fold(v) for v in values], dtype=np.uint64)


def _fold(value: _Hash) -> int:
    """64 bits of a hash: an integer modulo 2^64; of bytes the last eight, as vLLM itself shortens a digest."""
    return value & _U64 if isinstance(value, int) else int.from_bytes(value[-8:], "big")


def _extras(keys: Any, blocks: int, adapter: str) -> tuple[tuple[str, ...], ...]:
    """Per block the identifiers: text as it is, of `[hash, offset]` the hash. The adapter's name is told elsewhere."""
    if not isinstance(keys, list) or not any(keys):
        return ()
    found = [tuple(_identifiers(entry, adapter)) for entry in keys[:blocks]]
    found += [()] * (blocks - len(found))
    return tuple(found) if any(found) else ()


def _identifiers(entry: Any, adapter: str) -> list[str]:
    out = []
    dropped = not adapter
    for item in entry if isinstance(entry, list) else ():
        name = item[0] if isinstance(item, list) and item else item
        if not isinstance(name, str):
            continue
        if name == adapter and not dropped:
            dropped = True  # once: a salt may have the same name
        else:
            out.append(name)
    return out


def _tier(medium: str | None) -> Tier:
    """vLLM's `medium`; GPU where it is not told."""
    return Tier.of(medium or "")


def _small(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None


def _is_map(data: bytes) -> bool:
    """Whether msgpack data begins with a map (fixmap, map 16, map 32)."""
    return bool(data) and (data[0] & 0xF0 == 0x80 or data[0] in (0xDE, 0xDF))
