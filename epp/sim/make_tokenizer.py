"""Makes the tokenizer the emulated worker ships with: `python -m epp.sim.make_tokenizer [OUT]`.

A byte-level BPE of 4,096 tokens, trained on this Python's standard library, with ChatML-like special tokens. The
shipped `data/tokenizer.json` was made so; it is kept in the tree because another Python's library gives other merges.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 4096
CORPUS_FILES = 120


def make_tokenizer() -> str:
    """The tokenizer as compact JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:CORPUS_FILES]
    tokenizer.train([str(file) for file in corpus], trainer)
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data" / "tokenizer.json"
    out.write_text(make_tokenizer() + "\n", encoding="utf-8")
