"""Block keys: a 64-bit name for every block of a prompt that also names all blocks before it.

In: a prompt as token ids or as the bytes of its text, and what else decides whether KV may be shared (model or adapter,
salt, what precedes the prompt). Out: an array of keys, one per whole block. Two prompts share their first n keys when
they share the first n blocks and everything before them, and otherwise do not (but for 64-bit accidents). A last,
partial block has no key, as in vLLM.

The keys are our own: fast and unrelated to a worker's hashes. A block of `block_size` tokens is `block_size` 32-bit
words; so is a block of `4 * block_size` bytes of text (four bytes stand for a token). All blocks are hashed at once by
a product with random odd weights (multiply-shift hashing, Dietzfelbinger 1996) and mixed. There are two chains:

- of a whole prompt (`block_keys`): a running sum whose terms carry their position;
- of tokens (`token_root`, `extend`): continued from a bare key wherever it lies, since a worker's event says only
  "these tokens follow that block". State s_i = s_{i-1} * M + h_i mod 2^64, key_i = mix(s_i); `mix` is a bijection,
  so the state is in the key. All states at once: s_i = M^i * (s_0 + sum of h_j * M^-j).

`bench/kv_micro.py` and `bench/index_micro.py` measure them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import mul

import numpy as np
import xxhash
from numpy.typing import NDArray

from epp.growing import WORTHWHILE, Growing
from epp.request import BYTES_PER_TOKEN, InferenceRequest, PromptItem

Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_UNMIX = tuple(pow(m, -1, 1 << 64) for m in _MIX)
_STEP = 0xD1342543DE82EF95
"""M of the token chain (a multiplier of Steele and Vigna 2021). 5 mod 8: its powers return to 1 after 2^62 blocks."""
_CHUNK = 4096
"""Blocks chained at once: bounds the tables of powers and keeps a chunk's arrays in the processor's cache."""
_U64 = (1 << 64) - 1
_30, _27, _31, _MIX_0, _MIX_1 = (np.uint64(n) for n in (30, 27, 31, *_MIX))
_60, _54, _62, _UNMIX_0, _UNMIX_1 = (np.uint64(n) for n in (60, 54, 62, *_UNMIX))
_texts: Growing[Keys] = Growing(64 << 20)
"""Keys of texts, by the seed of their chain."""
_FEW = 3
"""Up to so many blocks plain integers are quicker than numpy: 2 us a block where its calls take 9 for any number."""


def request_keys(request: InferenceRequest, block_size: int, *, limit: int, max_items: int) -> list[Keys]:
    """Keys of each of the request's first `max_items` prompts, shape (blocks,), at most `limit` keys each.

    What precedes the prompt (tools, system) has blocks of its own in front of those of a text prompt, so that requests
    that share only them match that far.
    """
    if not request.prompts:
        return []
    before = request.prompt_seed
    model = request.target_model or request.model
    root = _root(model, request.cache_salt, block_size)
    if not before:
        return [block_keys(item, block_size, root, limit=limit) for item in request.prompts[:max_items]]
    head = block_keys(before, block_size, root, limit=limit)
    chained = seed(model=model, salt=request.cache_salt, block_size=block_size, before=before)
    keys = []
    for item in request.prompts[:max_items]:
        own = block_keys(item, block_size, chained, limit=limit - len(head))
        keys.append(np.concatenate([head, own]) if len(head) else own)
    return keys


@lru_cache(maxsize=1024)
def _root(model: str, salt: str, block_size: int) -> int:
    return seed(model=model, salt=salt, block_size=block_size)


def seed(*, model: str, salt: str, block_size: int, before: bytes = b"") -> int:
    """What a chain starts from. Parts are tagged and carry their length: a salt never equals an adapter's name."""
    digest = xxhash.xxh3_64()
    for tag, part in ((b"model", _utf8(model)), (b"salt", _utf8(salt)), (b"before", before)):
        digest.update(b"%s:%d:" % (tag, len(part)))
        digest.update(part)
    digest.update(b"block:%d" % block_size)
    return digest.intdigest()


def block_keys(item: PromptItem, block_size: int, seed: int, *, limit: int) -> Keys:
    """Keys of the whole blocks of one prompt, shape (blocks,), at most `limit`; empty when it is shorter than one.

    Those of a text that this process has seen the beginning of are taken from then (400 KB: 10 us instead of 85).
    """
    text = isinstance(item, bytes)
    words = len(item) // BYTES_PER_TOKEN if text else len(item)
    blocks = max(min(words // block_size, limit), 0)
    if not blocks:
        return np.empty(0, dtype=np.uint64)
    count = blocks * block_size
    flat = np.frombuffer(item, dtype="<u4", count=count) if isinstance(item, bytes) else item[:count]
    start = seed ^ (0x5EED7E87 if text else 0x5EED1D5)
    if blocks <= _FEW and block_size <= 64:
        return _few_keys(flat.tolist(), block_size, start)
    keys = np.empty(blocks, dtype=np.uint64)
    done = 0
    if isinstance(item, bytes) and (seen := _texts.find(item, start)) is not None:
        known = seen[1][:blocks]
        done = len(known)
        keys[:done] = known
    total = _unmix(keys.item(done - 1)) if done else start
    if done < blocks:
        terms = flat[done * block_size :].reshape(blocks - done, block_size) @ _weights(block_size)
        terms += np.arange(done + 1, blocks + 1, dtype=np.uint64) * _GOLDEN
        sums = np.add.accumulate(_mix(terms), out=keys[done:])
        sums += np.uint64(total)
        _mix(sums)
        if isinstance(item, bytes) and (blocks - done) * block_size * BYTES_PER_TOKEN >= WORTHWHILE:
            keys.flags.writeable = False
            _texts.remember(item, count * BYTES_PER_TOKEN, keys, keys.nbytes, start)
    return keys


def _few_keys(words: list[int], block_size: int, start: int) -> Keys:
    """`block_keys` of a few small blocks."""
    weights, total = _weight_list(block_size), start
    keys: list[int] = []
    for i in range(0, len(words), block_size):
        term = sum(map(mul, words[i : i + block_size], weights)) + (len(keys) + 1) * int(_GOLDEN) & _U64
        total = total + _mix_one(term) & _U64
        keys.append(_mix_one(total))
    return np.array(keys, dtype=np.uint64)


def token_root(*, model: str, adapter: str, salt: str) -> int:
    """The key that precedes the first block of a prompt of token ids: where a chain of `extend` begins.

    `model` is the base model's registered name, `adapter` that of a LoRA adapter or "" for the base itself, `salt` the
    request's cache salt or "". Parts are tagged and carry their length, as in `seed`.
    """
    digest = xxhash.xxh3_64()
    for tag, part in ((b"model", _utf8(model)), (b"adapter", _utf8(adapter)), (b"salt", _utf8(salt))):
        digest.update(b"%s:%d:" % (tag, len(part)))
        digest.update(part)
    return digest.intdigest()


def extend(parent: int, ids: NDArray[np.uint32], block_size: int, extras: Mapping[int, bytes] | None = None) -> Keys:
    """Keys of the whole blocks of `ids`, shape (len(ids) // block_size,), that follow the block whose key is `parent`.

    `parent` is any key of this function or a `token_root`; where in the prompt it lies does not matter, so for whole
    blocks `extend(root, a + b)` equals `extend(root, a)` followed by `extend(last key of a, b)`. `extras[i]` is folded
    into block i of `ids` and so into all after it: the identifier of what a placeholder token stands for.
    Raises ValueError for a block size below 1.
    """
    if block_size < 1:
        raise ValueError(f"block size {block_size} is below 1")
    blocks = len(ids) // block_size
    if blocks == 1 and block_size <= 64:
        return _extend_by_one(parent, ids[:block_size].tolist(), extras.get(0) if extras else None)
    matrix = ids[: blocks * block_size].reshape(blocks, block_size)
    weights, (up, down) = _weights(block_size), _powers()
    keys = np.empty(blocks, dtype=np.uint64)
    state = _unmix(parent)
    for start in range(0, blocks, _CHUNK):
        terms = matrix[start : start + _CHUNK] @ weights
        terms += np.uint64(block_size * int(_GOLDEN) & _U64)
        for i, extra in extras.items() if extras else ():
            if start <= i < start + len(terms):
                terms[i - start] ^= np.uint64(xxhash.xxh3_64_intdigest(extra))
        terms = _mix(terms)
        terms *= down[: len(terms)]
        sums = np.cumsum(terms, out=keys[start : start + _CHUNK])
        sums += np.uint64(state)
        sums *= up[: len(sums)]
        state = sums.item(-1)
        _mix(sums)
    return keys


def extend_each(parents: Keys, ids: NDArray[np.uint32]) -> Keys:
    """Keys of single blocks, each of which follows another one: block `ids[i]` follows the block of key `parents[i]`.

    `parents` has the shape (blocks,), `ids` (blocks, block_size); the keys are those of `extend`.
    """
    block_size = ids.shape[1]
    terms: Keys = ids @ _weights(block_size)
    terms += np.uint64(block_size * int(_GOLDEN) & _U64)
    states = parents.copy()
    states ^= (states >> _31) ^ (states >> _62)
    states *= _UNMIX_1
    states ^= (states >> _27) ^ (states >> _54)
    states *= _UNMIX_0
    states ^= (states >> _30) ^ (states >> _60)
    states *= np.uint64(_STEP)
    states += _mix(terms)
    return _mix(states)


def block_extras(strings: Sequence[str]) -> bytes:
    """What `extend` takes as a block's extra: all that decides its KV besides tokens and adapter, each with its length.

    In the order in which vLLM hashes them and its events tell them: identifiers of the media whose placeholders lie in
    the block, then, in a prompt's first block, the cache salt.
    """
    return b"".join(b"%d:%b" % (len(part), part) for part in map(_utf8, strings))


def _extend_by_one(parent: int, ids: list[int], extra: bytes | None) -> Keys:
    """`extend` by one small block, a decoded one as a rule: plain integers take 3 us where numpy calls take 14."""
    term = sum(map(mul, ids, _weight_list(len(ids)))) + len(ids) * int(_GOLDEN) & _U64
    if extra is not None:
        term ^= xxhash.xxh3_64_intdigest(extra)
    state = (_unmix(parent) * _STEP + _mix_one(term)) & _U64
    return np.array([_mix_one(state)], dtype=np.uint64)


def _utf8(text: str) -> bytes:
    """JSON may escape half a surrogate pair; it is hashed like any other character."""
    return text.encode("utf-8", "surrogatepass")


def _mix(x: Keys) -> Keys:
    """The finaliser of splitmix64, in place: a bijection that spreads every bit over all."""
    x ^= x >> _30
    x *= _MIX_0
    x ^= x >> _27
    x *= _MIX_1
    x ^= x >> _31
    return x


def _mix_one(x: int) -> int:
    """`_mix` of one number."""
    x = (x ^ (x >> 30)) * _MIX[0] & _U64
    x = (x ^ (x >> 27)) * _MIX[1] & _U64
    return x ^ (x >> 31)


def _unmix(key: int) -> int:
    """The inverse of `_mix` for one key: each shift is undone by repeating it, each product by the factor's inverse."""
    key ^= (key >> 31) ^ (key >> 62)
    key = key * _UNMIX[1] & _U64
    key ^= (key >> 27) ^ (key >> 54)
    key = key * _UNMIX[0] & _U64
    return key ^ (key >> 30) ^ (key >> 60)


@lru_cache(maxsize=1)
def _powers() -> tuple[Keys, Keys]:
    """M^1.. and M^-1.., each of shape (_CHUNK,)."""
    up, down = (np.full(_CHUNK, m, dtype=np.uint64) for m in (_STEP, pow(_STEP, -1, 1 << 64)))
    return np.cumprod(up), np.cumprod(down)


@lru_cache(maxsize=8)
def _weights(block_size: int) -> Keys:
    """Odd pseudo-random weights, shape (block_size,), the same in every process."""
    return _mix(np.arange(1, block_size + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)


@lru_cache(maxsize=8)
def _weight_list(block_size: int) -> list[int]:
    return [int(w) for w in _weights(block_size)]
