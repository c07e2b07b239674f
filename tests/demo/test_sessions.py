"""The shipped sessions: prompts have the recorded lengths, and a turn repeats the bytes of the turn before it."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer

from epp.demo.sessions import BLOCK_TOKENS, Session, Words, load, vocabulary

TOKENIZER = Tokenizer.from_str(files("epp.sim").joinpath("data/tokenizer.json").read_text(encoding="utf-8"))


def session(*requests: tuple[int, list[list[int]]]) -> Session:
    return Session("s", [{"t": i, "out": 8, "keep": keep, "new": new} for i, (keep, new) in enumerate(requests)])


def test_every_word_is_one_token_with_a_space_before_it() -> None:
    assert len(vocabulary()) > 500
    encoded = TOKENIZER.encode_batch([f" {w}" for w in vocabulary()])
    assert [w for w, e in zip(vocabulary(), encoded, strict=True) if len(e.ids) != 1] == []


def test_a_block_of_text_has_the_recorded_number_of_tokens() -> None:
    assert len(TOKENIZER.encode(Words("s").text(range(10))).ids) == 10 * BLOCK_TOKENS


def test_a_turn_adds_a_message_to_those_before_it() -> None:
    first, second = session((0, [[1, 4]]), (4, [[5, 2]])).turns
    assert second.messages[:1] == first.messages
    assert len(second.messages) == 2
    assert (first.prompt_tokens, second.prompt_tokens) == (4 * BLOCK_TOKENS, 6 * BLOCK_TOKENS)


def test_a_turn_that_keeps_less_cuts_the_old_message_where_the_kept_blocks_end() -> None:
    first, second = session((0, [[1, 4]]), (3, [[9, 1]])).turns
    assert first.messages[0].startswith(second.messages[0])
    assert len(TOKENIZER.encode(second.messages[0]).ids) == 3 * BLOCK_TOKENS


def test_sessions_share_no_text() -> None:
    assert Words("a").text([1]) != Words("b").text([1])


def test_the_shipped_sample_repeats_most_of_what_it_sends() -> None:
    sessions = load()
    assert len(sessions) == 16
    turns = [t for s in sessions for t in s.turns]
    assert all(11_000 <= t.prompt_tokens <= 48_000 for t in turns)
    total = sum(t.prompt_tokens for t in turns)
    last = sum(max(t.prompt_tokens for t in s.turns) for s in sessions)
    assert last / total < 0.1


def test_a_file_of_the_same_form_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"id": "x", "requests": [{"t": 0, "out": 1, "keep": 0, "new": [[1, 2]]}]}) + "\n")
    (own,) = load(path)
    assert own.turns[0].prompt_tokens == 2 * BLOCK_TOKENS
