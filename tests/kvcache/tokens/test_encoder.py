"""The ids are those of the model's own tokenizer, whichever way they are made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.kvcache.tokens.encoder import Encoder
from epp.kvcache.tokens.folder import ModelFolder, ModelFolderError, load_folder
from epp.kvcache.tokens.pieces import PieceCache
from epp.kvcache.tokens.samples import samples
from tests.kvcache.tokens import models

WORDS = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<s>", "hello", " world", "\n", "  ", "'s", "123", "é", "世界", "😀", "_", "\t", "A"]
)


def encoder(folder: ModelFolder, *, fast: bool = True) -> Encoder:
    return Encoder(folder, PieceCache(1 << 24), fast=fast)


def reference(folder: ModelFolder, text: str, *, special: bool = False) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_str(folder.tokenizer_json)
    return list(tokenizer.encode(text, add_special_tokens=special).ids)


SHIPPED, SLOW = encoder(models.shipped()), encoder(models.shipped(), fast=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=30).map("".join))
def test_fast_slow_and_whole_agree_on_any_text(text: str) -> None:
    (whole,) = SLOW.encode_apart([text])
    assert SHIPPED.encode(text, add_special_tokens=False).tolist() == whole.tolist()
    assert SLOW.encode(text, add_special_tokens=False).tolist() == whole.tolist()


def test_byte_level_bpe_with_one_split_runs_on_tiktoken_and_is_cut() -> None:
    assert (SHIPPED.slow_because, SHIPPED.whole_because) == ("", "")


def test_a_tokenizer_that_splits_three_times_is_run_by_its_own_library_and_cut() -> None:
    deepseek = encoder(models.deepseek())
    assert deepseek.slow_because == "its pre-tokenizer splits 3 times"
    assert deepseek.exact_pieces
    text = "<｜begin▁of▁sentence｜>You<｜User｜>in 2026: 1234567 世界 we've\n\n\tx<｜Assistant｜>"
    assert deepseek.encode(text, add_special_tokens=False).tolist() == reference(models.deepseek(), text)


@pytest.mark.parametrize("prepend", ["legacy", "always", "first"])
def test_sentencepiece_pieces_are_exact_with_their_special_token_in_front(prepend: str, tmp_path: Path) -> None:
    folder = models.write(tmp_path, models.sentencepiece(prepend).to_str())
    made = encoder(folder)
    assert made.slow_because
    assert made.whole_because == ""
    for text in samples(models.SPECIAL, seed=9, count=40):
        expected = reference(folder, text, special=True)
        assert made.encode(text, add_special_tokens=True).tolist() == expected


def test_a_kind_of_tokenizer_that_is_not_cut_is_encoded_whole_and_says_so(tmp_path: Path) -> None:
    spec = json.loads(models.sentencepiece("legacy").to_str())
    spec["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[t, -1.0] for t in spec["model"]["vocab"]]}
    folder = models.write(tmp_path, json.dumps(spec))
    made = encoder(folder)
    assert made.whole_because == "its model is of a kind that is not cut: Unigram"
    text = "a <|im_start|> b<|im_end|>c"
    assert made.encode(text, add_special_tokens=False).tolist() == reference(folder, text)


def test_where_pieces_differ_from_the_whole_on_sample_text_it_is_encoded_whole() -> None:
    spec = json.loads(models.shipped().tokenizer_json)
    spec["added_tokens"].append({"id": 4095, "content": "ello", "normalized": False})  # but the tokenizer has none
    made = encoder(dataclasses.replace(models.shipped(), tokenizer=spec), fast=False)
    assert made.whole_because == "the ids of pieces differ from those of the whole on sample text"
    assert made.encode("Hello", add_special_tokens=False).tolist() == reference(models.shipped(), "Hello")


def test_ids_that_do_not_follow_the_merges_are_mapped_back() -> None:
    spec = json.loads(models.shipped().tokenizer_json)
    vocabulary = spec["model"]["vocab"]
    plain = sorted(t for t in vocabulary if t not in {a["content"] for a in spec["added_tokens"]})
    numbers = sorted(vocabulary[t] for t in plain)
    vocabulary |= dict(zip(plain, numbers, strict=True))
    folder = dataclasses.replace(models.shipped(), tokenizer_json=json.dumps(spec), tokenizer=spec)
    made = encoder(folder)
    assert made.slow_because == ""
    text = "def main() -> None:\n    return  # done<|im_end|>"
    assert made.encode(text, add_special_tokens=False).tolist() == reference(folder, text)


def test_a_merge_table_that_tiktoken_reads_otherwise_is_found_out() -> None:
    spec = json.loads(models.shipped().tokenizer_json)
    spec["model"]["merges"] = spec["model"]["merges"][::-1]
    made = encoder(dataclasses.replace(models.shipped(), tokenizer_json=json.dumps(spec), tokenizer=spec))
    assert made.slow_because == "tiktoken gives other ids for sample text"


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        ({}, [1], []),
        ({"bos_token": "<s>", "add_bos_token": False}, [], []),
        (
            {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
            [1],
            [2],
        ),
        ({"add_bos_token": True}, [], []),
    ],
)
def test_special_tokens_around_a_completion_follow_the_configuration(
    config: dict[str, object], before: list[int], after: list[int], tmp_path: Path
) -> None:
    made = encoder(models.write(tmp_path, models.sentencepiece().to_str(), config=config))
    bare = made.encode("hello", add_special_tokens=False).tolist()
    assert made.encode("hello", add_special_tokens=True).tolist() == [*before, *bare, *after]


def test_a_piece_seen_before_is_not_encoded_again() -> None:
    made = encoder(models.shipped())
    first = made.encode("<|im_start|>a long text", add_special_tokens=False)
    misses = made.cache.misses
    assert made.uncached(["<|im_start|>a long text"]) == 0
    assert np.array_equal(made.encode("<|im_start|>a long text", add_special_tokens=False), first)
    assert made.cache.misses == misses


@pytest.mark.parametrize("fast", [True, False])
def test_half_a_surrogate_pair_is_an_error(fast: bool) -> None:
    with pytest.raises(UnicodeEncodeError):
        encoder(models.shipped(), fast=fast).encode("a\ud800", add_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json: is not JSON"),
        ("tokenizer.json", "[]", "tokenizer.json: must hold a JSON object"),
        ("tokenizer.json", '{"model": 3}', "tokenizer.json: is not a tokenizer"),
        ("tokenizer_config.json", "nonsense", "tokenizer_config.json: is not JSON"),
    ],
)
def test_a_broken_folder_names_the_file(name: str, text: str, message: str, tmp_path: Path) -> None:
    models.write(tmp_path, models.shipped().tokenizer_json)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelFolderError, match=message):
        encoder(load_folder(tmp_path))


def test_a_folder_without_tokenizer_json_says_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json: is missing; only tokenizers in that form are read"):
        load_folder(tmp_path)
