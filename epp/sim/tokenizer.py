"""Text to token ids on the emulated worker, at the cost of what is new in it.

Text is cut where no token can span: at special tokens, and, in long text, between a letter or digit and a line feed
(true of every byte-level pre-tokenizer in use: GPT-2, cl100k, o200k, Llama 3, Qwen). The pieces are encoded one by one
and cached, so a conversation that repeats 100,000 tokens and adds 500 costs about what the 500 do. Tokenizers for which
that does not hold (SentencePiece-like) are given the whole text.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from epp.sim.sequence import TOKEN_TYPECODE

SHIPPED = Path(__file__).parent / "data"
PIECE_CHARS = 2048
CACHE_CHARS = 64_000_000
OFF_LOOP_CHARS = 30_000
"""More new text than this is encoded in a thread; about 10 ms of work."""
OUTPUT_WORDS = 2000


class ChatTokenizer:
    """A `tokenizer.json` and, for chat, the template of its `tokenizer_config.json` or `chat_template.jinja`.

    Raises ValueError, naming the file, if the directory does not hold them in a readable form.
    """

    def __init__(self, directory: Path = SHIPPED) -> None:
        self.directory = directory
        file = directory / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"cannot read the tokenizer {file}: {error}") from error
        layout = json.loads(text)
        special = {token["content"]: token["id"] for token in layout.get("added_tokens", ())}
        self._special: dict[str, int] = special
        self._split = re.compile(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})")
        self._in_pieces = bool(special) and '"ByteLevel"' in text and not layout.get("normalizer")
        self._prefix: list[int] = self._tokenizer.encode("", add_special_tokens=True).ids
        self._template = self._load_template()
        self._cache: OrderedDict[str, array[int]] = OrderedDict()
        self._cached_chars = 0
        self.words = self._whole_words()
        """Token id -> text of tokens that are one word with its space: decoding and encoding agree on them."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        """Token ids; long new text is encoded in a thread, as it would hold up every other request."""
        ids = array(TOKEN_TYPECODE, self._prefix if add_special_tokens else ())
        if not self._in_pieces:
            ids.extend((await asyncio.to_thread(self._encode_all, [text]))[0])
            return ids
        pieces = self._pieces(text)
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in self._cache]
        if sum(map(len, missing)) > OFF_LOOP_CHARS:
            encoded = await asyncio.to_thread(self._encode_all, missing)
        else:
            encoded = self._encode_all(missing)
        new = dict(zip(missing, encoded, strict=True))
        for piece in pieces:
            ids.extend(new.get(piece) or self._cache.get(piece) or self._encode_all([piece])[0])
        self._remember(pieces, new)
        return ids

    def render_chat(
        self, messages: list[dict[str, Any]], *, tools: Any = None, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text; raises ValueError if there is no template or it refuses the messages."""
        if self._template is None:
            raise ValueError(f"{self.directory} has no chat template")
        try:
            context = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
            return str(self._template.render(context | self._names))
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def decode(self, token_ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_strings(self, token_ids: Iterable[int]) -> list[str | None]:
        return [self._tokenizer.id_to_token(i) for i in token_ids]

    def _pieces(self, text: str) -> list[str]:
        pieces: list[str] = []
        for part in self._split.split(text):
            if len(part) <= PIECE_CHARS:
                if part:
                    pieces.append(part)
                continue
            start = 0
            while match := _CUT.search(part, start + PIECE_CHARS):
                pieces.append(part[start : match.start()])
                start = match.start()
            pieces.append(part[start:])
        return pieces

    def _encode_all(self, texts: list[str]) -> list[array[int]]:
        return [array(TOKEN_TYPECODE, [self._special[t]] if t in self._special else self._encode(t)) for t in texts]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _remember(self, pieces: list[str], new: dict[str, array[int]]) -> None:
        for piece in pieces:
            if piece in self._cache:
                self._cache.move_to_end(piece)
            elif piece in new:
                self._cache[piece] = new[piece]
                self._cached_chars += len(piece)
        while self._cached_chars > CACHE_CHARS:
            self._cached_chars -= len(self._cache.popitem(last=False)[0])

    def _load_template(self) -> Any:
        config_file = self.directory / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
        self._names = {key: config[key] for key in ("bos_token", "eos_token") if isinstance(config.get(key), str)}
        source = config.get("chat_template")
        template_file = self.directory / "chat_template.jinja"
        if template_file.exists():
            source = template_file.read_text(encoding="utf-8")
        if isinstance(source, list):  # several named templates
            source = next((t["template"] for t in source if t.get("name") == "default"), None)
        if not source:
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(source)

    def _whole_words(self) -> dict[int, str]:
        words: dict[int, str] = {}
        for token, token_id in sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1]):
            if _WORD.fullmatch(token):
                text = " " + token[1:]
                if not self._in_pieces or self._encode(text) == [token_id]:
                    words[token_id] = text
                if len(words) == OUTPUT_WORDS:
                    break
        if not words:
            raise ValueError(f"{self.directory / 'tokenizer.json'} has no token that is a whole word")
        return words


_CUT = re.compile(r"(?<=[A-Za-z0-9])(?=\n)")
_WORD = re.compile("[Ġ▁][a-z]{3,}")


def _refuse(message: str) -> None:
    raise TemplateError(message)
