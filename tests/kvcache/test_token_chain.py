"""The chain of token blocks: `token_root` and `extend`."""

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.kvcache.blocks import extend, extend_each, token_root

ROOT = token_root(model="m", adapter="", salt="")


def keys(ids: list[int], size: int, parent: int = ROOT, extras: dict[int, bytes] | None = None) -> list[int]:
    return [int(k) for k in extend(parent, np.array(ids, dtype=np.uint32), size, extras)]


tokens = st.lists(st.integers(0, 3) | st.integers(0, (1 << 32) - 1), max_size=80)
sizes = st.sampled_from([1, 2, 3, 16])


@given(tokens, tokens, sizes, st.integers(0, (1 << 64) - 1))
def test_a_chain_continues_from_a_bare_key(a: list[int], b: list[int], size: int, parent: int) -> None:
    a = a[: len(a) // size * size]
    first = keys(a, size, parent)
    assert keys(a + b, size, parent) == first + keys(b, size, first[-1] if first else parent)


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=9), sizes, st.randoms(use_true_random=False))
def test_single_blocks_of_many_chains_have_the_keys_of_each(parents: list[int], size: int, random: Random) -> None:
    blocks = [[random.randrange(1 << 32) for _ in range(size)] for _ in parents]
    matrix = np.array(blocks, dtype=np.uint32).reshape(len(parents), size)
    each = extend_each(np.array(parents, dtype=np.uint64), matrix)
    assert each.tolist() == [key for p, block in zip(parents, blocks, strict=True) for key in keys(block, size, p)]


def test_a_long_chain_continues_anywhere() -> None:
    ids = np.random.default_rng(1).integers(0, 150_000, 30_000, dtype=np.uint32)
    whole = extend(ROOT, ids, 2)
    assert len(whole) == 15_000
    for cut in (1, 4095, 4096, 4097, 14_999):
        rest = extend(whole.item(cut - 1), ids[2 * cut :], 2)
        assert rest.tolist() == whole[cut:].tolist()


def test_a_chain_is_the_recurrence_block_by_block() -> None:
    ids = np.arange(20_000, dtype=np.uint32)
    parent, one_by_one = ROOT, []
    for at in range(0, 20_000, 4):
        parent = extend(parent, ids[at : at + 4], 4).item(0)
        one_by_one.append(parent)
    assert extend(ROOT, ids, 4).tolist() == one_by_one


@given(tokens, tokens, tokens, sizes)
def test_prompts_share_exactly_the_keys_of_their_common_blocks(
    common: list[int], a: list[int], b: list[int], size: int
) -> None:
    one, two = common + a, common + b
    first, second = keys(one, size), keys(two, size)
    ends = range(size, min(len(one), len(two)) + 1, size)
    same = sum(1 for _ in itertools.takewhile(lambda end: one[:end] == two[:end], ends))
    assert first[:same] == second[:same]
    assert not set(first[same:]) & set(second[same:])


def test_equal_blocks_at_different_places_have_different_keys() -> None:
    assert len(set(extend(ROOT, np.zeros(1_000_000, dtype=np.uint32), 1).tolist())) == 1_000_000
    a, b = [1] * 16, [2] * 16
    assert not set(keys(a + b, 16)) & set(keys(b + a, 16))


def test_a_million_blocks_have_a_million_keys() -> None:
    assert len(np.unique(extend(ROOT, np.arange(2_000_000, dtype=np.uint32), 2))) == 1_000_000
    children = [keys([i], 1, ROOT)[0] for i in range(5_000)]
    assert len(set(children)) == 5_000


def test_a_partial_last_block_has_no_key() -> None:
    assert keys([], 16) == keys([1] * 15, 16) == []
    assert len(keys([1] * 33, 16)) == 2
    assert len(keys([1] * 4097, 4096)) == 1


def test_blocks_of_another_size_have_other_keys() -> None:
    assert keys([7] + [0] * 15, 16) != keys([7] + [0] * 31, 32)
    assert keys([0], 1) != keys([0, 0], 2)


def test_media_change_the_keys_of_their_block_and_of_all_after() -> None:
    ids = list(range(64))
    plain = keys(ids, 16)
    one, two = (keys(ids, 16, extras={1: media}) for media in (b"image A", b"image B"))
    assert plain[0] == one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])
    assert not set(one[1:]) & set(plain[1:])
    assert keys(ids[16:], 16, plain[0], {0: b"image A"}) == one[1:]
    assert keys(ids[16:32], 16, plain[0], {0: b"image A"}) == one[1:2]
    assert keys(ids, 16, extras={4: b"beyond the last block"}) == plain


def test_media_are_found_in_a_late_chunk() -> None:
    ids = np.zeros(10_000, dtype=np.uint32)
    plain, image = extend(ROOT, ids, 1), extend(ROOT, ids, 1, {8000: b"x"})
    assert (plain == image).tolist() == [True] * 8000 + [False] * 2000


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("base", "", ""), ("base", "adapter-1", "")),
        (("base", "s1", ""), ("base", "", "s1")),
        (("s1", "", ""), ("", "s1", "")),
        (("a", "b", ""), ("ab", "", "")),
        (("m", "", "s1"), ("m", "", "s2")),
    ],
)
def test_model_adapter_and_salt_each_have_their_own_chain(one: tuple[str, ...], two: tuple[str, ...]) -> None:
    first, second = (token_root(model=m, adapter=a, salt=s) for m, a, s in (one, two))
    assert not set(keys([1] * 64, 16, first)) & set(keys([1] * 64, 16, second))


def test_keys_are_the_same_in_every_process() -> None:
    assert keys(list(range(32)), 16) == [11_973_904_449_390_955_265, 15_001_732_824_364_800_728]


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block size 0 is below 1"):
        keys([1], 0)
