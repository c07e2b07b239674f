import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.growing import Growing
from epp.kvcache import blocks
from epp.kvcache.blocks import Keys, block_keys, request_keys, seed
from epp.request import InferenceRequest, PromptItem
from tests.pools import request

ANY = 1 << 31


def keys(item: PromptItem, size: int = 16, start: int = 7, limit: int = ANY) -> list[int]:
    return [int(k) for k in block_keys(item, size, start, limit=limit)]


def chain(asked: InferenceRequest, size: int = 16) -> Keys:
    return request_keys(asked, size, limit=ANY, max_items=8)[0]


@given(st.binary(max_size=400), st.binary(max_size=400), st.binary(max_size=400), st.sampled_from([1, 2, 3, 16]))
def test_prompts_share_exactly_the_keys_of_their_common_blocks(common: bytes, a: bytes, b: bytes, size: int) -> None:
    one, two = common + a, common + b
    first, second = keys(one, size), keys(two, size)
    width = size * 4
    pairs = zip(range(0, len(one) - width + 1, width), range(0, len(two) - width + 1, width), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda at: one[: at[0] + width] == two[: at[1] + width], pairs))
    assert first[:same] == second[:same]
    assert not set(first[same:]) & set(second[same:])


def test_a_million_blocks_have_a_million_keys() -> None:
    counter = np.arange(1_000_000 * 2, dtype=np.uint32)
    assert len(np.unique(block_keys(counter, 2, 1, limit=ANY))) == 1_000_000
    equal = np.zeros(1_000_000, dtype=np.uint32)
    assert len(np.unique(block_keys(equal, 1, 1, limit=ANY))) == 1_000_000


def test_texts_that_differ_in_two_high_bytes_do_not_meet() -> None:
    firsts = set()
    for a, b in itertools.product(range(256), range(256)):
        text = bytearray(64)
        text[7], text[15] = a, b
        firsts.add(keys(bytes(text))[0])
    assert len(firsts) == 65_536


def test_order_of_blocks_matters() -> None:
    a, b = b"a" * 64, b"b" * 64
    assert keys(a + b)[1] != keys(b + a)[1]
    assert not set(keys(a + b)) & set(keys(b + a))


def test_a_partial_last_block_has_no_key_and_a_short_prompt_none() -> None:
    assert keys(b"hi") == keys(b"") == keys(np.arange(15, dtype=np.uint32)) == []
    assert len(keys(b"x" * 127)) == 1
    assert len(keys(np.arange(33, dtype=np.uint32))) == 2


def test_the_limit_keeps_the_leading_keys() -> None:
    text = bytes(range(256)) * 4
    assert keys(text, limit=3) == keys(text)[:3]
    assert keys(text, limit=0) == keys(text, limit=-1) == []


@pytest.mark.parametrize("size", [1, 16, 64, 65])
def test_few_blocks_have_the_keys_that_they_have_among_many(size: int) -> None:
    text = bytes(np.random.default_rng(1).integers(0, 256, 4 * size * 10, dtype=np.uint8))
    ids = np.random.default_rng(2).integers(0, 1 << 32, size * 10, dtype=np.uint32)
    for item in (text, ids):
        many = block_keys(item, size, 1 << 63, limit=100)
        for limit in range(1, 6):
            assert block_keys(item, size, 1 << 63, limit=limit).tolist() == many[:limit].tolist()


@pytest.mark.parametrize("size", [1, 16, 100])
@pytest.mark.parametrize("limit", [1 << 31, 1000, 300])
def test_a_text_that_grew_has_the_keys_it_would_have_if_nobody_had_seen_its_beginning(
    size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(text: bytes, start: int, limit: int) -> list[int]:
        return list(map(int, block_keys(text, size, start, limit=limit)))

    text = np.random.default_rng(1).bytes(150_000)
    grown = [text[:end] for end in (20_000, 20_003, 21_000, 70_000, 70_400, 150_000, 70_001)]
    other = text[:70_000] + b"otherwise" * 2000
    monkeypatch.setattr(blocks, "_texts", Growing(1 << 24))
    followed = [keys(t, start, limit) for t in (*grown, other) for start in (7, 8)]
    alone = []
    for t in (*grown, other):
        for start in (7, 8):
            monkeypatch.setattr(blocks, "_texts", Growing(1 << 24))
            alone.append(keys(t, start, limit))
    assert followed == alone


def test_keys_that_are_remembered_cannot_be_changed() -> None:
    keys = block_keys(bytes(40_000), 16, 9, limit=1 << 31)
    with pytest.raises(ValueError, match="read-only"):
        keys[0] = 1


def test_token_ids_and_text_of_equal_words_are_different_prompts() -> None:
    ids = np.arange(16, dtype=np.uint32)
    assert keys(ids) != keys(ids.tobytes())


def test_keys_are_the_same_in_every_process() -> None:
    assert keys(b"0123456789abcdef" * 4) == [14_795_271_803_931_665_918]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"model": "base"}, {"model": "adapter-1"}),
        ({"cache_salt": "s1"}, {"cache_salt": "s2"}),
        ({"cache_salt": "s1"}, {"model": "s1"}),
        ({"model": "a", "cache_salt": "b"}, {"model": "ab"}),
        ({"model": "m", "target_model": "m-v1"}, {"model": "m", "target_model": "m-v2"}),
        ({"prompt_seed": b"tools A"}, {"prompt_seed": b"tools B"}),
        ({"prompt_seed": b"s1"}, {"cache_salt": "s1"}),
    ],
)
def test_model_adapter_salt_and_tools_each_have_their_own_chain(one: dict[str, Any], two: dict[str, Any]) -> None:
    text = b"the same prompt " * 40
    assert not set(chain(request(text, **one)).tolist()) & set(chain(request(text, **two)).tolist())


anything = st.text(st.characters(), max_size=6)


@given(st.lists(anything, min_size=3, max_size=3), st.lists(anything, min_size=3, max_size=3))
def test_seeds_are_equal_only_for_equal_parts(a: list[str], b: list[str]) -> None:
    first, second = (
        seed(model=x[0], salt=x[1], block_size=16, before=x[2].encode("utf-8", "surrogatepass")) for x in (a, b)
    )
    assert (first == second) == (a == b)


def test_requests_that_share_only_their_tools_match_that_far() -> None:
    tools = b"tool" * 100
    one, two = (chain(request(text * 64, prompt_seed=tools)) for text in (b"a", b"b"))
    assert one[:6].tolist() == two[:6].tolist()
    assert not set(one[6:].tolist()) & set(two[6:].tolist())


def test_each_prompt_of_a_list_has_its_own_keys() -> None:
    asked = request(b"a" * 64, b"b" * 128, b"hi")
    assert [len(k) for k in request_keys(asked, 16, limit=ANY, max_items=8)] == [1, 2, 0]
    assert len(request_keys(asked, 16, limit=ANY, max_items=2)) == 2
    assert request_keys(request(), 16, limit=ANY, max_items=2) == []
