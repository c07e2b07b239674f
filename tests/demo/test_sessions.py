"""The shipped sessions: prompts have the recorded lengths, and a turn repeats the bytes of the turn before it."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from epp.cli import main
from epp.demo.sessions import BLOCK_TOKENS, Session, SessionsError, Words, load, vocabulary

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


GOOD = b'{"id":"a","requests":[{"t":0,"out":1,"keep":0,"new":[[0,2]]}]}'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no session"),
        (b"nonsense", ":1: not a session: JSON is malformed"),
        (b"\x1f\x8b\x08garbage", "cannot be read: "),
        (gzip.compress(GOOD)[:-9], "cannot be read: "),
        (GOOD + b'\n{"id":"b"}', ":2: not a session: Object missing required field `requests`"),
        (b'{"id":"b","requests":[]}', "Expected `array` of length >= 1"),
        (GOOD.replace(b"[0,2]", b"[0,-2]"), "Expected `int` >= 0 - at `$.requests[0].new[0][1]`"),
        (GOOD.replace(b"[0,2]", b"[0,9999999999]"), "Expected `int` <= 1000000"),
        (GOOD.replace(b'"t":0', b'"t":"soon"'), "Expected `float`, got `str` - at `$.requests[0].t`"),
    ],
    ids=repr,
)
def test_a_file_that_holds_no_sessions_is_an_error_that_names_the_line(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_bytes(content)
    with pytest.raises(SessionsError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert problem in str(caught.value)
    done = CliRunner().invoke(main, ["demo", "--sessions", str(path)])
    assert (done.exit_code, done.output) == (1, f"Error: {caught.value}\n")


def test_a_file_of_the_same_form_is_read_plain_or_packed(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    for content in (GOOD, gzip.compress(GOOD + b"\n")):
        path.write_bytes(content)
        assert [len(s.turns) for s in load(path)] == [1]
