"""The messages of replicas, and the pieces that a snapshot is made of: msgpack arrays. No I/O.

In and out: `Batch` and `Chunk` as objects and as bytes. What comes in is bounded in size and checked; what another
version of this file wrote is refused as a whole, with `Unreadable`, for a replica can do without.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
import numpy as np

from epp.kvcache.blocks import Keys

VERSION = 1
"""Grows with every change of a field's meaning or place. New fields at the end do not need it."""
MAX_MESSAGE_BYTES = 4 << 20
MAX_KEYS = 8192
"""Keys of one passage."""
CHAIN = -1

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Name = Annotated[str, msgspec.Meta(max_length=256)]

T = TypeVar("T")


class Unreadable(Exception):
    """Not a message of this version."""


class Passage(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive block keys of a prompt, or with a `tier` a lot of blocks in no order."""

    space: Name
    """Whose keys they are: the name of a plugin."""
    keys: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_KEYS)]
    """Little-endian, 8 bytes a key."""
    depth: Count = 0
    """Blocks before the first one."""
    anchor: int = 0
    """Key of the block before the first one; no meaning at depth 0."""
    tier: int = CHAIN
    """A `epp.kvcache.tier.Tier`, for blocks of the precise index."""
    group: Count = 0

    def __post_init__(self) -> None:
        if len(self.keys) % 8:
            raise ValueError("keys are 8 bytes each")

    def array(self) -> Keys:
        return np.frombuffer(self.keys, dtype="<u8").astype(np.uint64, copy=False)


class Load(msgspec.Struct, array_like=True, frozen=True):
    """What the sender has in flight at an endpoint: no difference, but what it is now."""

    address: Name
    """An `Endpoint.key`, as everywhere here."""
    requests: Count
    tokens: Count


class Pick(msgspec.Struct, array_like=True, frozen=True):
    """A request was sent to `address`, whose blocks will be there."""

    number: Count
    """The sender's, by which the pick's end is told."""
    address: Name
    passages: list[Passage]


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """What a replica tells all others at once."""

    version: int
    origin: Count
    """The sender: a random number, another one after a restart."""
    seq: Count
    up_s: float
    """Seconds since the sender started."""
    loads: list[Load]
    """Endpoints whose load has changed; in a full batch all that have any."""
    picks: list[Pick]
    ended: list[Count]
    """Picks that are over."""
    open: list[Count] | None = None
    """In a full batch: all picks that are not over."""
    repeat: bool = False
    """The sender missed something: whoever tells a chain of keys shall tell it from its beginning again."""
    ask: Count = 0
    """The replica that shall give the sender a snapshot; 0 = none."""
    leaving: bool = False
    """The sender's last message."""


class Known(msgspec.Struct, array_like=True, frozen=True):
    """Blocks that an endpoint is believed to hold."""

    address: Name
    passages: list[Passage]


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """A part of a snapshot, which can be taken over as it comes."""

    version: int
    number: Count
    """0, 1, 2 ..., so that a missing one shows."""
    last: bool
    known: list[Known]


_encoder = msgspec.msgpack.Encoder()
_batch = msgspec.msgpack.Decoder(Batch)
_chunk = msgspec.msgpack.Decoder(Chunk)


def encode(message: Batch | Chunk) -> bytes:
    return _encoder.encode(message)


def decode_batch(data: bytes) -> Batch:
    """Raises Unreadable."""
    batch = _decode(_batch, data)
    if batch.version != VERSION:
        raise Unreadable(f"version {batch.version}, not {VERSION}")
    return batch


def decode_chunk(data: bytes) -> Chunk:
    """Raises Unreadable."""
    chunk = _decode(_chunk, data)
    if chunk.version != VERSION:
        raise Unreadable(f"version {chunk.version}, not {VERSION}")
    return chunk


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise Unreadable(f"{len(data)} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Unreadable(str(error)) from error


def passage(space: str, keys: Keys, *, depth: int = 0, anchor: int = 0, tier: int = CHAIN, group: int = 0) -> Passage:
    return Passage(space, keys.astype("<u8", copy=False).tobytes(), depth, anchor, tier, group)
