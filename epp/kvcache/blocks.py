"""Block keys: a 64-bit name for every block of a prompt that also names all blocks before it.

In: a prompt as token ids or as the bytes of its text, and what else decides whether KV may be shared (model or adapter,
salt, what precedes the prompt). Out: an array of keys, one per whole block. Two prompts share their first n keys when
they share the first n blocks and everything before them, and otherwise do not (but for 64-bit accidents). A last,
partial block has no key, as in vLLM.

The keys are our own: fast and unrelated to a worker's hashes. A block of `block_size` tokens is `block_size` 32-bit
words; so is a block of `4 * block_size` bytes of text (four bytes stand for a token). All blocks are hashed at once by
a product with random odd weights (multiply-shift hashing, Dietzfelbinger 1996), mixed, and chained by a running sum
whose terms carry their position. `bench/kv_micro.py` measures it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from epp.request import BYTES_PER_TOKEN, InferenceRequest, PromptItem

Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def request_keys(request: InferenceRequest, block_size: int, *, limit: int, max_items: int) -> list[Keys]:
    """Keys of each of the request's first `max_items` prompts, shape (blocks,), at most `limit` keys each.

    What precedes the prompt (tools, system) has blocks of its own in front of those of a text prompt, so that requests
    that share only them match that far.
    """
    if not request.prompts:
        return []
    before = request.prompt_seed
    model = request.target_model or request.model
    root = seed(model=model, salt=request.cache_salt, block_size=block_size)
    head = block_keys(before, block_size, root, limit=limit)
    chained = seed(model=model, salt=request.cache_salt, block_size=block_size, before=before) if before else root
    keys = []
    for item in request.prompts[:max_items]:
        own = block_keys(item, block_size, chained, limit=limit - len(head))
        keys.append(np.concatenate([head, own]) if len(head) else own)
    return keys


def seed(*, model: str, salt: str, block_size: int, before: bytes = b"") -> int:
    """What a chain starts from. Parts are tagged and carry their length: a salt never equals an adapter's name."""
    digest = xxhash.xxh3_64()
    for tag, part in ((b"model", _utf8(model)), (b"salt", _utf8(salt)), (b"before", before)):
        digest.update(b"%s:%d:" % (tag, len(part)))
        digest.update(part)
    digest.update(b"block:%d" % block_size)
    return digest.intdigest()


def block_keys(item: PromptItem, block_size: int, seed: int, *, limit: int) -> Keys:
    """Keys of the whole blocks of one prompt, shape (blocks,), at most `limit`; empty when it is shorter than one."""
    text = isinstance(item, bytes)
    words = len(item) // BYTES_PER_TOKEN if text else len(item)
    blocks = max(min(words // block_size, limit), 0)
    if not blocks:
        return np.empty(0, dtype=np.uint64)
    count = blocks * block_size
    flat = np.frombuffer(item, dtype="<u4", count=count) if isinstance(item, bytes) else item[:count]
    matrix = flat.reshape(blocks, block_size)
    kind = np.uint64(0x5EED7E87 if text else 0x5EED1D5)
    terms = matrix @ _weights(block_size)
    terms += np.arange(1, blocks + 1, dtype=np.uint64) * _GOLDEN
    sums = np.cumsum(_mix(terms))
    sums += np.uint64(seed) ^ kind
    return _mix(sums)


def _utf8(text: str) -> bytes:
    """JSON may escape half a surrogate pair; it is hashed like any other character."""
    return text.encode("utf-8", "surrogatepass")


def _mix(x: Keys) -> Keys:
    """The finaliser of splitmix64, in place: a bijection that spreads every bit over all."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@lru_cache(maxsize=8)
def _weights(block_size: int) -> Keys:
    """Odd pseudo-random weights, shape (block_size,), the same in every process."""
    return _mix(np.arange(1, block_size + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
