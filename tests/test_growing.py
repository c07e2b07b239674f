import pytest

from epp import growing
from epp.growing import STRIDE, Growing

TEXT = bytes(range(256)) * 1024


def test_a_text_finds_the_longest_beginning_that_is_known() -> None:
    known: Growing[str] = Growing(1 << 20)
    known.remember(TEXT, 20_000, "short", 0)
    known.remember(TEXT, 70_001, "long", 0)
    assert known.find(TEXT) == (70_001, "long")
    assert known.find(TEXT[:70_001]) == (70_001, "long")
    assert known.find(TEXT[:70_000]) == (20_000, "short")
    assert known.find(TEXT[:19_999]) is None


def test_one_different_byte_anywhere_in_a_beginning_is_seen() -> None:
    known: Growing[str] = Growing(1 << 20)
    known.remember(TEXT, 70_001, "it", 0)
    for at in (0, 1, 33_333, STRIDE * 4 - 1, STRIDE * 4, 70_000):
        other = TEXT[:at] + bytes((TEXT[at] ^ 1,)) + TEXT[at + 1 :]
        assert known.find(other) is None, at
    assert known.find(TEXT[:70_001] + b"anything") == (70_001, "it")


def test_beginnings_of_another_seed_are_others() -> None:
    known: Growing[int] = Growing(1 << 20)
    known.remember(TEXT, STRIDE, 1, 0, seed=1)
    known.remember(TEXT, STRIDE, 2, 0, seed=2)
    assert known.find(TEXT, seed=1) == (STRIDE, 1)
    assert known.find(TEXT, seed=2) == (STRIDE, 2)
    assert known.find(TEXT) is None


def test_texts_too_short_to_be_worth_it_are_not_kept() -> None:
    known: Growing[str] = Growing(1 << 20)
    known.remember(TEXT, STRIDE - 1, "it", 0)
    assert known.find(TEXT) is None
    assert known.bytes == 0


def test_what_was_used_longest_ago_is_forgotten_beyond_the_bound() -> None:
    known: Growing[int] = Growing(30_000)
    texts = [bytes((n,)) * STRIDE for n in range(4)]
    for n in (0, 1, 2):
        known.remember(texts[n], STRIDE, n, 9_000)
    assert known.find(texts[0]) == (STRIDE, 0)
    known.remember(texts[3], STRIDE, 3, 9_000)
    assert [known.find(text) is not None for text in texts] == [True, False, True, True]
    assert known.bytes <= known.max_bytes
    known.remember(texts[3], STRIDE, 3, 40_000)
    assert known.bytes == 0


def test_a_text_that_repeats_itself_asks_for_few_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Growing[int] = Growing(1 << 20)
    text = b"a" * (STRIDE * 40)
    for at in range(1, 40):
        known.remember(b"b" + text[1:], at * STRIDE, at, 0)
    taken: list[int] = []
    digest = growing._digest

    def counted(text: bytes, length: int) -> int:
        taken.append(length)
        return digest(text, length)

    monkeypatch.setattr(growing, "_digest", counted)
    assert known.find(text) is None
    assert len(taken) == 4
