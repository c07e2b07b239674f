"""What a picker knows, on disk from its end to its next start.

In: chunks of a snapshot, a path. Out: a file, written whole or not at all; at the start its chunks, or the reason why
they are not used. Layout: a line with the version, a header (when it was written, length and checksum of what follows),
then each chunk with its length.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from epp.shared.messages import MAX_MESSAGE_BYTES, VERSION, Chunk, Unreadable, decode_chunk, encode

MAGIC = b"kvsteer-state %d\n" % VERSION
HEADER = struct.Struct("<dQQ")
"""Seconds since the epoch, bytes that follow, their XXH3."""
LENGTH = struct.Struct("<I")
MAX_BYTES = 512 << 20
MAX_AGE_S = 600.0
"""What workers held longer ago than this is not worth having."""


class Unusable(Exception):
    """Why a state file is not used: a sentence."""


def save(path: Path, chunks: Iterable[Chunk], wall: float) -> int:
    """Write the file; its size in bytes. Raises OSError, and leaves the old file then."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    digest, size = xxhash.xxh3_64(), 0
    try:
        with draft.open("wb") as file:
            file.write(MAGIC + HEADER.pack(wall, 0, 0))
            for chunk in chunks:
                data = encode(chunk)
                for part in (LENGTH.pack(len(data)), data):
                    file.write(part)
                    digest.update(part)
                    size += len(part)
            file.seek(len(MAGIC))
            file.write(HEADER.pack(wall, size, digest.intdigest()))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    return len(MAGIC) + HEADER.size + size


def restore(path: Path, wall: float, max_age_s: float = MAX_AGE_S) -> Iterator[Chunk]:
    """The chunks of the file, which is checked as a whole before the first. Raises Unusable and OSError."""
    with path.open("rb") as file:
        if file.readline(64) != MAGIC:
            raise Unusable("it is of another version, or no state file")
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise Unusable("it is cut off")
        written, size, checksum = HEADER.unpack(header)
        if not 0 <= wall - written <= max_age_s:
            raise Unusable(f"it is {wall - written:.0f} s old, and more than {max_age_s:.0f} s is too old")
        if size > MAX_BYTES:
            raise Unusable(f"{size} bytes are too many")
        data = file.read(size + 1)
    if len(data) != size or xxhash.xxh3_64_intdigest(data) != checksum:
        raise Unusable("it is damaged: length or checksum is wrong")
    return _chunks(memoryview(data))


def _chunks(data: memoryview) -> Iterator[Chunk]:
    at = 0
    while at < len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if length > min(MAX_MESSAGE_BYTES, len(data) - at):
            raise Unusable("it is damaged: a part is too long")
        try:
            yield decode_chunk(bytes(data[at : at + length]))
        except Unreadable as error:
            raise Unusable(f"it is damaged: {error}") from error
        at += length
