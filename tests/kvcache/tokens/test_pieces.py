from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.kvcache.tokens.pieces import ENTRY_BYTES, Cutter, Ids, PieceCache


def added(*contents: str, **flags: bool) -> list[dict[str, object]]:
    return [{"content": content, "normalized": False, **flags} for content in contents]


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.uint32)


def test_each_piece_begins_with_its_special_token() -> None:
    cutter = Cutter(added("<a>", "<b>"))
    assert cutter.pieces("x<a>y<b><b>z") == ["x", "<a>y", "<b>", "<b>z"]


def test_the_longest_of_overlapping_tokens_is_found() -> None:
    assert Cutter(added("<a", "<a>")).pieces("x<a><a-") == ["x", "<a>", "<a-"]


def test_no_cut_before_a_token_that_takes_what_stands_before_it() -> None:
    assert Cutter([*added("<m>", lstrip=True), *added("<w>", single_word=True), *added("<a>")]).pieces(
        "x <m>y<w>z<a>"
    ) == ["x <m>y<w>z", "<a>"]


def test_tokens_matched_after_normalising_are_no_cuts() -> None:
    assert Cutter(added("<a>", normalized=True)).pieces("x<a>y") == ["x<a>y"]


def test_a_tokenizer_without_added_tokens_gives_one_piece() -> None:
    assert Cutter([]).pieces("abc") == ["abc"]
    assert Cutter([]).pieces("") == []


@given(st.text(alphabet="<ab>x", max_size=60))
def test_pieces_joined_are_the_text_and_a_start_at_a_cut_gives_the_rest(text: str) -> None:
    cutter = Cutter(added("<a>", "<b>", "<a><b>"))
    pieces = cutter.pieces(text)
    assert "".join(pieces) == text
    for index in range(1, len(pieces)):
        assert cutter.pieces(text, len("".join(pieces[:index]))) == pieces[index:]


def test_the_cache_gives_back_what_was_put_and_forgets_the_least_recently_used() -> None:
    cache = PieceCache(max_bytes=2 * (ENTRY_BYTES + 4))
    cache.put_many([(b"a", ids(1)), (b"b", ids(2))])
    assert cache.get_many([b"a"])[0] is not None
    cache.put_many([(b"c", ids(3))])
    assert [i is None for i in cache.get_many([b"a", b"b", b"c"])] == [False, True, False]
    assert cache.bytes == 2 * (ENTRY_BYTES + 4)


def test_a_piece_larger_than_the_cache_is_not_kept() -> None:
    cache = PieceCache(max_bytes=1000)
    cache.put_many([(b"a", np.zeros(1000, dtype=np.uint32))])
    assert (len(cache), cache.bytes) == (0, 0)


def test_putting_a_piece_twice_counts_once() -> None:
    cache = PieceCache(max_bytes=10_000)
    cache.put_many([(b"a", ids(1)), (b"a", ids(1))])
    assert cache.bytes == ENTRY_BYTES + 4


def test_names_differ_by_text_and_by_seed() -> None:
    assert len({PieceCache(1, seed).name(text) for seed in (1, 2) for text in ("a", "b")}) == 4
