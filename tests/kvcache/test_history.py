import tracemalloc
from collections import OrderedDict
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.kvcache.blocks import Keys, block_keys
from epp.kvcache.history import LANDMARK, LANDMARK_BYTES, History

ROOMY = 1 << 30


def chain(*words: int) -> Keys:
    """Keys of a prompt with one word a block."""
    return block_keys(np.array(words, dtype=np.uint32), 1, 0, limit=1 << 31)


def long(start: int, count: int) -> Keys:
    return chain(*range(start, start + count))


class PerBlockLRU:
    """The plain model: one ordered dict of blocks per endpoint; a use touches the last block first."""

    def __init__(self) -> None:
        self.blocks: dict[str, OrderedDict[int, None]] = {}

    def insert(self, endpoint: str, keys: Keys, capacity: int) -> None:
        held = self.blocks.setdefault(endpoint, OrderedDict())
        for key in reversed(keys.tolist()):
            held[key] = None
            held.move_to_end(key)
        while len(held) > capacity:
            held.popitem(last=False)

    def match(self, keys: Keys) -> dict[str, int]:
        found = {}
        for endpoint, held in self.blocks.items():
            count = 0
            while count < len(keys) and keys.item(count) in held:
                count += 1
            if count:
                found[endpoint] = count
        return found


words = st.lists(st.integers(0, 2), min_size=1, max_size=9)
steps = st.lists(st.tuples(st.sampled_from("abc"), words, st.sampled_from(["insert"] * 9 + ["remove"])), max_size=40)


@settings(max_examples=400)
@given(steps, st.sampled_from([1, 3, 8, 20, 1000]))
def test_the_history_equals_a_per_block_lru(steps: list[tuple[str, list[int], str]], capacity: int) -> None:
    history, model = History[str](ROOMY), PerBlockLRU()
    for endpoint, prompt, what in steps:
        keys = chain(*prompt)
        if what == "remove":
            history.remove(endpoint)
            model.blocks.pop(endpoint, None)
        else:
            history.insert(endpoint, keys, capacity)
            model.insert(endpoint, keys, capacity)
        for _, other, _ in steps:
            assert history.match(chain(*other)) == model.match(chain(*other))
        assert {e: history.held(e) for e in model.blocks} == {e: len(held) for e, held in model.blocks.items()}
    for endpoint in "abc":
        history.remove(endpoint)
    assert (history.bytes, len(history)) == (0, 0)


@settings(max_examples=200)
@given(steps, st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_a_retracted_insertion_leaves_what_was_known_before(
    steps: list[tuple[str, list[int], str]], prompt: list[int]
) -> None:
    history = History[str](ROOMY)
    for endpoint, other, _ in steps:
        history.insert(endpoint, chain(*other), 1000)
    probes = [chain(*other) for _, other, _ in steps] + [chain(*prompt)]
    before = [history.match(p) for p in probes]
    keys = chain(*prompt)
    token = history.insert("a", keys, 1000)
    history.retract("a", keys, token, keep=before[-1].get("a", 0))
    assert [history.match(p) for p in probes] == before


def test_blocks_used_again_survive_the_retraction_of_the_first_use() -> None:
    history = History[str](ROOMY)
    token = history.insert("a", chain(1, 2, 3), 100)
    history.insert("a", chain(1, 2, 3, 4), 100)
    history.retract("a", chain(1, 2, 3), token, keep=0)
    assert history.match(chain(1, 2, 3, 4)) == {"a": 4}


def test_a_match_is_contiguous_from_the_first_block() -> None:
    history = History[str](ROOMY)
    history.insert("a", chain(1, 2, 3), 100)
    assert history.match(chain(9, 2, 3)) == {}
    assert history.match(chain(1, 2, 9)) == {"a": 2}


def test_a_growing_session_stays_one_run() -> None:
    history, size = History[str](ROOMY), 1000
    for turn in range(100):
        history.insert("a", long(0, size + 10 * turn), 1 << 30)
    assert history.match(long(0, 5000)) == {"a": 1990}
    assert history.bytes < 1990 * 8 * 1.2 + 1000 + 1990 // LANDMARK * LANDMARK_BYTES


def test_an_endpoint_keeps_its_share_whatever_others_do() -> None:
    history = History[str](ROOMY)
    history.insert("a", long(0, 50), 50)
    for i in range(20):
        history.insert("b", long(1000 * i + 1000, 50), 50)
    assert history.match(long(0, 50)) == {"a": 50}
    assert history.held("b") == 50


def test_a_prompt_larger_than_the_cache_leaves_its_beginning() -> None:
    history = History[str](ROOMY)
    history.insert("a", long(0, 500), 100)
    assert history.match(long(0, 500)) == {"a": 100}


def test_a_million_distinct_blocks_stay_below_the_cap_and_the_oldest_are_gone() -> None:
    cap, blocks = 2 << 20, 1000
    history = History[int](cap)
    prompts = [np.arange(blocks, dtype=np.uint32) + np.uint32(blocks * i) for i in range(1000)]
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    for i, prompt in enumerate(prompts):
        history.insert(i % 7, block_keys(prompt, 1, 0, limit=blocks), 1 << 30)
        assert history.bytes <= cap
    used = tracemalloc.get_traced_memory()[0] - base
    tracemalloc.stop()
    assert used < cap * 1.1
    assert history.match(block_keys(prompts[0], 1, 0, limit=blocks)) == {}
    assert history.match(block_keys(prompts[-1], 1, 0, limit=blocks)) == {999 % 7: blocks}
    assert history.evicted_blocks > 700_000


def test_the_byte_estimate_covers_a_forest_of_short_prompts_at_many_endpoints() -> None:
    history = History[int](ROOMY)
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    for i in range(3000):
        for endpoint in range(3):
            history.insert(endpoint, chain(1, 2, i, 3), 1 << 30)
    used = tracemalloc.get_traced_memory()[0] - base
    tracemalloc.stop()
    assert 0.6 * history.bytes < used < 1.1 * history.bytes


def test_removing_an_endpoint_forgets_it_alone() -> None:
    history = History[str](ROOMY)
    for endpoint in "ab":
        history.insert(endpoint, chain(1, 2, 3), 100)
    history.insert("a", chain(1, 5), 100)
    history.remove("a")
    history.remove("never seen")
    assert history.match(chain(1, 2, 3)) == {"b": 3}
    assert history.match(chain(1, 5)) == {"b": 1}
    assert history.held("a") == 0


def test_nothing_to_insert_changes_nothing() -> None:
    history = History[str](ROOMY)
    history.insert("a", chain(), 10)
    history.insert("a", chain(1), 0)
    assert history.match(chain()) == history.match(chain(1)) == {}
    assert history.bytes == 0


@settings(max_examples=300)
@given(steps, st.sampled_from([3, 8, 1000]))
def test_every_landmark_that_is_held_leads_to_its_chain_and_no_other_does(
    steps: list[tuple[str, list[int], str]], capacity: int
) -> None:
    with mock.patch("epp.kvcache.history.LANDMARK", 2):
        history, seen = History[str](ROOMY), {}
        for endpoint, prompt, what in steps:
            keys = chain(*prompt)
            seen.update({(depth, keys.item(depth - 1)): keys[:depth] for depth in range(2, len(keys) + 1, 2)})
            if what == "remove":
                history.remove(endpoint)
            else:
                history.insert(endpoint, keys, capacity)
            for (depth, key), expected in seen.items():
                found = history.chain(depth, key)
                held = max(history.match(expected).values(), default=0) == depth
                assert (found is not None) == held
                if found is not None:
                    assert found.tolist() == expected.tolist()
        for endpoint in "abc":
            history.remove(endpoint)
        assert history.bytes == 0


@settings(max_examples=200)
@given(steps)
def test_a_history_made_of_anothers_chains_matches_and_forgets_alike(steps: list[tuple[str, list[int], str]]) -> None:
    history, copy = History[str](ROOMY), History[str](ROOMY)
    for endpoint, prompt, _ in steps:
        history.insert(endpoint, chain(*prompt), 8)
    for endpoint in "abc":
        for keys in list(history.chains(endpoint)):
            copy.insert(endpoint, keys, 8)
    for capacity in (8, 5, 2):  # the same are the first to go
        for endpoint in {endpoint for endpoint, _, _ in steps}:
            for each in (history, copy):
                each.insert(endpoint, chain(9), capacity)
        for _, prompt, _ in steps:
            assert copy.match(chain(*prompt)) == history.match(chain(*prompt))
