"""A model's folder, as far as its prompts need it: tokenizer, special tokens, chat templates.

In: a folder with `tokenizer.json` as Hugging Face lays it out. Out: a `ModelFolder`, or `ModelFolderError` naming the
file. What transformers does when it loads such a folder is done here too: `chat_template.jinja` and
`additional_chat_templates/` come before the template in `tokenizer_config.json`, and an explicit `add_bos_token` or
`add_eos_token` there replaces the tokenizer's own post-processor. Weights are never looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 256 << 20

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What transformers hands to every template under these names."""

OWN_RENDERERS: Mapping[str, str] = {
    "gpt_oss": "harmony",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "kimi_k3": "kimi_k3",
    "inkling": "inkling",
}
"""`model_type` -> how vLLM renders its chats instead of by template (vllm/renderers)."""


class ModelFolderError(Exception):
    """A folder whose prompts cannot be tokenised; the text names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    tokenizer_json: str
    tokenizer: Mapping[str, Any]
    """`tokenizer_json`, parsed."""
    special_tokens: Mapping[str, str]
    """`bos_token` and its like -> its text."""
    add_bos: bool | None
    """Whether a completion's prompt begins with the BOS token; None: as the tokenizer's post-processor says."""
    add_eos: bool | None
    templates: Mapping[str, str]
    """Name ("default", "tool_use", ...) -> Jinja source; empty: the model has none."""
    renderer: str
    """How chats are rendered when not by template, as vLLM calls it; empty = by template."""


def load_folder(path: str | Path) -> ModelFolder:
    """Raises ModelFolderError."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: is not a folder")
    text = _text(folder / "tokenizer.json")
    if text is None:
        raise ModelFolderError(f"{folder / 'tokenizer.json'}: is missing; only tokenizers in that form are read")
    config = _mapping(folder / "tokenizer_config.json")
    model_type = _mapping(folder / "config.json").get("model_type")
    return ModelFolder(
        path=folder,
        tokenizer_json=text,
        tokenizer=_parse(folder / "tokenizer.json", text),
        special_tokens=_special_tokens({**_mapping(folder / "special_tokens_map.json"), **config}),
        add_bos=_flag(config, "add_bos_token", "add_eos_token"),
        add_eos=_flag(config, "add_eos_token", "add_bos_token"),
        templates=_templates(folder, config),
        renderer=OWN_RENDERERS.get(model_type, "") if isinstance(model_type, str) else "",
    )


def _text(path: Path) -> str | None:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelFolderError(f"{path}: is larger than {MAX_FILE_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFolderError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ModelFolderError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: must hold a JSON object")
    return value


def _mapping(path: Path) -> dict[str, Any]:
    text = _text(path)
    return {} if text is None else _parse(path, text)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """A special token is written as text, or as an object with its text in `content`."""
    found = {}
    extra = config.get("extra_special_tokens")  # a list without names, or names of the model's own
    named = {**(extra if isinstance(extra, dict) else {}), **{name: config.get(name) for name in SPECIAL_TOKENS}}
    for name, value in named.items():
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _flag(config: Mapping[str, Any], name: str, other: str) -> bool | None:
    """As soon as one of the pair is set, transformers takes the other for False when it is not."""
    if name in config or other in config:
        return bool(config.get(name, False))
    return None


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    files = {}
    default = _text(folder / "chat_template.jinja")
    if default is not None:
        files["default"] = default
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = _text(path) or ""
    if files:
        return files
    value = config.get("chat_template")
    if value is None:
        value = _mapping(folder / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        named = [(t.get("name"), t.get("template")) for t in value if isinstance(t, dict)]
        return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    return {}
