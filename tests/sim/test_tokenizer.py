"""The worker's tokenizer: pieces give the tokens of the whole, at the cost of what is new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from epp.sim import tokenizer as module
from epp.sim.tokenizer import SHIPPED, ChatTokenizer

WHOLE = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
SAMPLE = Path(module.__file__).read_text(encoding="utf-8")
shared = ChatTokenizer()
slices = st.integers(0, 9000).map(lambda n: SAMPLE[n : n + 5000])
texts = st.text() | st.text(alphabet="ab1 .\n\t'é<|im_start|>") | slices


@settings(max_examples=200, deadline=None)
@given(text=st.lists(texts, max_size=4).map("\n".join))
async def test_text_in_pieces_gives_the_tokens_of_the_whole_text(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_CHARS", 5)
        assert (await shared.encode(text)).tolist() == WHOLE.encode(text).ids


async def test_only_new_pieces_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ChatTokenizer()
    messages = [{"role": "user", "content": SAMPLE * 10}]
    encoded: list[str] = []
    original = tokenizer._encode

    def recorded(text: str) -> list[int]:
        encoded.append(text)
        return original(text)

    monkeypatch.setattr(tokenizer, "_encode", recorded)
    first = await tokenizer.encode(tokenizer.render_chat(messages))
    assert sum(map(len, encoded)) > len(SAMPLE)
    encoded.clear()
    messages += [{"role": "assistant", "content": "something new"}, {"role": "user", "content": "and a question"}]
    second = await tokenizer.encode(tokenizer.render_chat(messages))
    assert sum(map(len, encoded)) < 100
    assert second[: len(first)] == first


async def test_the_cache_stays_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHE_CHARS", 100)
    tokenizer = ChatTokenizer()
    for number in range(50):
        await tokenizer.encode(f"text number {number}")
    assert sum(map(len, tokenizer._cache)) <= 100
    assert await tokenizer.encode("text number 1") == await ChatTokenizer().encode("text number 1")


def test_output_words_are_tokens_that_their_own_text_encodes_to() -> None:
    words = shared.words
    assert len(words) > 500
    for token, text in words.items():
        assert WHOLE.encode(text).ids == [token]
    line = "".join(words.values())
    assert WHOLE.encode(line).ids == list(words)


def test_the_shipped_tokenizer_has_4096_tokens_and_the_chat_markers() -> None:
    assert WHOLE.get_vocab_size() == 4096
    assert WHOLE.token_to_id("<|im_start|>") == 3
    assert json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))["model"]["type"] == "BPE"


def test_the_template_carries_tools_and_tool_calls() -> None:
    call = {"function": {"name": "read", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    text = shared.render_chat(messages, tools=[{"name": "read"}], add_generation_prompt=False)
    assert text == (
        '<|im_start|>tools\n[{"name": "read"}]<|im_end|>\n'
        '<|im_start|>assistant\n[{"function": {"name": "read", "arguments": "{}"}}]<|im_end|>\n'
    )


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"cannot read the tokenizer {tmp_path}/tokenizer.json"):
        ChatTokenizer(tmp_path)


def test_a_template_may_refuse_messages_and_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="has no chat template"):
        ChatTokenizer(tmp_path).render_chat([])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system messages') }}")
    with pytest.raises(ValueError, match="no system messages"):
        ChatTokenizer(tmp_path).render_chat([])
