"""A byte-level BPE tokenizer.json run by tiktoken, which is 6-10 times faster than tokenizers.

In: the parsed tokenizer.json. Out: `TiktokenBpe.encode`, or `NotTiktoken` saying what stands in the way. Whether the
ids are the same is for the caller to prove: tiktoken merges by the rank of the merged bytes, the file names pairs.

Ranks here are the order of the file's merges, not the ids, so that vocabularies whose ids do not follow the merges work
as well; a table maps them back.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np
import tiktoken

from epp.kvcache.tokens.pieces import Ids

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the `ByteLevel` pre-tokenizer splits by with `use_regex`."""


class NotTiktoken(Exception):
    """The tokenizer is not of a kind that tiktoken can run; the text says why."""


class TiktokenBpe:
    """Raises NotTiktoken."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        model = spec.get("model") or {}
        if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
            raise NotTiktoken("its model is not plain byte-level BPE")
        normalizers = _flat(spec.get("normalizer"), "normalizers")
        if any(step.get("type") != "NFC" for step in normalizers):
            raise NotTiktoken(f"it normalises by {', '.join(str(step.get('type')) for step in normalizers)}")
        self._nfc = bool(normalizers)
        added = spec.get("added_tokens") or ()
        if any(t.get("lstrip") or t.get("rstrip") or t.get("single_word") for t in added):
            raise NotTiktoken("an added token takes white space or words along")
        if self._nfc and any(t.get("normalized") for t in added):
            raise NotTiktoken("an added token is matched after normalising")
        ranks, table = _ranks(model)
        try:
            self._bpe = tiktoken.Encoding("kvsteer", pat_str=_pattern(spec), mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:
            raise NotTiktoken(f"tiktoken refuses it: {error}") from None
        self._table = table
        self._added = {str(t["content"]): int(t["id"]) for t in added if t.get("content")}
        contents = sorted(self._added, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, contents)) + ")") if contents else None

    def encode(self, text: str) -> Ids:
        """Ids of a text with its special tokens. Raises UnicodeEncodeError for lone surrogates."""
        text.encode()  # tiktoken would replace lone surrogates without a word
        if self._split is None:
            return self._plain(text)
        parts = []
        for part in self._split.split(text):
            special = self._added.get(part)
            if special is not None:
                parts.append(np.array([special], dtype=np.uint32))
            elif part:
                parts.append(self._plain(part))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    def _plain(self, text: str) -> Ids:
        if self._nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return self._table[self._bpe.encode_to_numpy(text, disallowed_special=())]


def _pattern(spec: Mapping[str, Any]) -> str:
    """The one pattern that the pre-tokenizer splits by."""
    steps = _flat(spec.get("pre_tokenizer"), "pretokenizers")
    byte_level = [s for s in steps if s.get("type") == "ByteLevel"]
    splits = [s for s in steps if s.get("type") == "Split"]
    if len(byte_level) != 1 or len(byte_level) + len(splits) != len(steps) or steps[-1] is not byte_level[0]:
        raise NotTiktoken("its pre-tokenizer is not a split and ByteLevel")
    if byte_level[0].get("add_prefix_space"):
        raise NotTiktoken("its pre-tokenizer adds a space in front")
    if byte_level[0].get("use_regex", True):
        splits = [*splits, {"pattern": {"Regex": GPT2_PATTERN}, "behavior": "Isolated"}]
    if len(splits) != 1:
        raise NotTiktoken(f"its pre-tokenizer splits {len(splits)} times")
    pattern = splits[0].get("pattern", {}).get("Regex")
    covering = splits[0].get("behavior") == "Isolated" or (
        splits[0].get("behavior") == "Removed" and splits[0].get("invert")
    )
    if not isinstance(pattern, str) or not covering:
        raise NotTiktoken("its pre-tokenizer does not split by a pattern alone")
    return pattern


def _flat(spec: Any, members: str) -> list[Mapping[str, Any]]:
    """The steps of a normaliser or pre-tokenizer, sequences written out."""
    if not isinstance(spec, Mapping):
        return []
    if spec.get("type") == "Sequence":
        return [step for item in spec.get(members) or () for step in _flat(item, members)]
    return [spec]


def _ranks(model: Mapping[str, Any]) -> tuple[dict[bytes, int], Ids]:
    """Bytes of a token -> its rank (single bytes, then merges in the file's order), and the id of each rank."""
    vocab: Mapping[str, int] = model.get("vocab") or {}
    to_byte = {character: byte for byte, character in _byte_alphabet().items()}

    def raw(token: str) -> bytes:
        return bytes(map(to_byte.__getitem__, token))

    try:
        ranks = {bytes([byte]): rank for rank, byte in enumerate(to_byte.values())}
        ids = [vocab[character] for character in to_byte]
        for merge in model.get("merges") or ():
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            token = left + right
            key = raw(token)
            if key not in ranks:
                ranks[key] = len(ids)
                ids.append(vocab[token])
        if model.get("ignore_merges"):  # whole words are looked up first: those no merge makes rank last
            for token, token_id in vocab.items():
                key = raw(token)
                if key not in ranks:
                    ranks[key] = len(ids)
                    ids.append(token_id)
    except KeyError as missing:
        raise NotTiktoken(f"its vocabulary is not made of bytes ({missing})") from None
    return ranks, np.array(ids, dtype=np.uint32)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(256 + len(alphabet) - len(printable))
    return alphabet
