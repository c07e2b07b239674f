"""Text to token ids, exactly as the model's own tokenizer gives them, without holding up the event loop.

In: a `ModelFolder`. Out: an `Encoder`: `encode(text)` for a whole prompt, `encode_pieces` for pieces cut before special
tokens. Two ways lead to the same ids: `tokenizers.encode_batch_fast`, which releases the GIL (`encode` holds it: a
400 KB prompt stalls the loop for 170 ms), and tiktoken built from the same file, 6-10 times faster.

Both short cuts are proven at load on `samples()` and given up, with the reason kept, where they fail: tiktoken when one
id differs, cutting when the joined ids of the pieces differ from those of the whole, or when the tokenizer's
normaliser or pre-tokenizer is of a kind that can look across special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers.processors import TemplateProcessing

from epp.kvcache.tokens.folder import ModelFolder, ModelFolderError
from epp.kvcache.tokens.pieces import Cutter, Ids, PieceCache
from epp.kvcache.tokens.samples import samples
from epp.kvcache.tokens.tiktoken_bpe import NotTiktoken, TiktokenBpe

CUTTABLE_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Replace", "Prepend", "StripAccents"})
"""Normalisers that see one stretch between added tokens at a time; `Precompiled` and others are encoded whole."""
CUTTABLE_PRE_TOKENIZERS = frozenset({"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation", "Whitespace"})
CUTTABLE_MODELS = frozenset({"BPE"})


class Encoder:
    """One model's tokenizer. Safe from several threads; the heavy calls release the GIL."""

    def __init__(self, folder: ModelFolder, cache: PieceCache, *, fast: bool = True) -> None:
        """`fast=False` leaves tiktoken out. Raises ModelFolderError when the tokenizer cannot be built."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(folder.tokenizer_json)
        except Exception as error:  # the library raises bare Exceptions
            raise ModelFolderError(f"{folder.path / 'tokenizer.json'}: is not a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        _set_post_processor(self._tokenizer, folder)
        self.cache = cache
        self.cutter = Cutter(folder.tokenizer.get("added_tokens") or ())
        self._before, self._after = self._surroundings()
        self._tiktoken: TiktokenBpe | None = None
        self.slow_because = ""
        """Why tiktoken is not used; empty when it is."""
        self.whole_because = ""
        """Why prompts are encoded whole, not in pieces; empty when pieces are exact."""
        if fast:
            self._try_tiktoken(folder.tokenizer)
        else:
            self.slow_because = "switched off"
        self._check_cutting(folder.tokenizer)

    @property
    def exact_pieces(self) -> bool:
        return not self.whole_because

    def encode(self, text: str, *, add_special_tokens: bool) -> Ids:
        """Ids of a whole prompt. Raises UnicodeEncodeError for lone surrogates."""
        parts = self.encode_pieces(self.cutter.pieces(text) if self.exact_pieces else [text] if text else [])
        if add_special_tokens:
            parts = [self._before, *parts, self._after]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    def encode_pieces(self, pieces: Sequence[str]) -> list[Ids]:
        """Ids of each piece; those seen before come from the cache, the rest are encoded in one call."""
        cache = self.cache
        names = [cache.name(piece) for piece in pieces]
        found = cache.get_many(names)
        missing = {name: piece for name, piece, ids in zip(names, pieces, found, strict=True) if ids is None}
        if missing:
            new = dict(zip(missing, self.encode_apart(list(missing.values())), strict=True))
            cache.put_many(new.items())
            found = [new[name] if ids is None else ids for name, ids in zip(names, found, strict=True)]
        return [ids for ids in found if ids is not None]

    def uncached(self, pieces: Sequence[str]) -> int:
        """Characters of `pieces` that would have to be encoded anew. Raises UnicodeEncodeError."""
        return sum(len(piece) for piece in pieces if self.cache.name(piece) not in self.cache)

    def encode_apart(self, texts: list[str]) -> list[Ids]:
        """Ids of each text on its own, without what the post-processor adds, past the cache."""
        if self._tiktoken is not None:
            return [self._tiktoken.encode(text) for text in texts]
        return self._encode_slowly(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """For people to read."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _encode_slowly(self, texts: list[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, dtype=np.uint32) for e in encodings]

    def _surroundings(self) -> tuple[Ids, Ids]:
        """The ids that the post-processor puts before and after a prompt."""
        probe = "a"
        (bare,) = self._encode_slowly([probe])
        dressed = np.array(self._tokenizer.encode(probe).ids, dtype=np.uint32)
        for start in range(len(dressed) - len(bare) + 1):
            if np.array_equal(dressed[start : start + len(bare)], bare):
                return dressed[:start], dressed[start + len(bare) :]
        raise ModelFolderError("tokenizer.json: its post-processor changes the prompt's own tokens")

    def _try_tiktoken(self, spec: Mapping[str, Any]) -> None:
        try:
            candidate = TiktokenBpe(spec)
        except NotTiktoken as reason:
            self.slow_because = str(reason)
            return
        texts = samples(self._special_texts(spec))
        expected = self._encode_slowly(texts)
        for text, ids in zip(texts, expected, strict=True):
            try:
                same = np.array_equal(candidate.encode(text), ids)
            except Exception as error:  # a pattern that only fails on some text
                self.slow_because = f"tiktoken fails on sample text: {error}"
                return
            if not same:
                self.slow_because = "tiktoken gives other ids for sample text"
                return
        self._tiktoken = candidate

    def _check_cutting(self, spec: Mapping[str, Any]) -> None:
        for part, allowed in (
            ("normalizer", CUTTABLE_NORMALIZERS),
            ("pre_tokenizer", CUTTABLE_PRE_TOKENIZERS),
            ("model", CUTTABLE_MODELS),
        ):
            unknown = _kinds(spec.get(part)) - allowed
            if unknown:
                self.whole_because = f"its {part} is of a kind that is not cut: {', '.join(sorted(unknown))}"
                return
        texts = samples(self._special_texts(spec))
        for text in texts:
            pieces = self._encode_slowly(self.cutter.pieces(text))
            (whole,) = self._encode_slowly([text])
            if not np.array_equal(np.concatenate(pieces) if pieces else whole[:0], whole):
                self.whole_because = "the ids of pieces differ from those of the whole on sample text"
                return

    @staticmethod
    def _special_texts(spec: Mapping[str, Any]) -> list[str]:
        return [str(t["content"]) for t in spec.get("added_tokens") or () if t.get("content")]


def _set_post_processor(tokenizer: tokenizers.Tokenizer, folder: ModelFolder) -> None:
    """As transformers does when `add_bos_token` or `add_eos_token` is set explicitly."""
    if folder.add_bos is None and folder.add_eos is None:
        return
    before = after = ""
    special = []
    for wanted, name in ((folder.add_bos, "bos_token"), (folder.add_eos, "eos_token")):
        token = folder.special_tokens.get(name)
        token_id = tokenizer.token_to_id(token) if token else None
        if wanted and token is not None and token_id is not None:
            special.append((token, token_id))
            before, after = (f"{token}:0 ", after) if name == "bos_token" else (before, f" {token}:0")
    tokenizer.post_processor = TemplateProcessing(single=f"{before}$A:0{after}", special_tokens=special)


def _kinds(spec: Any) -> set[str]:
    """The types of a normaliser, pre-tokenizer or model, those inside a sequence included."""
    if not isinstance(spec, Mapping):
        return set()
    if spec.get("type") == "Sequence":
        inner = spec.get("normalizers") or spec.get("pretokenizers") or ()
        return {kind for item in inner for kind in _kinds(item)}
    return {str(spec.get("type") or json.dumps(sorted(spec))[:40])}
