"""Write real tokenizers as `tokenizer.json` folders. Run by the Python that has vLLM, whose mistral_common has them.

usage: python real_tokenizers.py OUT    (OUT/mistral: sentencepiece, 32,768 tokens; OUT/tekken: byte level, 131,072)

Nothing is downloaded. Takes about 15 s.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path


def write(out: Path) -> None:
    import mistral_common  # type: ignore[import-not-found, unused-ignore]
    from transformers import AutoTokenizer  # type: ignore[import-not-found, unused-ignore]
    from transformers.integrations.mistral import (  # type: ignore[import-not-found, unused-ignore]
        convert_tekken_tokenizer,
    )

    data = Path(mistral_common.__file__).parent / "data"
    convert_tekken_tokenizer(str(data / "tekken_240911.json")).save_pretrained(out / "tekken")
    source = out / "sentencepiece"
    source.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(data / "mistral_instruct_tokenizer_240323.model.v3", source / "tokenizer.model")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (source / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    AutoTokenizer.from_pretrained(source).save_pretrained(out / "mistral")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
