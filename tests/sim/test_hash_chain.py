"""Chained block hashes: a prompt's hashes do not depend on what was hashed before it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.sim import hash_chain
from epp.sim.hash_chain import HashChainCache

texts = st.lists(st.integers(0, 1), max_size=20)
prompts = st.lists(
    st.tuples(st.sampled_from([b"", b"lora"]), st.sampled_from([b"", b"salt"]), texts), min_size=1, max_size=12
)


def digests(cache: HashChainCache, every: bytes, first: bytes, tokens: list[int]) -> list[bytes]:
    return cache.digests(b"root", every, first, array("I", tokens))


@given(prompts)
def test_digests_are_the_same_with_and_without_a_history(prompts: list[tuple[bytes, bytes, list[int]]]) -> None:
    cache = HashChainCache(3)
    for every, first, tokens in prompts:
        expected = digests(HashChainCache(3), every, first, tokens)
        assert digests(cache, every, first, tokens) == expected
        assert len(expected) == len(tokens) // 3


def test_a_digest_stands_for_all_tokens_before_it_and_for_adapter_and_salt() -> None:
    cache = HashChainCache(2)
    base = digests(cache, b"", b"", [1, 2, 3, 4, 5, 6])
    changed = digests(cache, b"", b"", [1, 2, 3, 9, 5, 6])
    assert base[0] == changed[0]
    assert not set(base[1:]) & set(changed[1:])
    assert not set(base) & set(digests(cache, b"a", b"", [1, 2, 3, 4, 5, 6]))
    assert not set(base) & set(digests(cache, b"", b"s", [1, 2, 3, 4, 5, 6]))


def test_what_a_caller_does_to_its_digests_leaves_the_cache_alone() -> None:
    cache = HashChainCache(2)
    first = digests(cache, b"", b"", [1, 2, 3, 4])
    expected = first.copy()
    first.append(b"more")
    assert digests(cache, b"", b"", [1, 2, 3, 4]) == expected


def test_the_history_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_chain, "MAX_CHAINS", 3)
    monkeypatch.setattr(hash_chain, "MAX_BLOCKS", 10)
    cache = HashChainCache(1)
    for number in range(20):
        digests(cache, b"", b"", [number] * 4)
        assert sum(len(chain.digests) for chain in cache._chains) <= 10
    digests(cache, b"", b"", [7] * 50)
    assert len(cache._chains) == 1
