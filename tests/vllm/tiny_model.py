"""Write a tiny Llama with random weights around a tokenizer, with its chat template. Run by the Python that has vLLM.

usage: python tiny_model.py TOKENIZER_DIR OUT

Two layers, hidden size 128, head size 32 (one of those vLLM's CPU attention knows), bfloat16, 2-3 MB. Weights have a
standard deviation of 0.25 and embeddings of 1, so greedy output depends on the whole context: what proves that a cache
was used right. Nothing is downloaded.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD = 128, 2, 4, 2, 32
MAX_POSITIONS = 32768


def write(tokenizer: Path, out: Path) -> None:
    import torch  # type: ignore[import-not-found, unused-ignore]
    from safetensors.torch import save_file  # type: ignore[import-not-found, unused-ignore]

    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, out / name)
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())
    size = max(max(vocabulary["model"]["vocab"].values()), *(token["id"] for token in vocabulary["added_tokens"]))
    size = -(-(size + 1) // 64) * 64
    named = json.loads((tokenizer / "tokenizer_config.json").read_text())["eos_token"]
    name = named if isinstance(named, str) else named["content"]
    end = next(t["id"] for t in vocabulary["added_tokens"] if t["content"] == name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": end,
        "eos_token_id": end,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    random = torch.Generator().manual_seed(0)

    def weights(*shape: int, std: float = 0.25) -> object:
        return (torch.randn(*shape, generator=random) * std).to(torch.bfloat16)

    one = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": weights(size, HIDDEN, std=1.0),
        "lm_head.weight": weights(size, HIDDEN),
        "model.norm.weight": one.clone(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": weights(HEADS * HEAD, HIDDEN),
            prefix + "self_attn.k_proj.weight": weights(KV_HEADS * HEAD, HIDDEN),
            prefix + "self_attn.v_proj.weight": weights(KV_HEADS * HEAD, HIDDEN),
            prefix + "self_attn.o_proj.weight": weights(HIDDEN, HEADS * HEAD),
            prefix + "mlp.gate_proj.weight": weights(2 * HIDDEN, HIDDEN),
            prefix + "mlp.up_proj.weight": weights(2 * HIDDEN, HIDDEN),
            prefix + "mlp.down_proj.weight": weights(HIDDEN, 2 * HIDDEN),
            prefix + "input_layernorm.weight": one.clone(),
            prefix + "post_attention_layernorm.weight": one.clone(),
        }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
